"""Products with weights of 4 bits through PyTorch: the weights are unpacked and scaled, then multiplied."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def linear_w4(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int, target: Target) -> Tensor:
    outputs, depth = weight.shape[0], x.shape[-1]
    pairs = torch.stack((weight & 15, weight >> 4), -1).reshape(outputs, scales.shape[1], group)
    # float32 holds the integer and its product with a scale of 16 bits; one rounding to x's dtype
    matrix = ((pairs.float() - 8.0) * scales.float().unsqueeze(-1)).to(x.dtype).reshape(outputs, depth)
    return functional.linear(x, matrix, bias).contiguous()
