"""Attention over lists of the keys that a query sees, and dropout in Python's integers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.independent import Source
from tests.ops.attention.plain_philox import WORD, philox


def sees(position: int, key: int, first: int, end: int, causal: bool, window: int | None, chunk: int | None) -> bool:
    if not first <= key < end or (causal and key > position):
        return False
    if window is not None and not (position - window < key and (causal or key < position + window)):
        return False
    return chunk is None or (key - first) // chunk == (position - first) // chunk


def keeps(seeds: Tensor, heads: int, queries: int, keys: int, dropout_p: float) -> Tensor:
    limit = int(dropout_p * WORD)
    words = [
        [
            [
                [w for four in range(-(-keys // 4)) for w in philox((four, i, h, 0), (s % WORD, s // WORD % WORD))]
                for i in range(queries)
            ]
            for h in range(heads)
        ]
        for s in seeds.tolist()
    ]
    shape = len(seeds), heads, queries, -(-keys // 4) * 4
    return (torch.tensor(words, dtype=torch.int64).reshape(shape) >= limit)[..., :keys]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, depth = q.shape
    keys = k.shape[2]
    ranges = [(0, keys)] * batch if key_range is None else key_range.tolist()
    ranges = [(min(max(first, 0), keys), min(max(end, 0), keys)) for first, end in ranges]
    seen = [
        [[sees(i + end - queries, j, first, end, causal, window, chunk) for j in range(keys)] for i in range(queries)]
        for first, end in ranges
    ]
    hidden = ~torch.tensor(seen, dtype=torch.bool).reshape(batch, 1, queries, keys)
    owner = [h // (heads // k.shape[1]) for h in range(heads)]
    score = torch.einsum("bhid,bhjd->bhij", q, k[:, owner]) * (1 / math.sqrt(depth) if scale is None else scale)
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(hidden, -math.inf)
    if mask is not None:
        score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
    if sinks is not None:
        column = sinks[None, :, None, None].expand(batch, heads, queries, 1)
        score = torch.cat((score, column), -1)
    if not score.shape[-1]:
        return q.new_zeros(batch, heads, queries, v.shape[3]), q.new_full((batch, heads, queries), -math.inf)
    top = score.detach().amax(-1, keepdim=True)
    finite = top.masked_fill(top == -math.inf, 0.0)
    weight = torch.exp(score - finite)
    total = weight.sum(-1, keepdim=True)
    blind = total == 0
    infinite = top == math.inf  # exp(inf - inf) is NaN for the largest alone, and makes no other score's share one
    total = total.masked_fill(blind, 1.0).masked_fill(infinite, 1.0)
    lse = torch.where(blind | infinite, top, finite + torch.log(total)).squeeze(-1)
    share = (weight / total)[..., :keys]
    if dropout_p and dropout_seed is not None:
        share = share * keeps(dropout_seed, heads, queries, keys, dropout_p) / (1 - dropout_p)
    return torch.einsum("bhij,bhjd->bhid", share, v[:, owner]), lse


SOURCES = {"attention": Source(attention)}
