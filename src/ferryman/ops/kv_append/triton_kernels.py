"""Keys and values into a paged cache in Triton: one launch, one read and one write of the new tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_rows import lanes

PIECE = 1024  # elements of a token that a program moves at most


@triton.jit
def _move(
    new_ptr,
    cache_ptr,
    token,
    page,
    place,
    block,
    new_token,
    new_head,
    new_dim,
    cache_page,
    cache_place,
    cache_head,
    cache_dim,
    heads,
    dim,
    BLOCK: tl.constexpr,
):
    """A piece of one token: element e is that of head ``e // dim``."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    head = (at // dim).to(tl.int64)
    within = (at % dim).to(tl.int64)
    mask = at < heads * dim
    x = tl.load(new_ptr + token * new_token + head * new_head + within * new_dim, mask=mask)
    cache_ptr += page * cache_page + place * cache_place
    tl.store(cache_ptr + head * cache_head + within * cache_dim, x, mask=mask)


@triton.jit
def _append(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_token,
    k_head,
    k_unit,
    v_token,
    v_head,
    v_unit,
    k_cache_page,
    k_cache_place,
    k_cache_head,
    k_cache_unit,
    v_cache_page,
    v_cache_place,
    v_cache_head,
    v_cache_unit,
    places,
    page_size,
    k_heads,
    k_dim,
    v_heads,
    v_dim,
    BLOCK: tl.constexpr,
):
    """A program moves a piece of one token's key, or of its value."""
    k_blocks = tl.cdiv(k_heads * k_dim, BLOCK)
    blocks = k_blocks + tl.cdiv(v_heads * v_dim, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < places):
        page = slot // page_size
        place = slot % page_size
        if block < k_blocks:
            _move(
                k_ptr,
                k_cache_ptr,
                token,
                page,
                place,
                block,
                k_token,
                k_head,
                k_unit,
                k_cache_page,
                k_cache_place,
                k_cache_head,
                k_cache_unit,
                k_heads,
                k_dim,
                BLOCK,
            )
        else:
            _move(
                v_ptr,
                v_cache_ptr,
                token,
                page,
                place,
                block - k_blocks,
                v_token,
                v_head,
                v_unit,
                v_cache_page,
                v_cache_place,
                v_cache_head,
                v_cache_unit,
                v_heads,
                v_dim,
                BLOCK,
            )


def _plan(new: Tensor, cache: Tensor) -> tuple[int, int]:
    """(heads, head_dim) of a token, as one head where its heads lie one after the other in both: longer pieces."""
    heads, dim = new.shape[1:]
    joined = all(x.stride(-1) == 1 and (x.stride(-2) == dim or heads == 1) for x in (new, cache))
    return (1, heads * dim) if joined else (heads, dim)


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
    tokens, page_size = k.shape[0], k_cache.shape[1]
    places = k_cache.shape[0] * page_size
    k_size, v_size = (x.shape[1] * x.shape[2] for x in (k, v))
    if not tokens * (k_size + v_size) * places:
        return k_cache, v_cache
    block = min(triton.next_power_of_2(max(k_size, v_size)), PIECE)
    pieces = triton.cdiv(k_size, block) + triton.cdiv(v_size, block)
    warps = min(4, max(1, block * k.element_size() // (16 * lanes(target))))
    # a token without an element has no piece, and no head of width 0 is divided by
    sizes = tuple(max(n, 1) if i % 2 else n for i, n in enumerate((*_plan(k, k_cache), *_plan(v, v_cache))))
    if k_size == 0:
        sizes = (0, 1, *sizes[2:])
    if v_size == 0:
        sizes = (*sizes[:2], 0, 1)
    launch(
        _append,
        (tokens * pieces,),
        k,
        v,
        k_cache,
        v_cache,
        slots.contiguous(),
        *k.stride(),
        *v.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        places,
        page_size,
        *sizes,
        block,
        device=k.device,
        num_warps=warps,
    )
    return k_cache, v_cache


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Decoding and prefill of grouped heads, values as wide as keys and not, slots of both kinds, odd widths."""
    kind = getattr(torch, dtype)

    def calls(tokens: int, heads: int, dim: int, value_dim: int, size: int) -> None:
        k, v = (torch.empty(tokens, heads, d, dtype=kind, device="meta") for d in (dim, value_dim))
        caches = [torch.empty(64, size, heads, d, dtype=kind, device="meta") for d in (dim, value_dim)]
        across = torch.empty(heads, tokens, dim, dtype=kind, device="meta").transpose(0, 1)
        for slots in (torch.empty(tokens, dtype=i, device="meta") for i in (torch.int64, torch.int32)):
            kv_append(k, v, caches[0], caches[1], slots, None, None, target)
            kv_append(across, v, caches[0], caches[1], slots, None, None, target)

    shapes = [
        (1, 8, 128, 128, 16),
        (8192, 8, 128, 128, 16),
        (32, 1, 576, 512, 64),
        (64, 2, 64, 64, 1),
        (3, 3, 37, 5, 7),
    ]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
