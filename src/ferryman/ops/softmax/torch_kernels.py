"""Softmax and cross entropy through PyTorch's own kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.backends.base import Target


def softmax(x: Tensor, target: Target) -> Tensor:
    return torch.softmax(x, -1).contiguous()


def softmax_backward(grad: Tensor, y: Tensor, target: Target) -> Tensor:
    # PyTorch's kernels round grad * y to the storage dtype before its sum, on CPU and CUDA (bfloat16: 69 bounds off);
    # in float32 they keep the bound.
    wide = torch.ops.aten._softmax_backward_data(grad.float().contiguous(), y.float().contiguous(), -1, torch.float32)
    return wide.to(y.dtype)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(logits.float(), -1)
    valid = (labels >= 0) & (labels < logits.shape[-1])
    picked = logits.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1).float()
    row = lse - picked.masked_fill(~valid, math.nan)
    if label_smoothing:
        smooth = lse - logits.mean(-1, dtype=torch.float32)
        row = (1.0 - label_smoothing) * row + label_smoothing * smooth  # lerp of inf and inf is NaN
    counted = labels != ignore_index
    return row.masked_fill(~counted, 0.0).sum() / counted.sum(), lse


def cross_entropy_inplace_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse = cross_entropy(logits, labels, ignore_index, label_smoothing, target)
    one = torch.ones((), dtype=torch.float32, device=logits.device)
    gradient = cross_entropy_backward(one, logits, labels, lse, ignore_index, label_smoothing, target)
    return loss, lse, logits.copy_(gradient)


def cross_entropy_inplace_grad_backward(grad: Tensor, out_logits: Tensor, target: Target) -> Tensor:
    return out_logits.copy_(out_logits.float() * grad)


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> Tensor:
    classes = logits.shape[-1]
    counted = labels != ignore_index
    valid = (labels >= 0) & (labels < classes)
    scale = (grad / counted.sum()).expand(labels.shape).masked_fill(~counted, 0.0).unsqueeze(-1)
    d = torch.exp(logits.float() - lse.unsqueeze(-1))
    if label_smoothing:
        d -= label_smoothing / classes
    hot = labels.where(valid, 0).unsqueeze(-1)
    d.scatter_add_(-1, hot, torch.full_like(hot, label_smoothing - 1.0, dtype=d.dtype))
    d.masked_fill_((counted & ~valid).unsqueeze(-1), math.nan)
    return (d * scale).masked_fill_(~counted.unsqueeze(-1), 0.0).to(logits.dtype).contiguous()
