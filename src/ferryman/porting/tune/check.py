"""What of a lockfile holds on this machine, and why the rest does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, lockfile, lockfile_document, near
from ferryman.ops.primitive import Primitive


@dataclass(frozen=True)
class Validity:
    """``differing``: facts of the stamp that rule the file out. ``stale``: entries that do not hold, and why.

    failed: candidates of the entries that hold which failed when they were measured, and how.
    """

    entries: int
    differing: list[str]
    stale: list[tuple[str, str, str]] = field(default_factory=list)  # op, region, reason
    failed: list[tuple[str, str, str, str]] = field(default_factory=list)  # op, case, candidate, error

    @property
    def holds(self) -> bool:
        return self.entries > 0 and not self.differing and not self.stale


def check(path: Path, profile: Profile) -> Validity:
    """Compare a lockfile with this machine. Raises LockfileError for a damaged one."""
    document = lockfile_document.load(path)
    current, stale = lockfile_document.holding(document)
    count = sum(map(len, document.choices.values()))
    failed = [
        (op, entry.case, c.label, str(c.error))
        for op, entries in current.items()
        for entry in entries.values()
        for c in entry.candidates
        if c.failed
    ]
    return Validity(count, lockfile_document.differing(document, profile), stale, failed)


@dataclass(frozen=True)
class Covered:
    """How many of an op's calls lie in a measured region, how many are predicted from regions near, and the rest."""

    op: str
    measured: int = 0
    predicted: int = 0
    neither: int = 0


def covered(path: Path, profile: Profile, calls: Iterable[tuple[Primitive, Sequence[Any]]]) -> list[Covered]:
    """What the lockfile's entries that hold say of calls (their tensors may be on "meta"), op by op."""
    document = lockfile_document.load(path)
    usable = not lockfile_document.differing(document, profile)
    current = lockfile_document.holding(document)[0] if usable else {}
    by_op: dict[str, list[int]] = {}
    for op, args in calls:
        entries, region = current.get(op.name, {}), lockfile.region(op, args)
        near_by = None if region in entries else near.predict(region, cost.work_of(op, args), profile, entries)
        counts = by_op.setdefault(op.name, [0, 0, 0])
        counts[0 if region in entries else 2 if near_by is None else 1] += 1
    return [Covered(op, *counts) for op, counts in by_op.items()]
