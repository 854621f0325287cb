"""`ferryman doctor`: versions, drivers, caches, settings, and why each backend is or is not usable here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import ferryman
from ferryman import files, settings
from ferryman.backends.simt.launcher import cache_directory
from ferryman.cli import doctor_ops, output
from ferryman.device_profiles import Profile, catalogue, loading
from ferryman.dispatch import lockfile, proposals, registry
from ferryman.errors import LockfileError, SettingError
from ferryman.porting.tune.check import check

PACKAGES = (
    "ferryman",
    "torch",
    "triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "numpy",
    "transformers",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "hip-python",
    "ziglang",
    "msgpack",
    "pydantic",
    "rich",
    "typer",
)
_DRIVERS = {"nvidia": Path("/proc/driver/nvidia/version"), "amdgpu": Path("/sys/module/amdgpu/version")}
_MOST_FILES = 50_000  # a cache is measured up to here


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Versions, drivers, devices, backends, caches and settings, with what to do about what is missing."""
    facts = examine()
    if as_json:
        output.json_document(facts)
        return
    for title, rows in (("versions", facts["versions"]), ("drivers", facts["drivers"])):
        output.table((title, ""), list(rows.items()))
        output.say()
    devices = [(d["device"], d["profile"], d["arch"], "; ".join(d["notes"]) or "-") for d in facts["devices"]]
    output.table(("device", "profile", "arch", "notes"), devices)
    output.say()
    rows = []
    for b in facts["backends"]:
        first, *others = b["reasons"] or ["-"]
        rows += [(b["backend"], b["vendor"], b["verdict"], first), *(("", "", "", reason) for reason in others)]
    output.table(("backend", "devices", "usable", "because"), rows)
    output.say()
    output.table(
        ("measured choices", "of", "hold here", "ignored because"), [tuple(c.values()) for c in facts["choices"]]
    )
    output.say()
    caches = [(c["cache"], c["path"], str(c["files"]), output.size(c["bytes"]), c["problem"]) for c in facts["caches"]]
    output.table(("cache", "path", "files", "size", "problem"), caches)
    output.say()
    output.table(("setting", "value", "from"), [(s["variable"], s["value"], s["origin"]) for s in facts["settings"]])
    if facts["broken"]:
        output.say()
        output.table(("left out or wrong", "because"), [tuple(b.values()) for b in facts["broken"]])
    if facts["advice"]:
        output.say()
        for advice in facts["advice"]:
            output.say(f"advice: {advice}")


def examine() -> dict[str, Any]:
    """Everything that doctor reports, as plain data. No kernel is compiled or launched, and nothing is written.
    The definitions of other packages' ops run, once each, on the CPU."""
    here = ferryman.devices()
    versions = _versions()
    return {
        "versions": versions,
        "drivers": _drivers(),
        "devices": [
            {"device": p.title, "profile": p.name, "arch": p.arch, "generic": p.generic, "notes": list(p.notes)}
            for p in here
        ],
        "backends": _backends(here),
        "choices": [_choices(p) for p in here],
        "caches": [_cache(name, path) for name, path in _caches().items()],
        "settings": _settings(),
        "broken": [{"entry": name, "reason": reason} for name, reason in _broken().items()],
        "advice": _advice(versions, here),
    }


def _versions() -> dict[str, str]:
    versions = {"python": f"{platform.python_version()} ({sys.executable})", "system": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["ferryman"], versions["torch"] = ferryman.__version__, str(torch.__version__)
    built = torch.version.cuda or torch.version.hip
    kind = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else ""
    versions["torch is built for"] = f"{kind} {built}" if built else "the CPU"
    return versions


def _drivers() -> dict[str, str]:
    drivers: dict[str, str] = {}
    for name, path in _DRIVERS.items():
        if path.exists():
            drivers[name] = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[0]
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        command = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            drivers["nvidia-smi"] = f"failed: {error}"
        else:
            drivers["nvidia-smi"] = (done.stdout if done.returncode == 0 else done.stderr).strip().replace("\n", "; ")
    drivers["torch sees"] = f"{torch.cuda.device_count()} accelerators"
    return drivers


def _backends(here: list[Profile]) -> list[dict[str, Any]]:
    """Each backend for each vendor that is here; a backend for other vendors is asked about its own."""
    vendors = list(dict.fromkeys(p.vendor for p in here))
    rows = []
    for name, backend in registry.backends().items():
        if name == "definition":
            continue
        for vendor in [v for v in vendors if v in backend.vendors] or sorted(backend.vendors):
            reasons = list(registry.probe(name, vendor))
            verdict = "no" if reasons else "yes"
            rows.append({"backend": name, "vendor": vendor, "verdict": verdict, "reasons": reasons})
    return rows


def _broken() -> dict[str, str]:
    """What other packages would add and cannot, and kernels, ours too, that cannot be imported; all is read for it."""
    registry.evidences(), registry.backends(), catalogue()
    profiles = {f"profiles {name}": reason for name, reason in loading.broken().items()}
    proposals.ask()
    faults = _faults()  # first: it makes cases, and those that cannot be made are left out
    return {**registry.broken(), **profiles, **faults}


def _faults() -> dict[str, str]:
    """What cannot be used: kernels that cannot be imported; of other packages' ops, what else fails (`doctor_ops`)."""
    faults: dict[str, str] = {}
    vendors = {profile.vendor for profile in ferryman.devices()}
    for op in registry.primitives().values():
        if not registry.family_of(op).ours:
            faults |= doctor_ops.faults(op)
        for line in registry.implementations(op.name):
            if all(registry.probe(line.backend, vendor) for vendor in vendors):
                continue  # without its toolchain it cannot be imported, which is no fault of the package
            try:
                registry.launcher(line)
            except Exception as error:  # noqa: BLE001 - a package's kernels may raise anything
                faults[f"kernels {op.name} {line.name}"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return faults


def _choices(profile: Profile) -> dict[str, str | None]:
    """How much of a device's lockfile holds here, and why the rest does not."""
    setting = settings.get("lockfile")
    path = lockfile.shipped(profile) if setting is None else setting
    if path is None or path == settings.NO_LOCKFILE:
        return {"file": None, "device": profile.name, "hold": "none", "ignored": None}
    try:
        validity = check(path, profile)
    except LockfileError as error:
        return {"file": str(path), "device": profile.name, "hold": "none", "ignored": str(error)}
    why = validity.differing or sorted({f"{op}: {reason}" for op, _, reason in validity.stale})
    holding = 0 if validity.differing else validity.entries - len(validity.stale)
    return {
        "file": str(path),
        "device": profile.name,
        "hold": f"{holding} of {validity.entries}",
        "ignored": "; ".join(why) or None,
    }


def _caches() -> dict[str, Path]:
    user = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER') or 'root'}"
    return {
        "ferryman kernels": _own_cache(),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or user),
        "inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor),
    }


def _own_cache() -> Path:
    try:
        return cache_directory()
    except SettingError:  # without a home nothing is kept
        return Path(os.devnull)


def _cache(name: str, path: Path) -> dict[str, Any]:
    number = count = 0
    for root, _, names in os.walk(path):
        for file in names:
            if number >= _MOST_FILES:
                break
            try:
                count += (Path(root) / file).stat().st_size
            except OSError:  # another process replaced it meanwhile
                continue
            number += 1
    return {"cache": name, "path": str(path), "files": number, "bytes": count, "problem": _unwritable(path)}


def _unwritable(path: Path) -> str | None:
    """Why nothing can be kept under a path; None where something can be."""
    try:
        nearest = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:  # a name that no file system takes
        return f"cannot be written ({error.strerror}): kernels are compiled again each time"
    if not nearest.is_dir():
        return "no home directory is known: kernels are compiled again each time; set FERRYMAN_CACHE_DIR"
    why = files.distrusted(nearest) if nearest == path else None
    if why is not None:
        return f"not used: {why}"
    if os.access(nearest, os.W_OK):
        return None
    return f"{nearest} cannot be written: kernels are compiled again each time"


def _settings() -> list[dict[str, Any]]:
    rows = []
    for setting in settings.TABLE:
        value = settings.get(setting.key)
        origin = settings.origin(setting.key)
        shown = None if value in (None, ()) else value
        rows.append(
            {"variable": setting.variable, "value": str(shown) if shown is not None else None, "origin": origin}
        )
    return rows


def _advice(versions: dict[str, str], here: list[Profile]) -> list[str]:
    advice = []
    triton, numpy = versions.get("triton", ""), versions.get("numpy", "")
    if triton.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2] if numpy else (0, 0))) >= (2, 4):
        advice.append(
            f"triton {triton}'s interpreter fails with numpy {numpy}: pip install 'numpy<2.4' to check on a CPU"
        )
    seen = {p.vendor for p in here}
    if _DRIVERS["nvidia"].exists() and "nvidia" not in seen:
        advice.append(
            f"an NVIDIA driver is loaded and torch {torch.__version__} sees no GPU: install a CUDA build of torch"
        )
    if Path("/dev/kfd").exists() and "amd" not in seen:
        advice.append(
            f"an AMD device is here and torch {torch.__version__} does not see it: install the ROCm build of torch"
        )
    advice += [
        f"{p.title}: its numbers are unknown; write a profile (CONTRIBUTING.md, 'A device')"
        for p in here
        if p.generic and p.vendor != "cpu"
    ]
    return advice
