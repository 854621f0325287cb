"""`ferryman record`: what this machine computes, as one file that another machine can replay."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ferryman.cli import output
from ferryman.cli.place import place
from ferryman.dispatch import registry, use
from ferryman.errors import ArgumentError, BackendUnavailable
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule import model as capsule_model
from ferryman.porting.capsule.record import record as make
from ferryman.porting.capsule.record_model import record_model
from ferryman.porting.running.runner import default_jobs


def record(
    out: Annotated[Path, typer.Option(help="The capsule to write.")],
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend. Repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="f32, f16 or bf16. Repeatable.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Record a ported model's layers instead: qwen3, llama, .. (presets only).")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="With --model: smaller widths, real head_dim.")] = False,
    layers: Annotated[int, typer.Option(help="With --model: decoder layers to build.")] = 4,
    tier: Annotated[
        str | None, typer.Option(help="small or standard (real sizes); default: standard on an accelerator.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compile kernels first; default: up to 8 on an accelerator, else 1."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was recorded as JSON.")] = False,
) -> None:
    """Run every implementation that can run here on every case, judge it, and write a capsule.

    What is wrong here is recorded as such, and is no reason not to record: exits with 0.
    """
    if out.is_dir():
        raise ArgumentError("record", "--out", f"{out}, a folder", "the name of a file")
    if model is not None:
        for option, value in (("--op", op), ("--tier", tier)):
            if value:
                raise ArgumentError("record", option, "given", "no --model beside it")
        _model(model, out, place(device, "record"), backend, dtype, tiny, layers, seed, as_json)
        return
    if tiny:
        raise ArgumentError("record", "--tiny", "given", "--model beside it")
    here = place(device, "record")
    with output.progress("recording") as advance:
        raw = make(
            ops=op,
            device=here,
            dtypes=dtype,
            tier=tier,
            seed=seed,
            progress=advance,
            backends=backend,
            jobs=jobs or default_jobs(here),
        )
    capsule.save(raw, out)
    recording = capsule.loads(raw, str(out))
    cells = recording.results.cells
    counts = dict(sorted(Counter(cell.verdict for cell in cells).items()))
    stored = sum(1 for run in recording.manifest.runs for o in run.outputs if o.tiles is None)
    outputs = sum(len(run.outputs) for run in recording.manifest.runs)
    if as_json:
        output.json_document(
            {
                "capsule": str(out),
                "sha256": recording.sha256,
                "bytes": recording.size,
                "cells": len(cells),
                "verdicts": counts,
                "inputs": len(recording.manifest.inputs),
                "outputs": outputs,
                "outputs_whole": stored,
                "tensors": len(recording.tensors),
                "machine": recording.manifest.machine.model_dump(mode="json"),
                "environment": recording.results.environment.model_dump(mode="json"),
            }
        )
        return
    facts = recording.results.environment
    said = " ".join(f"{n} {verdict}" for verdict, n in counts.items())
    output.say(f"{out}: {output.size(recording.size)}, sha256 {recording.sha256}")
    output.say(f"{facts.device_name} ({facts.profile}, {facts.arch}), torch {facts.versions['torch']}: {said}")
    output.say(f"{len(recording.manifest.inputs)} inputs; {stored} of {outputs} outputs whole; {facts.seconds:.0f} s")
    for cell in [c for c in cells if c.verdict in ("FAIL", "MISTRUSTED")][:20]:
        sys.stderr.write(f"{cell.verdict} {cell.op} {cell.implementation} {cell.dtype} {cell.case}: {cell.reason}\n")


def _model(
    name: str,
    out: Path,
    device: str,
    backends: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    tiny: bool,
    layers: int,
    seed: int,
    as_json: bool,
) -> None:
    if dtypes and len(dtypes) > 1:
        raise ArgumentError("record", "--dtype", ", ".join(dtypes), "one dtype with --model")
    for backend in backends or ():
        registry.check_requested(backend)
    with use(*backends) if backends else nullcontext(), output.progress("recording") as advance:
        raw = record_model(
            name,
            porter=porter(),
            device=device,
            dtype=(dtypes or ["bfloat16"])[0],
            tiny=tiny,
            layers=layers,
            seed=seed,
            progress=advance,
        )
    capsule.save(raw, out)
    recording = capsule_model.loads(raw, str(out))
    assert isinstance(recording, capsule_model.ModelCapsule)
    manifest = recording.manifest
    if as_json:
        output.json_document(
            {
                "capsule": str(out),
                "sha256": recording.sha256,
                "bytes": recording.size,
                "model": manifest.title,
                "layers": manifest.layers,
                "dtype": manifest.dtype,
                "exact": manifest.exact,
                "served": manifest.served,
                "machine": manifest.machine.model_dump(mode="json"),
                "environment": manifest.environment,
            }
        )
        return
    output.say(f"{out}: {output.size(recording.size)}, sha256 {recording.sha256}")
    output.say(f"{manifest.title}, {manifest.layers} layers in {manifest.dtype}, exact in {manifest.exact}")


def porter() -> Any:
    """The integration that ports; porting knows none."""
    try:
        from ferryman.integrations import transformers
    except ImportError as error:
        raise BackendUnavailable(f"a model needs transformers ({error}); pip install 'ferryman[models]'") from error
    return transformers
