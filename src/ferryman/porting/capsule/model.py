"""A model in a capsule: a preset built here, its weights made from counters and proven by hash, its layers one by one.

Every decoder layer is given a hidden state, and a gradient of its output, that counters make: so each layer has the
same inputs on both machines, whatever the layers before it did.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ferryman.errors import CapsuleError
from ferryman.porting.capsule import container
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.cases import OtherBits
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.contents import Hash, Identifier, Machine, OutputRecord, Part
from ferryman.porting.inputs.fills import Draw
from ferryman.porting.judging.results import Environment, Name
from ferryman.porting.model import config, exact, measure
from ferryman.porting.model.results import BIAS_ALLOWED, DEVIATIONS, SEEDS, Measure, limited

CHUNK = 2**22  # elements made at a time: 32 MiB of counters
MOST_TOKENS = 2**16


class LayerRecord(Part):
    """One decoder layer on A: its output and its input's gradient, and A's own measures of all their elements."""

    output: OutputRecord
    gradient: OutputRecord
    measures: list[list[Measure]] = Field(min_length=2, max_length=2)


class ModelManifest(Part):
    """``hashes`` are of every parameter and of every layer's input and cotangent; ``buffers`` are stored whole."""

    kind: Literal["model"]
    environment: dict[str, Any]
    machine: Machine
    model: Identifier
    title: str
    tiny: bool
    layers: int = Field(ge=1, le=128)
    dtype: Literal["float32", "float16", "bfloat16"]
    batch: int = Field(ge=1, le=1024)
    tokens: int = Field(ge=2, le=MOST_TOKENS)
    seed: int
    exact: Literal["float64", "float32"]
    served: dict[Name, dict[Name, int]]
    hashes: dict[Name, Hash] = Field(max_length=10_000)
    buffers: dict[Name, Hash] = Field(max_length=1000)
    found: list[LayerRecord] = Field(max_length=128)


@dataclass(frozen=True)
class ModelCapsule:
    manifest: ModelManifest
    environment: Environment
    tensors: dict[str, Tensor]
    sha256: str = ""
    size: int = 0


def load(path: str | Path) -> capsule.Capsule | ModelCapsule:
    """A capsule of ops or of a model from a file. Raises CapsuleError naming what is wrong with it."""
    return loads(container.read(path), str(path))


def loads(raw: bytes, where: str = "the capsule") -> capsule.Capsule | ModelCapsule:
    content, tensors, sha256 = capsule.unpacked(raw, where)
    if content.get("kind") != "model":
        return capsule.checked(content, tensors, sha256, len(raw), where)
    manifest = capsule.valid(ModelManifest, content, where)
    facts = capsule.valid(Environment, manifest.environment, f"{where}: its environment")
    fault = _fault(manifest, tensors)
    if fault is not None:
        raise CapsuleError(f"{where}: {fault}")
    return ModelCapsule(manifest, facts, tensors, sha256, len(raw))


def _fault(manifest: ModelManifest, tensors: dict[str, Tensor]) -> str | None:
    """What is inconsistent."""
    if manifest.model not in config.PRESETS:
        return f"the model is {manifest.model!r}; required: one of {', '.join(config.PRESETS)}"
    if manifest.batch * manifest.tokens > MOST_TOKENS or len(manifest.found) != manifest.layers:
        return f"{manifest.batch} x {manifest.tokens} tokens, {len(manifest.found)} layers of {manifest.layers}"
    used = set(manifest.buffers.values())
    for index, layer in enumerate(manifest.found):
        for record in (layer.output, layer.gradient):
            wrong = capsule.output_fault(record, tensors)
            if wrong is not None or record.stored is None:
                return f"layer {index}: {record.name} {wrong or 'is not stored'}"
            used.add(record.stored)
    if used != set(tensors):
        return "tensors are stored that nothing refers to, or referred to and not stored"
    return None


def filled(spec: config.ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The preset with weights from counters: norms about 1, matrices normal with variance 1 / inputs.

    So what a layer adds is of its input's size, and an error in it shows. With transformers' own deviation of 0.02, a
    tiny model's layers add a few hundredths of it, and their errors drown in the residual stream's rounding.
    """
    model = config.build(spec, device, dtype, 0, copies=10)  # the twin in float64, and activations
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            assert flat.data_ptr() == parameter.data_ptr()
            for chunk, start in enumerate(range(0, flat.numel(), CHUNK)):
                part = flat[start : start + CHUNK]
                values = Draw.of(seed, "model", spec.family, f"{name}/{chunk}", (part.numel(),), dtype, device).normal()
                part.copy_(1 + 0.1 * values if parameter.dim() == 1 else values / math.sqrt(parameter.shape[-1]))
    return model.requires_grad_(False)


@dataclass
class Inputs:
    """What each layer is given: hidden states and cotangents."""

    hidden: list[Tensor] = field(default_factory=list)
    cotangents: list[Tensor] = field(default_factory=list)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, model: Any, batch: int, tokens: int, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        shape = (batch, tokens, int(model.config.hidden_size))

        def draw(what: str, index: int) -> Tensor:
            return Draw.of(seed, "model", what, str(index), shape, dtype, device).normal().to(dtype)

        count = len(measure.layers_of(model))
        ids = Draw.of(seed, "model", "tokens", "0", (batch, tokens), dtype, device).uniform()
        return cls(
            [draw("hidden", i) for i in range(count)],
            [draw("cotangent", i) for i in range(count)],
            (ids * int(model.config.vocab_size)).floor().long(),
        )


def hashes(model: Any, inputs: Inputs) -> dict[str, str]:
    """Of everything that counters made."""
    digests = {name: digest(p) for name, p in model.named_parameters()}
    for what, given in (("hidden", inputs.hidden), ("cotangent", inputs.cotangents)):
        digests |= {f"{what}.{i}": digest(t) for i, t in enumerate(given)}
    return digests | {"tokens": digest(inputs.tokens)}


def take_buffers(model: Any, stored: dict[str, Tensor]) -> None:
    """A's buffers in the place of ours: rotary frequencies come from pow, which differs between libraries."""
    own = dict(model.named_buffers())
    if set(own) != set(stored):
        raise OtherBits(f"the model has buffers {sorted(own)} here, recorded {sorted(stored)}")
    for name, buffer in own.items():
        if (buffer.shape, buffer.dtype) != (stored[name].shape, stored[name].dtype):
            raise OtherBits(f"buffer {name} has another shape or dtype here")
        buffer.copy_(stored[name])


@contextlib.contextmanager
def _feeding(model: Any, leaves: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    def before(index: int) -> Any:
        return lambda module, args, kwargs: ((leaves[index], *args[1:]), kwargs)

    def after(module: Any, args: Any, out: Any) -> None:
        outputs.append(out[0] if isinstance(out, tuple) else out)

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(measure.layers_of(model)):
            stack.callback(layer.register_forward_pre_hook(before(index), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        yield


Pass = list[tuple[Tensor, Tensor]]  # of each layer: its output, and the gradient of its input


def run(model: Any, inputs: Inputs, hidden: list[Tensor] | None = None) -> Pass:
    """Every layer alone, forward and backward."""
    leaves = [h.detach().clone().requires_grad_() for h in (hidden or inputs.hidden)]
    outputs: list[Tensor] = []
    with _feeding(model, leaves, outputs), torch.enable_grad():
        model.base_model(input_ids=inputs.tokens, use_cache=False)
    pairs: Pass = []
    for leaf, out, cotangent in zip(leaves, outputs, inputs.cotangents, strict=True):
        (slope,) = torch.autograd.grad(out, leaf, cotangent.to(out.dtype))
        pairs.append((out.detach(), slope))
    return pairs


def run_exact(model: Any, inputs: Inputs) -> tuple[Pass, torch.dtype]:
    """The unported model's own code in float64 (float32 where memory forbids, which the caller says)."""
    needed = 8 * sum(p.numel() for p in model.parameters())
    wide = exact.dtype_for(inputs.tokens.device, needed)
    twin = copy.deepcopy(model).to(wide)
    widened = Inputs([h.to(wide) for h in inputs.hidden], [c.to(wide) for c in inputs.cotangents], inputs.tokens)
    with exact.Widened(wide):
        return run(twin, widened), wide


def moved(inputs: Inputs, seed: int) -> list[Tensor]:
    """The hidden states, each element one unit in the last place up or down at random."""
    generator = torch.Generator(device=inputs.tokens.device).manual_seed(seed)
    return [measure.one_ulp(h, generator) for h in inputs.hidden]


@dataclass(frozen=True)
class Reference:
    """What a machine needs to judge: the exact result, and how far the unported model and one ulp are from it."""

    wanted: Pass
    own: Pass
    drawn: list[Pass]
    wide: torch.dtype

    @classmethod
    def of(cls, model: Any, inputs: Inputs) -> Reference:
        wanted, wide = run_exact(model, inputs)
        drawn = [run(model, inputs, moved(inputs, seed)) for seed in SEEDS]
        return cls(wanted, run(model, inputs), drawn, wide)

    def judge(self, layer: int, kind: int, values: Tensor, at: Tensor | None = None) -> list[Measure]:
        """Relative error and bias, with the limits that `ferryman check --model` derives; of a whole output the worst
        token too. ``values`` holds the elements at the positions ``at``, or all of them."""
        wanted = _pick(self.wanted[layer][kind], at)
        given = values.to(wanted.device)
        own, *drawn = [_pick(one[layer][kind], at) for one in (self.own, *self.drawn)]
        most = max(measure.relative(one, wanted) for one in (own, *drawn))
        measures = [limited("error", measure.relative(given, wanted), most)]
        if at is None and kind == 0:
            worst = max(measure.worst_row(one, wanted) for one in (own, *drawn))
            measures.append(limited("worst token", measure.worst_row(given, wanted), worst))
        squares = wanted.double().square()
        spread = math.sqrt(float(squares.square().sum())) / max(float(squares.sum()), 1e-300)
        slopes = [measure.slope(one, wanted) for one in drawn]
        # independent relative errors of that size move the scale by chance alone this far
        chance = max(math.sqrt(sum(b * b for b in slopes) / len(slopes)), most * spread)
        allowed = max(BIAS_ALLOWED * torch.finfo(values.dtype).eps, 4 * torch.finfo(torch.float32).eps)
        limit = max(abs(measure.slope(own, wanted)), DEVIATIONS * chance) + allowed
        bias = abs(measure.slope(given, wanted))
        measures.append(Measure(name="bias", value=bias, floor=chance, limit=limit, ok=bias <= limit))
        return measures


def _pick(tensor: Tensor, at: Tensor | None) -> Tensor:
    return tensor if at is None else tensor.reshape(-1)[at.to(tensor.device)]


def spec_of(model: str, tiny: bool, layers: int) -> config.ModelSpec:
    """Presets only: a config.json stays where it lies."""
    if model not in config.PRESETS:
        raise CapsuleError(f"{model} is not one of {', '.join(config.PRESETS)}; only these travel in a capsule")
    return config.spec(model, tiny=tiny, layers=layers)
