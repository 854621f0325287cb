"""The parity check of one cell: an implementation against the float64 evaluation of its op's definition.

Gates: G0 structure and NaN/Inf masks, G2 every element within its derived bound, G3 no noisier than the low-precision
reference, G5 hygiene. docs/parity.md says what each requires and when it does not apply.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.errors import CompileError
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting import hygiene, metrics
from ferryman.porting.cases import Arguments, arguments, as_tuple, double, forward_of
from ferryman.porting.fills import dtype_name, fill
from ferryman.porting.results import Cell, Gate, GateName, Verdict, WorstElement, number

SEED = 0
_ON_HOST = 2**20  # elements of a case's tensors


@dataclass
class Prepared:
    """A case made ready once for all implementations: arguments, oracle, error terms, low-precision reference.

    ``args`` lie on the device under test; ``exact`` are the same bits where the oracle is evaluated and results are
    judged: on the host for small cases, whose many small steps cost an accelerator 45 ms a cell and a CPU 2.
    """

    primitive: Primitive
    case: Case
    dtype: torch.dtype
    device: torch.device
    args: Arguments
    exact: Arguments
    oracle: tuple[Tensor, ...]
    terms: tuple[Any, ...]
    declared: tuple[Tensor, ...]
    backward: bool
    independent: bool
    _references: dict[frozenset[str], tuple[Tensor, ...]] = field(default_factory=dict)

    def reference(self, roundings: frozenset[str]) -> tuple[Tensor, ...]:
        """The definition in the storage dtype, with the declared roundings where the op can apply them."""
        if self.primitive.rounded is None:
            roundings = frozenset()
        if roundings not in self._references:
            rounded = self.primitive.rounded
            body = self.primitive.body if rounded is None else rounded(roundings)
            with torch.no_grad():
                self._references[roundings] = as_tuple(body(*self.exact.values))
        return self._references[roundings]


def prepare(primitive: Primitive, case: Case, dtype: torch.dtype, device: torch.device, seed: int = SEED) -> Prepared:
    """Materialise a case and evaluate the oracle on it, in float64."""
    specs = [a for a in case.args.values() if isinstance(a, TensorSpec)]
    small = sum(math.prod(s.shape) for s in specs) <= _ON_HOST
    exact = arguments(case, primitive, dtype, seed, torch.device("cpu") if small else device)
    args = exact.to(device) if small and device.type != "cpu" else exact
    with torch.no_grad():
        wide = double(exact.values)
        oracle = as_tuple(primitive.body(*wide))
        terms = tuple(primitive.bound(wide, oracle))
        declared = as_tuple(primitive.meta(*args.values))
    backward = forward_of(primitive) is not None
    return Prepared(
        primitive, case, dtype, device, args, exact, oracle, terms, declared, backward,
        independent=all(fill(s.fill or "normal").independent for s in specs),
    )  # fmt: skip


def check_cell(
    primitive: Primitive,
    implementation: Implementation,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    profile: Profile | None = None,
    *,
    seed: int = SEED,
    prepared: Prepared | None = None,
    kernel: Callable[..., Any] | None = None,
    times: int = 3,
    simulate: Profile | None = None,
) -> Cell:
    """Run one implementation on one case and judge it.

    It runs ``times`` times. ``kernel`` replaces the implementation's own launcher, under its declarations (mutants,
    users' kernels). A kernel that raises fails; one that its toolchain cannot compile is QUARANTINED; out of memory is
    NOT_RUN. ``simulate``: the device whose tiles an interpreted kernel is given.
    """
    device = torch.device(device)
    profile = profile or detect(device)
    cell = functools.partial(
        Cell, op=primitive.name, implementation=implementation.name, device=str(device), dtype=dtype_name(dtype),
        case=case.name, accumulation=implementation.accumulation, roundings=sorted(implementation.roundings),
    )  # fmt: skip
    try:
        prepared = prepared or prepare(primitive, case, dtype, device, seed)
    except torch.OutOfMemoryError as error:
        return cell(verdict="NOT_RUN", reason=f"the oracle ran out of memory: {_line(error)}")
    view = View.of(primitive, prepared.args.values, profile)
    if kernel is None:
        refused = refusals(implementation, view, profile)
        if refused:
            return cell(verdict=_refusal(implementation, view, profile), refusals=refused, reason="; ".join(refused))
    try:
        launcher = kernel or registry.launcher(implementation)
        runs = hygiene.run(primitive, launcher, prepared.args, target_of(simulate or profile), device, times)
    except CompileError as error:
        return cell(verdict="QUARANTINED", reason=_line(error))
    except torch.OutOfMemoryError as error:
        return cell(verdict="NOT_RUN", reason=f"out of memory: {_line(error)}")
    except ImportError as error:
        return cell(verdict="NOT_RUN", reason=f"the kernels cannot be loaded: {_line(error)}")
    except Exception as error:  # noqa: BLE001 - a kernel under test may raise anything, and that is its verdict
        return cell(verdict="FAIL", reason=f"raised {type(error).__name__}: {_line(error)}")
    judged = judge(prepared, implementation, runs, tf32=bool(view.flags["tf32"]) and device.type == "cuda")
    simulated = bool(view.flags["interpreted"]) and implementation.backend == "triton"
    if simulated and simulate is not None and judged["reason"] is None:
        judged["reason"] = f"interpreted, with the tiles of {simulate.name}"
    return cell(**judged, verdict=_verdict(judged, simulated), seconds=None if simulated else runs.seconds)


def _refusal(implementation: Implementation, view: View, profile: Profile) -> Verdict:
    """A clause that only the interpreter fails, or a backend that is not here, leaves the implementation unjudged."""
    backend = registry.backends()[implementation.backend]
    if profile.vendor not in backend.vendors or registry.probe(implementation.backend, profile.vendor):
        return "NOT_RUN"
    if view.flags["interpreted"]:
        on_device = View(view.args, view.features, view.shared_memory, {**view.flags, "interpreted": False})
        if not refusals(implementation, on_device, profile):
            return "NOT_RUN"
    return "UNIMPLEMENTED"


def _verdict(judged: dict[str, Any], simulated: bool) -> Verdict:
    gates: dict[GateName, Gate] = judged["gates"]
    if any(g.outcome == "fail" for g in gates.values()):
        return "MISTRUSTED" if gates["G2"].reason == _UNUSABLE else "FAIL"
    return "SIMULATED" if simulated else "PASS"


_UNUSABLE = "the op's bound is not finite where the oracle is: it would accept anything"


def judge(
    prepared: Prepared, implementation: Implementation, runs: hygiene.Runs, *, tf32: bool = False
) -> dict[str, Any]:
    """Gates, ratio, noise, worst element and reason of some runs, as fields of a Cell."""
    gates: dict[GateName, Gate] = {"G5": _hygiene(implementation, runs)}
    fault = _structure(prepared, runs.outputs)
    if fault is not None:
        gates["G0"] = Gate(outcome="fail", reason=fault)
        gates["G2"] = gates["G3"] = Gate(outcome="n/a", reason="the structure differs")
        return {"gates": dict(sorted(gates.items())), "reason": f"G0: {fault}"}
    declared = metrics.Declared(
        implementation.accumulation, frozenset(implementation.roundings), tf32 and prepared.dtype == torch.float32
    )
    outputs = tuple(o.to(e.device) for o, e in zip(runs.outputs, prepared.oracle, strict=True))
    bounds = metrics.bounds(
        prepared.terms, prepared.oracle, [o.dtype for o in outputs], declared, prepared.dtype,
        saved_exact=prepared.backward, shown=prepared.primitive.rounded is not None,
    )  # fmt: skip
    wrong: metrics.Worst | None = None
    worst: metrics.Worst | None = None
    usable = True
    noises: list[metrics.Noise] = []
    reference = prepared.reference(declared.roundings)
    for name, got, exact, bound, low in zip(
        prepared.primitive.outputs, outputs, prepared.oracle, bounds, reference, strict=True
    ):
        judged, misplaced = metrics.masks(name, got, exact, bound)
        wrong = wrong or misplaced
        usable = usable and metrics.usable(bound.total, judged)
        found = metrics.worst(name, got, exact, bound.total, judged)
        if found is not None and (worst is None or found.ratio > worst.ratio):
            worst = found
        heard = metrics.noise(got, low, exact, bound, judged) if prepared.independent else None
        if heard is not None:
            noises.append(heard)
    gates["G0"] = Gate(outcome="pass") if wrong is None else Gate(outcome="fail", reason=_element(wrong))
    gates["G2"] = _componentwise(worst, usable)
    gates["G3"] = (
        _noise(noises)
        if prepared.independent
        else Gate(outcome="n/a", reason="equal inputs round alike: their errors are not independent")
    )
    shown = wrong or worst
    reason = next((f"{n}: {g.reason}" for n, g in sorted(gates.items()) if g.outcome == "fail"), None)
    return {
        "gates": dict(sorted(gates.items())),
        "ratio": None if worst is None else worst.ratio,
        "noise": max((n.ratio for n in noises), default=None),
        "worst": None if shown is None else WorstElement(
            output=shown.output, index=list(shown.index), value=shown.value, expected=shown.expected, bound=shown.bound
        ),
        "reason": reason,
    }  # fmt: skip


def _structure(prepared: Prepared, outputs: tuple[Any, ...]) -> str | None:
    if len(outputs) != len(prepared.declared):
        return f"{len(outputs)} outputs; required: {len(prepared.declared)}"
    for name, got, want in zip(prepared.primitive.outputs, outputs, prepared.declared, strict=True):
        if not isinstance(got, Tensor):
            return f"{name} is a {type(got).__name__}; required: a tensor"
        for what in ("shape", "dtype", "device"):
            actual, required = getattr(got, what), getattr(want, what)
            if actual != required:
                return f"{name}.{what} is {actual}; required: {required}"
        # a stride says nothing where the dimension has one element, or the tensor none
        pairs = zip(got.shape, got.stride(), want.stride(), strict=True)
        if got.numel() and any(n > 1 and a != b for n, a, b in pairs):
            return f"{name}.stride() is {got.stride()}; required: {want.stride()}"
    return None


def _hygiene(implementation: Implementation, runs: hygiene.Runs) -> Gate:
    faults = list(runs.faults)
    if implementation.deterministic and runs.differing:
        faults.append(f"not deterministic, or not all written: {runs.differing}")
    if faults:
        return Gate(outcome="fail", reason="; ".join(faults))
    if not implementation.deterministic:
        return Gate(outcome="pass", reason="runs not compared: declared not deterministic")
    return Gate(outcome="pass")


def _componentwise(worst: metrics.Worst | None, usable: bool) -> Gate:
    if not usable:
        return Gate(outcome="fail", reason=_UNUSABLE)
    if worst is None:
        return Gate(outcome="n/a", reason="no finite element to compare")
    if worst.ratio > 1:
        return Gate(outcome="fail", measure=worst.ratio, reason=_element(worst))
    return Gate(outcome="pass", measure=worst.ratio)


def _noise(noises: list[metrics.Noise]) -> Gate:
    if not noises:
        return Gate(outcome="n/a", reason="too few finite elements for a confidence interval (256)")
    loudest = max(noises, key=lambda n: n.ratio)
    if any(n.low > 0 for n in noises):
        text = f"RMS error is {number(loudest.ratio)} times what is allowed over {loudest.elements} elements"
        return Gate(outcome="fail", measure=loudest.ratio, reason=text)
    return Gate(outcome="pass", measure=loudest.ratio)


def _element(worst: metrics.Worst) -> str:
    index = ", ".join(map(str, worst.index))
    text = f"{worst.output}[{index}] is {worst.value:.9g}, expected {worst.expected:.9g}"
    if worst.ratio == float("inf"):
        return text
    return f"{text} within {worst.bound:.3g}: {number(worst.ratio)} bounds away"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:500] if text else "no message"
