"""What a bool mask and all else that hides keys leave of tiles of 128 queries, for Hopper's kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ferryman.backends.triton import launch
from ferryman.ops.attention.masked_kernels import attention_mask_lists
from ferryman.ops.attention.tile_kernels import _hide_keys, _own_keys, _sequence, _wide

ROWS = tl.constexpr(128)  # of a tile
_LISTED_TOGETHER = 1024


@triton.jit(do_not_specialize=["num_tiles", "table_heads", "num_queries", "num_keys", "window", "chunk"])
def attention_bits_of_mask(
    mask,
    key_range,
    bits,
    states,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    num_tiles,
    table_heads,
    num_queries,
    num_keys,
    window,
    chunk,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """bits[table, block, word, row]: which of 32 keys a query sees; states[table, block]: 0 where no query of the tile
    sees a key of the block, 2 where each sees all, else 1. One tile and block a program."""
    table = tl.program_id(0)
    block = tl.program_id(1)
    batch = table // num_tiles // table_heads
    head = table // num_tiles % table_heads
    query = table % num_tiles * ROWS + tl.arange(0, ROWS)
    key = block * (32 * WORDS) + tl.arange(0, 32 * WORDS)
    inside = (query < num_queries)[:, None]
    rows = mask + _wide(batch) * stride_mask_b + _wide(head) * stride_mask_h
    rows += query.to(tl.int64)[:, None] * stride_mask_m
    columns = key.to(tl.int64)[None, :] * stride_mask_n
    given = tl.load(rows + columns, mask=inside & (key < num_keys)[None, :], other=0) != 0
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    position = query + (end - num_queries)
    first = position
    past = position
    if BOUNDED:
        first, past = _own_keys(position, begin, end, chunk)
    left = tl.where(given, 0.0, float("-inf"))
    left = _hide_keys(
        left,
        position[:, None],
        key[None, :],
        end,
        window,
        first[:, None],
        past[:, None],
        CAUSAL,
        HAS_WINDOW,
        BOUNDED,
        False,
    )
    seen = (left == 0.0).to(tl.int32)
    any_seen = tl.max(tl.max(seen, 1), 0)
    all_seen = tl.min(tl.min(tl.where(inside, seen, 1), 1), 0)
    place = _wide(table) * tl.num_programs(1) + block
    tl.store(states + place, tl.where(any_seen == 0, 0, 1 + all_seen).to(tl.int8))
    shifted = tl.reshape(seen, [ROWS, WORDS, 32]) << tl.arange(0, 32)[None, None, :]
    word = tl.arange(0, WORDS)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(bits + place * (WORDS * ROWS) + word, tl.sum(shifted, 2))


def tiles_of_mask(
    mask: torch.Tensor,
    key_range: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    causal: bool,
    window: int | None,
    chunk: int | None,
    block_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """(bits, lists of blocks, their lengths, how many tables further the next sequence's and the next head's are).

    shape: batch, heads, queries and keys. mask: bool, expandable to it. block_keys: of a block, 32 in a word. A list
    has the blocks that a tile sees in part, then, ``blocks`` further, those that it sees whole."""
    batch, heads, queries, keys = shape
    view = mask.expand(shape).view(torch.int8)
    words = block_keys // 32
    tiles, blocks = triton.cdiv(queries, ROWS.value), triton.cdiv(keys, block_keys)
    table_batch = batch if view.stride(0) or key_range is not None else 1
    table_heads = heads if view.stride(1) else 1
    tables, device = table_batch * table_heads * tiles, mask.device
    bits = torch.empty((tables, blocks, words, ROWS.value), dtype=torch.int32, device=device)
    states = torch.empty((tables, blocks), dtype=torch.int8, device=device)
    lists = torch.empty((tables, 2, blocks), dtype=torch.int32, device=device)
    counts = torch.empty((tables, 2), dtype=torch.int32, device=device)
    launch(
        attention_bits_of_mask,
        (tables, blocks),
        view,
        key_range,
        bits,
        states,
        *view.stride(),
        tiles,
        table_heads,
        queries,
        keys,
        min(window or 0, queries + keys),
        min(chunk or 0, queries + keys),
        device=device,
        CAUSAL=causal,
        HAS_WINDOW=window is not None,
        BOUNDED=key_range is not None or chunk is not None,
        ROWS=ROWS.value,
        WORDS=words,
        num_warps=8,
        num_stages=1,
    )
    launch(
        attention_mask_lists,
        (tables,),
        states,
        lists,
        counts,
        blocks,
        device=device,
        BLOCK=_LISTED_TOGETHER,
        num_warps=4,
        num_stages=1,
    )
    return bits, lists, counts, table_heads * tiles if table_batch > 1 else 0, tiles if table_heads > 1 else 0
