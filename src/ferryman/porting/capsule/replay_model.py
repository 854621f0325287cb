"""Replay a model's capsule: the same weights and inputs here, both machines' layers against the exact result."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import detect
from ferryman.porting.capsule import model as capsule_model
from ferryman.porting.capsule.cases import OtherBits
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.model import Inputs, ModelCapsule, Reference
from ferryman.porting.capsule.record import positions
from ferryman.porting.capsule.record_model import KINDS, by_op, ported
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.results import Environment, WorstElement, environment, number
from ferryman.porting.model.results import MODULES_MEANING, Measure
from ferryman.porting.running.process import placed
from ferryman.porting.running.runner import Progress

SCHEMA_VERSION = 1
Explanation = Literal["equal", "both within bounds", "A is wrong", "B is wrong", "both are wrong"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class LayerReplayed(_Model):
    """One layer's output or gradient. ``a`` are the measures of the elements that A stored, judged here, and what A's
    own record says is over its limit; ``b`` those of all elements here. ``worst`` is A's."""

    layer: int
    tensor: Literal["output", "gradient"]
    a: list[Measure]
    b: list[Measure]
    judged: int
    elements: int
    explanation: Explanation
    worst: WorstElement | None = None


class ModelReplay(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-model-replay"] = "ferryman-model-replay"
    capsule: str
    model: str
    title: str
    dtype: str
    exact: str
    limit_meaning: str = MODULES_MEANING
    recorded: Environment
    replayed: Environment
    served_a: dict[str, dict[str, int]]
    served_b: dict[str, dict[str, int]]
    layers: list[LayerReplayed]
    verdict: Literal["PASS", "FAIL", "SIMULATED", "MISTRUSTED"]
    reasons: list[str]


def replay_model(
    capsule: ModelCapsule, *, porter: Any, device: torch.device | str | None = None, progress: Progress | None = None
) -> ModelReplay:
    """Every layer on this machine. A is the machine that recorded. Other weights or inputs here: MISTRUSTED."""
    began = time.perf_counter()
    advance = progress or (lambda done, total, label: None)
    manifest = capsule.manifest
    place, profile = placed(device), detect(device)
    storage: torch.dtype = getattr(torch, manifest.dtype)
    layers: list[LayerReplayed] = []
    reasons: list[str] = []
    served: dict[str, dict[str, int]] = {}
    wide = "none"
    spec = capsule_model.spec_of(manifest.model, manifest.tiny, manifest.layers)
    advance(0, 3, "build")
    built = capsule_model.filled(spec, place, storage, manifest.seed)
    inputs = Inputs.of(built, manifest.batch, manifest.tokens, manifest.seed, place, storage)
    try:
        _proven(capsule, built, inputs)
    except OtherBits as error:
        reasons.append(str(error))
    else:
        advance(1, 3, "exact")
        reference = Reference.of(built, inputs)
        wide = dtype_name(reference.wide)
        advance(2, 3, "ported")
        pairs, calls = ported(built, inputs, porter)
        served = by_op(calls)
        layers = [
            _layer(capsule, reference, index, kind, pair[kind]) for index, pair in enumerate(pairs) for kind in range(2)
        ]
    wrong = [layer for layer in layers if layer.explanation not in ("equal", "both within bounds")]
    for layer in wrong:
        reasons.append(_reason(layer))
    simulated = interpreting() and any("triton" in by for by in served.values())
    seconds = round(time.perf_counter() - began, 3)
    return ModelReplay(
        capsule=capsule.sha256,
        model=manifest.model,
        title=manifest.title,
        dtype=manifest.dtype,
        exact=wide,
        recorded=capsule.environment,
        replayed=environment(place, profile, manifest.seed, capsule.environment.tier, seconds),
        served_a=manifest.served,
        served_b=served,
        layers=layers,
        reasons=reasons,
        verdict="FAIL" if wrong else "MISTRUSTED" if reasons else "SIMULATED" if simulated else "PASS",
    )


def _proven(capsule: ModelCapsule, model: Any, inputs: Inputs) -> None:
    """Raises OtherBits unless every weight and every input has the bits that A had."""
    manifest = capsule.manifest
    capsule_model.take_buffers(model, {name: capsule.tensors[h] for name, h in manifest.buffers.items()})
    hashes = capsule_model.hashes(model, inputs)
    for name in sorted(set(hashes) | set(manifest.hashes)):
        if hashes.get(name) != manifest.hashes.get(name):
            raise OtherBits(
                f"{name} has hash {str(hashes.get(name))[:12]} here, recorded {str(manifest.hashes.get(name))[:12]}"
            )
    for index, layer in enumerate(manifest.found):
        for record in (layer.output, layer.gradient):
            if (record.shape, record.dtype) != (list(inputs.hidden[index].shape), manifest.dtype):
                raise OtherBits(f"{record.name} is {record.dtype} {record.shape}, as no layer's of this model")


def _layer(capsule: ModelCapsule, reference: Reference, index: int, kind: int, mine: Tensor) -> LayerReplayed:
    layer = capsule.manifest.found[index]
    record = (layer.output, layer.gradient)[kind]
    assert record.stored is not None
    at = None if record.tiles is None else positions(mine.numel(), record.tiles)
    theirs = capsule.tensors[record.stored]
    a, b = reference.judge(index, kind, theirs, at), reference.judge(index, kind, mine)
    a += [m for m in layer.measures[kind] if not m.ok]
    a_wrong, b_wrong = not all(m.ok for m in a), not all(m.ok for m in b)
    explanation: Explanation = "both within bounds"
    if a_wrong or b_wrong:
        explanation = "both are wrong" if a_wrong and b_wrong else "A is wrong" if a_wrong else "B is wrong"
    elif digest(mine) == record.hash:
        explanation = "equal"
    worst = _worst(record.name, theirs, reference.wanted[index][kind], at) if a_wrong else None
    return LayerReplayed(
        layer=index,
        tensor=KINDS[kind],
        a=a,
        b=b,
        judged=theirs.numel(),
        elements=mine.numel(),
        worst=worst,
        explanation=explanation,
    )


def _worst(name: str, values: Tensor, wanted: Tensor, at: Tensor | None) -> WorstElement:
    """The stored element that is furthest from the exact one; its bound is the RMS of the layer's values."""
    exact = (wanted if at is None else wanted.reshape(-1)[at.to(wanted.device)]).reshape(-1).cpu().double()
    difference = (values.reshape(-1).double() - exact).abs().nan_to_num(nan=float("inf"))
    flat = int(difference.argmax())
    place = flat if at is None else int(at[flat])
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), wanted.shape)]
    return WorstElement(
        output=name,
        index=index,
        value=float(values.reshape(-1)[flat]),
        expected=float(exact[flat]),
        bound=float(exact.square().mean().sqrt()),
    )


def _reason(layer: LayerReplayed) -> str:
    over = [
        f"{who} {m.name} {number(m.value)}, limit {number(m.limit)}"
        for who, measures in (("A", layer.a), ("B", layer.b))
        for m in measures
        if not m.ok
    ]
    text = f"layer {layer.layer} {layer.tensor}: {layer.explanation}: {'; '.join(over)}"
    if layer.worst is None:
        return text
    w = layer.worst
    return f"{text}; A's worst element {w.index} is {w.value:.6g}, expected {w.expected:.6g}"
