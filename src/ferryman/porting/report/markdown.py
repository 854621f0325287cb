"""A result document as Markdown: one row per op x implementation, then what failed and what did not run.

It fits where CI systems show it: a GitHub step summary takes 1 MiB and drops the whole of a longer one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ferryman.porting.judging.results import WITH_LAUNCHES, Cell, GateName, Results, Timing, Verdict, number
from ferryman.porting.report.text import (
    GATES,
    MEANING,
    SHORT,
    WRONG,
    element,
    failed_gates,
    place,
    plain,
    seconds,
    table_row,
    verdict,
)

__all__ = ["LIMIT", "MEANING", "duration", "markdown", "percent"]

LIMIT = 1024 * 1024  # bytes
_MOST = 40
_EACH = 3  # wrong cells of one op x implementation, so that each has its turn
_REASON = 600  # characters of one reason
_ROOM = 4096  # bytes kept for headings and counts of what is left out


class _Page:
    """Lines up to a number of bytes; what does not fit is counted."""

    def __init__(self, limit: int) -> None:
        self.lines: list[str] = []
        self._left = limit - _ROOM

    def head(self, *lines: str) -> None:
        """Headings and table heads: few and short, always there."""
        self.lines += lines

    def items(self, lines: Iterable[str], total: int, what: str) -> None:
        """As many of ``total`` lines as given and as fit, then how many are missing."""
        shown = 0
        for line in lines:
            size = len(line.encode()) + 1
            if size > self._left:
                break
            self._left -= size
            self.lines.append(line)
            shown += 1
        if shown < total:
            self.lines += ["", f"And {total - shown} more {what} of {total}; the JSON document has them all."]


def markdown(document: Results, limit: int = LIMIT) -> str:
    """At most ``limit`` bytes of UTF-8; whatever is left out is counted where it would stand."""
    facts = document.environment
    verdicts = Counter(row.verdict for row in document.summary)
    page = _Page(limit)
    page.head(
        f"# Parity on {_text(facts.device_name or facts.device)} ({_text(facts.profile)}, {_text(facts.arch)})",
        "",
        f"**{verdict(document)}**. {len(document.summary)} op x implementation rows: {_counts(dict(verdicts))}. "
        f"{len(document.cells)} cells in {facts.seconds:.0f} s, tier {_text(facts.tier)}, seed {facts.seed}, "
        f"torch {_text(facts.versions.get('torch', '?'))}, {_text(facts.time)}.",
        "",
    )
    _wrong(page, [c for c in document.cells if c.verdict in WRONG])
    _rows(page, document)
    page.head("", *(f"- **{v}**: {MEANING[v]}" for v in MEANING if any(v in r.counts for r in document.summary)))
    _gates(page, document)
    _numerics(page, document)
    reasons = _reasons(document.cells)
    if reasons:
        page.head("", "## What did not run, and why", "")
        page.items(reasons[:_MOST], len(reasons), "reasons")
    return "\n".join(page.lines) + "\n"


def _wrong(page: _Page, bad: Sequence[Cell]) -> None:
    if not bad:
        return
    page.head("## What is wrong", "")
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in bad:
        rows.setdefault((cell.op, cell.implementation), []).append(cell)
    shown = [_failure(c) for i in range(_EACH) for cells in rows.values() for c in cells[i : i + 1]][:_MOST]
    page.items(shown, len(bad), "wrong cells")
    page.head("")


def _failure(cell: Cell) -> str:
    parts = [
        f"- `{cell.op}` {cell.implementation}, {cell.dtype}, case {_code(cell.case)}: {cell.verdict}. "
        f"{_text(cell.reason or MEANING[cell.verdict])}"
    ]
    more = [f"{name} ({GATES[name][0]})" for name, _ in failed_gates(cell)]
    if more:
        parts.append(f"fails {', '.join(more)}")
    if cell.worst is not None and place(cell.worst) not in (cell.reason or ""):
        parts.append(f"worst {_text(element(cell.worst))}")
    if cell.reading:
        parts.append(f"**{_text(cell.reading)}**")
    return "; ".join(parts)


def _rows(page: _Page, document: Results) -> None:
    dtypes = [d for d in SHORT if any(d in row.ratio for row in document.summary)]
    head = ["op", "implementation", "verdict", "cells", "refused", *(SHORT[d] for d in dtypes), "time", "of roofline"]
    page.head("Worst error in units of its derived bound (at most 1 is right), by dtype:", "")
    page.head(_row(head), _row(["---"] * len(head)))
    timings: dict[tuple[str, str], list[Timing]] = {}
    for t in document.timings:
        timings.setdefault((t.op, t.implementation), []).append(t)
    lines = []
    for row in document.summary:
        shown = _timing(timings.get((row.op, row.implementation), []))
        lines.append(
            _row(
                [
                    f"`{row.op}`",
                    row.implementation,
                    row.verdict,
                    _counts(row.counts),
                    str(row.refusals or "-"),
                    *(number(row.ratio.get(d)) for d in dtypes),
                    duration(shown),
                    percent(shown),
                ]
            )
        )
    page.items(lines, len(lines), "rows")


def _gates(page: _Page, document: Results) -> None:
    """In how many of the judged cells each gate passed, failed or did not apply, with the reasons why not."""
    names: list[GateName] = [g for g in GATES if any(g in c.gates for c in document.cells)]
    if not names:
        return
    counts: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    why: Counter[tuple[str, str]] = Counter()
    for cell in document.cells:
        of = counts.setdefault((cell.op, cell.implementation), Counter())
        for name, gate in cell.gates.items():
            of[name, gate.outcome] += 1
            if gate.outcome == "n/a":
                why[name, gate.reason or "no reason given"] += 1
    judged = [(key, of) for key, of in counts.items() if of]
    page.head("", "## Gates", "", "Cells in which each gate passed, failed (**FAIL**) or did not apply (n/a):", "")
    head = ["op", "implementation", *(f"{g} {GATES[g][0]}" for g in names)]
    page.head(_row(head), _row(["---"] * len(head)))
    page.items(
        [_row([f"`{op}`", implementation, *(_outcomes(of, g) for g in names)]) for (op, implementation), of in judged],
        len(judged),
        "rows",
    )
    if why:
        page.head("", "Not applicable, and why:", "")
        lines = [f"- {name}, {n} cells: {_text(reason)}" for (name, reason), n in why.most_common()]
        page.items(lines[:_MOST], len(lines), "reasons")


def _numerics(page: _Page, document: Results) -> None:
    """The profile's numeric facts that were verified; contradictions one by one."""
    if not document.numerics:
        return
    counts = Counter(f.outcome for f in document.numerics)
    page.head(
        "",
        "## Device arithmetic",
        "",
        "What the device profile states, measured: "
        + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
        + ".",
        "",
    )
    wrong = [f for f in document.numerics if f.outcome == "contradicted"]
    lines = [
        f"- **contradicted**: {_text(f.path)} is stated as {_text(str(f.stated))}, measured "
        f"{_text(str(f.measured))}{'. ' + _text(f.reason) if f.reason else ''}"
        for f in wrong
    ]
    page.items(lines[:_MOST], len(lines), "contradictions")


def _outcomes(of: Counter[tuple[str, str]], gate: str) -> str:
    words = (("fail", "**FAIL**"), ("pass", "pass"), ("n/a", "n/a"))
    return ", ".join(f"{of[gate, outcome]} {word}" for outcome, word in words if of[gate, outcome]) or "not judged"


def _text(text: str) -> str:
    """A document's text as Markdown that shows it: no line breaks, markup, links or table columns of its own."""
    text = plain(text)
    text = text if len(text) <= _REASON else text[:_REASON] + " .."
    for mark, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        ("`", "\\`"),
        ("](", "]\\("),
        ("][", "]\\["),
        ("**", "\\*\\*"),
    ):
        text = text.replace(mark, escaped)
    return text


def _code(text: str) -> str:
    text = plain(text).replace("`", "'")
    return f"`{text if len(text) <= _REASON else text[:_REASON] + ' ..'}`"


def _row(values: list[str]) -> str:
    return table_row(values)


def _counts(counts: dict[Verdict, int]) -> str:
    return ", ".join(f"{n} {v}" for v, n in sorted(counts.items(), key=lambda item: list(MEANING).index(item[0])))


def _reasons(cells: list[Cell]) -> list[str]:
    """One line per implementation and reason, with how many cells it stands for."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for cell in cells:
        if cell.verdict in ("NOT_RUN", "UNIMPLEMENTED", "COMPILED_ONLY"):
            counts[cell.verdict, cell.implementation, cell.reason or "no reason given"] += 1
    return [f"- {i}: {v}, {n} cells: {_text(why)}" for (v, i, why), n in counts.most_common()]


def _timing(timings: Sequence[Timing]) -> Timing | None:
    """The timing in the narrowest dtype that was timed: what models run in."""
    mine = {t.dtype: t for t in timings}
    return next((mine[d] for d in ("bfloat16", "float16", "float32") if d in mine), None)


def duration(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    launches = " with launches" if timing.clock == WITH_LAUNCHES else ""
    return f"{seconds(timing.seconds)}{launches} ({SHORT.get(timing.dtype, timing.dtype)} {_text(timing.case)})"


def percent(timing: Timing | None) -> str:
    if timing is None or timing.percent_of_roofline is None:
        return "-"
    return f"{timing.percent_of_roofline:.0f}% ({timing.bound_by})"
