"""A region that nobody measured, beside some that were: what each candidate would take there.

Regions are compared if they agree in all but sizes; those of one row or query, of fewer than a tile's, and of another
head size (the last of four dimensions, which several tensors share) are kinds of their own, as libraries and launchers
have other kernels for them. How far apart two are is the most that any tensor's rows or its last dimension differ (of
four dimensions, any of them: heads are no batch), in powers of two: of the regions alone, so that every call in one is
served alike. A candidate's time is the neighbours' level, carried to this size by the least time of the work
(`cost.scale`), times how much slower than the neighbours' best it was there: both averaged in the logarithm, weighted
by the inverse square of the distance. So the nearest region alone does not decide: between one where A wins a little
and one where B wins a lot, B may win.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ferryman.device_profiles import Profile
from ferryman.dispatch import cost

if TYPE_CHECKING:
    from ferryman.dispatch.lockfile_entry import Entry
    from ferryman.ops.menu import Implementation

REACH = 3.0  # powers of two: beyond a factor of eight a measured region says nothing of this one
CLOSEST = 0.5  # regions nearer than this weigh the same: sizes within one are not told apart
# Regions up to here go before the cost model, which goes before those farther off: of 827 cells left out by families
# the regret is 0.14% on average, with no region before the model 0.22%, with all 0.33% (benchmarks/fit_costs.py).
BEFORE = 1.0
ALIKE = 0.01  # times nearer than this are one, as for the tuner; preference decides
_SIZE = r"(?:2\^)?\d{1,18}"
_TENSOR = re.compile(rf"(\w+)=(\w+)\[((?:{_SIZE}(?:,{_SIZE})*)?)\]")  # what is not written so is another kind of region
_CACHED = 16_384


@dataclass(frozen=True)
class Prediction:
    """Seconds by implementation, from ``regions`` measured regions, the nearest ``distance`` powers of two away."""

    seconds: Mapping[str, float]
    regions: int
    distance: float
    failed: frozenset[str] = frozenset()  # in some of the regions, though its conditions admitted the call

    def __str__(self) -> str:
        others = "region" if self.regions == 1 else "regions"
        return f"predicted from {self.regions} measured {others}, the nearest a factor of {2**self.distance:.2g} away"

    def carried(self, ratio: float) -> Prediction:
        """The same at another size of the region, whose work is ``ratio`` times as much."""
        return replace(self, seconds={n: s * ratio for n, s in self.seconds.items()})

    def with_kin(self, menu: Mapping[str, Implementation]) -> Prediction:
        """The same with what kin took, for lines that no region was measured with."""
        kin: dict[tuple[str, str], float] = {}
        for name, seconds in self.seconds.items():
            if name in menu and menu[name].kin:
                kin.setdefault((menu[name].backend, menu[name].kin), seconds)
        untimed = {x.name: kin[x.backend, x.kin] for x in menu.values() if (x.backend, x.kin) in kin}
        return replace(self, seconds={**untimed, **self.seconds})

    def goes_before(self, judged: Collection[str]) -> bool:
        """Whether it puts the order, and not the cost model, which knows an order of ``judged``: where regions are
        within a factor of two, or the model lacks a candidate that they have, as one that came after its fit."""
        return self.distance <= BEFORE or not set(self.seconds) <= set(judged)

    def ranked(self, names: Sequence[str]) -> list[str]:
        """The fastest, or the first in order of preference that is as fast; then the others by time, then the rest."""
        known = [n for n in names if n in self.seconds]
        if not known:
            return list(names)
        least = min(self.seconds[n] for n in known)
        first = next(n for n in known if self.seconds[n] <= least * (1 + ALIKE))
        order = [first, *sorted((n for n in known if n != first), key=lambda n: self.seconds[n])]
        return [*order, *(n for n in names if n not in self.seconds)]


@lru_cache(maxsize=_CACHED)
def _read(region: str) -> tuple[str, Mapping[str, tuple[float, ...]]]:
    """What a region has besides sizes (whether it has one row or query, or few, as `cost.kind_of` says, and its head
    sizes), and log2 of each tensor's (rows, last dimension), or of all four dimensions."""
    sizes: dict[str, tuple[float, ...]] = {}
    rows, last = None, []
    for name, _, dims in _TENSOR.findall(region):
        logs = tuple(_log(d) for d in dims.split(",") if d)
        sizes[name] = logs if len(logs) > 3 else (sum(logs[:-1]), logs[-1] if logs else 0.0)
        if len(logs) > 3:
            last.append(dims.rpartition(",")[2])
        if rows is None and len(logs) > 1:
            rows = sizes[name][-2]
    few = "" if rows is None or rows >= math.log2(cost.TILE) else cost.ONE if rows == 0 else cost.FEW
    heads = [size for size in last if last.count(size) > 1]
    return " ".join([few, *heads, _TENSOR.sub(r"\1=\2[]", region)]), sizes


def _log(dimension: str) -> float:
    """log2 of a size; "2^5" stands for any up to 32 and above 16."""
    return float(dimension[2:]) if dimension.startswith("2^") else math.log2(max(1, int(dimension)))


def distance(region: str, other: str, entry: Entry) -> float | None:
    """Powers of two between a region and a measured one; None where they are not alike, or it says too little."""
    (kind, here), (other_kind, there) = _read(region), _read(other)
    if kind != other_kind or entry.bytes is None or entry.flops is None:
        return None
    apart = [0.0]
    for name, logs in here.items():
        if len(logs) != len(there[name]):
            return None
        apart += [abs(a - b) for a, b in zip(logs, there[name], strict=True)]
    return max(apart)


def predict(region: str, work: cost.Work, profile: Profile, entries: Mapping[str, Entry]) -> Prediction | None:
    """What the measured regions of an op say of a call in another; None where none is near."""
    level, weights, nearest, used = 0.0, 0.0, math.inf, 0
    behind: dict[str, tuple[float, float]] = {}  # candidate -> weighted log of its time over the best, weight
    failed: set[str] = set()
    for other, entry in entries.items():
        apart = distance(region, other, entry)
        times = entry.times
        if apart is None or apart > REACH or not times:
            continue
        assert entry.bytes is not None and entry.flops is not None
        there = cost.Work(entry.flops, entry.bytes, work.dtype, {})
        weight, best = max(apart, CLOSEST) ** -2, min(times.values())
        level += weight * math.log(best / cost.scale(there, profile))
        weights, nearest, used = weights + weight, min(nearest, apart), used + 1
        failed |= {c.implementation for c in entry.candidates if c.failed and c.implementation not in times}
        for name, seconds in times.items():
            total, heavy = behind.get(name, (0.0, 0.0))
            behind[name] = total + weight * math.log(seconds / best), heavy + weight
    if not used:
        return None
    here = cost.scale(work, profile) * math.exp(level / weights)
    predicted = {n: here * math.exp(total / heavy) for n, (total, heavy) in behind.items()}
    return Prediction(predicted, used, nearest, frozenset(failed))
