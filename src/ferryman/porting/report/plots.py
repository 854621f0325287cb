"""The HTML report's plots, as SVG that follows the page's colours.

Each plot is small enough to be read at 360 pixels, and the page lays them out in a grid. Text stays text (a browser's
font, searchable), colours are the page's variables (light, dark, print), and equal data give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferryman.porting.judging.results import Cell, Results, Timing
from ferryman.porting.report.bins import Bins, bins
from ferryman.porting.report.drawing import (
    BAD,
    BOUND,
    DASHES,
    GRID,
    MARKERS,
    SERIES,
    TEXT,
    WIDTH,
    Frame,
    Picture,
    Tick,
    dtypes_of,
    frame,
    powers,
    style_of,
    width_of,
)
from ferryman.porting.report.text import WRONG, seconds, short

_FLOOR = 2.0**-10  # errors below a thousandth of the bound are one bin
_FAR = 2.0**10  # errors beyond a thousand bounds are at the edge
_RARE = 7.0  # decades that a ridge's height spans
_ROW, _BELOW = 14.4, 32.0  # points of a line of errors; of the axis, and a rim above


@dataclass(frozen=True)
class Plot:
    """One plot and what stands above it; ``wrong`` names the implementations that have a wrong cell in it."""

    title: str
    svg: str
    wrong: str = ""


def implementations(document: Results) -> list[str]:
    """All of a document's, so that each has one colour and marker in every plot and key."""
    timed = (t.implementation for t in document.timings)
    return list(dict.fromkeys([*(c.implementation for c in document.cells), *timed]))


def _ran(document: Results) -> list[Cell]:
    return [c for c in document.cells if c.ratio is not None]


def _by_op(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    ops: dict[str, list[Cell]] = {}
    for cell in cells:
        ops.setdefault(cell.op, []).append(cell)
    return ops


def _wrong(document: Results) -> dict[str, str]:
    """{op: its implementations that have a wrong cell}, of those that have one."""
    ops = _by_op([c for c in document.cells if c.verdict in WRONG])
    return {op: ", ".join(dict.fromkeys(c.implementation for c in cells)) for op, cells in ops.items()}


def distribution(document: Results, edges: Sequence[float] | None, advance: Callable[[], None]) -> list[Plot]:
    """Per op: how the errors lie against the bound, one line per implementation and dtype."""
    cells = _ran(document)
    names, wrong = implementations(document), _wrong(document)
    plots = []
    for number, (op, mine) in enumerate(_by_op(cells).items()):
        plots.append(Plot(op, _ridges(f"d{number}", op, mine, names, edges), wrong.get(op, "")))
        advance()
    return plots


def _ridges(name: str, op: str, cells: Sequence[Cell], names: Sequence[str], edges: Sequence[float] | None) -> str:
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        lines.setdefault((cell.implementation, cell.dtype), []).append(cell)
    rows = [
        (i, d, lines[i, d])
        for i in dict.fromkeys(c.implementation for c in cells)
        for d in dtypes_of({dtype for implementation, dtype in lines if implementation == i})
    ]
    top = _FAR if any((c.ratio or 0.0) > 1 for c in cells) else 4.0
    labels = [f"{i} {short(d)}" for i, d, _ in reversed(rows)]
    title = f"Errors of {op} against the bound, by implementation and dtype"
    height = _BELOW + _ROW * (len(rows) + 0.1)
    plot = frame(name, title, height, (_FLOOR, top), (-0.1, len(rows)), labels, logarithmic=(True, False))
    draw = plot.picture
    plot.beside([(y + 0.15, label) for y, label in enumerate(labels)])
    for y, (implementation, _, mine) in enumerate(reversed(rows)):
        colour = SERIES[style_of(implementation, names)]
        binned = None if edges is None else bins(mine, edges)
        draw.line([(plot.x.start, plot.y(y)), (plot.x.end, plot.y(y))], GRID, 0.4)
        if binned is not None:
            _ridge(plot, y, binned, colour, max(c.ratio or 0.0 for c in mine))
        ratios = [min(max(c.ratio or 0.0, _FLOOR), _FAR) for c in mine]
        if binned is None:
            for ratio in sorted({r for r in ratios if r <= 1}):
                draw.mark("tick", plot.x(ratio), plot.y(y + 0.3), 7, colour, 0.8)
        elif max(ratios) <= 1:
            draw.mark("tick", plot.x(max(ratios)), plot.y(y + 0.18), 5, TEXT, 1.2)
        for ratio in sorted({r for r in ratios if 1 < r < _FAR}):
            draw.mark("cross", plot.x(ratio), plot.y(y + 0.3), 4, BAD)
        if _FAR in ratios:
            draw.mark("right", plot.x(_FAR), plot.y(y + 0.3), 4, BAD)
    draw.line([(plot.x(1.0), plot.y.start), (plot.x(1.0), plot.y.end)], BAD, 1.0, BOUND)
    plot.below(_error_ticks(top), "error / bound")
    return draw.svg()


def _error_ticks(top: float) -> list[Tick]:
    if top < _FAR:
        return [(_FLOOR, "<0.001"), (2.0**-6, "1/64"), (2.0**-3, "1/8"), (1.0, "1")]
    return [(_FLOOR, "<0.001"), (2.0**-5, "1/32"), (1.0, "1"), (2.0**5, "32"), (_FAR, ">1000")]


def _ridge(plot: Frame, y: float, binned: Bins, colour: str, worst: float) -> None:
    """Steps whose height is the logarithm of the share of elements, so that a single wrong one shows."""
    total = sum(count for _, _, count in binned)
    merged: dict[tuple[float, float], int] = {}
    for low, high, count in binned:
        key = (0.0, _FLOOR) if high <= _FLOOR * 1.0001 else (low, high)
        merged[key] = merged.get(key, 0) + count
    furthest = max((low for (low, _), count in merged.items() if count), default=0.0)
    for beyond in (False, True):
        steps: list[tuple[float, float]] = []
        for (low, high), count in merged.items():
            if (low >= 0.9999) is not beyond or low > furthest:
                continue
            left, right = max(low, _FLOOR), min(high if math.isfinite(high) else max(worst, low), plot.x.high)
            share = count / total if total else 0.0
            height = 0.85 * max(1 + math.log10(share) / _RARE, 0.05) if share > 0 else 0.0
            steps += [(plot.x(min(left, plot.x.high)), plot.y(y + height)), (plot.x(right), plot.y(y + height))]
        if any(at < plot.y(y) for _, at in steps):
            outline = [(steps[0][0], plot.y(y)), *steps, (steps[-1][0], plot.y(y))]
            if beyond:
                plot.picture.hatch(outline)
            else:
                plot.picture.area(outline, colour)


def against_reduction(document: Results, advance: Callable[[], None]) -> list[Plot]:
    """Per op with sums of more than one length: the worst error at each length, in bounds."""
    cells = [c for c in _ran(document) if c.reduction and math.isfinite(c.ratio or 0.0) and c.ratio]
    names, wrong = implementations(document), _wrong(document)
    plots = []
    for number, (op, mine) in enumerate(_by_op(cells).items()):
        if len({c.reduction for c in mine}) > 1:
            plots.append(Plot(op, _growth(f"k{number}", op, mine, names), wrong.get(op, "")))
        advance()
    return plots


def _growth(name: str, op: str, cells: Sequence[Cell], names: Sequence[str]) -> str:
    worst: dict[tuple[str, str], dict[int, float]] = {}
    for cell in cells:
        of = worst.setdefault((cell.implementation, cell.dtype), {})
        of[cell.reduction or 0] = max(of.get(cell.reduction or 0, 0.0), cell.ratio or 0.0)
    ks = sorted({k for of in worst.values() for k in of})
    lowest = max(min(min(of.values()) for of in worst.values()) / 2, _FLOOR)
    highest = max(2.0, min(max(max(of.values()) for of in worst.values()), _FAR) * 2)
    bounds = powers(lowest, highest, 6, lambda v: (f"{v:g}" if v < _FAR else ">1000") if v >= 1 else f"1/{1 / v:.0f}")
    title = f"Worst error of {op} against the number of terms summed"
    rim = (ks[-1] / ks[0]) ** 0.04
    across, up = (ks[0] / rim, ks[-1] * rim), (lowest, highest)
    labels = [label for _, label in bounds]
    plot = frame(name, title, 165.6, across, up, labels, logarithmic=(True, True), upright=True)
    draw = plot.picture
    plot.beside(bounds, grid=True)
    plot.upright("worst error / bound")
    for (implementation, dtype), of in worst.items():
        style = style_of(implementation, names)
        points = {k: (plot.x(k), plot.y(min(max(of[k], _FLOOR), _FAR))) for k in sorted(of)}
        draw.line(list(points.values()), SERIES[style], 0.9, DASHES.get(dtype, ""))
        for k, (x, y) in points.items():
            draw.mark(MARKERS[style], x, y, 3, SERIES[style])
            if of[k] > 1:
                draw.mark("cross", x, y, 7, BAD, 1.2)
    draw.line([(plot.x.start, plot.y(1.0)), (plot.x.end, plot.y(1.0))], BAD, 1.0, BOUND)
    terms = powers(ks[0], ks[-1], 6, lambda k: f"{k:,.0f}" if k < 10_000 else f"{k / 1024:.0f}k")
    plot.below(terms, "K, terms summed")
    return draw.svg()


def key(name: str, names: Sequence[str], dtypes: Sequence[str]) -> str:
    """The colours, markers and dashes of a section's plots, once."""
    if not names:
        return ""
    lines = dtypes_of(set(dtypes))
    draw = Picture(name, f"Key: {', '.join([*names, *map(short, lines)])}", 0.0)
    x, y = 2.0, 10.0
    for text, implementation in [*((n, True) for n in names), *((d, False) for d in lines)]:
        shown = text if implementation else short(text)
        wide = 20 + width_of(shown)
        if x > 2.0 and x + wide > WIDTH:
            x, y = 2.0, y + 14.0
        if implementation:
            style = style_of(text, names)
            draw.mark(MARKERS[style], x + 7, y - 3, 5, SERIES[style])
        else:
            draw.line([(x, y - 3), (x + 14, y - 3)], TEXT, 1.2, DASHES.get(text, ""))
        draw.text(x + 18, y, shown, room=WIDTH - x - 18)
        x += wide + 10
    draw.height = y + 5
    return draw.svg()


def roofline(document: Results) -> list[Plot]:
    """The share of the roofline that each implementation reaches, and its time against the least possible time."""
    timings, names = document.timings, implementations(document)
    with_floor = [t for t in timings if t.floor_seconds and t.percent_of_roofline is not None and t.seconds > 0]
    if not with_floor:
        shown = [t for t in timings if t.seconds > 0]
        return [Plot("Time of the case that was timed", _dots("t0", shown, names, None))] if shown else []
    return [
        Plot("Share of the roofline reached", _dots("t0", with_floor, names, 100.0)),
        Plot("Time against the least possible time", _times(with_floor, names)),
    ]


def _narrowest(timings: Sequence[Timing]) -> list[Timing]:
    """Of each op x implementation the dtype that models run in."""
    order = ("bfloat16", "float16", "float32")
    best: dict[tuple[str, str], Timing] = {}
    for t in sorted(timings, key=lambda t: order.index(t.dtype) if t.dtype in order else len(order)):
        best.setdefault((t.op, t.implementation), t)
    return list(best.values())


def _decades(low: float, high: float) -> list[Tick]:
    """Times of one digit from ``low`` to ``high``: powers of ten, and 2 and 5 of them where that are few."""
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**e for e in exponents for step in steps]
    return [(v, seconds(v)) for v in values if low <= v * 1.000001 and v <= high * 1.000001]


def _dots(name: str, timings: Sequence[Timing], names: Sequence[str], full: float | None) -> str:
    """One line per op; with ``full``, per cent of the roofline, otherwise the time."""
    ops = list(dict.fromkeys(t.op for t in timings))
    values = [t.seconds for t in timings]
    most = max([105.0, *(1.05 * (t.percent_of_roofline or 0.0) for t in timings)])
    across = (min(values) / 1.3, max(values) * 1.3) if full is None else (0.0, most)
    title = "Time of each op, by implementation" if full is None else "Per cent of the roofline"
    height = _BELOW + 13.7 * len(ops)
    plot = frame(name, title, height, across, (len(ops) - 0.5, -0.5), ops, logarithmic=(full is None, False), size=7)
    plot.beside(list(enumerate(ops)), 7, grid=True)
    if full is None:
        plot.below(_decades(*across), "time")
    else:
        plot.below(
            [(float(v), str(v)) for v in range(0, int(most) + 1, 20 * math.ceil(most / 150))], "% of the roofline"
        )
        plot.picture.line([(plot.x(full), plot.y.start), (plot.x(full), plot.y.end)], TEXT, 1.0, BOUND)
    for t in _narrowest(timings):
        style = style_of(t.implementation, names)
        value = t.seconds if full is None else t.percent_of_roofline or 0.0
        y = ops.index(t.op) + (style - 2) * 0.11  # side by side where they coincide
        plot.picture.mark(MARKERS[style], plot.x(value), plot.y(y), 4, SERIES[style])
    return plot.picture.svg()


def _times(timings: Sequence[Timing], names: Sequence[str]) -> str:
    floors = [t.floor_seconds or 0.0 for t in timings]
    low, high = min(floors) / 1.5, max(floors) * 1.5
    slowest = max(high / 0.1, *(t.seconds * 1.3 for t in timings))
    least = min(low, *(t.seconds / 1.3 for t in timings))
    marks = _decades(least, slowest)
    title = "Measured time against the least possible time of the roofline"
    labels = [label for _, label in marks]
    axes = (True, True)
    plot = frame("t1", title, 237.6, (low, high), (least, slowest), labels, logarithmic=axes, upright=True, right=24)
    plot.beside(marks, grid=True)
    plot.upright("measured time")
    plot.below(_decades(low, high), "least possible time (roofline)", grid=True)
    for share, dashes in ((1.0, ""), (0.5, "4 2"), (0.1, "1 2")):
        ends = [(plot.x(floor), plot.y(floor / share)) for floor in (low, high)]
        plot.picture.line(ends, TEXT, 0.8, dashes)
        plot.picture.text(plot.x.end + 2, ends[1][1] + 2.5, f"{share:.0%}", size=7)
    for t in timings:
        style = style_of(t.implementation, names)
        plot.picture.mark(MARKERS[style], plot.x(t.floor_seconds or 0.0), plot.y(t.seconds), 3.5, SERIES[style])
    return plot.picture.svg()
