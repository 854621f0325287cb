"""Paged attention through PyTorch: the pages of each sequence are copied one after the other, then two products.

Not through a fused kernel: with a mask, PyTorch's own for CPUs gives 0 where a score is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.backends.base import Target


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None,
    target: Target,
) -> Tensor:
    pages, size, groups, dim = k_cache.shape
    batch, heads = q.shape[:2]
    room = page_table.shape[1] * size
    if not pages or not room or not q.numel():
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    seen = torch.arange(room, device=q.device)[None, :] < lengths[:, None]
    safe = page_table.clamp(0, pages - 1).long()
    hidden = ~seen[:, :, None, None]
    # what no sequence sees may be NaN, and 0 * NaN is NaN
    k, v = (
        cache[safe].reshape(batch, room, groups, dim).masked_fill_(hidden, 0.0).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    if groups < heads:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    s = torch.matmul(q.unsqueeze(2).float() * (dim**-0.5 if scale is None else scale), k.float().mT)
    s = s.masked_fill(~seen[:, None, None], -math.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == -math.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    mean = torch.matmul(p, v.float()) / total.masked_fill(total == 0, 1.0)
    return mean.squeeze(2).to(q.dtype)
