"""Rows sorted by expert, and summed back, through PyTorch's own indexing. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.backends.base import Target


def sorted_slots(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(experts in order, slots in that order, int32 end offsets); ids of no expert are ``experts``, and come last."""
    ids = topk_ids.reshape(-1)
    keys, order = torch.where((ids >= 0) & (ids < experts), ids, experts).sort(stable=True)
    each = torch.arange(experts, dtype=keys.dtype, device=ids.device)
    return keys, order, torch.searchsorted(keys, each, right=True, out_int32=True)


def sources(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(each row's slot, int32 end offsets); a row whose id is no expert's has none: -1."""
    keys, order, ends = sorted_slots(topk_ids, experts)
    return order.int().masked_fill_(keys >= experts, -1), ends


def places(source: Tensor, slots: int) -> Tensor:
    """(slots,): the last row that names each slot; -1 where none does."""
    at = source.long()
    at = torch.where((at >= 0) & (at < slots), at, slots)
    row = torch.arange(len(at), dtype=torch.int32, device=at.device)
    last_rows = torch.full((slots + 1,), -1, dtype=torch.int32, device=at.device)
    return last_rows.scatter_reduce_(0, at, row, "amax")[:slots]


def _by_slot(y: Tensor, place: Tensor) -> Tensor:
    """A row of y for each slot, in float32; 0 for a slot without one."""
    if not len(y):
        return torch.zeros(len(place), y.shape[1], dtype=torch.float32, device=y.device)
    return y.index_select(0, place.clamp(min=0)).float().masked_fill_((place < 0)[:, None], 0.0)


def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    source, ends = sources(topk_ids, num_experts)
    rows = x.index_select(0, source.clamp(min=0) // max(topk_ids.shape[1], 1))
    return rows.masked_fill_((source < 0)[:, None], 0.0), ends, source


def moe_permute_backward(grad: Tensor, source: Tensor, topk_ids: Tensor, target: Target) -> Tensor:
    rows = _by_slot(grad, places(source, topk_ids.numel()))
    return rows.view(*topk_ids.shape, grad.shape[1]).sum(1).to(grad.dtype)


def _shares(topk_weights: Tensor, place: Tensor) -> Tensor:
    return topk_weights.reshape(-1).float().masked_fill(place < 0, 0.0)


def moe_combine(y: Tensor, source: Tensor, topk_weights: Tensor, target: Target) -> Tensor:
    place = places(source, topk_weights.numel())
    rows = _by_slot(y, place).mul_(_shares(topk_weights, place)[:, None])
    return rows.view(*topk_weights.shape, y.shape[1]).sum(1).to(y.dtype)


def moe_combine_backward(
    grad: Tensor,
    y: Tensor,
    source: Tensor,
    topk_weights: Tensor,
    need_y: bool,
    need_topk_weights: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    tokens, slots = topk_weights.shape
    place = places(source, tokens * slots)
    to_y, to_weights = y.new_empty(0), y.new_empty(0)
    if need_y and not tokens * slots:
        to_y = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
    elif need_y:
        at = source.clamp(0, tokens * slots - 1)
        row = torch.arange(len(y), dtype=torch.int32, device=y.device)
        # a source outside is clamped to a slot that another row may have
        mine = (at == source) & (place.index_select(0, at) == row)
        share = _shares(topk_weights, place).index_select(0, at)
        weighted = grad.index_select(0, at // slots).float().mul_(share[:, None])
        to_y = weighted.masked_fill_(~mine[:, None], 0.0).to(y.dtype)
    if need_topk_weights:
        rows = _by_slot(y, place).view(tokens, slots, y.shape[1])
        above = grad.float()[:, None].masked_fill((place < 0).view(tokens, slots, 1), 0.0)
        to_weights = (rows * above).sum(-1).to(topk_weights.dtype)
    return to_y, to_weights
