"""Matrix products: meaning and error terms."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor | None = None) -> None:
    given = {"x": x, "weight": weight, "bias": bias, "grad": grad}
    checks.one_device(op, **given)
    checks.floating(op, **given)
    checks.same_dtype(op, **given)
    checks.at_least_1d(op, x=x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(op, "weight.shape", tuple(weight.shape), f"(N, {x.shape[-1]}), to match x {tuple(x.shape)}")
    checks.shaped(op, "bias", bias, weight.shape[0])
    checks.shaped(op, "grad", grad, *x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> Tensor:
    """All leading dimensions as one; reshape(-1, 0) would be ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _product_error(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """6 sqrt(K) |a| @ |b| from probabilistic analysis (Higham & Mary 2019); tf32 rounds both operands, or cuts them
    ("tf32-rz": each is off by up to 2^-10 towards zero, 2^-11 on average); split-k rounds each partial sum to the
    storage dtype. Nothing in it is an approximated function, so that its systematic part ("bias") is at most one
    standard deviation."""
    depth = max(a.shape[-1], 1)
    magnitude = a.abs() @ b.abs()
    return {
        "accumulate": (6 * math.sqrt(depth) + 1) * magnitude,
        "bias": (math.sqrt(depth) + 1) * magnitude,
        "absolute": a.new_full((), depth * 2.0**-149),  # products underflow gradually
        "split-k": magnitude,
        "tf32": 6 * math.sqrt(2) * torch.sqrt(a.square() @ b.square()),
        "tf32-rz": 2 * (a @ b).abs(),
    }


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    x, weight, bias = args
    terms = _product_error(x, weight.T)
    if bias is not None:
        for name in ("accumulate", "bias"):
            terms[name] = terms[name] + bias.abs() + outputs[0].abs()
    return (terms,)


def _gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    grad, x, weight, bias, need_x, need_weight = args
    g, flat = _rows(grad), _rows(x)
    empty = {"accumulate": x.new_empty(0)}
    root = 6 * math.sqrt(max(len(g), 1))
    return (
        _product_error(grad, weight) if need_x else empty,
        _product_error(g.T, flat) if need_weight else empty,
        empty if bias is None else {"accumulate": root * g.abs().sum(0)},
    )


def _product_bytes(x: Tensor, weight: Tensor) -> float:
    rows = x.numel() // max(x.shape[-1], 1)
    return float((x.numel() + weight.numel() + rows * weight.shape[0]) * x.element_size())


@primitive(
    outputs=("y",),
    check=lambda x, weight, bias: _check("linear", x, weight, bias),
    meta=lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    cost=lambda x, weight, bias: Cost(2.0 * x.numel() * weight.shape[0], _product_bytes(x, weight)),
    limits=Limits(bound=_bound, batch={"x": 1, "y": 1}, reduction=lambda x, weight, bias: x.shape[-1]),
    gradient=Gradient(backward="linear_backward", grads=("x", "weight", "bias")),
    lower=functional.linear,
    autocast=("low", "aten::linear"),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    x: (..., K), float32, float16 or bfloat16, any strides. weight: (N, K), bias: (N,) or None, both in x's dtype.
    Returns (..., N), contiguous, in x's dtype; float32 accumulation, one rounding. float32 inputs use IEEE products
    unless ``torch.set_float32_matmul_precision`` allows tf32. Raises ArgumentError.
    """
    y = wide(x) @ wide(weight).T
    return (y if bias is None else y + wide(bias)).to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_weight", "grad_bias"),
    check=lambda grad, x, weight, bias, need_x, need_weight: _check("linear_backward", x, weight, bias, grad),
    meta=lambda grad, x, weight, bias, need_x, need_weight: (
        x.new_empty(x.shape if need_x else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
    cost=lambda grad, x, weight, bias, need_x, need_weight: Cost(
        2.0 * x.numel() * weight.shape[0] * (need_x + need_weight), _product_bytes(x, weight) * (need_x + need_weight)
    ),
    limits=Limits(
        bound=_gradient_bound,
        batch={"grad": 1, "x": 1, "grad_x": 1},
        reduction=lambda grad, x, weight, bias, need_x, need_weight: max(len(weight), math.prod(x.shape[:-1])),
    ),
)
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `linear`: grad_x, grad_weight, grad_bias; an empty tensor where not needed or without a bias."""
    g = wide(grad)
    flat = _rows(g)
    return (
        (g @ wide(weight)).to(x.dtype) if need_x else x.new_empty(0),
        (flat.T @ _rows(wide(x))).to(weight.dtype) if need_weight else weight.new_empty(0),
        x.new_empty(0) if bias is None else flat.sum(0).to(bias.dtype),
    )
