"""Measured choices in a JSON file: (device, op, shape region) -> implementation.

A lockfile made for another device, torch or driver is reported once and ignored, never obeyed. Only names that are
identifiers are accepted, and a name can only pick a line of an op's own menu.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ferryman import settings
from ferryman.device_profiles import Profile
from ferryman.errors import LockfileError
from ferryman.ops.primitive import IDENTIFIER, Primitive

VERSION = 1
_MAX_BYTES = 16 << 20
_MAX_KEY = 400


def _bucket(n: int) -> str:
    """Sizes within a factor of two share a region."""
    return "0" if n == 0 else f"2^{(n - 1).bit_length()}"


def region(op: Primitive, args: Sequence[Any]) -> str:
    """The part of the argument space that shares a choice: dtypes, layout class, size buckets, exact last dimension."""
    parts = []
    for name, value in zip(op.names, args, strict=True):
        if isinstance(value, torch.Tensor):
            dims = [_bucket(int(n)) for n in value.shape[:-1]] + [str(int(n)) for n in value.shape[-1:]]
            layout = "c" if value.is_contiguous() else "s" if value.dim() == 0 or value.stride(-1) == 1 else "x"
            parts.append(f"{name}={str(value.dtype).removeprefix('torch.')}[{','.join(dims)}]{layout}")
        elif isinstance(value, float):
            parts.append(f"{name}={'0' if value == 0 else 'x'}")
        elif op.types[name] == "int?" and value is not None:
            parts.append(f"{name}={_bucket(int(value))}")
        else:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def stamp(profile: Profile) -> dict[str, Any]:
    """What an entry's truth depends on."""
    return {
        "profile": profile.name, "arch": profile.arch, "units": profile.units, "memory": profile.memory_bytes,
        "partition": profile.partition, "power_mode": profile.power_mode, "torch": torch.__version__,
        "cuda": torch.version.cuda, "hip": torch.version.hip,
    }  # fmt: skip


def load(path: Path) -> Mapping[str, Any]:
    """A checked lockfile document. Raises LockfileError with the file and what is wrong."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise LockfileError(f"{path} is {path.stat().st_size} bytes; required: at most {_MAX_BYTES}")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise LockfileError(f"{path} cannot be read as JSON: {error}. Write it again, or unset the setting") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        found = document.get("version") if isinstance(document, dict) else type(document).__name__
        raise LockfileError(f"{path} has version {found!r}; required: {VERSION}")
    if not isinstance(document.get("stamp"), dict) or not isinstance(document.get("choices"), dict):
        raise LockfileError(f"{path} lacks 'stamp' or 'choices'")
    for op, entries in document["choices"].items():
        if not IDENTIFIER.fullmatch(op) or not isinstance(entries, dict):
            raise LockfileError(f"{path}: {op!r} is not an op with its entries")
        for key, entry in entries.items():
            name = entry.get("implementation") if isinstance(entry, dict) else None
            if len(key) > _MAX_KEY or not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
                raise LockfileError(f"{path}: {op} {key[:80]!r} does not name an implementation by an identifier")
    return document


def save(path: Path, profile: Profile, choices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Write a lockfile whole: to a temporary file beside it, then renamed over it."""
    document = {"version": VERSION, "stamp": stamp(profile), "choices": choices}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
        json.dump(document, out, indent=1, sort_keys=True)
    os.replace(out.name, path)


@lru_cache(maxsize=1)
def _loaded() -> Mapping[str, Any] | None:
    path = settings.get("lockfile")
    if path is None:
        return None
    try:
        return load(path)
    except LockfileError as error:
        warnings.warn(f"lockfile ignored: {error}", stacklevel=2)
        return None


@lru_cache(maxsize=64)
def _fits(profile: Profile) -> bool:
    document = _loaded()
    if document is None:
        return False
    here = stamp(profile)
    differing = [
        f"{k} is {document['stamp'].get(k)!r}, here {v!r}" for k, v in here.items() if document["stamp"].get(k) != v
    ]
    if differing:
        warnings.warn(f"lockfile ignored for {profile.name}: {'; '.join(differing)}", stacklevel=2)
    return not differing


def choice(op: str, key: str, profile: Profile) -> str | None:
    """The locked implementation's name, or None."""
    document = _loaded()
    if document is None or not _fits(profile):
        return None
    entry = document["choices"].get(op, {}).get(key)
    return None if entry is None else str(entry["implementation"])


def covers(op: str, profile: Profile) -> bool:
    """Whether any choice of an op is locked for a device."""
    document = _loaded()
    return document is not None and _fits(profile) and bool(document["choices"].get(op))


def forget() -> None:
    """Read the lockfile again at the next choice."""
    _loaded.cache_clear()
    _fits.cache_clear()
