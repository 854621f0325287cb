"""How far results are off, in the error bounds that an op's definition derives. 1 is the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import double
from ferryman.porting.judging import metrics

# unit roundoff of a storage dtype -> its smallest number; a rounding near 0 is half of it off
_SMALLEST = {metrics.UNIT[dtype]: metrics.SUBNORMAL[dtype] for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_FLOAT32 = Implementation(op="any", name="any")


def ratio(got: Tensor, exact: Tensor, terms: Mapping[str, Tensor], unit: float, accumulate: float = 2.0**-24) -> float:
    """The largest error of one result in bounds: of ``terms``, with the units of the storage dtype and the sums."""
    smallest = _SMALLEST.get(unit, 0.0)
    room = accumulate * terms["accumulate"] + unit * (exact.abs() + terms.get("storage", 0.0))
    room = room + smallest * (0.5 + terms.get("storage_flush", 0.0)) + terms.get("absolute", 0.0)
    return float(((got.double() - exact).abs() / (room + 1e-300)).max())


def off(
    op: Primitive, args: Sequence[Any], got: Sequence[Tensor], storage: torch.dtype, line: Implementation = _FLOAT32
) -> float:
    """The largest error of a call's results in bounds, against the definition in float64, as a line declares itself."""
    exact, rooms = judged(op, args, [t.dtype for t in got], storage, line)
    errors = [(g.double() - e).abs() / room for g, e, room in zip(got, exact, rooms, strict=True)]
    return max(float(e.max()) for e in errors if e.numel())


def judged(
    op: Primitive,
    args: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    storage: torch.dtype,
    line: Implementation = _FLOAT32,
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """A call's results by the definition in float64, and how far off results of these dtypes may be."""
    wide = double(tuple(args))
    exact = op.body(*wide)
    exact = exact if isinstance(exact, tuple) else (exact,)
    declared = metrics.Declared(line.accumulation, frozenset(line.roundings))
    bounds = metrics.bounds(
        op.limits.bound(wide, exact), exact, list(dtypes), declared, storage, saved_exact=False, shown=False
    )
    return exact, [b.total for b in bounds]
