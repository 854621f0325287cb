"""Results of element-wise ops have their dimensions in memory in the order of an argument's, as PyTorch's have.

A kernel's results are contiguous. So a call whose first argument has its dimensions in another order (a transposed
tensor, `torch.channels_last`) is the call of views that have them in order, and its results are turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ferryman.ops.primitive import Primitive

Order = tuple[int, ...]


def order_of(op: Primitive, args: Sequence[Any]) -> Order | None:
    """The dimensions from the outermost in memory to the innermost; None where they are in order, or the op is not
    element-wise. Where a vector lies along the last one it stays."""
    if not op.elementwise:
        return None
    given = dict(zip(op.names, args, strict=True))
    x: Tensor = given[op.elementwise[0]]
    if x.is_contiguous():
        return None
    order = order_in_memory(x)
    last = order is not None and order[-1:] == (x.dim() - 1,)
    beside = any(given[name] is not None for name in op.tensors if name not in op.elementwise)
    return order if last or not beside else None


def order_in_memory(x: Tensor) -> Order | None:
    """A tensor's dimensions from the outermost in memory to the innermost; None where they are in order. Those of one
    element or without a stride stay."""
    sizes, strides = x.shape, x.stride()
    free = [d for d in range(x.dim()) if sizes[d] > 1 and strides[d] > 0]
    ranked: list[int] = []
    for d in free:  # by comparisons: Dynamo sorts nothing by symbols
        at = len(ranked)
        while at > 0 and strides[ranked[at - 1]] < strides[d]:
            at -= 1
        ranked.insert(at, d)
    order = list(range(x.dim()))
    for place, d in zip(free, ranked, strict=True):
        order[place] = d
    return tuple(order) if order != sorted(order) else None


def in_order(op: Primitive, args: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """The arguments, with views of those that have the results' shape."""
    return tuple(a.permute(order) if n in op.elementwise else a for n, a in zip(op.names, args, strict=True))


def back(order: Order) -> list[int]:
    """The permutation that undoes one."""
    return [order.index(d) for d in range(len(order))]


def turned(run: Callable[..., Tensor], op: Primitive, args: Sequence[Any], order: Order) -> Tensor:
    """What ``run`` gives of the views, turned back."""
    return run(*in_order(op, args, order)).permute(back(order))
