"""`ferryman fuzz`: every implementation on cases that nobody wrote down, drawn from each op's domain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import documents, output
from ferryman.cli.place import place
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.running import fuzzed

_MOST_FAILURES = 20


def fuzz(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Only this implementation, or those of this backend. Repeatable.")
    ] = None,
    cases: Annotated[
        int | None,
        typer.Option(
            help=f"Cases of each op; default: {fuzzed.CASES} on a CPU, up to a minute an op; "
            f"{fuzzed.ACCELERATOR_CASES} on an accelerator, where kernels are compiled for most cases."
        ),
    ] = None,
    case: Annotated[
        int | None, typer.Option(help="Only the case of this number, as a failure names it; prints it as Python.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, other cases.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only cases that are drawn in f32, f16 or bf16. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Draw cases of every op, and judge every implementation that serves them here, under the gates of the check.

    A domain in the op's evidence.py says what is drawn; without one, the op's small cases get other fills and layouts.
    The same seed draws the same cases on every machine. Each failure is printed with the command that repeats it alone.
    A kernel that crashes costs the case that it was at. Exits with 1 if anything is wrong, or if nothing ran at all.
    """
    if out is not None:
        documents.require_writable(out)
    if cases is not None and case is not None:
        raise ArgumentError("fuzz", "--cases", "given", "no --case beside it")
    with output.progress("fuzzing") as advance:
        document = fuzzed.run(op, implementation, place(device, "fuzz"), dtype, cases, case, seed, advance)
    text = document.model_dump_json(indent=1)
    if as_json:
        output.say(text)
    else:
        _print(document, case)
    if out is not None:
        documents.write(out, text)
    if document.failures:
        raise typer.Exit(1)
    if not document.ran:
        sys.stderr.write("ferryman: nothing ran, so nothing is shown to be right\n")
        raise typer.Exit(1)


def _print(document: fuzzed.Fuzzed, number: int | None) -> None:
    facts = document.environment
    output.say(
        f"{facts.device_name or facts.device} ({facts.profile}, {facts.arch}), torch {facts.versions['torch']}: "
        f"seed {document.seed}, {facts.seconds:.0f} s"
    )
    output.say()
    counts = ["cases", "right", "refused", "not run", "failed"]
    rows = [[r.op, r.implementation, r.cases, r.right, r.refused, r.not_run, r.failed] for r in document.rows]
    output.table(["op", "implementation", *counts], rows, right=counts)
    if document.failures or document.not_run or number is not None:
        output.say()
    for failure in document.failures[:_MOST_FAILURES]:
        where = "" if failure.number is None else f" case {failure.number}"
        output.say(
            f"{failure.verdict} {failure.op} {failure.implementation} {failure.dtype}{where}: {failure.reason}; "
            f"again: {failure.command}"
        )
    if len(document.failures) > _MOST_FAILURES:
        output.say(f"and {len(document.failures) - _MOST_FAILURES} more; --json and --out have them all")
    for one in document.not_run:
        subject = " ".join(text for text in (one.op, one.implementation) if text)
        output.say(f"NOT_RUN {subject}{'' if one.cases is None else f', {one.cases} cases'}: {one.reason}")
    if number is not None:
        for name in dict.fromkeys(row.op for row in document.rows):
            output.say(f"{name}: {fuzzed.python(registry.primitive(name), number, document.seed)}")
