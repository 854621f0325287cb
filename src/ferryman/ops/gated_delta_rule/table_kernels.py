"""What a chunk of tokens needs of its keys, queries, decays and rates alone, and the two walks that use it.

`_tables`, all chunks at once: the inverses of I + M diag(beta) and of I + diag(beta) M (`parallel_kernels`), the
weights of y, and factors of rows. `_forth` keeps the state that each span of chunks begins with, and u; `_back` keeps
the gradient of the state that each span ends with, and that of a correction. The time of a walk is that of its steps'
latencies. So a step reads what the next one begins with; states lie turned, (columns, keys), with the keys of a part in
one warp, where a sum of products is the next product's left operand as it lies; and warps meet once for the sum over
keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import launch, strides
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _kept, _place, _product
from ferryman.ops.gated_delta_rule.parallel_kernels import PART, _inverted, _totals, chunk_of, precision_of
from ferryman.ops.gated_delta_rule.triton_kernels import _power

COLUMNS = 16  # of a state in a program of a walk: in registers


@triton.jit(do_not_specialize=["length", "chunks"])
def _tables(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    forth_ptr,
    back_ptr,
    weight_ptr,
    row_ptr,
    fade_ptr,
    scale,
    length,
    chunks,
    heads,
    shared,
    width,
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
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """forth, of I + M diag(beta), turned, back, of I + diag(beta) M, and weight, of a row of y by one of d: (batch,
    heads, chunks, CHUNK, CHUNK). row: (.., 4, CHUNK), what multiplies a row of k before the chunk, of k after it, of q
    before it, and beta. fade: (batch, heads, chunks), what multiplies the state."""
    program = tl.program_id(0).to(tl.int64)
    which = program % chunks
    head = (program // chunks) % heads
    sample = program // (chunks * heads)
    first = which * CHUNK
    c = tl.arange(0, CHUNK)
    live = c < length - first
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_size = tl.zeros([CHUNK], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        k = _kept(k_ptr + c[:, None] * k_l + n[None, :] * k_k, there, PIECES)
        q = _kept(q_ptr + c[:, None] * q_l + n[None, :] * q_k, there, PIECES)
        scores = _product(k, tl.trans(k), scores, PIECES)
        weight = _product(q, tl.trans(k), weight, PIECES)
        k, q = k.to(tl.float32), q.to(tl.float32)
        k_size += tl.sum(k * k, 1)
        q_size += tl.sum(q * q, 1)
    k_factor, q_factor = _factors(k_size, 1.0, NORM), _factors(q_size, scale, NORM)
    # a token past the end has beta and g 0: it leaves the state as it is
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
    since = exp(total)
    row_ptr += program * 4 * CHUNK + c
    tl.store(row_ptr, since * k_factor)
    tl.store(row_ptr + CHUNK, exp(end - total) * k_factor)
    tl.store(row_ptr + 2 * CHUNK, since * q_factor)
    tl.store(row_ptr + 3 * CHUNK, beta)
    tl.store(fade_ptr + program, exp(end))
    seen = c[:, None] >= c[None, :]
    later = c[:, None] > c[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
    table = program * CHUNK * CHUNK
    at = table + c[:, None] * CHUNK + c[None, :]
    tl.store(weight_ptr + at, tl.where(seen, q_factor[:, None] * weight * decay, 0.0))
    system = tl.where(later, k_factor[:, None] * scores * decay, 0.0)
    tl.store(back_ptr + at, _inverted(beta[:, None] * system, CHUNK, PART, PRECISION))
    at = table + c[None, :] * CHUNK + c[:, None]
    tl.store(forth_ptr + at, _inverted(system * beta[None, :], CHUNK, PART, PRECISION))


@triton.jit
def _turned(ptr, row, one, c, column, live, dim, PIECES: tl.constexpr):
    """(columns, tokens) of a chunk."""
    there = (column < dim)[:, None] & live[None, :]
    return _kept(ptr + c[None, :] * row + column[:, None] * one, there, PIECES)


@triton.jit
def _by_parts(ptr, row, one, c, key, live, width, PIECES: tl.constexpr):
    """(parts, tokens, keys of a part) of a chunk."""
    there = live[None, :, None] & (key < width)[:, None, :]
    return _kept(ptr + c[None, :, None] * row + key[:, None, :] * one, there, PIECES)


@triton.jit(do_not_specialize=["length"])
def _forth(
    k_ptr,
    v_ptr,
    state_ptr,
    forth_ptr,
    row_ptr,
    fade_ptr,
    before_ptr,
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
    s_b,
    s_h,
    s_k,
    s_v,
    PIECES: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """before, the state before every EACH chunks: (batch, spans, heads, dim, width). wrong, u: (batch, length, heads,
    dim). Both in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    chunks = tl.cdiv(length, CHUNK)
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    wrong_ptr += (sample * length * heads + head) * dim
    place = (sample * heads + head) * chunks
    fade_ptr += place
    row_ptr += place * 4 * CHUNK + c
    forth_ptr += place * CHUNK * CHUNK + c[:, None] * CHUNK + c[None, :]
    before_ptr += (sample * tl.cdiv(chunks, EACH) * heads + head) * width * dim
    key = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (key < width)[:, None, :] & (column < dim)[None, :, None]
    at = column[None, :, None] * width + key[:, None, :]
    state = tl.zeros([PARTS, BLOCK_V, BLOCK_K], tl.float32)
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
        state = widen(tl.load(state_ptr + key[:, None, :] * s_k + column[None, :, None] * s_v, mask=inside, other=0.0))
    live = c < length
    k = _by_parts(k_ptr, k_l, k_k, c, key, live, width, PIECES)
    v = _turned(v_ptr, v_l, v_v, c, column, live, dim, PIECES)
    table = tl.load(forth_ptr)
    since, until, beta = tl.load(row_ptr), tl.load(row_ptr + CHUNK), tl.load(row_ptr + 3 * CHUNK)
    fade = tl.load(fade_ptr)
    for i in tl.range(0, chunks, num_stages=1):
        first = tl.full([], CHUNK, tl.int64) * i
        live = c < length - first
        # of the next chunk; past the last one again this one's
        step = tl.where(i + 1 < chunks, 1, 0)
        after = c < length - first - CHUNK
        next_k = _by_parts(k_ptr + (first + CHUNK) * k_l, k_l, k_k, c, key, after, width, PIECES)
        next_v = _turned(v_ptr + (first + CHUNK) * v_l, v_l, v_v, c, column, after, dim, PIECES)
        forth_ptr += step * CHUNK * CHUNK
        row_ptr += step * 4 * CHUNK
        fade_ptr += step
        next_table = tl.load(forth_ptr)
        next_since, next_until = tl.load(row_ptr), tl.load(row_ptr + CHUNK)
        next_beta, next_fade = tl.load(row_ptr + 3 * CHUNK), tl.load(fade_ptr)
        if i % EACH == 0:
            tl.store(before_ptr + tl.full([], width * dim, tl.int64) * (i // EACH * heads) + at, state, mask=inside)
        known = tl.zeros([PARTS, BLOCK_V, CHUNK], tl.float32)
        known = tl.sum(_product(state, tl.permute(k, (0, 2, 1)), known, PIECES), 0)
        wrong = v.to(tl.float32) - since[None, :] * known
        wrong = _product(wrong, table, tl.zeros([BLOCK_V, CHUNK], tl.float32), PIECES)
        out = wrong_ptr + first * (heads * dim) + c[None, :] * (heads * dim) + column[:, None]
        tl.store(out, wrong, mask=live[None, :] & (column < dim)[:, None])
        came = tl.broadcast_to(((beta * until)[None, :] * wrong)[None, :, :], [PARTS, BLOCK_V, CHUNK])
        state = _product(came, k, state * fade, PIECES)
        k, v, table, since, until, beta, fade = next_k, next_v, next_table, next_since, next_until, next_beta, next_fade


@triton.jit(do_not_specialize=["length"])
def _back(
    dy_ptr,
    df_ptr,
    q_ptr,
    k_ptr,
    back_ptr,
    weight_ptr,
    row_ptr,
    fade_ptr,
    late_ptr,
    asked_ptr,
    dv_ptr,
    ds_ptr,
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
    PIECES: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """late, the gradient of the state after every EACH chunks: (batch, spans, heads, dim, width). asked, that of a
    correction: (batch, length, heads, dim). Both in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    chunks = tl.cdiv(length, CHUNK)
    dy_ptr += sample * y_b + head * y_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    asked_ptr += (sample * length * heads + head) * dim
    dv_ptr += (sample * length * heads + head) * dim
    last = (chunks - 1).to(tl.int64)
    place = (sample * heads + head) * chunks + last
    fade_ptr += place
    row_ptr += place * 4 * CHUNK + c
    table = place * CHUNK * CHUNK + c[:, None] * CHUNK + c[None, :]
    back_ptr += table
    weight_ptr += table
    late_ptr += (sample * tl.cdiv(chunks, EACH) * heads + head) * width * dim
    key = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (key < width)[:, None, :] & (column < dim)[None, :, None]
    at = column[None, :, None] * width + key[:, None, :]
    late = tl.zeros([PARTS, BLOCK_V, BLOCK_K], tl.float32)
    if df_ptr is not None:
        df_ptr += sample * f_b + head * f_h
        late = widen(tl.load(df_ptr + key[:, None, :] * f_k + column[None, :, None] * f_v, mask=inside, other=0.0))
    first = last * CHUNK
    live = c < length - first
    k = _by_parts(k_ptr + first * k_l, k_l, k_k, c, key, live, width, PIECES)
    dy = _turned(dy_ptr + first * y_l, y_l, y_v, c, column, live, dim, PIECES)
    wide_dy = dy.to(tl.float32)
    table, weight = tl.load(back_ptr), tl.load(weight_ptr)
    since, until = tl.load(row_ptr), tl.load(row_ptr + CHUNK)
    rise, beta, fade = tl.load(row_ptr + 2 * CHUNK), tl.load(row_ptr + 3 * CHUNK), tl.load(fade_ptr)
    for step in tl.range(0, chunks, num_stages=1):
        i = last - step
        first = i * CHUNK
        live = c < length - first
        q = _by_parts(q_ptr + first * q_l, q_l, q_k, c, key, live, width, PIECES)
        # of the chunk before it; at the first one again this one's
        less = tl.minimum(i, 1)
        back_ptr -= less * CHUNK * CHUNK
        weight_ptr -= less * CHUNK * CHUNK
        row_ptr -= less * 4 * CHUNK
        fade_ptr -= less
        earlier = first - less * CHUNK
        whole = c < length - earlier
        next_k = _by_parts(k_ptr + earlier * k_l, k_l, k_k, c, key, whole, width, PIECES)
        next_dy = _turned(dy_ptr + earlier * y_l, y_l, y_v, c, column, whole, dim, PIECES)
        next_table, next_weight = tl.load(back_ptr), tl.load(weight_ptr)
        next_since, next_until = tl.load(row_ptr), tl.load(row_ptr + CHUNK)
        next_rise, next_beta = tl.load(row_ptr + 2 * CHUNK), tl.load(row_ptr + 3 * CHUNK)
        next_fade = tl.load(fade_ptr)
        if (i % EACH == EACH - 1) | (step == 0):
            tl.store(late_ptr + (i // EACH) * heads * width * dim + at, late, mask=inside)
        asked = tl.zeros([PARTS, BLOCK_V, CHUNK], tl.float32)
        asked = tl.sum(_product(late, tl.permute(k, (0, 2, 1)), asked, PIECES), 0)
        asked = _product(dy, weight, asked * until[None, :], PIECES)
        asked = _product(asked, table, tl.zeros([BLOCK_V, CHUNK], tl.float32), PIECES)
        x = beta[None, :] * asked
        shape = live[None, :] & (column < dim)[:, None]
        row = first * (heads * dim)
        out = c[None, :] * (heads * dim) + column[:, None]
        tl.store(asked_ptr + row + out, asked, mask=shape)
        tl.store(dv_ptr + row + out, narrow(x, dv_ptr.dtype.element_ty), mask=shape)
        came = tl.broadcast_to((rise[None, :] * wide_dy)[None, :, :], [PARTS, BLOCK_V, CHUNK])
        late = _product(came, q, late * fade, PIECES)
        came = tl.broadcast_to((-since[None, :] * x)[None, :, :], [PARTS, BLOCK_V, CHUNK])
        late = _product(came, k, late, PIECES)
        k, dy, wide_dy, table, weight = next_k, next_dy, next_dy.to(tl.float32), next_table, next_weight
        since, until, rise, beta, fade = next_since, next_until, next_rise, next_beta, next_fade
    if ds_ptr is not None:
        ds_ptr += (sample * heads + head) * width * dim
        at = key[:, None, :] * dim + column[None, :, None]
        tl.store(ds_ptr + at, narrow(late, ds_ptr.dtype.element_ty), mask=inside)


class Walked:
    """What both walks keep: states before spans of ``span`` tokens, u, gradients of states after spans and of
    corrections. The gradients of v and of the initial state go to ``dv`` and ``ds``."""

    def __init__(
        self,
        grad_y: Tensor,
        grad_final_state: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        initial_state: Tensor | None,
        dv: Tensor,
        ds: Tensor | None,
        factor: float,
        norm: bool,
        span: int,
        target: Target,
    ) -> None:
        (batch, length, shared, width), (heads, dim) = q.shape, v.shape[2:]
        chunk = chunk_of(target)
        chunks, repeated, each = triton.cdiv(length, chunk), heads // shared, span // chunk
        pieces = target.vendor == "nvidia"
        kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
        forth, back, weight = (torch.empty(batch, heads, chunks, chunk, chunk, **kind) for _ in range(3))
        rows = torch.empty(batch, heads, chunks, 4, chunk, **kind)
        fade = torch.empty(batch, heads, chunks, **kind)
        launch(
            _tables,
            (batch * heads * chunks,),
            q,
            k,
            g,
            beta,
            forth,
            back,
            weight,
            rows,
            fade,
            factor,
            length,
            chunks,
            heads,
            repeated,
            width,
            *q.stride(),
            *k.stride(),
            *strides(g, 3),
            *beta.stride(),
            norm,
            pieces,
            precision_of(target),
            chunk,
            PART,
            _power(width, 32),
            device=v.device,
            num_warps=4,
        )
        spans = triton.cdiv(length, span)
        self.before, self.late = (torch.empty(batch, spans, heads, dim, width, **kind) for _ in range(2))
        self.wrong, self.asked = (torch.empty(batch, length, heads, dim, **kind) for _ in range(2))
        grid = (batch * heads * triton.cdiv(dim, COLUMNS),)
        # in four warps `_back` spills: with float32's pieces everywhere, with bfloat16 on sm_80
        keys, warps = (32, 4) if "wgmma" in target.features and q.dtype == torch.bfloat16 else (16, 8)
        keys = _power(width, keys)
        options = (pieces, chunk, each, triton.next_power_of_2(triton.cdiv(width, keys)), keys, COLUMNS)
        launch(
            _forth,
            grid,
            k,
            v,
            initial_state,
            forth,
            rows,
            fade,
            self.before,
            self.wrong,
            length,
            heads,
            repeated,
            width,
            dim,
            *k.stride(),
            *v.stride(),
            *strides(initial_state, 4),
            *options,
            device=v.device,
            num_warps=warps,
        )
        launch(
            _back,
            grid,
            grad_y,
            grad_final_state,
            q,
            k,
            back,
            weight,
            rows,
            fade,
            self.late,
            self.asked,
            dv,
            ds,
            length,
            heads,
            repeated,
            width,
            dim,
            *grad_y.stride(),
            *strides(grad_final_state, 4),
            *q.stride(),
            *k.stride(),
            *options,
            device=v.device,
            num_warps=warps,
        )
