"""Attention in Triton, forward and backward, on NVIDIA, AMD and the interpreter.

Forward: one program per block of query rows, an online softmax over the blocks of keys in base 2. Few query rows
(decoding) pack the heads of a group into one tile and may split the keys over programs, merged in float32 by a second
kernel.
Backward: two kernels and no atomics, so results are bitwise reproducible: queries stay put for dQ (which also computes
delta), keys stay put for dK and dV. Few query rows have another (few_queries_kernels.py), which reads K and V once, and
Hopper its own for both passes (hopper_*_kernels.py): lines of the menu beside these.

Rounding points: P is rounded to the input dtype before P@V and P^T@dO ("p"), dS before dS@K and dS^T@Q ("ds").
An invisible key has weight exactly 0; a NaN or Inf in *V* at an invisible key still reaches the rows of its tile, as
0 * NaN does in the definition.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, interpreting, launch, recorded

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = 1.4426950408889634

# How a mask tensor is read; 0 is none.
_BOOL_MASK, _FLOAT_MASK = 1, 2


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _wide(x):
    """As int64: tile bases may lie beyond 2^31 elements. Takes a constexpr, a tensor, or the interpreter's int."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def _tile_and_head(num_tiles, num_heads, heads_together, NUM_XCD: tl.constexpr):
    """Which tile and head this program serves: tile-major within as many heads as have K and V in L2 together.

    Programs go round-robin over the XCDs of an MI300, each with its own L2, so there the ids are first regrouped.
    """
    pid = tl.program_id(0)
    if NUM_XCD > 1:
        total = num_tiles * num_heads
        xcd = pid % NUM_XCD
        pid = xcd * (total // NUM_XCD) + tl.minimum(xcd, total % NUM_XCD) + pid // NUM_XCD
    group_size = heads_together * num_tiles
    first = (pid // group_size) * heads_together
    count = tl.minimum(heads_together, num_heads - first)
    within = pid % group_size
    return within // count, first + within % count


@triton.jit
def _load_rows(base, stride, rows, limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """A (rows, BLOCK_D) tile; zero beyond HEAD_DIM and, where CHECK, from row ``limit`` on."""
    cols = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride + cols[None, :]
    if CHECK:
        if HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=(rows[:, None] < limit) & (cols[None, :] < HEAD_DIM), other=0.0)
        else:
            tile = tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    else:
        if HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _saturation(x):
    """(tanh x, 1 - tanh^2 x). The series below 1/4 is good to 1e-8; the exponential form cancels there.

    Approximate division, unlike triton_lang.tanh: its error, times the cap, is below that of the scores' own sum.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    tanh = tl.where(size < 0.25, x * series, tl.where(x < 0, -large, large))
    return tanh, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _visible(position, key, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """``position`` is the key index that the query row is aligned with, i + Sk - Sq. One of both always applies."""
    if CAUSAL:
        seen = key <= position
        if HAS_WINDOW:
            seen = seen & (key > position - window)
    else:
        seen = (key > position - window) & (key < position + window)
    return seen


# FOLD. A mask over the elements of a tile is 64 bits in a pair of scalar registers for each of them on CDNA, which has
# 102: two comparisons and their conjunction for every element spilled 20 to 150. There the bounds are folded first,
# once for a row, and every element is compared once. On NVIDIA the plain form keeps fewer registers alive (D128 dK/dV
# causal: 112 bytes of spills against 176).


@triton.jit
def _within(x, begin, end):
    """begin <= x < end, where begin <= end, in one comparison."""
    return (x - begin).to(tl.uint32, bitcast=True) < (end - begin).to(tl.uint32, bitcast=True)


@triton.jit
def _hide_keys(
    scores, position, key, num_keys, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, FOLD: tl.constexpr
):
    """-inf where ``key``, a row of the tile's keys, is past the end or invisible to a query row at ``position``."""
    if FOLD and (CAUSAL or HAS_WINDOW):
        end = position + 1
        if not CAUSAL:
            end = position + window
        end = tl.minimum(end, num_keys)
        if HAS_WINDOW:
            begin = tl.maximum(position - window + 1, 0)
            scores = tl.where(_within(key, begin, tl.maximum(end, begin)), scores, float("-inf"))
        else:
            scores = tl.where(key < end, scores, float("-inf"))
    else:
        scores = tl.where(key < num_keys, scores, float("-inf"))
        if CAUSAL or HAS_WINDOW:
            scores = tl.where(_visible(position, key, window, CAUSAL, HAS_WINDOW), scores, float("-inf"))
    return scores


@triton.jit
def _hide_queries(
    scores, query, query_inside, key, num_queries, num_keys, window,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """-inf where ``query``, a row of the tile's queries, is past the end or does not see ``key``, a column."""
    if FOLD and (CAUSAL or HAS_WINDOW):
        row = key + (num_queries - num_keys)  # that the key is aligned with
        begin = row
        if not CAUSAL:
            begin = row - window + 1
        begin = tl.maximum(begin, 0)
        end = num_queries
        if HAS_WINDOW:
            end = tl.minimum(row + window, num_queries)
        scores = tl.where(_within(query, begin, tl.maximum(end, begin)), scores, float("-inf"))
    else:
        scores = tl.where(query_inside, scores, float("-inf"))
        if CAUSAL or HAS_WINDOW:
            seen = _visible(query + (num_keys - num_queries), key, window, CAUSAL, HAS_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _mask_index(index, limit, FOLD: tl.constexpr):
    """Rows (for dK/dV keys) past the end, which are not stored: with FOLD they read the last one's mask."""
    if FOLD:
        index = tl.minimum(index, limit - 1)
    return index


@triton.jit
def _add_mask(
    scores, pointers, kept_inside, tile_inside, MASK: tl.constexpr, FOLD: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Scores are in base 2. A bool mask arrives as int8. ``kept_inside`` is of the dimension that stays put."""
    if FOLD:
        if EDGE:
            values = tl.load(pointers, mask=tile_inside, other=0)
        else:
            values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=kept_inside & tile_inside, other=0)
    if MASK == 1:
        scores = tl.where(values != 0, scores, float("-inf"))
    else:
        scores += values.to(tl.float32) * LOG2E
    return scores


@triton.jit
def _key_ranges(
    first, last, num_queries, num_keys, window,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """[lo, hi) holds every key that a row in first..last sees, [full_lo, full_hi) whole blocks that all of them see."""
    shift = num_keys - num_queries
    lo = 0
    hi = num_keys
    full_lo = 0
    full_hi = num_keys
    if CAUSAL:
        hi = tl.minimum(num_keys, last + shift + 1)
        full_hi = tl.minimum(num_keys, first + shift + 1)
    elif HAS_WINDOW:
        hi = tl.minimum(num_keys, last + shift + window)
        full_hi = tl.minimum(num_keys, first + shift + window)
    if HAS_WINDOW:
        lo = tl.maximum(0, first + shift - window + 1) // BLOCK_N * BLOCK_N
        full_lo = (tl.maximum(0, last + shift - window + 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_hi = tl.maximum(full_hi, 0) // BLOCK_N * BLOCK_N
    return lo, hi, full_lo, full_hi


@triton.jit
def _forward_range(
    acc, row_max, row_sum, q, k, v, mask, row_inside, position, lo, hi, num_keys, window,
    stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
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
                scores = _hide_keys(scores, position[:, None], keys, num_keys, window, CAUSAL, HAS_WINDOW, FOLD)
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
        v_tile = _load_rows(v + _wide(start) * stride_vn, stride_vn, tile, num_keys - start, HEAD_DIM, BLOCK_D, EDGE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


# Lengths, and what follows from them, never specialise: a new sequence length must not compile. Strides do:
# a mask whose rows are not 16-byte aligned (Sk off the 16s) is a second variant, whose element loads cost registers.
_FORWARD_DYNAMIC = [
    "num_heads", "group", "heads_together", "num_queries", "num_keys", "window", "batch_heads",
    "score_scale", "score_cap",
]  # fmt: skip


@triton.jit(do_not_specialize=_FORWARD_DYNAMIC)
def attention_forward(
    q, k, v, mask, out, lse,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    num_heads, group, heads_together, num_queries, num_keys, window, batch_heads, score_scale, score_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    NEGATE: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr, NUM_XCD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PACK: a tile's rows are (query, head of the group) pairs, query-major. SPLIT: the keys are divided over grid
    axis 1, and out, lse are float32 partials [split][batch*heads][query], lse in base 2."""
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
    position = query + (num_keys - num_queries)

    lo, hi, full_lo, full_hi = _key_ranges(first, last, num_queries, num_keys, window, BLOCK_N, CAUSAL, HAS_WINDOW)
    if SPLIT:
        blocks = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
        share = tl.cdiv(blocks, tl.num_programs(1)) * BLOCK_N
        lo += tl.program_id(1) * share
        hi = tl.minimum(hi, lo + share)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        acc, row_max, row_sum = _forward_range(
            acc, row_max, row_sum, q_tile, k, v, mask_rows, row_inside, position, lo, full_lo, num_keys, window,
            stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, True,
        )  # fmt: skip
    acc, row_max, row_sum = _forward_range(
        acc, row_max, row_sum, q_tile, k, v, mask_rows, row_inside, position, full_lo, full_hi, num_keys, window,
        stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, False,
    )  # fmt: skip
    acc, row_max, row_sum = _forward_range(
        acc, row_max, row_sum, q_tile, k, v, mask_rows, row_inside, position, full_hi, hi, num_keys, window,
        stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, True,
    )  # fmt: skip

    empty = row_sum == 0.0  # a NaN sum is not empty
    safe_sum = tl.where(empty, 1.0, row_sum)
    result = tl.where(empty[:, None], 0.0, acc * (1.0 / safe_sum)[:, None])
    log_sum = tl.where(empty, float("-inf"), row_max + tl.log2(safe_sum))
    lse_rows = (_wide(batch) * num_heads + head) * num_queries + query
    if SPLIT:
        lse_rows += _wide(tl.program_id(1)) * batch_heads * num_queries
        out_rows = lse_rows * HEAD_DIM
    else:
        log_sum *= LN2
        out_rows = ((_wide(batch) * num_queries + query) * num_heads + head) * HEAD_DIM
    tl.store(out + out_rows[:, None] + cols[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + lse_rows, log_sum, mask=row_inside)


@triton.jit(do_not_specialize=["num_heads", "num_queries", "num_splits", "batch_heads"])
def attention_merge(
    partial, partial_lse, out, lse, num_heads, num_queries, num_splits, batch_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One row per program: the splits' outputs, weighted by their share of the softmax's sum.

    TOGETHER of them are loaded at once, in order: one by one, each waits for the L2.
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
    tl.store(out + out_row + cols, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(empty, float("-inf"), (row_max + tl.log2(safe_total)) * LN2))


@triton.jit
def _dq_range(
    dq, weight, moment, q, do, k, v, mask, lse, delta, row_inside, position, lo, hi, num_keys, window,
    stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Over keys [lo, hi): dQ += dS K, or with SUMS weight += P and moment += P dP.

    ``lse`` in base 2, +inf for rows that see nothing.
    """
    tile = tl.arange(0, BLOCK_N)
    if WIDE:
        tile = tile.to(tl.int64)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = _load_rows(k + _wide(start) * stride_kn, stride_kn, tile, num_keys - start, HEAD_DIM, BLOCK_D, EDGE)
        v_tile = _load_rows(v + _wide(start) * stride_vn, stride_vn, tile, num_keys - start, HEAD_DIM, BLOCK_D, EDGE)
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
            scores = _hide_keys(scores, position[:, None], keys, num_keys, window, CAUSAL, HAS_WINDOW, FOLD)
        p = tl.exp2(scores - lse[:, None])
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
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
    q, do, k, v, mask, lse, delta, row_inside, position, lo, full_lo, full_hi, hi, num_keys, window,
    stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """`_dq_range` over all keys that a block of queries sees: the left edge, whole blocks, the right edge."""
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    moment = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        dq, weight, moment = _dq_range(
            dq, weight, moment, q, do, k, v, mask, lse, delta, row_inside, position, lo, full_lo, num_keys, window,
            stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, SUMS, True,
        )  # fmt: skip
    dq, weight, moment = _dq_range(
        dq, weight, moment, q, do, k, v, mask, lse, delta, row_inside, position, full_lo, full_hi, num_keys, window,
        stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, SUMS, False,
    )  # fmt: skip
    dq, weight, moment = _dq_range(
        dq, weight, moment, q, do, k, v, mask, lse, delta, row_inside, position, full_hi, hi, num_keys, window,
        stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, SUMS, True,
    )  # fmt: skip
    return dq, weight, moment


_BACKWARD_DYNAMIC = [
    "num_heads", "group", "heads_together", "num_queries", "num_keys", "window", "batch_heads",
    "score_scale", "score_cap", "grad_scale",
]  # fmt: skip


@triton.jit(do_not_specialize=_BACKWARD_DYNAMIC)
def attention_backward_dq(
    q, k, v, mask, out, grad_out, grad_lse, lse, delta, grad_q,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    num_heads, group, heads_together, num_queries, num_keys, window, batch_heads, score_scale, score_cap, grad_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, WIDE: tl.constexpr,
    FOLD: tl.constexpr, NUM_XCD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries; also stores delta = rowsum(out * grad_out) - grad_lse for the dK/dV kernel.

    In float32 delta is rowsum(P dP), in a pass of its own: the two sides of dP - delta then share their errors. That of
    the rounded output leaves gradients 2 to 4 times as far off, which only float32 shows.
    """
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
    position = rows + (num_keys - num_queries)
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
    do_tile = _load_rows(grad_out, stride_gm, offsets, left, HEAD_DIM, BLOCK_D, True)
    row_lse = tl.load(lse + per_row, mask=row_inside, other=float("-inf")) * LOG2E
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)  # rows that see nothing: P = exp2(-inf) = 0
    mask_rows = mask
    if MASK > 0:
        mask_base = _wide(batch) * stride_mask_b + _wide(head) * stride_mask_h
        mask_row = _mask_index(rows, num_queries, FOLD)
        mask_rows = mask + (mask_base + mask_row.to(tl.int64) * stride_mask_m)[:, None]

    lo, hi, full_lo, full_hi = _key_ranges(first, last, num_queries, num_keys, window, BLOCK_N, CAUSAL, HAS_WINDOW)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)
    if q.dtype.element_ty == tl.float32:
        _, weight, moment = _dq_keys(
            q_tile, do_tile, k, v, mask_rows, row_lse, row_lse, row_inside, position, lo, full_lo, full_hi, hi,
            num_keys, window, stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, True,
        )  # fmt: skip
        row_delta = moment / tl.where(weight == 0.0, 1.0, weight)
    else:
        o_tile = _load_rows(out, stride_om, offsets, left, HEAD_DIM, BLOCK_D, True)
        row_delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        row_delta -= tl.load(grad_lse + per_row, mask=row_inside, other=0.0).to(tl.float32)
    tl.store(delta + per_row, row_delta, mask=row_inside)
    dq, _, _ = _dq_keys(
        q_tile, do_tile, k, v, mask_rows, row_lse, row_delta, row_inside, position, lo, full_lo, full_hi, hi,
        num_keys, window, stride_kn, stride_vn, stride_mask_n, score_scale, score_cap,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, False,
    )  # fmt: skip

    cols = tl.arange(0, BLOCK_D)
    inside = row_inside[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (cols[None, :] < HEAD_DIM)
    where = (per_row * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(grad_q + where, (dq * grad_scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _dkv_range(
    dk, dv, k, v, q, do, mask, lse, delta, keys, key_inside, lo, hi, num_queries, num_keys, window,
    stride_qm, stride_gm, stride_mask_m, score_scale, score_cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
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
                scores, rows[None, :], row_inside[None, :], keys[:, None], num_queries, num_keys, window,
                CAUSAL, HAS_WINDOW, FOLD,
            )  # fmt: skip
        p = tl.exp2(scores - row_lse[None, :])
        do_tile = _load_rows(do + _wide(start) * stride_gm, stride_gm, offsets, left, HEAD_DIM, BLOCK_D, EDGE)
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
    q, k, v, mask, grad_out, lse, delta, grad_k, grad_v,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    num_heads, group, heads_together, num_queries, num_keys, window, batch_heads, score_scale, score_cap, grad_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
    NUM_XCD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one KV head, summed over the heads of its group in order: no atomics."""
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
    v_tile = _load_rows(v, stride_vn, offsets, left, HEAD_DIM, BLOCK_D, True)

    # rows [lo, hi) see a key of this block, rows [full_lo, full_hi) see all of them
    shift = num_keys - num_queries
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
    full_hi = full_hi // BLOCK_M * BLOCK_M
    full_lo = tl.maximum(tl.minimum(full_lo, hi), lo)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group):
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
        if CAUSAL or HAS_WINDOW:
            dk, dv = _dkv_range(
                dk, dv, k_tile, v_tile, q_head, do_head, mask_keys, lse_head, delta_head, keys, key_inside, lo, full_lo,
                num_queries, num_keys, window, stride_qm, stride_gm, stride_mask_m, score_scale, score_cap,
                HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, True,
            )  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k_tile, v_tile, q_head, do_head, mask_keys, lse_head, delta_head, keys, key_inside,
            full_lo, full_hi, num_queries, num_keys, window, stride_qm, stride_gm, stride_mask_m,
            score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, False,
        )  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k_tile, v_tile, q_head, do_head, mask_keys, lse_head, delta_head, keys, key_inside, full_hi, hi,
            num_queries, num_keys, window, stride_qm, stride_gm, stride_mask_m, score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, HAS_WINDOW, HAS_CAP, MASK, WIDE, FOLD, PRECISION, True,
        )  # fmt: skip

    cols = tl.arange(0, BLOCK_D)
    inside = key_inside[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (cols[None, :] < HEAD_DIM)
    where = ((_wide(head_id) * num_keys + keys) * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(grad_k + where, (dk * grad_scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + where, dv.to(grad_v.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Config:
    """Tile sizes and compiler options of one kernel on one target. ``options`` are AMD's own (waves_per_eu, ..)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)


def _block_d(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _family(target: Target) -> str:
    """Which table of tiles serves ``target``: by vendor first, then by what one block may hold in shared memory."""
    if target.vendor == "amd":
        if target.wave == 32:
            return "rdna"
        return "cdna-160k" if target.shared_memory >= 160 * 1024 else "cdna-64k"
    if target.vendor == "nvidia":
        if target.arch in ("sm_100", "sm_103"):
            return "nvidia-tmem"
        if target.shared_memory >= 227 * 1024:
            return "nvidia-227k"
        return "nvidia-160k" if target.shared_memory >= 160 * 1024 else "nvidia-99k"
    return "cpu"


# Two waves per SIMD halves the registers a wave may take (512 to 256): forward still fits, and latency is hidden.
_TWO_WAVES = {"waves_per_eu": 2}
# The 16x16 matrix instruction keeps fewer accumulators alive than 32x32: dK/dV at D128 took 284 instead of 354 VGPRs.
_SMALL_MFMA = {"matrix_instr_nonkdim": 16}
_SMALL_TWO_WAVES = {**_SMALL_MFMA, **_TWO_WAVES}

# (forward, dq, dkv, then the same for masks and softcap) by family and padded head_dim, 16-bit inputs. Each is the
# largest tile that compiled without spills, or with the fewest (compile matrix in tests/unit/test_triton_attention.py).
_Tiles = tuple[tuple[Any, ...], ...]
_AMPERE: dict[int, _Tiles] = {
    64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    128: ((128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 1), (32, 128, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    256: ((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 1), (64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 1)),
}
# One stage loads through registers, without cp.async: only where two spill. dK/dV takes few queries at a time: 64 hold
# lse and delta in 32 registers instead of 16.
_HOPPER: dict[int, _Tiles] = {
    64: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    128: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    256: ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1), (64, 32, 8, 2), (128, 16, 8, 2), (16, 32, 8, 1)),
}
# Accumulators in tensor memory, whose 512 columns Triton 3.6 does not check when compiling: beyond, the image is a trap
# (dK/dV causal D256 at 32x64: 544). 32 keys are below the least that tcgen05 takes, and use mma.sync.
_BLACKWELL: dict[int, _Tiles] = {
    64: ((128, 128, 8, 3), (128, 64, 8, 2), (32, 64, 8, 1), (128, 64, 8, 3), (128, 32, 8, 2), (32, 32, 8, 2)),
    128: ((128, 128, 8, 2), (128, 64, 8, 2), (32, 64, 8, 1), (128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 8, 2)),
    256: ((128, 64, 8, 2), (64, 32, 8, 2), (16, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (16, 32, 8, 2)),
}
_CDNA: dict[int, _Tiles] = {
    64: (
        (128, 64, 4, 1, _TWO_WAVES), (128, 64, 4, 1), (64, 64, 4, 1, _SMALL_MFMA),
        (128, 32, 8, 1, _SMALL_TWO_WAVES), (128, 32, 8, 1, _SMALL_TWO_WAVES), (32, 64, 8, 1, _SMALL_MFMA),
    ),
    128: (
        (128, 64, 8, 1, _SMALL_MFMA), (64, 64, 4, 1), (32, 64, 4, 1, _SMALL_MFMA),
        (128, 32, 8, 1, _SMALL_TWO_WAVES), (64, 32, 8, 1, _SMALL_MFMA), (32, 64, 8, 1, _SMALL_MFMA),
    ),
    256: (
        (128, 32, 8, 1), (32, 32, 4, 1), (16, 64, 8, 1),
        (64, 32, 8, 1, _SMALL_MFMA), (64, 16, 8, 1, _SMALL_TWO_WAVES), (16, 64, 4, 1, _SMALL_MFMA),
    ),
}  # fmt: skip
_HALF: dict[str, dict[int, _Tiles]] = {
    "nvidia-227k": _HOPPER,
    "nvidia-tmem": _BLACKWELL,
    "nvidia-160k": _AMPERE,
    "nvidia-99k": {**_AMPERE, 128: ((128, 64, 8, 2), *_AMPERE[128][1:])},
    "cdna-160k": _CDNA,
    "cdna-64k": _CDNA,
    # RDNA3's matrix instruction wants both operands twice in registers: the backward spills at any tile from D128 on
    "rdna": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        128: ((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1)),
        256: ((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
    },
    "cpu": dict.fromkeys((64, 128, 256), ((32, 32, 4, 1),) * 3),
}
# float32: NVIDIA multiplies exactly ("ieee") on the FMA units, from registers; AMD has fp32 matrix units.
_FLOAT: dict[str, dict[int, _Tiles]] = {
    "nvidia": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
        128: ((64, 16, 16, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
        256: ((32, 16, 8, 1), (16, 16, 16, 2), (16, 16, 8, 1)),
    },
    "nvidia-227k": {
        64: ((64, 32, 8, 1), (32, 32, 8, 1), (16, 64, 8, 1)),
        128: ((64, 16, 16, 2), (32, 16, 16, 3), (16, 16, 8, 1)),
        256: ((32, 16, 8, 1), (16, 16, 16, 2), (16, 16, 8, 1)),
    },
    "cdna": {
        64: ((64, 32, 4, 1, _SMALL_MFMA), (64, 32, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        128: ((64, 32, 4, 1, _SMALL_MFMA), (64, 16, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        256: ((32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    # dQ at D256: only two waves of it spill in none of their forms on gfx950
    "cdna-160k": {
        64: ((64, 32, 4, 1, _SMALL_MFMA), (64, 32, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        128: ((64, 32, 4, 1, _SMALL_MFMA), (64, 16, 4, 1, _SMALL_MFMA), (32, 32, 4, 1, _SMALL_MFMA)),
        256: ((32, 16, 4, 1), (32, 16, 2, 1, _SMALL_MFMA), (16, 16, 4, 1)),
    },
    "rdna": {
        64: ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
        128: ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        256: ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
    "cpu": _HALF["cpu"],
}


# What these configurations spill at most (`ferryman compile` fails more): bytes a thread on NVIDIA, registers on AMD;
# of forward, dQ, dK/dV, in 16 bits and in float32. sm_80, sm_90, gfx942 and gfx950 spill nothing.
_SPILLS_ALLOWED: dict[str, dict[str, tuple[int, int, int]]] = {
    "nvidia-tmem": {"half": (1080, 16, 32), "float": (32, 16, 40)},
    "nvidia-99k": {"half": (0, 0, 0), "float": (24, 16, 40)},
    "sm_87": {"half": (0, 0, 0), "float": (24, 16, 40)},
    "gfx90a": {"half": (2, 0, 0), "float": (0, 5, 5)},
    "rdna": {"half": (295, 469, 420), "float": (626, 967, 872)},  # no smaller tiles were looked for
}


def _spills_allowed(target: Target, dtype: torch.dtype, kernel: str) -> int:
    by_kind = _SPILLS_ALLOWED.get(target.arch) or _SPILLS_ALLOWED.get(_family(target))
    if by_kind is None:
        return 0
    allowed = by_kind["float" if dtype == torch.float32 else "half"]
    kernels = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
    return dict(zip(kernels, allowed, strict=True)).get(kernel, 0)


@functools.cache
def _config(target: Target, dtype: torch.dtype, head_dim: int, kernel: str, rich: bool) -> Config:
    """``kernel`` is "forward", "dq" or "dkv". ``rich``: `_is_rich`.

    So does a head_dim below its tile (80, 96): there the loads carry masks.
    """
    family = _family(target)
    by_dim = _HALF[family] if dtype != torch.float32 else _FLOAT.get(family) or _FLOAT[family.split("-")[0]]
    padded = max(64, _block_d(head_dim))
    which = ("forward", "dq", "dkv").index(kernel) + (3 if rich or head_dim < padded else 0)
    tiles = by_dim[padded]
    return Config(*tiles[which % len(tiles)])


@functools.cache
def _decode_config(target: Target, dtype: torch.dtype, head_dim: int) -> Config:
    """Few query rows: a 16-row tile (the least that a matrix unit takes), bound by the reading of K and V."""
    family, block_d = _family(target), max(64, _block_d(head_dim))
    if family == "cpu":
        return Config(16, 32, 4, 1)
    if dtype == torch.float32 and target.vendor == "nvidia":
        return Config(16, 32, 8, 1) if block_d <= 128 else Config(16, 16, 8, 3 if family == "nvidia-227k" else 1)
    if dtype == torch.float32:
        return Config(16, 32 if block_d <= 128 else 16, 4, 1)
    n = 64 if block_d <= 128 else 32
    if family == "rdna":
        n //= 2  # 64 keys at D128: 540 bytes of scratch
    if target.vendor == "amd":
        return Config(16, n, 4, 1, {} if family == "rdna" else _SMALL_TWO_WAVES)
    return Config(16, n, 4, 3 if family != "nvidia-99k" or block_d <= 64 else 2)


# ------------------------------------------------------------------------------------------------------------ launchers


def _xcds(target: Target) -> int:
    # MI300X and MI355X: 8 dies, each with its own 4 MiB L2, programs dealt round-robin (amd.md); elsewhere one L2
    return 8 if target.arch in ("gfx942", "gfx950") else 1


def _is_rich(target: Target, mask: bool, softcap: float, window: int | None) -> bool:
    """Which half of the tables serves a call: a mask or a softcap takes registers. On AMD a window does too: its second
    edge is a third copy of the loop, whose addresses and masks lie in scalar registers with those of the others."""
    return mask or softcap > 0 or (window is not None and target.vendor == "amd")


def _precision(dtype: torch.dtype) -> str | None:
    return "ieee" if dtype == torch.float32 else None


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    """The menu admits unit last strides only; autograd also brings expanded gradients."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask_arguments(
    mask: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, int, tuple[int, ...]]:
    """(tensor as the kernels read it, kind, strides over (batch, head, query, key))."""
    if mask is None:
        return None, 0, (0, 0, 0, 0)
    kind = _BOOL_MASK if mask.dtype == torch.bool else _FLOAT_MASK
    view = mask.expand(shape)
    return (view.view(torch.int8) if kind == _BOOL_MASK else view), kind, view.stride()


def _score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What a raw q.k is multiplied by, and the softcap in base 2: s = tanh(qk * first) * second, or qk * first."""
    return (scale / softcap, softcap * _LOG2E) if softcap > 0 else (scale * _LOG2E, 0.0)


def _heads_together(target: Target, kv_heads: int, num_keys: int, head_dim: int, element_size: int) -> int:
    """How many KV heads' K and V fill half of the L2; at most all of them, as tiles x heads is a 32-bit number."""
    return max(1, min(kv_heads, target.l2_bytes // 2 // (2 * num_keys * head_dim * element_size)))


_LEAST_KEYS = 128  # of a piece that is worth a measurement
_MERGED_BLOCKS = 0.1  # what merging one piece more costs, in blocks of keys


def _num_splits(target: Target, programs: int, keys: int) -> int:
    """Pieces for at most one wave of two programs per unit, of 256 keys each: merging smaller ones costs more than it
    saves, but where a few of 128 keys reach units that would be idle.

    From half a wave on bandwidth is what bounds it: two pieces where the last wave would be mostly empty. H200, D128,
    against a piece for every unit rounded up: B32 KV8 4096 keys 143 -> 123 us, B9 KV32 1500 80 -> 62, B7 KV8 2500
    27.4 -> 25.2, B5 KV4 605 (D64) 9.0 -> 7.3; of 25 shapes none is slower.
    """
    slots, programs = 2 * target.units, max(1, programs)
    if 2 * programs <= slots:
        wanted = slots // programs
    else:
        last = (programs - 1) % slots + 1
        wanted = 2 if programs < 2 * slots and last < 0.85 * slots else 1
    most = max(keys // 256, min(6, target.units // programs, keys // _LEAST_KEYS), 1)
    return min(wanted, most, 128)


def _reads_ahead(config: Config, target: Target, dtype: torch.dtype, head_dim: int, programs: int, keys: int) -> bool:
    """Whether so many decoding programs, of so many keys each, are one to a Hopper's unit and long: such a one loads a
    block further ahead than two that share a unit do."""
    alone = programs <= target.units and keys >= 16 * config.block_n
    return alone and 64 < head_dim <= 128 and dtype != torch.float32 and _family(target) == "nvidia-227k"


def _own_splits(config: Config, target: Target, dtype: torch.dtype, head_dim: int, programs: int, keys: int) -> int:
    """`_num_splits`, or where one piece for every unit reads ahead and few units have none, that: H200, D128, 32768
    keys, B1 KV8 40.5 -> 38.1 us, B2 68.0 -> 66.5; 131072 keys, B1 127 -> 124; 8192 keys, B8 68.2 -> 67.3. At D64 half
    as many bytes are on their way: 23.7 -> 29.3 (B4 KV8 8192 keys)."""
    single = target.units // max(1, programs)
    filled = 1 < single <= 128 and 10 * single * programs >= 9 * target.units
    if filled and _reads_ahead(config, target, dtype, head_dim, single * programs, keys // single):
        return single
    return _num_splits(target, programs, keys)


def configurations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, window: int | None,
    softcap: float, mask: torch.Tensor | None, target: Target,
) -> dict[str, float]:  # fmt: skip
    """In how many pieces the keys of a decoding call are read, for the menu: as `_own_splits` says, fewer, more. Their
    times in blocks of keys that a program reads, one wave of programs after another, and the merging of pieces."""
    keys, programs = k.shape[2], k.shape[0] * k.shape[1]
    if q.numel() == 0 or keys < 2 * _LEAST_KEYS:
        return {}
    config = _decode_config(target, q.dtype, q.shape[-1])
    blocks = -(-keys // config.block_n)

    def time(splits: int) -> float:
        return -(-programs * splits // (2 * target.units)) * -(-blocks // splits) + _MERGED_BLOCKS * splits

    own = _own_splits(config, target, q.dtype, q.shape[-1], programs, keys)
    most = min(128, keys // _LEAST_KEYS)
    others = {s for s in (own // 4, own // 2, 3 * own // 4, 3 * own // 2, 2 * own, 4 * own) if 1 <= s <= most} - {own}
    times = {s: max(time(s), time(own)) for s in sorted(others, key=time)}
    return {f"splits_{s}": t for s, t in {own: time(own), **times}.items()}


def _too_wide(*spans: int) -> bool:
    return max(spans) >= 2**31


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` (B, Sq, H, D) and ``lse`` (B, H, Sq), to be written."""
    batch, heads, queries, dim = q.shape
    out = torch.empty((batch, queries, heads, dim), dtype=q.dtype, device=q.device)
    return out, torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)


def blank(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether there is nothing to attend to, or nobody who does: then the result stands already."""
    if q.numel() == 0:
        return True
    if k.shape[2] == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return True
    return False


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows in tiles of their own head."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out, lse = outputs(q)
    if blank(q, k, out, lse):
        return out.transpose(1, 2), lse
    config = _config(target, q.dtype, dim, "forward", _is_rich(target, mask is not None, softcap, window))
    programs = batch * heads * triton.cdiv(queries, config.block_m)
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size()) * (heads // kv_heads)
    _run_forward(
        q, k, v, out, lse, causal, scale, window, softcap, mask, target, config, programs, 1, together, pack=False
    )
    return out.transpose(1, 2), lse


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query rows of a key head's whole group in one tile; keys in one piece or several."""
    batch, _, _, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out, lse = outputs(q)
    if blank(q, k, out, lse):
        return out.transpose(1, 2), lse
    config, programs = _decode_config(target, q.dtype, dim), batch * kv_heads
    named = target.configuration.removeprefix("splits_")
    splits = int(named) if named else _own_splits(config, target, q.dtype, dim, programs, keys)
    if _reads_ahead(config, target, q.dtype, dim, programs * splits, keys // splits):
        config = replace(config, num_stages=4)
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size())
    _run_forward(
        q, k, v, out, lse, causal, scale, window, softcap, mask, target, config, programs, splits, together, pack=True
    )
    return out.transpose(1, 2), lse


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    target: Target,
    config: Config,
    programs: int,
    splits: int,
    together: int,
    *,
    pack: bool,
) -> None:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    device = q.device
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    scale = dim**-0.5 if scale is None else scale
    score_scale, score_cap = _score_factors(abs(scale), softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    wide = _too_wide(
        config.block_n * k.stride(2), config.block_n * v.stride(2), config.block_n * mask_strides[3],
    )  # fmt: skip
    if splits > 1:
        to = torch.empty((splits, *lse.shape, dim), dtype=torch.float32, device=device)
        to_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=device)
    else:
        to, to_lse = out, lse
    launch(
        attention_forward, (programs, splits),
        q, k, v, mask, to, to_lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides,
        heads, heads // kv_heads, together, queries, keys, min(window or 0, queries + keys), batch * heads, score_scale,
        score_cap,
        device=device,
        **_forward_constexprs(
            config, target, q.dtype, dim, causal, window is not None, softcap > 0, mask_kind, wide,
            scale < 0, pack, splits > 1,
        ),
        **_options(config),
    )  # fmt: skip
    if splits > 1:
        launch(
            attention_merge, (lse.numel(),), to, to_lse, out, lse, heads, queries, splits, batch * heads,
            device=device, HEAD_DIM=dim, BLOCK_D=_block_d(dim), TOGETHER=16, num_warps=4, num_stages=1,
        )  # fmt: skip


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous tensors for the gradients, to be written; zeros where no query meets a key."""
    make = torch.zeros if q.numel() == 0 or k.numel() == 0 else torch.empty
    grad_q, grad_k, grad_v = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return grad_q, grad_k, grad_v


def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    device = q.device
    grad_q, grad_k, grad_v = gradients(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return grad_q, grad_k, grad_v
    q, k, v, out, grad_out = (_unit_last(x) for x in (q, k, v, out, grad_out))
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    scale = dim**-0.5 if scale is None else scale
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=device)
    score_scale, score_cap = _score_factors(scale, softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    group = heads // kv_heads
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size())
    seen = min(window or 0, queries + keys)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    rich = _is_rich(target, mask_kind > 0, softcap, window)
    dq, dkv = (_config(target, q.dtype, dim, kernel, rich) for kernel in ("dq", "dkv"))
    wide = _too_wide(
        max(dq.block_m, dkv.block_m) * max(q.stride(2), out.stride(2), grad_out.stride(2), mask_strides[2]),
        max(dq.block_n, dkv.block_n) * max(k.stride(2), v.stride(2), mask_strides[3]),
    )
    launch(
        attention_backward_dq, (batch * heads * triton.cdiv(queries, dq.block_m),),
        q, k, v, mask, out, grad_out, grad_lse, lse, delta, grad_q,
        *strides, *out.stride()[:3], *grad_out.stride()[:3], *mask_strides,
        heads, group, together * group, queries, keys, seen, batch * heads, score_scale, score_cap, scale,
        device=device, HAS_GRAD_LSE=grad_lse is not None,
        **_backward_constexprs(dq, target, q.dtype, dim, causal, window is not None, softcap > 0, mask_kind, wide),
        **_options(dq),
    )  # fmt: skip
    launch(
        attention_backward_dkv, (batch * kv_heads * triton.cdiv(keys, dkv.block_n),),
        q, k, v, mask, grad_out, lse, delta, grad_k, grad_v,
        *strides, *grad_out.stride()[:3], *mask_strides,
        heads, group, together, queries, keys, seen, batch * heads, score_scale, score_cap, scale,
        device=device,
        **_backward_constexprs(dkv, target, q.dtype, dim, causal, window is not None, softcap > 0, mask_kind, wide),
        **_options(dkv),
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _options(config: Config) -> dict[str, Any]:
    own = {} if interpreting() else config.options  # the interpreter knows Triton's own options only
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **own}


def _backward_constexprs(
    config: Config, target: Target, dtype: torch.dtype, dim: int, causal: bool, window: bool, cap: bool, mask: int,
    wide: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "HEAD_DIM": dim, "BLOCK_D": _block_d(dim), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "CAUSAL": causal, "HAS_WINDOW": window, "HAS_CAP": cap, "MASK": mask, "WIDE": wide,
        "FOLD": target.vendor == "amd", "NUM_XCD": _xcds(target),
        "PRECISION": _precision(dtype),
    }  # fmt: skip


def _forward_constexprs(
    config: Config, target: Target, dtype: torch.dtype, dim: int, causal: bool, window: bool, cap: bool, mask: int,
    wide: bool, negate: bool, pack: bool, split: bool,
) -> dict[str, Any]:  # fmt: skip
    shared = _backward_constexprs(config, target, dtype, dim, causal, window, cap, mask, wide)
    return {**shared, "NEGATE": negate, "PACK": pack, "SPLIT": split}


# ---------------------------------------------------------------------------------------------- ahead-of-time compiling


def forms(target: Target, dtype: torch.dtype, head_dims: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Calls without data that between them compile what the launchers compile on ``target``.

    Each is the arguments of `attention` but for the target: causal and full attention, a sliding window, with a softcap
    too, a padding mask, decoding (a batch that fills the device, too, whose keys are not split), and everything at once
    (window, softcap, float mask).
    """
    kinds: list[tuple[int, bool, int | None, float, torch.dtype | None, int]] = [
        (4096, True, None, 0.0, None, 2), (4096, False, None, 0.0, None, 2), (4096, True, 512, 0.0, None, 2),
        (4096, True, 512, 20.0, None, 2), (4096, False, None, 0.0, torch.bool, 2), (4096, True, 512, 20.0, dtype, 2),
        (1, True, None, 0.0, None, 2), (1, True, 512, 0.0, None, 2), (1, True, 512, 20.0, dtype, 2),
        (1, True, None, 0.0, None, target.units),
    ]  # fmt: skip
    found = []
    for dim in head_dims:
        for queries, causal, window, cap, mask, batch in kinds:
            q = torch.empty((batch, 32, queries, dim), dtype=dtype, device="meta")
            k = torch.empty((batch, 8, 4096, dim), dtype=dtype, device="meta")
            rows = None if mask is None else torch.empty((2, 1, queries, 4096), dtype=mask, device="meta")
            found.append((q, k, k, causal, None, window, cap, rows))
    return found


def backward_arguments(form: tuple[Any, ...], with_lse: bool) -> tuple[Any, ...]:
    """The arguments of a backward of one of `forms`, but for the target."""
    q, k, v, *options = form
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    return (q, lse if with_lse else None, q, k, v, out, lse, *options)


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What the launchers compile on ``target`` for "float32", "float16" or "bfloat16" inputs: `forms`, decoding in few
    long pieces, and backward also with a gradient of lse."""
    kind = getattr(torch, dtype)

    def calls(form: tuple[Any, ...]) -> None:
        queries, cap, mask = form[0].shape[2], form[6], form[7]
        (attention if queries > 1 else attention_decode)(*(*form, target))
        if queries > 1 or not (cap or mask is not None):
            attention_backward(*(*backward_arguments(form, bool(cap) and mask is not None), target))

    def few_pieces(dim: int) -> None:
        q = torch.empty((1, 8, 1, dim), dtype=kind, device="meta")
        k = torch.empty((1, 1, 8192, dim), dtype=kind, device="meta")
        attention_decode(q, k, k, True, None, None, 0.0, None, replace(target, configuration="splits_2"))

    made = [functools.partial(calls, form) for form in forms(target, kind, head_dims)]
    found = recorded([*made, *(functools.partial(few_pieces, dim) for dim in head_dims)])
    return [replace(one, spills_allowed=_spills_allowed(target, kind, one.name)) for one in found]
