"""The merged document for people and for CI systems: Markdown, one HTML page, JUnit, annotations, a badge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ferryman.errors import BackendUnavailable
from ferryman.porting.ci.judge import REASONS
from ferryman.porting.ci.merged import Merged, OpState, RowState, Run
from ferryman.porting.ci.states import WRONG
from ferryman.porting.judging.results import Verdict
from ferryman.porting.report.html import render
from ferryman.porting.report.markdown import MEANING
from ferryman.porting.report.text import plain

MARKDOWN_LIMIT = 60_000  # GitHub takes 65,536 characters of a comment, and 1 MiB of a step summary
_TEXT = 400
_BAD_SHOWN = 20  # cases of one row on the page
_OPS_SHOWN = 400
_RANK: tuple[Verdict, ...] = (*WRONG, "PASS", "SIMULATED", "COMPILED_ONLY", "NOT_RUN", "UNIMPLEMENTED")
_COLOURS: dict[str, str] = {"PASS": "#0b6b2f", "FAIL": "#b3102a", "MISTRUSTED": "#b3102a", "QUARANTINED": "#b3102a"}
_GREY, _AMBER = "#49525d", "#7a4b00"


def overall(merged: Merged) -> Verdict:
    """One word for everything: wrong if anything is, PASS only if every row on a real device is green."""
    seen = {row.verdict for row in merged.rows}
    for verdict in WRONG:
        if verdict in seen:
            return verdict
    if merged.judged and merged.failures:
        return "NOT_RUN"
    real = [row for row in merged.rows if row.how == "hardware"]
    return "PASS" if real and all(row.green for row in real) else "NOT_RUN"


def sentence(merged: Merged) -> str:
    """The finding in one sentence; vendors on which nothing ran are always part of it."""
    green = [v.vendor for v in merged.vendors if v.green]
    absent = [v.vendor for v in merged.vendors if v.verdict == "NOT_RUN"]
    wrong = [v.vendor for v in merged.vendors if v.verdict in WRONG]
    parts = [f"{sum(r.met for r in merged.rows)} of {len(merged.rows)} rows say the best that they can"]
    parts += [
        f"{word}: {', '.join(names)}"
        for word, names in (("green", green), ("wrong", wrong), ("not shown on a device", absent))
        if names
    ]
    if merged.faults:
        parts.append(f"{len(merged.faults)} file{'s are' if len(merged.faults) > 1 else ' is'} no evidence")
    if merged.judged:
        parts.append("the gate passes" if not merged.failures else f"the gate fails for {len(merged.failures)} reasons")
    return "; ".join(parts) + "."


def why(row: RowState) -> str:
    return "; ".join(f"{w.code}: {w.text}" for w in row.why) or "-"


def last(row: RowState) -> str:
    """The last success of a row, with its age and commit."""
    return "never" if row.last_success is None else run_words(row.last_success)


def run_words(run: Run) -> str:
    return f"{age(run.age_days)} ago, {run.commit[:10]}"


def age(days: float) -> str:
    return f"{days:.0f} d" if days >= 2 else f"{days * 24:.0f} h" if days >= 0.1 else f"{max(days, 0.0) * 1440:.0f} min"


def markdown(merged: Merged, limit: int = MARKDOWN_LIMIT) -> str:
    """At most ``limit`` characters; what is left out is counted where it would stand."""
    lines = [
        f"# {_md(merged.project or 'CI')}: {overall(merged)}",
        "",
        _md(sentence(merged), 2000) + f" Commit `{_code((merged.commit or 'none')[:12])}`, {_md(merged.time)}.",
        "",
        "| vendor | on its devices | green rows |",
        "|---|---|---|",
        *(f"| {_md(v.vendor)} | {_mark(v.verdict)} | {v.green_rows} of {v.rows} |" for v in merged.vendors),
        "",
    ]
    if merged.failures:
        lines += ["## Why the gate fails", "", *(f"- {_md(text)}" for text in merged.failures), ""]
    lines += ["## Rows", "", "| row | how | verdict | cases | last success | why |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {_md(r.id)} | {r.how} | {_mark(r.verdict)} | {_counts(r)} | {_md(last(r))} | {_md(why(r))} |"
        for r in merged.rows
    ]
    seen = {r.verdict for r in merged.rows}
    lines += ["", *(f"- **{v}**: {MEANING[v]}" for v in MEANING if v in seen)]
    if merged.faults:
        lines += [
            "",
            "## Files that are no evidence",
            "",
            *(f"- {_md(f.file)}: {f.code}: {_md(f.text)}" for f in merged.faults),
        ]
    notes = [*merged.notes, *(f"{r.id}: {n}" for r in merged.rows for n in r.notes)]
    if notes:
        lines += ["", "## Notes", "", *(f"- {_md(note)}" for note in notes)]
    return _within(lines, limit)


def _within(lines: Sequence[str], limit: int) -> str:
    kept: list[str] = []
    left = limit - 200
    for i, line in enumerate(lines):
        left -= len(line) + 1
        if left < 0:
            return "\n".join([*kept, "", f"And {len(lines) - i} more lines; the merged document has them all."]) + "\n"
        kept.append(line)
    return "\n".join(kept) + "\n"


def _mark(verdict: str) -> str:
    """A verdict by its word, with a sign only for what is green or wrong."""
    sign = {"PASS": "✅ ", "FAIL": "❌ ", "MISTRUSTED": "❌ ", "QUARANTINED": "❌ "}.get(verdict, "")
    return f"{sign}{verdict}"


def _counts(row: RowState) -> str:
    text = ", ".join(f"{n} {v}" for v, n in row.counts.items()) or "-"
    return f"{text} ({row.excused} excused)" if row.excused else text


def _md(text: str, most: int = _TEXT) -> str:
    """A document's text as Markdown that shows it: one line, no markup, links, mentions or columns of its own."""
    text = plain(text)
    text = text if len(text) <= most else text[:most] + " .."
    return text.translate(_ESCAPED).replace("://", "&#58;//").replace("www.", "www&#46;")


_ESCAPED = {ord(mark): f"&#{ord(mark)};" for mark in "\\`*_{}[]<>&#+!|~@"}


def _code(text: str) -> str:
    return plain(text).replace("`", "'").replace("|", "/")


def commands(merged: Merged) -> str:
    """GitHub's workflow commands: what fails as errors, what was not shown as warnings. No text begins a command."""
    lines = [f"::error title=ferryman ci::{_command(text)}" for text in merged.failures[:40]]
    for row in merged.rows:
        if not row.met and not any(text.startswith(f"{row.id} ") for text in merged.failures):
            lines.append(f"::warning title={_property(row.id)}::{_command(f'{row.verdict}: {why(row)}')}")
    return "\n".join(lines)


def _command(text: str) -> str:
    text = text if len(text) <= 1000 else text[:1000] + " .."
    text = "".join(c if c.isprintable() or c in "\r\n" else " " for c in text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _command(text).replace(":", "%3A").replace(",", "%2C")


def junit(merged: Merged) -> str:
    """One test a row: passed if green; wrong ones fail; what did not run is skipped, and an error if required."""
    try:
        from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
    except ImportError as error:
        raise BackendUnavailable("junitparser is not installed; pip install 'ferryman[report]'") from error
    xml = JUnitXml("ferryman ci")
    for vendor in dict.fromkeys(row.vendor for row in merged.rows):
        suite = TestSuite(plain(vendor))
        for row in (r for r in merged.rows if r.vendor == vendor):
            case = TestCase(plain(row.id), f"{vendor}.{plain(row.device)}.{plain(row.how)}", row.seconds)
            message = plain(f"{row.verdict}: {why(row)}")
            if row.verdict in ("MISTRUSTED", "QUARANTINED") or (not row.met and vendor in merged.required):
                case.result = [Error(message, row.verdict)]
            elif row.verdict == "FAIL":
                case.result = [Failure(message, row.verdict)]
            elif not row.green:
                case.result = [Skipped(message, row.verdict)]
            suite.add_testcase(case)
        xml.add_testsuite(suite)
    xml.update_statistics()
    text = xml.tostring()
    return text.decode() if isinstance(text, bytes) else str(text)


def badge(merged: Merged) -> str:
    """An SVG of the vendors that are green, and of those that are not."""
    shown = [v for v in merged.vendors if v.vendor != "cpu"] or merged.vendors
    texts = [
        ("ferryman", _GREY),
        *((f"{v.vendor} {_SHORT.get(v.verdict, v.verdict)}", _colour(v.verdict)) for v in shown),
    ]
    x, parts = 0.0, []
    for text, colour in texts:
        width = 6.6 * len(text) + 12
        parts.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="20" fill="{colour}"/>'
            f'<text x="{x + width / 2:.1f}" y="14" textLength="{width - 12:.1f}">{escape(plain(text))}</text>'
        )
        x += width
    label = escape(plain(", ".join(text for text, _ in texts[1:])))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.1f}" height="20" role="img" aria-label="{label}">'
        f'<title>{label}</title><g fill="#fff" text-anchor="middle" font-family="DejaVu Sans,Verdana,sans-serif" '
        f'font-size="11">{"".join(parts)}</g></svg>'
    )


_SHORT = {
    "PASS": "tested",
    "NOT_RUN": "not run",
    "FAIL": "fails",
    "MISTRUSTED": "mistrusted",
    "SIMULATED": "simulated",
    "QUARANTINED": "quarantined",
    "COMPILED_ONLY": "compiled",
}


def _colour(verdict: str) -> str:
    return _COLOURS.get(verdict, _AMBER if verdict in ("SIMULATED", "COMPILED_ONLY") else _GREY)


@dataclass(frozen=True)
class Square:
    """What one column of the overview says of one op: the strongest evidence, and by which ways."""

    verdict: Verdict
    ways: str


@dataclass(frozen=True)
class Column:
    vendor: str
    device: str
    verdict: Verdict
    squares: list[Square | None]


def columns(merged: Merged) -> tuple[list[str], list[Column]]:
    """(ops, a column for each device): vendor x op."""
    ops = list(dict.fromkeys(op.op for row in merged.rows for op in row.ops))
    shown, devices = sorted(ops)[:_OPS_SHOWN], []
    for vendor, device in dict.fromkeys((r.vendor, r.device) for r in merged.rows):
        rows = [r for r in merged.rows if (r.vendor, r.device) == (vendor, device)]
        by_op: dict[str, list[tuple[RowState, OpState]]] = {}
        for row in rows:
            for op in row.ops:
                by_op.setdefault(op.op, []).append((row, op))
        states: Verdict = next((v.verdict for v in merged.vendors if v.vendor == vendor), "NOT_RUN")
        devices.append(Column(vendor, device, states, [_square(by_op.get(op, [])) for op in shown]))
    return shown, devices


def _square(pairs: Iterable[tuple[RowState, OpState]]) -> Square | None:
    """A row that is no evidence gives its ops none either."""
    said = [
        (row, op.verdict if row.met or op.verdict in WRONG else _weaker(row.verdict, op.verdict)) for row, op in pairs
    ]
    if not said:
        return None
    verdict = min((v for _, v in said), key=_RANK.index)
    ways = dict.fromkeys(f"{row.backend} {row.how}: {v}" for row, v in said)
    return Square(verdict, ", ".join(ways))


def _weaker(row: Verdict, op: Verdict) -> Verdict:
    return op if op == "UNIMPLEMENTED" else row if row in WRONG or row == "NOT_RUN" else op


def html(merged: Merged) -> str:
    """The dashboard. Raises BackendUnavailable without jinja2."""
    ops, devices = columns(merged)
    counts = Counter(row.verdict for row in merged.rows)
    return render(
        "ci.html.j2",
        merged=merged,
        verdict=overall(merged),
        sentence=sentence(merged),
        ops=ops,
        columns=devices,
        counts=[(name, MEANING[name], counts[name]) for name in MEANING if counts[name]],
        age=age,
        run_words=run_words,
        last=last,
        reasons=REASONS,
        bad_shown=_BAD_SHOWN,
        wrong=[r for r in merged.rows if r.bad or r.why],
        trends=any(row.trend for row in merged.rows),
    )
