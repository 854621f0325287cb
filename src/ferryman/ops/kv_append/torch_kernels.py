"""Keys and values into a paged cache through PyTorch's index_put, without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.backends.base import Target


def _append(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """A token that is skipped repeats the write of the first one that is not; without any, slot 0 is rewritten."""
    size, places = cache.shape[1], cache.shape[0] * cache.shape[1]
    if new.numel() == 0 or places == 0:
        return
    slots = slots.long()
    inside = (slots >= 0) & (slots < places)
    first = inside.long().argmax(0, keepdim=True)
    some = inside.any()
    # index_select: indexing by a tensor without dimensions would read its value on the host
    place = torch.where(inside, slots, torch.where(some, slots.index_select(0, first), 0))
    again = torch.where(some, new.index_select(0, first), cache[0, 0])
    cache[place // size, place % size] = torch.where(inside[:, None, None], new, again)


def kv_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    _append(k, k_cache, slots)
    _append(v, v_cache, slots)
    return k_cache, v_cache
