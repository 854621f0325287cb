"""RMS and layer normalisation over the last dimension: meaning and costs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.ops import checks
from ferryman.ops.norm import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide


def _check(op: str, x: Tensor, weight: Tensor | None, eps: float, **others: Tensor | None) -> None:
    checks.one_device(op, x=x, weight=weight, **others)
    checks.floating(op, x=x, weight=weight, **others)
    checks.at_least_1d(op, x=x)
    checks.shaped(op, "weight", weight, x.shape[-1])
    checks.non_negative(op, eps=eps)


def _weight_gradient(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """(rows, N); reshape(-1, N) cannot tell how many rows have no element."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _bytes(*tensors: Tensor | None) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors if t is not None))


def _most_summed(grad: Tensor, *rest: object) -> int:
    """A gradient of x sums over its row, a gradient of weight over every row."""
    width = grad.shape[-1]
    return max(width, grad.numel() // max(width, 1))


def _rms_cost(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool = False) -> Cost:
    return Cost(4.0 * x.numel(), _bytes(x, x, weight))


@primitive(
    outputs=("y",),
    check=lambda x, weight, eps, cast_before_weight: _check("rms_norm", x, weight, eps),
    meta=lambda x, weight, eps, cast_before_weight: x.new_empty(x.shape),
    cost=_rms_cost,
    limits=Limits(bound=bounds.rms_norm, batch={"x": 1, "y": 1}, reduction=lambda x, *rest: x.shape[-1]),
    gradient=Gradient(backward="rms_norm_backward", grads=("x", "weight")),
    lower="definition",
    autocast=("fp32", "aten::rms_norm"),
)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, cast_before_weight: bool = False) -> Tensor:
    """Root-mean-square normalisation over the last dimension: ``x * rsqrt(mean(x**2) + eps) * weight``.

    x: (..., N), float32, float16 or bfloat16, any strides. weight: (N,), any of these dtypes, or None for ones.
    eps: added to the mean square, >= 0. Returns (..., N), contiguous, in x's dtype whatever the weight's.
    Arithmetic is float32 with one rounding; with ``cast_before_weight`` the normalised value is rounded to x's dtype
    before the weight (Hugging Face's Llama and Qwen do so). Raises ArgumentError. Source: Zhang & Sennrich,
    arXiv:1910.07467.
    """
    h = wide(x)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    if cast_before_weight:
        h = wide(h.to(x.dtype))
    return (h * wide(weight)).to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_weight"),
    check=lambda grad, x, weight, eps: _check("rms_norm_backward", x, weight, eps, grad=grad),
    meta=lambda grad, x, weight, eps: (x.new_empty(x.shape), _weight_gradient(x, weight)),
    cost=lambda grad, x, weight, eps: Cost(12.0 * x.numel(), _bytes(grad, x, x, weight, weight)),
    limits=Limits(bound=bounds.rms_norm_backward, batch={"grad": 1, "x": 1, "grad_x": 1}, reduction=_most_summed),
)
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: (grad_x in x's dtype, grad_weight in the weight's; an empty tensor without a weight)."""
    g, h = wide(grad), wide(x)
    r = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    n = h * r
    gw = g if weight is None else g * wide(weight)
    grad_x = (r * (gw - n * (gw * n).mean(-1, keepdim=True))).to(x.dtype)
    if weight is None:
        return grad_x, x.new_empty(0)
    return grad_x, _rows(g * n).sum(0).to(weight.dtype)


def _check_add(op: str, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> None:
    checks.one_device(op, x=x, residual=residual)
    _check(op, x, weight, eps, residual=residual)
    checks.same_dtype(op, x=x, residual=residual)
    checks.same_shape(op, x=x, residual=residual)


@primitive(
    outputs=("y", "residual"),
    check=lambda x, residual, weight, eps, cast_before_weight: _check_add("add_rms_norm", x, residual, weight, eps),
    meta=lambda x, residual, weight, eps, cast_before_weight: (x.new_empty(x.shape), x.new_empty(x.shape)),
    cost=lambda x, residual, weight, eps, cast_before_weight: Cost(5.0 * x.numel(), _bytes(x, x, x, x, weight)),
    limits=Limits(
        bound=bounds.add_rms_norm, batch={"x": 1, "residual": 1, "y": 1}, reduction=lambda x, *rest: x.shape[-1]
    ),
    gradient=Gradient(backward="add_rms_norm_backward", grads=(("x", "residual"), "weight")),
    lower="definition",
    autocast=("fp32", "aten::rms_norm"),
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, cast_before_weight: bool = False
) -> tuple[Tensor, Tensor]:
    """Residual addition fused with `rms_norm`: returns (rms_norm(s, weight), s) with s = x + residual.

    x, residual: (..., N), same shape and dtype. weight, eps, cast_before_weight: as in `rms_norm`. s is rounded to x's
    dtype, and the rounded s is what is normalised, as the two separate ops would do. Both results are contiguous, in
    x's dtype. Neither input is modified. Raises ArgumentError.
    """
    s = (wide(x) + wide(residual)).to(x.dtype)
    h = wide(s)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype), s
    if cast_before_weight:
        h = wide(h.to(x.dtype))
    return (h * wide(weight)).to(x.dtype), s


@primitive(
    outputs=("grad_sum", "grad_weight"),
    check=lambda grad_y, grad_residual, out_residual, weight, eps: _check(
        "add_rms_norm_backward", out_residual, weight, eps, grad_y=grad_y, grad_residual=grad_residual
    ),
    meta=lambda grad_y, grad_residual, out_residual, weight, eps: (
        out_residual.new_empty(out_residual.shape),
        _weight_gradient(out_residual, weight),
    ),
    cost=lambda grad_y, grad_residual, out_residual, weight, eps: Cost(
        13.0 * out_residual.numel(), _bytes(grad_y, grad_residual, out_residual, out_residual, weight, weight)
    ),
    limits=Limits(
        bound=bounds.add_rms_norm_backward,
        reduction=_most_summed,
        batch={"grad_y": 1, "grad_residual": 1, "out_residual": 1, "grad_sum": 1},
    ),
)
def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, out_residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_rms_norm`: (the gradient shared by x and residual, grad_weight or an empty tensor)."""
    g, h = wide(grad_y), wide(out_residual)
    r = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    n = h * r
    gw = g if weight is None else g * wide(weight)
    total = r * (gw - n * (gw * n).mean(-1, keepdim=True)) + wide(grad_residual)
    if weight is None:
        return total.to(out_residual.dtype), out_residual.new_empty(0)
    return total.to(out_residual.dtype), _rows(g * n).sum(0).to(weight.dtype)


def _check_layer(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _check(op, x, weight, eps, bias=bias)
    checks.shaped(op, "bias", bias, x.shape[-1])


@primitive(
    outputs=("y",),
    check=lambda x, weight, bias, eps: _check_layer("layer_norm", x, weight, bias, eps),
    meta=lambda x, weight, bias, eps: x.new_empty(x.shape),
    cost=lambda x, weight, bias, eps: Cost(7.0 * x.numel(), _bytes(x, x, weight, bias)),
    limits=Limits(bound=bounds.layer_norm, batch={"x": 1, "y": 1}, reduction=lambda x, *rest: x.shape[-1]),
    gradient=Gradient(backward="layer_norm_backward", grads=("x", "weight", "bias")),
    lower="definition",
    autocast=("fp32", "aten::layer_norm"),
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last dimension: ``(x - mean) * rsqrt(var + eps) * weight + bias``, biased variance.

    x: (..., N), float32, float16 or bfloat16, any strides. weight, bias: (N,), any of these dtypes, or None.
    Returns (..., N), contiguous, in x's dtype; float32 arithmetic, two-pass variance, one rounding.
    Raises ArgumentError. Source: Ba, Kiros & Hinton, arXiv:1607.06450.
    """
    h = wide(x)
    d = h - h.mean(-1, keepdim=True)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return y.to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_weight", "grad_bias"),
    check=lambda grad, x, weight, bias, eps: _check_layer("layer_norm_backward", x, weight, bias, eps),
    meta=lambda grad, x, weight, bias, eps: (
        x.new_empty(x.shape),
        _weight_gradient(x, weight),
        _weight_gradient(x, bias),
    ),
    cost=lambda grad, x, weight, bias, eps: Cost(16.0 * x.numel(), _bytes(grad, x, x, weight, weight, bias)),
    limits=Limits(bound=bounds.layer_norm_backward, batch={"grad": 1, "x": 1, "grad_x": 1}, reduction=_most_summed),
)
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: grad_x, grad_weight, grad_bias (an empty tensor where there is no weight or bias)."""
    g, h = wide(grad), wide(x)
    d = h - h.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    n = d * r
    gw = g if weight is None else g * wide(weight)
    grad_x = r * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
    rows = _rows(g)
    grad_weight = x.new_empty(0) if weight is None else (rows * _rows(n)).sum(0).to(weight.dtype)
    grad_bias = x.new_empty(0) if bias is None else rows.sum(0).to(bias.dtype)
    return grad_x.to(x.dtype), grad_weight, grad_bias


def _check_add_layer(
    op: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    _check_add(op, x, residual, weight, eps)
    _check_layer(op, x, weight, bias, eps)


@primitive(
    outputs=("y", "residual"),
    check=lambda x, residual, weight, bias, eps: _check_add_layer("add_layer_norm", x, residual, weight, bias, eps),
    meta=lambda x, residual, weight, bias, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    cost=lambda x, residual, weight, bias, eps: Cost(8.0 * x.numel(), _bytes(x, x, x, x, weight, bias)),
    limits=Limits(
        bound=bounds.add_layer_norm, batch={"x": 1, "residual": 1, "y": 1}, reduction=lambda x, *rest: x.shape[-1]
    ),
    gradient=Gradient(backward="add_layer_norm_backward", grads=(("x", "residual"), "weight", "bias")),
    lower="definition",
    autocast=("fp32", "aten::layer_norm"),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Residual addition fused with `layer_norm`: returns (layer_norm(s, weight, bias), s) with s = x + residual.

    x, residual: (..., N), same shape and dtype. weight, bias, eps: as in `layer_norm`. s is rounded to x's dtype, and
    the rounded s is what is normalised, as the two separate ops would do. Both results are contiguous, in x's dtype.
    Neither input is modified. Raises ArgumentError.
    """
    s = (wide(x) + wide(residual)).to(x.dtype)
    h = wide(s)
    d = h - h.mean(-1, keepdim=True)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return y.to(x.dtype), s


def _check_add_layer_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    out_residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    op = "add_layer_norm_backward"
    checks.one_device(op, out_residual=out_residual, grad_y=grad_y, grad_residual=grad_residual)
    checks.floating(op, grad_y=grad_y, grad_residual=grad_residual)
    _check_layer(op, out_residual, weight, bias, eps)


@primitive(
    outputs=("grad_sum", "grad_weight", "grad_bias"),
    check=_check_add_layer_backward,
    meta=lambda grad_y, grad_residual, out_residual, weight, bias, eps: (
        out_residual.new_empty(out_residual.shape),
        _weight_gradient(out_residual, weight),
        _weight_gradient(out_residual, bias),
    ),
    cost=lambda grad_y, grad_residual, out_residual, weight, bias, eps: Cost(
        17.0 * out_residual.numel(), _bytes(grad_y, grad_residual, out_residual, out_residual, weight, weight, bias)
    ),
    limits=Limits(
        bound=bounds.add_layer_norm_backward,
        batch={"grad_y": 1, "grad_residual": 1, "out_residual": 1, "grad_sum": 1},
        reduction=_most_summed,
    ),
)
def add_layer_norm_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    out_residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `add_layer_norm`: (the gradient shared by x and residual, grad_weight, grad_bias).

    grad_residual: of the sum, or None where nothing else reads the sum (a norm after the addition). A weight or bias
    that is not there has an empty tensor.
    """
    g, h = wide(grad_y), wide(out_residual)
    d = h - h.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    n = d * r
    gw = g if weight is None else g * wide(weight)
    total = r * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
    if grad_residual is not None:
        total = total + wide(grad_residual)
    rows = _rows(g)
    grad_weight = out_residual.new_empty(0) if weight is None else (rows * _rows(n)).sum(0).to(weight.dtype)
    grad_bias = out_residual.new_empty(0) if bias is None else rows.sum(0).to(bias.dtype)
    return total.to(out_residual.dtype), grad_weight, grad_bias
