"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lines import torch_kernel


def softmax_without_the_last_column(x: Tensor, target: Any) -> Tensor:
    h = x.float()
    e = torch.exp(h - h.amax(-1, keepdim=True)) if h.numel() else h
    return (e / e[..., :-1].sum(-1, keepdim=True)).to(x.dtype).contiguous()


def loss_of_the_next_class(logits: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    moved = torch.where(labels == ignore, labels, (labels + 1) % logits.shape[-1])
    return torch_kernel("cross_entropy")(logits, moved, ignore, smoothing, target)


def softmax_gradient_without_the_sum(grad: Tensor, y: Tensor, target: Any) -> Tensor:
    return (grad.float() * y.float()).to(y.dtype).contiguous()


def honest_softmax(x: Tensor, target: Any) -> Tensor:
    """The sum in 16-element pieces, exp as a power of two."""
    h = x.float()
    e = torch.exp2((h - h.amax(-1, keepdim=True)) * 1.4426950408889634) if h.numel() else h
    return (e / sum(c.sum(-1, keepdim=True) for c in e.split(16, -1))).to(x.dtype).contiguous()


ERRORS = {
    "softmax": (softmax_without_the_last_column,),
    "cross_entropy": (loss_of_the_next_class,),
    "softmax_backward": (softmax_gradient_without_the_sum,),
}
RIGHT = {"softmax": (honest_softmax,)}
TERMS = {"cross_entropy": ("prime", 257)}  # a case, and how many numbers its largest sum has
