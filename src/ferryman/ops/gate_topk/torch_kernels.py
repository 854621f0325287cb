"""Routing through PyTorch. A stable sort gives the lowest index among equal experts, which `torch.topk` does not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.gate_topk.bounds import ordered, unsigned_nan

_LEAST = 1e-20


def gate_topk(
    logits: Tensor,
    k: int,
    scoring: str,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    renormalise: bool,
    scale: float,
    ids_dtype: torch.dtype,
    target: Target,
) -> tuple[Tensor, Tensor]:
    x = logits.float()
    soft = scoring == "softmax"
    score = None if bias is None and soft and renormalise else torch.softmax(x, -1) if soft else torch.sigmoid(x)
    number = x if bias is None or score is None else score + bias.float()
    order = ordered(number)
    if n_group > 1:
        by = number if bias is not None or score is None or soft else score
        grouped = by.unflatten(-1, (n_group, -1))
        groups = grouped.amax(-1) if soft else unsigned_nan(grouped).sort(-1, descending=True).values[..., :2].sum(-1)
        best = ordered(groups)[:, :topk_group]
        outside = torch.ones(groups.shape, dtype=torch.int8, device=x.device).scatter_(1, best, 0)
        there = outside.repeat_interleave(x.shape[1] // n_group, 1).gather(1, order)
        order = order.gather(1, there.sort(stable=True, dim=-1).indices)
    ids = order[:, :k].contiguous()
    if score is None or (soft and renormalise):
        weights = torch.softmax(x.gather(1, ids), -1)
    else:
        weights = score.gather(1, ids)
        if renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
    return weights * scale, ids.to(ids_dtype)


def gate_topk_backward(
    grad: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalise: bool, scale: float, target: Target
) -> Tensor:
    x, experts = logits.float(), logits.shape[1]
    ids = topk_ids.long()
    place = torch.where((ids >= 0) & (ids < experts), ids, experts)
    above = torch.zeros(len(x), experts + 1, device=x.device)
    there = torch.zeros(above.shape, dtype=torch.bool, device=x.device).scatter_(1, place, True)[:, :experts]
    for slot in range(ids.shape[1]):  # one after another: scatter_add_ adds in no fixed order on a GPU
        column = place[:, slot : slot + 1]
        above.scatter_(1, column, above.gather(1, column) + grad[:, slot : slot + 1].float() * scale)
    above = above[:, :experts]
    if scoring == "softmax":
        share = torch.softmax(x.masked_fill(~there, -math.inf) if renormalise else x, -1)
        if renormalise:
            share = share.masked_fill(~there, 0.0)
        mean = (share * above).masked_fill(~there, 0.0).sum(-1, keepdim=True)
        moved = share * (above - mean)
        return (moved.masked_fill(~there, 0.0) if renormalise else moved).to(logits.dtype).contiguous()
    score = torch.sigmoid(x)
    slope = score * torch.sigmoid(-x)
    if renormalise:
        divisor = score.masked_fill(~there, 0.0).sum(-1, keepdim=True) + _LEAST
        mean = (score * above).masked_fill(~there, 0.0).sum(-1, keepdim=True) / divisor
        above = (above - mean) / divisor
    return (slope * above).masked_fill(~there, 0.0).to(logits.dtype).contiguous()
