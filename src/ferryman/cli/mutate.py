"""`ferryman mutate`: how many planted bugs a user's own tests catch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from ferryman.cli import documents, output
from ferryman.errors import ArgumentError
from ferryman.porting.mutate import users


def mutate(
    kernel: Annotated[str, typer.Argument(help="mine.py:kernel: a @triton.jit function, or a launcher of some.")],
    test: Annotated[str, typer.Option(help="The command that runs the tests, as in 'pytest tests/test_mine.py'.")],
    sample: Annotated[
        int, typer.Option(help="Draw until so many planted bugs are judged, every kind in turn; 0: all.")
    ] = users.SAMPLE,
    seed: Annotated[int, typer.Option(help="Which ones are drawn.")] = 0,
    limit: Annotated[
        float | None, typer.Option(help="Seconds a run; default: ten times what the tests take, at least 30.")
    ] = None,
    interpret: Annotated[
        bool | None, typer.Option("--interpret/--compile", help="Set TRITON_INTERPRET=1; default: where no GPU is.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Plant bugs into a Triton kernel, one at a time, and run its own tests: which of them notice?

    The file is never edited. The tests must pass twice without a bug. Survivors are printed as diffs, with an input
    that shows them and the comparison that let them through. Exits with 1 where a bug survives that some input shows.
    """
    if out is not None and out.is_dir():
        raise ArgumentError("mutate", "--out", f"{out}, a folder", "the name of a file")
    chosen = not torch.cuda.is_available() if interpret is None else interpret
    with output.progress("planted bugs") as advance:
        outcome = users.mutate(kernel, test, sample or None, seed, limit, chosen, advance)
    if as_json:
        output.json_document(outcome.document())
    else:
        _print(outcome)
    if out is not None:
        documents.write(out, json.dumps(outcome.document(), indent=1))
    if outcome.survived > outcome.equal:
        raise typer.Exit(1)


def _print(outcome: users.Outcome) -> None:
    for one in outcome.survivors:
        output.say(one.diff)
        output.say(f"  survives. {one.revealed}")
        for line in one.tolerances:
            output.say(f"  {line}")
        output.say()
    rows = [[name, n["caught"], n["survived"], n["raised"]] for name, n in sorted(outcome.by_operator.items())]
    output.table(["planted", "caught", "survived", "raised"], rows, right=["caught", "survived", "raised"])
    output.say()
    judged = outcome.caught + outcome.survived - outcome.equal
    share = f" ({outcome.caught / judged:.0%})" if judged else ""
    output.say(
        f"{outcome.caught} of {judged} planted bugs caught{share}; {outcome.equal} more changed nothing on any input; "
        f"{outcome.raised} raised by themselves, and count for nothing. {outcome.ran} of {outcome.possible} possible, "
        f"seed {outcome.seed}, {outcome.seconds:.0f} s"
    )
