"""`ferryman replay`: a capsule on this machine. Who is right is the oracle's verdict; differences are explained."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import documents, output
from ferryman.cli.place import place
from ferryman.cli.record import porter
from ferryman.dispatch import registry, use
from ferryman.errors import ArgumentError
from ferryman.porting.capsule import model
from ferryman.porting.capsule.replay import replay as run
from ferryman.porting.capsule.replay_model import replay_model
from ferryman.porting.capsule.replay_results import ORDER, WRONG, Explained, Replay, failed
from ferryman.porting.judging.results import Timing, dumps, number
from ferryman.porting.model.results import away
from ferryman.porting.report.markdown import duration, percent

_MOST = 20


def replay(
    capsule: Annotated[Path, typer.Argument(help="A capsule that `ferryman record` wrote, here or elsewhere.")],
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend. Repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    full: Annotated[bool, typer.Option("--full", help="On a CPU: the standard sizes too (minutes).")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for replay.json (`ferryman compare` reads it) and replayed.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the replay document as JSON.")] = False,
) -> None:
    """Run a capsule's inputs here, judge the results and the recorded ones by the same oracle, and explain A against B.

    A is the machine that recorded, B this one. Exits with 1 if either is wrong, if inputs cannot be trusted, or if
    nothing was judged.
    """
    recording = model.load(capsule)
    if isinstance(recording, model.ModelCapsule):
        for option, value in (("--op", op), ("--full", full)):
            if value:
                raise ArgumentError("replay", option, "given", "a capsule of ops; this one holds a model")
        _model(recording, place(device, "replay"), backend, out, as_json)
        return
    with output.progress("replaying") as advance:
        document = run(
            recording, place(device, "replay"), ops=op, backends=backend, full=full, progress=advance, name=capsule
        )
    text = document.model_dump_json(indent=1)
    if as_json:
        output.say(text)
    else:
        _print(document)
    if out is not None:
        documents.write(out / "replay.json", text)
        documents.write(out / "replayed.json", dumps(document.replayed))
        sys.stderr.write(f"wrote {out / 'replay.json'}, {out / 'replayed.json'}\n")
    if failed(document):
        raise typer.Exit(1)


def _model(
    capsule: model.ModelCapsule, device: str, backends: Sequence[str] | None, out: Path | None, as_json: bool
) -> None:
    for backend in backends or ():
        registry.check_requested(backend)
    with use(*backends) if backends else nullcontext(), output.progress("replaying") as advance:
        document = replay_model(capsule, porter=porter(), device=device, progress=advance)
    text = document.model_dump_json(indent=1)
    if as_json:
        output.say(text)
    else:
        a, b = document.recorded, document.replayed
        output.say(f"{document.verdict}: {document.title} in {document.dtype}, exact in {document.exact}")
        output.say(
            f"A {a.device_name or a.device} ({a.profile}, {a.arch}); B {b.device_name or b.device} ({b.profile})"
        )
        rows = [
            [str(e.layer), e.tensor, e.explanation, number(away(e.a)), number(away(e.b)), f"{e.judged} of {e.elements}"]
            for e in document.layers
        ]
        output.table(["layer", "tensor", "A against B", "A away", "B away", "A judged here"], rows)
        output.say(f"away: the worst measure over its limit. {document.limit_meaning}")
        for reason in document.reasons:
            output.say(f"{document.verdict}: {reason}")
    if out is not None:
        documents.write(out / "replay-model.json", text)
        sys.stderr.write(f"wrote {out / 'replay-model.json'}\n")
    if document.verdict not in ("PASS", "SIMULATED"):
        raise typer.Exit(1)


def _print(document: Replay) -> None:
    for label, side in (("A", document.recorded), ("B", document.replayed)):
        facts = side.environment
        what = f"recorded {document.name or 'the capsule'}" if label == "A" else "replays it here"
        output.say(
            f"{label} {what}: {facts.device_name or facts.device} ({facts.profile}, {facts.arch}), "
            f"torch {facts.versions.get('torch', 'unknown')}, {facts.time}"
        )
    output.say(f"capsule {document.capsule}, {output.size(document.size)}, seed {document.recorded.environment.seed}")
    output.say()
    groups: dict[tuple[str, str], list[Explained]] = {}
    for each in document.explained:
        groups.setdefault((each.op, each.implementation), []).append(each)
    rows = []
    for (op, implementation), group in groups.items():
        counts = Counter(each.explanation for each in group)
        said = ", ".join(f"{counts[e]} {e}" for e in ORDER if counts[e])
        rows.append(
            [
                op,
                implementation,
                said,
                number(_worst(group, "a")),
                number(_worst(group, "b")),
                *_times(document.recorded.timings, op, implementation),
                *_times(document.replayed.timings, op, implementation),
            ]
        )
    headers = ["op", "implementation", "A against B", "A error", "B error", "A time", "of roofline", "B time", "of B's"]
    shown = [i for i, _ in enumerate(headers) if any(row[i] != "-" for row in rows)]
    output.table([headers[i] for i in shown], [[row[i] for i in shown] for row in rows])
    output.say()
    output.say("error: the worst one in units of its derived bound, by the oracle evaluated here; at most 1 is right")
    judged = sum(each.judged for each in document.explained)
    stored = sum(each.elements for each in document.explained if each.judged)
    output.say(f"{judged} of the {stored} elements that A computed were stored, and judged again here")
    wrong = [each for each in document.explained if each.explanation in (*WRONG, "not judged")]
    for each in wrong[:_MOST]:
        output.say(
            f"{each.explanation.upper()}: {each.op} {each.implementation} {each.dtype} {each.case}: {each.detail}"
        )
    if len(wrong) > _MOST:
        output.say(f"and {len(wrong) - _MOST} more; the JSON document has them all")
    idle = Counter(
        (each.implementation, each.detail)
        for each in document.explained
        if each.explanation in ("A did not run", "B did not run", "neither ran")
    )
    for (implementation, detail), count in idle.most_common(_MOST):
        output.say(f"NOT_RUN {implementation}, {count} cells: {detail}")


def _worst(group: Sequence[Explained], side: str) -> float | None:
    ratios = [getattr(each, side).ratio for each in group]
    return max((r for r in ratios if r is not None), default=None)


def _times(timings: Sequence[Timing], op: str, implementation: str) -> tuple[str, str]:
    """In the narrowest dtype that was timed: what models run in."""
    mine = {t.dtype: t for t in timings if (t.op, t.implementation) == (op, implementation)}
    shown = next((mine[d] for d in ("bfloat16", "float16", "float32") if d in mine), None)
    return duration(shown), percent(shown)
