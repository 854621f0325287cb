"""Every forward with every backward: gradients in their own dtype against float64 autograd of the definition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import ferryman
from ferryman.dispatch import registry, select
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench.rotation import spared
from ferryman.porting.inputs.cases import arguments, as_tuple, double
from ferryman.porting.judging import metrics

# Planted NaN and Inf are judged op by op (G0); through two ops their gradients have no bound.
# Where scores lie hundreds apart the forward's error of a softmax is that of their difference, which a backward's bound
# does not know of.
UNBOUNDED = ("nonfinite", "masked", "large", "slopes")


def differentiable() -> list[Primitive]:
    return [p for p in registry.primitives().values() if p.gradient.backward is not None]


def pairs(op: Primitive, device: torch.device) -> Iterator[tuple[Implementation, Implementation]]:
    """Every implementation of the forward with every one of the backward, as far as their backends run here."""
    vendor = select.profile_for(device).vendor

    def runs(name: str) -> list[Implementation]:
        lines = registry.implementations(name)
        backends = registry.backends()
        return [i for i in lines if vendor in backends[i.backend].vendors and not registry.probe(i.backend, vendor)]

    for forward in runs(op.name):
        for backward in runs(op.gradient.backward or ""):
            yield forward, backward


def cases(op: Primitive, tier: str = "small") -> list[Case]:
    return [
        c for c in registry.evidence(op).cases() if c.tier == tier and not any(word in c.name for word in UNBOUNDED)
    ]


def refused(op: Primitive, args: tuple[Any, ...], line: Implementation, device: torch.device) -> bool:
    profile = select.profile_for(device)
    return bool(select.refusals(line, select.View.of(op, args, profile), profile))


def _leaves(op: Primitive, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[str]]:
    """The arguments with those that have a gradient made leaves, in their own layout."""
    switches = registry.primitives()[str(op.gradient.backward)].names
    # an optional gradient that is asked for (attention's bias) is not every backward's, and G7 judges it
    asked = {n for n in op.names if f"need_{n}" in switches and op.types[n] == "Tensor?"}
    wanted = {n for shared in op.gradient.owners for n in shared} - asked
    leaves = []
    for name, value in zip(op.names, args, strict=True):
        leaves.append(value.detach().requires_grad_() if isinstance(value, Tensor) and name in wanted else value)
    return tuple(leaves), [
        n for n, v in zip(op.names, leaves, strict=True) if isinstance(v, Tensor) and v.requires_grad
    ]


def worst_ratio(
    op: Primitive,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    forward: Implementation,
    backward: Implementation,
    call: Callable[..., Any] | None = None,
) -> tuple[float, str]:
    """(largest error in units of its bound, where), after asserting that exactly this pair ran.

    ``call``: what is called in the op's place, as torch.compile's function; its outputs are judged, too. What it asks
    for, and what ran, are then the caller's.
    """
    values = arguments(case, op, dtype, 0, device).values
    args, names = _leaves(op, values)
    with contextlib.ExitStack() as asked:
        if call is None:
            seen = asked.enter_context(ferryman.trace())
            asked.enter_context(ferryman.use(**{op.name: forward.name, str(op.gradient.backward): backward.name}))
        outputs = as_tuple((call or op.namespace["_resolve"])(*spared(op, args)))
        kept = [i for i, n in enumerate(op.outputs) if n not in op.gradient.nondifferentiable]
        saved_outputs = [o.detach().clone() for o in outputs]  # the backward may write over them
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(outputs[i].shape, generator=generator).to(outputs[i]) for i in kept]
        leaves = [a for n, a in zip(op.names, args, strict=True) if n in names]
        got = torch.autograd.grad([outputs[i] for i in kept], leaves, cotangents)
    if call is None:
        assert seen.calls == {(op.name, forward.name): 1, (op.gradient.backward, backward.name): 1}, seen.calls

    exact_args, _ = _leaves(op, double(values))
    exact = as_tuple(op.body(*exact_args))
    exact_leaves = [a for n, a in zip(op.names, exact_args, strict=True) if n in names]
    # Attention without keys has a constant log-sum-exp, and k and v play no part.
    live = [(exact[i], c.double()) for i, c in zip(kept, cotangents, strict=True) if exact[i].requires_grad]
    oracle = torch.autograd.grad(
        [e for e, _ in live], exact_leaves, [c for _, c in live], allow_unused=True, materialize_grads=True
    )

    gradient = registry.primitives()[str(op.gradient.backward)]
    given = dict(zip(op.names, (a.detach() if isinstance(a, Tensor) else a for a in exact_args), strict=True))
    for name, output in zip(op.outputs, exact, strict=True):
        given.setdefault(name, output.detach())
        given[f"out_{name}"] = output.detach()
    by_output = {i: c.double() for i, c in zip(kept, cotangents, strict=True)}
    given |= {name: by_output[i] for name, i in op.gradient_names().items()}
    given |= {n: op.types[n.removeprefix("need_")] == "Tensor" for n in gradient.names if n.startswith("need_")}
    backward_args = tuple(given[n] for n in gradient.names)
    terms = gradient.limits.bound(backward_args, as_tuple(gradient.body(*backward_args)))
    moved = [torch.zeros((), dtype=torch.float64)] * len(gradient.outputs)
    if op.mutates:  # the forward has rounded what its backward begins with, which its own bound allows
        kept_outputs = {f"out_{n}": o.double() for n, o in zip(op.outputs, saved_outputs, strict=True)}
        exactly, actually = (
            as_tuple(gradient.body(*(g[n] for n in gradient.names))) for g in (given, given | kept_outputs)
        )
        moved = [(a - e).abs() for a, e in zip(actually, exactly, strict=True)]
    declared = metrics.Declared(backward.accumulation, frozenset(backward.roundings) | frozenset(forward.roundings))
    owner = {n: i for i, shared in enumerate(op.gradient.owners) for n in shared}
    largest, where = 0.0, ""
    by_name = [
        (name, mine, right, terms[owner[name]], moved[owner[name]])
        for name, mine, right in zip(names, got, oracle, strict=True)
    ]
    if call is not None:  # `ferryman check` judges an implementation's own
        own = op.limits.bound(tuple(a.detach() if isinstance(a, Tensor) else a for a in exact_args), exact)
        by_name += [
            (name, mine, right.detach(), part, torch.zeros((), dtype=torch.float64))
            for name, mine, right, part in zip(op.outputs, saved_outputs, exact, own, strict=True)
        ]
    for name, mine, right, part, beside in by_name:
        (bound,) = metrics.bounds([part], [right], [mine.dtype], declared, dtype, saved_exact=False, shown=False)
        ratio = ((mine.double() - right).abs() / (bound.total + beside)).flatten()
        rounded = right.to(mine.dtype)  # infinite where the dtype ends before the result does
        right_too = (mine.isnan() & right.isnan()) | (rounded.isinf() & (mine == rounded))
        ratio = ratio.masked_fill(right_too.flatten(), 0.0)
        top = float(ratio.max()) if ratio.numel() else 0.0
        if not top <= largest:
            largest, where = top, f"{name} of {case.name}"
    return largest, where
