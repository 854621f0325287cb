"""How far results are off, in the error bounds that an op's definition derives. 1 is the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import as_tuple, double, forward_of
from ferryman.porting.inputs.fills import SUBNORMAL
from ferryman.porting.judging import gates, metrics
from ferryman.porting.judging.metrics import UNIT

U32, U64 = UNIT[torch.float32], UNIT[torch.float64]
# unit roundoff of a storage dtype -> its smallest number; a rounding near 0 is half of it off
_SMALLEST = {UNIT[dtype]: SUBNORMAL[dtype] for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_FLOAT32 = Implementation(op="any", name="any")
_IN_TURN, _LEAST_SHARE = 64, 1 / 12


def ratio(got: Tensor, exact: Tensor, terms: Mapping[str, Tensor], unit: float, accumulate: float = U32) -> float:
    """The largest error of one result in bounds: of ``terms``, with the units of the storage dtype and the sums."""
    smallest = _SMALLEST.get(unit, 0.0)
    room = accumulate * terms["accumulate"] + unit * (exact.abs() + terms.get("storage", 0.0))
    room = room + smallest * (0.5 + terms.get("storage_flush", 0.0)) + terms.get("absolute", 0.0)
    return float(((got.double() - exact).abs() / (room + 1e-300)).max())


def beyond(got: Tensor, exact: Tensor, terms: Mapping[str, Tensor], unit: float = U64) -> float:
    """The largest error in bounds, where sums and results have one unit roundoff."""
    return float(((got - exact).abs() / (unit * (terms["accumulate"] + exact.abs()) + 2.0**-1000)).max())


def off(
    op: Primitive, args: Sequence[Any], got: Sequence[Tensor], storage: torch.dtype, line: Implementation = _FLOAT32
) -> float:
    """The largest error of a call's results in bounds, against the definition in float64, as a line declares itself."""
    exact, rooms = judged(op, args, [t.dtype for t in got], storage, line)
    assert [g.shape for g in got] == [e.shape for e in exact]
    errors = [(g.double() - e).abs() / room for g, e, room in zip(got, exact, rooms, strict=True)]
    return float(torch.stack([e.max().double() for e in errors if e.numel()]).max())  # NaN if any is


def judged(
    op: Primitive,
    args: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    storage: torch.dtype,
    line: Implementation = _FLOAT32,
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """A call's results by the definition in float64, and how far off results of these dtypes may be."""
    exact, bounds = _bounds(op, args, dtypes, storage, line, 1.0)
    return exact, [b.total for b in bounds]


def _bounds(
    op: Primitive,
    args: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    storage: torch.dtype,
    line: Implementation,
    share: float,
) -> tuple[tuple[Tensor, ...], tuple[metrics.Bound, ...]]:
    wide = double(tuple(args))
    exact = as_tuple(op.body(*wide))
    terms = [
        {name: term * share if name == "accumulate" else term for name, term in given.items()}
        for given in metrics.terms_of(op, wide, exact)
    ]
    declared = metrics.Declared(line.accumulation, frozenset(line.roundings))
    saved = forward_of(op) is not None
    return exact, metrics.bounds(terms, exact, list(dtypes), declared, storage, saved_exact=saved, shown=False)


def _without_the_sum(op: str) -> Primitive | None:
    """What an ``add_..`` op makes of its sum: the op without the second addend, and without the result of its name."""
    whole, plain = registry.primitive(op), registry.primitives().get(op.removeprefix("add_"))
    if plain in (None, whole) or (whole.names[:1], whole.names[2:]) != (plain.names[:1], plain.names[1:]):
        return None
    return plain if whole.outputs == (*plain.outputs, whole.names[1]) else None


def must_be_right(op: str, args: Sequence[Any], got: Sequence[Tensor], *, exact: bool = False) -> None:
    """Asserts what the parity check's G0 to G3 ask of a C++ kernel's results, here of arguments that are no case.

    A bound is derived for terms that are added in turn. Threads add few in turn and then in a tree: their sums may use
    a share of it. An ``add_...`` op returns the sum that it goes on with: that must be the exact one, rounded, and the
    rest is judged as what the op without it makes of that sum. ``exact``: the results must be the definition's, bit for
    bit.
    """
    args = tuple(args)
    plain = _without_the_sum(op)
    primitive = plain or registry.primitive(op)
    if plain is not None:
        total = got[1]
        assert torch.equal(total, (args[0].double() + args[1].double()).to(total.dtype)), "the sum is not exact"
        args, got = (total, *args[2:]), got[:1]
    terms = max(primitive.limits.reduction(*args), 1) if primitive.limits.reduction else 1
    share = min(max(math.sqrt(_IN_TURN / terms), _LEAST_SHARE), 1.0)
    storage = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
    wanted, bounds = _bounds(primitive, args, [t.dtype for t in got], storage, _FLOAT32, share)
    low = as_tuple(primitive.body(*args))
    fault = gates.structure(primitive.outputs, tuple(got), as_tuple(primitive.meta(*args)))
    assert fault is None, fault
    for name, one, right, bound, rounded in zip(primitive.outputs, got, wanted, bounds, low, strict=True):
        judgement = gates.Judgement.of(name, one, right, bound)
        assert metrics.usable(bound.total, judgement.judged), gates.UNUSABLE
        wrong = judgement.wrong
        assert wrong is None, f"{gates.element(wrong)}; {int(judgement.outside().sum())} of {one.numel()} are wrong"
        assert not exact or not bool(gates.differing(one, right).any()), f"{name} must be exact"
        noise = metrics.noise(one, rounded, right, bound, judgement.judged)
        assert noise is None or noise.low <= 0, f"the errors of {name} are {noise.ratio} times what G3 allows"
