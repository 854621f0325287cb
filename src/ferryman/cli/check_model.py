"""How `ferryman check --model` shows its result: tables, Markdown, JUnit."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from ferryman.cli import output

if TYPE_CHECKING:
    from ferryman.porting.model import Measure, ModelResult

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def tables(result: ModelResult) -> list[Table]:
    """(title, headers, rows) of everything that was measured and counted."""
    errors = []
    for layer in result.layers:
        errors += [
            _measure(f"layer {layer.layer} alone", layer.alone),
            _measure(f"layer {layer.layer} worst token", layer.worst_token),
            _measure(f"layer {layer.layer} bias", layer.bias),
            _measure(f"layer {layer.layer}", layer.accumulated),
        ]
    errors += [_measure(m.name, m) for m in result.logits]
    errors += [_measure(m.name if m.name == "loss" else f"gradient, {m.name}", m) for m in result.gradients]
    calls: list[tuple[str, ...]] = [
        (
            c.phase,
            c.op,
            ", ".join(f"{name} {n}" for name, n in sorted(c.served.items())) or "none",
            str(c.expected),
            _mark(c.ok),
        )
        for c in result.calls
    ]
    return [
        ("Teacher-forced, against the unported model", ("measure", "value", "one-ulp floor", "limit", ""), errors),
        ("Calls", ("phase", "op", "served by", "expected", ""), calls),
    ]


def header(result: ModelResult) -> str:
    cuts = f" ({'; '.join(result.cuts)})" if result.cuts else ""
    return (
        f"{result.verdict}: {result.model}{cuts}, {result.parameters / 1e6:.1f}M parameters, {result.dtype} on "
        f"{result.device_name}, {result.batch} x {result.tokens} tokens, "
        f"transformers {result.versions['transformers']}, "
        f"{result.seconds:.0f} s"
    )


def sentences(result: ModelResult) -> list[str]:
    """What no table holds."""
    greedy = result.greedy
    found = [
        f"greedy tokens: {greedy.identical} of {greedy.sequences} sequences identical over {greedy.steps} steps "
        f"({greedy.identical_at_floor} at the floor)"
    ]
    found += [
        f"sequence {sequence} parts at step {step}, where the reference prefers its token by {gap:.3g}; "
        f"excused up to {greedy.gap_limit:.3g}"
        for sequence, step, gap in greedy.partings
    ]
    found.append(f"unported again: {'its logits are bitwise those of before' if result.restored else 'NOT restored'}")
    found += [f"left as it was: {u['path']} ({u['module']}): {u['reason']}" for u in result.unsupported]
    found += [f"fallback: {text}" for text in result.fallbacks]
    found += [f"floor: {result.floor_meaning}", f"limits: {result.limits_meaning}"]
    if result.verdict == "SIMULATED":
        found.append("SIMULATED: Triton's kernels were interpreted on the CPU, which is no evidence about a device")
    return found + [f"FAIL: {reason}" for reason in result.reasons]


def show(result: ModelResult) -> None:
    output.say(header(result))
    for title, headers, rows in tables(result):
        output.say()
        output.table(headers, rows, title=title, right=("value", "one-ulp floor", "limit", "expected"))
    output.say()
    for sentence in sentences(result):
        output.say(sentence)


def markdown(result: ModelResult) -> str:
    lines = [f"# {header(result)}"]
    for title, headers, rows in tables(result):
        lines += ["", f"## {title}", ""]
        for row in (headers, tuple("---" for _ in headers), *rows):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in sentences(result)), ""])


def junit(result: ModelResult) -> str:
    """One test for the model; failed with its reasons, skipped where it was only simulated."""
    reasons = quoteattr("; ".join(result.reasons) or result.verdict)
    inside = {"FAIL": f"<failure message={reasons}/>", "SIMULATED": f"<skipped message={reasons}/>"}.get(
        result.verdict, ""
    )
    failed, simulated = int(result.verdict == "FAIL"), int(result.verdict == "SIMULATED")
    counts = f'tests="1" failures="{failed}" errors="0" skipped="{simulated}"'
    case = f"<testcase name={quoteattr(result.model)} classname={quoteattr(f'model.{result.family}.{result.dtype}')}"
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites {counts}>\n<testsuite name="model" {counts}>\n'
        f'{case} time="{result.seconds}">{inside}</testcase>\n</testsuite>\n</testsuites>\n'
    )


def _measure(name: str, found: Measure) -> tuple[str, ...]:
    return name, f"{found.value:.3g}", f"{found.floor:.3g}", f"{found.limit:.3g}", _mark(found.ok)


def _mark(ok: bool) -> str:
    return "yes" if ok else "no"
