"""A projection's cross entropy through the vendor's BLAS and PyTorch's kernels, by blocks of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.linear_cross_entropy import block_kernels as blocks
from ferryman.ops.matmul import torch_kernels as products


def _measure(z: Tensor, goal: Tensor, start: int, picked: Tensor, total: Tensor, target: Target) -> Tensor:
    place = goal - start
    here = (place >= 0) & (place < z.shape[-1])
    own = z.gather(-1, place.where(here, 0).unsqueeze(-1)).squeeze(-1).float()
    picked.copy_(torch.where(here, own, picked))
    if total.numel():
        total += z.sum(-1, dtype=torch.float32)
    return torch.logsumexp(z.float(), -1)


def _slope(
    z: Tensor,
    goal: Tensor,
    lse: Tensor,
    start: int,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    factor: float,
    target: Target,
) -> Tensor:
    counted, place = goal != ignore_index, goal - start
    here = (place >= 0) & (place < z.shape[-1])
    d = torch.exp_(z.float() - lse.unsqueeze(-1))
    if z_loss:
        d *= (1.0 + 2.0 * z_loss * lse).unsqueeze(-1)
    if smoothing:
        d -= smoothing / classes
    hot = torch.where(here, smoothing - 1.0, 0.0).unsqueeze(-1)
    d.scatter_add_(-1, place.where(here, 0).unsqueeze(-1), hot)
    wrong = counted & ((goal < 0) | (goal >= classes))
    d.masked_fill_(wrong.unsqueeze(-1), math.nan).masked_fill_(~counted.unsqueeze(-1), 0.0)
    return d.mul_(factor).to(z.dtype)


_PARTS = blocks.Parts(products.linear, products.linear_backward, _measure, _slope, 8)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    target: Target,
) -> tuple[Tensor, Tensor]:
    return blocks.forward(_PARTS, x, weight, labels, bias, ignore_index, label_smoothing, z_loss, target)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.backward(
        _PARTS, grad, x, weight, labels, bias, lse, ignore_index, label_smoothing, z_loss, need_x, need_weight, target
    )
