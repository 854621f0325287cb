"""A product with packed weights of 4 bits: meaning and error terms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Limits, Rounding, primitive, wide

ZERO = 8  # what a stored value of 4 bits means 0 by
ROUNDED_WEIGHT = Rounding("w", "the scaled weight is rounded to the storage dtype before the product")


def unpacked(weight: Tensor) -> Tensor:
    """(N, K / 2) uint8 -> (N, K) integers from -8 to 7: an even column in the low half of a byte, an odd one above."""
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(torch.int16) - ZERO


def scaled(weight: Tensor, scales: Tensor, group: int) -> Tensor:
    """(N, K) weights in the dtype of ``scales``, which is float32 or float64."""
    return unpacked(weight).to(scales.dtype) * scales.repeat_interleave(group, -1)


def _forward(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int, round_w: bool = False
) -> Tensor:
    matrix = scaled(weight, wide(scales), group)
    if round_w:
        matrix = matrix.to(x.dtype).to(matrix.dtype)
    y = wide(x) @ matrix.T
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def _check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> None:
    op, floats = "linear_w4", {"x": x, "scales": scales, "bias": bias}
    checks.one_device(op, **floats, weight=weight)
    checks.floating(op, **floats)
    checks.same_dtype(op, **floats)
    checks.at_least_1d(op, x=x)
    depth = x.shape[-1]
    if weight.dtype != torch.uint8:
        raise ArgumentError(op, "weight.dtype", weight.dtype, "torch.uint8, two values of 4 bits a byte")
    if group < 2 or group % 2 or depth % group:
        raise ArgumentError(op, "group", group, f"an even divisor of x's last dimension, {depth}")
    if weight.dim() != 2 or weight.shape[1] * 2 != depth:
        raise ArgumentError(op, "weight.shape", tuple(weight.shape), f"(N, {depth // 2}), to match x {tuple(x.shape)}")
    checks.shaped(op, "scales", scales, weight.shape[0], depth // group)
    checks.shaped(op, "bias", bias, weight.shape[0])


def _cost(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> Cost:
    rows = x.numel() // max(x.shape[-1], 1)
    moved = (x.numel() + scales.numel() + rows * weight.shape[0]) * x.element_size() + weight.numel()
    return Cost(2.0 * x.numel() * weight.shape[0], float(moved))


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """As for a product, 6 sqrt(K) |x| @ |W| (Higham & Mary 2019), and two roundings beside: the scale is multiplied
    into each weight, or into each group's sum."""
    x, weight, scales, bias, group = args
    matrix = scaled(weight, scales, group).abs().T
    depth = max(x.shape[-1], 1)
    magnitude = x.abs() @ matrix
    shift = 0.0 if bias is None else bias.abs() + outputs[0].abs()
    return (
        {
            "accumulate": (6 * math.sqrt(depth) + 3) * magnitude + shift,
            "absolute": x.new_full((), 2 * depth * 2.0**-149),  # products underflow gradually
            "split-k": magnitude,
            "w": magnitude,
            "w_flush": x.abs().sum(-1, keepdim=True).expand_as(outputs[0]),
            "tf32": 6 * math.sqrt(2) * torch.sqrt(x.square() @ matrix.square()),
            "tf32-rz": 2 * magnitude,
        },
    )


def _rounded(roundings: frozenset[str]) -> Callable[..., Any]:
    return functools.partial(_forward, round_w="w" in roundings)


@primitive(
    outputs=("y",),
    check=_check,
    meta=lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])),
    cost=_cost,
    limits=Limits(
        bound=_bound,
        roundings=(ROUNDED_WEIGHT,),
        rounded=_rounded,
        batch={"x": 1, "y": 1},
        reduction=lambda x, *rest: x.shape[-1],
    ),
    autocast=("low", "aten::linear"),
    dtypes={"weight": (torch.uint8,)},
)
def linear_w4(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, group: int = 128) -> Tensor:
    """``x @ W.T + bias`` with ``W[n, k] = (w4[n, k] - 8) * scales[n, k // group]``.

    x: (..., K), float32, float16 or bfloat16, any strides. weight: (N, K / 2) uint8, two unsigned values of 4 bits a
    byte, w4[n, 2 j] in its low half and w4[n, 2 j + 1] in its high half. scales: (N, K / group), bias: (N,) or None,
    both in x's dtype. group: an even divisor of K.
    Returns (..., N), contiguous, in x's dtype; float32 accumulation, one rounding. Not differentiable. Raises
    ArgumentError. Source: the group-wise symmetric form of Frantar et al., arXiv:2210.17323.
    """
    return _forward(x, weight, scales, bias, group)
