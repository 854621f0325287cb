"""Error terms of paged attention, and how a sequence's keys are read through its pages. Arguments are float64.

A score is off by e = (6 sqrt(D) + 6)(|q| @ |k|) scale units of u; its probability by that, by exp's argument
(3 |s - lse|), and by the row's mean of both through the sum: as in attention, which docs/parity.md derives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]


def visible(cache: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """(batch, most_pages * page_size), True where a sequence has a key."""
    places = torch.arange(page_table.shape[1] * cache.shape[1], device=cache.device)
    return places[None, :] < lengths[:, None]


def gathered(k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, what is visible): (batch, T, kv_heads, D) twice, 0 where nothing is visible, and (batch, T)."""
    pages, _, groups, dim = k_cache.shape
    seen = visible(k_cache, page_table, lengths)
    batch, room = seen.shape
    if not pages or not room:
        nothing = k_cache.new_zeros(batch, room, groups, dim)
        return nothing, nothing, torch.zeros_like(seen)
    safe = page_table.clamp(0, pages - 1).long()
    entries = (cache[safe].reshape(batch, room, groups, dim) for cache in (k_cache, v_cache))
    k, v = (x.masked_fill(~seen[:, :, None, None], 0.0) for x in entries)
    return k, v, seen


def used(cache: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """(pages, page_size), True where some sequence sees the slot."""
    pages, size = cache.shape[:2]
    mask = torch.zeros(pages * size, dtype=torch.bool, device=cache.device)
    seen = visible(cache, page_table, lengths)
    slots = page_table.long()[:, :, None] * size + torch.arange(size, device=cache.device)
    mask[slots.reshape(seen.shape)[seen]] = True
    return mask.reshape(pages, size)


def per_head(x: Tensor, heads: int) -> Tensor:
    """(batch, T, kv_heads, D) -> (batch, heads, T, D), each KV head for its group of heads."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def paged_attention(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    q, k_cache, v_cache, page_table, lengths, scale = args
    heads, dim = q.shape[1:]
    k, v, seen = gathered(k_cache, v_cache, page_table, lengths)
    if not q.numel() or not k.shape[1]:
        return ({"accumulate": torch.zeros_like(outputs[0])},)
    k, v = per_head(k, heads), per_head(v, heads).abs()
    factor = abs(dim**-0.5 if scale is None else scale)
    row = q.unsqueeze(2)
    s = (row @ k.transpose(-1, -2)) * (dim**-0.5 if scale is None else scale)
    s = s.masked_fill(~seen[:, None, None], -math.inf)
    error = (6 * math.sqrt(dim) + 6) * (row.abs() @ k.abs().transpose(-1, -2)) * factor
    lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.where(torch.isneginf(lse), 0.0, torch.exp(s - lse))
    distance = torch.where(p > 0, error + 3 * (s - lse).abs(), 0.0)
    many = 6 * math.sqrt(s.shape[-1])
    relative = distance + (p * distance).sum(-1, keepdim=True) + many + 12
    weighted = p @ v
    return (
        {
            "accumulate": ((p * relative) @ v + (many + 4) * weighted).squeeze(2),
            "p": weighted.squeeze(2),
            "p_flush": v.sum(-2).expand_as(outputs[0]),
            # exp of a far smaller score flushes to zero, as does its product in the storage dtype
            "absolute": v.amax(-2) * 2.0**-120,
        },
    )
