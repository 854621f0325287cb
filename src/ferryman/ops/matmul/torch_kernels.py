"""Matrix products through the vendor's BLAS (cuBLAS, hipBLASLt, oneDNN), as PyTorch calls it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    return functional.linear(x, weight, bias).contiguous()


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])  # reshape(-1, 0) would be ambiguous
    flat = grad.reshape(rows, weight.shape[0])
    return (
        torch.matmul(grad, weight).contiguous() if need_x else x.new_empty(0),
        torch.mm(flat.T, x.reshape(rows, weight.shape[1])).contiguous() if need_weight else weight.new_empty(0),
        x.new_empty(0) if bias is None else flat.sum(0, dtype=torch.float32).to(bias.dtype),
    )
