"""How `ferryman check --model` shows its result: tables, Markdown, JUnit."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from ferryman.cli import output
from ferryman.porting.report.html import tables_page
from ferryman.porting.report.text import table_row

if TYPE_CHECKING:
    from ferryman.porting.model.results import Measure, ModelResult, ModuleErrors

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
MODULE_HEADERS = ("module", "class", "worst tensor", "unported error", "ported error", "ratio", "limits away", "")
RIGHT = ("value", "one-ulp floor", "limit", "expected", *MODULE_HEADERS[3:7])
MOST = 8  # modules shown when all are right


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
    modules = sorted(result.modules, key=lambda m: m.away, reverse=True)
    shown = [m for m in modules if not m.ok] or modules[:MOST]
    return [
        ("Each module alone, against exact, worst first", MODULE_HEADERS, [_module(m, result) for m in shown]),
        ("Run another way, against eager", ("mode", "verdict", "worst module", "limits away"), _modes(result)),
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
    lines = [
        f"greedy tokens: {greedy.identical} of {greedy.sequences} sequences identical over {greedy.steps} steps "
        f"({greedy.identical_at_floor} at the floor)"
    ]
    lines += [
        f"sequence {sequence} parts at step {step}, where the reference prefers its token by {gap:.3g}; "
        f"excused up to {greedy.gap_limit:.3g}"
        for sequence, step, gap in greedy.partings
    ]
    lines += [
        f"exact {m.name}: {m.value:.3g}, limit {m.limit:.3g} (the unported model's own, or the floor: {m.floor:.3g})"
        for m in result.exact_logits
    ]
    hidden = len(result.modules) - MOST
    if hidden > 0 and all(m.ok for m in result.modules):
        lines.append(f"and {hidden} modules further within their limits; --json has every tensor of each")
    lines += [f"not compared alone: {m.path} ({m.module}): {m.note}" for m in result.modules if m.note]
    lines += [f"{m.mode}: {_mode(m.how, m.reason, m.bitwise)} ({m.seconds:.0f} s)" for m in result.modes]
    lines.append(f"unported again: {'its logits are bitwise those of before' if result.restored else 'NOT restored'}")
    lines += [f"left as it was: {u['path']} ({u['module']}): {u['reason']}" for u in result.unsupported]
    lines += [f"fallback: {text}" for text in result.fallbacks]
    lines += [f"exact: {result.exact}", f"modules: {result.modules_meaning}"]
    lines += [f"floor: {result.floor_meaning}", f"limits: {result.limits_meaning}"]
    if result.verdict == "SIMULATED":
        lines.append("SIMULATED: Triton's kernels were interpreted on the CPU, which is no evidence about a device")
    return lines + [f"FAIL: {reason}" for reason in result.reasons]


def show(result: ModelResult) -> None:
    output.say(header(result))
    for title, headers, rows in tables(result):
        output.say()
        output.table(headers, rows, title=title, right=RIGHT)
    output.say()
    for sentence in sentences(result):
        output.say(sentence)


def markdown(result: ModelResult) -> str:
    lines = [f"# {header(result)}"]
    for title, headers, rows in tables(result):
        lines += ["", f"## {title}", ""]
        for row in (headers, tuple("---" for _ in headers), *rows):
            lines.append(table_row(row))
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in sentences(result)), ""])


def html(result: ModelResult) -> str:
    reasons = set(result.reasons)
    notes = [sentence for sentence in sentences(result) if sentence.removeprefix("FAIL: ") not in reasons]
    return tables_page(
        f"{result.model}, ported against unported",
        result.verdict,
        header(result).removeprefix(f"{result.verdict}: "),
        result.reasons,
        notes,
        tables(result),
    )


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


def _measure(name: str, measure: Measure) -> tuple[str, ...]:
    return name, f"{measure.value:.3g}", f"{measure.floor:.3g}", f"{measure.limit:.3g}", _mark(measure.ok)


def _module(module: ModuleErrors, result: ModelResult) -> tuple[str, ...]:
    first = result.first_divergence
    mark = "no, first divergence" if first is not None and first.path == module.path else _mark(module.ok)
    if not module.tensors:
        return module.path, module.module, "-", "-", "-", "-", "-", mark
    worst = max(module.tensors, key=lambda t: t.away)
    if first is not None and first.path == module.path:
        worst = next(t for t in module.tensors if (t.direction, t.tensor) == (first.direction, first.tensor))
    ratio = "-" if worst.ratio is None else f"{worst.ratio:.3g}"
    return (
        module.path,
        module.module,
        f"{worst.direction} {worst.tensor}",
        f"{worst.unported:.3g}",
        f"{worst.found:.3g}",
        ratio,
        f"{module.away:.3g}",
        mark,
    )


def _modes(result: ModelResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for mode in result.modes:
        worst = max(mode.modules, key=lambda m: m.away, default=None)
        named = mode.first_divergence.path if mode.first_divergence else worst.path if worst else "-"
        rows.append((mode.mode, mode.verdict, named, f"{worst.away:.3g}" if worst else "-"))
    return rows


def _mode(how: str, reason: str, bitwise: str) -> str:
    return "; ".join(part for part in (how, bitwise, reason) if part)


def _mark(ok: bool) -> str:
    return "yes" if ok else "no"
