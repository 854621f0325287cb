"""The HTML report's plots, as SVG that follows the page's colours. matplotlib comes with the extra ``report``.

Each plot is small enough to be read at 360 pixels, and the page lays them out in a grid. Text stays text (a browser's
font, searchable), colours are the page's variables (light, dark, print), and equal data give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.porting.judging.results import Cell, Results, Timing
from ferryman.porting.report.bins import Bins, bins
from ferryman.porting.report.drawing import (
    BAD,
    DASHES,
    GRID,
    MARKERS,
    SERIES,
    TEXT,
    canvas,
    drawing,
    dtypes_of,
    element,
    style_of,
)
from ferryman.porting.report.text import WRONG, seconds, short

_FLOOR = 2.0**-10  # errors below a thousandth of the bound are one bin
_FAR = 2.0**10  # errors beyond a thousand bounds are at the edge
_RARE = 7.0  # decades that a ridge's height spans


def available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


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
    rows = [
        (i, d, [c for c in cells if (c.implementation, c.dtype) == (i, d)])
        for i in dict.fromkeys(c.implementation for c in cells)
        for d in dtypes_of({c.dtype for c in cells if c.implementation == i})
    ]
    with drawing(name):
        figure, axes = canvas(0.75 + 0.2 * len(rows))
        top = _FAR if any((c.ratio or 0.0) > 1 for c in cells) else 4.0
        for y, (implementation, _, mine) in enumerate(reversed(rows)):
            colour = SERIES[style_of(implementation, names)]
            binned = None if edges is None else bins(mine, edges)
            axes.axhline(y, color=GRID, linewidth=0.4, zorder=1)
            if binned is not None:
                _ridge(axes, y, binned, colour, max(c.ratio or 0.0 for c in mine))
            ratios = [min(max(c.ratio or 0.0, _FLOOR), _FAR) for c in mine]
            right = [r for r in ratios if r <= 1]
            wrong = [r for r in ratios if 1 < r < _FAR]
            if binned is None:
                axes.plot(right, [y + 0.3] * len(right), "|", color=colour, markersize=7, markeredgewidth=0.8)
            elif len(right) == len(ratios):
                axes.plot([max(right)], [y + 0.18], "|", color=TEXT, markersize=5, markeredgewidth=1.2, zorder=4)
            axes.plot(wrong, [y + 0.3] * len(wrong), "x", color=BAD, markersize=4, zorder=4)
            if _FAR in ratios:
                axes.plot([_FAR], [y + 0.3], ">", color=BAD, markersize=4, clip_on=False, zorder=4)
        axes.axvline(1.0, color=BAD, linewidth=1.0, linestyle=(0, (3, 1.5)), zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_xlim(_FLOOR, top)
        axes.set_ylim(-0.1, len(rows))
        axes.set_yticks(range(len(rows)), [f"{i} {short(d)}" for i, d, _ in reversed(rows)], va="bottom")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        _error_ticks(axes, top)
        axes.set_xlabel("error / bound")
        return element(figure, name, f"Errors of {op} against the bound, by implementation and dtype")


def _error_ticks(axes: Any, top: float) -> None:
    if top < _FAR:
        axes.set_xticks([_FLOOR, 2.0**-6, 2.0**-3, 1.0], ["<0.001", "1/64", "1/8", "1"])
    else:
        axes.set_xticks([_FLOOR, 2.0**-5, 1.0, 2.0**5, _FAR], ["<0.001", "1/32", "1", "32", ">1000"])
    axes.minorticks_off()


def _ridge(axes: Any, y: float, binned: Bins, colour: str, worst: float) -> None:
    """Steps whose height is the logarithm of the share of elements, so that a single wrong one shows."""
    total = sum(count for _, _, count in binned)
    merged: dict[tuple[float, float], int] = {}
    for low, high, count in binned:
        key = (0.0, _FLOOR) if high <= _FLOOR * 1.0001 else (low, high)
        merged[key] = merged.get(key, 0) + count
    furthest = max((low for (low, _), count in merged.items() if count), default=0.0)
    for side in (False, True):
        xs: list[float] = []
        heights: list[float] = []
        for (low, high), count in merged.items():
            if (low >= 0.9999) is not side or low > furthest:
                continue
            left, right = max(low, _FLOOR / 2), min(high if math.isfinite(high) else max(worst, low), _FAR * 2)
            share = count / total if total else 0.0
            height = 0.85 * max(1 + math.log10(share) / _RARE, 0.05) if share > 0 else 0.0
            xs += [left, right]
            heights += [y + height] * 2
        if any(h > y for h in heights):
            style = {"facecolor": "none", "hatch": "//////", "edgecolor": BAD} if side else {"facecolor": colour}
            axes.fill_between(
                xs, y, heights, linewidth=0.6 if side else 0, alpha=1.0 if side else 0.75, zorder=2, **style
            )


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
    with drawing(name):
        figure, axes = canvas(2.3)
        for (implementation, dtype), of in worst.items():
            style = style_of(implementation, names)
            ks = sorted(of)
            shown = [min(max(of[k], _FLOOR), _FAR) for k in ks]
            axes.plot(
                ks,
                shown,
                color=SERIES[style],
                marker=MARKERS[style],
                markersize=3,
                linewidth=0.9,
                linestyle=DASHES.get(dtype, "-"),
            )
            wrong = [k for k in ks if of[k] > 1]
            axes.plot(
                wrong,
                [min(of[k], _FAR) for k in wrong],
                "x",
                color=BAD,
                markersize=7,
                markeredgewidth=1.2,
                zorder=4,
            )
        axes.axhline(1.0, color=BAD, linewidth=1.0, linestyle=(0, (3, 1.5)))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        lowest = min(min(of.values()) for of in worst.values())
        highest = max(max(of.values()) for of in worst.values())
        axes.set_ylim(max(lowest / 2, _FLOOR), max(2.0, min(highest, _FAR) * 2))
        axes.xaxis.set_major_formatter(lambda k, _: f"{k:,.0f}" if k < 10_000 else f"{k / 1024:.0f}k")
        axes.yaxis.set_major_formatter(lambda v, _: (f"{v:g}" if v < _FAR else ">1000") if v >= 1 else f"1/{1 / v:.0f}")
        axes.minorticks_off()
        axes.grid(True, axis="y")
        axes.set_xlabel("K, terms summed")
        axes.set_ylabel("worst error / bound")
        return element(figure, name, f"Worst error of {op} against the number of terms summed")


def key(name: str, names: Sequence[str], dtypes: Sequence[str]) -> str:
    """The colours, markers and dashes of a section's plots, once."""
    lines = dtypes_of(set(dtypes))
    if not names:
        return ""
    with drawing(name):
        from matplotlib.lines import Line2D

        handles = [
            Line2D(
                [],
                [],
                color=SERIES[style_of(n, names)],
                marker=MARKERS[style_of(n, names)],
                markersize=5,
                linewidth=0,
                label=n,
            )
            for n in names
        ]
        handles += [Line2D([], [], color=TEXT, linestyle=DASHES.get(d, "-"), label=short(d)) for d in lines]
        columns = 3
        figure, axes = canvas(0.22 * math.ceil(len(handles) / columns) + 0.05)
        axes.set_axis_off()
        axes.legend(handles=handles, ncols=columns, loc="center left", fontsize=8, borderpad=0, columnspacing=1.2)
        return element(figure, name, f"Key: {', '.join([*names, *map(short, lines)])}")


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


def _dots(name: str, timings: Sequence[Timing], names: Sequence[str], full: float | None) -> str:
    """One line per op; with ``full``, per cent of the roofline, otherwise the time."""
    ops = list(dict.fromkeys(t.op for t in timings))
    with drawing(name):
        from matplotlib.ticker import LogLocator

        figure, axes = canvas(0.6 + 0.19 * len(ops))
        for t in _narrowest(timings):
            style = style_of(t.implementation, names)
            value = t.seconds if full is None else t.percent_of_roofline
            y = ops.index(t.op) + (style - 2) * 0.11  # side by side where they coincide
            axes.plot([value], [y], MARKERS[style], color=SERIES[style], markersize=4)
        axes.set_ylim(len(ops) - 0.5, -0.5)
        axes.set_yticks(range(len(ops)), ops, fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="y")
        if full is None:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda v, _: seconds(v))
            axes.minorticks_off()
            values = [t.seconds for t in timings]
            axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
            close = max(values) < 100 * min(values)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if close else (1.0,)))
            axes.set_xlabel("time")
        else:
            axes.axvline(full, color=TEXT, linewidth=1.0, linestyle=(0, (3, 1.5)))
            axes.set_xlim(0, max(105.0, *(1.05 * (t.percent_of_roofline or 0.0) for t in timings)))
            axes.set_xlabel("% of the roofline")
        return element(
            figure, name, "Time of each op, by implementation" if full is None else "Per cent of the roofline"
        )


def _times(timings: Sequence[Timing], names: Sequence[str]) -> str:
    with drawing("t1"):
        figure, axes = canvas(3.3)
        floors = [t.floor_seconds or 0.0 for t in timings]
        low, high = min(floors) / 1.5, max(floors) * 1.5
        for share, dashes in ((1.0, "-"), (0.5, (0, (4, 2))), (0.1, (0, (1, 2)))):
            axes.plot([low, high], [low / share, high / share], color=TEXT, linewidth=0.8, linestyle=dashes, zorder=1)
            axes.annotate(
                f"{share:.0%}",
                (high, high / share),
                fontsize=7,
                ha="left",
                va="center",
                xytext=(2, 0),
                textcoords="offset points",
                annotation_clip=False,
            )
        for implementation in dict.fromkeys(t.implementation for t in timings):
            style = style_of(implementation, names)
            mine = [t for t in timings if t.implementation == implementation]
            axes.plot(
                [t.floor_seconds for t in mine],
                [t.seconds for t in mine],
                MARKERS[style],
                color=SERIES[style],
                markersize=3.5,
                alpha=0.8,
                linewidth=0,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda v, _: seconds(v))
        axes.minorticks_off()
        axes.grid(True)
        axes.set_xlabel("least possible time (roofline)")
        axes.set_ylabel("measured time")
        return element(figure, "t1", "Measured time against the least possible time of the roofline")
