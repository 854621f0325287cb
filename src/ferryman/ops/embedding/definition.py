"""Rows of a table by index: meaning and error terms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide

_INTEGERS = (torch.int64, torch.int32)


def _check(op: str, ids: Tensor, weight: Tensor, scale: float | None, grad: Tensor | None = None) -> None:
    checks.one_device(op, weight=weight, ids=ids, grad=grad)
    checks.floating(op, weight=weight, grad=grad)
    checks.same_dtype(op, weight=weight, grad=grad)
    if ids.dtype not in _INTEGERS:
        raise ArgumentError(op, "ids.dtype", ids.dtype, "torch.int64 or torch.int32")
    if weight.dim() != 2:
        raise ArgumentError(op, "weight.shape", tuple(weight.shape), "(V, D), a row for each id")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ArgumentError(op, "scale", scale, "a finite number or None")
    checks.shaped(op, "grad", grad, *ids.shape, weight.shape[1])


def _inside(ids: Tensor, weight: Tensor) -> Tensor:
    return (ids >= 0) & (ids < weight.shape[0])


def _cost(ids: Tensor, weight: Tensor, scale: float | None) -> Cost:
    elements = ids.numel() * weight.shape[1]
    moved = 2 * elements * weight.element_size() + ids.numel() * ids.element_size()
    return Cost(0.0 if scale is None else float(elements), float(moved))


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """Two roundings: the scale's to float32, and the product's, which may be subnormal. Without a scale, none."""
    (y,) = outputs
    if args[2] is None:
        return ({"accumulate": torch.zeros_like(y)},)
    return ({"accumulate": 2 * y.abs().nan_to_num(0.0), "absolute": y.new_full((), 2.0**-149)},)


@primitive(
    outputs=("y",),
    lower="definition",
    check=lambda ids, weight, scale: _check("embedding", ids, weight, scale),
    meta=lambda ids, weight, scale: weight.new_empty((*ids.shape, weight.shape[1])),
    cost=_cost,
    limits=Limits(bound=_bound, batch={"ids": 0, "y": 1}, reduction=lambda ids, weight, scale: 1),
    # Inductor's gradient of the table would be float32 in memory, or added up in the storage dtype
    gradient=Gradient(backward="embedding_backward", grads=("weight",), whole=True),
    dtypes={"ids": _INTEGERS},
)
def embedding(ids: Tensor, weight: Tensor, scale: float | None = None) -> Tensor:
    """``weight[ids] * scale``: a row of the table for each id.

    ids: (...), int64 or int32, any strides. weight: (V, D), float32, float16 or bfloat16, any strides. scale: a finite
    number, or None for 1 (Gemma has sqrt(D)).
    Returns (..., D), contiguous, in weight's dtype; the product is float32, with one rounding. An id outside [0, V)
    gives a row of NaN and takes no part in the gradient; nothing outside the table is read. Raises ArgumentError.
    """
    inside = _inside(ids, weight)
    if weight.shape[0] == 0:
        return weight.new_full((*ids.shape, weight.shape[1]), math.nan)
    rows = wide(weight)[torch.where(inside, ids, 0).long()]
    rows = rows if scale is None else rows * scale
    return torch.where(inside.unsqueeze(-1), rows, math.nan).to(weight.dtype)


def _gathered(grad: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The sum of the gradient's rows for each row of the table."""
    width = weight.shape[1]
    flat, inside = ids.reshape(-1).long(), _inside(ids, weight).reshape(-1)
    # a row beyond the table takes what belongs to no row of it
    place = torch.where(inside, flat, weight.shape[0])
    total = grad.new_zeros((weight.shape[0] + 1, width))
    rows = grad.reshape(ids.numel(), width)
    # index_add_ adds in no fixed order on a GPU, and index_put_ in none on several threads of a CPU
    whole = total.index_put_((place,), rows, accumulate=True) if grad.is_cuda else total.index_add_(0, place, rows)
    return whole[:-1]


def _gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """A sum of n terms, n the times that an id stands in ids: 6 sqrt(n) (Higham & Mary 2019); 2 for a scale."""
    grad, ids, weight, scale = args
    terms = _gathered(grad.abs(), ids, weight) * abs(1.0 if scale is None else scale)
    count = _gathered(torch.ones_like(grad), ids, weight)
    return ({"accumulate": (6 * count.sqrt() + 2) * terms, "absolute": grad.new_full((), 2.0**-148)},)


@primitive(
    outputs=("grad_weight",),
    check=lambda grad, ids, weight, scale: _check("embedding_backward", ids, weight, scale, grad),
    meta=lambda grad, ids, weight, scale: weight.new_empty(weight.shape),
    cost=lambda grad, ids, weight, scale: Cost(
        float(grad.numel()),
        float((grad.numel() + weight.numel()) * weight.element_size() + ids.numel() * ids.element_size()),
    ),
    limits=Limits(
        bound=_gradient_bound,
        batch="every id may name the same row of the table",
        reduction=lambda grad, ids, weight, scale: max(ids.numel(), 1),
    ),
)
def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, scale: float | None) -> Tensor:
    """Gradient of `embedding` for its table, dense: the sum of ``grad * scale`` over the places of each id.

    Float32 accumulation, one rounding. weight gives the shape alone and is not read.
    """
    total = _gathered(wide(grad), ids, weight)
    return (total if scale is None else total * scale).to(weight.dtype)
