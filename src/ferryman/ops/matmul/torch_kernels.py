"""Matrix products through the vendor's BLAS (cuBLAS, hipBLASLt, oneDNN), as PyTorch calls it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def _wide(x: Tensor) -> Tensor:
    """bfloat16 on a CPU becomes float32: oneDNN multiplies by VDPBF16PS (AVX512_BF16), which reads subnormals as 0."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    return functional.linear(_wide(x), _wide(weight), None if bias is None else _wide(bias)).to(x.dtype).contiguous()


def linear_with_gradient(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    """`linear` on an accelerator, as autograd knows it: PyTorch's backward is `linear_backward`'s products and sum."""
    return functional.linear(x, weight, bias).contiguous()


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])  # reshape(-1, 0) would be ambiguous
    flat = grad.reshape(rows, weight.shape[0])
    inputs = x.reshape(rows, weight.shape[1])
    return (
        torch.matmul(_wide(grad), _wide(weight)).to(x.dtype).contiguous() if need_x else x.new_empty(0),
        torch.mm(_wide(flat).T, _wide(inputs)).to(weight.dtype).contiguous() if need_weight else weight.new_empty(0),
        x.new_empty(0) if bias is None else flat.sum(0, dtype=torch.float32).to(bias.dtype),
    )
