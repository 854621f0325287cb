"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lines import torch_kernel


def norm_over_n_minus_one(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    h = x.float()
    r = torch.rsqrt(h.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + eps)
    return ((h * r) * (1.0 if weight is None else weight.float())).to(x.dtype).contiguous()


def layer_norm_with_bias_shifted(x: Tensor, weight: Any, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    return torch_kernel("layer_norm")(x, weight, None if bias is None else bias.roll(1), eps, target)  # type: ignore[no-any-return]


def honest_norm(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The squares of 256 columns summed one after another, and so these sums; x scaled after the weight. In one chain
    of 20,000 squares that are nearly equal all roundings go one way, and the bound of a sum does not hold."""
    h = x.float()
    total = torch.zeros(*x.shape[:-1], 1)
    for piece in h.split(256, -1):
        own = torch.zeros_like(total)
        for i in range(piece.shape[-1]):
            own = own + piece[..., i : i + 1] * piece[..., i : i + 1]
        total = total + own
    r = 1 / torch.sqrt(total / x.shape[-1] + eps)
    if weight is None:
        return (h * r).to(x.dtype).contiguous()
    if cast:
        return ((h * r).to(x.dtype).float() * weight.float()).to(x.dtype).contiguous()
    return (h * (weight.float() * r)).to(x.dtype).contiguous()


ERRORS = {
    "rms_norm": (norm_over_n_minus_one,),
    "layer_norm": (layer_norm_with_bias_shifted,),
}
RIGHT = {"rms_norm": (honest_norm,)}
TERMS = {"rms_norm_backward": ("prime", 257)}  # a case, and how many numbers its largest sum has
