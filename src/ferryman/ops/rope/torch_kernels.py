"""Rotary embedding composed of PyTorch's elementwise kernels, in float32, with complex-free arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.backends.base import Target


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float, over: Tensor | None = None) -> Tensor:
    """``over``: where the result goes, which may be x itself."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if over is None else over
    width = cos.shape[-1]
    c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    if interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    else:
        first, second = slice(0, width // 2), slice(width // 2, width)
    a, b = x[..., first].float(), x[..., second].float()
    # Forward pairs x2 with sin1 and x1 with sin2; the transpose pairs them crosswise.
    s_first, s_second = (s[..., first], s[..., second]) if sign > 0 else (s[..., second], s[..., first])
    turned = a * c[..., first] - sign * (b * s_first), b * c[..., second] + sign * (a * s_second)
    out[..., first], out[..., second] = turned  # both are there before either is written: in float32 a and b are views
    if over is not x:
        out[..., width:] = x[..., width:]
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _turn(q, cos, sin, interleaved, 1.0), _turn(k, cos, sin, interleaved, 1.0)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _turn(q, cos, sin, interleaved, 1.0, q), _turn(k, cos, sin, interleaved, 1.0, k)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target
) -> tuple[Tensor, Tensor]:
    return _turn(grad_q, cos, sin, interleaved, -1.0), _turn(grad_k, cos, sin, interleaved, -1.0)
