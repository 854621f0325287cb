"""`causal_conv1d` through PyTorch: a product and a sum for each tap, in float32.

torch.nn.functional.conv1d would round to 16 bits before the activation, and in float32 may take tf32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def _like(values: Tensor, x: Tensor) -> Tensor:
    """In x's dtype; channels stay innermost where they are in x."""
    if x.stride(1) == 1 and x.stride(2) != 1:
        return values.to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return values.to(x.dtype).contiguous()


def _padded(x: Tensor, state: Tensor | None, width: int) -> Tensor:
    return functional.pad(x, (width - 1, 0)) if state is None else torch.cat((state, x), -1)


def _taps(padded: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> Tensor:
    total = padded[..., :length] * weight[:, :1]
    for k in range(1, weight.shape[1]):
        total = torch.addcmul(total, padded[..., k : k + length], weight[:, k : k + 1])
    return total if bias is None else total + bias.float()[:, None]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    length, width = x.shape[2], weight.shape[1]
    padded = _padded(x, initial_state, width)
    z = _taps(padded.float(), weight.float(), bias, length)
    state = padded[..., length:].clone(memory_format=torch.contiguous_format)
    return _like(z if activation is None else functional.silu(z), x), state


def causal_conv1d_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, width = x.shape[2], weight.shape[1]
    padded, taps = _padded(x, initial_state, width).float(), weight.float()
    g = grad_y.float()
    if activation is not None:
        g = torch.ops.aten.silu_backward(g, _taps(padded, taps, bias, length))
    back = torch.zeros(padded.shape, dtype=torch.float32, device=x.device)
    own = torch.empty(weight.shape, dtype=torch.float32, device=x.device)
    for k in range(width):
        back[..., k : k + length].addcmul_(g, taps[:, k : k + 1])
        torch.sum(g * padded[..., k : k + length], (0, 2), out=own[:, k])
    if grad_final_state is not None:
        back[..., length:] += grad_final_state
    return (
        _like(back[..., width - 1 :], x),
        own.to(weight.dtype),
        x.new_empty(0) if bias is None else g.sum((0, 2)).to(bias.dtype),
        x.new_empty(0) if initial_state is None else back[..., : width - 1].to(x.dtype, copy=True).contiguous(),
    )
