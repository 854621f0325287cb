"""Attention's backward pass where few query rows meet many keys (decoding), in Triton: K and V are read once.

The query rows of a KV head's whole group are one tile, which the keys go by; each block of them is written to dK
and dV at once, and dQ is summed in registers. The keys of a head are divided over programs, whose float32 parts of dQ a
second kernel adds in order: no atomics, bitwise repeatable. Limit: the bytes of K, V, dK and dV, and of a mask. Keys
that no row sees by the window, the sequence and the chunk are not read: their gradients are 0.

Same meaning and rounding points as ``triton_kernels.attention_backward``, which serves whatever the menu keeps from it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention.arguments import most_rows
from ferryman.ops.attention.sinks_kernels import delta_of
from ferryman.ops.attention.tile_kernels import (
    LOG2E,
    _add_mask,
    _hide_keys,
    _in_units,
    _key_ranges,
    _load_rows,
    _mask_index,
    _own_keys,
    _place,
    _saturation,
    _sequence,
    _wide,
)
from ferryman.ops.attention.tiling_kernels import Config, _block_d, _family
from ferryman.ops.attention.triton_kernels import (
    _mask_arguments,
    _options,
    _precision,
    _score_factors,
    _splits_wanted,
    _too_wide,
    _unit,
    _unit_last,
    backward_arguments,
    forms,
    gradients,
    rest,
    row_steps,
    sum_of,
)

_ROWS = 16  # the least that a matrix unit takes
_SPILLS = 64  # bytes a thread, of many rows on Hopper: twice the warps take longer


@triton.jit
def _few_range(
    dq,
    q,
    do,
    k,
    v,
    grad_k,
    grad_v,
    mask,
    lse,
    delta,
    query_inside,
    position,
    first,
    past,
    lo,
    hi,
    num_keys,
    window,
    stride_kn,
    stride_vn,
    stride_mask_n,
    score_scale,
    score_cap,
    grad_scale,
    apart,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):
    """dK and dV of keys [lo, hi) are written, their part of dQ is added. Scores are kept transposed, (keys, queries).

    EDGE: a block may reach beyond the keys, the diagonal, the window, the sequence or the chunk. Query rows beyond the
    end are hidden always. ``mask``: where each row's begins.
    """
    tile = tl.arange(0, BLOCK_N)
    offsets = tile
    if WIDE:
        offsets = tile.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        left = num_keys - start
        k_tile = _load_rows(k + _wide(start) * stride_kn, stride_kn, offsets, left, HEAD_DIM, BLOCK_D, EDGE)
        v_tile = _load_rows(v + _wide(start) * stride_vn, stride_vn, offsets, left, HEAD_DIM, BLOCK_D, EDGE)
        scores = tl.dot(k_tile, tl.trans(q), input_precision=PRECISION) * score_scale
        slope = scores
        if HAS_CAP:
            scores, slope = _saturation(scores)
            scores = scores * score_cap
        dp = tl.dot(v_tile, tl.trans(do), input_precision=PRECISION)
        if MASK > 0:
            pointers = mask + (_wide(start) * stride_mask_n + offsets * stride_mask_n)[:, None]
            scores = _add_mask(scores, pointers, query_inside, (tile < left)[:, None], MASK, FOLD, EDGE)
        if EDGE:
            keys = (start + tile)[:, None]
            scores = _hide_keys(
                scores, position, keys, num_keys, window, first, past, CAUSAL, HAS_WINDOW, BOUNDED, FOLD
            )
        scores = tl.where(query_inside, scores, float("-inf"))
        p = tl.exp2(scores - lse)
        ds = p * (dp - delta)
        if HAS_CAP:
            ds = ds * slope
        inside = query_inside  # 0 * v is NaN where v is Inf, and so is do * 0 where do is
        if EDGE:
            inside = inside & (tile < left)[:, None]
        ds = tl.where(inside, ds, 0.0).to(k_tile.dtype)
        dv = tl.dot(p.to(do.dtype), do, input_precision=PRECISION)
        dk = tl.dot(ds, q, input_precision=PRECISION) * grad_scale
        dq = tl.dot(tl.trans(ds), k_tile, dq, input_precision=PRECISION)
        where = _wide(start) * apart * HEAD_DIM + (tile[:, None] * (apart * HEAD_DIM) + cols[None, :])
        if EDGE:
            stored = (tile < left)[:, None] & (cols < HEAD_DIM)[None, :]
            tl.store(grad_k + where, dk.to(grad_k.dtype.element_ty), mask=stored)
            tl.store(grad_v + where, dv.to(grad_v.dtype.element_ty), mask=stored)
        elif HEAD_DIM < BLOCK_D:
            tl.store(grad_k + where, dk.to(grad_k.dtype.element_ty), mask=cols[None, :] < HEAD_DIM)
            tl.store(grad_v + where, dv.to(grad_v.dtype.element_ty), mask=cols[None, :] < HEAD_DIM)
        else:
            tl.store(grad_k + where, dk.to(grad_k.dtype.element_ty))
            tl.store(grad_v + where, dv.to(grad_v.dtype.element_ty))
    return dq


@triton.jit
def _without_gradients(
    grad_k,
    grad_v,
    lo,
    hi,
    num_keys,
    apart,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """0 for dK and dV of the keys [lo, hi), which no row sees."""
    tile = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([BLOCK_N, BLOCK_D], grad_k.dtype.element_ty)
    for start in tl.range(lo, hi, BLOCK_N):
        where = _wide(start) * apart * HEAD_DIM + (tile[:, None] * (apart * HEAD_DIM) + cols[None, :])
        stored = (tile < num_keys - start)[:, None] & (cols < HEAD_DIM)[None, :]
        tl.store(grad_k + where, zeros, mask=stored)
        tl.store(grad_v + where, zeros, mask=stored)


_SIZES = ["num_heads", "group", "num_queries", "num_keys", "window", "chunk", "apart_q", "apart_k"]


@triton.jit(do_not_specialize=[*_SIZES, "score_scale", "score_cap", "grad_scale"])
def attention_backward_few(
    q,
    k,
    v,
    mask,
    key_range,
    out,
    grad_out,
    grad_lse,
    lse,
    parts,
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
    num_queries,
    num_keys,
    window,
    chunk,
    apart_q,
    apart_k,
    score_scale,
    score_cap,
    grad_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASK: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    FOLD: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (batch * KV heads, splits). parts (splits, as dQ lies) float32: dQ, before its scale, of a share of keys.
    With sinks delta, as lse: rowsum(out * grad_out) - grad_lse.
    A tile's rows are (query, head of the group) pairs, query-major."""
    stride_qb, stride_qh, stride_qm = _in_units(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = _in_units(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = _in_units(stride_vb, stride_vh, stride_vn, UNIT)
    stride_ob, stride_oh, stride_om = _in_units(stride_ob, stride_oh, stride_om, UNIT)
    stride_gb, stride_gh, stride_gm = _in_units(stride_gb, stride_gh, stride_gm, UNIT)
    head_id = tl.program_id(0)
    kv_heads = num_heads // group
    batch = head_id // kv_heads
    kv_head = head_id % kv_heads
    rows = tl.arange(0, BLOCK_M)
    row_inside = rows < num_queries * group
    query = rows // group
    head = kv_head * group + rows % group
    cols = tl.arange(0, BLOCK_D)
    inside = row_inside[:, None] & (cols < HEAD_DIM)[None, :]
    wide_head = head.to(tl.int64)
    wide_query = query.to(tl.int64)

    of_q = (_wide(batch) * stride_qb + wide_head * stride_qh + wide_query * stride_qm)[:, None] + cols[None, :]
    of_out = (_wide(batch) * stride_ob + wide_head * stride_oh + wide_query * stride_om)[:, None] + cols[None, :]
    of_do = (_wide(batch) * stride_gb + wide_head * stride_gh + wide_query * stride_gm)[:, None] + cols[None, :]
    q_tile = tl.load(q + of_q, mask=inside, other=0.0)
    o_tile = tl.load(out + of_out, mask=inside, other=0.0)
    do_tile = tl.load(grad_out + of_do, mask=inside, other=0.0)
    per_row = (_wide(batch) * num_heads + wide_head) * num_queries + wide_query
    row_delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        row_delta -= tl.load(grad_lse + per_row, mask=row_inside, other=0.0).to(tl.float32)
    if HAS_SINKS and tl.program_id(1) == 0:
        tl.store(delta + per_row, row_delta, mask=row_inside)
    row_lse = tl.load(lse + per_row, mask=row_inside, other=float("-inf")) * LOG2E
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)  # rows that see nothing: P = exp2(-inf) = 0

    k += _wide(batch) * stride_kb + _wide(kv_head) * stride_kh
    v += _wide(batch) * stride_vb + _wide(kv_head) * stride_vh
    grad_k += _place(head_id, 0, num_keys, apart_k) * HEAD_DIM
    grad_v += _place(head_id, 0, num_keys, apart_k) * HEAD_DIM
    begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
    position = query + (end - num_queries)
    own_first = position
    own_past = position
    if BOUNDED:
        own_first, own_past = _own_keys(position, begin, end, chunk)
    mask_rows = mask
    if MASK > 0:
        mask_row = _mask_index(wide_query, num_queries, FOLD)
        mask_rows = (
            mask + (_wide(batch) * stride_mask_b + wide_head * stride_mask_h + mask_row * stride_mask_m)[None, :]
        )
    share = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    lo = tl.program_id(1) * share
    hi = tl.minimum(lo + share, num_keys)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = lo  # where the blocks that every row sees whole end
    seen_hi = hi
    if HAS_WINDOW or BOUNDED:
        full, seen_hi, _, _ = _key_ranges(
            0, num_queries - 1, num_queries, begin, end, window, chunk, BLOCK_N, CAUSAL, HAS_WINDOW, BOUNDED
        )
        full = tl.maximum(tl.minimum(full, hi), lo)
        seen_hi = tl.maximum(tl.minimum(tl.cdiv(tl.maximum(seen_hi, 0), BLOCK_N) * BLOCK_N, hi), full)
        _without_gradients(grad_k, grad_v, lo, full, num_keys, apart_k, HEAD_DIM, BLOCK_D, BLOCK_N)
        _without_gradients(grad_k, grad_v, seen_hi, hi, num_keys, apart_k, HEAD_DIM, BLOCK_D, BLOCK_N)
    else:
        if CAUSAL:
            full = tl.maximum(num_keys - num_queries + 1, 0)
        else:
            full = num_keys
        full = tl.maximum(tl.minimum(full // BLOCK_N * BLOCK_N, hi), lo)
        dq = _few_range(
            dq,
            q_tile,
            do_tile,
            k,
            v,
            grad_k,
            grad_v,
            mask_rows,
            row_lse[None, :],
            row_delta[None, :],
            row_inside[None, :],
            position[None, :],
            own_first[None, :],
            own_past[None, :],
            lo,
            full,
            num_keys,
            window,
            stride_kn,
            stride_vn,
            stride_mask_n,
            score_scale,
            score_cap,
            grad_scale,
            apart_k,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            CAUSAL,
            HAS_WINDOW,
            BOUNDED,
            HAS_CAP,
            MASK,
            WIDE,
            FOLD,
            PRECISION,
            False,
        )
    dq = _few_range(
        dq,
        q_tile,
        do_tile,
        k,
        v,
        grad_k,
        grad_v,
        mask_rows,
        row_lse[None, :],
        row_delta[None, :],
        row_inside[None, :],
        position[None, :],
        own_first[None, :],
        own_past[None, :],
        full,
        seen_hi,
        num_keys,
        window,
        stride_kn,
        stride_vn,
        stride_mask_n,
        score_scale,
        score_cap,
        grad_scale,
        apart_k,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        CAUSAL,
        HAS_WINDOW,
        BOUNDED,
        HAS_CAP,
        MASK,
        WIDE,
        FOLD,
        PRECISION,
        True,
    )
    all_rows = _wide(tl.num_programs(0)) * group * num_queries
    place = _place(batch * num_heads + head, query, num_queries, apart_q)
    to = parts + ((_wide(tl.program_id(1)) * all_rows + place) * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(to, dq, mask=inside)


def _config(target: Target, head_dim: int, rows: int, rich: bool) -> Config:
    """The tile of so many query rows for a key head, a power of two of them, and how many keys go by at once. ``rich``:
    a soft cap beside what hides keys, whose values take registers."""
    tile, side = max(_ROWS, triton.next_power_of_2(rows)), _block_d(head_dim)
    if target.vendor == "amd":
        return Config(tile, 16 if side > 128 else 32, 8, 1, {"matrix_instr_nonkdim": 16, "waves_per_eu": 2})
    if (family := _family(target)) != "nvidia-227k":
        wide = side > 128
        return Config(tile, 16 if wide and family == "nvidia-tmem" else 32, 8 if wide else 4, 2)
    many = tile > _ROWS and (rich or side > 128 or tile * side > 64 * 128)
    keys = 16 if side > 128 and tile == _ROWS else 64 if side <= 64 and tile <= 64 and not many else 32
    return Config(tile, keys, 8 if many else 4, 3)


def _splits(target: Target, programs: int, keys: int, tile: int) -> int:
    """Pieces of a head's keys. Each writes a part of a tile's dQ, which is read again: of more rows fewer pieces."""
    most = max(keys // 256, min(keys // max(64, 2 * tile), 1024 // tile), 1)
    return min(_splits_wanted(target, programs), most, 128)


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
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, ...]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grad_q, grad_k, grad_v = gradients(q, k, v)
    apart_q, apart_k = row_steps(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: delta_of(grad_out, grad_lse, out), lse)
    q, k, v, out, grad_out = (_unit_last(x) for x in (q, k, v, out, grad_out))
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    scale = dim**-0.5 if scale is None else scale
    score_scale, score_cap = _score_factors(scale, softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    key_range = None if key_range is None else key_range.contiguous()
    bounded = key_range is not None or chunk is not None
    hidden = bounded or window is not None or mask is not None
    config = _config(target, dim, queries * (heads // kv_heads), softcap > 0 and hidden)
    splits = _splits(target, batch * kv_heads, keys, config.block_m)
    parts = torch.empty((splits, *grad_q.shape), dtype=torch.float32, device=q.device)
    delta = lse if sinks is None else torch.empty_like(lse)
    launch(
        attention_backward_few,
        (batch * kv_heads, splits),
        q,
        k,
        v,
        mask,
        key_range,
        out,
        grad_out,
        grad_lse,
        lse,
        parts,
        delta,
        grad_k,
        grad_v,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *grad_out.stride()[:3],
        *mask_strides,
        heads,
        heads // kv_heads,
        queries,
        keys,
        min(window or 0, queries + keys),
        min(chunk or 0, queries + keys),
        apart_q,
        apart_k,
        score_scale,
        score_cap,
        scale,
        device=q.device,
        HEAD_DIM=dim,
        BLOCK_D=_block_d(dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        CAUSAL=causal,
        HAS_WINDOW=window is not None,
        BOUNDED=bounded,
        HAS_CAP=softcap > 0,
        MASK=mask_kind,
        HAS_GRAD_LSE=grad_lse is not None,
        HAS_SINKS=sinks is not None,
        WIDE=_too_wide(config.block_n * max(k.stride(2), v.stride(2), mask_strides[3])),
        FOLD=target.vendor == "amd",
        PRECISION=_precision(q.dtype),
        UNIT=_unit(q, k, v, out, grad_out),
        **_options(config),
    )
    sum_of(parts, grad_q, scale)
    return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: delta, lse)


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What `attention_backward` compiles: plain calls, a window, a mask of keys, a key range, all at once; on Hopper
    the first and the last with every number of rows that a tile has."""
    kind = getattr(torch, dtype)
    if kind == torch.float32 or _family(target) == "rdna":
        return []
    calls = []
    for form in forms(target, kind, head_dims):
        if form[0].shape[2] != 1:
            continue
        calls.append(form)
        for queries in (8, 16, 32) if "wgmma" in target.features and (form[7] is None) == (form[5] is None) else ():
            if queries * 4 <= most_rows(form[0].shape[3]):
                rows = None if form[7] is None else torch.empty((2, 1, queries, 4096), dtype=kind, device="meta")
                q = torch.empty((2, 32, queries, form[0].shape[3]), dtype=kind, device="meta")
                calls.append((q, *form[1:7], rows, *form[8:]))
        if form[5] is None:
            *before, _, sinks, _, chunk, dropout_p, seed = form
            keys = torch.empty((form[0].shape[0], 1, 1, 4096), dtype=torch.bool, device="meta")
            bounds = torch.empty((form[0].shape[0], 2), dtype=torch.int32, device="meta")
            calls.append((*before, keys, sinks, None, chunk, dropout_p, seed))
            calls.append((*before, None, sinks, bounds, chunk, dropout_p, seed))
    bound = [functools.partial(attention_backward, *(*backward_arguments(call, False), target)) for call in calls]
    return [replace(one, spills_allowed=_SPILLS if target.arch == "sm_90" else 0) for one in recorded(bound)]
