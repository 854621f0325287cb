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


class Exact:
    """What all pairs of a case are compared with: its arguments, drawn once, and their gradients in float64."""

    def __init__(self, op: Primitive, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.op, self.case, self.dtype = op, case, dtype
        self.values = arguments(case, op, dtype, 0, device).values
        self.versions = self._versions()
        self.kept = [i for i, n in enumerate(op.outputs) if n not in op.gradient.nondifferentiable]
        self.gradient = registry.primitives()[str(op.gradient.backward)]
        self.cotangents: list[Tensor] = []

    def _versions(self) -> list[int]:
        return [v._version for v in self.values if isinstance(v, Tensor)]

    def cotangents_of(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """For outputs of the dtypes and shapes that the op has: the first pair's."""
        if not self.cotangents:
            generator = torch.Generator().manual_seed(1)
            drawn = [torch.randn(outputs[i].shape, generator=generator).to(outputs[i]) for i in self.kept]
            self._compute(drawn)
            self.cotangents = drawn
        for i, mine in zip(self.kept, self.cotangents, strict=True):
            assert (outputs[i].shape, outputs[i].dtype) == (mine.shape, mine.dtype), self.op.outputs[i]
        assert self._versions() == self.versions, "a pair wrote over its arguments"
        return self.cotangents

    def _compute(self, cotangents: list[Tensor]) -> None:
        op, gradient = self.op, self.gradient
        exact_args, names = _leaves(op, double(self.values))
        exact = as_tuple(op.body(*exact_args))
        leaves = [a for n, a in zip(op.names, exact_args, strict=True) if n in names]
        # Attention without keys has a constant log-sum-exp, and k and v play no part.
        live = [(exact[i], c.double()) for i, c in zip(self.kept, cotangents, strict=True) if exact[i].requires_grad]
        self.oracle = torch.autograd.grad(
            [e for e, _ in live], leaves, [c for _, c in live], allow_unused=True, materialize_grads=True
        )
        self.args = tuple(a.detach() if isinstance(a, Tensor) else a for a in exact_args)
        self.outputs = tuple(o.detach() for o in exact)
        given = dict(zip(op.names, self.args, strict=True))
        for name, output in zip(op.outputs, self.outputs, strict=True):
            given.setdefault(name, output)
            given[f"out_{name}"] = output
        by_output = {i: c.double() for i, c in zip(self.kept, cotangents, strict=True)}
        given |= {name: by_output[i] for name, i in op.gradient_names().items()}
        given |= {n: op.types[n.removeprefix("need_")] == "Tensor" for n in gradient.names if n.startswith("need_")}
        self.given = given
        backward_args = tuple(given[n] for n in gradient.names)
        self.gradients = as_tuple(gradient.body(*backward_args))
        self.terms = gradient.limits.bound(backward_args, self.gradients)

    def moved_by(self, saved_outputs: list[Tensor]) -> list[Tensor]:
        """How far a backward is from the exact one because a mutating forward has rounded what it begins with, which
        the forward's own bound allows."""
        if not self.op.mutates:
            return [torch.zeros((), dtype=torch.float64)] * len(self.gradient.outputs)
        rounded = {f"out_{n}": o.double() for n, o in zip(self.op.outputs, saved_outputs, strict=True)}
        actually = as_tuple(self.gradient.body(*((self.given | rounded)[n] for n in self.gradient.names)))
        return [(a - e).abs() for a, e in zip(actually, self.gradients, strict=True)]


def worst_ratio(
    op: Primitive,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    forward: Implementation,
    backward: Implementation,
    call: Callable[..., Any] | None = None,
    exact: Exact | None = None,
) -> tuple[float, str]:
    """(largest error in units of its bound, where), after asserting that exactly this pair ran.

    ``call``: what is called in the op's place, as torch.compile's function; its outputs are judged, too. What it asks
    for, and what ran, are then the caller's. ``exact``: the case's, where several pairs are compared with it.
    """
    exact = exact or Exact(op, case, dtype, device)
    args, names = _leaves(op, exact.values)
    with contextlib.ExitStack() as asked:
        if call is None:
            seen = asked.enter_context(ferryman.trace())
            asked.enter_context(ferryman.use(**{op.name: forward.name, str(op.gradient.backward): backward.name}))
        outputs = as_tuple((call or op.namespace["_resolve"])(*spared(op, args)))
        saved_outputs = [o.detach().clone() for o in outputs]  # the backward may write over them
        cotangents = exact.cotangents_of(outputs)
        leaves = [a for n, a in zip(op.names, args, strict=True) if n in names]
        got = torch.autograd.grad([outputs[i] for i in exact.kept], leaves, [c.clone() for c in cotangents])
    if call is None:
        assert seen.calls == {(op.name, forward.name): 1, (op.gradient.backward, backward.name): 1}, seen.calls

    moved = exact.moved_by(saved_outputs)
    declared = metrics.Declared(backward.accumulation, frozenset(backward.roundings) | frozenset(forward.roundings))
    owner = {n: i for i, shared in enumerate(op.gradient.owners) for n in shared}
    largest, where = 0.0, ""
    by_name = [
        (name, mine, right, exact.terms[owner[name]], moved[owner[name]])
        for name, mine, right in zip(names, got, exact.oracle, strict=True)
    ]
    if call is not None:  # `ferryman check` judges an implementation's own
        own = op.limits.bound(exact.args, exact.outputs)
        by_name += [
            (name, mine, right, part, torch.zeros((), dtype=torch.float64))
            for name, mine, right, part in zip(op.outputs, saved_outputs, exact.outputs, own, strict=True)
        ]
    for name, mine, right, part, beside in by_name:
        (bound,) = metrics.bounds(
            [part], [right], [mine.dtype], declared, dtype, saved_exact=False, shown=False, statistics=False
        )
        ratio = ((mine.double() - right).abs() / (bound.total + beside)).flatten()
        rounded = right.to(mine.dtype)  # infinite where the dtype ends before the result does
        right_too = (mine.isnan() & right.isnan()) | (rounded.isinf() & (mine == rounded))
        ratio = ratio.masked_fill(right_too.flatten(), 0.0)
        top = float(ratio.max()) if ratio.numel() else 0.0
        if not top <= largest:
            largest, where = top, f"{name} of {case.name}"
    return largest, where
