"""What `check_model` reports, and the rules by which its limits follow from the floor."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

# Limits come from the floor (see `measure`), and from nothing else. The unported model and the ported one each
# differ from the exact result by roundings of the floor's size, so from each other by up to twice it: AMPLITUDE = 2 for
# whatever grows with the error itself, its square for the KL divergence, which grows with the error's square.
AMPLITUDE = 2.0
DEVIATIONS = 6.0  # of the bias, whose floor is a standard deviation
# Beyond chance, rounding to nearest is a little biased on real values, and float32 kernels approximate exp and rsqrt to
# 2-4 ulp of one sign. Right ports on an H200 in bfloat16 stayed below eps/116; a 1% error is 40 of these allowances.
BIAS_ALLOWED = 1 / 32  # of the storage dtype's eps, and at least 4 of float32's
SEEDS = (1, 2, 3)  # perturbations; the floor is the largest of their results

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
MODULES_MEANING = (
    "every module alone, given the unported model's input and output gradient; errors are against the unported module "
    "evaluated in float64 on the same bits, 'away' is the worst measure over its limit. The floor moves inputs and "
    f"output gradients by one ulp. Limits: {AMPLITUDE:g} x the larger of the unported module's own error and the "
    f"floor; bias: the unported's own or {DEVIATIONS:g} standard deviations, and {BIAS_ALLOWED:g} of the dtype's eps"
)


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


class TensorErrors(_Model):
    """One tensor that a module made: an output or something inside (forward), or a gradient (backward).

    ``unported``, ``found`` and ``floor`` are relative errors against the exact result; ``ratio`` is found over
    unported. ``away`` is the worst measure in units of its limit: at most 1 is right.
    """

    tensor: str
    direction: Literal["forward", "backward"]
    unported: float
    found: float
    ratio: float | None
    floor: float
    measures: list[Measure]
    away: float
    note: str = ""


class ModuleErrors(_Model):
    """One module of the ported model, alone. ``order`` counts modules as they finish in the forward pass."""

    path: str
    module: str
    ported: bool
    order: int
    backward_order: int
    exact: Literal["float64", "float32"] | None  # None: compared with the eager run alone
    tensors: list[TensorErrors]
    away: float
    ok: bool
    note: str = ""


class Divergence(_Model):
    """The first module in execution order that is beyond a limit: forward ones first, then as the backward runs."""

    path: str
    module: str
    direction: Literal["forward", "backward"]
    tensor: str
    measure: str
    away: float
    text: str


class ModeResult(_Model):
    """The ported model run another way, against itself run eagerly."""

    mode: Literal["torch.compile", "CUDA graph"]
    verdict: Literal["PASS", "FAIL", "NOT_RUN"]
    reason: str = ""
    how: str = ""
    bitwise: str = ""
    modules: list[ModuleErrors] = []
    logits: list[Measure] = []
    first_divergence: Divergence | None = None
    seconds: float = 0.0


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
    modules: list[ModuleErrors] = []
    first_divergence: Divergence | None = None
    exact: str = ""
    exact_logits: list[Measure] = []
    modes: list[ModeResult] = []
    modules_meaning: str = ""


def limited(name: str, value: float, floor: float, factor: float = AMPLITUDE, allowed: float = 0.0) -> Measure:
    limit = factor * floor + allowed
    return Measure(name=name, value=value, floor=floor, limit=limit, ok=value <= limit)  # NaN is not <=


def bias_allowed(eps: float) -> float:
    """The systematic error that any right implementation may have, for a storage dtype's eps."""
    return max(BIAS_ALLOWED * eps, 4 * 2.0**-23)


def away(measures: list[Measure]) -> float:
    """The worst value over its limit; infinite for NaN and for any error where none is allowed."""
    ratios = [0.0]
    for m in measures:
        if m.value <= m.limit:
            ratios.append(m.value / m.limit if m.limit > 0 else 0.0)
        else:
            ratios.append(m.value / m.limit if m.limit > 0 and m.value == m.value else float("inf"))
    return max(ratios)


def first_divergence(modules: list[ModuleErrors]) -> Divergence | None:
    """Forward divergences come first, in the order in which modules finish, so a child before what contains it.

    Without any, the backward's: modules in the reverse of the order in which the forward entered them.
    """
    for direction in ("forward", "backward"):
        ordered = sorted(modules, key=lambda m: m.order if direction == "forward" else m.backward_order)
        for module in ordered:
            for tensor in module.tensors:
                if tensor.direction == direction and not tensor.away <= 1:
                    return _divergence(module, tensor)
    return None


def _divergence(module: ModuleErrors, tensor: TensorErrors) -> Divergence:
    worst = max(tensor.measures, key=lambda m: away([m])) if tensor.measures else None
    if worst is None:
        what, measure = tensor.note, "structure"
    else:
        what = f"{worst.name} {worst.value:.3g}, limit {worst.limit:.3g}" + (f"; {tensor.note}" if tensor.note else "")
        measure = worst.name
    return Divergence(
        path=module.path,
        module=module.module,
        direction=tensor.direction,
        tensor=tensor.tensor,
        measure=measure,
        away=tensor.away,
        text=f"{module.path}: {tensor.direction} {tensor.tensor} is {tensor.away:.3g} limits away ({what}); "
        "first divergence",
    )
