"""The definition in float32, right or bent, as a kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.mutate import rewrites
from ferryman.porting.mutate.rule import Kernel, mapped, results_of, tensors_of


def finish(op: Primitive, outputs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
    """Values rounded once to the dtypes, and laid out in the strides, that an op declares for these arguments."""
    places = list(results_of(op.meta(*args)))
    for argument, output in op.overwritten:
        places[output] = args[argument]
    for place, value in zip(places, outputs, strict=True):
        place.copy_(value)
    return places[0] if len(places) == 1 else tuple(places)


def in_float32(
    op: Primitive,
    change: Callable[[Tensor, Tensor], Tensor] | None = None,
    mode: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Kernel:
    """The definition in float32. ``change(value, place)``: of what is rounded. ``mode(args)``: a context to run it
    in."""

    def kernel(*args: Any) -> Any:
        wide = [mapped(lambda a: a.float() if a.is_floating_point() else a, value) for value in args[:-1]]
        with mode(args) if mode else contextlib.nullcontext():
            outputs = results_of(op.body(*wide))
        if change is not None:
            outputs = tuple(change(y, place) for y, place in zip(outputs, results_of(op.meta(*args[:-1])), strict=True))
        return finish(op, outputs, args[:-1])

    return kernel


def _truncated(y: Tensor, place: Tensor) -> Tensor:
    """Rounded toward zero, as dropping low bits does."""
    if place.dtype == torch.bfloat16:
        return (y.float().contiguous().view(torch.int32) & -65536).view(torch.float32)
    if place.dtype != torch.float16:
        return y
    rounded = y.to(torch.float16)
    away = (rounded.float().abs() > y.abs()) & y.isfinite()
    return (rounded.contiguous().view(torch.int16) - away.short()).view(torch.float16)


def _replacing(one: rewrites.Rewrite) -> Callable[[tuple[Any, ...]], Any]:
    return lambda _: rewrites.Rewritten(one.replaces)


def definition_rules(op: Primitive, used: set[str]) -> Iterator[tuple[str, str, str, Kernel]]:
    """(name, operator, note, kernel) of every wrong way to compute the definition in float32."""
    yield "truncated", "rounding direction", "results are truncated, not rounded", in_float32(op, _truncated)
    for one in rewrites.WRONG:
        if one.applies(used):
            yield (
                one.name,
                one.operator,
                one.note,
                in_float32(op, None, _replacing(one)),
            )

    def storage(args: tuple[Any, ...]) -> Any:
        dtypes = [a.dtype for a in tensors_of(args) if a.is_floating_point() and a.itemsize > 1]  # 8 bits only store
        # a loss's gradient comes first, in float32
        dtype = min(dtypes, key=lambda d: d.itemsize, default=torch.bfloat16)
        return rewrites.Rewritten(rewrites.storage_arithmetic(dtype))

    note = "another implementation runs in silence: arithmetic in the storage dtype"
    yield "in_storage_precision", "fallback", note, in_float32(op, None, storage)
