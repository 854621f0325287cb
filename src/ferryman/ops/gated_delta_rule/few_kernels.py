"""`gated_delta_rule` of few tokens, and its gradients, in Triton: a program keeps some columns of a head's state in
registers.

`_recurrent` goes token after token. A warp keeps its columns alone, so that no sum over keys waits for another warp,
and asks for all of them before it waits for a row. `_slopes` goes from the last token back, with the state's gradient
in registers. The state before a token is made again from the first one: by corrections alone, which the way there left
in memory, so without sums. Of one token each state and gradient is moved once. What columns and heads share is added up
in `_joined`, in a fixed order.

Limit of one token, for K = V = 128: 8 K V bytes of a head, the state read and written, 0.13 MB: 7 samples of 16 heads
take 5 us at the 2.8 TB/s of an H100. Of the gradient 12 K V, and 64 K for parts of dq and dk, written and read: 47
samples of 32 heads are 308 MB, 110 us.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import exp, inverse_root, narrow, widen
from ferryman.ops.gated_delta_rule.backward_kernels import begun
from ferryman.ops.gated_delta_rule.chunk_kernels import _place
from ferryman.ops.gated_delta_rule.triton_kernels import _launch, _power

COLUMNS, OF_A_WARP = 16, 2048  # of a program of `_recurrent`, and numbers of the state
STATE = 4096  # numbers of the state in a program of `_slopes`
PARTS = 1024  # numbers that a program of `_joined` adds up at once


@triton.jit
def _row(ptr, n, step, many):
    """As it lies there: where rows are widened once all are asked for, none waits for another."""
    return tl.load(ptr + n * step, mask=n < many, other=0.0)


@triton.jit
def _columns(ptr, n, column, row, one, inside, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Columns of a state; without one zeros."""
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if ptr is not None:
        state = widen(tl.load(ptr + n[:, None] * row + column[None, :] * one, mask=inside, other=0.0))
    return state


@triton.jit
def _exponent(g_ptr, place):
    exponent = tl.full([], 0.0, tl.float32)
    if g_ptr is not None:
        exponent = tl.load(g_ptr + place)
    return exponent


@triton.jit
def _decay(exponent, g_ptr):
    decay = tl.full([], 1.0, tl.float32)
    if g_ptr is not None:
        decay = exp(widen(exponent))
    return decay


@triton.jit
def _root(x, NORM: tl.constexpr):
    """What multiplies a row."""
    root = tl.full([], 1.0, tl.float32)
    if NORM:
        root = inverse_root(tl.sum(x * x, 0) + 1e-6)
    return root


@triton.jit(do_not_specialize=["length"])
def _recurrent(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    scale,
    length,
    heads,
    shared,
    width,
    dim,
    q_b,
    q_l,
    q_h,
    q_k,
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
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sample, head, column = _place(heads, dim, BLOCK_V)
    n = tl.arange(0, BLOCK_K)
    inside = (n < width)[:, None] & (column < dim)[None, :]
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    beta_ptr += sample * t_b + head * t_h
    if g_ptr is not None:
        g_ptr += sample * g_b + head * g_h
    y_ptr += (sample * length * heads + head) * dim + column
    state = _columns(state_ptr, n, column, s_k, s_v, inside, BLOCK_K, BLOCK_V)
    tl.debug_barrier()  # a state is asked for before any row is waited for
    count = length
    if ONE:
        count = 1
    for t in tl.range(0, count, num_stages=1):
        at = tl.full([], 1, tl.int64) * t
        k, q = _row(k_ptr + at * k_l, n, k_k, width), _row(q_ptr + at * q_l, n, q_k, width)
        v = _row(v_ptr + at * v_l, column, v_v, dim)
        beta, exponent = tl.load(beta_ptr + at * t_l), _exponent(g_ptr, at * g_l)
        k, q, v, beta = widen(k), widen(q), widen(v), widen(beta)
        k *= _root(k, NORM)
        q *= _root(q, NORM) * scale
        state *= _decay(exponent, g_ptr)
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        y = tl.sum(state * q[:, None], 0)
        tl.store(y_ptr + at * (heads * dim), narrow(y, y_ptr.dtype.element_ty), mask=column < dim)
    final_ptr += (sample * heads + head) * width * dim
    tl.store(final_ptr + n[:, None] * dim + column[None, :], state, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _slopes(
    dy_ptr,
    df_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    came_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    sum_ptr,
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
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dq, dk, of rows as they are multiplied: (batch, length, heads, blocks of columns, width). sum, to the gradients
    of beta and g: (.., blocks of columns, 2). came, what multiplied a row of k in the state: (batch, length, heads,
    dim); None of one token. All in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    blocks = tl.cdiv(dim, BLOCK_V)
    n = tl.arange(0, BLOCK_K)
    inside = (n < width)[:, None] & (column < dim)[None, :]
    dy_ptr += sample * y_b + head * y_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    beta_ptr += sample * t_b + head * t_h
    if g_ptr is not None:
        g_ptr += sample * g_b + head * g_h
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    if df_ptr is not None:
        df_ptr += sample * f_b + head * f_h
    row = sample * length * heads + head
    part = row * blocks + tl.program_id(0) % blocks
    back = _columns(df_ptr, n, column, f_k, f_v, inside, BLOCK_K, BLOCK_V)
    count = length
    if ONE:
        count = 1
    else:
        came_ptr += row * dim + column
        state = _columns(state_ptr, n, column, s_k, s_v, inside, BLOCK_K, BLOCK_V)
        for t in tl.range(0, length - 1, num_stages=1):
            at = tl.full([], 1, tl.int64) * t
            k, v = _row(k_ptr + at * k_l, n, k_k, width), _row(v_ptr + at * v_l, column, v_v, dim)
            beta, exponent = tl.load(beta_ptr + at * t_l), _exponent(g_ptr, at * g_l)
            k, v, beta = widen(k), widen(v), widen(beta)
            root = _root(k, NORM)
            state *= _decay(exponent, g_ptr)
            came = root * (beta * (v - root * tl.sum(state * k[:, None], 0)))
            state += k[:, None] * came[None, :]
            tl.store(came_ptr + at * (heads * dim), came, mask=column < dim)
        tl.debug_barrier()
    for i in tl.range(0, count, num_stages=1):
        t = count - 1 - i
        at = tl.full([], 1, tl.int64) * t
        state = _columns(state_ptr, n, column, s_k, s_v, inside, BLOCK_K, BLOCK_V)
        tl.debug_barrier()  # a state is asked for before any row is waited for
        k, q = _row(k_ptr + at * k_l, n, k_k, width), _row(q_ptr + at * q_l, n, q_k, width)
        v, dy = _row(v_ptr + at * v_l, column, v_v, dim), _row(dy_ptr + at * y_l, column, y_v, dim)
        beta, exponent = tl.load(beta_ptr + at * t_l), _exponent(g_ptr, at * g_l)
        k, q, v, dy, beta = widen(k), widen(q), widen(v), widen(dy), widen(beta)
        decay = _decay(exponent, g_ptr)
        if not ONE:
            for j in tl.range(0, t, num_stages=1):
                of = tl.full([], 1, tl.int64) * j
                came = tl.load(came_ptr + of * (heads * dim), mask=column < dim, other=0.0)
                key, exponent = _row(k_ptr + of * k_l, n, k_k, width), _exponent(g_ptr, of * g_l)
                state = state * _decay(exponent, g_ptr) + widen(key)[:, None] * came[None, :]
        k *= _root(k, NORM)
        back += (q * (_root(q, NORM) * scale))[:, None] * dy[None, :]
        asked = tl.sum(back * k[:, None], 0)
        state *= decay
        wrong = v - tl.sum(state * k[:, None], 0)
        d, x = beta * wrong, beta * asked
        dq = tl.sum((state + k[:, None] * d[None, :]) * dy[None, :], 1)
        dk = tl.sum(back * d[None, :] - state * x[None, :], 1)
        back -= k[:, None] * x[None, :]
        place = part + at * (heads * blocks)
        tl.store(dq_ptr + place * width + n, dq, mask=n < width)
        tl.store(dk_ptr + place * width + n, dk, mask=n < width)
        out = dv_ptr + (row + at * heads) * dim + column
        tl.store(out, narrow(x, dv_ptr.dtype.element_ty), mask=column < dim)
        tl.store(sum_ptr + 2 * place, tl.sum(wrong * asked, 0))
        if g_ptr is not None:
            tl.store(sum_ptr + 2 * place + 1, tl.sum(tl.sum(back * state, 1), 0))
        back *= decay
    if ds_ptr is not None:
        ds_ptr += (sample * heads + head) * width * dim
        at = n[:, None] * dim + column[None, :]
        tl.store(ds_ptr + at, narrow(back, ds_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _total(ptr, rows, width, n, ROWS: tl.constexpr):
    """A sum of rows."""
    total = tl.zeros(n.shape, tl.float32)
    r = tl.arange(0, ROWS)
    for first in tl.range(0, rows, ROWS, num_stages=1):
        there = (r < rows - first)[:, None] & (n < width)[None, :]
        total += tl.sum(tl.load(ptr + (first + r)[:, None] * width + n[None, :], mask=there, other=0.0), 0)
    return total


@triton.jit
def _through(total, x, scale, NORM: tl.constexpr):
    """The gradient of a row x, of that of the row as it is multiplied."""
    root = _root(x, NORM)
    if NORM:
        total -= x * (tl.sum(x * total, 0) * root * root)
    return total * (root * scale)


@triton.jit
def _joined(
    q_ptr,
    k_ptr,
    q_part_ptr,
    k_part_ptr,
    sum_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    length,
    groups,
    shared,
    width,
    blocks,
    q_b,
    q_l,
    q_h,
    q_k,
    k_b,
    k_l,
    k_h,
    k_k,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program takes a token's group of heads."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    token = program // groups
    n = tl.arange(0, BLOCK_K)
    q_ptr += (token // length) * q_b + (token % length) * q_l + group * q_h
    k_ptr += (token // length) * k_b + (token % length) * k_l + group * k_h
    q, k = widen(_row(q_ptr, n, q_k, width)), widen(_row(k_ptr, n, k_k, width))
    rows = shared * blocks
    dq = _total(q_part_ptr + program * rows * width, rows, width, n, ROWS)
    dk = _total(k_part_ptr + program * rows * width, rows, width, n, ROWS)
    out = program * width + n
    dq, dk = _through(dq, q, scale, NORM), _through(dk, k, 1.0, NORM)
    tl.store(dq_ptr + out, narrow(dq, dq_ptr.dtype.element_ty), mask=n < width)
    tl.store(dk_ptr + out, narrow(dk, dk_ptr.dtype.element_ty), mask=n < width)
    h, b = tl.arange(0, HEADS), tl.arange(0, BLOCKS)
    for first in tl.range(0, shared, HEADS, num_stages=1):
        head = program * shared + first + h
        live = h < shared - first
        at = 2 * (head[:, None] * blocks + b[None, :])
        there = live[:, None] & (b < blocks)[None, :]
        of_beta = tl.sum(tl.load(sum_ptr + at, mask=there, other=0.0), 1)
        tl.store(dbeta_ptr + head, narrow(of_beta, dbeta_ptr.dtype.element_ty), mask=live)
        if dg_ptr is not None:
            of_g = tl.sum(tl.load(sum_ptr + at + 1, mask=there, other=0.0), 1)
            tl.store(dg_ptr + head, narrow(of_g, dg_ptr.dtype.element_ty), mask=live)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    block_k = _power(q.shape[3], 256, 1)
    block_v = _power(v.shape[3], COLUMNS, 1)
    options, warps = (qk_l2norm, q.shape[1] == 1, block_k), max(1, block_k * block_v // OF_A_WARP)
    return _launch(_recurrent, q, k, v, g, beta, initial_state, scale, options, block_v, warps)


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
    dq, dk, dv, dg, dbeta, ds = results = begun(q, k, v, g, beta, initial_state)
    if batch * length * heads * width * dim == 0:
        for t in results:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            ds.copy_(grad_final_state)
        return tuple(results)
    factor, repeated = float(width**-0.5 if scale is None else scale), heads // shared
    block_k = _power(width, 256)
    block_v = _power(dim, STATE // block_k)
    blocks = triton.cdiv(dim, block_v)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    parts = [torch.empty(batch, length, heads, blocks, width, **kind) for _ in range(2)]
    sums = torch.empty(batch, length, heads, blocks, 2, **kind)
    came = torch.empty(batch, length, heads, dim, **kind) if length > 1 else None
    launch(
        _slopes,
        (batch * heads * blocks,),
        grad_y,
        grad_final_state,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        came,
        *parts,
        dv,
        sums,
        None if initial_state is None else ds,
        factor,
        length,
        heads,
        repeated,
        width,
        dim,
        *grad_y.stride(),
        *strides(grad_final_state, 4),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *strides(g, 3),
        *beta.stride(),
        *strides(initial_state, 4),
        qk_l2norm,
        length == 1,
        block_k,
        block_v,
        device=v.device,
        # of several tokens 4 warps spill on sm_80 to sm_89
        num_warps=1 if block_k * block_v < 1024 else 4 if length == 1 else 8,
    )
    most_heads = _power(repeated, max(1, PARTS // _power(blocks, PARTS, 1)), 1)
    launch(
        _joined,
        (batch * length * shared,),
        q,
        k,
        *parts,
        sums,
        dq,
        dk,
        None if g is None else dg,
        dbeta,
        factor,
        length,
        shared,
        repeated,
        width,
        blocks,
        *q.stride(),
        *k.stride(),
        qk_l2norm,
        _power(repeated * blocks, PARTS // block_k, 1),
        most_heads,
        triton.next_power_of_2(blocks),
        block_k,
        device=v.device,
        num_warps=1,
    )
    return tuple(results)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Qwen3-Next's heads, Olmo Hybrid's, wider keys and small odd ones; one token and several; with a decay, a state
    and normalisation, and without."""
    kind = getattr(torch, dtype)

    def calls(length: int, shared: int, heads: int, width: int, dim: int, gate: bool, state: bool, norm: bool) -> None:
        q = torch.empty(2, length, shared, width, dtype=kind, device="meta")
        v = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        beta = torch.empty(2, length, heads, dtype=kind, device="meta")
        g = torch.empty(2, length, heads, dtype=torch.float32, device="meta") if gate else None
        kept = torch.empty(2, heads, width, dim, dtype=torch.float32, device="meta") if state else None
        gated_delta_rule(q, q, v, g, beta, kept, None, norm, target)
        gated_delta_rule_backward(v, kept, q, q, v, g, beta, kept, None, norm, target)

    shapes: tuple[tuple[Any, ...], ...] = (
        (1, 16, 32, 128, 128, True, True, True),
        (1, 30, 30, 96, 192, True, True, True),
        (7, 16, 16, 256, 256, False, False, False),
        (16, 16, 32, 128, 128, True, True, True),
        (3, 3, 3, 11, 13, True, True, True),
    )
    # scalar registers lie in lanes of vector registers, none in memory
    allowed = {"_slopes": 64 if target.wave == 64 else 2 if target.vendor == "amd" else 0}
    every = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in every]
