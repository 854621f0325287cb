"""A benchmark as a Markdown table, and as the report's roofline plots in files of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferryman.porting.bench.compare import Change
from ferryman.porting.bench.document import Benchmark, Cell, Times
from ferryman.porting.judging.results import Results, Timing
from ferryman.porting.report import plots
from ferryman.porting.report.text import short, table_row

_COLUMNS = (
    "op",
    "case",
    "dtype",
    "contender",
    "us cold",
    "spread",
    "us warm",
    "us host",
    "of copy",
    "of product",
    "of roofline",
    "GB/s",
    "TFLOP/s",
    "",
)
# the report's colours by day, for a plot that stands alone
_COLOURS = (
    "--text:#1b1f24;--line:#d5dae1;--wrong:#b3102a;--panel:#fff;--series-0:#0060a8;--series-1:#b45300;"
    "--series-2:#00735a;--series-3:#9a3a78;--series-4:#5f6670;--series-5:#6a4fc4"
)


def rows(document: Benchmark) -> list[list[str]]:
    """A row for each contender on each cell, under `_COLUMNS`."""
    return [_row(cell, times) for cell in document.cells for times in cell.times]


def columns() -> tuple[str, ...]:
    return _COLUMNS


def _row(cell: Cell, times: Times) -> list[str]:
    seconds, said = times.seconds, times.note or ""
    rates = ["", ""]
    if seconds is not None:
        rates = [f"{cell.bytes / seconds / 1e9:.0f}", f"{cell.flops / seconds / 1e12:.3g}" if cell.flops else ""]
    if times.skipped:
        said = "not timed"
    return [
        cell.op,
        cell.case,
        short(cell.dtype),
        _contender(times),
        _us(seconds),
        _two(times.spread),
        _us(times.warm_seconds),
        _us(times.host_seconds),
        _two(times.of_copy),
        _two(times.of_product),
        _two(times.of_roofline),
        *rates,
        said,
    ]


def _contender(times: Times) -> str:
    return times.name if times.role == "implementation" else f"{times.name} ({times.role})"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def head(document: Benchmark) -> list[str]:
    """What a reader must know before the numbers, a line each."""
    facts, limits = document.environment, document.ceilings
    lines = [
        f"{facts.device_name} ({facts.profile}), torch {facts.versions['torch']}, {facts.time}: "
        f"copy {limits.copy_bytes_per_s / 1e12:.3g} TB/s, product of {limits.product} "
        f"{limits.product_flops_per_s / 1e12:.4g} TFLOP/s, measured in this run"
    ]
    if document.left:
        lines.append(f"PARTIAL: the run was stopped, {document.left} cells were not timed")
    if all(cell.floor_seconds is None for cell in document.cells):
        lines.append("no roofline: the device's profile has no bandwidth and no peaks")
    noises = sorted(cell.noise for cell in document.cells if cell.noise is not None)
    if noises:
        lines.append(f"noise, one contender timed twice: median {noises[len(noises) // 2]:.1%}, most {noises[-1]:.1%}")
    warm = [c for c in document.cells if c.rotated_over_cache is not None and c.rotated_over_cache < 4]
    if warm:
        lines.append(
            f"{len(warm)} of {len(document.cells)} cells rotated less than 4 caches of inputs: their cold times are "
            "partly warm"
        )
    sources = dict.fromkeys(cell.condition.source for cell in document.cells)
    clocks = [cell.condition.sm_clock_mhz for cell in document.cells if cell.condition.sm_clock_mhz]
    if clocks:
        powers = [cell.condition.power_w[1] for cell in document.cells if cell.condition.power_w]
        lines.append(
            f"SM clock {min(c[0] for c in clocks)} to {max(c[1] for c in clocks)} MHz, up to {max(powers):.0f} W "
            f"({', '.join(sources)})"
        )
    else:
        lines.append(f"clocks, power and throttling: {', '.join(sources)}")
    for cell in document.cells:
        lines += [f"NOT TO BE TRUSTED: {cell.op} {cell.case}: {why}" for why in cell.untrusted]
    for peer in document.peers:
        lines.append(
            f"{peer.name} {peer.version}" if peer.reason is None else f"{peer.name} took no part: {peer.reason}"
        )
    return lines


def untimed(document: Benchmark) -> list[str]:
    """Why contenders were not timed, a line for each reason: a cell of the table has no room for it."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for cell in document.cells:
        for times in cell.times:
            if times.skipped:
                cases.setdefault((cell.op, _contender(times), times.skipped), []).append(cell.case)
    return [f"NOT TIMED {op} {name}, {', '.join(own)}: {reason}" for (op, name, reason), own in cases.items()]


def standing(document: Benchmark) -> list[str]:
    """Per op: our fastest implementation against the best peer, geometric mean over cells, and the worst cell."""
    lines = []
    for op in dict.fromkeys(cell.op for cell in document.cells):
        ratios: list[tuple[float, str]] = []
        for cell in (c for c in document.cells if c.op == op and not c.untrusted):
            best = {
                role: min((t.seconds for t in cell.times if t.role == role and t.seconds is not None), default=None)
                for role in ("implementation", "peer")
            }
            if best["implementation"] is not None and best["peer"] is not None:
                ratios.append((best["peer"] / best["implementation"], cell.case))
        if ratios:
            mean = math.exp(sum(math.log(r) for r, _ in ratios) / len(ratios))
            worst = min(ratios)
            lines.append(
                f"{op}: {mean:.2f} x the best peer over {len(ratios)} cells; worst {worst[0]:.2f} ({worst[1]})"
            )
    return lines


def markdown(document: Benchmark, changes: Sequence[Change] = ()) -> str:
    lines = [f"{line}  " for line in head(document)]
    compared = [*standing(document), *untimed(document)]
    if compared:
        lines += ["", *[f"- {line}" for line in compared]]
    lines += ["", table_row(_COLUMNS), "|" + "---|" * len(_COLUMNS), *map(table_row, rows(document))]
    if changes:
        lines += [
            "",
            "| op | case | contender | verdict | now / before | noise | confirmed |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += map(table_row, change_rows(changes))
    return "\n".join(lines) + "\n"


def change_rows(changes: Sequence[Change]) -> list[list[str]]:
    return [
        [c.op, c.case, c.name, c.verdict, _two(c.ratio), "" if c.noise is None else f"{c.noise:.1%}", _two(c.confirmed)]
        for c in changes
    ]


def figures(document: Benchmark) -> dict[str, str]:
    """The report's roofline plots as SVG files by name. Raises BackendUnavailable without matplotlib."""
    timings = [
        _timing(document, cell, times)
        for cell in document.cells
        for times in cell.times
        if times.seconds is not None and times.role != "reference"
    ]
    shown = Results(environment=document.environment, cells=[], timings=timings)
    names = plots.implementations(shown)
    svgs = {plot.title.lower().replace(" ", "-"): plot.svg for plot in plots.roofline(shown)}
    svgs["key"] = plots.key("key-t", names, [])
    return {name: _alone(svg) for name, svg in svgs.items() if svg}


def _timing(document: Benchmark, cell: Cell, times: Times) -> Timing:
    share = None if times.of_roofline is None else 100 * times.of_roofline
    return Timing(
        op=cell.op,
        implementation=times.name,
        device=document.environment.device,
        dtype=cell.dtype,
        case=cell.case,
        seconds=times.seconds or 0.0,
        clock="host clock" if times.method == "host clock" else "device events",
        floor_seconds=cell.floor_seconds,
        bound_by=cell.bound_by,
        percent_of_roofline=share,
    )


def _alone(svg: str) -> str:
    return svg.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" style="{_COLOURS}" ', 1) + "\n"
