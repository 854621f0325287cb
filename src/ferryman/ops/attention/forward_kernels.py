"""Attention's forward in Triton: one program per block of query rows.

The softmax is online, over the blocks of keys, in base 2. Few query rows (decoding) pack the heads of a group into one
tile and may split the keys over programs, merged in float32 by a second kernel. P is rounded to the input dtype before
P@V ("p").
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.ops.attention.tile_kernels import (
    LN2,
    LOG2E,
    _add_mask,
    _hide_keys,
    _in_units,
    _kept,
    _key_ranges,
    _load_rows,
    _mask_index,
    _own_keys,
    _saturation,
    _sequence,
    _tile_and_head,
    _wide,
)


@triton.jit
def _forward_range(
    acc,
    row_max,
    row_sum,
    q,
    k,
    v,
    mask,
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
    EDGE: tl.constexpr,
):
    """The online softmax over keys [lo, hi). EDGE: a block may reach beyond the keys, the diagonal or the window."""
    tile = tl.arange(0, BLOCK_N)
    if WIDE:
        tile = tile.to(tl.int64)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = _load_rows(k + _wide(start) * stride_kn, stride_kn, tile, num_keys - start, HEAD_DIM, BLOCK_D, EDGE)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if EDGE or HAS_CAP or MASK > 0:
            if HAS_CAP:
                scores, _ = _saturation(scores * score_scale)
                scores = scores * score_cap
            else:
                scores = scores * score_scale
            if MASK > 0:
                pointers = mask + (_wide(start) * stride_mask_n + tile * stride_mask_n)[None, :]
                tile_inside = (tile < num_keys - start)[None, :]
                scores = _add_mask(scores, pointers, row_inside[:, None], tile_inside, MASK, FOLD, EDGE)
            if EDGE:
                keys = (start + tl.arange(0, BLOCK_N))[None, :]
                scores = _hide_keys(
                    scores,
                    position[:, None],
                    keys,
                    num_keys,
                    window,
                    first,
                    past,
                    CAUSAL,
                    HAS_WINDOW,
                    BOUNDED,
                    FOLD,
                )
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # -inf: no key seen yet. +inf: the sum becomes inf and the row inf/inf = NaN. Neither may give inf - inf.
            finite_max = tl.where(tl.abs(new_max) == float("inf"), 0.0, new_max)
            p = tl.exp2(scores - finite_max[:, None])
        else:
            # score_scale >= 0, so the scale commutes with max, and scale and subtraction are one fma
            new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
            finite_max = tl.where(tl.abs(new_max) == float("inf"), 0.0, new_max)
            p = tl.exp2(scores * score_scale - finite_max[:, None])
        decay = tl.exp2(row_max - finite_max)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if DROPOUT:
            p = p * _kept(seed, query[:, None], head[:, None], start, drop_below, BLOCK_N, False)
        v_tile = _load_rows(v + _wide(start) * stride_vn, stride_vn, tile, num_keys - start, VALUE_DIM, BLOCK_V, EDGE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _with_sink(log_sum, sink):
    """(what is left of a row's probabilities, its log-sum-exp) with one logit more; both in base 2.

    A row that saw nothing has a log-sum of -inf and a result of 0; of infinite ones no difference may be taken.
    """
    top = tl.maximum(log_sum, sink)
    finite_top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    kept = 1.0 / (1.0 + tl.exp2(sink - tl.where(log_sum == float("-inf"), 0.0, log_sum)))
    return kept, finite_top + tl.log2(tl.exp2(log_sum - finite_top) + tl.exp2(sink - finite_top))


# Lengths, and what follows from them, never specialise: a new sequence length must not compile. Strides do:
# a mask whose rows are not 16-byte aligned (Sk off the 16s) is a second variant, whose element loads cost registers.
_FORWARD_DYNAMIC = [
    "num_heads",
    "group",
    "heads_together",
    "num_queries",
    "num_keys",
    "window",
    "chunk",
    "batch_heads",
    "score_scale",
    "score_cap",
    "drop_below",
    "keep_scale",
]


@triton.jit(do_not_specialize=_FORWARD_DYNAMIC)
def attention_forward(
    q,
    k,
    v,
    mask,
    sinks,
    key_range,
    dropout_seed,
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
    """PACK: a tile's rows are (query, head of the group) pairs, query-major. SPLIT: the keys are divided over grid
    axis 1, and out, lse are float32 partials [split][batch*heads][query], lse in base 2. BOUNDED: there is a key range
    (B, 2), or chunks. HAS_SINKS: a logit (H,) more in each row; with SPLIT it is the merging kernel's. DROPOUT: what
    `_kept` keeps counts ``keep_scale`` times."""
    stride_qb, stride_qh, stride_qm = _in_units(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = _in_units(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = _in_units(stride_vb, stride_vh, stride_vn, UNIT)
    rows_in_head = num_queries
    heads_in_grid = num_heads
    if PACK:
        rows_in_head = num_queries * group
        heads_in_grid = num_heads // group
    num_tiles = tl.cdiv(rows_in_head, BLOCK_M)
    tile, head_id = _tile_and_head(num_tiles, batch_heads // num_heads * heads_in_grid, heads_together, NUM_XCD)
    if CAUSAL:
        tile = num_tiles - 1 - tile  # longest first
    batch = head_id // heads_in_grid
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = rows < rows_in_head
    if PACK:
        kv_head = head_id % heads_in_grid
        head = kv_head * group + rows % group
        query = rows // group
        first = tile * BLOCK_M // group
        last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, rows_in_head - 1) // group
    else:
        head = tl.zeros([BLOCK_M], tl.int32) + head_id % heads_in_grid
        kv_head = head_id % heads_in_grid // group
        query = rows
        first = tile * BLOCK_M
        last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
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
    mask_rows = mask
    if MASK > 0:
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

    lo, hi, full_lo, full_hi = _key_ranges(
        first, last, num_queries, begin, end, window, chunk, BLOCK_N, CAUSAL, HAS_WINDOW, BOUNDED
    )
    if SPLIT:
        blocks = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
        share = tl.cdiv(blocks, tl.num_programs(1)) * BLOCK_N
        lo += tl.program_id(1) * share
        hi = tl.minimum(hi, lo + share)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW or BOUNDED:
        acc, row_max, row_sum = _forward_range(
            acc,
            row_max,
            row_sum,
            q_tile,
            k,
            v,
            mask_rows,
            row_inside,
            position,
            own_first[:, None],
            own_past[:, None],
            seed,
            query,
            head,
            drop_below,
            lo,
            full_lo,
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
    acc, row_max, row_sum = _forward_range(
        acc,
        row_max,
        row_sum,
        q_tile,
        k,
        v,
        mask_rows,
        row_inside,
        position,
        own_first[:, None],
        own_past[:, None],
        seed,
        query,
        head,
        drop_below,
        full_lo,
        full_hi,
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
    acc, row_max, row_sum = _forward_range(
        acc,
        row_max,
        row_sum,
        q_tile,
        k,
        v,
        mask_rows,
        row_inside,
        position,
        own_first[:, None],
        own_past[:, None],
        seed,
        query,
        head,
        drop_below,
        full_hi,
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


@triton.jit(do_not_specialize=["num_heads", "num_queries", "num_splits", "batch_heads"])
def attention_merge(
    partial,
    partial_lse,
    out,
    lse,
    sinks,
    num_heads,
    num_queries,
    num_splits,
    batch_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One row per program: the splits' outputs, weighted by their share of the softmax's sum.

    TOGETHER of them are loaded at once, in order: one by one, each waits for the L2. HEAD_DIM is the values' width.
    """
    row = _wide(tl.program_id(0))  # (batch * heads + head) * queries + query
    rows = _wide(batch_heads) * num_queries
    cols = tl.arange(0, BLOCK_D)
    inside = cols < HEAD_DIM
    row_max = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, TOGETHER):
        split = first + tl.arange(0, TOGETHER)
        there = split < num_splits
        where = split * rows + row
        pieces = (where * HEAD_DIM)[:, None] + cols[None, :]
        part = tl.load(partial + pieces, mask=there[:, None] & inside[None, :], other=0.0)
        log_sums = tl.load(partial_lse + where, mask=there, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(log_sums, 0))
        finite_max = tl.where(tl.abs(new_max) == float("inf"), 0.0, new_max)
        share = tl.exp2(log_sums - finite_max)
        decay = tl.exp2(row_max - finite_max)
        acc = acc * decay + tl.sum(share[:, None] * part, 0)
        total = total * decay + tl.sum(share, 0)
        row_max = new_max
    empty = total == 0.0
    safe_total = tl.where(empty, 1.0, total)
    query = row % num_queries
    head = row // num_queries % num_heads
    batch = row // num_queries // num_heads
    out_row = ((batch * num_queries + query) * num_heads + head) * HEAD_DIM
    result = tl.where(empty, 0.0, acc / safe_total)
    log_sum = tl.where(empty, float("-inf"), row_max + tl.log2(safe_total))
    if HAS_SINKS:
        kept, log_sum = _with_sink(log_sum, tl.load(sinks + head).to(tl.float32) * LOG2E)
        result *= kept
    tl.store(out + out_row + cols, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, log_sum * LN2)
