"""Functions that disguised modules of other files call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps) * weight + bias


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
