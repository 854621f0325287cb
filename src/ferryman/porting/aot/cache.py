"""What was compiled before, on disk by content: the kernel with all that is compiled in, its target, the toolchain."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ferryman import backends, files
from ferryman.backends.simt.launcher import cache_directory
from ferryman.dispatch.whole_file import write_whole

_MOST_BYTES = 64 * 2**20
_DIGEST = hashlib.sha256().digest_size
# What compiles, and reads what was compiled: a change of these makes every entry old.
_READERS = (
    "triton.py",
    "triton_host.py",
    "triton_runtime.py",
    "triton_resources.py",
    "triton_artefacts.py",
    "code_objects.py",
    "cuda.py",
    "simt_offline.py",
    "simt/resources.py",
)


class DamagedEntry(Exception):
    """An entry is not what was written; its text says which file and what is wrong."""


def folder() -> Path:
    """Where entries lie: beside the images of SIMT kernels (the setting ``cache_dir``). Raises SettingError."""
    return cache_directory().parent / "aot"


def key(kernel_key: str, backend: str, arch: str) -> str:
    """An entry's name."""
    versions = json.dumps(toolchain(backend, arch), sort_keys=True)
    return hashlib.sha256("\0".join((kernel_key, backend, arch, versions, _form())).encode()).hexdigest()


def get(name: str) -> tuple[dict[str, Any], bytes] | None:
    """(facts, image) of an entry; None where there is none. Raises DamagedEntry."""
    path = _path(name)
    for place in (folder().parent, folder(), path.parent):
        why = files.distrusted(place)
        if why is not None:
            raise DamagedEntry(f"{path} is not used: {why}")
    try:
        data = files.read(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedEntry(f"{path} cannot be read ({error.strerror})") from error
    digest, body = data[:_DIGEST], data[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedEntry(f"{path} is damaged: {len(data)} bytes whose hash is not the one at their head")
    head, _, image = body.partition(b"\n")
    try:
        facts = files.parse(head)
    except (ValueError, RecursionError) as error:
        raise DamagedEntry(f"{path} is damaged: its head is not JSON ({str(error)[:100]})") from error
    if not isinstance(facts, dict):
        raise DamagedEntry(f"{path} is damaged: its head is no JSON object")
    return facts, image


def put(name: str, facts: dict[str, Any], image: bytes) -> None:
    """Keeps an entry, whole or not at all. Raises OSError."""
    body = json.dumps(facts).encode() + b"\n" + image
    write_whole(_path(name), hashlib.sha256(body).digest() + body)


def _path(name: str) -> Path:
    return folder() / name[:2] / name


@functools.cache
def toolchain(backend: str, arch: str) -> dict[str, str]:
    """Versions of what compiles for ``arch``. Raises BackendUnavailable where it is not installed."""
    if backend == "triton":
        versions = {"triton": metadata.version("triton")}
        if arch.startswith("sm_"):
            versions["ptxas"] = _ptxas()
        return versions
    if backend == "cuda":
        from ferryman.backends.cuda import OPTIONS
        from ferryman.backends.nvrtc import nvrtc

        return {"nvrtc": ".".join(map(str, nvrtc().version())), "nvrtc options": " ".join(OPTIONS)}
    from ferryman.backends import simt_offline

    simt_offline.tools()  # raises where a package is missing
    return {package: metadata.version(package) for package in ("ziglang", "triton")}


@functools.cache
def _ptxas() -> str:
    import triton

    path = triton.knobs.nvidia.ptxas.path
    text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    return text.strip().splitlines()[-1]


@functools.cache
def _form() -> str:
    root = Path(backends.__path__[0])
    return hashlib.sha256(b"\0".join((root / name).read_bytes() for name in _READERS)).hexdigest()
