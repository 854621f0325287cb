"""Rules of views: functions that select, join or repeat values, and compute none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ferryman.porting.graph.nodes import value
from ferryman.porting.graph.rules import axis_of, rule
from ferryman.porting.graph.terms import Term

if TYPE_CHECKING:
    from ferryman.porting.graph.normal import Normal


@rule("getitem")
def _getitem(n: Normal, node: fx.Node, x: Any, index: Any) -> Term | None:
    if isinstance(index, int) and not isinstance(value(x), torch.Tensor):
        return n.part(x, index)
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(index, int) and not isinstance(index, bool):
        return n.pool.call("picked", (index,), n.of(x))
    if not all(i is None or i is Ellipsis or isinstance(i, slice) for i in items):
        return None
    tensor, term = value(x), n.of(x)
    named = sum(isinstance(i, slice) for i in items)
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    before = 0
    axes: list[int] = []
    for item in items:
        if item is Ellipsis:
            before += tensor.dim() - named
        elif item is None:
            axes.append(before + len(axes))
        else:
            bounds = (item.start, item.stop, item.step)
            if not all(b is None or (isinstance(b, int) and not isinstance(b, bool)) for b in bounds):
                return None
            axis = before - tensor.dim()
            term = n.cut(term, tensor.shape[axis], axis, item.start or 0, item.stop, item.step or 1)
            before += 1
    rank = tensor.dim()
    for axis in axes:
        rank += 1
        term = n.pool.call("unsqueeze", (axis - rank,), term)
    return term


@rule("narrow")
def _narrow(n: Normal, node: fx.Node, x: Any, dim: int, start: Any, length: Any) -> Term | None:
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    axis = axis_of(value(x), dim)
    return n.cut(n.of(x), value(x).shape[axis], axis, start, start + length, 1)


@rule("unsqueeze")
def _unsqueeze(n: Normal, node: fx.Node, x: Any, dim: int) -> Term:
    rank = value(x).dim() + 1
    return n.pool.call("unsqueeze", (dim - rank if dim >= 0 else dim,), n.of(x))


@rule("cat")
def _cat(n: Normal, node: fx.Node, tensors: Any, dim: Any = 0, axis: Any = None) -> Term:
    where = axis_of(value(tensors[0]), dim if axis is None else axis)
    return n.pool.call("cat", (where,), *(n.of(t) for t in tensors))


@rule("stack")
def _stack(n: Normal, node: fx.Node, tensors: Any, dim: int = 0) -> Term:
    rank = value(tensors[0]).dim() + 1
    return n.pool.call("stack", (dim - rank if dim >= 0 else dim,), *(n.of(t) for t in tensors))


@rule("flatten")
def _flatten(n: Normal, node: fx.Node, x: Any, start_dim: int = 0, end_dim: int = -1) -> Term:
    first, last = axis_of(value(x), start_dim), axis_of(value(x), end_dim)
    return n.pool.call("flatten", (first, last), n.of(x))


@rule("view", "reshape")
def _reshape(n: Normal, node: fx.Node, x: Any, *shape: Any) -> Term | None:
    before, after = value(x), value(node)
    if tuple(before.shape) == tuple(after.shape):
        return n.of(x)
    rank = after.dim()
    if before.dim() == rank + 1 and tuple(before.shape[:-2]) == tuple(after.shape[:-1]):
        return n.pool.call("flatten", (-2, -1), n.of(x))
    inner = n.of(x)
    if inner.kind == "expanded" and before.dim() == 5 and rank == 4:  # keys of a group, repeated
        times, source = inner.args
        if after.shape[1] == before.shape[1] * before.shape[2]:
            return n.pool.call("repeat", times, source[0])
    return None


@rule("expand")
def _expand(n: Normal, node: fx.Node, x: Any, *sizes: Any) -> Term | None:
    before, after, inner = value(x), value(node), n.of(x)
    if before.dim() != after.dim():
        return None
    moved = [i for i in range(after.dim()) if before.shape[i] != after.shape[i]]
    if not moved:
        return inner
    if inner.kind == "unsqueeze" and inner.args[0] == (-3,) and moved == [2] and isinstance(after.shape[2], int):
        return n.pool.call("expanded", (after.shape[2],), *inner.args[1])
    return None


@rule("repeat_interleave")
def _repeat(n: Normal, node: fx.Node, x: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Term | None:
    if not isinstance(repeats, int) or axis_of(value(x), dim) != -3:
        return None
    return n.pool.call("repeat", (repeats,), n.of(x))
