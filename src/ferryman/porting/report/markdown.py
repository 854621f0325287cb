"""A result document as Markdown: one row per op x implementation, then what failed and what did not run."""

from __future__ import annotations

from collections import Counter

from ferryman.porting.results import Cell, Results, Row, Timing, Verdict, number

MEANING: dict[Verdict, str] = {
    "PASS": "ran on this device, and every gate that applies holds",
    "FAIL": "ran, and a gate does not hold",
    "MISTRUSTED": "ran, but the check itself could not judge it",
    "QUARANTINED": "its toolchain could not compile it",
    "SIMULATED": "ran in an interpreter on the CPU: no evidence about a device",
    "COMPILED_ONLY": "compiled for a device that is not here; did not run",
    "UNIMPLEMENTED": "refused: one of its conditions does not hold",
    "NOT_RUN": "did not run",
}
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_MOST = 40


def markdown(document: Results) -> str:
    facts = document.environment
    dtypes = [d for d in _SHORT if any(d in row.ratio for row in document.summary)]
    verdicts = Counter(row.verdict for row in document.summary)
    lines = [
        f"# Parity on {facts.device_name or facts.device} ({facts.profile}, {facts.arch})",
        "",
        f"{len(document.summary)} op x implementation rows: {_counts(dict(verdicts))}. "
        f"{len(document.cells)} cells in {facts.seconds:.0f} s, tier {facts.tier}, seed {facts.seed}, "
        f"torch {facts.versions.get('torch', '?')}, {facts.time}.",
        "",
        "Worst error in units of its derived bound (at most 1 is right), by dtype:",
        "",
    ]
    head = ["op", "implementation", "verdict", "cells", "refused", *(_SHORT[d] for d in dtypes), "time", "of roofline"]
    lines += [_row(head), _row(["---"] * len(head))]
    for row in document.summary:
        shown = _timing(document.timings, row)
        lines.append(_row([
            f"`{row.op}`", row.implementation, row.verdict, _counts(row.counts), str(row.refusals or "-"),
            *(number(row.ratio.get(d)) for d in dtypes), duration(shown), percent(shown),
        ]))  # fmt: skip
    lines += ["", *(f"- **{v}**: {MEANING[v]}" for v in MEANING if any(v in r.counts for r in document.summary))]
    bad = [c for c in document.cells if c.verdict in ("FAIL", "MISTRUSTED", "QUARANTINED")]
    if bad:
        lines += ["", "## What is wrong", ""]
        for c in bad[:_MOST]:
            lines.append(f"- `{c.op}` {c.implementation}, {c.dtype}, case `{c.case}`: {c.verdict}. {c.reason}")
        if len(bad) > _MOST:
            lines.append(f"- and {len(bad) - _MOST} more; the JSON document has them all")
    absent = _reasons(document.cells)
    if absent:
        lines += ["", "## What did not run, and why", "", *absent]
    return "\n".join(lines) + "\n"


def _row(values: list[str]) -> str:
    return "| " + " | ".join(v.replace("|", "\\|") for v in values) + " |"


def _counts(counts: dict[Verdict, int]) -> str:
    return ", ".join(f"{n} {v}" for v, n in sorted(counts.items(), key=lambda item: list(MEANING).index(item[0])))


def _reasons(cells: list[Cell]) -> list[str]:
    """One line per implementation and reason, with how many cells it stands for."""
    found: Counter[tuple[str, str, str]] = Counter()
    for cell in cells:
        if cell.verdict in ("NOT_RUN", "UNIMPLEMENTED"):
            found[cell.verdict, cell.implementation, cell.reason or "no reason given"] += 1
    lines = [f"- {i}: {v}, {n} cells: {why}" for (v, i, why), n in found.most_common(_MOST)]
    return lines + ([f"- and {len(found) - _MOST} more reasons"] if len(found) > _MOST else [])


def _timing(timings: list[Timing], row: Row) -> Timing | None:
    """The row's timing in the narrowest dtype that was timed: what models run in."""
    mine = {t.dtype: t for t in timings if (t.op, t.implementation) == (row.op, row.implementation)}
    return next((mine[d] for d in ("bfloat16", "float16", "float32") if d in mine), None)


def duration(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    value, unit = (timing.seconds * 1e6, "us") if timing.seconds < 1e-3 else (timing.seconds * 1e3, "ms")
    return f"{value:.3g} {unit} ({_SHORT.get(timing.dtype, timing.dtype)} {timing.case})"


def percent(timing: Timing | None) -> str:
    if timing is None or timing.percent_of_roofline is None:
        return "-"
    return f"{timing.percent_of_roofline:.0f}% ({timing.bound_by})"
