"""`gated_delta_rule_backward` with two walks that do no more than a state's step needs.

`parallel_kernels` makes the states and u. With B = diag(beta), the gradient a of u before it goes back through the
system is asked = (I + M^T B)^-1 a, the transpose of the inverse of I + B M; `_back` takes the chunks from the last one
with it, and with the weights of y, both of which all chunks made at once. What is left is of a chunk alone
(`backward_kernels._chunk`).

Limit, for a token of a head with K = V = 128 in bfloat16 on an H100, chunks of C = 32: 0.19 MFLOP of the walks, 0.16 of
the chunks and 0.03 of the tables are 1.1 as three tf32 products: 2.3 ns at the peak. Memory: both states written and
read 16 K V / C bytes, u and what was asked 16 V, parts of dq and dk 16 K, with the rest 16 KB: 4.9 ns. 2,048 tokens of
32 heads: 320 us.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, strides
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.gated_delta_rule.backward_kernels import begun, gradients
from ferryman.ops.gated_delta_rule.chunk_kernels import _place, _tile
from ferryman.ops.gated_delta_rule.parallel_kernels import COLUMNS, Chunks, called, precision_of, walked
from ferryman.ops.gated_delta_rule.triton_kernels import _power


@triton.jit
def _keys(ptr, row, column, c, key, live, width):
    """(parts, tokens, keys of a part) in float32."""
    there = live[None, :, None] & (key < width)[:, None, :]
    return widen(tl.load(ptr + c[None, :, None] * row + key[:, None, :] * column, mask=there, other=0.0))


@triton.jit(do_not_specialize=["length"])
def _back(
    dy_ptr,
    df_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    inverse_ptr,
    weight_ptr,
    total_ptr,
    q_factor_ptr,
    k_factor_ptr,
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
    t_b,
    t_l,
    t_h,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """late, the gradient of the state that a chunk ends with: (batch, chunks, heads, width, dim). asked, that of a
    correction: (batch, length, heads, dim). Both in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    chunks = tl.cdiv(length, CHUNK)
    dy_ptr += sample * y_b + head * y_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    beta_ptr += sample * t_b + head * t_h
    row = (sample * length * heads + head) * dim
    place = (sample * heads + head) * chunks
    late_ptr += (sample * chunks * heads + head) * width * dim
    # (parts, keys of a part, columns): each warp has its own keys
    key = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (key < width)[:, :, None] & (column < dim)[None, None, :]
    at = key[:, :, None] * dim + column[None, None, :]
    late = tl.zeros([PARTS, BLOCK_K, BLOCK_V], tl.float32)
    if df_ptr is not None:
        df_ptr += sample * f_b + head * f_h
        late = widen(tl.load(df_ptr + key[:, :, None] * f_k + column[None, None, :] * f_v, mask=inside, other=0.0))
    for step in tl.range(0, chunks, num_stages=1):
        i = tl.full([], 1, tl.int64) * (chunks - 1 - step)
        first = i * CHUNK
        live = c < length - first
        tl.store(late_ptr + i * heads * width * dim + at, late, mask=inside)
        total = tl.load(total_ptr + (place + i) * CHUNK + c)
        end = tl.load(total_ptr + (place + i) * CHUNK + CHUNK - 1)
        k_factor = tl.load(k_factor_ptr + (place + i) * CHUNK + c)
        q_factor = tl.load(q_factor_ptr + (place + i) * CHUNK + c)
        beta = widen(tl.load(beta_ptr + (first + c) * t_l, mask=live, other=0.0))
        k = _keys(k_ptr + first * k_l, k_l, k_k, c, key, live, width)
        asked = tl.sum(tl.dot(k, late, input_precision=PRECISION), 0)
        dy = _tile(dy_ptr + first * y_l, c, column, y_l, y_v, live, dim)
        table = (place + i) * CHUNK * CHUNK + c[:, None] * CHUNK + c[None, :]
        asked = tl.dot(
            tl.load(weight_ptr + table), dy, asked * (exp(end - total) * k_factor)[:, None], input_precision=PRECISION
        )
        asked = tl.dot(tl.load(inverse_ptr + table), asked, input_precision=PRECISION)
        x = beta[:, None] * asked
        shape = live[:, None] & (column < dim)[None, :]
        out = row + (first + c)[:, None] * (heads * dim) + column[None, :]
        tl.store(asked_ptr + out, asked, mask=shape)
        tl.store(dv_ptr + out, narrow(x, dv_ptr.dtype.element_ty), mask=shape)
        tl.debug_barrier()  # k is read again: held until here, it would spill on sm_90
        since = exp(total)
        k = _keys(k_ptr + first * k_l, k_l, k_k, c, key, live, width)
        x = tl.broadcast_to(((-since * k_factor)[:, None] * x)[None, :, :], [PARTS, CHUNK, BLOCK_V])
        late = tl.dot(tl.permute(k, (0, 2, 1)), x, late * exp(end), input_precision=PRECISION)
        tl.debug_barrier()
        q = _keys(q_ptr + first * q_l, q_l, q_k, c, key, live, width)
        dy = tl.broadcast_to(((since * q_factor)[:, None] * dy)[None, :, :], [PARTS, CHUNK, BLOCK_V])
        late = tl.dot(tl.permute(q, (0, 2, 1)), dy, late, input_precision=PRECISION)
    if ds_ptr is not None:
        ds_ptr += (sample * heads + head) * width * dim
        tl.store(ds_ptr + at, narrow(late, ds_ptr.dtype.element_ty), mask=inside)


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
    made = begun(q, k, v, g, beta, initial_state)
    if batch * length * heads * width * dim == 0:
        for t in made:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            made[5].copy_(grad_final_state)
        return tuple(made)
    factor = float(width**-0.5 if scale is None else scale)
    forth = Chunks(None, k, g, beta, factor, qk_l2norm, target)
    held, wrong = walked(forth, k, v, beta, initial_state, None, forth.chunk, target)
    back = Chunks(q, k, g, beta, factor, qk_l2norm, target)
    # with 4 warps, or 32 keys in each, `_back` spills in float32 on sm_80, sm_90 and gfx1100
    warps, keys = (8, 16) if target.wave == 32 else (4, _power(width, 32))
    late, asked = torch.empty_like(held), torch.empty_like(wrong)
    launch(
        _back,
        (batch * heads * triton.cdiv(dim, COLUMNS),),
        grad_y,
        grad_final_state,
        q,
        k,
        beta,
        back.inverse,
        back.weight,
        forth.total,
        back.factor,
        forth.factor,
        late,
        asked,
        made[2],
        None if initial_state is None else made[5],
        length,
        heads,
        heads // shared,
        width,
        dim,
        *grad_y.stride(),
        *strides(grad_final_state, 4),
        *q.stride(),
        *k.stride(),
        *beta.stride(),
        precision_of(target),
        back.chunk,
        triton.next_power_of_2(triton.cdiv(width, keys)),
        keys,
        COLUMNS,
        device=v.device,
        num_warps=warps,
    )
    walks = (held, late, wrong, asked)
    gradients(
        grad_y, q, k, g, beta, walks, made, factor, qk_l2norm, back.chunk, 8 if target.vendor == "nvidia" else 4, target
    )
    return tuple(made)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, kept: Any, scale: Any, norm: bool) -> None:
        gated_delta_rule_backward(v, kept, q, k, v, g, beta, kept, scale, norm, target)

    # of `_back` scalar registers, which lie in lanes of vector registers; of `_chunk` bytes of a thread
    few = {"sm_87": 8, "sm_89": 8, "sm_90": 8, "sm_100": 16}.get(target.arch, 0) if dtype == "float32" else 0
    allowed = {"_back": 24 if target.wave == 64 else 0, "_chunk": few}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in called(run, getattr(torch, dtype))]
