"""Attention's backward in Triton where a float mask learns: the tiled kernels' gradients, and the mask's by its own.

Each program owns a tile of the mask's gradient and sums dS over what the mask is broadcast to, in order: no atomics,
and no scores in memory. Its P and dS are not rounded.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention import triton_kernels
from ferryman.ops.attention.sinks_kernels import delta_of
from ferryman.ops.attention.tile_kernels import (
    LOG2E,
    _add_mask,
    _hide_keys,
    _kept,
    _load_rows,
    _mask_index,
    _own_keys,
    _saturation,
    _sequence,
    _wide,
)
from ferryman.ops.attention.tiling_kernels import Config, _spills_allowed
from ferryman.ops.attention.triton_kernels import (
    _blocks,
    _dropping,
    _mask_arguments,
    _precision,
    _score_factors,
    _unit_last,
    backward_arguments,
    forms,
)


def _tiles(width: int, element_size: int, vendor: str) -> Config:
    """By the bytes of a row of a tile, of which four kinds lie in registers and in shared memory."""
    few = vendor == "nvidia" and width * element_size <= 256
    return Config(32, 32, 4, 1) if few else Config(16, 16, 8, 1)


@triton.jit(
    do_not_specialize=[
        "grad_heads",
        "grad_rows",
        "grad_keys",
        "many_heads",
        "many_tiles",
        "many_blocks",
        "count",
        "tiles",
        "num_heads",
        "group",
        "num_queries",
        "num_keys",
        "window",
        "chunk",
        "score_scale",
        "score_cap",
        "drop_below",
        "keep_scale",
    ]
)
def attention_backward_bias(
    q,
    k,
    v,
    do,
    mask,
    key_range,
    dropout_seed,
    lse,
    delta,
    grad,
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
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    grad_heads,
    grad_rows,
    grad_keys,
    many_heads,
    many_tiles,
    many_blocks,
    count,
    tiles,
    num_heads,
    group,
    num_queries,
    num_keys,
    window,
    chunk,
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
    HAS_CAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    FOLD: tl.constexpr,
    NEGATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """grad[b, h, rows of a tile, keys of a block], or one number where the mask has one of a dimension (not BY_ROW, not
    BY_KEY). ``count``: tiles of dS that are added to it, of which ``many_heads`` heads, ``many_tiles`` tiles of rows
    and ``many_blocks`` blocks of keys."""
    owner = tl.program_id(0)
    own_tile = 0
    if BY_ROW:
        own_tile = owner % tiles
        owner = owner // tiles
    own_head = owner % grad_heads
    own_batch = owner // grad_heads
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(0, count):
        start = (tl.program_id(1) + n % many_blocks) * BLOCK_N
        left = n // many_blocks
        query = (own_tile + left % many_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        left = left // many_tiles
        head = own_head + left % many_heads
        batch = own_batch + left // many_heads
        row_inside = query < num_queries
        columns = tl.arange(0, BLOCK_N)
        at = _wide(batch) * stride_qb + _wide(head) * stride_qh
        q_tile = _load_rows(q + at, stride_qm, query.to(tl.int64), num_queries, HEAD_DIM, BLOCK_D, True)
        if NEGATE:
            q_tile = -q_tile
        at = _wide(batch) * stride_ob + _wide(head) * stride_oh
        do_tile = _load_rows(do + at, stride_om, query.to(tl.int64), num_queries, VALUE_DIM, BLOCK_V, True)
        keys = start + columns
        at = _wide(batch) * stride_kb + _wide(head // group) * stride_kh
        k_tile = _load_rows(k + at, stride_kn, keys.to(tl.int64), num_keys, HEAD_DIM, BLOCK_D, True)
        at = _wide(batch) * stride_vb + _wide(head // group) * stride_vh
        v_tile = _load_rows(v + at, stride_vn, keys.to(tl.int64), num_keys, VALUE_DIM, BLOCK_V, True)

        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * score_scale
        if HAS_CAP:
            scores, _ = _saturation(scores)
            scores = scores * score_cap
        mask_row = _mask_index(query, num_queries, FOLD)
        rows = mask + _wide(batch) * stride_mask_b + _wide(head) * stride_mask_h + mask_row.to(tl.int64) * stride_mask_m
        pointers = rows[:, None] + (keys.to(tl.int64) * stride_mask_n)[None, :]
        key_inside = keys < num_keys
        scores = _add_mask(scores, pointers, row_inside[:, None], key_inside[None, :], 2, FOLD, True)
        begin, end = _sequence(key_range, batch, num_keys, BOUNDED)
        position = query + (end - num_queries)
        first = position
        past = position
        if BOUNDED:
            first, past = _own_keys(position, begin, end, chunk)
        scores = _hide_keys(
            scores,
            position[:, None],
            keys[None, :],
            end,
            window,
            first[:, None],
            past[:, None],
            CAUSAL,
            HAS_WINDOW,
            BOUNDED,
            FOLD,
        )
        row = (_wide(batch) * num_heads + head) * num_queries + query
        log_sum = tl.load(lse + row, mask=row_inside, other=float("inf"))
        log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E)
        p = tl.exp2(scores - log_sum[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        if DROPOUT:
            seed = tl.load(dropout_seed + batch)
            dp = dp * (_kept(seed, query[:, None], head, start, drop_below, BLOCK_N, False) * keep_scale)
        ds = p * (dp - tl.load(delta + row, mask=row_inside, other=0.0)[:, None])
        acc += tl.where(row_inside[:, None] & key_inside[None, :], ds, 0.0)
    to = grad + (_wide(own_batch) * grad_heads + own_head) * grad_rows * grad_keys
    rows = own_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_ROW and BY_KEY:
        inside = (rows < num_queries)[:, None] & (keys < num_keys)[None, :]
        tl.store(to + (_wide(rows) * grad_keys)[:, None] + keys[None, :], acc.to(grad.dtype.element_ty), mask=inside)
    elif BY_ROW:
        tl.store(to + rows, tl.sum(acc, 1).to(grad.dtype.element_ty), mask=rows < num_queries)
    elif BY_KEY:
        tl.store(to + keys, tl.sum(acc, 0).to(grad.dtype.element_ty), mask=keys < num_keys)
    else:
        tl.store(to, tl.sum(tl.sum(acc, 1), 0).to(grad.dtype.element_ty))


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
    options = (causal, scale, window, softcap, mask, sinks, key_range, chunk)
    given = (grad_out, grad_lse, q, k, v, out, lse, *options)
    grads = triton_kernels.attention_backward(*given, False, dropout_p, dropout_seed, target)[:4]
    assert mask is not None
    if q.numel() == 0 or k.shape[2] == 0:
        return *grads, torch.zeros(mask.shape, dtype=mask.dtype, device=q.device)
    grad = torch.empty(mask.shape, dtype=mask.dtype, device=q.device)
    delta = delta_of(grad_out, grad_lse, out).contiguous()
    batch, heads, queries, dim = q.shape
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    grad_out, q, k, v = (_unit_last(x) for x in (grad_out, q, k, v))
    scale = dim**-0.5 if scale is None else scale
    read, _, strides = _mask_arguments(mask, (batch, heads, queries, keys))
    own = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    many_batch, many_heads = batch // own[0], heads // own[1]
    block_d, block_v = _blocks(dim, width)
    config = _tiles(block_d, q.element_size(), target.vendor)
    tiles, blocks = triton.cdiv(queries, config.block_m), triton.cdiv(keys, config.block_n)
    by_row, by_key = own[2] == queries, own[3] == keys
    many_tiles, many_blocks = 1 if by_row else tiles, 1 if by_key else blocks
    launch(
        attention_backward_bias,
        (own[0] * own[1] * (tiles if by_row else 1), blocks if by_key else 1),
        q,
        k,
        v,
        grad_out,
        read,
        None if key_range is None else key_range.contiguous(),
        None if dropout_seed is None or not dropout_p else dropout_seed.contiguous(),
        lse.contiguous(),
        delta,
        grad,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad_out.stride()[:3],
        *strides,
        own[1],
        own[2],
        own[3],
        many_heads,
        many_tiles,
        many_blocks,
        many_batch * many_heads * many_tiles * many_blocks,
        tiles,
        heads,
        heads // kv_heads,
        queries,
        keys,
        min(window or 0, queries + keys),
        min(chunk or 0, queries + keys),
        *_score_factors(abs(scale), softcap),
        *_dropping(dropout_p),
        device=q.device,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        VALUE_DIM=width,
        BLOCK_V=block_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        CAUSAL=causal,
        HAS_WINDOW=window is not None,
        BOUNDED=key_range is not None or chunk is not None,
        HAS_CAP=softcap > 0,
        DROPOUT=dropout_p > 0,
        FOLD=target.vendor == "amd",
        NEGATE=scale < 0,
        PRECISION=_precision(q.dtype),
        BY_ROW=by_row,
        BY_KEY=by_key,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return *grads, grad


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What the mask's gradient compiles on ``target``: `triton_kernels.forms` with a float mask, of many rows."""
    kind = getattr(torch, dtype)
    calls = []
    for form in forms(target, kind, head_dims):
        if form[7] is not None and form[7].dtype != torch.bool and form[0].shape[2] > 1:
            args = list(backward_arguments(form, False))
            args[15] = True
            calls.append(functools.partial(attention_backward, *(*args, target)))
    allowed = _spills_allowed(target, kind, "attention_backward_dq")
    kernels = (one for one in recorded(calls) if one.name == "attention_backward_bias")
    return [replace(one, spills_allowed=allowed) for one in kernels]
