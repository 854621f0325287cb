"""The lockfile's document: what stands in it, when it holds, and how several writers share one file.

A file that was measured on another device, or with another release of torch, Triton, CUDA, ROCm or driver, holds
nothing here; nor does an entry whose kernels' sources changed since. Writers merge what they measured into the file
under a lock and rename it into place, so that several may run at once.
"""

from __future__ import annotations

import ctypes
import datetime
import re
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import filelock
import torch
from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from ferryman import files
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.dispatch.kernel_code import digest
from ferryman.dispatch.lockfile_entry import Entry, Name, Strict, joined
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import LockfileError, shown
from ferryman.ops.menu import named

# 8: kernels without the names of local variables. 7: kernels that launchers chose are lines of their own. 6: kernels by
# the code that launchers reach. 5: names of implementations' own. 4: seals. 3: the work of what was measured, for
# regions beside it. 2: all candidates, the kernels' digest.
VERSION = 8
MIGRATED = (4, 5, 6, 7)  # what `ferryman migrate` reads
MOST_BYTES = 16 << 20
_LOCK_SECONDS = 60.0
# What must be equal, and what must be equal up to this many numbers of a version.
_DEVICE = ("profile", "arch", "units", "memory", "partition", "power_mode")
_RELEASES = {"torch": 2, "triton": 2, "cuda": 1, "hip": 1, "driver": 1}
_TENSOR = re.compile(r"[a-z0-9_]+\[((0|2\^\d{1,2}),)*\d{0,18}\][csx]")


class Lockfile(Strict):
    kind: Literal["ferryman-lockfile"] = "ferryman-lockfile"
    version: int = VERSION
    stamp: dict[Name, str | int | None]
    choices: dict[Name, dict[Annotated[str, Field(max_length=400)], Entry]]

    @model_validator(mode="after")
    def _was_measured(self) -> Self:
        for op, entries in self.choices.items():
            for region, entry in entries.items():
                if not entry.candidates:
                    raise ValueError(f"{op} {region[:80]}: no candidates; required: the times of what was measured")
        return self


def stamp(profile: Profile) -> dict[str, str | int | None]:
    """What an entry's truth depends on: the device, and the toolchains that are here."""
    return {
        "profile": profile.name,
        "arch": profile.arch,
        "units": profile.units,
        "memory": profile.memory_bytes,
        "partition": profile.partition,
        "power_mode": profile.power_mode,
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
        "ferryman": _version("ferryman"),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The CUDA version that NVIDIA's driver offers: "13.0". AMD's comes with ROCm, whose release stands under hip."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:  # the driver has another name, as on Windows: then nothing is said of it
        return None
    if failed:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def load(path: Path) -> Lockfile:
    """A checked lockfile. Raises LockfileError with the file and what is wrong."""
    try:
        raw = files.document(path, MOST_BYTES)
    except files.Unreadable as error:
        raise LockfileError(f"{error}. Write it again, or unset the setting") from error
    required = f"required: a ferryman-lockfile of version {VERSION}"
    if not isinstance(raw, dict):
        raise LockfileError(f"{path} holds a {type(raw).__name__}; {required}")
    if (raw.get("kind"), raw.get("version")) != ("ferryman-lockfile", VERSION):
        remedy = f". `ferryman migrate {path}` makes it one" if raw.get("version") in MIGRATED else ""
        kind, version = (shown(repr(raw.get(name))) for name in ("kind", "version"))
        raise LockfileError(f"{path} has kind {kind}, version {version}; {required}{remedy}")
    try:
        return Lockfile.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise LockfileError(f"{path} is damaged: {place}: {first['msg']} ({error.error_count()} errors)") from error


def writable(path: Path, profile: Profile) -> None:
    """Raises LockfileError where `record` would; makes the folder, no file."""

    def look(real: Path) -> None:
        if real.exists():
            load_here(real, profile)
        with tempfile.TemporaryFile(dir=real.parent):
            pass

    locked(path, look)


def record(path: Path, profile: Profile, measured: Mapping[str, Mapping[str, Entry]]) -> dict[str, dict[str, Entry]]:
    """Merge measured entries into a lockfile, or begin it: whole, under a lock.

    A candidate that was measured now replaces itself; the others of its region stay, and the choice is among all.
    Returns the measured regions' entries as they stand in the file.

    Raises LockfileError where the file is damaged, is of another device or release, cannot be written, or stays locked.
    """
    written: dict[str, dict[str, Entry]] = {}
    locked(path, lambda real: written.update(_merge(real, profile, measured)))
    return written


def locked(path: Path, work: Callable[[Path], None]) -> None:
    """``work`` on the file itself, which ``path`` may link to, so that all writers have one lock. Makes its folder.

    Raises LockfileError where it cannot be written, or stays locked.
    """
    try:
        real = path.resolve()
        real.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{real}.lock", timeout=_LOCK_SECONDS):
            work(real)
    except filelock.Timeout as error:
        why = f"another process has held {real}.lock for {_LOCK_SECONDS:.0f} s"
        raise LockfileError(f"{path} stays locked: {why}. Wait for it, or end it") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise LockfileError(f"{path} cannot be written: {error}. Name another file") from error


def load_here(path: Path, profile: Profile) -> Lockfile:
    """A checked lockfile of this device. Raises LockfileError for one that is damaged or another machine's."""
    document = load(path)
    other = differing(document, profile)
    if other:
        raise LockfileError(f"{path} is not of this machine: {'; '.join(other)}. Name another file")
    return document


def _merge(path: Path, profile: Profile, measured: Mapping[str, Mapping[str, Entry]]) -> dict[str, dict[str, Entry]]:
    choices: dict[str, dict[str, Entry]] = {}
    if path.exists():
        choices = {op: dict(entries) for op, entries in load_here(path, profile).choices.items()}
    for op, entries in measured.items():
        merged = choices.setdefault(op, {})
        for region, entry in entries.items():
            old = merged.get(region)
            combined = entry
            if old and old.is_sealed(op, region):
                combined = joined(old, entry, _preferred(op, profile))
            merged[region] = combined.sealed(op, region)
    document = Lockfile(stamp=stamp(profile), choices={op: dict(sorted(choices[op].items())) for op in sorted(choices)})
    text = document.model_dump_json(indent=1, exclude_defaults=False) + "\n"
    Lockfile.model_validate_json(text)  # what could not be read again is not written over what can
    write_whole(path, text.encode())
    return {op: {region: choices[op][region] for region in entries} for op, entries in measured.items()}


def _preferred(op: str, profile: Profile) -> list[str]:
    return [line.name for line in named(registry.implementations(op), profile.preference(op))]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def differing(document: Lockfile, profile: Profile) -> list[str]:
    """Why a lockfile does not hold here, fact by fact; empty where it does."""
    here = stamp(profile)
    differences = []
    for fact, length in (*((f, None) for f in _DEVICE), *_RELEASES.items()):
        locked, mine = document.stamp.get(fact), here[fact]
        if (locked, mine) != (None, None) and _release(locked, length) != _release(mine, length):
            differences.append(f"{fact} is {locked!r}, here {mine!r}")
    return differences


def _release(value: str | int | None, length: int | None) -> str | int | tuple[str, ...] | None:
    """The first numbers of a version, or the value itself."""
    return value if length is None or not isinstance(value, str) else tuple(value.split("+")[0].split(".")[:length])


def stale(op: str, entry: Entry, region: str, vendor: str | None = None) -> str | None:
    """Why a region's entry does not hold with what is installed, on a device of a vendor; None where it does."""
    if op not in registry.primitives():
        return f"there is no op {op!r}"
    lines = {line.name: line for line in registry.implementations(op)}
    if entry.implementation not in lines:
        return f"{op} has no implementation {entry.implementation!r}"
    backend = lines[entry.implementation].backend
    if vendor is not None and vendor not in registry.backends()[backend].vendors:
        return f"{entry.implementation} does not serve {vendor} devices"
    if entry.configuration and lines[entry.implementation].configurations is None:
        return (
            f"{op}'s {entry.implementation} has no configurations, and the entry names {entry.configuration['name']!r}"
        )
    if not _describes(region, op):
        return f"no call of {op} has the region {region[:80]!r}"
    dtype = entry.case.rpartition(" ")[2]
    if isinstance(getattr(torch, dtype, None), torch.dtype) and f"={dtype}[" not in region:
        return f"its case {entry.case!r} is of another dtype than its region {region[:80]!r}"
    tried = frozenset(c.implementation for c in entry.candidates)  # a line that came since has no time here
    if entry.kernels != digest(op) and entry.kernels != digest(op, tried):
        return "its kernels changed since it was measured"
    return None if entry.is_sealed(op, region) else "it is not as `ferryman tune` wrote it: edited, or moved"


def _describes(region: str, op: str) -> bool:
    """Whether a region is written as `lockfile.region` writes those of an op."""
    known = registry.primitive(op)
    said = {name: value for name, _, value in (part.partition("=") for part in region.split(" "))}
    names = [name for name in known.names if name in said or name not in known.added]
    written = " ".join(f"{name}={value}" for name, value in said.items()) == region
    return written and list(said) == names and all(_is_written(known.types[n], value) for n, value in said.items())


def _is_written(kind: str, value: str) -> bool:
    """Whether `lockfile.region` can give a value of a type of the schema like this."""
    if value == "None":
        return kind.endswith("?")
    if kind.startswith("Tensor"):
        dtype = value.partition("[")[0]
        return bool(_TENSOR.fullmatch(value)) and isinstance(getattr(torch, dtype, None), torch.dtype)
    if kind.startswith("ScalarType"):  # by its own name: torch.float32, not torch.float
        named = getattr(torch, value.removeprefix("torch."), None)
        return isinstance(named, torch.dtype) and str(named) == value
    known = {"float": r"0|x", "bool": r"True|False", "int": r"-?\d{1,18}|2\^\d{1,2}"}
    return bool(re.fullmatch(known.get(kind.rstrip("?"), r"\w{1,40}"), value))


def _vendor(document: Lockfile) -> str | None:
    """Whose device a lockfile was measured on, by its arch; None where that says nothing."""
    arch, vendors = str(document.stamp.get("arch")), {"sm_": "nvidia", "gfx": "amd", "cpu": "cpu"}
    return next((vendor for start, vendor in vendors.items() if arch.startswith(start)), None)


def holding(document: Lockfile) -> tuple[dict[str, dict[str, Entry]], list[tuple[str, str, str]]]:
    """The entries that hold with what is installed, by op and region; and of the others op, region, and why not."""
    current: dict[str, dict[str, Entry]] = {}
    others, vendor = [], _vendor(document)
    for op, entries in document.choices.items():
        for region, entry in entries.items():
            why = stale(op, entry, region, vendor)
            if why is None:
                current.setdefault(op, {})[region] = entry
            else:
                others.append((op, region, why))
    return current, others
