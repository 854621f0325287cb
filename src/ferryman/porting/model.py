"""Is a ported model still the same model? `check_model` builds one, runs it both ways, and says.

Limits come from the floor (see `model_measure`), and from nothing else. The unported model and the ported one each
differ from the exact result by roundings of the floor's size, so from each other by up to twice it: AMPLITUDE = 2 for
whatever grows with the error itself, its square for the KL divergence, which grows with the error's square.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import detect
from ferryman.dispatch import trace
from ferryman.errors import ArgumentError
from ferryman.porting import model_config
from ferryman.porting import model_measure as measure

AMPLITUDE = 2.0
DEVIATIONS = 6.0  # of the bias, whose floor is a standard deviation
# Beyond chance, rounding to nearest is a little biased on real values, and float32 kernels approximate exp and rsqrt to
# 2-4 ulp of one sign. Right ports on an H200 in bfloat16 stayed below eps/116; a 1% error is 40 of these allowances.
BIAS_ALLOWED = 1 / 32  # of the storage dtype's eps, and at least 4 of float32's
SEEDS = (1, 2, 3)  # perturbations; the floor is the largest of their results
STAGES = ("build", "reference", "floor", "ported", "greedy", "gradients")  # what `progress` is told, in this order
_OP = "check_model"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Porter(Protocol):
    """What an integration offers: `ferryman.integrations.transformers` is one."""

    def port(self, model: Any) -> Any: ...

    def unport(self, model: Any) -> None: ...


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Measure(_Model):
    """One number of the ported model against its limit. ``floor`` is what one ulp does to the unported model."""

    name: str
    value: float
    floor: float
    limit: float
    ok: bool


class LayerErrors(_Model):
    """A decoder layer's output: relative error of all tokens (``alone``), of the worst token, of the scale (``bias``).

    For these, every layer is given the reference's input; for ``accumulated``, the layer before's output.
    """

    layer: int
    alone: Measure
    worst_token: Measure
    bias: Measure
    accumulated: Measure


class Calls(_Model):
    """Calls of one op in one phase, by the implementation that served them; ``expected`` is ported modules x passes."""

    phase: Literal["forward", "greedy", "gradients"]
    op: str
    served: dict[str, int]
    expected: int
    ok: bool


class Greedy(_Model):
    """Greedy decoding with a cache. A parting is excused where the reference nearly prefers the other token."""

    sequences: int
    steps: int
    identical: int
    identical_at_floor: int
    partings: list[tuple[int, int, float]]  # (sequence, step, gap between the two tokens' reference logits)
    gap_limit: float
    reference: list[list[int]]
    ported: list[list[int]]
    ok: bool


class ModelResult(_Model):
    """All that `check_model` found. ``verdict`` is PASS only if every measure and every count is right."""

    model: str
    family: str
    config: dict[str, Any]
    cuts: list[str]
    ignored_keys: list[str]
    parameters: int
    device: str
    device_name: str
    dtype: str
    batch: int
    tokens: int
    seed: int
    versions: dict[str, str]
    ported: dict[str, int]
    unsupported: list[dict[str, str]]
    layers: list[LayerErrors]
    logits: list[Measure]
    greedy: Greedy
    gradients: list[Measure]
    calls: list[Calls]
    fallbacks: list[str]
    restored: bool
    floor_meaning: str
    limits_meaning: str
    seconds: float
    verdict: Literal["PASS", "FAIL", "SIMULATED"]
    reasons: list[str]


FLOOR_MEANING = (
    "the unported model, each element of its embedding (for a layer alone: of the layer's input) moved one unit in the "
    f"last place up or down at random; the largest of {len(SEEDS)} draws"
)
LIMITS_MEANING = (
    f"relative errors: {AMPLITUDE:g} x floor, as both models differ from the exact one by about the floor; bias: "
    f"{DEVIATIONS:g} standard deviations of the floor's and {BIAS_ALLOWED:g} of the dtype's eps; KL: "
    f"{AMPLITUDE**2:g} x floor, as it grows with the square; top-1: {AMPLITUDE:g} x the floor's disagreements and "
    "three standard deviations of such a count; greedy: tokens may part only where the reference prefers its own by no "
    f"more than two logits can move, each {AMPLITUDE:g} x the floor's largest change"
)


def check_model(
    model: str | os.PathLike[str], *, porter: Porter, device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16", tiny: bool = False, layers: int = 4, batch: int = 2,
    tokens: int | None = None, steps: int = 16, backward: bool = True, seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ModelResult:  # fmt: skip
    """Build a transformers model with random weights, port it, and compare it with itself unported.

    model: "qwen3", "llama", "qwen2", "mistral", "gemma" at their published widths, or a local config.json. layers: how
    many decoder layers to build (at least 4 unless tiny). tiny: smaller widths and vocabulary, real head_dim. tokens:
    length of the prompts (48 when tiny, else 256). steps: greedy tokens. porter: who ports, such as
    `ferryman.integrations.transformers`. Requests (`ferryman.use`) in force bind the ported model. Downloads nothing.
    Raises ArgumentError, UnknownName, and what the porter raises.
    """
    began = time.perf_counter()
    told = progress or (lambda stage: None)
    place, storage = _device(device), _dtype(dtype)
    length = tokens if tokens is not None else 48 if tiny else 256
    for name, value, least in (("batch", batch, 1), ("tokens", length, 2), ("steps", steps, 1)):
        if value < least:
            raise ArgumentError(_OP, name, value, f"at least {least}")
    wanted = model_config.spec(model, tiny=tiny, layers=layers)
    told("build")
    # Weights, and with gradients the reference's, the floor's or the port's, and the ones being accumulated.
    built = model_config.build(wanted, place, storage, seed, copies=4.5 if backward else 1.5)
    vocabulary = int(wanted.fields["vocab_size"])
    prompt = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)).to(place)

    told("reference")
    free = measure.observe(built, prompt)
    alone = measure.observe(built, prompt, feed=free.inputs)
    greedy = measure.generate(built, prompt, steps)
    wanted_gradients = measure.gradients(built, prompt) if backward else None
    told("floor")
    floor = _Floor(built, prompt, steps, free, alone, wanted_gradients)

    report = porter.port(built)
    try:
        told("ported")
        calls: list[Calls] = []
        fallbacks: Counter[tuple[str, str, str]] = Counter()
        with trace() as traced:
            found = measure.observe(built, prompt)
        calls += _calls("forward", traced.calls, report.calls(1))
        fallbacks += traced.fallbacks
        found_alone = measure.observe(built, prompt, feed=free.inputs)
        told("greedy")
        with trace() as traced:
            spoken = measure.generate(built, prompt, steps)
        calls += _calls("greedy", traced.calls, report.calls(spoken.passes))
        fallbacks += traced.fallbacks
        told("gradients")
        slopes: list[Measure] = []
        if wanted_gradients is not None:
            with trace() as traced:
                slopes_found = measure.gradients(built, prompt)
            forward = report.calls(1)
            both = forward | {f"{op}_backward": n for op, n in forward.items()}
            calls += _calls("gradients", traced.calls, both)
            fallbacks += traced.fallbacks
            slopes = floor.gradient_measures(slopes_found)
    finally:
        porter.unport(built)
    restored = torch.equal(measure.observe(built, prompt).logits, free.logits)

    allowed = max(BIAS_ALLOWED * torch.finfo(storage).eps, 4 * torch.finfo(torch.float32).eps)
    pairs = zip(found_alone.outputs, alone.outputs, found.outputs, free.outputs, strict=True)
    errors = [
        LayerErrors(
            layer=i,
            alone=_limited("alone", measure.relative(a, b), floor.alone[i]),
            worst_token=_limited("worst token", measure.worst_row(a, b), floor.worst[i]),
            bias=_limited("bias", abs(measure.slope(a, b)), floor.bias[i], DEVIATIONS, allowed),
            accumulated=_limited("accumulated", measure.relative(c, d), floor.accumulated[i]),
        )
        for i, (a, b, c, d) in enumerate(pairs)
    ]
    logits = floor.logit_measures(measure.logit_distance(free.logits, found.logits), batch * length)
    said = _greedy(greedy, spoken, floor, steps)
    reasons = _reasons(errors, logits, said, slopes, calls, restored, spoken.passes, steps)
    simulated = interpreting() and any("triton" in c.served for c in calls)
    return ModelResult(
        model=wanted.title, family=wanted.family, config=dict(wanted.fields), cuts=list(wanted.cuts),
        ignored_keys=list(wanted.ignored), parameters=sum(p.numel() for p in built.parameters()), device=str(place),
        device_name=detect(place).name, dtype=str(storage).removeprefix("torch."), batch=batch, tokens=length,
        seed=seed, versions={name: metadata.version(name) for name in ("torch", "transformers")},
        ported=report.calls(1),
        unsupported=[{"path": u.path, "module": u.module, "reason": u.reason} for u in report.unsupported],
        layers=errors, logits=logits, greedy=said, gradients=slopes, calls=calls,
        fallbacks=[f"{op}: {served} served it: {why} ({n} calls)" for (op, served, why), n in fallbacks.items()],
        restored=restored, floor_meaning=FLOOR_MEANING, limits_meaning=LIMITS_MEANING,
        seconds=round(time.perf_counter() - began, 2),
        verdict="FAIL" if reasons else "SIMULATED" if simulated else "PASS", reasons=reasons,
    )  # fmt: skip


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(_OP, "device", repr(device), 'a torch device such as "cpu" or "cuda:0"') from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(_OP, "device", str(place), f"one of the {torch.cuda.device_count()} CUDA devices here")
    return place


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ArgumentError(_OP, "dtype", str(dtype), " or ".join(_DTYPES))
    return found  # type: ignore[return-value]


def _limited(name: str, value: float, floor: float, factor: float = AMPLITUDE, allowed: float = 0.0) -> Measure:
    limit = factor * floor + allowed
    return Measure(name=name, value=value, floor=floor, limit=limit, ok=value <= limit)  # NaN is not <=


class _Floor:
    """What one ulp does to the unported model, in every measure."""

    def __init__(
        self, model: Any, prompt: Tensor, steps: int, free: measure.Observation, alone: measure.Observation,
        reference: dict[str, Tensor] | None,
    ) -> None:  # fmt: skip
        self.accumulated = [0.0] * len(free.outputs)
        self.alone = [0.0] * len(free.outputs)
        self.worst = [0.0] * len(free.outputs)
        biases: list[list[float]] = []
        self.kl, self.disagreements, self.largest = 0.0, 0, 0.0
        self.slopes: dict[str, float] = {}
        self.reference = reference
        for seed in SEEDS:
            seen = measure.observe(model, prompt, seed=seed)
            fed = measure.observe(model, prompt, feed=free.inputs, seed=seed)
            self.accumulated = _larger(measure.relative, self.accumulated, seen.outputs, free.outputs)
            self.alone = _larger(measure.relative, self.alone, fed.outputs, alone.outputs)
            self.worst = _larger(measure.worst_row, self.worst, fed.outputs, alone.outputs)
            biases.append([measure.slope(f, w) for f, w in zip(fed.outputs, alone.outputs, strict=True)])
            distance = measure.logit_distance(free.logits, seen.logits)
            self.kl = max(self.kl, distance.kl)
            self.disagreements = max(self.disagreements, distance.disagreements)
            self.largest = max(self.largest, distance.largest)
            if reference is not None:
                slopes = measure.gradients(model, prompt, seed=seed)
                for group, error in measure.gradient_errors(reference, slopes).items():
                    self.slopes[group] = max(self.slopes.get(group, 0.0), error)
        # Three draws alone would underestimate it now and then; independent errors give the other.
        self.bias = [
            max(math.sqrt(sum(b * b for b in drawn) / len(drawn)), error / math.sqrt(out.numel()))
            for drawn, error, out in zip(zip(*biases, strict=True), self.alone, alone.outputs, strict=True)
        ]
        self.spoken = measure.generate(model, prompt, steps, seed=SEEDS[0])

    def logit_measures(self, found: measure.LogitDistance, tokens: int) -> list[Measure]:
        expected = AMPLITUDE * self.disagreements
        allowed = expected + 3 * math.sqrt(expected + 1)
        return [
            _limited("KL divergence", found.kl, self.kl, AMPLITUDE**2),
            Measure(
                name="top-1 disagreement", value=found.disagreements / tokens, floor=self.disagreements / tokens,
                limit=allowed / tokens, ok=found.disagreements <= allowed,
            ),
            _limited("largest logit change", found.largest, self.largest),
        ]  # fmt: skip

    def gradient_measures(self, slopes: dict[str, Tensor]) -> list[Measure]:
        if self.reference is None:
            return []
        errors = measure.gradient_errors(self.reference, slopes)
        return [_limited(group, error, self.slopes[group]) for group, error in errors.items()]


def _larger(
    error: Callable[[Tensor, Tensor], float], before: list[float], found: list[Tensor], wanted: list[Tensor]
) -> list[float]:
    return [max(b, error(f, w)) for b, f, w in zip(before, found, wanted, strict=True)]


def _greedy(reference: measure.Generated, found: measure.Generated, floor: _Floor, steps: int) -> Greedy:
    parted = measure.divergences(reference, found)
    sequences = reference.tokens.shape[0]
    limit = 2 * AMPLITUDE * floor.largest
    return Greedy(
        sequences=sequences, steps=steps, identical=sequences - len(parted),
        identical_at_floor=sequences - len(measure.divergences(reference, floor.spoken)),
        partings=[(d.sequence, d.step, d.gap) for d in parted], gap_limit=limit, reference=reference.tokens.tolist(),
        ported=found.tokens.tolist(), ok=all(d.gap <= limit for d in parted),
    )  # fmt: skip


def _calls(phase: Any, served: Counter[tuple[str, str]], expected: dict[str, int]) -> list[Calls]:
    by_op: dict[str, dict[str, int]] = {op: {} for op in expected}
    for (op, implementation), n in served.items():
        by_op.setdefault(op, {})[implementation] = n
    return [
        Calls(phase=phase, op=op, served=by, expected=expected.get(op, 0), ok=sum(by.values()) == expected.get(op, 0))
        for op, by in sorted(by_op.items())
    ]


def _reasons(
    layers: list[LayerErrors], logits: list[Measure], greedy: Greedy, slopes: list[Measure], calls: list[Calls],
    restored: bool, passes: int, steps: int,
) -> list[str]:  # fmt: skip
    def over(what: str, m: Measure) -> list[str]:
        return [] if m.ok else [f"{what}: {m.value:.3g}; limit {m.limit:.3g} (floor {m.floor:.3g})"]

    found: list[str] = []
    for layer in layers:
        for m in (layer.alone, layer.worst_token, layer.bias, layer.accumulated):
            found += over(f"layer {layer.layer} {m.name}", m)
    for m in logits:
        found += over(m.name, m)
    for m in slopes:
        found += over(f"gradient of {m.name}", m)
    if not greedy.ok:
        row, step, gap = max(greedy.partings, key=lambda p: p[2])
        where = f"step {step} of sequence {row}"
        found.append(f"greedy tokens part at {where} over a gap of {gap:.3g}; limit {greedy.gap_limit:.3g}")
    for c in calls:
        if not c.ok:
            found.append(f"{c.phase}: {sum(c.served.values())} calls of {c.op}; expected {c.expected}")
    if passes != steps:
        found.append(f"greedy decoding ran the model {passes} times; expected {steps}")
    if not restored:
        found.append("unport did not restore the model: its logits differ from before")
    return found
