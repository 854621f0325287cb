"""A benchmark against an earlier one: a regression is a time that is longer by more than both runs' noise, twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ferryman.errors import ResultError
from ferryman.porting.bench.document import Benchmark, Cell, Times

Verdict = Literal["slower", "not confirmed", "faster", "same", "untrusted", "only before", "only now"]
LEAST_NOISE = 0.01  # clocks and neighbours move by as much between processes, however still one process is
Again = Callable[[frozenset[tuple[str, str]]], Benchmark]


@dataclass(frozen=True)
class Change:
    """One contender on one cell. ``ratio``: time now over before. ``noise``: what it had to exceed, as a fraction."""

    op: str
    case: str
    dtype: str
    name: str
    verdict: Verdict
    ratio: float | None = None
    noise: float | None = None
    confirmed: float | None = None  # the ratio of the fresh run


def compare(before: Benchmark, now: Benchmark, again: Again | None = None) -> list[Change]:
    """Changes of every contender, slowest first. ``again`` times (op, case) pairs afresh, to confirm what is slower.

    Raises ResultError for documents of two devices or dtypes, which compare machines and not versions.
    """
    _same_device(before, now)
    found = _changes(before, now)
    suspects = frozenset((c.op, c.case) for c in found if c.verdict == "slower")
    if suspects and again is not None:
        fresh = {(c.op, c.case, c.dtype, c.name): c for c in _changes(before, again(suspects))}
        found = [_confirmed(c, fresh.get((c.op, c.case, c.dtype, c.name))) for c in found]
    return sorted(found, key=lambda c: -(c.ratio or 0.0))


def _same_device(before: Benchmark, now: Benchmark) -> None:
    for what in ("device_name", "profile", "arch"):
        old, new = getattr(before.environment, what), getattr(now.environment, what)
        if old != new:
            raise ResultError(
                f"the earlier benchmark is of another device: {what} {old!r}, here {new!r}; "
                "compare runs of one device (ferryman compare sets machines side by side)"
            )


def _changes(before: Benchmark, now: Benchmark) -> list[Change]:
    asked = {cell.op for cell in now.cells}
    old = {(*cell.key, t.name): (cell, t) for cell in before.cells if cell.op in asked for t in cell.times}
    new = {(*cell.key, t.name): (cell, t) for cell in now.cells for t in cell.times}
    made = []
    for key in dict.fromkeys([*new, *old]):
        if key not in old or key not in new:
            _, times = (new if key in new else old)[key]
            if times.trials:
                made.append(Change(*key, "only now" if key in new else "only before"))
            continue
        made += _change(key, *old[key], *new[key])
    return made


def _change(
    key: tuple[str, str, str, str], old_cell: Cell, old: Times, new_cell: Cell, new: Times
) -> list[Change]:  # fmt: skip
    if old.seconds is None or new.seconds is None:
        if old.seconds is None and new.seconds is None:
            return []
        return [Change(*key, "only before" if new.seconds is None else "only now")]
    ratio = new.seconds / old.seconds
    noise = _noise(old_cell, old) + _noise(new_cell, new)
    verdict: Verdict = "slower" if ratio > 1 + noise else "faster" if ratio < 1 / (1 + noise) else "same"
    if verdict != "same" and (old_cell.untrusted or new_cell.untrusted):
        verdict = "untrusted"
    return [Change(*key, verdict, ratio, noise)]


def _noise(cell: Cell, times: Times) -> float:
    """Half of what the trials differ by, or what one contender differed by from itself; whichever is more."""
    return max(LEAST_NOISE, ((times.spread or 1.0) - 1) / 2, cell.noise or 0.0)


def _confirmed(change: Change, fresh: Change | None) -> Change:
    if change.verdict != "slower":
        return change
    verdict: Verdict = "slower" if fresh is not None and fresh.verdict == "slower" else "not confirmed"
    ratio = None if fresh is None else fresh.ratio
    return Change(change.op, change.case, change.dtype, change.name, verdict, change.ratio, change.noise, ratio)


def regressed(changes: list[Change]) -> bool:
    return any(c.verdict == "slower" for c in changes)
