"""G7, gradients end to end: vector-Jacobian products through the public autograd path, against float64 autograd.

What the backward is given is what the forward returned. Its own error is judged against the float64 backward of those
very tensors; what they move in the gradient is computed beside it, in float64, and allowed for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.dispatch import registry, state
from ferryman.dispatch.gradient import runner_under_autograd
from ferryman.dispatch.recipe import Recipe
from ferryman.errors import Unsupported
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import as_tuple, double
from ferryman.porting.inputs.fills import Draw, fill
from ferryman.porting.judging import gates, hygiene, metrics, route
from ferryman.porting.judging.metrics import Bound, Declared
from ferryman.porting.judging.prepared import Prepared
from ferryman.porting.judging.results import Gate

PASSES = ("random", "integer")
FLOAT64 = 2.0**-44  # what two float64 evaluations of one gradient may differ by, beyond the bound
EVERY = 4  # of the cases that are interpreted, whose backwards have cells of their own, one in four
LEFT_OUT = f"left out: interpreted, one case in {EVERY} is differentiated"


@dataclass(frozen=True)
class Exact:
    """One pass in float64. ``analytic`` are the results of the backward's definition, ``gradients`` autograd's.

    ``terms`` are those of its bound; None where they are of what each forward saves.
    """

    cotangents: dict[int, Tensor]
    gradients: dict[str, Tensor]
    given: dict[str, Any]
    analytic: tuple[Tensor, ...]
    terms: tuple[Mapping[str, Tensor], ...] | None


def applies(prepared: Prepared, interpreted: bool) -> str | None:
    """Why the gate does not apply; None if it does."""
    op = prepared.primitive
    if prepared.backward:
        return "a backward is not differentiated again"
    if op.gradient.backward is None:
        return "the op has no backward"
    if prepared.device.type == "cpu" and not prepared.small:
        return "left out: on a CPU, small cases only"
    for name in _wanted(op):
        value = prepared.exact.values[op.names.index(name)]
        if isinstance(value, Tensor) and not prepared.case.exact and not bool(value.isfinite().all()):
            return f"{name} is not finite: NaN and Inf are judged op by op, through two ops they have no bound"
        if isinstance(value, Tensor) and prepared.args.buffers[name].shared():
            return f"elements of {name} share memory, and so would their gradients"
    if interpreted:
        names = [case.name for case in registry.evidence(op).cases()]
        if prepared.case.name not in names or names.index(prepared.case.name) % EVERY:
            return LEFT_OUT
    return None


def judge(
    prepared: Prepared,
    implementation: Implementation,
    kernel: Callable[..., Any] | None,
    target: Target,
    outputs: tuple[Tensor, ...],
    *,
    tf32: bool,
    interpreted: bool,
) -> Gate:
    """``kernel`` replaces the forward's launcher under the same autograd function. What it raises is the reason.

    ``outputs``: the forward's, without autograd, which other gates have judged and found right.
    """
    why = applies(prepared, interpreted)
    if why is not None:
        return Gate(outcome="n/a", reason=why)
    passes = PASSES if prepared.small and not interpreted else PASSES[:1]
    if prepared.case.exact:
        passes = PASSES[1:]
    try:
        try:
            ran = _run(prepared, implementation, kernel, target, passes, _partner(prepared, implementation))
        except Unsupported:
            ran = _run(prepared, implementation, kernel, target, passes, None)
    except torch.OutOfMemoryError:
        return Gate(outcome="n/a", reason="out of memory")
    except Unsupported as error:
        return Gate(outcome="n/a", reason=f"refused under autograd: {str(error)[:300]}")
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises under autograd is its verdict
        return Gate(outcome="fail", reason=f"raised {type(error).__name__} under autograd: {str(error)[:300]}")
    return _judged(prepared, implementation, ran, outputs, tf32)


def _differentiable(value: Any) -> bool:
    """A mask may be of floats, which have a gradient, or of bools."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _wanted(op: Primitive) -> list[str]:
    return [n for shared in op.gradient.owners for n in shared]


def _partner(prepared: Prepared, implementation: Implementation) -> str | None:
    """The forward's own backend, if the backward has a line of it and it is here."""
    backend = implementation.backend
    there = registry.asked(str(prepared.primitive.gradient.backward), (backend,))
    absent = registry.probe(backend, route.vendor() or _vendor(prepared.device)) if there else True
    return None if absent else backend


def _vendor(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "amd" if torch.version.hip else "nvidia"


@dataclass
class _Ran:
    outputs: tuple[Tensor, ...]
    gradients: dict[str, dict[str, Tensor]]
    passes: Sequence[str]
    calls: dict[tuple[str, str], int]
    asked: dict[str, str]
    served: dict[str, str]  # pass -> the implementation that ran its backward, where it was one


def _run(
    prepared: Prepared,
    implementation: Implementation,
    kernel: Callable[..., Any] | None,
    target: Target,
    passes: Sequence[str],
    partner: str | None,
) -> _Ran:
    op = prepared.primitive
    asked: dict[str, str] = {} if kernel is not None else {op.name: implementation.name}
    if partner is not None:
        asked[str(op.gradient.backward)] = partner
    names = _wanted(op)
    args = tuple(
        v.detach().requires_grad_() if n in names and _differentiable(v) else v
        for n, v in zip(op.names, prepared.args.values, strict=True)
    )
    leaves = {n: v for n, v in zip(op.names, args, strict=True) if n in names and _differentiable(v)}
    gradients: dict[str, dict[str, Tensor]] = {}
    served: dict[str, str] = {}

    def forward() -> tuple[Tensor, ...]:
        given = _overwritable(op, args)
        with state.requested({n: (i,) for n, i in asked.items()}):
            if kernel is None:
                return as_tuple(op.namespace[op.name](*given))
            plan = Recipe.of(op).plan(kernel, target, state.effective())
            return as_tuple(runner_under_autograd(op)(*given, plan))

    with state.trace() as seen, torch.enable_grad():
        outputs = forward()
        shown = tuple(o.detach().clone() if op.mutates else o.detach() for o in outputs)
        for which in passes:
            if which != passes[0] and op.mutates:
                outputs = forward()
            exact = _exact(prepared, passes)[which]
            given = {i: c.to(outputs[i].device) for i, c in exact.cotangents.items()}
            before = Counter(seen.calls)
            grads = torch.autograd.grad(
                [outputs[i] for i in given], list(leaves.values()), list(given.values()), retain_graph=True
            )
            ran = [name for which_op, name in seen.calls - before if which_op == op.gradient.backward]
            if len(ran) == 1:
                served[which] = ran[0]
            gradients[which] = dict(zip(leaves, grads, strict=True))
    return _Ran(shown, gradients, passes, dict(seen.calls), asked, served)


def _overwritable(op: Primitive, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with copies of those that the op writes over: a leaf that requires grad must not be."""
    given = list(args)
    for place, _ in op.overwritten:
        value = given[place]
        given[place] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
            value
        )
    return tuple(given)


def _exact(prepared: Prepared, passes: Sequence[str]) -> Mapping[str, Exact]:
    """The same passes in float64 on one forward, worked out once for all implementations."""
    kept: dict[str, Exact] = prepared.kept.setdefault("vjp", {})
    if all(which in kept for which in passes):
        return kept
    op, names = prepared.primitive, _wanted(prepared.primitive)
    args = tuple(
        v.detach().requires_grad_() if n in names and _differentiable(v) else v
        for n, v in zip(op.names, double(prepared.exact.values), strict=True)
    )
    with torch.enable_grad():
        outputs = as_tuple(op.body(*args))
    for which in passes:
        kept[which] = _one_pass(prepared, which, args, outputs, last=which == passes[-1])
    return kept


def _one_pass(
    prepared: Prepared, which: str, args: tuple[Any, ...], outputs: tuple[Tensor, ...], *, last: bool
) -> Exact:
    op, backward = prepared.primitive, registry.primitive(str(prepared.primitive.gradient.backward))
    gradients, names = op.gradient_names(), _wanted(op)
    cotangents: dict[int, Tensor] = {}
    for name, index in gradients.items():
        optional = backward.types[name] == "Tensor?"
        if optional and which == "random":
            continue  # the fused backwards take no gradient of the log-sum-exp: both ways are tried
        like = prepared.declared[index]
        draw = Draw.of(
            prepared.seed,
            backward.name,
            prepared.case.name,
            f"{which}/{name}",
            tuple(like.shape),
            like.dtype,
            prepared.oracle[index].device,
        )
        content = fill(prepared.case.cotangent or "integer" if which == "integer" else "normal").make(draw)
        cotangents[index] = content.to(like.dtype)
    leaves = {n: v for n, v in zip(op.names, args, strict=True) if n in names and _differentiable(v)}
    live = [(outputs[i], c.double()) for i, c in cotangents.items() if outputs[i].requires_grad]
    grads = (
        torch.autograd.grad(
            [o for o, _ in live],
            list(leaves.values()),
            [c for _, c in live],
            retain_graph=not last,
            allow_unused=True,
            materialize_grads=True,
        )
        if live
        else [torch.zeros_like(v) for v in leaves.values()]
    )
    given: dict[str, Any] = {
        n: v.detach() if isinstance(v, Tensor) else v for n, v in zip(op.names, args, strict=True)
    } | _outputs(op, tuple(o.detach() for o in outputs))
    given |= {n: cotangents[i].double() if i in cotangents else None for n, i in gradients.items()}
    given |= {n: True for n in backward.names if n.startswith("need_")}
    analytic = _analytic(backward, given)
    saves = any(n in backward.names for n in _outputs(op, outputs))
    terms = None if saves else _terms(backward, given, analytic)
    return Exact(cotangents, dict(zip(leaves, grads, strict=True)), given, analytic, terms)


def _outputs(op: Primitive, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Outputs by the names under which a backward takes them."""
    return {f"out_{n}" if n in op.names else n: o for n, o in zip(op.outputs, outputs, strict=True)}


def _analytic(backward: Primitive, given: dict[str, Any]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return as_tuple(backward.body(*(given[n] for n in backward.names)))


def _terms(backward: Primitive, given: dict[str, Any], results: tuple[Tensor, ...]) -> tuple[Any, ...]:
    with torch.no_grad():
        return metrics.terms_of(backward, tuple(given[n] for n in backward.names), results)


def _judged(
    prepared: Prepared, implementation: Implementation, ran: _Ran, judged: tuple[Tensor, ...], tf32: bool
) -> Gate:
    op, backward = prepared.primitive, registry.primitive(str(prepared.primitive.gradient.backward))
    fault = _who_ran(op, backward, ran)
    if fault is not None:
        return Gate(outcome="fail", reason=fault)
    notes = f"backward: {', '.join(dict.fromkeys(ran.served.values()))}"
    owner = {name: i for i, shared in enumerate(op.gradient.owners) for name in shared}
    largest = 0.0
    if not all(map(hygiene.bitwise_equal, ran.outputs, judged)):  # what is wrong with them would be allowed for below
        forward = gates.declared_of(prepared, implementation, tf32)
        for name, got, oracle, bound in zip(
            op.outputs, ran.outputs, prepared.oracle, prepared.bounds(forward), strict=True
        ):
            again = gates.Judgement.of(name, got.to(oracle.device), oracle, bound)
            if again.wrong is not None:
                return Gate(outcome="fail", reason=f"the forward under autograd: {gates.element(again.wrong)}")
    for which in ran.passes:
        exact, note = _exact(prepared, ran.passes)[which], f"backward: {ran.served[which]}"
        declared = gates.declared_of(prepared, registry.implementation(backward.name, ran.served[which]), tf32)
        bounds = _allowed(prepared, backward, exact, ran.outputs, declared)
        for name, got in ran.gradients[which].items():
            i, like = owner[name], prepared.args.values[op.names.index(name)]
            if (got.shape, got.dtype, got.device) != (like.shape, like.dtype, like.device):
                text = f"{tuple(got.shape)} {got.dtype} {got.device}; required: as {name} itself"
                return Gate(outcome="fail", reason=f"grad of {name} is {text} ({note})")
            oracle = exact.gradients[name]
            # autograd gives NaN for rows that see nothing; the backward's definition knows that they are 0
            oracle = torch.where(oracle.isnan(), exact.analytic[i].reshape(oracle.shape), oracle)
            # differences of nearly equal numbers: autograd's and the definition's, both in float64
            apart = (oracle - exact.analytic[i].reshape(oracle.shape)).abs().nan_to_num(0.0, posinf=0.0)
            allowed = replace(bounds[i], total=bounds[i].total + apart.clamp(max=FLOAT64))
            judgement = gates.Judgement.of(f"grad of {name}", got.to(oracle.device), oracle, allowed)
            if judgement.wrong is not None:
                return Gate(
                    outcome="fail",
                    measure=_finite(judgement.worst),
                    reason=(f"{which} cotangents: {gates.element(judgement.wrong)} ({note})"),
                )
            if judgement.worst is not None:
                largest = max(largest, judgement.worst.ratio)
            output = backward.outputs[i]
            both = Declared(declared.accumulation, declared.roundings | frozenset(implementation.roundings))
            if gates.not_exact(prepared, both) is None and output not in prepared.case.inexact:
                bad = gates.differing(judgement.got, exact.analytic[i])
                if bool(bad.any()):
                    text = f"differs from the exact one in {int(bad.sum())} of {bad.numel()} elements"
                    return Gate(outcome="fail", reason=f"grad of {name} {text} ({note})")
    touched = prepared.args.untouched()
    if touched:
        return Gate(outcome="fail", reason=f"{'; '.join(touched)} ({notes})")
    return Gate(outcome="pass", measure=largest, reason=notes)


def _finite(worst: metrics.Worst | None) -> float | None:
    return None if worst is None else worst.ratio


def _who_ran(op: Primitive, backward: Primitive, ran: _Ran) -> str | None:
    """What ran, if it is not what was asked for."""
    wanted = ran.asked.get(op.name)
    forward = {name: count for (which, name), count in ran.calls.items() if which == op.name}
    if wanted is not None and forward != {wanted: len(ran.passes) if op.mutates else 1}:
        return f"{op.name} was asked of {wanted}, but {forward or 'nothing'} ran"
    asked = ran.asked.get(backward.name)
    used = {name: count for (which, name), count in ran.calls.items() if which == backward.name}
    wrong = [n for n in used if asked is not None and not registry.implementation(backward.name, n).answers(asked)]
    if wrong or set(ran.served) != set(ran.passes) or sum(used.values()) != len(ran.passes):
        return f"{backward.name} was asked of {asked or 'dispatch'}, {len(ran.passes)} times, but {used} ran"
    return None


def _allowed(
    prepared: Prepared, backward: Primitive, exact: Exact, outputs: tuple[Tensor, ...], declared: Declared
) -> tuple[Bound, ...]:
    """The backward's own bound on what it was given, and how far what it was given moves the gradient."""
    returned = double([o.to(exact.analytic[0].device) for o in outputs])
    saved = {n: o for n, o in _outputs(prepared.primitive, returned).items() if n in backward.names}
    analytic, terms = exact.analytic, exact.terms
    if terms is None:
        analytic = _analytic(backward, exact.given | saved)
        terms = _terms(backward, exact.given | saved, analytic)
    given = dict(zip(prepared.primitive.names, prepared.args.values, strict=True))
    dtypes = [
        next((given[n].dtype for n in shared if _differentiable(given[n])), prepared.dtype)
        for shared in prepared.primitive.gradient.owners
    ]
    bounds = metrics.bounds(
        terms, analytic, dtypes, declared, prepared.dtype, saved_exact=True, shown=False, statistics=False
    )
    if not saved:
        return bounds
    return tuple(
        Bound(b.total + (a - e).abs().nan_to_num(posinf=0.0), b.variance, b.ambiguous)
        for b, a, e in zip(bounds, analytic, exact.analytic, strict=True)
    )
