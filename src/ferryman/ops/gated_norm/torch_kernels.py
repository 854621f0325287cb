"""The gated norm through PyTorch, in float32 and composed: PyTorch fuses none of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def _apart(x: Tensor, size: int | None) -> Tensor:
    """(..., N) as (..., groups, columns)."""
    return x[..., None, :] if size is None or not x.shape[-1] else x.unflatten(-1, (-1, size))


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    cast_before_weight: bool,
    activation: str,
    target: Target,
) -> Tensor:
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    z = gate.float()
    a = functional.silu(z) if activation == "silu" else torch.sigmoid(z)
    y = x.float() if norm_before_gate else x.float() * a
    parts = _apart(y, group_size)
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = (y.to(x.dtype).float() if cast_before_weight else y) * weight.float()
    if norm_before_gate:
        y = (y.to(x.dtype).float() if cast_before_weight else y) * a
    return y.to(x.dtype).contiguous()


def gated_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        none = x.new_empty(0) if weight is None else torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
        return x.new_empty(x.shape), gate.new_empty(gate.shape), none
    g, h, z = grad.float(), x.float(), gate.float()
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)
    if activation == "silu":
        a, slope = z * s, torch.addcmul(s, z * s, rest)
    else:
        a, slope = s, s * rest
    came, u = (g * a, h) if norm_before_gate else (g, h * a)
    u = _apart(u, group_size)
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    n = u * r
    scaled = _apart(came if weight is None else came * weight.float(), group_size)
    d = (torch.addcmul(scaled, n, (scaled * n).mean(-1, keepdim=True), value=-1) * r).flatten(-2)
    n = n.flatten(-2)
    if norm_before_gate:
        before = (g if weight is None else g * weight.float()) * n
    else:
        before, d = d * h, d * a
    if weight is None:
        grad_weight = x.new_empty(0)
    else:
        grad_weight = (came * n).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return d.to(x.dtype).contiguous(), (before * slope).to(gate.dtype).contiguous(), grad_weight
