"""Record a ported model in a capsule: every decoder layer's output and gradient, alone, against the exact result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ferryman.device_profiles import detect
from ferryman.dispatch import trace
from ferryman.porting.capsule import container
from ferryman.porting.capsule import model as capsule_model
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.contents import TILE, OutputRecord
from ferryman.porting.capsule.machine import machine
from ferryman.porting.capsule.model import Inputs, LayerRecord, ModelManifest, Pass, Reference
from ferryman.porting.capsule.record import elements, sampled
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import environment
from ferryman.porting.running.cells import dtypes_of
from ferryman.porting.running.process import placed

SAMPLE = 128  # tiles of each layer's output and of its gradient: 4,096 elements
KINDS: tuple[Literal["output"], Literal["gradient"]] = ("output", "gradient")
STAGES = ("build", "exact", "ported", "write")


def record_model(
    model: str,
    *,
    porter: Any,
    device: torch.device | str | None = None,
    dtype: str | torch.dtype = "bfloat16",
    tiny: bool = False,
    layers: int = 4,
    batch: int = 2,
    tokens: int | None = None,
    seed: int = SEED,
    progress: Callable[[int, int, str], None] | None = None,
) -> bytes:
    """The bytes of a capsule. ``model``: a preset ("qwen3", "llama", ..). ``porter``: who ports, such as
    `ferryman.integrations.transformers`. Requests (`ferryman.use`) in force bind the ported model.
    """
    began = time.perf_counter()
    advance = progress or (lambda done, total, label: None)
    place, profile = placed(device), detect(device)
    (storage,) = dtypes_of([dtype])
    length = tokens if tokens is not None else 48 if tiny else 256
    spec = capsule_model.spec_of(model, tiny, layers)
    advance(0, len(STAGES), STAGES[0])
    built = capsule_model.filled(spec, place, storage, seed)
    inputs = Inputs.of(built, batch, length, seed, place, storage)
    advance(1, len(STAGES), STAGES[1])
    reference = Reference.of(built, inputs)
    advance(2, len(STAGES), STAGES[2])
    pairs, served = ported(built, inputs, porter)
    advance(3, len(STAGES), STAGES[3])
    tensors: dict[str, Tensor] = {}

    def store(tensor: Tensor) -> str:
        name = digest(tensor)
        tensors[name] = tensor.detach().cpu().clone()
        return name

    buffers = {name: store(b) for name, b in built.named_buffers()}
    records = []
    for index, pair in enumerate(pairs):
        parts = {kind: _output(f"layer_{index}_{kind}", out, store) for kind, out in zip(KINDS, pair, strict=True)}
        records.append(
            LayerRecord(
                output=parts["output"],
                gradient=parts["gradient"],
                measures=[reference.judge(index, k, pair[k]) for k in range(2)],
            )
        )
    facts = environment(place, profile, seed, "tiny" if tiny else "model", round(time.perf_counter() - began, 3))
    manifest = ModelManifest.model_validate(
        {
            "kind": "model",
            "environment": facts.model_dump(mode="json"),
            "machine": machine(place),
            "model": model,
            "title": spec.title,
            "tiny": tiny,
            "layers": len(pairs),
            "dtype": dtype_name(storage),
            "batch": batch,
            "tokens": length,
            "seed": seed,
            "exact": dtype_name(reference.wide),
            "served": by_op(served),
            "hashes": capsule_model.hashes(built, inputs),
            "buffers": buffers,
            "found": records,
        }
    )
    raw = container.pack(manifest.model_dump_json(), tensors)
    capsule_model.loads(raw, "the capsule that was recorded")
    return raw


def ported(model: Any, inputs: Inputs, porter: Any) -> tuple[Pass, Counter[tuple[str, str]]]:
    """Every layer of the ported model, and which implementations served it."""
    porter.port(model)
    try:
        with trace() as traced:
            pairs = capsule_model.run(model, inputs)
    finally:
        porter.unport(model)
    return pairs, traced.calls


def by_op(served: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for (op, implementation), count in served.items():
        counts.setdefault(op, {})[implementation] = count
    return counts


def _output(name: str, out: Tensor, store: Callable[[Tensor], str]) -> OutputRecord:
    tiles = sampled(name, out.numel(), SAMPLE) if out.numel() > SAMPLE * TILE else None
    kept = out if tiles is None else elements(out, tiles)
    return OutputRecord(
        name=name,
        dtype=dtype_name(out.dtype),
        shape=list(out.shape),
        hash=digest(out),
        stored=store(kept),
        tiles=tiles,
    )
