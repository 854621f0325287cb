"""A benchmark against an earlier one: a regression is a time of ours, longer by more than both runs' noise, twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ferryman.dispatch.lockfile_entry import MOST_NOISE
from ferryman.errors import ResultError
from ferryman.porting.bench.document import Benchmark, Cell, Role, Times, require_whole
from ferryman.porting.judging.results import Environment

Verdict = Literal[
    "slower",
    "peer slower",
    "device slower",
    "no longer timed",
    "not confirmed",
    "faster",
    "same",
    "untrusted",
    "too noisy",
    "only before",
    "only now",
]
_SLOWER: dict[Role, Verdict] = {"implementation": "slower", "peer": "peer slower", "reference": "device slower"}
LEAST_NOISE = 0.01  # clocks and neighbours move by as much between processes, however still one process is
Again = Callable[[frozenset[tuple[str, str]]], Benchmark]


@dataclass(frozen=True)
class Change:
    """One contender on one cell. ``ratio``: time now over before. ``noise``: what it had to exceed, as a fraction.

    Ours alone are "slower"; the copy tells of the device. ``reason``: why one of our implementations, which was timed
    before, is no longer timed, or why there is no verdict.
    """

    op: str
    case: str
    dtype: str
    name: str
    role: Role
    verdict: Verdict
    ratio: float | None = None
    noise: float | None = None
    confirmed: float | None = None  # the ratio of the fresh run
    reason: str | None = None


def compare(before: Benchmark, now: Benchmark, again: Again | None = None, asked: Collection[str] = ()) -> list[Change]:
    """Changes of every contender, slowest first. ``again`` times (op, case) pairs afresh, to confirm what is slower.

    asked: the implementations that were asked for; empty: all.

    Raises ResultError for documents of two devices or dtypes, which compare machines and not versions, for those that a
    stopped run left, and for those that have no contender on a cell in common.
    """
    require_whole(now, "this benchmark")
    require_same(before, now.environment, {cell.key for cell in now.cells})
    _require_common(before, now)
    changes = _changes(before, now, asked)
    suspects = frozenset((c.op, c.case) for c in changes if c.verdict == "slower")
    if suspects and again is not None:
        fresh = {(c.op, c.case, c.dtype, c.name): c for c in _changes(before, again(suspects), asked)}
        changes = [_confirmed(c, fresh.get((c.op, c.case, c.dtype, c.name))) for c in changes]
    return sorted(changes, key=lambda c: -(c.ratio or 0.0))


def require_same(before: Benchmark, here: Environment, cells: Collection[tuple[str, str, str]]) -> None:
    """Raises ResultError where an earlier benchmark is partial, of another device, or has none of these (op, case,
    dtype)."""
    require_whole(before, "the earlier benchmark")
    for what in ("device_name", "profile", "arch"):
        old, new = getattr(before.environment, what), getattr(here, what)
        if old != new:
            raise ResultError(
                f"the earlier benchmark is of another device: {what} {old!r}, here {new!r}; "
                "compare runs of one device (ferryman compare sets machines side by side)"
            )
    known, dtypes = {cell.dtype for cell in before.cells}, {dtype for _, _, dtype in cells}
    if known.isdisjoint(dtypes):
        raise ResultError(
            f"the earlier benchmark is of another dtype: {_listed(known)}, here {_listed(dtypes)}; "
            "compare runs of one dtype (--dtype)"
        )
    old = {cell.key for cell in before.cells}
    if old.isdisjoint(cells):
        raise ResultError(
            f"the earlier benchmark is of other cells: {_counted(old)}, here {_counted(cells)}; "
            "compare runs of the same --op and --grid"
        )


def _require_common(before: Benchmark, now: Benchmark) -> None:
    """The copy does not count: it stands in every cell, and tells of the device alone."""
    old = {(*cell.key, t.name) for cell in before.cells for t in cell.times if t.role != "reference" and t.trials}
    new = {
        (*cell.key, t.name)
        for cell in now.cells
        for t in cell.times
        if t.role == "implementation" or (t.role == "peer" and t.trials)
    }
    if old.isdisjoint(new):
        raise ResultError(
            f"nothing can be compared: the earlier benchmark timed {_counted(old)}, this one has {_counted(new)}, and "
            "none is in both; compare runs of the same --implementation and --peers"
        )


def _counted(keys: Collection[tuple[str, ...]]) -> str:
    """Cells, or contenders on cells."""
    if not keys:
        return "none"
    op, case, _, *name = min(keys)
    return f"{' on '.join((*name, f'{op} {case}'))} ({len(keys)} in all)"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def _changes(before: Benchmark, now: Benchmark, asked: Collection[str]) -> list[Change]:
    ops, cells = {cell.op for cell in now.cells}, {cell.key for cell in now.cells}
    old = {(*cell.key, t.name): (cell, t) for cell in before.cells if cell.op in ops for t in cell.times}
    new = {(*cell.key, t.name): (cell, t) for cell in now.cells for t in cell.times}
    changes = []
    for key in dict.fromkeys([*new, *old]):
        if key not in old or key not in new:
            cell, times = (new if key in new else old)[key]
            expected = times.name in asked if asked else times.name != "definition"  # which is timed where asked for
            ours = times.role == "implementation" and times.seconds is not None
            if key in old and ours and expected and cell.key in cells:
                why = f"{cell.op} has no implementation of this name"
                changes.append(Change(*key, times.role, "no longer timed", reason=why))
            elif times.trials:
                changes.append(Change(*key, times.role, "only now" if key in new else "only before"))
            continue
        changes += _change(key, *old[key], *new[key])
    return changes


def _change(key: tuple[str, str, str, str], old_cell: Cell, old: Times, new_cell: Cell, new: Times) -> list[Change]:
    if old.seconds is None or new.seconds is None:
        if old.seconds is None and new.seconds is None:
            return []
        if new.seconds is None and old.role == "implementation":
            return [Change(*key, new.role, "no longer timed", reason=new.skipped or "no reason was given")]
        return [Change(*key, new.role, "only before" if new.seconds is None else "only now")]
    ratio, why = new.seconds / old.seconds, None
    each = _noise(old_cell, old), _noise(new_cell, new)
    noise = sum(each)
    verdict: Verdict = _SLOWER[new.role] if ratio > 1 + noise else "faster" if ratio < 1 / (1 + noise) else "same"
    if doubts := [*old_cell.untrusted, *new_cell.untrusted]:
        verdict, why = "untrusted", "; ".join(dict.fromkeys(doubts))
    elif verdict == "same" and max(each) > MOST_NOISE:
        verdict, why = "too noisy", f"the noise is {max(each):.0%}; required: at most {MOST_NOISE:.0%}"
    return [Change(*key, new.role, verdict, ratio, noise, reason=why)]


def _noise(cell: Cell, times: Times) -> float:
    """Half of what the trials differ by, or what one contender differed by from itself; whichever is more."""
    return max(LEAST_NOISE, ((times.spread or 1.0) - 1) / 2, cell.noise or 0.0)


def _confirmed(change: Change, fresh: Change | None) -> Change:
    """What the fresh run says of what was slower: only a time that is not longer acquits."""
    if change.verdict != "slower":
        return change
    if fresh is None:
        return replace(change, verdict="no longer timed", reason="the run that was to confirm it lacks it")
    verdict: Verdict = "not confirmed" if fresh.verdict in ("same", "faster") else fresh.verdict
    return replace(change, verdict=verdict, confirmed=fresh.ratio, reason=fresh.reason)


def regressed(changes: list[Change]) -> bool:
    """Whether one of ours is slower, twice, or no longer timed. A copy or a peer that is slower fails nothing."""
    return any(c.verdict in ("slower", "no longer timed") for c in changes)
