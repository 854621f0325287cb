"""Triton's own C modules on the host, built ahead of time: its driver's, and a launcher for each signature.

Without them the first launch of a kernel that is served by an artefact would still call the host's C compiler, which a
deployment may not have. NVIDIA's alone: AMD's name the place of a library on the machine that they are built on.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ferryman.backends import artefacts
from ferryman.backends.triton_runtime import release
from ferryman.errors import CompileError

DRIVER, LAUNCHER = "cuda_utils", "__triton_launcher"  # Triton's names
_LIBRARY = "libcuda.so.1"


def abi() -> str:
    """What a C module is built for: this Python and platform, as "cpython-312-x86_64-linux-gnu"."""
    return str(sysconfig.get_config_var("SOABI"))


def digest(text: str) -> str:
    """The key of a C module: Triton builds the same one wherever its text is the same."""
    return hashlib.sha256(text.encode()).hexdigest()


def texts(source: Any) -> dict[str, str]:
    """The C modules that a launch of ``source`` (an ASTSource for NVIDIA) goes through: name -> C text.

    None of another Triton than 3.6, which builds what it needs by itself. Not those of tensor descriptors made on the
    host, whose launcher depends on how the kernel was lowered.
    """
    import triton
    from triton.backends.nvidia import driver

    if release(triton.__version__) != (3, 6) or any(
        str(kind).startswith("tensordesc") for kind in source.signature.values()
    ):
        return {}
    return {DRIVER: _driver(), LAUNCHER: driver.make_launcher(source.constants, dict(source.signature), None)}


@lru_cache(maxsize=1)
def _driver() -> str:
    from triton.backends.nvidia import driver

    return Path(driver.dirname, "driver.c").read_text()


def build(name: str, text: str) -> bytes:
    """The shared object of a C module, by the compiler that Triton would take; NVIDIA's driver need not be installed.

    Raises CompileError: there is no C compiler, or it failed.
    """
    from triton.backends.nvidia import driver

    with tempfile.TemporaryDirectory(prefix="ferryman-host-") as place:
        folder = Path(place)
        try:
            # A library of the driver's name with nothing in it: the module asks for the real one when it is loaded.
            (folder / "empty.c").write_text("")
            stub = _compiled("empty", folder / "empty.c", folder, flags=[f"-Wl,-soname,{_LIBRARY}"])
            stub.rename(folder / _LIBRARY)
            source = folder / f"{name}.c"
            source.write_text(text)
            linked = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{_LIBRARY}"]
            return _compiled(name, source, folder, driver.include_dirs, linked).read_bytes()
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            raise CompileError("triton", name, abi(), f"{type(error).__name__}: {error}") from error


def _compiled(
    name: str,
    source: Path,
    folder: Path,
    includes: Sequence[str] = (),
    flags: Sequence[str] = (),
    directories: Sequence[str] = (),
    libraries: Sequence[str] = (),
) -> Path:
    """Triton's own build step."""
    from triton import knobs
    from triton.runtime import build as step

    with knobs.build.scope():
        knobs.build.impl = None
        library = step._build(
            name, str(source), str(folder), list(directories), list(includes), list(libraries), list(flags)
        )
    return Path(library)


def serve() -> None:
    """From now on Triton takes C modules from the artefacts, and builds what they lack in the user's way or its own.

    What it is given it keeps in its cache, as what it builds. Without modules in the folder nothing is changed.
    """
    from triton import knobs

    store = artefacts.store()
    if store is not None and store.manifest.modules and not isinstance(knobs.build.impl, _Served):
        knobs.build.impl = _Served(knobs.build.impl)


class _Served:
    """Triton's hook for building: ``before`` is what stood there."""

    def __init__(self, before: Callable[..., str] | None) -> None:
        self.before = before

    def __call__(
        self,
        name: str,
        src: str,
        srcdir: str,
        library_dirs: list[str],
        include_dirs: list[str],
        libraries: list[str],
        /,
    ) -> str:
        key = digest(Path(src).read_text())
        store = artefacts.store()
        image = None if store is None else store.module(name, key, abi())
        if store is not None and image is not None:
            path = Path(srcdir) / f"{name}.ferryman.so"
            path.write_bytes(image)
            why = _unloadable(path)
            if why is None:
                return str(path)
            store.warn_of_module(name, key, why)
        if self.before is not None:
            return self.before(name, src, srcdir, library_dirs, include_dirs, libraries)
        return str(_compiled(name, Path(src), Path(srcdir), include_dirs, (), library_dirs, libraries))


def _unloadable(path: Path) -> str | None:
    """Why this process cannot load a shared object (another libc, say); None where it can."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return None
