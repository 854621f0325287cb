"""What of a lockfile holds on this machine, and why the rest does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ferryman.device_profiles import Profile
from ferryman.dispatch import lockfile_document


@dataclass(frozen=True)
class Held:
    """``differing``: facts of the stamp that rule the file out. ``stale``: entries that do not hold, and why."""

    entries: int
    differing: list[str]
    stale: list[tuple[str, str, str]] = field(default_factory=list)  # op, region, reason

    @property
    def holds(self) -> bool:
        return not self.differing and not self.stale


def check(path: Path, profile: Profile) -> Held:
    """Compare a lockfile with this machine. Raises LockfileError for a damaged one."""
    document = lockfile_document.load(path)
    stale = [
        (op, key, why)
        for op, entries in document.choices.items()
        for key, entry in entries.items()
        if (why := lockfile_document.stale(op, entry)) is not None
    ]
    count = sum(map(len, document.choices.values()))
    return Held(count, lockfile_document.differing(document, profile), stale)
