"""The two walks of `gated_delta_rule` that use a chunk's tables (`table_kernels`).

`_forth` keeps the state that each span of chunks begins with, and u; `_back` keeps the gradient of the state that each
span ends with, and that of a correction. The time of a walk is that of its steps' latencies. So a step reads what the
next one begins with; states lie turned, (columns, keys), with the keys of a part in one warp, where a sum of products
is the next product's left operand as it lies; and warps meet once for the sum over keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import launch, strides
from ferryman.backends.triton_lang import narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _kept, _place, _product
from ferryman.ops.gated_delta_rule.table_kernels import Tables
from ferryman.ops.gated_delta_rule.triton_kernels import _power

COLUMNS = 16  # of a state in a program of a walk: in registers


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
    final_ptr,
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
    dim). final, the last state: (batch, heads, width, dim), or None. All in float32."""
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
    if final_ptr is not None:
        final_ptr += (sample * heads + head) * width * dim
        tl.store(final_ptr + key[:, None, :] * dim + column[None, :, None], state, mask=inside)


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


@dataclass(frozen=True)
class Walk:
    """How a walk goes: keys of a part, and warps. In four warps `_back` spills: with float32's pieces everywhere, with
    bfloat16 on sm_80."""

    keys: int
    warps: int

    @classmethod
    def of(cls, width: int, target: Target, kind: torch.dtype) -> Walk:
        keys, warps = (32, 4) if "wgmma" in target.features and kind == torch.bfloat16 else (16, 8)
        return cls(_power(width, keys), warps)

    def options(self, width: int, tables: Tables, span: int, target: Target) -> tuple[Any, ...]:
        parts = triton.next_power_of_2(triton.cdiv(width, self.keys))
        return target.vendor == "nvidia", tables.chunk, span // tables.chunk, parts, self.keys, COLUMNS


def walked_forth(
    tables: Tables,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    final: Tensor | None,
    span: int,
    target: Target,
) -> tuple[Tensor, Tensor]:
    """The states before spans of ``span`` tokens, turned, and u; the last state goes to ``final``."""
    (batch, length, shared, width), (heads, dim) = k.shape, v.shape[2:]
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    before = torch.empty(batch, triton.cdiv(length, span), heads, dim, width, **kind)
    wrong = torch.empty(batch, length, heads, dim, **kind)
    walk = Walk.of(width, target, k.dtype)
    launch(
        _forth,
        (batch * heads * triton.cdiv(dim, COLUMNS),),
        k,
        v,
        initial_state,
        tables.forth,
        tables.rows,
        tables.fade,
        before,
        wrong,
        final,
        length,
        heads,
        heads // shared,
        width,
        dim,
        *k.stride(),
        *v.stride(),
        *strides(initial_state, 4),
        *walk.options(width, tables, span, target),
        device=v.device,
        num_warps=walk.warps,
    )
    return before, wrong


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
        tables = Tables(q, k, g, beta, factor, norm, target)
        self.before, self.wrong = walked_forth(tables, k, v, initial_state, None, span, target)
        self.late, self.asked = torch.empty_like(self.before), torch.empty_like(self.wrong)
        walk = Walk.of(width, target, q.dtype)
        launch(
            _back,
            (batch * heads * triton.cdiv(dim, COLUMNS),),
            grad_y,
            grad_final_state,
            q,
            k,
            tables.back,
            tables.weight,
            tables.rows,
            tables.fade,
            self.late,
            self.asked,
            dv,
            ds,
            length,
            heads,
            heads // shared,
            width,
            dim,
            *grad_y.stride(),
            *strides(grad_final_state, 4),
            *q.stride(),
            *k.stride(),
            *walk.options(width, tables, span, target),
            device=v.device,
            num_warps=walk.warps,
        )
