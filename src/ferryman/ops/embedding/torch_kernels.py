"""Rows of a table through PyTorch's own indexing."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def embedding(ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    if weight.shape[0] == 0:
        return torch.full((*ids.shape, weight.shape[1]), math.nan, dtype=weight.dtype, device=weight.device)
    if weight.is_cpu:  # PyTorch looks at every id there, and says so before it reads
        with contextlib.suppress(IndexError, RuntimeError):  # which of them depends on the shape
            rows = functional.embedding(ids, weight)
            return rows if scale is None else (rows.float() * scale).to(weight.dtype)
    inside = (ids >= 0) & (ids < weight.shape[0])
    rows = weight.index_select(0, ids.where(inside, 0).reshape(-1)).reshape(*ids.shape, weight.shape[1])
    if scale is not None:
        rows = (rows.float() * scale).to(weight.dtype)
    return rows.masked_fill_(~inside.unsqueeze(-1), math.nan)


def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    # PyTorch's embedding_dense_backward rounds partial sums to the storage dtype; index_add_ in float32 does not
    height, width = weight.shape
    inside = (ids >= 0) & (ids < height)
    place = ids.where(inside, height).reshape(-1).long()
    total = torch.zeros(height + 1, width, dtype=torch.float32, device=weight.device)
    total.index_add_(0, place, grad.reshape(ids.numel(), width).float())
    if scale is not None:
        total *= scale
    return total[:-1].to(weight.dtype)
