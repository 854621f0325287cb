"""RMS normalisation with a gate, before or after it: meaning and costs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.gated_norm import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide


def _check(
    op: str,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    activation: str,
    grad: Tensor | None = None,
) -> None:
    checks.one_device(op, x=x, gate=gate, weight=weight, grad=grad)
    checks.floating(op, x=x, gate=gate, weight=weight, grad=grad)
    checks.at_least_1d(op, x=x)
    checks.same_shape(op, x=x, gate=gate, **({} if grad is None else {"grad": grad}))
    checks.shaped(op, "weight", weight, x.shape[-1])
    checks.non_negative(op, eps=eps)
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ArgumentError(op, "group_size", group_size, f"a divisor of x's {x.shape[-1]} columns, or None")
    if activation not in ("silu", "sigmoid"):
        raise ArgumentError(op, "activation", repr(activation), "'silu' or 'sigmoid'")


def _bytes(*tensors: Tensor | None) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors if t is not None))


def _groups(x: Tensor, group_size: int | None) -> Tensor:
    """(..., N) as (..., groups, columns of a group)."""
    size = x.shape[-1] if group_size is None else group_size
    return x.unflatten(-1, (x.shape[-1] // max(size, 1), size)) if x.shape[-1] else x.unsqueeze(-2)


def _most_summed(grad: Tensor, *rest: object) -> int:
    """A gradient of x sums over its group, a gradient of weight over every row."""
    width = grad.shape[-1]
    return max(width, grad.numel() // max(width, 1))


@primitive(
    outputs=("y",),
    check=lambda x, gate, weight, eps, group_size, norm_before_gate, cast_before_weight, activation: _check(
        "gated_rms_norm", x, gate, weight, eps, group_size, activation
    ),
    meta=lambda x, *rest: x.new_empty(x.shape),
    cost=lambda x, gate, weight, *rest: Cost(9.0 * x.numel(), _bytes(x, gate, x, weight)),
    limits=Limits(
        bound=bounds.forward,
        batch={"x": 1, "gate": 1, "y": 1},
        reduction=lambda x, gate, weight, eps, group_size, *rest: x.shape[-1] if group_size is None else group_size,
    ),
    gradient=Gradient(backward="gated_rms_norm_backward", grads=("x", "gate", "weight")),
    lower="definition",
)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    cast_before_weight: bool = False,
    activation: str = "silu",
) -> Tensor:
    """RMS normalisation with a gate: ``norm(x) * weight * act(gate)``, or ``norm(x * act(gate)) * weight``.

    norm is ``h * rsqrt(mean(h**2) + eps)`` over each group_size neighbouring columns, or over all with None.
    norm_before_gate chooses the first form, of Qwen3-Next and Falcon-H1; Mamba2 has the second. activation: "silu", or
    "sigmoid" as in Kimi Linear. x, gate: (..., N), each float32, float16 or bfloat16, any strides. weight: (N,), any of
    these dtypes, or None for ones. eps >= 0. Returns (..., N), contiguous, in x's dtype. Arithmetic is float32 with one
    rounding; with cast_before_weight the normalised value is rounded to x's dtype before the weight, and its product
    with the weight once more before a gate that follows (Hugging Face's Mamba2 and Qwen3-Next do so). Raises
    ArgumentError. Source: mamba_ssm's RMSNormGated; Dao and Gu, arXiv:2405.21060.
    """
    h, a = wide(x), wide(gate)
    a = functional.silu(a) if activation == "silu" else torch.sigmoid(a)
    n = _groups(h if norm_before_gate else h * a, group_size)
    n = (n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        if cast_before_weight:
            n = wide(n.to(x.dtype))
        n = n * wide(weight)
    if norm_before_gate:
        if cast_before_weight:
            n = wide(n.to(x.dtype))
        n = n * a
    return n.to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_gate", "grad_weight"),
    check=lambda grad, x, gate, weight, eps, group_size, norm_before_gate, activation: _check(
        "gated_rms_norm_backward", x, gate, weight, eps, group_size, activation, grad
    ),
    meta=lambda grad, x, gate, weight, *rest: (
        x.new_empty(x.shape),
        gate.new_empty(gate.shape),
        x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format),
    ),
    cost=lambda grad, x, gate, weight, *rest: Cost(24.0 * x.numel(), _bytes(grad, x, gate, x, gate, weight, weight)),
    limits=Limits(
        bound=bounds.backward, batch={"grad": 1, "x": 1, "gate": 1, "grad_x": 1, "grad_gate": 1}, reduction=_most_summed
    ),
)
def gated_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated_rms_norm`: (grad_x, grad_gate, grad_weight), each in its argument's dtype.

    An empty tensor stands for grad_weight where there is no weight. What the forward rounds on the way counts as it is.
    """
    g, h, z = wide(grad), wide(x), wide(gate)
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)  # in float32 1 - s has no digits left where s is near 1
    a, slope = (z * s, s * (1 + z * rest)) if activation == "silu" else (s, s * rest)
    came = g * a if norm_before_gate else g
    u = _groups(h if norm_before_gate else h * a, group_size)
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    n = u * r
    scaled = came if weight is None else came * wide(weight)
    inner = (_groups(scaled, group_size) * n).mean(-1, keepdim=True)
    d = (r * (_groups(scaled, group_size) - n * inner)).flatten(-2)
    n = n.flatten(-2)
    if norm_before_gate:
        grad_x, before = d, g * n if weight is None else g * wide(weight) * n
    else:
        grad_x, before = d * a, d * h
    if weight is None:
        grad_weight = x.new_empty(0)
    else:
        rows = (came * n).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        grad_weight = rows.sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), (before * slope).to(gate.dtype), grad_weight
