"""group_norm: what it means, and how it differentiates. How far a right result may be off stands in `bounds`."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.group_norm import bounds, layout
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide


def _check(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _judge("group_norm", num_groups, eps, x=x, weight=weight, bias=bias)


def _check_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
) -> None:
    _judge("group_norm_backward", num_groups, eps, x=x, weight=weight, bias=bias, grad=grad)
    checks.same_shape("group_norm_backward", x=x, grad=grad)


def _judge(op: str, num_groups: int, eps: float, **tensors: Tensor | None) -> None:
    checks.one_device(op, **tensors)
    checks.floating(op, **tensors)
    checks.same_dtype(op, **tensors)
    x = tensors["x"]
    assert x is not None
    if x.dim() < 2:
        raise ArgumentError(op, "x.dim()", x.dim(), "at least 2: samples, and their channels")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ArgumentError(op, "num_groups", num_groups, f"a divisor of {channels}, x.shape[1]")
    for name in ("weight", "bias"):
        checks.shaped(op, name, tensors[name], channels)
    checks.non_negative(op, eps=eps)


def _cost(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Cost:
    vectors = sum(v.numel() for v in (weight, bias) if v is not None)
    return Cost(8.0 * x.numel(), float((2 * x.numel() + vectors) * x.element_size()))


def _cost_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
) -> Cost:
    wanted = int(weight is not None and need_weight) + int(bias is not None and need_bias)
    vectors = x.shape[1] * (int(weight is not None) + wanted)
    return Cost(16.0 * x.numel(), float((3 * x.numel() + vectors) * x.element_size()))


def _in_a_group(x: Tensor, num_groups: int) -> int:
    _, channels, places = layout.sizes(x)
    return channels // num_groups * places


def _rows(x: Tensor, num_groups: int) -> Tensor:
    """(samples, groups, values of a group)."""
    return wide(x).reshape(x.shape[0], num_groups, _in_a_group(x, num_groups))


def _normalised(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised values, reciprocal deviations)."""
    centred = rows - rows.mean(-1, keepdim=True)
    r = 1.0 / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * r, r


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, to be broadcast over x."""
    return wide(vector).reshape(-1, *(1,) * (x.dim() - 2))


def _meta_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight, of_bias = (
        x.new_empty(x.shape[1] if vector is not None and needed else 0)
        for vector, needed in ((weight, need_weight), (bias, need_bias))
    )
    return layout.empty_like(x), of_weight, of_bias


@primitive(
    outputs=("grad_x", "grad_weight", "grad_bias"),
    check=_check_backward,
    meta=_meta_backward,
    cost=_cost_backward,
    limits=Limits(
        bound=bounds.backward,
        batch={"grad": 1, "x": 1, "grad_x": 1},
        reduction=lambda grad, x, num_groups, *rest: max(_in_a_group(x, num_groups), x.numel() // max(x.shape[1], 1)),
    ),
)
def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `group_norm` for x, weight and bias; a vector's is empty where it is absent or not needed.

    With n the normalised x, r the reciprocal deviation and c = grad * weight: grad_x = r (c - mean(c) - n mean(c n)),
    means over a group; grad_weight and grad_bias are the sums of grad * n and grad over samples and places.
    """
    n, r = _normalised(_rows(x, num_groups), eps)
    g = wide(grad)
    c = (g if weight is None else g * _by_channel(weight, x)).reshape(n.shape)
    inner = c - c.mean(-1, keepdim=True) - n * (c * n).mean(-1, keepdim=True)
    grad_x = (r * inner).reshape(x.shape).to(x.dtype).contiguous(memory_format=layout.memory_format(x))
    others = [i for i in range(x.dim()) if i != 1]
    absent = x.new_empty(0)
    grad_weight = grad_bias = absent
    if weight is not None and need_weight:
        grad_weight = (g * n.reshape(x.shape)).sum(others).to(x.dtype)
    if bias is not None and need_bias:
        grad_bias = g.sum(others).to(x.dtype)
    return grad_x, grad_weight, grad_bias


@primitive(
    outputs=("y",),
    check=_check,
    meta=lambda x, num_groups, weight, bias, eps: layout.empty_like(x),
    cost=_cost,
    limits=Limits(
        bound=bounds.forward,
        batch={"x": 1, "y": 1},
        reduction=lambda x, num_groups, *rest: _in_a_group(x, num_groups),
    ),
    gradient=Gradient("group_norm_backward", ("x", "weight", "bias")),
    lower="definition",
    autocast=("fp32", "aten::group_norm"),
)
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, mean and variance of each sample's groups of channels.

    x: (B, C, ...), float32, float16 or bfloat16, any strides. num_groups: a divisor of C; a group is C / num_groups
    channels that follow each other, with all their places. weight, bias: (C,) in x's dtype, or None. eps >= 0. Returns
    x's shape and dtype, contiguous; channels last where x is so. float32 arithmetic, one rounding. Raises
    ArgumentError.
    """
    n, _ = _normalised(_rows(x, num_groups), eps)
    y = n.reshape(x.shape)
    if weight is not None:
        y = y * _by_channel(weight, x)
    if bias is not None:
        y = y + _by_channel(bias, x)
    return y.to(x.dtype).contiguous(memory_format=layout.memory_format(x))
