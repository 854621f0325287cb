"""Attention's forward in Triton where there is a mask: blocks of keys that no row of a tile sees are not visited, and
the mask is read where a block is seen in part only.

A pass before says of each tile of rows and block of keys what the mask, the diagonal, the window, the sequence and the
chunk together leave of it; a second lists, for each tile of rows, the blocks that are seen in part and those that are
seen whole, in order. Both read contents on the device: the grids follow from metadata, so a captured graph serves any
later mask. A mask that is broadcast over batch or heads has one list for all of them. A float mask is added: where it
is 0 it is not read, but only the diagonal, the window, the sequence and the chunk hide a block then.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention.forward_kernels import _FORWARD_DYNAMIC, _with_sink, attention_merge
from ferryman.ops.attention.tile_kernels import (
    LN2,
    LOG2E,
    _add_mask,
    _hide_keys,
    _in_units,
    _kept,
    _load_rows,
    _mask_index,
    _own_keys,
    _saturation,
    _sequence,
    _tile_and_head,
    _wide,
)
from ferryman.ops.attention.tiling_kernels import (
    _SMALL_TWO_WAVES,
    Config,
    _block_d,
    _config,
    _decode_config,
    _spills_allowed,
)
from ferryman.ops.attention.triton_kernels import (
    _dropping,
    _forward_constexprs,
    _heads_together,
    _mask_arguments,
    _options,
    _own_splits,
    _score_factors,
    _too_wide,
    _unit,
    _unit_last,
    blank,
    forms,
    outputs,
)

_IN_PART, _WHOLE = tl.constexpr(1), tl.constexpr(2)  # states of a block; 0: no row sees a key of it


@triton.jit
def _rows_of_tile(tile, head_id, group, num_queries, BLOCK_M: tl.constexpr, PACK: tl.constexpr):
    """(query, head, whether there is such a row) of a tile's rows. PACK: pairs of a query and a head of the group,
    query-major, of the key head ``head_id``."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACK:
        inside = rows < num_queries * group
        query = rows // group
        head = head_id * group + rows % group
    else:
        inside = rows < num_queries
        query = rows
        head = tl.zeros([BLOCK_M], tl.int32) + head_id
    return query, head, inside


@triton.jit(do_not_specialize=["group", "num_tiles", "table_heads", "num_queries", "num_keys", "window", "chunk"])
def attention_mask_states(
    mask,
    key_range,
    states,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    group,
    num_tiles,
    table_heads,
    num_queries,
    num_keys,
    window,
    chunk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    MASK: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    PACK: tl.constexpr,
):
    """states[table, block]: how a tile's rows see a block of keys. One tile and block a program."""
    table = tl.program_id(0)
    tile = table % num_tiles
    batch = table // num_tiles // table_heads
    query, head, row_inside = _rows_of_tile(tile, table // num_tiles % table_heads, group, num_queries, BLOCK_M, PACK)
    mask_row = _mask_index(query, num_queries, FOLD)
    offsets = head.to(tl.int64) * stride_mask_h + mask_row.to(tl.int64) * stride_mask_m
    mask_rows = mask + (_wide(batch) * stride_mask_b + offsets)[:, None]
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    position = query + (end - num_queries)
    own_first = position
    own_past = position
    if BOUNDED:
        own_first, own_past = _own_keys(position, begin, end, chunk)
    columns = tl.arange(0, BLOCK_N)
    if WIDE:
        columns = columns.to(tl.int64)
    start = tl.program_id(1) * BLOCK_N
    pointers = mask_rows + (_wide(start) * stride_mask_n + columns * stride_mask_n)[None, :]
    left = _hide_keys(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        position[:, None],
        (start + tl.arange(0, BLOCK_N))[None, :],
        end,
        window,
        own_first[:, None],
        own_past[:, None],
        CAUSAL,
        HAS_WINDOW,
        BOUNDED,
        FOLD,
    )
    masked = _add_mask(left, pointers, row_inside[:, None], (columns < num_keys - start)[None, :], MASK, FOLD, True)
    if MASK == 1:  # -inf that is added hides nothing: of an infinite score it makes a NaN
        left = masked
    beyond = (row_inside == 0)[:, None]
    hidden = tl.min(tl.min(((left == float("-inf")) | beyond).to(tl.int32), 1), 0)
    plain = tl.min(tl.min(((masked == 0.0) | beyond).to(tl.int32), 1), 0)
    state = tl.where(hidden == 1, 0, tl.where(plain == 1, _WHOLE, _IN_PART))
    tl.store(states + _wide(table) * tl.num_programs(1) + tl.program_id(1), state.to(tl.int8))


@triton.jit(do_not_specialize=["blocks"])
def attention_mask_lists(states, lists, counts, blocks, BLOCK: tl.constexpr):
    """lists[table, kind, ..counts[table, kind]]: the blocks that are seen in part (kind 0) and whole (1), in order."""
    table = _wide(tl.program_id(0))
    for kind in tl.static_range(2):
        length = 0
        for start in tl.range(0, blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            state = tl.load(states + table * blocks + block, mask=block < blocks, other=0)
            listed = (state == kind + 1).to(tl.int32)
            place = length + tl.cumsum(listed, 0) - listed
            tl.store(lists + (table * 2 + kind) * blocks + place, block, mask=listed == 1)
            length += tl.sum(listed, 0)
        tl.store(counts + table * 2 + kind, length)


@triton.jit
def _listed_range(
    acc,
    row_max,
    row_sum,
    q,
    k,
    v,
    mask,
    listed,
    row_inside,
    position,
    first,
    past,
    seed,
    query,
    head,
    drop_below,
    lo,
    hi,
    num_keys,
    window,
    stride_kn,
    stride_vn,
    stride_mask_n,
    score_scale,
    score_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_PART: tl.constexpr,
):
    """The online softmax over the blocks listed[lo:hi]. Not IN_PART: every row sees every key of them, and the mask
    adds nothing."""
    tile = tl.arange(0, BLOCK_N)
    if WIDE:
        tile = tile.to(tl.int64)
    for n in tl.range(lo, hi):
        start = tl.multiple_of(tl.load(listed + n) * BLOCK_N, BLOCK_N)
        k_tile = _load_rows(k + _wide(start) * stride_kn, stride_kn, tile, num_keys - start, HEAD_DIM, BLOCK_D, IN_PART)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if HAS_CAP:
            scores, _ = _saturation(scores * score_scale)
            scores = scores * score_cap
        else:
            scores = scores * score_scale
        if IN_PART:
            pointers = mask + (_wide(start) * stride_mask_n + tile * stride_mask_n)[None, :]
            tile_inside = (tile < num_keys - start)[None, :]
            scores = _add_mask(scores, pointers, row_inside[:, None], tile_inside, MASK, FOLD, True)
            keys = (start + tl.arange(0, BLOCK_N))[None, :]
            scores = _hide_keys(
                scores, position[:, None], keys, num_keys, window, first, past, CAUSAL, HAS_WINDOW, BOUNDED, FOLD
            )
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # -inf: no key seen yet. +inf: the sum becomes inf and the row inf/inf = NaN. Neither may give inf - inf.
        finite_max = tl.where(tl.abs(new_max) == float("inf"), 0.0, new_max)
        p = tl.exp2(scores - finite_max[:, None])
        decay = tl.exp2(row_max - finite_max)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if DROPOUT:
            p = p * _kept(seed, query[:, None], head[:, None], start, drop_below, BLOCK_N, False)
        v_tile = _load_rows(
            v + _wide(start) * stride_vn, stride_vn, tile, num_keys - start, VALUE_DIM, BLOCK_V, IN_PART
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _piece(count, SPLIT: tl.constexpr):
    """[lo, hi) of a list's entries that this program's piece has."""
    lo = 0
    hi = count
    if SPLIT:
        share = tl.cdiv(count, tl.num_programs(1))
        lo = tl.minimum(tl.program_id(1) * share, count)
        hi = tl.minimum(lo + share, count)
    return lo, hi


@triton.jit(do_not_specialize=[*_FORWARD_DYNAMIC, "tables_of_batch", "tables_of_head"])
def attention_masked(
    q,
    k,
    v,
    mask,
    sinks,
    key_range,
    dropout_seed,
    lists,
    counts,
    out,
    lse,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    tables_of_batch,
    tables_of_head,
    num_heads,
    group,
    heads_together,
    num_queries,
    num_keys,
    window,
    chunk,
    batch_heads,
    score_scale,
    score_cap,
    drop_below,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    NEGATE: tl.constexpr,
    PACK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_XCD: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attention_forward` over `attention_mask_lists`. SPLIT: each list is divided over grid axis 1.

    ``tables_of_batch`` and ``tables_of_head``: how many lists further the next sequence's and the next head's are
    (with PACK: the next key head's), 0 where they share them.
    """
    stride_qb, stride_qh, stride_qm = _in_units(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = _in_units(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = _in_units(stride_vb, stride_vh, stride_vn, UNIT)
    heads_in_grid = num_heads
    rows_in_head = num_queries
    if PACK:
        heads_in_grid = num_heads // group
        rows_in_head = num_queries * group
    num_tiles = tl.cdiv(rows_in_head, BLOCK_M)
    tile, head_id = _tile_and_head(num_tiles, batch_heads // num_heads * heads_in_grid, heads_together, NUM_XCD)
    if CAUSAL:
        tile = num_tiles - 1 - tile  # longest first
    batch = head_id // heads_in_grid
    own_head = head_id % heads_in_grid
    query, head, row_inside = _rows_of_tile(tile, own_head, group, num_queries, BLOCK_M, PACK)
    kv_head = own_head
    if not PACK:
        kv_head = own_head // group
    cols = tl.arange(0, BLOCK_D)

    q_rows = _wide(batch) * stride_qb + head.to(tl.int64) * stride_qh + query.to(tl.int64) * stride_qm
    inside = row_inside[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (cols[None, :] < HEAD_DIM)
    q_tile = tl.load(q + q_rows[:, None] + cols[None, :], mask=inside, other=0.0)
    if NEGATE:
        q_tile = -q_tile
    k += _wide(batch) * stride_kb + _wide(kv_head) * stride_kh
    v += _wide(batch) * stride_vb + _wide(kv_head) * stride_vh
    mask_row = _mask_index(query, num_queries, FOLD)
    offsets = head.to(tl.int64) * stride_mask_h + mask_row.to(tl.int64) * stride_mask_m
    mask_rows = mask + (_wide(batch) * stride_mask_b + offsets)[:, None]
    seed = dropout_seed
    if DROPOUT:
        seed = tl.load(dropout_seed + batch)
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    position = query + (end - num_queries)
    own_first = position
    own_past = position
    if BOUNDED:
        own_first, own_past = _own_keys(position, begin, end, chunk)
    table = _wide(batch) * tables_of_batch + _wide(own_head) * tables_of_head + tile
    blocks = tl.cdiv(num_keys, BLOCK_N)
    lists += table * 2 * blocks
    lo, hi = _piece(tl.load(counts + table * 2), SPLIT)
    whole_lo, whole_hi = _piece(tl.load(counts + table * 2 + 1), SPLIT)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _listed_range(
        acc,
        row_max,
        row_sum,
        q_tile,
        k,
        v,
        mask_rows,
        lists,
        row_inside,
        position,
        own_first[:, None],
        own_past[:, None],
        seed,
        query,
        head,
        drop_below,
        lo,
        hi,
        end,
        window,
        stride_kn,
        stride_vn,
        stride_mask_n,
        score_scale,
        score_cap,
        HEAD_DIM,
        BLOCK_D,
        VALUE_DIM,
        BLOCK_V,
        BLOCK_N,
        CAUSAL,
        HAS_WINDOW,
        BOUNDED,
        HAS_CAP,
        MASK,
        DROPOUT,
        WIDE,
        FOLD,
        PRECISION,
        True,
    )
    acc, row_max, row_sum = _listed_range(
        acc,
        row_max,
        row_sum,
        q_tile,
        k,
        v,
        mask_rows,
        lists + blocks,
        row_inside,
        position,
        own_first[:, None],
        own_past[:, None],
        seed,
        query,
        head,
        drop_below,
        whole_lo,
        whole_hi,
        end,
        window,
        stride_kn,
        stride_vn,
        stride_mask_n,
        score_scale,
        score_cap,
        HEAD_DIM,
        BLOCK_D,
        VALUE_DIM,
        BLOCK_V,
        BLOCK_N,
        CAUSAL,
        HAS_WINDOW,
        BOUNDED,
        HAS_CAP,
        MASK,
        DROPOUT,
        WIDE,
        FOLD,
        PRECISION,
        False,
    )

    empty = row_sum == 0.0  # a NaN sum is not empty
    safe_sum = tl.where(empty, 1.0, row_sum)
    result = tl.where(empty[:, None], 0.0, acc * (1.0 / safe_sum)[:, None])
    if DROPOUT:
        result *= keep_scale
    log_sum = tl.where(empty, float("-inf"), row_max + tl.log2(safe_sum))
    lse_rows = (_wide(batch) * num_heads + head) * num_queries + query
    columns = tl.arange(0, BLOCK_V)
    inside = row_inside[:, None]
    if VALUE_DIM < BLOCK_V:
        inside = inside & (columns[None, :] < VALUE_DIM)
    if SPLIT:
        lse_rows += _wide(tl.program_id(1)) * batch_heads * num_queries
        out_rows = lse_rows * VALUE_DIM
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=row_inside, other=0.0).to(tl.float32) * LOG2E
            kept, log_sum = _with_sink(log_sum, sink)
            result *= kept[:, None]
        log_sum *= LN2
        out_rows = ((_wide(batch) * num_queries + query) * num_heads + head) * VALUE_DIM
    tl.store(out + out_rows[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + lse_rows, log_sum, mask=row_inside)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows in tiles of their own head."""
    options = (causal, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed)
    config = _tiles(target, q.dtype, max(q.shape[3], v.shape[3]), pack=False)
    return _run(q, k, v, *options, target, config, 1, pack=False)


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query rows of a key head's whole group in one tile; its lists in one piece or several, each as long in
    blocks that are seen."""
    options = (causal, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed)
    config = _tiles(target, q.dtype, max(q.shape[3], v.shape[3]), pack=True)
    splits = 1
    if q.numel() and k.shape[2]:
        splits = _own_splits(config, target, q.dtype, q.shape[3], k.shape[0] * k.shape[1], k.shape[2])
    return _run(q, k, v, *options, target, config, splits, pack=True)


# Where the tiles of `attention_forward` and of decoding spill here: the second loop has its mask's registers for loads
# further ahead. By arch, of 16 bits; and NVIDIA's of float32. (padded head_dim, packed) -> tiles.
_HALF_TILES: dict[str, dict[tuple[int, bool], tuple[Any, ...]]] = {
    "gfx942": {(256, False): (64, 32, 8, 1, _SMALL_TWO_WAVES)},
}
_FLOAT_TILES: dict[tuple[int, bool], tuple[Any, ...]] = {
    (64, False): (32, 32, 8, 1),
    (128, True): (16, 16, 8, 1),
    (256, False): (32, 16, 16, 1),
}


def _tiles(target: Target, dtype: torch.dtype, dim: int, pack: bool) -> Config:
    padded = max(64, _block_d(dim))
    if dtype != torch.float32:
        own = _HALF_TILES.get(target.arch, {}).get((padded, pack))
    else:
        own = _FLOAT_TILES.get((padded, pack)) if target.vendor == "nvidia" else None
        if target.arch in ("sm_87", "sm_89") and not pack and 64 < dim < padded == 128:
            own = (32, 16, 16, 2)
    if own is not None:
        return Config(*own)
    return _decode_config(target, dtype, dim) if pack else _config(target, dtype, dim, "forward", True)


_LISTED_TOGETHER = 1024


def _lists(
    mask: torch.Tensor,
    strides: tuple[int, ...],
    key_range: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    group: int,
    wide: bool,
    config: Config,
    constexprs: dict[str, Any],
    window: int,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(lists, counts, how many lists further the next sequence's and the next head's are) for a mask's tiles."""
    batch, heads, queries, keys = shape
    pack = bool(constexprs["PACK"])
    tiles = triton.cdiv(queries * (group if pack else 1), config.block_m)
    table_batch = batch if strides[0] or key_range is not None else 1
    table_heads = (heads // group if pack else heads) if strides[1] else 1
    blocks, tables = triton.cdiv(keys, config.block_n), table_batch * table_heads * tiles
    states = torch.empty((tables, blocks), dtype=torch.int8, device=mask.device)
    lists = torch.empty((tables, 2, blocks), dtype=torch.int32, device=mask.device)
    counts = torch.empty((tables, 2), dtype=torch.int32, device=mask.device)
    same = ("BLOCK_M", "BLOCK_N", "CAUSAL", "HAS_WINDOW", "BOUNDED", "MASK", "FOLD", "PACK")
    launch(
        attention_mask_states,
        (tables, blocks),
        mask,
        key_range,
        states,
        *strides,
        group,
        tiles,
        table_heads,
        queries,
        keys,
        window,
        chunk,
        device=mask.device,
        WIDE=wide,
        **{name: constexprs[name] for name in same},
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
        device=mask.device,
        BLOCK=_LISTED_TOGETHER,
        num_warps=4,
        num_stages=1,
    )
    return lists, counts, table_heads * tiles if table_batch > 1 else 0, tiles if table_heads > 1 else 0


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
    config: Config,
    splits: int,
    *,
    pack: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    batch, heads, queries, dim = q.shape
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    group, device = heads // kv_heads, q.device
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    scale = dim**-0.5 if scale is None else scale
    score_scale, score_cap = _score_factors(abs(scale), softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    assert mask is not None
    sinks = None if sinks is None else sinks.contiguous()
    key_range = None if key_range is None else key_range.contiguous()
    bounded = key_range is not None or chunk is not None
    wide = _too_wide(config.block_n * k.stride(2), config.block_n * v.stride(2), config.block_n * mask_strides[3])
    constexprs = _forward_constexprs(
        config,
        target,
        q.dtype,
        (dim, width),
        bounded,
        causal,
        window is not None,
        softcap > 0,
        mask_kind,
        dropout_p > 0,
        wide,
        scale < 0,
        pack,
        splits > 1,
    )
    spans = min(window or 0, queries + keys), min(chunk or 0, queries + keys)
    lists, counts, of_batch, of_head = _lists(
        mask, mask_strides, key_range, (batch, heads, queries, keys), group, wide, config, constexprs, *spans
    )
    to, to_lse = out, lse
    if splits > 1:
        to = torch.empty((splits, *lse.shape, width), dtype=torch.float32, device=device)
        to_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=device)
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size()) * (1 if pack else group)
    tiles = triton.cdiv(queries * (group if pack else 1), config.block_m)
    launch(
        attention_masked,
        (batch * (kv_heads if pack else heads) * tiles, splits),
        q,
        k,
        v,
        mask,
        sinks,
        key_range,
        None if dropout_seed is None or not dropout_p else dropout_seed.contiguous(),
        lists,
        counts,
        to,
        to_lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask_strides,
        of_batch,
        of_head,
        heads,
        group,
        together,
        queries,
        keys,
        *spans,
        batch * heads,
        score_scale,
        score_cap,
        *_dropping(dropout_p),
        device=device,
        HAS_SINKS=sinks is not None and splits == 1,
        UNIT=_unit(q, k, v),
        **constexprs,
        **_options(config),
    )
    if splits > 1:
        launch(
            attention_merge,
            (lse.numel(),),
            to,
            to_lse,
            out,
            lse,
            sinks,
            heads,
            queries,
            splits,
            batch * heads,
            device=device,
            HEAD_DIM=width,
            BLOCK_D=_block_d(width),
            HAS_SINKS=sinks is not None,
            TOGETHER=16,
            num_warps=4,
            num_stages=1,
        )
    return out.transpose(1, 2), lse


# ---------------------------------------------------------------------------------------------- ahead-of-time compiling


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What the launchers compile on ``target``: `triton_kernels.forms` with a mask, of many rows and of one."""
    kind = getattr(torch, dtype)
    calls = []
    for form in forms(target, kind, head_dims):
        if form[7] is not None:
            run = attention if form[0].shape[2] > 1 else attention_decode
            calls.append(functools.partial(run, *(*form, target)))
    allowed = _spills_allowed(target, kind, "attention_forward")
    return [replace(one, spills_allowed=allowed if one.name == "attention_masked" else 0) for one in recorded(calls)]
