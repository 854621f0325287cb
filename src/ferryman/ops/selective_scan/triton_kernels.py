"""`selective_scan` in Triton: a program takes a few channels of a sample, and its part of the state stays in registers.

One token is `_scan`. Many are `_blocks`: a warp reads blocks of 8 tokens, the next one while it computes one, so that
no token waits for memory. In a block's tensors, (tokens, states, channels), lanes lie along channels and states, so
that a token is a choice among registers, and tokens follow each other as they do in the meaning. The choice is a sum of
integers, with zeros that the compiler knows: it costs no instruction, where a sum of floats would.

Backward: `_begins` keeps the state before each block; `_gradients` takes blocks from the last to the first. What
channels share, and what samples do, is written in parts, which are added up in a fixed order. No atomics.
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
from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, sigmoid, softplus, widen
from ferryman.ops.ssd_scan.triton_kernels import _added


@triton.jit(do_not_specialize=["length"])
def _scan(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    length,
    channels,
    width,
    x_b,
    x_l,
    x_d,
    t_b,
    t_l,
    t_d,
    b_b,
    b_l,
    b_n,
    c_b,
    c_l,
    c_n,
    z_b,
    z_l,
    z_d,
    s_b,
    s_d,
    s_n,
    SOFTPLUS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    sample = (program // across).to(tl.int64)
    i = (program % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    live, kept = i < channels, n < width
    inside = live[:, None] & kept[None, :]
    rate = widen(tl.load(a_ptr + i[:, None] * width + n[None, :], mask=inside, other=0.0))
    state = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if state_ptr is not None:
        at = state_ptr + sample * s_b + i.to(tl.int64)[:, None] * s_d + n[None, :] * s_n
        state = widen(tl.load(at, mask=inside, other=0.0))
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + i, mask=live, other=0.0))
    if d_ptr is not None:
        skip = widen(tl.load(d_ptr + i, mask=live, other=0.0))
    wide = i.to(tl.int64)
    x_ptr += sample * x_b + wide * x_d
    dt_ptr += sample * t_b + wide * t_d
    b_ptr += sample * b_b + n * b_n
    c_ptr += sample * c_b + n * c_n
    if z_ptr is not None:
        z_ptr += sample * z_b + wide * z_d
    y_ptr += sample * length * channels + wide
    for t in tl.range(0, length, num_stages=STAGES):
        place = tl.full([], 1, tl.int64) * t
        x = widen(tl.load(x_ptr + place * x_l, mask=live, other=0.0))
        step = widen(tl.load(dt_ptr + place * t_l, mask=live, other=0.0)) + bias
        b = widen(tl.load(b_ptr + place * b_l, mask=kept, other=0.0))
        c = widen(tl.load(c_ptr + place * c_l, mask=kept, other=0.0))
        if SOFTPLUS:
            step = softplus(step)
        state = exp(step[:, None] * rate) * state + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1)
        if d_ptr is not None:
            y += skip * x
        if z_ptr is not None:
            z = widen(tl.load(z_ptr + place * z_l, mask=live, other=0.0))
            gate, _ = sigmoid(z)
            y *= z * gate
        tl.store(y_ptr + place * channels, narrow(y, y_ptr.dtype.element_ty), mask=live)
    final_ptr += sample * channels * width
    tl.store(final_ptr + wide[:, None] * width + n[None, :], state, mask=inside)


@triton.jit
def _power_of_two(step, rate):
    """exp(step x its rate), of rates that were scaled to powers of 2."""
    if INTERPRETED:
        return tl.exp(step * (rate * 0.6931471805599453))
    return tl.exp2(step * rate)


@triton.jit
def _taken(ptr, at, row, column, t, i, length, many):
    """Tokens from ``at`` on, of columns i; 0 past the end. As they lie."""
    known = (t < length - at)[:, None] & (i < many)[None, :]
    place = tl.full([], 1, tl.int64) * at * row
    return tl.load(ptr + place + t[:, None] * row + i.to(tl.int64)[None, :] * column, mask=known, other=0.0)


@triton.jit
def _stepped(dt, bias, live, SOFTPLUS: tl.constexpr):
    step = widen(dt) + bias[None, :]
    if SOFTPLUS:
        step = softplus(step)
    return tl.where(live, step, 0.0)  # a token past the end leaves the state as it is


@triton.jit(do_not_specialize=["length"])
def _blocks(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    length,
    channels,
    width,
    x_b,
    x_l,
    x_d,
    t_b,
    t_l,
    t_d,
    b_b,
    b_l,
    b_n,
    c_b,
    c_l,
    c_n,
    z_b,
    z_l,
    z_d,
    s_b,
    s_d,
    s_n,
    SOFTPLUS: tl.constexpr,
    T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    sample = (program // across).to(tl.int64)
    i = (program % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    token = t[:, None, None]
    live = i < channels
    inside = (n < width)[:, None] & live[None, :]
    wide = i.to(tl.int64)[None, :]
    rate = widen(tl.load(a_ptr + wide * width + n[:, None], mask=inside, other=0.0)) * 1.4426950408889634
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if state_ptr is not None:
        state = widen(tl.load(state_ptr + sample * s_b + wide * s_d + n[:, None] * s_n, mask=inside, other=0.0))
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + i, mask=live, other=0.0))
    if d_ptr is not None:
        skip = widen(tl.load(d_ptr + i, mask=live, other=0.0))
    x_ptr += sample * x_b
    dt_ptr += sample * t_b
    b_ptr += sample * b_b
    c_ptr += sample * c_b
    y_ptr += sample * length * channels
    x_next = _taken(x_ptr, 0, x_l, x_d, t, i, length, channels)
    dt_next = _taken(dt_ptr, 0, t_l, t_d, t, i, length, channels)
    b_next = _taken(b_ptr, 0, b_l, b_n, t, n, length, width)
    c_next = _taken(c_ptr, 0, c_l, c_n, t, n, length, width)
    if z_ptr is not None:
        z_ptr += sample * z_b
        z_next = _taken(z_ptr, 0, z_l, z_d, t, i, length, channels)
    for at in tl.range(0, length, T, num_stages=1):
        known = (t < length - at)[:, None] & live[None, :]
        x = widen(x_next)
        step = _stepped(dt_next, bias, known, SOFTPLUS)
        b = widen(b_next)
        c = widen(c_next)
        if z_ptr is not None:
            z = widen(z_next)
            z_next = _taken(z_ptr, at + T, z_l, z_d, t, i, length, channels)
        x_next = _taken(x_ptr, at + T, x_l, x_d, t, i, length, channels)
        dt_next = _taken(dt_ptr, at + T, t_l, t_d, t, i, length, channels)
        b_next = _taken(b_ptr, at + T, b_l, b_n, t, n, length, width)
        c_next = _taken(c_ptr, at + T, c_l, c_n, t, n, length, width)
        decay = _power_of_two(step[:, None, :], rate[None, :, :])
        come = (step * x)[:, None, :] * b[:, :, None]
        seen = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        decay, come = decay.to(tl.int32, bitcast=True), come.to(tl.int32, bitcast=True)
        for j in tl.static_range(T):
            here = token == j
            kept = tl.sum(tl.where(here, decay, 0), 0).to(tl.float32, bitcast=True)
            state = kept * state + tl.sum(tl.where(here, come, 0), 0).to(tl.float32, bitcast=True)
            seen = tl.where(here, state[None, :, :], seen)
        y = tl.sum(seen * c[:, :, None], 1)
        if d_ptr is not None:
            y += skip[None, :] * x
        if z_ptr is not None:
            gate, _ = sigmoid(z)
            y *= z * gate
        out = y_ptr + tl.full([], 1, tl.int64) * at * channels + t[:, None] * channels + wide
        tl.store(out, narrow(y, y_ptr.dtype.element_ty), mask=known)
    tl.store(final_ptr + sample * channels * width + wide * width + n[:, None], state, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _begins(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    bias_ptr,
    state_ptr,
    kept_ptr,
    length,
    channels,
    width,
    x_b,
    x_l,
    x_d,
    t_b,
    t_l,
    t_d,
    b_b,
    b_l,
    b_n,
    s_b,
    s_d,
    s_n,
    SOFTPLUS: tl.constexpr,
    T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """kept: (batch, blocks of tokens, width, channels), the state before each block."""
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    sample = (program // across).to(tl.int64)
    i = (program % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    token = t[:, None, None]
    live = i < channels
    inside = (n < width)[:, None] & live[None, :]
    wide = i.to(tl.int64)[None, :]
    rate = widen(tl.load(a_ptr + wide * width + n[:, None], mask=inside, other=0.0)) * 1.4426950408889634
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if state_ptr is not None:
        state = widen(tl.load(state_ptr + sample * s_b + wide * s_d + n[:, None] * s_n, mask=inside, other=0.0))
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + i, mask=live, other=0.0))
    x_ptr += sample * x_b
    dt_ptr += sample * t_b
    b_ptr += sample * b_b
    kept_ptr += sample * tl.cdiv(length, T) * width * channels
    x_next = _taken(x_ptr, 0, x_l, x_d, t, i, length, channels)
    dt_next = _taken(dt_ptr, 0, t_l, t_d, t, i, length, channels)
    b_next = _taken(b_ptr, 0, b_l, b_n, t, n, length, width)
    for at in tl.range(0, length, T, num_stages=1):
        tl.store(kept_ptr + n[:, None].to(tl.int64) * channels + wide, state, mask=inside)
        kept_ptr += width * channels
        step = _stepped(dt_next, bias, (t < length - at)[:, None] & live[None, :], SOFTPLUS)
        come = (step * widen(x_next))[:, None, :] * widen(b_next)[:, :, None]
        x_next = _taken(x_ptr, at + T, x_l, x_d, t, i, length, channels)
        dt_next = _taken(dt_ptr, at + T, t_l, t_d, t, i, length, channels)
        b_next = _taken(b_ptr, at + T, b_l, b_n, t, n, length, width)
        decay = _power_of_two(step[:, None, :], rate[None, :, :])
        decay, come = decay.to(tl.int32, bitcast=True), come.to(tl.int32, bitcast=True)
        for j in tl.static_range(T):
            here = token == j
            kept = tl.sum(tl.where(here, decay, 0), 0).to(tl.float32, bitcast=True)
            state = kept * state + tl.sum(tl.where(here, come, 0), 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["length"])
def _gradients(
    dy_ptr,
    df_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    kept_ptr,
    dx_ptr,
    ddt_ptr,
    dz_ptr,
    ds_ptr,
    da_ptr,
    db_ptr,
    dc_ptr,
    dd_ptr,
    dbias_ptr,
    length,
    channels,
    width,
    g_b,
    g_l,
    g_d,
    f_b,
    f_d,
    f_n,
    x_b,
    x_l,
    x_d,
    t_b,
    t_l,
    t_d,
    b_b,
    b_l,
    b_n,
    c_b,
    c_l,
    c_n,
    z_b,
    z_l,
    z_d,
    SOFTPLUS: tl.constexpr,
    T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """da: (batch, channels, width), dd and dbias: (batch, channels), db and dc: (batch, length, blocks of channels,
    width), all in float32."""
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    sample = (program // across).to(tl.int64)
    block = program % across
    i = block * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    token = t[:, None, None]
    live = i < channels
    inside = (n < width)[:, None] & live[None, :]
    wide = i.to(tl.int64)[None, :]
    rate = widen(tl.load(a_ptr + wide * width + n[:, None], mask=inside, other=0.0))
    back = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if df_ptr is not None:
        back = widen(tl.load(df_ptr + sample * f_b + wide * f_d + n[:, None] * f_n, mask=inside, other=0.0))
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + i, mask=live, other=0.0))
    skip = tl.zeros([BLOCK_D], tl.float32)
    if d_ptr is not None:
        skip = widen(tl.load(d_ptr + i, mask=live, other=0.0))
    of_a = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    of_d = tl.zeros([BLOCK_D], tl.float32)
    of_bias = tl.zeros([BLOCK_D], tl.float32)
    blocks = tl.cdiv(length, T)
    dy_ptr += sample * g_b
    x_ptr += sample * x_b
    dt_ptr += sample * t_b
    b_ptr += sample * b_b
    c_ptr += sample * c_b
    kept_ptr += sample * blocks * width * channels
    if z_ptr is not None:
        z_ptr += sample * z_b
    for k in tl.range(0, blocks, num_stages=1):
        which = (blocks - 1 - k).to(tl.int64)
        at = which * T
        known = (t < length - at)[:, None] & live[None, :]
        x = widen(_taken(x_ptr, at, x_l, x_d, t, i, length, channels))
        g = widen(_taken(dy_ptr, at, g_l, g_d, t, i, length, channels))
        dt = _taken(dt_ptr, at, t_l, t_d, t, i, length, channels)
        b = widen(_taken(b_ptr, at, b_l, b_n, t, n, length, width))
        c = widen(_taken(c_ptr, at, c_l, c_n, t, n, length, width))
        state = tl.load(
            kept_ptr + which * width * channels + n[:, None].to(tl.int64) * channels + wide, mask=inside, other=0.0
        )
        step = _stepped(dt, bias, known, SOFTPLUS)
        decay = _power_of_two(step[:, None, :], rate[None, :, :] * 1.4426950408889634)
        come = (step * x)[:, None, :] * b[:, :, None]
        before = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        decays, brought = decay.to(tl.int32, bitcast=True), come.to(tl.int32, bitcast=True)
        for j in tl.static_range(T):
            here = token == j
            before = tl.where(here, state[None, :, :], before)
            kept = tl.sum(tl.where(here, decays, 0), 0).to(tl.float32, bitcast=True)
            state = kept * state + tl.sum(tl.where(here, brought, 0), 0).to(tl.float32, bitcast=True)
        after = decay * before + come
        row = (sample * length + at) * channels + t[:, None] * channels + wide
        if z_ptr is not None:
            z = widen(_taken(z_ptr, at, z_l, z_d, t, i, length, channels))
            gate, rest = sigmoid(z)
            out = tl.sum(after * c[:, :, None], 1) + skip[None, :] * x
            dz = g * out * (gate * (1.0 + z * rest))
            tl.store(dz_ptr + row, narrow(dz, dz_ptr.dtype.element_ty), mask=known)
            g *= z * gate
        shared = ((sample * length + at) * across + block) * width
        shared = shared + t[:, None] * (across * width) + n[None, :]
        there = (t < length - at)[:, None] & (n < width)[None, :]
        tl.store(dc_ptr + shared, tl.sum(g[:, None, :] * after, 2), mask=there)
        asked = (g[:, None, :] * c[:, :, None]).to(tl.int32, bitcast=True)
        whole = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        for r in tl.static_range(T):
            here = token == T - 1 - r
            back += tl.sum(tl.where(here, asked, 0), 0).to(tl.float32, bitcast=True)
            whole = tl.where(here, back[None, :, :], whole)
            back *= tl.sum(tl.where(here, decays, 0), 0).to(tl.float32, bitcast=True)
        tl.store(db_ptr + shared, tl.sum((step * x)[:, None, :] * whole, 2), mask=there)
        read = tl.sum(whole * b[:, :, None], 1)
        dx = step * read + skip[None, :] * g
        tl.store(dx_ptr + row, narrow(dx, dx_ptr.dtype.element_ty), mask=known)
        exponent = decay * whole * before
        ddt = read * x + tl.sum(exponent * rate[None, :, :], 1)
        if SOFTPLUS:
            slope, _ = sigmoid(widen(dt) + bias[None, :])
            ddt *= slope
        ddt = tl.where(known, ddt, 0.0)
        tl.store(ddt_ptr + row, narrow(ddt, ddt_ptr.dtype.element_ty), mask=known)
        of_a += tl.sum(exponent * step[:, None, :], 0)
        of_d += tl.sum(x * g, 0)
        of_bias += tl.sum(ddt, 0)
    if ds_ptr is not None:
        place = ds_ptr + sample * channels * width + wide * width + n[:, None]
        tl.store(place, narrow(back, ds_ptr.dtype.element_ty), mask=inside)
    tl.store(da_ptr + sample * channels * width + wide * width + n[:, None], of_a, mask=inside)
    tl.store(dd_ptr + sample * channels + i, of_d, mask=live)
    tl.store(dbias_ptr + sample * channels + i, of_bias, mask=live)


def _many(width: int, channels: int, state: int) -> tuple[int, int, int]:
    """(tokens, channels, states) of a program with so many numbers of the state, and eight times as many of a block."""
    block_n = max(1, triton.next_power_of_2(width))
    block_d = max(1, min(triton.next_power_of_2(channels), 128, state // block_n))
    return max(2, min(8, 8 * state // (block_n * block_d))), block_d, block_n


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, channels = x.shape
    width = b.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(batch, channels, width, dtype=torch.float32, device=x.device)
    if batch * channels == 0:
        return y, final
    own = [None if t is None else t.contiguous() for t in (d, dt_bias)]
    if length > 1:
        block_t, block_d, block_n = _many(width, channels, 4 * target.wave)
        kernel, options, warps = _blocks, (block_t, block_d, block_n), 1
    else:
        # a warp, and 16 numbers of the state for each of its threads
        block_n = max(1, triton.next_power_of_2(width))
        block_d = min(triton.next_power_of_2(channels), max(16, 512 // block_n))
        kernel, options, warps = _scan, (block_d, block_n, 4), max(1, min(8, block_d * block_n // 512))
    launch(
        kernel,
        (batch * triton.cdiv(channels, block_d),),
        x,
        dt,
        a.contiguous(),
        b,
        c,
        own[0],
        z,
        own[1],
        initial_state,
        y,
        final,
        length,
        channels,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *((0, 0, 0) if z is None else z.stride()),
        *((0, 0, 0) if initial_state is None else initial_state.stride()),
        dt_softplus,
        *options,
        device=x.device,
        num_warps=warps,
    )
    return y, final


def selective_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    batch, length, channels = x.shape
    width = b.shape[2]
    own = (x, dt, a, b, c, d, z, dt_bias, initial_state)
    made = [torch.empty(0, dtype=x.dtype, device=x.device) for _ in own]
    for place, t in enumerate(own):
        if t is not None:
            made[place] = torch.empty(t.shape, dtype=t.dtype, device=x.device)
    if batch * length * channels == 0:
        for t in made:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            made[8].copy_(grad_final_state)
        return tuple(made)
    block_t, block_d, block_n = _many(width, channels, 512)
    across = triton.cdiv(channels, block_d)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    kept = torch.empty(batch, triton.cdiv(length, block_t), width, channels, **kind)
    shared = [torch.empty(batch, length, across, width, **kind) for _ in range(2)]
    of_a, of_d, of_bias = (torch.empty(batch, channels, m, **kind) for m in (width, 1, 1))
    rate, skip, bias = (None if t is None else t.contiguous() for t in (a, d, dt_bias))
    none = (0, 0, 0)
    # with 32 numbers of a block for a thread, 255 registers spill on sm_90
    warps = max(1, min(8, block_t * block_d * block_n // (16 * target.wave)))
    launch(
        _begins,
        (batch * across,),
        x,
        dt,
        rate,
        b,
        bias,
        initial_state,
        kept,
        length,
        channels,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *(none if initial_state is None else initial_state.stride()),
        dt_softplus,
        block_t,
        block_d,
        block_n,
        device=x.device,
        num_warps=warps,
    )
    launch(
        _gradients,
        (batch * across,),
        grad_y,
        grad_final_state,
        x,
        dt,
        rate,
        b,
        c,
        skip,
        z,
        bias,
        kept,
        made[0],
        made[1],
        made[6],
        None if initial_state is None else made[8],
        of_a,
        *shared,
        of_d,
        of_bias,
        length,
        channels,
        width,
        *grad_y.stride(),
        *(none if grad_final_state is None else grad_final_state.stride()),
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *(none if z is None else z.stride()),
        dt_softplus,
        block_t,
        block_d,
        block_n,
        device=x.device,
        num_warps=warps,
    )
    for one, out in zip(shared, (made[3], made[4]), strict=True):
        if width:
            _added(one, out, across, width, width, across * width)
    for place, one in ((2, of_a), (5, of_d), (7, of_bias)):
        if own[place] is not None and one.numel():
            each = one.numel() // batch
            _added(one, made[place], batch, each, each, each)
    return tuple(made)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba's and Jamba's channels, and small odd ones; many tokens and one."""
    kind = getattr(torch, dtype)

    def calls(length: int, channels: int, width: int, state: bool, gate: bool) -> None:
        x = torch.empty(2, length, channels, dtype=kind, device="meta")
        b = torch.empty(2, length, width, dtype=kind, device="meta")
        a = torch.empty(channels, width, dtype=torch.float32, device="meta")
        own = torch.empty(channels, dtype=torch.float32, device="meta")
        kept = torch.empty(2, channels, width, dtype=torch.float32, device="meta") if state else None
        z = x if gate else None
        selective_scan(x, x, a, b, b, own, z, own, kept, True, target)
        selective_scan_backward(x, kept, x, x, a, b, b, own, z, own, kept, True, target)

    shapes = [(2048, 8192, 16, False, True), (1, 8192, 16, True, True), (37, 13, 11, True, False)]
    found = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    # scalar registers lie in lanes of vector registers, none in memory
    allowed = {"_gradients": 0 if target.wave == 32 else 24}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in found]
