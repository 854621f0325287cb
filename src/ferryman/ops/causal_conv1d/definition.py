"""A causal depthwise convolution with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.causal_conv1d import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide

ACTIVATIONS = (None, "silu", "swish")


def _check(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    grad_y: Tensor | None = None,
    grad_final_state: Tensor | None = None,
) -> None:
    own = {"x": x, "initial_state": initial_state, "grad_y": grad_y, "grad_final_state": grad_final_state}
    checks.one_device(op, **own, weight=weight, bias=bias)
    checks.floating(op, **own, weight=weight, bias=bias)
    checks.same_dtype(op, **own)
    if x.dim() != 3:
        raise ArgumentError(op, "x.shape", tuple(x.shape), "(B, D, L): batch, channels, length")
    batch, channels, _ = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ArgumentError(op, "weight.shape", tuple(weight.shape), f"({channels}, W), W from 1 on")
    checks.shaped(op, "bias", bias, channels)
    state = (batch, channels, weight.shape[1] - 1)
    checks.shaped(op, "initial_state", initial_state, *state)
    if activation not in ACTIVATIONS:
        raise ArgumentError(op, "activation", repr(activation), ", ".join(map(repr, ACTIVATIONS)))
    checks.shaped(op, "grad_y", grad_y, *x.shape)
    checks.shaped(op, "grad_final_state", grad_final_state, *state)


def _empty(x: Tensor) -> Tensor:
    """Of x's shape. Channels stay innermost where they are, as in a transposed (B, L, D); else it is contiguous."""
    batch, channels, length = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1:
        return x.new_empty((batch, length, channels)).transpose(1, 2)
    return x.new_empty(x.shape)


def _laid(values: Tensor, x: Tensor) -> Tensor:
    return _empty(x).copy_(values)


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, tensors: int, each: int) -> Cost:
    width = weight.shape[1]
    states = x.shape[0] * x.shape[1] * (width - 1) * (1 if state is None else 2)
    own = weight.numel() * weight.element_size() + (0 if bias is None else bias.numel() * bias.element_size())
    moved = (tensors * x.numel() + states) * x.element_size() + own
    return Cost(float(each * width * x.numel()), float(moved))


def _whole(x: Tensor, weight: Tensor, initial_state: Tensor | None) -> Tensor:
    """(B, D, W - 1 + L): what stands before x, and x."""
    before = (x.shape[0], x.shape[1], weight.shape[1] - 1)
    return torch.cat((x.new_zeros(before) if initial_state is None else initial_state, x), -1)


def _sum(whole: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> Tensor:
    z = wide(whole).new_zeros((*whole.shape[:2], length)) if bias is None else wide(bias)[:, None]
    for k in range(weight.shape[1]):
        z = z + wide(weight)[:, k, None] * wide(whole[..., k : k + length])
    return z


def _future(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor] | None:
    """Replace the later half of x, which no earlier element of y sees."""
    length = x.shape[2]
    if length < 2 or x.numel() == 0:
        return None
    x[..., length // 2 :] = 1 - 2 * x[..., length // 2 :]
    kept = (torch.arange(length, device=x.device) < length // 2).expand(x.shape)
    return kept, torch.zeros((*x.shape[:2], weight.shape[1] - 1), dtype=torch.bool, device=x.device)


@primitive(
    outputs=("y", "final_state"),
    check=lambda *args: _check("causal_conv1d", *args),
    meta=lambda x, weight, *rest: (_empty(x), x.new_empty((x.shape[0], x.shape[1], weight.shape[1] - 1))),
    cost=lambda x, weight, bias, initial_state, activation: _cost(x, weight, bias, initial_state, 2, 2),
    limits=Limits(
        bound=bounds.forward,
        batch={"x": 2, "initial_state": 2, "y": 2, "final_state": 2},
        reduction=lambda x, weight, *rest: weight.shape[1] + 1,
        unseen=_future,
    ),
    gradient=Gradient(backward="causal_conv1d_backward", grads=("x", "weight", "bias", "initial_state")),
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution, ``y[b, d, t] = act(bias[d] + sum of weight[d, k] x[b, d, t + k - W + 1])``.

    x: (B, D, L), float32, float16 or bfloat16, any strides; L may be 0. weight: (D, W), W from 1 on, and bias: (D,) or
    None, each of any of these dtypes. initial_state: (B, D, W - 1), of x's dtype: the W - 1 elements that stand before
    x, oldest first; None for zeros, which count as any element (0 times an infinite weight is NaN). activation: None,
    "silu" or "swish", which is silu.
    Returns y, of x's shape and dtype, and final_state (B, D, W - 1): the last W - 1 elements of initial_state and x
    together, unchanged, which the next call takes as its initial_state. One token after another gives what all tokens
    at once give. y is contiguous, but where channels are x's innermost dimension they are y's. Arithmetic is float32
    with one rounding. Raises ArgumentError. Source: Gu and Dao, arXiv:2312.00752; the arguments' order is that of the
    package causal-conv1d.
    """
    whole = _whole(x, weight, initial_state)
    z = _sum(whole, weight, bias, x.shape[2])
    y = z if activation is None else functional.silu(z)
    return _laid(y.to(x.dtype), x), whole[..., x.shape[2] :].contiguous()


def _meta_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _empty(x),
        weight.new_empty(weight.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        x.new_empty(0) if initial_state is None else x.new_empty(initial_state.shape),
    )


@primitive(
    outputs=("grad_x", "grad_weight", "grad_bias", "grad_initial_state"),
    check=lambda grad_y, grad_final_state, x, weight, bias, initial_state, activation: _check(
        "causal_conv1d_backward", x, weight, bias, initial_state, activation, grad_y, grad_final_state
    ),
    meta=lambda grad_y, grad_final_state, x, weight, bias, initial_state, activation: _meta_backward(
        x, weight, bias, initial_state
    ),
    cost=lambda grad_y, grad_final_state, x, weight, bias, initial_state, activation: _cost(
        x, weight, bias, initial_state, 3, 4 if activation is None else 6
    ),
    limits=Limits(
        bound=bounds.backward,
        batch={
            "grad_y": 2,
            "grad_final_state": 2,
            "x": 2,
            "initial_state": 2,
            "grad_x": 2,
            "grad_initial_state": 2,
        },
        reduction=lambda grad_y, grad_final_state, x, weight, *rest: max(x.shape[0] * x.shape[2], weight.shape[1] + 1),
    ),
)
def causal_conv1d_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `causal_conv1d`, each in its argument's dtype; an empty tensor for one that is absent.

    The sum before the activation is computed again. A position outside x has no gradient.
    """
    length, width = x.shape[2], weight.shape[1]
    whole = _whole(x, weight, initial_state)
    g = wide(grad_y)
    if activation is not None:
        z = _sum(whole, weight, bias, length)
        s = torch.sigmoid(z)
        g = g * (s * (1 + z * (1 - s)))
    back = wide(x).new_zeros(whole.shape)
    own = []
    for k in range(width):
        back[..., k : k + length] += wide(weight)[:, k, None] * g
        own.append((g * wide(whole[..., k : k + length])).sum((0, 2)))
    if grad_final_state is not None:
        back[..., length:] += wide(grad_final_state)
    return (
        _laid(back[..., width - 1 :].to(x.dtype), x),
        torch.stack(own, -1).to(weight.dtype),
        x.new_empty(0) if bias is None else g.sum((0, 2)).to(bias.dtype),
        x.new_empty(0) if initial_state is None else back[..., : width - 1].to(x.dtype, copy=True).contiguous(),
    )
