"""Is a ported model still the same model? `check_model` builds one, runs it both ways, and says.

Layers, logits, gradients and greedy tokens are compared with the unported model's; every module alone, and the logits,
with the exact result (`modules`, `exact`); the ported model with itself compiled and replayed from a CUDA
graph (`modes`). Limits come from the floor (`measure`, `results`), and from nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import detect
from ferryman.dispatch import trace
from ferryman.dispatch.proposals import proposals
from ferryman.errors import ArgumentError
from ferryman.porting.model import config as model_config
from ferryman.porting.model import exact, measure, modes
from ferryman.porting.model.floor import Floor
from ferryman.porting.model.modules import Bench
from ferryman.porting.model.replay import twin, unwatched
from ferryman.porting.model.results import (
    AMPLITUDE,
    DEVIATIONS,
    FLOOR_MEANING,
    LIMITS_MEANING,
    MODULES_MEANING,
    Calls,
    Greedy,
    LayerErrors,
    Measure,
    ModelResult,
    bias_allowed,
    first_divergence,
    limited,
)

# What `progress` is told, in this order.
STAGES = ("build", "reference", "floor", "ported", "greedy", "gradients", "modules", "modes")
_OP = "check_model"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Porter(Protocol):
    """What an integration offers: `ferryman.integrations.transformers` is one.

    It may also have ``watch(seen)``, a context within which ``seen(module, name, tensor)`` is told what its modules
    compute inside, ported or not, so that these are compared too.
    """

    def port(self, model: Any) -> Any: ...

    def unport(self, model: Any) -> None: ...


def check_model(
    model: str | os.PathLike[str],
    *,
    porter: Porter,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    tiny: bool = False,
    layers: int = 4,
    batch: int = 2,
    tokens: int | None = None,
    steps: int = 16,
    backward: bool = True,
    seed: int = 0,
    run_modes: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ModelResult:
    """Build a transformers model with random weights, port it, and compare it with itself unported.

    model: "qwen3", "llama", "qwen2", "mistral", "gemma" at their published widths, or a local config.json. layers: how
    many decoder layers to build (at least 4 unless tiny). tiny: smaller widths and vocabulary, real head_dim. tokens:
    length of the prompts (48 when tiny, else 256). steps: greedy tokens. run_modes: compare eager with torch.compile
    and with CUDA graph replay as well. porter: who ports, such as `ferryman.integrations.transformers`. Requests
    (`ferryman.use`) in force bind the ported model. Downloads nothing. Raises ArgumentError, UnknownName, and what the
    porter raises.
    """
    announce = progress or (lambda stage: None)
    place, storage = _device(device), _dtype(dtype)
    length = tokens if tokens is not None else 48 if tiny else 256
    for name, value, least in (("batch", batch, 1), ("tokens", length, 2), ("steps", steps, 1)):
        if value < least:
            raise ArgumentError(_OP, name, value, f"at least {least}")
    wanted = model_config.spec(model, tiny=tiny, layers=layers)
    with _threads(1 if tiny and place.type == "cpu" else None):
        return _check(wanted, porter, place, storage, batch, length, steps, backward, seed, run_modes, announce)


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose: 2 on 2 shared cores took 52 s where 1 took 16 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(
    wanted: model_config.ModelSpec,
    porter: Porter,
    place: torch.device,
    storage: torch.dtype,
    batch: int,
    length: int,
    steps: int,
    backward: bool,
    seed: int,
    run_modes: bool,
    announce: Callable[[str], None],
) -> ModelResult:
    began = time.perf_counter()
    announce("build")
    # Weights, and with gradients the reference's, the floor's or the port's, and the ones being accumulated.
    built = model_config.build(wanted, place, storage, seed, copies=4.5 if backward else 1.5)
    vocabulary = int(wanted.fields["vocab_size"])
    prompt = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)).to(place)

    announce("reference")
    free = measure.observe(built, prompt)
    alone = measure.observe(built, prompt, feed=free.inputs)
    greedy = measure.generate(built, prompt, steps)
    wanted_gradients = measure.gradients(built, prompt) if backward else None
    announce("floor")
    floor = Floor(built, prompt, steps, free, alone, wanted_gradients)

    report = porter.port(built)
    try:
        announce("ported")
        calls: list[Calls] = []
        fallbacks: Counter[tuple[str, str, str]] = Counter()
        with trace() as traced:
            observed = measure.observe(built, prompt)
        calls += _calls("forward", traced.calls, report.calls(1, gradients=False))
        fallbacks += traced.fallbacks
        found_alone = measure.observe(built, prompt, feed=free.inputs)
        announce("greedy")
        with trace() as traced:
            spoken = measure.generate(built, prompt, steps)
        calls += _calls("greedy", traced.calls, report.calls(spoken.passes, gradients=False))
        fallbacks += traced.fallbacks
        announce("gradients")
        slopes: list[Measure] = []
        if wanted_gradients is not None:
            with trace() as traced:
                slopes_found = measure.gradients(built, prompt)
            losses = [op for site in report.ported if not site.path for op in site.maybe]  # of the model itself
            forward = report.calls(1) | dict.fromkeys(losses, 1)
            both = forward | {f"{op}_backward": n for op, n in forward.items()}
            calls += _calls("gradients", traced.calls, both)
            fallbacks += traced.fallbacks
            slopes = floor.gradient_measures(slopes_found)
    finally:
        porter.unport(built)
    restored = torch.equal(measure.observe(built, prompt).logits, free.logits)

    announce("modules")
    wanted_gradients = None
    found_modules = _examine(built, porter, prompt, backward, floor, free.logits, observed.logits, run_modes, announce)

    allowed = bias_allowed(torch.finfo(storage).eps)
    pairs = zip(found_alone.outputs, alone.outputs, observed.outputs, free.outputs, strict=True)
    errors = [
        LayerErrors(
            layer=i,
            alone=limited("alone", measure.relative(a, b), floor.alone[i]),
            worst_token=limited("worst token", measure.worst_row(a, b), floor.worst[i]),
            bias=limited("bias", abs(measure.slope(a, b)), floor.bias[i], DEVIATIONS, allowed),
            accumulated=limited("accumulated", measure.relative(c, d), floor.accumulated[i]),
        )
        for i, (a, b, c, d) in enumerate(pairs)
    ]
    logits = floor.logit_measures(measure.logit_distance(free.logits, observed.logits), batch * length)
    said = _greedy(greedy, spoken, floor, steps)
    reasons = _module_reasons(found_modules)
    reasons += _reasons(errors, logits, said, slopes, calls, restored, spoken.passes, steps)
    simulated = interpreting() and any("triton" in c.served for c in calls)
    return ModelResult(
        model=wanted.title,
        family=wanted.family,
        config=dict(wanted.fields),
        cuts=list(wanted.cuts),
        ignored_keys=list(wanted.ignored),
        parameters=sum(p.numel() for p in built.parameters()),
        device=str(place),
        device_name=detect(place).name,
        dtype=str(storage).removeprefix("torch."),
        batch=batch,
        tokens=length,
        seed=seed,
        versions={name: metadata.version(name) for name in ("torch", "transformers")},
        ported=report.calls(1),
        unsupported=[{"path": u.path, "module": u.module, "reason": u.reason} for u in report.unsupported],
        layers=errors,
        logits=logits,
        greedy=said,
        gradients=slopes,
        calls=calls,
        fallbacks=[f"{op}: {served} served it: {why} ({n} calls)" for (op, served, why), n in fallbacks.items()],
        restored=restored,
        floor_meaning=FLOOR_MEANING,
        limits_meaning=LIMITS_MEANING,
        seconds=round(time.perf_counter() - began, 2),
        verdict="FAIL" if reasons else "SIMULATED" if simulated else "PASS",
        reasons=reasons,
        **found_modules,
    )


def _examine(
    built: Any,
    porter: Porter,
    prompt: Tensor,
    backward: bool,
    floor: Floor,
    unported: Tensor,
    ported: Tensor,
    run_modes: bool,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """The fields of the result that say how far each module and mode is from the exact or the eager result."""
    also = twin(built)
    report = porter.port(also)
    try:
        sites = judged_sites(report)
        bench = Bench(built, also, prompt, sites, backward, getattr(porter, "watch", unwatched))
        modules = bench.modules()
        truth, wide = exact.logits(built, prompt)
        own = measure.logit_distance(truth, unported)
        logits = floor.logit_measures(measure.logit_distance(truth, ported), prompt.numel(), own)
        del truth
        announce("modes")
        ran = []
        if run_modes:
            ran.append(modes.compiled(bench, lambda distance: floor.logit_measures(distance, prompt.numel())))
            ran.append(modes.graph_replay(bench))
    finally:
        porter.unport(also)
    narrow = bench.reduced + (["the logits"] if wide != torch.float64 else [])
    said = f"float64; float32 where float64 does not fit here: {', '.join(narrow)}" if narrow else "float64"
    return {
        "modules": modules,
        "first_divergence": first_divergence(modules),
        "exact": said,
        "exact_logits": logits,
        "modes": ran,
        "modules_meaning": MODULES_MEANING,
    }


def judged_sites(report: Any) -> set[str]:
    """Paths of the ported modules that are judged alone; a part of a ported block, such as a product, goes with it. The
    model itself, whose loss may be served, is judged by its logits and that loss."""
    part = {(op,) for op in proposals("parts")}
    served = {site.path: site.ops for site in report.ported if site.path}
    return {p for p, ops in served.items() if ops not in part or not any(p.startswith(f"{o}.") for o in served)}


def _module_reasons(fields: dict[str, Any]) -> list[str]:
    first, reasons = fields["first_divergence"], []
    if first is not None:
        reasons.append(first.text)
        others = [m.path for m in fields["modules"] if not m.ok and m.path != first.path]
        if others:
            reasons.append(f"{len(others)} more modules beyond a limit: {', '.join(others)}")
    reasons += [
        f"exact {m.name}: {m.value:.3g}; limit {m.limit:.3g} (floor {m.floor:.3g})"
        for m in fields["exact_logits"]
        if not m.ok
    ]
    return reasons + [f"{mode.mode}: {mode.reason}" for mode in fields["modes"] if mode.verdict == "FAIL"]


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(_OP, "device", repr(device), 'a torch device such as "cpu" or "cuda:0"') from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(_OP, "device", str(place), f"one of the {torch.cuda.device_count()} CUDA devices here")
    return place


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    storage = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if storage not in _DTYPES.values():
        raise ArgumentError(_OP, "dtype", str(dtype), " or ".join(_DTYPES))
    return storage  # type: ignore[return-value]


def _greedy(reference: measure.Generated, spoken: measure.Generated, floor: Floor, steps: int) -> Greedy:
    parted = measure.divergences(reference, spoken)
    sequences = reference.tokens.shape[0]
    limit = 2 * AMPLITUDE * floor.largest
    return Greedy(
        sequences=sequences,
        steps=steps,
        identical=sequences - len(parted),
        identical_at_floor=sequences - len(measure.divergences(reference, floor.spoken)),
        partings=[(d.sequence, d.step, d.gap) for d in parted],
        gap_limit=limit,
        reference=reference.tokens.tolist(),
        ported=spoken.tokens.tolist(),
        ok=all(d.gap <= limit for d in parted),
    )


def _calls(phase: Any, served: Counter[tuple[str, str]], expected: dict[str, int]) -> list[Calls]:
    by_op: dict[str, dict[str, int]] = {op: {} for op in expected}
    for (op, implementation), n in served.items():
        by_op.setdefault(op, {})[implementation] = n
    return [
        Calls(phase=phase, op=op, served=by, expected=expected.get(op, 0), ok=sum(by.values()) == expected.get(op, 0))
        for op, by in sorted(by_op.items())
    ]


def _reasons(
    layers: list[LayerErrors],
    logits: list[Measure],
    greedy: Greedy,
    slopes: list[Measure],
    calls: list[Calls],
    restored: bool,
    passes: int,
    steps: int,
) -> list[str]:
    def over(what: str, m: Measure) -> list[str]:
        return [] if m.ok else [f"{what}: {m.value:.3g}; limit {m.limit:.3g} (floor {m.floor:.3g})"]

    reasons: list[str] = []
    for layer in layers:
        for m in (layer.alone, layer.worst_token, layer.bias, layer.accumulated):
            reasons += over(f"layer {layer.layer} {m.name}", m)
    for m in logits:
        reasons += over(m.name, m)
    for m in slopes:
        reasons += over(f"gradient of {m.name}", m)
    if not greedy.ok:
        row, step, gap = max(greedy.partings, key=lambda p: p[2])
        where = f"step {step} of sequence {row}"
        reasons.append(f"greedy tokens part at {where} over a gap of {gap:.3g}; limit {greedy.gap_limit:.3g}")
    for c in calls:
        if not c.ok:
            reasons.append(f"{c.phase}: {sum(c.served.values())} calls of {c.op}; expected {c.expected}")
    if passes != steps:
        reasons.append(f"greedy decoding ran the model {passes} times; expected {steps}")
    if not restored:
        reasons.append("unport did not restore the model: its logits differ from before")
    return reasons
