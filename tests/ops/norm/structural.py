"""Kernels with one structural error each, which the exact probe must fail: tests/parity/test_gates.py runs them."""

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


ERRORS = {
    "rms_norm": (norm_over_n_minus_one,),
    "layer_norm": (layer_norm_with_bias_shifted,),
}
