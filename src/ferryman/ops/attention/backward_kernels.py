"""Attention's backward in Triton: two kernels and no atomics, so results are bitwise reproducible.

Queries stay put for dQ (which also computes delta), keys stay put for dK and dV. P is rounded to the input dtype
before P^T@dO ("p"), dS before dS@K and dS^T@Q ("ds").
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.ops.attention.tile_kernels import (
    LOG2E,
    _add_mask,
    _hide_keys,
    _hide_queries,
    _in_units,
    _kept,
    _key_ranges,
    _load_rows,
    _mask_index,
    _own_keys,
    _own_queries,
    _place,
    _saturation,
    _sequence,
    _tile_and_head,
    _wide,
)


@triton.jit
def _dq_range(
    dq,
    weight,
    moment,
    q,
    do,
    k,
    v,
    mask,
    lse,
    delta,
    row_inside,
    position,
    first,
    past,
    seed,
    query,
    head,
    drop_below,
    keep_scale,
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
    SUMS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Over keys [lo, hi): dQ += dS K, or with SUMS weight += P and moment += P dP.

    ``lse`` in base 2, +inf for rows that see nothing.
    """
    tile = tl.arange(0, BLOCK_N)
    if WIDE:
        tile = tile.to(tl.int64)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = _load_rows(k + _wide(start) * stride_kn, stride_kn, tile, num_keys - start, HEAD_DIM, BLOCK_D, EDGE)
        v_tile = _load_rows(v + _wide(start) * stride_vn, stride_vn, tile, num_keys - start, VALUE_DIM, BLOCK_V, EDGE)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * score_scale
        slope = scores
        if HAS_CAP:
            scores, slope = _saturation(scores)
            scores = scores * score_cap
        if MASK > 0:
            pointers = mask + (_wide(start) * stride_mask_n + tile * stride_mask_n)[None, :]
            tile_inside = (tile < num_keys - start)[None, :]
            scores = _add_mask(scores, pointers, row_inside[:, None], tile_inside, MASK, FOLD, EDGE)
        if EDGE:
            keys = (start + tl.arange(0, BLOCK_N))[None, :]
            scores = _hide_keys(
                scores, position[:, None], keys, num_keys, window, first, past, CAUSAL, HAS_WINDOW, BOUNDED, FOLD
            )
        p = tl.exp2(scores - lse[:, None])
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        if DROPOUT:
            dp = dp * (_kept(seed, query[:, None], head, start, drop_below, BLOCK_N, False) * keep_scale)
        if SUMS:
            weight += tl.sum(p, 1)
            if EDGE:
                dp = tl.where(keys < num_keys, dp, 0.0)  # a padded key's is NaN where do is Inf: Inf * 0
            # Rounded before the sum: contracted into its first addition, a lane would round its own product otherwise
            # than its neighbour does, and the lanes of a row would hold different sums.
            moment += tl.sum(tl.fma(p, dp, 0.0), 1)
        else:
            ds = p * (dp - delta[:, None])
            if HAS_CAP:
                ds = ds * slope
            if EDGE:
                ds = tl.where(keys < num_keys, ds, 0.0)  # a padded key's slope is NaN where q is Inf: 0 * Inf
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, weight, moment


@triton.jit
def _dq_keys(
    q,
    do,
    k,
    v,
    mask,
    lse,
    delta,
    row_inside,
    position,
    first,
    past,
    seed,
    query,
    head,
    drop_below,
    keep_scale,
    lo,
    full_lo,
    full_hi,
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
    BLOCK_M: tl.constexpr,
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
    SUMS: tl.constexpr,
):
    """`_dq_range` over all keys that a block of queries sees: the left edge, whole blocks, the right edge."""
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    moment = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW or BOUNDED:
        dq, weight, moment = _dq_range(
            dq,
            weight,
            moment,
            q,
            do,
            k,
            v,
            mask,
            lse,
            delta,
            row_inside,
            position,
            first,
            past,
            seed,
            query,
            head,
            drop_below,
            keep_scale,
            lo,
            full_lo,
            num_keys,
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
            SUMS,
            True,
        )
    dq, weight, moment = _dq_range(
        dq,
        weight,
        moment,
        q,
        do,
        k,
        v,
        mask,
        lse,
        delta,
        row_inside,
        position,
        first,
        past,
        seed,
        query,
        head,
        drop_below,
        keep_scale,
        full_lo,
        full_hi,
        num_keys,
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
        SUMS,
        False,
    )
    dq, weight, moment = _dq_range(
        dq,
        weight,
        moment,
        q,
        do,
        k,
        v,
        mask,
        lse,
        delta,
        row_inside,
        position,
        first,
        past,
        seed,
        query,
        head,
        drop_below,
        keep_scale,
        full_hi,
        hi,
        num_keys,
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
        SUMS,
        True,
    )
    return dq, weight, moment


_BACKWARD_DYNAMIC = [
    "num_heads",
    "group",
    "share",
    "heads_together",
    "num_queries",
    "num_keys",
    "window",
    "chunk",
    "batch_heads",
    "apart",
    "score_scale",
    "score_cap",
    "grad_scale",
    "drop_below",
    "keep_scale",
]


@triton.jit(do_not_specialize=_BACKWARD_DYNAMIC)
def attention_backward_dq(
    q,
    k,
    v,
    mask,
    sinks,
    key_range,
    dropout_seed,
    out,
    grad_out,
    grad_lse,
    lse,
    delta,
    grad_q,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_gb,
    stride_gh,
    stride_gm,
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
    apart,
    score_scale,
    score_cap,
    grad_scale,
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
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    NUM_XCD: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ of one block of queries; also stores delta = rowsum(out * grad_out) - grad_lse for the dK/dV kernel.

    In float32 delta is rowsum(P dP), in a pass of its own: the two sides of dP - delta then share their errors. That of
    the rounded output leaves gradients 2 to 4 times as far off, which only float32 shows.
    """
    stride_qb, stride_qh, stride_qm = _in_units(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = _in_units(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = _in_units(stride_vb, stride_vh, stride_vn, UNIT)
    stride_ob, stride_oh, stride_om = _in_units(stride_ob, stride_oh, stride_om, UNIT)
    stride_gb, stride_gh, stride_gm = _in_units(stride_gb, stride_gh, stride_gm, UNIT)
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile, head_id = _tile_and_head(num_tiles, batch_heads, heads_together, NUM_XCD)
    if CAUSAL:
        tile = num_tiles - 1 - tile
    batch = head_id // num_heads
    head = head_id % num_heads
    kv_head = head // group
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    tile_rows = tl.arange(0, BLOCK_M)
    rows = first + tile_rows
    row_inside = rows < num_queries
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    seed = dropout_seed
    if DROPOUT:
        seed = tl.load(dropout_seed + batch)
    position = rows + (end - num_queries)
    own_first = position
    own_past = position
    if BOUNDED:
        own_first, own_past = _own_keys(position, begin, end, chunk)
    offsets = tile_rows
    if WIDE:
        offsets = tile_rows.to(tl.int64)
    left = num_queries - first

    q += _wide(batch) * stride_qb + _wide(head) * stride_qh + _wide(first) * stride_qm
    out += _wide(batch) * stride_ob + _wide(head) * stride_oh + _wide(first) * stride_om
    grad_out += _wide(batch) * stride_gb + _wide(head) * stride_gh + _wide(first) * stride_gm
    k += _wide(batch) * stride_kb + _wide(kv_head) * stride_kh
    v += _wide(batch) * stride_vb + _wide(kv_head) * stride_vh
    per_row = _wide(head_id) * num_queries + rows
    q_tile = _load_rows(q, stride_qm, offsets, left, HEAD_DIM, BLOCK_D, True)
    do_tile = _load_rows(grad_out, stride_gm, offsets, left, VALUE_DIM, BLOCK_V, True)
    row_lse = tl.load(lse + per_row, mask=row_inside, other=float("-inf")) * LOG2E
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)  # rows that see nothing: P = exp2(-inf) = 0
    mask_rows = mask
    if MASK > 0:
        mask_base = _wide(batch) * stride_mask_b + _wide(head) * stride_mask_h
        mask_row = _mask_index(rows, num_queries, FOLD)
        mask_rows = mask + (mask_base + mask_row.to(tl.int64) * stride_mask_m)[:, None]

    lo, hi, full_lo, full_hi = _key_ranges(
        first, last, num_queries, begin, end, window, chunk, BLOCK_N, CAUSAL, HAS_WINDOW, BOUNDED
    )
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)
    if q.dtype.element_ty == tl.float32:
        _, weight, moment = _dq_keys(
            q_tile,
            do_tile,
            k,
            v,
            mask_rows,
            row_lse,
            row_lse,
            row_inside,
            position,
            own_first[:, None],
            own_past[:, None],
            seed,
            rows,
            head,
            drop_below,
            keep_scale,
            lo,
            full_lo,
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
            BLOCK_M,
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
        if HAS_SINKS:  # the sink's probability, so that the sum stays 1 but for the rounding of lse
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            weight += tl.where(sink == row_lse, 1.0, tl.exp2(sink - row_lse))
        row_delta = moment / tl.where(weight == 0.0, 1.0, weight)
    else:
        o_tile = _load_rows(out, stride_om, offsets, left, VALUE_DIM, BLOCK_V, True)
        row_delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        row_delta -= tl.load(grad_lse + per_row, mask=row_inside, other=0.0).to(tl.float32)
    tl.store(delta + per_row, row_delta, mask=row_inside)
    dq, _, _ = _dq_keys(
        q_tile,
        do_tile,
        k,
        v,
        mask_rows,
        row_lse,
        row_delta,
        row_inside,
        position,
        own_first[:, None],
        own_past[:, None],
        seed,
        rows,
        head,
        drop_below,
        keep_scale,
        lo,
        full_lo,
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
        BLOCK_M,
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

    cols = tl.arange(0, BLOCK_D)
    inside = row_inside[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (cols[None, :] < HEAD_DIM)
    where = (_place(head_id, rows, num_queries, apart) * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(grad_q + where, (dq * grad_scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _dkv_range(
    dk,
    dv,
    k,
    v,
    q,
    do,
    mask,
    lse,
    delta,
    keys,
    key_inside,
    first,
    past,
    seed,
    first_key,
    head,
    drop_below,
    keep_scale,
    lo,
    hi,
    num_queries,
    num_keys,
    window,
    stride_qm,
    stride_gm,
    stride_mask_m,
    score_scale,
    score_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    """dK += dS^T Q and dV += P^T dO over queries [lo, hi). Scores are kept transposed, (keys, queries).

    EDGE: a block may reach beyond the queries, the diagonal or the window. Keys beyond the end touch only rows that are
    never stored.
    """
    tile = tl.arange(0, BLOCK_M)
    offsets = tile
    if WIDE:
        offsets = tile.to(tl.int64)
    for start in tl.range(lo, hi, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        left = num_queries - start
        rows = start + tile
        row_inside = tile < left
        q_tile = _load_rows(q + _wide(start) * stride_qm, stride_qm, offsets, left, HEAD_DIM, BLOCK_D, EDGE)
        if EDGE:
            row_lse = tl.load(lse + rows, mask=row_inside, other=0.0) * LOG2E
            row_delta = tl.load(delta + rows, mask=row_inside, other=0.0)
        else:
            row_lse = tl.load(lse + rows) * LOG2E
            row_delta = tl.load(delta + rows)
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * score_scale
        slope = scores
        if HAS_CAP:
            scores, slope = _saturation(scores)
            scores = scores * score_cap
        if MASK > 0:
            pointers = mask + (_wide(start) * stride_mask_m + offsets * stride_mask_m)[None, :]
            scores = _add_mask(scores, pointers, key_inside[:, None], row_inside[None, :], MASK, FOLD, EDGE)
        if EDGE:
            scores = _hide_queries(
                scores,
                rows[None, :],
                row_inside[None, :],
                keys[:, None],
                num_queries,
                num_keys,
                window,
                first,
                past,
                CAUSAL,
                HAS_WINDOW,
                BOUNDED,
                FOLD,
            )
        p = tl.exp2(scores - row_lse[None, :])
        do_tile = _load_rows(do + _wide(start) * stride_gm, stride_gm, offsets, left, VALUE_DIM, BLOCK_V, EDGE)
        if DROPOUT:
            kept = _kept(seed, rows[None, :], head, first_key, drop_below, BLOCK_N, True)
            dv = tl.dot((p * kept).to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION) * (kept * keep_scale)
        else:
            dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if HAS_CAP:
            ds = ds * slope
        if EDGE:
            ds = tl.where(row_inside[None, :], ds, 0.0)  # 0 * v is NaN where v is Inf
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_BACKWARD_DYNAMIC)
def attention_backward_dkv(
    q,
    k,
    v,
    mask,
    key_range,
    dropout_seed,
    grad_out,
    lse,
    delta,
    grad_k,
    grad_v,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    num_heads,
    group,
    share,
    heads_together,
    num_queries,
    num_keys,
    window,
    chunk,
    batch_heads,
    apart,
    score_scale,
    score_cap,
    grad_scale,
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
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    NUM_XCD: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of one block of keys of one KV head, summed over the heads of its group in order: no atomics.
    SHARED: over ``share`` of them; programs write parts, one after the other in grad_k and in grad_v."""
    stride_qb, stride_qh, stride_qm = _in_units(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = _in_units(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = _in_units(stride_vb, stride_vh, stride_vn, UNIT)
    stride_gb, stride_gh, stride_gm = _in_units(stride_gb, stride_gh, stride_gm, UNIT)
    kv_heads = num_heads // group
    tile, head_id = _tile_and_head(tl.cdiv(num_keys, BLOCK_N), batch_heads // group, heads_together, NUM_XCD)
    batch = head_id // kv_heads
    kv_head = head_id % kv_heads
    first = tile * BLOCK_N
    last = tl.minimum(first + BLOCK_N, num_keys) - 1
    tile_keys = tl.arange(0, BLOCK_N)
    keys = first + tile_keys
    key_inside = keys < num_keys
    offsets = tile_keys
    if WIDE:
        offsets = tile_keys.to(tl.int64)
    left = num_keys - first
    k += _wide(batch) * stride_kb + _wide(kv_head) * stride_kh + _wide(first) * stride_kn
    v += _wide(batch) * stride_vb + _wide(kv_head) * stride_vh + _wide(first) * stride_vn
    k_tile = _load_rows(k, stride_kn, offsets, left, HEAD_DIM, BLOCK_D, True)
    v_tile = _load_rows(v, stride_vn, offsets, left, VALUE_DIM, BLOCK_V, True)

    # rows [lo, hi) see a key of this block, rows [full_lo, full_hi) see all of them
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    seed = dropout_seed
    if DROPOUT:
        seed = tl.load(dropout_seed + batch)
    shift = end - num_queries
    lo = 0
    hi = num_queries
    full_lo = 0
    full_hi = num_queries
    if CAUSAL:
        lo = tl.maximum(0, first - shift)
        full_lo = tl.maximum(0, last - shift)
    elif HAS_WINDOW:
        lo = tl.maximum(0, first - shift - window + 1)
        full_lo = tl.maximum(0, last - shift - window + 1)
    lo = lo // BLOCK_M * BLOCK_M
    full_lo = (full_lo + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_WINDOW:
        hi = tl.minimum(num_queries, last - shift + window)
        full_hi = tl.maximum(tl.minimum(num_queries, first - shift + window), 0)
    own_first = keys
    own_past = keys
    if BOUNDED:
        own_first, own_past = _own_queries(keys, begin, end, chunk, shift, num_queries)
        low, past_low = _own_queries(tl.maximum(first, begin), begin, end, chunk, shift, num_queries)
        high, past_high = _own_queries(tl.minimum(last, end - 1), begin, end, chunk, shift, num_queries)
        lo = tl.maximum(lo, low // BLOCK_M * BLOCK_M)
        hi = tl.minimum(hi, past_high)
        full_lo = tl.maximum(full_lo, (high + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
        whole = (first >= begin) & (last < end)  # else every block hides the keys outside
        full_hi = tl.where(whole, tl.minimum(full_hi, past_low), 0)
    full_hi = full_hi // BLOCK_M * BLOCK_M
    full_lo = tl.maximum(tl.minimum(full_lo, hi), lo)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    first_member = 0
    past_member = group
    if SHARED:
        first_member = tl.program_id(1) * share
        past_member = tl.minimum(first_member + share, group)
    for member in tl.range(first_member, past_member):
        head = kv_head * group + member
        q_head = q + (_wide(batch) * stride_qb + _wide(head) * stride_qh)
        do_head = grad_out + (_wide(batch) * stride_gb + _wide(head) * stride_gh)
        lse_head = lse + (_wide(batch) * num_heads + head) * num_queries
        delta_head = delta + (_wide(batch) * num_heads + head) * num_queries
        mask_keys = mask
        if MASK > 0:
            mask_base = _wide(batch) * stride_mask_b + _wide(head) * stride_mask_h
            mask_key = _mask_index(keys, num_keys, FOLD)
            mask_keys = mask + (mask_base + mask_key.to(tl.int64) * stride_mask_n)[:, None]
        if CAUSAL or HAS_WINDOW or BOUNDED:
            dk, dv = _dkv_range(
                dk,
                dv,
                k_tile,
                v_tile,
                q_head,
                do_head,
                mask_keys,
                lse_head,
                delta_head,
                keys,
                key_inside,
                own_first[:, None],
                own_past[:, None],
                seed,
                first,
                head,
                drop_below,
                keep_scale,
                lo,
                full_lo,
                num_queries,
                end,
                window,
                stride_qm,
                stride_gm,
                stride_mask_m,
                score_scale,
                score_cap,
                HEAD_DIM,
                BLOCK_D,
                VALUE_DIM,
                BLOCK_V,
                BLOCK_M,
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
        dk, dv = _dkv_range(
            dk,
            dv,
            k_tile,
            v_tile,
            q_head,
            do_head,
            mask_keys,
            lse_head,
            delta_head,
            keys,
            key_inside,
            own_first[:, None],
            own_past[:, None],
            seed,
            first,
            head,
            drop_below,
            keep_scale,
            full_lo,
            full_hi,
            num_queries,
            end,
            window,
            stride_qm,
            stride_gm,
            stride_mask_m,
            score_scale,
            score_cap,
            HEAD_DIM,
            BLOCK_D,
            VALUE_DIM,
            BLOCK_V,
            BLOCK_M,
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
        dk, dv = _dkv_range(
            dk,
            dv,
            k_tile,
            v_tile,
            q_head,
            do_head,
            mask_keys,
            lse_head,
            delta_head,
            keys,
            key_inside,
            own_first[:, None],
            own_past[:, None],
            seed,
            first,
            head,
            drop_below,
            keep_scale,
            full_hi,
            hi,
            num_queries,
            end,
            window,
            stride_qm,
            stride_gm,
            stride_mask_m,
            score_scale,
            score_cap,
            HEAD_DIM,
            BLOCK_D,
            VALUE_DIM,
            BLOCK_V,
            BLOCK_M,
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

    cols = tl.arange(0, BLOCK_D)
    inside = key_inside[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (cols[None, :] < HEAD_DIM)
    place = _place(batch * kv_heads + kv_head, keys, num_keys, apart)
    if SHARED:
        place += _wide(tl.program_id(1)) * (batch_heads // group) * num_keys
    where = (place * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(grad_k + where, (dk * grad_scale).to(grad_k.dtype.element_ty), mask=inside)
    columns = tl.arange(0, BLOCK_V)
    inside = key_inside[:, None]
    if VALUE_DIM < BLOCK_V:
        inside = inside & (columns[None, :] < VALUE_DIM)
    where = (place * VALUE_DIM)[:, None] + columns[None, :]
    if DROPOUT:
        dv *= keep_scale
    tl.store(grad_v + where, dv.to(grad_v.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["elements", "splits", "grad_scale"])
def attention_backward_parts(parts, grad, elements, splits, grad_scale, BLOCK: tl.constexpr):
    """grad: the sum of parts (splits, elements) float32, in order, scaled and rounded."""
    index = _wide(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(parts + _wide(split) * elements + index, mask=inside, other=0.0)
    tl.store(grad + index, (total * grad_scale).to(grad.dtype.element_ty), mask=inside)
