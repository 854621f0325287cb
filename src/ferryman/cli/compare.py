"""`ferryman compare`: results, replays and capsules of several machines, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import output
from ferryman.porting.capsule.compare import Comparison, Part, RowCompared, failed
from ferryman.porting.capsule.compare import compare as run
from ferryman.porting.judging.results import WITH_LAUNCHES, number

_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_MOST = 20


def compare(
    document: Annotated[
        list[Path], typer.Argument(help="check.json, replay.json or a capsule, of two machines or more.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Who is right, what the differences come from, and how far each machine is from its own roofline.

    No side is judged against another: each has its verdicts against the oracle. What a machine did not run is NOT_RUN.
    Exits with 1 if any side is wrong or cannot be trusted, or if nothing ran.
    """
    comparison = run(document)
    if as_json:
        output.say(comparison.model_dump_json(indent=1))
    else:
        _print(comparison)
    if failed(comparison):
        raise typer.Exit(1)


def _print(comparison: Comparison) -> None:
    headers = ["", "device", "profile", "vendor", "arch", "torch", "what", "file"]
    output.table(
        headers,
        [[s.label, s.device_name, s.profile, s.vendor, s.arch, s.torch, s.role, s.file] for s in comparison.sides],
    )
    output.say()
    labels = [s.label for s in comparison.sides]
    columns = [text for label in labels for text in (label, f"{label} error", f"{label} of roofline")]
    rows = []
    for row in comparison.rows:
        parts = [text for part in row.sides for text in _part(part)]
        rows.append([row.op, row.implementation, _SHORT.get(row.dtype, row.dtype), *parts, _said(row)])
    headers = ["op", "implementation", "dtype", *columns, "explanation"]
    shown = [i for i, h in enumerate(headers) if h in labels or any(row[i] != "-" for row in rows)]
    output.table([headers[i] for i in shown], [[row[i] for i in shown] for row in rows])
    output.say()
    output.say("error: the worst one in units of its own bound against the oracle; at most 1 is right")
    for note in comparison.notes:
        output.say(note)
    wrong = [row for row in comparison.rows if row.explanation in ("wrong", "not judged")]
    for row in wrong[:_MOST]:
        output.say(f"{row.explanation.upper()}: {row.op} {row.implementation} {row.dtype}: {row.detail}")
    if len(wrong) > _MOST:
        output.say(f"and {len(wrong) - _MOST} more rows; --json has them all")


def _part(part: Part) -> tuple[str, str, str]:
    share = "-" if part.percent_of_roofline is None else f"{part.percent_of_roofline:.0f}%"
    if part.clock == WITH_LAUNCHES:
        share += " with launches"
    return part.verdict, number(part.ratio), share


def _said(row: RowCompared) -> str:
    """ "equal (22 of 22 cases)", "wrong: B (2 of 22 cases)"."""
    who = f": {', '.join(row.who)}" if row.who else ""
    return f"{row.explanation}{who} ({row.cases.get(row.explanation, 0)} of {sum(row.cases.values())} cases)"
