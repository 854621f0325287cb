"""`ferryman selftest`: which planted bugs the parity check catches, and how often it flags what is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import documents, output
from ferryman.cli.place import place
from ferryman.errors import ArgumentError
from ferryman.porting.selftest import SelfTest, equivalents, run, succeeded
from ferryman.porting.selftest.planting import EDITS, Backend
from ferryman.porting.selftest.report import (
    MOST_EQUIVALENT,
    REQUIRED_SHARE,
    Record,
    dumps,
    markdown,
    reasons,
    survivors,
)
from ferryman.porting.selftest.runner import HONEST

QUICK, QUICK_HONEST = 150, 200
_MOST_KEYS = 6


def selftest(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    honest: Annotated[
        int | None, typer.Option(help=f"Runs of right alternatives; default {HONEST}, {QUICK_HONEST} with --quick.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs; another seed, other inputs.")] = 0,
    planted: Annotated[int | None, typer.Option(help="Which edits are drawn; default: by --seed.")] = None,
    edits: Annotated[int, typer.Option(min=0, help="Edits of each op's source; 0: every one.")] = EDITS,
    sample: Annotated[int | None, typer.Option(help="So many mutants of all, drawn by the seed.")] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(help="torch: rules and definitions; triton: edits of sources; hip: of C++, simulated."),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Edits of this Triton line alone, on the calls that it serves.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds of an op's right kernel for edits that survive the first cells; default: no limit."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Worker processes, on a CPU.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="End after as many minutes: what is not done is left.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Keep results in this file, and go on from what it holds already.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK} mutants, fewer right runs.")] = False,
    by_gate: Annotated[
        bool, typer.Option("--by-gate", help="Judge every run, and count every gate that can catch a mutant.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the JSON document to this file; NAME.json.gz: packed; NAME.md: its tables."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Plant bugs into every op's kernels, and run the parity check on them and on right alternatives.

    The bugs make themselves: rules edit the kernels' source, bend results and arguments, and compute definitions
    wrongly.
    Beside it stand torch.allclose, assert_close and the "2x reference" rule on the same runs. Exits with 1 if fewer
    than 99% of the mutants that change anything are caught, or if anything right is flagged.
    """
    if out is not None and out.is_dir():
        raise ArgumentError("selftest", "--out", f"{out}, a folder", "the name of a file")
    if sample is None and quick:
        sample = QUICK
    with output.progress("self-test") as advance:
        document = run(
            ops=op,
            honest_runs=honest if honest is not None else QUICK_HONEST if quick else HONEST,
            seed=seed,
            device=place(device, "selftest"),
            every_run_judged=by_gate,
            sample=sample,
            most=edits or None,
            jobs=jobs,
            minutes=minutes,
            resume=resume,
            progress=advance,
            plant_seed=planted,
            backend=backend,
            budget=budget,
            implementation=implementation,
        )
    text = dumps(document)
    if as_json:
        output.say(text)
    else:
        _print(document)
    if out is not None:
        documents.write(out, markdown(document) if out.suffix == ".md" else text)
    if not succeeded(document):
        raise typer.Exit(1)


def percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _print(document: SelfTest) -> None:
    facts, mutants = document.environment, document.mutants
    total, runs = mutants.non_equivalent, document.honest_runs
    output.say(
        f"{facts.device_name or facts.device} ({facts.profile}), torch {facts.versions['torch']}, seed {facts.seed}: "
        f"{document.planted} mutants in {facts.seconds:.0f} s"
    )
    output.say(
        f"{total} ran and change something, by {len(document.operators)} operators over {len(document.ops)} ops; "
        f"{document.source_edits} are edits of kernel sources; {document.survive_allclose} survive every allclose"
    )
    output.say()
    rows: list[list[object]] = [
        ["ferryman", mutants.caught, percent(mutants.caught, total), "-", document.false_alarms]
    ]
    rows += [
        [b.meaning, b.caught, percent(b.caught, total), percent(b.caught_on_aligned_normal, total), b.false_alarms]
        for b in document.baselines.values()
    ]
    headers = ["rule", "caught", "share", "on aligned normal", f"alarms in {runs}"]
    output.table(headers, rows, right=headers[1:])
    output.say()
    what = "judging every run" if document.every_run_judged else "at the first run that caught it"
    output.say(f"gates that failed, {what}: " + ", ".join(f"{gate} {n}" for gate, n in mutants.by_gate.items()))
    _fates(document)
    if total and mutants.caught / total < REQUIRED_SHARE:
        output.say(f"FAIL: {percent(mutants.caught, total)} caught; required: {REQUIRED_SHARE:.0%}")
    for alarm in document.honest.alarms:
        output.say(
            f"FAIL: false alarm: {alarm.alternative} {alarm.dtype} {alarm.case} seed {alarm.seed}: {alarm.reason}"
        )


def _fates(document: SelfTest) -> None:
    output.say()
    columns = ["caught", "missed", "equivalent", "not run"]
    rows = [[name, f.caught, f.missed, f.equivalent, f.not_run] for name, f in document.operators.items()]
    output.table(["operator", *columns], rows, right=columns)
    missed = survivors(document)
    if missed:
        output.say(f"\nnot caught ({len(missed)}):")
        _records(missed)
    lines = equivalents.reasons(document.listing)
    if lines:
        output.say(
            f"\nover {MOST_EQUIVALENT:.0%} equivalent in one kernel needs a reason for each in the op's evidence:"
        )
    for line in lines:
        output.say(f"  {line}")
    not_run = reasons(document.listing, "not run")
    if not_run:
        output.say(f"\nnot run ({sum(map(len, not_run.values()))}):")
    for reason, keys in sorted(not_run.items(), key=lambda item: -len(item[1]))[:12]:
        output.say(f"  {_some(keys)}: {reason[:160]}")


def _records(records: Iterable[Record]) -> None:
    for record in records:
        output.say(f"  {record.key} ({record.operator}; {record.runs} runs): {record.note}: {record.reason}")


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:_MOST_KEYS])
    return shown if len(keys) <= _MOST_KEYS else f"{shown} and {len(keys) - _MOST_KEYS} more"
