"""Measured choices in a JSON file: (device, op, shape region) -> implementation and configuration.

The setting names the file; without it, the one that comes with the package for this device is in force, and "none" is
none. What does not hold here is ignored, never obeyed (`lockfile_document` says when), and a name can only pick a line
of an op's own menu. Of the user's file that is said once; of ours `ferryman doctor` tells. This half is what dispatch
needs at every import; it loads the other half, and pydantic, only where there is a file.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferryman import settings
from ferryman.device_profiles import Profile
from ferryman.errors import LockfileError
from ferryman.ops.primitive import Primitive

if TYPE_CHECKING:
    from ferryman.dispatch.lockfile_document import Lockfile
    from ferryman.dispatch.lockfile_entry import Entry


_LOG = logging.getLogger("ferryman")
_reported = set[str]()  # profiles of which it was said


def _bucket(n: int) -> str:
    """Sizes within a factor of two share a region."""
    return "0" if n == 0 else f"2^{(n - 1).bit_length()}"


def region(op: Primitive, args: Sequence[Any]) -> str:
    """The part of the argument space that shares a choice: dtypes, layout class, size buckets, exact last dimension."""
    parts = []
    for name, value in zip(op.names, args, strict=True):
        if isinstance(value, torch.Tensor):
            sizes = [int(n) for n in value.shape]
            dims = [*map(_bucket, sizes[:-1]), *map(str, sizes[-1:])]
            layout = "c" if value.is_contiguous() else "s" if value.dim() == 0 or value.stride(-1) == 1 else "x"
            parts.append(f"{name}={str(value.dtype).removeprefix('torch.')}[{','.join(dims)}]{layout}")
        elif op.left_out(name, value):
            continue  # a region that was measured before the argument came is the same
        elif isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            whole = _bucket(sum(one.numel() for one in value))
            dtypes = ",".join(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in value))
            parts.append(f"{name}={dtypes}[{_bucket(len(value))}:{whole}]")
        elif isinstance(value, list | tuple):
            parts.append(f"{name}={','.join(map(str, value))}")
        elif isinstance(value, float):
            parts.append(f"{name}={'0' if value == 0 else 'x'}")
        elif op.types[name] == "int?" and value is not None:
            parts.append(f"{name}={_bucket(int(value))}")
        else:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def shipped(profile: Profile) -> Path | None:
    """The lockfile of a device that comes with the package; None where none was measured."""
    path = Path(str(resources.files("ferryman.device_profiles") / "data" / f"{profile.name}.lock.json.gz"))
    return path if path.is_file() else None


@settings.Remembered
def _loaded(path: Path) -> Lockfile | None:
    from ferryman.dispatch.lockfile_document import load

    try:
        return load(path)
    except LockfileError as error:
        warnings.warn(f"lockfile ignored: {error}", stacklevel=2)
        return None


@settings.Remembered
def _in_force(profile: Profile) -> Mapping[str, Mapping[str, Entry]]:
    """The entries that hold on a device; what of the user's file does not is said once."""
    setting = settings.get("lockfile")
    path = shipped(profile) if setting is None else setting
    document = None if path is None or path == settings.NO_LOCKFILE else _loaded(path)
    if document is None:
        return {}
    from ferryman.dispatch.lockfile_document import differing, holding

    other = differing(document, profile)
    if other:
        if setting is not None:
            warnings.warn(f"lockfile ignored for {profile.name}: {'; '.join(other)}", stacklevel=2)
        return {}
    current, others = holding(document)
    if others and setting is not None:
        counts = Counter(f"{op}: {why}" for op, _, why in others)
        reasons = "; ".join(f"{why} ({count} entries)" for why, count in counts.items())
        warnings.warn(f"entries of the lockfile ignored: {reasons}. Run ferryman tune", stacklevel=2)
    return current


def entries(op: str, profile: Profile) -> Mapping[str, Entry]:
    """Every locked choice of an op that holds on a device, by region."""
    return _in_force(profile).get(op, {})


def covers(op: str, profile: Profile) -> bool:
    """Whether the user's own lockfile has a choice of an op for a device."""
    return settings.get("lockfile") is not None and bool(_in_force(profile).get(op))


def tell_untuned(profile: Profile) -> None:
    """Say once, in one line of the log, that nothing was measured on a device, and what would measure it."""
    if profile.name in _reported or profile.vendor == "cpu":
        return
    _reported.add(profile.name)
    if settings.get("lockfile") is None and settings.get("profile") is None and shipped(profile) is None:
        _LOG.warning(
            "ferryman: nothing was measured on %s, choices are predicted; `ferryman tune --quick` measures them in "
            "three minutes, FERRYMAN_LOCKFILE=none leaves it so",
            profile.name,
        )


def forget() -> None:
    """Read the lockfile again at the next choice."""
    _loaded.forget()
    _in_force.forget()
