"""How many elements have which error, added up over cells, and what a table can say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.porting.judging.results import Cell, Results, number
from ferryman.porting.report.text import short

Bins = list[tuple[float, float, int]]


def bins(cells: Sequence[Cell], edges: Sequence[float]) -> Bins | None:
    """The cells' distributions added up: (from, to, elements). None where no cell has one of this many bins."""
    wanted = len(edges) + 1  # one below the first edge, one from the last on
    fitting = [c.distribution for c in cells if len(c.distribution) == wanted]
    if not fitting:
        return None
    sums = [sum(column) for column in zip(*fitting, strict=True)]
    limits = [0.0, *edges, math.inf]
    return [(low, high, count) for low, high, count in zip(limits, limits[1:], sums, strict=False)]


@dataclass(frozen=True)
class Spread:
    """The errors of one op, implementation and dtype: what half and what 99.9% of the elements stay below."""

    op: str
    implementation: str
    dtype: str
    cells: int
    elements: str
    half: str
    most: str
    beyond: str
    worst: str


def spreads(document: Results) -> list[Spread]:
    grouped: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in document.cells:
        if cell.ratio is not None:
            grouped.setdefault((cell.op, cell.implementation, cell.dtype), []).append(cell)
    return [_spread(*key, cells, document.edges) for key, cells in grouped.items()]


def _spread(op: str, implementation: str, dtype: str, cells: Sequence[Cell], edges: Sequence[float]) -> Spread:
    binned = bins(cells, edges) or []
    total = sum(count for _, _, count in binned)
    beyond = sum(count for low, _, count in binned if low >= 1)
    return Spread(
        op,
        implementation,
        short(dtype),
        len(cells),
        f"{total:,}" if binned else "-",
        below(binned, 0.5),
        below(binned, 0.999),
        f"{beyond:,}" if binned else "-",
        number(max(cell.ratio or 0.0 for cell in cells)),
    )


def below(binned: Bins, share: float) -> str:
    """The upper end of the bin in which that share of the elements is reached."""
    total, reached = sum(count for _, _, count in binned), 0
    for _, high, count in binned:
        reached += count
        if total and reached >= share * total:
            return f"< {number(high)}" if math.isfinite(high) else "beyond all bins"
    return "-"
