"""`ssd_scan` in Triton: a program takes a head of a sample and a block of its dimensions, chunk after chunk.

Its part of the state lies where the final one goes, and is read and written a block of columns at a time: in registers,
it spilled on every device. All products are of float32 operands, by tl.dot: as three of tf32 on the
matrix units of NVIDIA, as float32 on those of AMD. Nothing is rounded on the way to y. Programs are batch x heads x
blocks of dimensions: one short sequence leaves units of a large device idle.

Backward: `_states` walks over chunks twice, forward for the states that they begin with, and back for the gradients of
those that they end with; both are kept in float32. Then a program of `_chunk` takes one chunk of a head alone. What
heads of a group share is written for each head, and `_sum` adds it up, in a fixed order. No atomics.
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
from ferryman.backends.triton_lang import exp, narrow, sigmoid, softplus, widen


@triton.jit(do_not_specialize=["length"])
def _scan(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    low,
    high,
    length,
    heads,
    shared,
    dim,
    width,
    x_b,
    x_l,
    x_h,
    x_p,
    t_b,
    t_l,
    t_h,
    b_b,
    b_l,
    b_g,
    b_n,
    c_b,
    c_l,
    c_g,
    c_n,
    s_b,
    s_h,
    s_p,
    s_n,
    SOFTPLUS: tl.constexpr,
    ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ONE: all tokens are one chunk, which takes the state from where it was given."""
    across = tl.cdiv(dim, BLOCK_P)
    program = tl.program_id(0)
    first = (program % across) * BLOCK_P
    head = (program // across) % heads
    sample = (program // (across * heads)).to(tl.int64)
    q = tl.arange(0, CHUNK)
    p = first + tl.arange(0, BLOCK_P)
    rate = widen(tl.load(a_ptr + head))
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    x_ptr += sample * x_b + head * x_h
    dt_ptr += sample * t_b + head * t_h
    b_ptr += sample * b_b + (head // shared) * b_g
    c_ptr += sample * c_b + (head // shared) * c_g
    y_ptr += (sample * length * heads + head) * dim
    final_ptr += (sample * heads + head) * dim * width
    known = (p < dim)[:, None]
    if not ONE:
        for column in tl.range(0, width, BLOCK_N, num_stages=1):
            n = column + tl.arange(0, BLOCK_N)
            state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
            if state_ptr is not None:
                state = _tile(state_ptr, p, n, s_p, s_n, known, width)
            tl.store(final_ptr + p[:, None] * width + n[None, :], state, mask=known & (n < width)[None, :])
        tl.debug_barrier()
    for at in tl.range(0, length, CHUNK, num_stages=1):
        place = tl.full([], 1, tl.int64) * at
        live = q < length - at
        step, _ = _steps(dt_ptr + place * t_l, bias_ptr, low, high, t_l, head, q, live, SOFTPLUS)
        total = _cumulative(step * rate, q)
        end = tl.sum(tl.where(q == CHUNK - 1, total, 0.0), 0)
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        y = tl.zeros([CHUNK, BLOCK_P], tl.float32)
        for column in tl.range(0, width, BLOCK_N, num_stages=1):
            n = column + tl.arange(0, BLOCK_N)
            b = _tile(b_ptr + place * b_l, q, n, b_l, b_n, live[:, None], width)
            c = _tile(c_ptr + place * c_l, q, n, c_l, c_n, live[:, None], width)
            scores = tl.dot(c, tl.trans(b), scores, input_precision=PRECISION)
            state = _state_before(state_ptr, final_ptr, p, n, s_p, s_n, known, width, ONE, BLOCK_P, BLOCK_N)
            y = tl.dot(c, tl.trans(state), y, input_precision=PRECISION)
        x = _tile(x_ptr + place * x_l, q, p, x_l, x_p, live[:, None], dim)
        seen = q[:, None] >= q[None, :]
        decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        weight = tl.where(seen, decay * scores * step[None, :], 0.0)
        y = tl.dot(weight, x, y * exp(total)[:, None], input_precision=PRECISION)
        if d_ptr is not None:
            y += widen(tl.load(d_ptr + head)) * x
        out = y_ptr + place * (heads * dim) + q[:, None] * (heads * dim) + p[None, :]
        tl.store(out, narrow(y, y_ptr.dtype.element_ty), mask=live[:, None] & (p < dim)[None, :])
        kept = tl.trans(x * (exp(end - total) * step)[:, None])
        tl.debug_barrier()
        for column in tl.range(0, width, BLOCK_N, num_stages=1):
            n = column + tl.arange(0, BLOCK_N)
            b = _tile(b_ptr + place * b_l, q, n, b_l, b_n, live[:, None], width)
            state = _state_before(state_ptr, final_ptr, p, n, s_p, s_n, known, width, ONE, BLOCK_P, BLOCK_N)
            state = tl.dot(kept, b, state * exp(end), input_precision=PRECISION)
            tl.store(final_ptr + p[:, None] * width + n[None, :], state, mask=known & (n < width)[None, :])
        tl.debug_barrier()


@triton.jit
def _state_before(
    state_ptr,
    final_ptr,
    p,
    n,
    s_p,
    s_n,
    known,
    width,
    ONE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of the state that a chunk begins with."""
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if not ONE:
        state = _tile(final_ptr, p, n, width, 1, known, width)
    elif state_ptr is not None:
        state = _tile(state_ptr, p, n, s_p, s_n, known, width)
    return state


@triton.jit
def _cumulative(e, q):
    """Sums up to each token. A scan over lanes would take instructions that the simulator of AMD devices lacks."""
    return tl.sum(tl.where(q[:, None] <= q[None, :], e[:, None], 0.0), 0)


@triton.jit
def _steps(dt_ptr, bias_ptr, low, high, t_l, head, q, live, SOFTPLUS: tl.constexpr):
    """(steps, 0 past the end, and their slopes) of a chunk."""
    z = widen(tl.load(dt_ptr + q * t_l, mask=live, other=0.0))
    if bias_ptr is not None:
        z += widen(tl.load(bias_ptr + head))
    step = z
    slope = tl.full(z.shape, 1.0, tl.float32)
    if SOFTPLUS:
        step = softplus(z)
        slope, _ = sigmoid(z)
    if low is not None:
        slope = tl.where(step < low, 0.0, slope)
        step = tl.where(step < low, low, step)
    if high is not None:
        slope = tl.where(step > high, 0.0, slope)
        step = tl.where(step > high, high, step)
    return tl.where(live, step, 0.0), slope


@triton.jit(do_not_specialize=["length"])
def _states(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    bias_ptr,
    state_ptr,
    kept_ptr,
    final_ptr,
    low,
    high,
    length,
    heads,
    shared,
    dim,
    width,
    x_b,
    x_l,
    x_h,
    x_p,
    t_b,
    t_l,
    t_h,
    b_b,
    b_l,
    b_g,
    b_n,
    s_b,
    s_h,
    s_p,
    s_n,
    SOFTPLUS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """kept: (batch, chunks, heads, dim, width), what each chunk begins with. REVERSE: of x = grad y and b = c, what it
    ends with; ``final`` gets what stands before the first token."""
    across = tl.cdiv(dim, BLOCK_P)
    down = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    first = (program % across) * BLOCK_P
    column = (program // across) % down * BLOCK_N
    head = (program // (across * down)) % heads
    sample = (program // (across * down * heads)).to(tl.int64)
    q = tl.arange(0, CHUNK)
    p = first + tl.arange(0, BLOCK_P)
    n = column + tl.arange(0, BLOCK_N)
    inside = (p < dim)[:, None] & (n < width)[None, :]
    rate = widen(tl.load(a_ptr + head))
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
        state = widen(tl.load(state_ptr + p[:, None] * s_p + n[None, :] * s_n, mask=inside, other=0.0))
    x_ptr += sample * x_b + head * x_h
    dt_ptr += sample * t_b + head * t_h
    b_ptr += sample * b_b + (head // shared) * b_g
    count = tl.cdiv(length, CHUNK)
    place = p[:, None] * width + n[None, :]
    kept_ptr += (sample * count * heads + head) * dim * width
    for i in tl.range(0, count, num_stages=1):
        chunk = count - 1 - i if REVERSE else i
        tl.store(kept_ptr + chunk.to(tl.int64) * heads * dim * width + place, state, mask=inside)
        at = chunk.to(tl.int64) * CHUNK
        live = q < length - at
        step, _ = _steps(dt_ptr + at * t_l, bias_ptr, low, high, t_l, head, q, live, SOFTPLUS)
        total = _cumulative(step * rate, q)
        end = tl.sum(tl.where(q == CHUNK - 1, total, 0.0), 0)
        shape = live[:, None] & (p < dim)[None, :]
        wide = live[:, None] & (n < width)[None, :]
        x = widen(tl.load(x_ptr + at * x_l + q[:, None] * x_l + p[None, :] * x_p, mask=shape, other=0.0))
        b = widen(tl.load(b_ptr + at * b_l + q[:, None] * b_l + n[None, :] * b_n, mask=wide, other=0.0))
        weight = exp(total) if REVERSE else exp(end - total) * step
        state = tl.dot(tl.trans(x * weight[:, None]), b, state * exp(end), input_precision=PRECISION)
    if final_ptr is not None:
        final_ptr += (sample * heads + head) * dim * width
        tl.store(final_ptr + place, narrow(state, final_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile(ptr, rows, columns, row, column, known, many):
    return widen(
        tl.load(
            ptr + rows[:, None] * row + columns[None, :] * column, mask=known & (columns < many)[None, :], other=0.0
        )
    )


@triton.jit(do_not_specialize=["length", "chunks"])
def _chunk(
    dy_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bias_ptr,
    held_ptr,
    late_ptr,
    dx_ptr,
    ddt_ptr,
    db_ptr,
    dc_ptr,
    da_ptr,
    dd_ptr,
    dbias_ptr,
    low,
    high,
    length,
    chunks,
    heads,
    shared,
    dim,
    width,
    g_b,
    g_l,
    g_h,
    g_p,
    x_b,
    x_l,
    x_h,
    x_p,
    t_b,
    t_l,
    t_h,
    b_b,
    b_l,
    b_g,
    b_n,
    c_b,
    c_l,
    c_g,
    c_n,
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """db, dc: (batch, length, heads, width) in float32. da, dd, dbias: (batch x chunks, heads)."""
    program = tl.program_id(0)
    head = program % heads
    which = (program // heads) % chunks
    sample = (program // (heads * chunks)).to(tl.int64)
    group = head // shared
    at = which.to(tl.int64) * CHUNK
    q = tl.arange(0, CHUNK)
    live = q < length - at
    known = live[:, None]
    rate = widen(tl.load(a_ptr + head))
    x_ptr += sample * x_b + head * x_h + at * x_l
    dy_ptr += sample * g_b + head * g_h + at * g_l
    b_ptr += sample * b_b + group * b_g + at * b_l
    c_ptr += sample * c_b + group * c_g + at * c_l
    row = (sample * length + at) * heads + head
    held_ptr += ((sample * chunks + which) * heads + head) * dim * width
    late_ptr += ((sample * chunks + which) * heads + head) * dim * width
    step, slope = _steps(
        dt_ptr + sample * t_b + head * t_h + at * t_l, bias_ptr, low, high, t_l, head, q, live, SOFTPLUS
    )
    total = _cumulative(step * rate, q)
    end = tl.sum(tl.where(q == CHUNK - 1, total, 0.0), 0)
    early, to_end = exp(total), exp(end - total)
    cross = tl.zeros([CHUNK, CHUNK], tl.float32)  # [t, s]: grad y_t . x_s
    skip = 0.0
    for first in tl.range(0, dim, BLOCK_P, num_stages=1):
        p = first + tl.arange(0, BLOCK_P)
        g = _tile(dy_ptr, q, p, g_l, g_p, known, dim)
        x = _tile(x_ptr, q, p, x_l, x_p, known, dim)
        skip += tl.sum(tl.sum(g * x, 1), 0)
        cross = tl.dot(g, tl.trans(x), cross, input_precision=PRECISION)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)  # c_t . b_s
    for first in tl.range(0, width, BLOCK_N, num_stages=1):
        n = first + tl.arange(0, BLOCK_N)
        b = _tile(b_ptr, q, n, b_l, b_n, known, width)
        c = _tile(c_ptr, q, n, c_l, c_n, known, width)
        scores = tl.dot(c, tl.trans(b), scores, input_precision=PRECISION)
    seen = q[:, None] >= q[None, :]
    decay = tl.where(seen, exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    pairs = decay * scores * cross
    # of an exponent: all pairs with the earlier token before it, and the later one not
    reached = pairs * step[None, :]
    before = tl.dot(reached, tl.where(q[:, None] < q[None, :], 1.0, 0.0), input_precision=PRECISION)
    exponent = tl.sum(tl.where(seen, before, 0.0), 0)
    of_step = tl.sum(pairs, 0)
    weight = decay * scores * step[None, :]
    for first in tl.range(0, dim, BLOCK_P, num_stages=1):
        p = first + tl.arange(0, BLOCK_P)
        g = _tile(dy_ptr, q, p, g_l, g_p, known, dim)
        read = tl.zeros([CHUNK, BLOCK_P], tl.float32)
        for column in tl.range(0, width, BLOCK_N, num_stages=1):
            n = column + tl.arange(0, BLOCK_N)
            b = _tile(b_ptr, q, n, b_l, b_n, known, width)
            late = _tile(late_ptr, p, n, width, 1, (p < dim)[:, None], width)
            read = tl.dot(b, tl.trans(late), read, input_precision=PRECISION)
        dx = tl.dot(tl.trans(weight), g, read * (step * to_end)[:, None], input_precision=PRECISION)
        if d_ptr is not None:
            dx += widen(tl.load(d_ptr + head)) * g
        out = dx_ptr + row * dim + q[:, None] * (heads * dim) + p[None, :]
        tl.store(out, narrow(dx, dx_ptr.dtype.element_ty), mask=known & (p < dim)[None, :])
    weight = decay * cross * step[None, :]
    of_early = tl.zeros([CHUNK], tl.float32)
    of_late = tl.zeros([CHUNK], tl.float32)
    whole = 0.0
    for column in tl.range(0, width, BLOCK_N, num_stages=1):
        n = column + tl.arange(0, BLOCK_N)
        asked = tl.zeros([CHUNK, BLOCK_N], tl.float32)
        for first in tl.range(0, dim, BLOCK_P, num_stages=1):
            p = first + tl.arange(0, BLOCK_P)
            state = _tile(held_ptr, p, n, width, 1, (p < dim)[:, None], width)
            g = _tile(dy_ptr, q, p, g_l, g_p, known, dim)
            asked = tl.dot(g, state, asked, input_precision=PRECISION)
        asked *= early[:, None]
        of_early += tl.sum(asked * _tile(c_ptr, q, n, c_l, c_n, known, width), 1)
        b = _tile(b_ptr, q, n, b_l, b_n, known, width)
        dc = tl.dot(weight, b, asked, input_precision=PRECISION)
        place = row * width + q[:, None] * (heads * width) + n[None, :]
        tl.store(dc_ptr + place, dc, mask=known & (n < width)[None, :])
    for column in tl.range(0, width, BLOCK_N, num_stages=1):
        n = column + tl.arange(0, BLOCK_N)
        brought = tl.zeros([CHUNK, BLOCK_N], tl.float32)
        for first in tl.range(0, dim, BLOCK_P, num_stages=1):
            p = first + tl.arange(0, BLOCK_P)
            state = _tile(held_ptr, p, n, width, 1, (p < dim)[:, None], width)
            late = _tile(late_ptr, p, n, width, 1, (p < dim)[:, None], width)
            whole += tl.sum(tl.sum(state * late, 1), 0)
            x = _tile(x_ptr, q, p, x_l, x_p, known, dim)
            brought = tl.dot(x, late, brought, input_precision=PRECISION)
        brought *= to_end[:, None]
        of_late += tl.sum(brought * _tile(b_ptr, q, n, b_l, b_n, known, width), 1)
        c = _tile(c_ptr, q, n, c_l, c_n, known, width)
        db = tl.dot(tl.trans(weight), c, brought * step[:, None], input_precision=PRECISION)
        place = row * width + q[:, None] * (heads * width) + n[None, :]
        tl.store(db_ptr + place, db, mask=known & (n < width)[None, :])
    exponent += tl.sum(tl.where(seen, of_early[:, None], 0.0), 0)
    exponent += tl.sum(tl.where(q[:, None] < q[None, :], (of_late * step)[:, None], 0.0), 0)
    exponent += exp(end) * whole
    ddt = tl.where(live, (exponent * rate + of_step + of_late) * slope, 0.0)
    tl.store(ddt_ptr + row + q * heads, narrow(ddt, ddt_ptr.dtype.element_ty), mask=live)
    mine = (sample * chunks + which) * heads + head
    tl.store(da_ptr + mine, tl.sum(exponent * step, 0))
    tl.store(dd_ptr + mine, skip)
    tl.store(dbias_ptr + mine, tl.sum(ddt, 0))


@triton.jit(do_not_specialize=["parts"])
def _sum(part_ptr, out_ptr, parts, step, inner, outer, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum over ``parts`` of part[i // inner * outer + i % inner + r * step], in a fixed order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = at // inner * outer + at % inner
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        there = (start + row).to(tl.int64)[:, None] * step + place[None, :]
        total += tl.load(part_ptr + there, mask=(row < parts - start)[:, None] & (at < count)[None, :], other=0.0)
    tl.store(out_ptr + at, narrow(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=at < count)


def _power(n: int, most: int) -> int:
    return max(16, min(triton.next_power_of_2(n), most))


def _tiles(length: int, dim: int, width: int, target: Target) -> tuple[int, int, int, int]:
    """(chunk, dimensions, columns of the state, warps) of a program of `_scan`."""
    # with chunks of 32 and 32 columns gfx1100 spills 20 registers, and gfx90a 60 scalar ones with any columns
    small = length <= 16 or target.wave == 64
    return 16 if small else 32, _power(dim, 32), 16 if target.wave == 32 else _power(width, 32), 4


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    y_float32: bool,
    dt_min: float | None,
    dt_max: float | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32 if y_float32 else x.dtype, device=x.device)
    final = torch.empty(batch, heads, dim, width, dtype=torch.float32, device=x.device)
    if batch * heads * dim == 0:
        return y, final
    chunk, block_p, block_n, warps = _tiles(length, dim, width, target)
    own = [None if t is None else t.contiguous() for t in (d, dt_bias)]
    launch(
        _scan,
        (batch * heads * triton.cdiv(dim, block_p),),
        x,
        dt,
        a.contiguous(),
        b,
        c,
        *own,
        initial_state,
        y,
        final,
        dt_min,
        dt_max,
        length,
        heads,
        heads // groups,
        dim,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *strides(initial_state, 4),
        dt_softplus,
        0 < length <= chunk,
        "tf32x3" if target.vendor == "nvidia" else "ieee",
        chunk,
        block_p,
        block_n,
        device=x.device,
        num_warps=warps,
    )
    return y, final


def _added(part: Tensor, out: Tensor, parts: int, step: int, inner: int, outer: int) -> None:
    rows, block = min(64, triton.next_power_of_2(parts)), 128 if parts <= 8 else 64
    grid = (triton.cdiv(out.numel(), block),)
    launch(_sum, grid, part, out, parts, step, inner, outer, out.numel(), rows, block, device=out.device, num_warps=4)


def ssd_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
    target: Target,
) -> tuple[Tensor, ...]:
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    shared = heads // groups
    own = (x, dt, a, b, c, d, dt_bias, initial_state)
    grads = [torch.empty(0, dtype=x.dtype, device=x.device) for _ in own]
    for i, t in enumerate(own):
        if t is not None:
            grads[i] = torch.empty(t.shape, dtype=t.dtype, device=x.device)
    if batch * length * heads * dim * width == 0:
        return _without_pairs(grad_y, grad_final_state, x, d, initial_state, grads)
    nvidia = target.vendor == "nvidia"
    chunk = 16 if length <= 16 else 32
    chunks = triton.cdiv(length, chunk)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    states = torch.empty(batch, chunks, heads, dim, width, **kind)
    late = torch.empty(batch, chunks, heads, dim, width, **kind)
    db, dc = torch.empty(batch, length, heads, width, **kind), torch.empty(batch, length, heads, width, **kind)
    parts = [torch.empty(batch * chunks, heads, **kind) for _ in range(3)]
    block_p, block_n = _power(dim, 32), _power(width, 32)
    # the pairs' operands of three tf32 products: with tiles of 32 float32 spills 184 bytes a thread on sm_90
    # CDNA: one wave, since Triton lets several write the same row of sums to shared memory with no barrier
    tile_p, tile_n, warps = (16, 16, 8) if target.wave == 32 else (16, 16, 1)
    precision = "tf32x3" if nvidia else "ieee"
    rate, skip, bias = (None if t is None else t.contiguous() for t in (a, d, dt_bias))
    grid = (batch * heads * triton.cdiv(dim, block_p) * triton.cdiv(width, block_n),)
    for reverse in (False, True):
        given, into = (grad_y, c) if reverse else (x, b)
        first = grad_final_state if reverse else initial_state
        launch(
            _states,
            grid,
            given,
            dt,
            rate,
            into,
            bias,
            first,
            late if reverse else states,
            grads[7] if reverse and initial_state is not None else None,
            dt_min,
            dt_max,
            length,
            heads,
            shared,
            dim,
            width,
            *given.stride(),
            *dt.stride(),
            *into.stride(),
            *strides(first, 4),
            dt_softplus,
            reverse,
            precision,
            chunk,
            block_p,
            block_n,
            device=x.device,
            num_warps=4,
        )
    launch(
        _chunk,
        (batch * chunks * heads,),
        grad_y,
        x,
        dt,
        rate,
        b,
        c,
        skip,
        bias,
        states,
        late,
        grads[0],
        grads[1],
        db,
        dc,
        *parts,
        dt_min,
        dt_max,
        length,
        chunks,
        heads,
        shared,
        dim,
        width,
        *grad_y.stride(),
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        dt_softplus,
        precision,
        chunk,
        tile_p,
        tile_n,
        device=x.device,
        num_warps=warps,
    )
    # heads of a group stand side by side: (.., groups, shared, width)
    for one, out in ((db, grads[3]), (dc, grads[4])):
        _added(one, out, shared, width, width, shared * width)
    for i, one in zip((2, 5, 6), parts, strict=True):
        if own[i] is not None:
            _added(one, grads[i], batch * chunks, heads, heads, heads)
    return tuple(grads)


def _without_pairs(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    d: Tensor | None,
    initial_state: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, ...]:
    """No token, or no state: the skip's gradients alone, and the final state's as it came."""
    for t in grads:
        t.zero_()
    if x.numel() and d is not None:
        grads[0].copy_(d.float()[:, None] * grad_y.float())
        grads[5].copy_((x.float() * grad_y.float()).sum((0, 1, 3)))
    if initial_state is not None and grad_final_state is not None:
        grads[7].copy_(grad_final_state)
    return tuple(grads)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba2's heads, Falcon-H1's wider state and small odd ones; many tokens and one."""
    kind = getattr(torch, dtype)

    def calls(
        length: int, heads: int, dim: int, groups: int, width: int, state: bool, wide: bool, low: float | None
    ) -> None:
        x = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        b = torch.empty(2, length, groups, width, dtype=kind, device="meta")
        own = torch.empty(heads, dtype=torch.float32, device="meta")
        kept = torch.empty(2, heads, dim, width, dtype=torch.float32, device="meta") if state else None
        dt = torch.empty(2, length, heads, dtype=kind, device="meta")
        ssd_scan(x, dt, own, b, b, own, own, kept, True, wide, low, None, target)
        g = torch.empty(x.shape, dtype=torch.float32 if wide else kind, device="meta")
        ssd_scan_backward(g, kept, x, dt, own, b, b, own, own, kept, True, low, None, target)

    shapes: list[tuple[Any, ...]] = [(2048, 80, 64, 1, 128, False, False, None), (1, 80, 64, 1, 128, True, False, None)]
    shapes += [(2048, 48, 64, 1, 256, True, False, None), (37, 3, 13, 3, 11, True, False, 0.001)]
    if kind is not torch.float32:
        shapes += [(2048, 80, 64, 1, 128, False, True, None)]  # what models' own scans return
    kernels = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    # of a chunk's pairs: on CDNA masks that scalar registers do not hold lie in lanes of vector registers (82 in
    # bfloat16 on gfx942), none in memory; gfx1100 spills 11 vector registers in float32
    allowed = {"_chunk": 0 if target.vendor == "nvidia" else 96 if target.wave == 64 else 12}
    if target.wave == 64:  # the same, at most 11 of `_scan` and 7 of `_states`, with small odd widths
        allowed |= {"_scan": 11, "_states": 7}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in kernels]
