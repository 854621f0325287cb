"""`gated_delta_rule_backward` in Triton: two walks over chunks of 16 tokens, then each chunk alone.

A program of `_forward` takes a head of a sample and a block of its values' columns: it goes over the chunks, keeps the
state that each begins with, and u = v - S^T k. `_reverse` goes back, keeps the gradient of the state that each chunk
ends with, and that of the correction. Then a program of `_chunk` takes one chunk of a head, and `_finish` adds what
heads share, and applies what normalisation does. States lie in memory in float32, as in the forward kernel, products
are those of it. No atomics: each sum has a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, inverse_root, narrow, widen
from ferryman.ops.gated_delta_rule.triton_kernels import _place, _power

CHUNK = 16


@triton.jit
def _tile(ptr, rows, columns, row, column, known, many):
    """(rows, columns) in float32, zeros where there are none."""
    there = known[:, None] & (columns < many)[None, :]
    return widen(tl.load(ptr + rows[:, None] * row + columns[None, :] * column, mask=there, other=0.0))


@triton.jit
def _sums(g_ptr, g_l, c, live):
    """Sums of g up to each token of a chunk; without g zeros."""
    total = tl.zeros(c.shape, tl.float32)
    if g_ptr is not None:
        g = widen(tl.load(g_ptr + c * g_l, mask=live, other=0.0))
        total = tl.sum(tl.where(c[:, None] <= c[None, :], g[:, None], 0.0), 0)
    return total


@triton.jit
def _factors(size, scale, NORM: tl.constexpr):
    """What multiplies a row with such a sum of squares."""
    factor = tl.zeros(size.shape, tl.float32) + scale
    if NORM:
        factor = inverse_root(size + 1e-6) * scale
    return factor


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
    n = tl.arange(0, BLOCK_K)
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
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        inside = (n < width - b)[:, None] & (column < dim)[None, :]
        held = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if state_ptr is not None:
            held = _tile(state_ptr, b + n, column, s_k, s_v, n < width - b, dim)
        tl.store(held_ptr + (b + n)[:, None] * dim, held, mask=inside)
    tl.debug_barrier()
    for at in tl.range(0, length, CHUNK, num_stages=1):
        first = tl.full([], 1, tl.int64) * at
        live = c < length - at
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        known = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        size = tl.zeros([CHUNK], tl.float32)
        for b in tl.range(0, width, BLOCK_K, num_stages=1):
            k = _tile(k_ptr + first * k_l, c, b + n, k_l, k_k, live, width)
            inside = (n < width - b)[:, None] & (column < dim)[None, :]
            held = tl.load(held_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0)
            scores = tl.dot(k, tl.trans(k), scores, input_precision=PRECISION)
            known = tl.dot(k, held, known, input_precision=PRECISION)
            size += tl.sum(k * k, 1)
        factor = _factors(size, 1.0, NORM)
        v = _tile(v_ptr + first * v_l, c, column, v_l, v_v, live, dim)
        beta = widen(tl.load(beta_ptr + first * t_l + c * t_l, mask=live, other=0.0))
        total = _sums(None if g_ptr is None else g_ptr + first * g_l, g_l, c, live)
        end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
        later = c[:, None] > c[None, :]
        decay = exp(tl.where(later, total[:, None] - total[None, :], 0.0)) * factor[None, :]
        met = tl.where(later, factor[:, None] * scores * decay * beta[None, :], 0.0)
        wrong = v - (exp(total) * factor)[:, None] * known
        for i in range(1, CHUNK):
            row = tl.sum(tl.where(c[:, None] == i, met, 0.0), 0)
            earlier = tl.sum(row[:, None] * wrong, 0)
            wrong = tl.where(c[:, None] == i, wrong - earlier[None, :], wrong)
        out = wrong_ptr + first * (heads * dim) + c[:, None] * (heads * dim) + column[None, :]
        tl.store(out, wrong, mask=live[:, None] & (column < dim)[None, :])
        if at + CHUNK < length:
            kept = exp(end - total) * factor
            d = beta[:, None] * wrong
            for b in tl.range(0, width, BLOCK_K, num_stages=1):
                inside = (n < width - b)[:, None] & (column < dim)[None, :]
                k = _tile(k_ptr + first * k_l, c, b + n, k_l, k_k, live, width)
                held = tl.load(held_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0) * exp(end)
                held = tl.dot(tl.trans(k * kept[:, None]), d, held, input_precision=PRECISION)
                tl.store(held_ptr + each + (b + n)[:, None] * dim, held, mask=inside)
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
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        inside = (n < width - b)[:, None] & (column < dim)[None, :]
        late = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if df_ptr is not None:
            late = _tile(df_ptr, b + n, column, f_k, f_v, n < width - b, dim)
        tl.store(late_ptr + (b + n)[:, None] * dim, late, mask=inside)
    tl.debug_barrier()
    for i in tl.range(0, chunks, num_stages=1):
        first = (chunks - 1 - i).to(tl.int64) * CHUNK
        live = c < length - first
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        weight = tl.zeros([CHUNK, CHUNK], tl.float32)  # [later, earlier]
        asked = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        k_size = tl.zeros([CHUNK], tl.float32)
        q_size = tl.zeros([CHUNK], tl.float32)
        for b in tl.range(0, width, BLOCK_K, num_stages=1):
            inside = (n < width - b)[:, None] & (column < dim)[None, :]
            k = _tile(k_ptr + first * k_l, c, b + n, k_l, k_k, live, width)
            q = _tile(q_ptr + first * q_l, c, b + n, q_l, q_k, live, width)
            late = tl.load(late_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0)
            scores = tl.dot(k, tl.trans(k), scores, input_precision=PRECISION)
            weight = tl.dot(q, tl.trans(k), weight, input_precision=PRECISION)
            asked = tl.dot(k, late, asked, input_precision=PRECISION)
            k_size += tl.sum(k * k, 1)
            q_size += tl.sum(q * q, 1)
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
            k = _tile(k_ptr + first * k_l, c, b + n, k_l, k_k, live, width)
            q = _tile(q_ptr + first * q_l, c, b + n, q_l, q_k, live, width)
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


@triton.jit(do_not_specialize=["length", "chunks"])
def _chunk(
    dy_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    held_ptr,
    late_ptr,
    wrong_ptr,
    asked_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    length,
    chunks,
    heads,
    shared,
    width,
    dim,
    y_b,
    y_l,
    y_h,
    y_v,
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
    """dq, dk: (batch, length, heads, width) in float32, of rows as they are multiplied."""
    program = tl.program_id(0)
    head = program % heads
    which = (program // heads) % chunks
    sample = (program // (heads * chunks)).to(tl.int64)
    at = which.to(tl.int64) * CHUNK
    c = tl.arange(0, CHUNK)
    live = c < length - at
    dy_ptr += sample * y_b + head * y_h + at * y_l
    q_ptr += sample * q_b + (head // shared) * q_h + at * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + at * k_l
    row = (sample * length + at) * heads + head
    wrong_ptr += row * dim
    asked_ptr += row * dim
    state = ((sample * chunks + which) * heads + head) * width * dim
    held_ptr += state
    late_ptr += state
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (at + c) * t_l, mask=live, other=0.0))
    total = _sums(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + at * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
    since, until = exp(total), exp(end - total)
    seen = c[:, None] >= c[None, :]
    before = c[:, None] > c[None, :]
    decay = tl.where(seen, exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    of_met = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_beta = tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, dim, BLOCK_V, num_stages=1):
        v = first + tl.arange(0, BLOCK_V)
        wrong = _tile(wrong_ptr, c, v, heads * dim, 1, live, dim)
        asked = _tile(asked_ptr, c, v, heads * dim, 1, live, dim)
        dy = _tile(dy_ptr, c, v, y_l, y_v, live, dim)
        of_beta += tl.sum(wrong * asked, 1)
        d = tl.trans(beta[:, None] * wrong)
        of_met = tl.dot(-beta[:, None] * asked, d, of_met, input_precision=PRECISION)
        of_seen = tl.dot(dy, d, of_seen, input_precision=PRECISION)
    tl.store(dbeta_ptr + row + c * heads, narrow(of_beta, dbeta_ptr.dtype.element_ty), mask=live)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_size = tl.zeros([CHUNK], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, width, BLOCK_K, num_stages=1):
        n = first + tl.arange(0, BLOCK_K)
        k = _tile(k_ptr, c, n, k_l, k_k, live, width)
        q = _tile(q_ptr, c, n, q_l, q_k, live, width)
        scores = tl.dot(k, tl.trans(k), scores, input_precision=PRECISION)
        weight = tl.dot(q, tl.trans(k), weight, input_precision=PRECISION)
        k_size += tl.sum(k * k, 1)
        q_size += tl.sum(q * q, 1)
    k_factor = _factors(k_size, 1.0, NORM)
    q_factor = _factors(q_size, scale, NORM)
    of_met = tl.where(before, of_met * decay, 0.0)
    of_seen = of_seen * decay
    pairs = (k_factor[:, None] * of_met * scores + q_factor[:, None] * of_seen * weight) * k_factor[None, :]
    # of an exponent: all pairs with the earlier token before it, and the later one not
    pairs = tl.where(before, pairs, 0.0)
    reached = tl.dot(pairs, tl.where(c[:, None] < c[None, :], 1.0, 0.0), input_precision=PRECISION)
    exponent = tl.sum(tl.where(seen, reached, 0.0), 0)
    of_met += tl.trans(of_met)
    early = tl.zeros([CHUNK], tl.float32)
    sent = tl.zeros([CHUNK], tl.float32)
    whole = 0.0
    for first in tl.range(0, width, BLOCK_K, num_stages=1):
        n = first + tl.arange(0, BLOCK_K)
        from_y = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        from_x = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        brought = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for column in tl.range(0, dim, BLOCK_V, num_stages=1):
            v = column + tl.arange(0, BLOCK_V)
            held = _tile(held_ptr, n, v, dim, 1, n < width, dim)
            late = _tile(late_ptr, n, v, dim, 1, n < width, dim)
            whole += tl.sum(tl.sum(held * late, 1), 0)
            held, late = tl.trans(held), tl.trans(late)
            dy = _tile(dy_ptr, c, v, y_l, y_v, live, dim)
            from_y = tl.dot(dy, held, from_y, input_precision=PRECISION)
            x = beta[:, None] * _tile(asked_ptr, c, v, heads * dim, 1, live, dim)
            from_x = tl.dot(x, held, from_x, input_precision=PRECISION)
            d = beta[:, None] * _tile(wrong_ptr, c, v, heads * dim, 1, live, dim)
            brought = tl.dot(d, late, brought, input_precision=PRECISION)
        k = _tile(k_ptr, c, n, k_l, k_k, live, width) * k_factor[:, None]
        q = _tile(q_ptr, c, n, q_l, q_k, live, width) * q_factor[:, None]
        from_y *= since[:, None]
        from_x *= since[:, None]
        brought *= until[:, None]
        early += tl.sum(from_y * q, 1) - tl.sum(from_x * k, 1)
        sent += tl.sum(brought * k, 1)
        dq = tl.dot(of_seen, k, from_y, input_precision=PRECISION)
        dk = tl.dot(of_met, k, brought - from_x, input_precision=PRECISION)
        dk = tl.dot(tl.trans(of_seen), q, dk, input_precision=PRECISION)
        out = row * width + c[:, None] * (heads * width) + n[None, :]
        tl.store(dq_ptr + out, dq, mask=live[:, None] & (n < width)[None, :])
        tl.store(dk_ptr + out, dk, mask=live[:, None] & (n < width)[None, :])
    if dg_ptr is not None:
        exponent += tl.sum(tl.where(seen, early[:, None], 0.0), 0)
        exponent += tl.sum(tl.where(c[:, None] < c[None, :], sent[:, None], 0.0), 0)
        exponent += exp(end) * whole
        tl.store(dg_ptr + row + c * heads, narrow(exponent, dg_ptr.dtype.element_ty), mask=live)


@triton.jit
def _finish(
    part_ptr,
    x_ptr,
    out_ptr,
    scale,
    length,
    groups,
    shared,
    width,
    x_b,
    x_l,
    x_h,
    x_k,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out: (batch, length, groups, width), the sum of ``part`` over a group's heads, through the normalisation of x."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    token = program // groups
    x_ptr += (token // length) * x_b + (token % length) * x_l + group * x_h
    part_ptr += program * shared * width
    size = tl.zeros([BLOCK], tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    if NORM:
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            x = widen(tl.load(x_ptr + n * x_k, mask=n < width, other=0.0))
            total = tl.zeros([BLOCK], tl.float32)
            for r in range(shared):
                total += tl.load(part_ptr + r * width + n, mask=n < width, other=0.0)
            size += x * x
            along += x * total
    factor = scale
    lean = 0.0
    if NORM:
        root = inverse_root(tl.sum(size, 0) + 1e-6)
        factor = root * scale
        lean = tl.sum(along, 0) * root * root
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for r in range(shared):
            total += tl.load(part_ptr + r * width + n, mask=n < width, other=0.0)
        if NORM:
            total -= widen(tl.load(x_ptr + n * x_k, mask=n < width, other=0.0)) * lean
        tl.store(out_ptr + program * width + n, narrow(total * factor, out_ptr.dtype.element_ty), mask=n < width)


def gated_delta_rule_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    own = (q, k, v, g, beta, initial_state)
    made = [torch.empty(0, dtype=v.dtype, device=v.device) for _ in own]
    for i, t in enumerate(own):
        if t is not None:
            made[i] = torch.empty(t.shape, dtype=t.dtype, device=v.device)
    if batch * length * heads * width * dim == 0:
        for t in made:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            made[5].copy_(grad_final_state)
        return tuple(made)
    nvidia = target.vendor == "nvidia"
    chunks, repeated = triton.cdiv(length, CHUNK), heads // shared
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    held, late = (torch.empty(batch, chunks, heads, width, dim, **kind) for _ in range(2))
    wrong, asked = (torch.empty(batch, length, heads, dim, **kind) for _ in range(2))
    parts = [torch.empty(batch, length, heads, width, **kind) for _ in range(2)]
    # with 32 keys `_reverse` spills on sm_90 and gfx1100, with 4 warps on sm_89; `_chunk` with 4 warps on sm_90
    block_k, block_v = _power(width, 32), _power(dim, 32)
    options = (qk_l2norm, "tf32x3" if nvidia else "ieee", CHUNK)
    factor = float(width**-0.5 if scale is None else scale)
    sizes = (heads, repeated, width, dim)
    of_g = (0, 0, 0) if g is None else g.stride()
    none = (0, 0, 0, 0)
    grid = (batch * heads * triton.cdiv(dim, block_v),)
    launch(
        _forward,
        grid,
        k,
        v,
        g,
        beta,
        initial_state,
        held,
        wrong,
        length,
        *sizes,
        *k.stride(),
        *v.stride(),
        *of_g,
        *beta.stride(),
        *(none if initial_state is None else initial_state.stride()),
        *options,
        block_k,
        block_v,
        device=v.device,
        num_warps=4,
    )
    launch(
        _reverse,
        grid,
        grad_y,
        grad_final_state,
        q,
        k,
        g,
        beta,
        late,
        asked,
        made[2],
        None if initial_state is None else made[5],
        factor,
        length,
        *sizes,
        *grad_y.stride(),
        *(none if grad_final_state is None else grad_final_state.stride()),
        *q.stride(),
        *k.stride(),
        *of_g,
        *beta.stride(),
        *options,
        16 if target.wave == 32 else block_k,
        block_v,
        device=v.device,
        num_warps=8 if target.wave == 32 else 4,
    )
    launch(
        _chunk,
        (batch * chunks * heads,),
        grad_y,
        q,
        k,
        g,
        beta,
        held,
        late,
        wrong,
        asked,
        *parts,
        None if g is None else made[3],
        made[4],
        factor,
        length,
        chunks,
        *sizes,
        *grad_y.stride(),
        *q.stride(),
        *k.stride(),
        *of_g,
        *beta.stride(),
        *options,
        16,
        16,
        device=v.device,
        num_warps=8 if nvidia else 4 if target.wave == 32 else 1,
    )
    block = _power(width, 256)
    for part, x, out, times in ((parts[0], q, made[0], factor), (parts[1], k, made[1], 1.0)):
        launch(
            _finish,
            (batch * length * shared,),
            part,
            x,
            out,
            times,
            length,
            shared,
            repeated,
            width,
            *x.stride(),
            qk_l2norm,
            block,
            device=v.device,
            num_warps=1,
        )
    return tuple(made)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Qwen3-Next's heads, wider keys and small odd ones; with a decay, a state and normalisation, and without."""
    kind = getattr(torch, dtype)

    def calls(length: int, shared: int, heads: int, width: int, dim: int, gate: bool, state: bool, norm: bool) -> None:
        q = torch.empty(2, length, shared, width, dtype=kind, device="meta")
        v = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        beta = torch.empty(2, length, heads, dtype=kind, device="meta")
        g = torch.empty(2, length, heads, dtype=torch.float32, device="meta") if gate else None
        kept = torch.empty(2, heads, width, dim, dtype=torch.float32, device="meta") if state else None
        gated_delta_rule_backward(v, kept, q, q, v, g, beta, kept, None, norm, target)

    shapes: tuple[tuple[Any, ...], ...] = (
        (2048, 16, 32, 128, 128, True, False, True),
        (2048, 16, 32, 128, 128, True, True, True),
        (2048, 16, 16, 256, 256, False, True, False),
        (37, 3, 3, 11, 13, True, True, True),
    )
    found = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    # scalar registers lie in lanes of vector registers, none in memory
    allowed = {"_reverse": 0 if target.wave == 32 else 24}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in found]
