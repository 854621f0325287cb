"""The two walks of `gated_delta_rule_backward` over the chunks of a head, first to last and back.

A program takes a head of a sample and a block of its values' columns. `_forward` keeps the state that each chunk
begins with, and u = v - S^T k. `_reverse` keeps the gradient of the state that each chunk ends with, and that of the
correction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import (
    _begin,
    _factors,
    _onward,
    _place,
    _products,
    _solved,
    _sums,
    _tile,
)


@triton.jit(do_not_specialize=["length"])
def _forward(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    held_ptr,
    wrong_ptr,
    length,
    heads,
    shared,
    width,
    dim,
    k_b,
    k_l,
    k_h,
    k_k,
    v_b,
    v_l,
    v_h,
    v_v,
    g_b,
    g_l,
    g_h,
    t_b,
    t_l,
    t_h,
    s_b,
    s_h,
    s_k,
    s_v,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """held: (batch, chunks, heads, width, dim), wrong: (batch, length, heads, dim), in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    each = heads * width * dim
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    beta_ptr += sample * t_b + head * t_h
    if g_ptr is not None:
        g_ptr += sample * g_b + head * g_h
    wrong_ptr += (sample * length * heads + head) * dim
    held_ptr += (sample * tl.cdiv(length, CHUNK) * heads + head) * width * dim + column[None, :]
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    _begin(held_ptr, state_ptr, s_k, s_v, column, width, dim, BLOCK_K)
    for at in tl.range(0, length, CHUNK, num_stages=1):
        first = tl.full([], 1, tl.int64) * at
        live = c < length - at
        k_at = k_ptr + first * k_l
        scores, _, known, _, size, _ = _products(
            k_at, k_l, k_k, None, 0, 0, held_ptr, c, live, column, width, dim, BLOCK_K, PRECISION
        )
        factor = _factors(size, 1.0, NORM)
        v = _tile(v_ptr + first * v_l, c, column, v_l, v_v, live, dim)
        beta = widen(tl.load(beta_ptr + first * t_l + c * t_l, mask=live, other=0.0))
        total = _sums(None if g_ptr is None else g_ptr + first * g_l, g_l, c, live)
        end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
        later = c[:, None] > c[None, :]
        decay = exp(tl.where(later, total[:, None] - total[None, :], 0.0)) * factor[None, :]
        met = tl.where(later, factor[:, None] * scores * decay * beta[None, :], 0.0)
        wrong = v - (exp(total) * factor)[:, None] * known
        wrong = _solved(met, wrong, c, CHUNK)
        out = wrong_ptr + first * (heads * dim) + c[:, None] * (heads * dim) + column[None, :]
        tl.store(out, wrong, mask=live[:, None] & (column < dim)[None, :])
        if at + CHUNK < length:
            kept = exp(end - total) * factor
            d = beta[:, None] * wrong
            after = held_ptr + each
            _onward(held_ptr, after, k_at, k_l, k_k, kept, exp(end), d, c, live, column, width, dim, BLOCK_K, PRECISION)
            held_ptr += each
            tl.debug_barrier()


@triton.jit(do_not_specialize=["length"])
def _reverse(
    dy_ptr,
    df_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    late_ptr,
    asked_ptr,
    dv_ptr,
    ds_ptr,
    scale,
    length,
    heads,
    shared,
    width,
    dim,
    y_b,
    y_l,
    y_h,
    y_v,
    f_b,
    f_h,
    f_k,
    f_v,
    q_b,
    q_l,
    q_h,
    q_k,
    k_b,
    k_l,
    k_h,
    k_k,
    g_b,
    g_l,
    g_h,
    t_b,
    t_l,
    t_h,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """late: (batch, chunks, heads, width, dim), asked, the gradient of a correction: (batch, length, heads, dim), in
    float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_K)
    each = heads * width * dim
    chunks = tl.cdiv(length, CHUNK)
    dy_ptr += sample * y_b + head * y_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    beta_ptr += sample * t_b + head * t_h
    if g_ptr is not None:
        g_ptr += sample * g_b + head * g_h
    row = (sample * length * heads + head) * dim
    late_ptr += (sample * chunks * heads + head) * width * dim + column[None, :]
    late_ptr += (chunks - 1).to(tl.int64) * each
    if df_ptr is not None:
        df_ptr += sample * f_b + head * f_h
    if ds_ptr is not None:
        ds_ptr += (sample * heads + head) * width * dim + column[None, :]
    _begin(late_ptr, df_ptr, f_k, f_v, column, width, dim, BLOCK_K)
    for i in tl.range(0, chunks, num_stages=1):
        first = (chunks - 1 - i).to(tl.int64) * CHUNK
        live = c < length - first
        k_at, q_at = k_ptr + first * k_l, q_ptr + first * q_l
        scores, weight, asked, _, k_size, q_size = _products(
            k_at, k_l, k_k, q_at, q_l, q_k, late_ptr, c, live, column, width, dim, BLOCK_K, PRECISION
        )
        k_factor = _factors(k_size, 1.0, NORM)
        q_factor = _factors(q_size, scale, NORM)
        dy = _tile(dy_ptr + first * y_l, c, column, y_l, y_v, live, dim)
        beta = widen(tl.load(beta_ptr + first * t_l + c * t_l, mask=live, other=0.0))
        total = _sums(None if g_ptr is None else g_ptr + first * g_l, g_l, c, live)
        end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
        seen = c[:, None] >= c[None, :]
        decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
        weight = tl.where(seen, q_factor[:, None] * weight * decay, 0.0)
        met = tl.where(c[:, None] > c[None, :], (k_factor * beta)[:, None] * scores * decay, 0.0)
        asked = tl.dot(tl.trans(weight), dy, asked * (exp(end - total) * k_factor)[:, None], input_precision=PRECISION)
        for j in range(1, CHUNK):
            column_of = tl.sum(tl.where(c[None, :] == CHUNK - 1 - j, met, 0.0), 1)
            later = tl.sum(column_of[:, None] * asked, 0)
            asked = tl.where(c[:, None] == CHUNK - 1 - j, asked - later[None, :], asked)
        x = beta[:, None] * asked
        shape = live[:, None] & (column < dim)[None, :]
        out = row + first * (heads * dim) + c[:, None] * (heads * dim) + column[None, :]
        tl.store(asked_ptr + out, asked, mask=shape)
        tl.store(dv_ptr + out, narrow(x, dv_ptr.dtype.element_ty), mask=shape)
        since = exp(total)
        for b in tl.range(0, width, BLOCK_K, num_stages=1):
            inside = (n < width - b)[:, None] & (column < dim)[None, :]
            k = _tile(k_at, c, b + n, k_l, k_k, live, width)
            q = _tile(q_at, c, b + n, q_l, q_k, live, width)
            late = tl.load(late_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0) * exp(end)
            late = tl.dot(tl.trans(q * (since * q_factor)[:, None]), dy, late, input_precision=PRECISION)
            late = tl.dot(tl.trans(k * (-since * k_factor)[:, None]), x, late, input_precision=PRECISION)
            if i + 1 < chunks:
                tl.store(late_ptr - each + (b + n)[:, None] * dim, late, mask=inside)
            else:
                if ds_ptr is not None:
                    tl.store(ds_ptr + (b + n)[:, None] * dim, narrow(late, ds_ptr.dtype.element_ty), mask=inside)
        late_ptr -= each
        tl.debug_barrier()
