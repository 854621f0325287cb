"""Each sequence's keys by a plain loop, then one softmax for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.independent import Source


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None
) -> Tensor:
    out = torch.zeros_like(q)
    size, groups = k_cache.shape[1:3]
    for b, length in enumerate(lengths.tolist()):
        slots = [(int(page_table[b, t // size]), t % size) for t in range(min(length, page_table.shape[1] * size))]
        for h in range(q.shape[1] if slots else 0):
            own = h // (q.shape[1] // groups)
            k, v = (torch.stack([cache[slot][own] for slot in slots]) for cache in (k_cache, v_cache))
            score = (k * q[b, h]).sum(-1) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
            if bool((score != -math.inf).any()):
                out[b, h] = (torch.softmax(score, 0)[:, None] * v).sum(0)
            else:
                out[b, h] = (v * 0.0).sum(0)
    return out


SOURCES = {"paged_attention": Source(paged_attention)}
