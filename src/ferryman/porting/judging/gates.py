"""Gates G0 to G5: what the outputs of some runs show. docs/parity.md says what each requires and when it is n/a."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import hygiene, metrics, reading
from ferryman.porting.judging.metrics import Bound, Declared, Worst
from ferryman.porting.judging.prepared import Prepared
from ferryman.porting.judging.results import Gate, GateName, WorstElement, number

UNUSABLE = "the op's bound is not finite where the oracle is: it would accept anything"
DIFFERS = Gate(outcome="n/a", reason="the structure differs")
_FEW = "too few finite elements for a confidence interval (256)"


def declared_of(prepared: Prepared, implementation: Implementation, tf32: bool) -> Declared:
    reduced = tf32 and prepared.dtype == torch.float32
    plain = implementation.accumulation == "fp32"
    accumulation = implementation.tf32 if reduced and plain else implementation.accumulation
    return Declared(accumulation, frozenset(implementation.roundings), reduced)


@dataclass
class Judgement:
    """One output against the oracle: what G2 judges, what stands where NaN or Inf should not, the largest error."""

    name: str
    got: Tensor
    exact: Tensor
    bound: Bound
    judged: Tensor
    misplaced: Worst | None
    worst: Worst | None
    ratio: Tensor  # of every element: its error in units of its bound

    @classmethod
    def of(cls, name: str, got: Tensor, exact: Tensor, bound: Bound) -> Judgement:
        judged, misplaced = metrics.masks(name, got, exact, bound)
        ratio = metrics.ratios(got, exact, bound.total)
        worst = metrics.worst(name, got, exact, bound.total, judged, ratio)
        return cls(name, got, exact, bound, judged, misplaced, worst, ratio)

    @property
    def within(self) -> bool:
        return self.misplaced is None and (self.worst is None or self.worst.ratio <= 1)

    @property
    def wrong(self) -> Worst | None:
        """The element to show, if one is not within its bound."""
        return None if self.within else self.misplaced or self.worst

    def outside(self) -> Tensor:
        """Every element that G0 or G2 does not accept."""
        value, expected = self.got.double(), self.exact.to(self.got.dtype).double()
        same = (value == expected) | (value.isnan() & expected.isnan())
        near = self.judged & ((value - self.exact).abs() <= self.bound.total)
        return ~(same | near)


def judge(
    prepared: Prepared, implementation: Implementation, runs: hygiene.Runs, *, tf32: bool = False
) -> dict[str, Any]:
    """Gates, ratio, noise, worst element, reading and reason of some runs, as fields of a Cell."""
    gates: dict[GateName, Gate] = {"G5": _hygiene(implementation, runs)}
    fault = structure(prepared.primitive.outputs, runs.outputs, prepared.declared)
    if fault is not None:
        gates["G0"] = Gate(outcome="fail", reason=fault)
        gates["G1"] = gates["G2"] = gates["G3"] = gates["G4"] = DIFFERS
        return {"gates": dict(sorted(gates.items())), "reason": f"G0: {fault}", "reduction": prepared.reduction()}
    declared = declared_of(prepared, implementation, tf32)
    outputs = tuple(o.to(e.device) for o, e in zip(runs.outputs, prepared.oracle, strict=True))
    judgements = [
        Judgement.of(*one)
        for one in zip(prepared.primitive.outputs, outputs, prepared.oracle, prepared.bounds(declared), strict=True)
    ]
    wrong = next((j.misplaced for j in judgements if j.misplaced is not None), None)
    worst = max((j.worst for j in judgements if j.worst is not None), key=lambda w: w.ratio, default=None)
    usable = all(metrics.usable(j.bound.total, j.judged) for j in judgements)
    gates["G0"] = Gate(outcome="pass") if wrong is None else Gate(outcome="fail", reason=element(wrong))
    gates["G1"], inexact = exactness(prepared, declared, judgements)
    gates["G2"] = _componentwise(worst, usable)
    gates["G3"], gates["G4"], noise = _statistics(prepared, declared, judgements)
    shown = wrong or inexact or worst
    return {
        "gates": dict(sorted(gates.items())),
        "ratio": None if worst is None else worst.ratio,
        "noise": noise,
        "worst": None if shown is None else worst_element(shown),
        "reason": first_failure(gates),
        "reading": _reading(prepared, gates, judgements, inexact),
        "distribution": [
            sum(c)
            for c in zip(
                *(metrics.distribution(j.got, j.exact, j.bound.total, j.judged, j.ratio) for j in judgements),
                strict=True,
            )
        ],
        "reduction": prepared.reduction(),
    }


def first_failure(gates: dict[GateName, Gate]) -> str | None:
    return next((f"{n}: {g.reason}" for n, g in sorted(gates.items()) if g.outcome == "fail"), None)


def worst_element(w: Worst) -> WorstElement:
    return WorstElement(output=w.output, index=list(w.index), value=w.value, expected=w.expected, bound=w.bound)


def structure(names: tuple[str, ...], outputs: tuple[Any, ...], declared: tuple[Tensor, ...]) -> str | None:
    """What the outputs are that they should not be (G0)."""
    if len(outputs) != len(declared):
        return f"{len(outputs)} outputs; required: {len(declared)}"
    for name, got, want in zip(names, outputs, declared, strict=True):
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


def not_exact(prepared: Prepared, declared: Declared) -> str | None:
    """Why G1 does not apply to this case under these declarations."""
    case, storage = prepared.case, dtype_name(prepared.dtype)
    if not case.exact:
        return "no exact probe: partial results of this case are rounded"
    if storage in case.inexact:
        return f"{storage} shows the approximation of a function on the way"
    rounded = {declared.accumulation, *declared.roundings} & set(case.inexact)
    if rounded and prepared.dtype != torch.float32:
        return f"partial results are rounded to {storage}, as declared ({', '.join(sorted(rounded))})"
    return None


def differing(got: Tensor, exact: Tensor) -> Tensor:
    """Elements that are not the oracle's, rounded. Zeros of either sign are equal: a sum's sign is its order's."""
    expected = exact.to(got.dtype)
    return ~((got == expected) | (got.isnan() & expected.isnan()))


def exactness(prepared: Prepared, declared: Declared, judgements: list[Judgement]) -> tuple[Gate, Worst | None]:
    """G1, and the first element that is not bit for bit what it must be."""
    why = not_exact(prepared, declared)
    if why is not None:
        return Gate(outcome="n/a", reason=why), None
    judged = [j for j in judgements if j.name not in prepared.case.inexact and j.got.numel()]
    if not judged:
        return Gate(outcome="n/a", reason="no output is exact in this case"), None
    for j in judged:
        bad = differing(j.got, j.exact)
        if bool(bad.any()):
            first = metrics.worst(j.name, j.got, j.exact.to(j.got.dtype).double(), torch.ones_like(j.exact), bad)
            assert first is not None
            text = ", ".join(map(str, first.index))
            reason = (
                f"{j.name}[{text}] is {first.value:.9g}, must be {first.expected:.9g} bit for bit; "
                f"{int(bad.sum())} of {bad.numel()} elements differ"
            )
            return Gate(outcome="fail", reason=reason), first
    return Gate(outcome="pass"), None


def _hygiene(implementation: Implementation, runs: hygiene.Runs) -> Gate:
    faults = list(runs.faults)
    if implementation.deterministic and runs.differing:
        faults.append(f"not deterministic, or not all written: {runs.differing}")
    if faults:
        return Gate(outcome="fail", reason="; ".join(faults))
    if not implementation.deterministic:
        return Gate(outcome="pass", reason="runs not compared: declared not deterministic")
    return Gate(outcome="pass")


def _componentwise(worst: Worst | None, usable: bool) -> Gate:
    if not usable:
        return Gate(outcome="fail", reason=UNUSABLE)
    if worst is None:
        return Gate(outcome="n/a", reason="no finite element to compare")
    if worst.ratio > 1:
        return Gate(outcome="fail", measure=worst.ratio, reason=element(worst))
    return Gate(outcome="pass", measure=worst.ratio)


def _statistics(prepared: Prepared, declared: Declared, judgements: list[Judgement]) -> tuple[Gate, Gate, float | None]:
    """G3 and G4, which compare with the low-precision reference, and G3's largest ratio."""
    if not prepared.independent:
        why = (
            "exact: there are no errors to compare"
            if prepared.case.exact
            else ("equal inputs round alike: their errors are not independent")
        )
        return Gate(outcome="n/a", reason=why), Gate(outcome="n/a", reason=why), None
    noises: list[metrics.Noise] = []
    biases: list[tuple[str, metrics.Bias]] = []
    summed = prepared.reduction() != 1
    references = prepared.reference(declared.roundings)
    for i, (j, low, terms) in enumerate(zip(judgements, references, prepared.terms, strict=True)):
        heard = metrics.noise(j.got, low, j.exact, j.bound, j.judged)
        if heard is not None:
            noises.append(heard)
        if _unshown(prepared, declared, terms):
            continue
        shared = summed and not declared.roundings.isdisjoint(terms)
        # equal inputs round alike, and 16 bits hold few: an undone rounding leans as far as a done one (1 million
        # bfloat16 products: 0.015 bounds), so that it is right by either reference
        # the reference may lean where a better kernel does not (a mean of 1e3 in bfloat16): or by the oracle
        lows = [low, j.exact]
        if not summed and declared.roundings:
            lows.append(prepared.reference(frozenset())[i])
        leanings = [metrics.bias(j.got, r, j.exact, j.bound, j.judged, shared=shared) for r in lows]
        best = min((b for b in leanings if b is not None), key=lambda b: b.z, default=None)
        if best is not None:
            biases.append((j.name, best))
    return _noise(noises), _bias(biases), max((n.ratio for n in noises), default=None)


def _unshown(prepared: Prepared, declared: Declared, terms: Mapping[str, Tensor]) -> bool:
    """Whether partial sums are rounded, by declaration, which the reference does not do: 16 bits hold few values, and
    their roundings lean (sums of 512 uniform products in four parts, 131,072 of them: 3.4 standard errors)."""
    rounds = declared.accumulation == "split-k" and prepared.dtype != torch.float32
    return rounds and "split-k" in terms and bool((terms["split-k"] != 0).any())


def _noise(noises: list[metrics.Noise]) -> Gate:
    if not noises:
        return Gate(outcome="n/a", reason=_FEW)
    loudest = max(noises, key=lambda n: n.ratio)
    if any(n.low > 0 for n in noises):
        text = f"RMS error is {number(loudest.ratio)} times what is allowed over {loudest.elements} elements"
        return Gate(outcome="fail", measure=loudest.ratio, reason=text)
    return Gate(outcome="pass", measure=loudest.ratio)


def _bias(biases: list[tuple[str, metrics.Bias]]) -> Gate:
    if not biases:
        return Gate(
            outcome="n/a",
            reason=(
                f"{_FEW}, or rows that share declared roundings (32), "
                "or a reference that rounds partial sums as declared"
            ),
        )
    name, most = max(biases, key=lambda b: b[1].z)
    measure = most.z / metrics.Z_LIMIT
    if measure < 1:
        return Gate(outcome="pass", measure=measure)
    way = {True: "toward zero", False: "away from zero", None: "up" if most.excess > 0 else "down"}[most.toward_zero]
    return Gate(
        outcome="fail",
        measure=measure,
        reason=(
            f"the errors of {name} lean {way} by {number(abs(most.excess))} bounds on average, {number(most.z)} "
            f"standard errors more than allowed, over {most.elements} elements"
        ),
    )


def _reading(
    prepared: Prepared, gates: dict[GateName, Gate], judgements: list[Judgement], inexact: Worst | None
) -> str | None:
    if all(gates[n].outcome != "fail" for n in ("G0", "G1", "G2", "G3", "G4")):
        return None
    for j, terms in zip(judgements, prepared.terms, strict=True):
        outside = j.outside()
        if inexact is not None and inexact.output == j.name:
            outside = outside | differing(j.got, j.exact)
        statistics = gates["G3"].outcome == "fail" or gates["G4"].outcome == "fail"
        if not bool(outside.any()) and not statistics:
            continue
        sigma = terms.get("accumulate")
        evidence = reading.Evidence(
            j.got,
            j.exact,
            j.bound.total,
            outside,
            metrics.UNIT[j.got.dtype],
            None if sigma is None else sigma / metrics.SIGMAS,
        )
        text = reading.read(evidence)
        if text is not None:
            return text if len(judgements) == 1 else f"{j.name}: {text}"
    return None


def element(worst: Worst) -> str:
    index = ", ".join(map(str, worst.index))
    text = f"{worst.output}[{index}] is {worst.value:.9g}, expected {worst.expected:.9g}"
    if worst.ratio == float("inf"):
        return text
    return f"{text} within {worst.bound:.3g}: {number(worst.ratio)} bounds away"
