"""`selective_scan_backward` in Triton: the forward's `_blocks` keeps the state before each block of tokens, and
`_gradients` takes blocks from the last to the first. What channels share, and what samples do, is written in parts,
which are added up in a fixed order. No atomics."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import narrow, sigmoid, widen
from ferryman.ops.selective_scan.triton_kernels import (
    _blocks,
    _channels,
    _each,
    _inside,
    _many,
    _of_state,
    _power_of_two,
    _stepped,
    _taken,
    _token,
    without_data,
)
from ferryman.ops.ssd_scan.triton_kernels import _added


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
    PADDED: tl.constexpr,
):
    """da: (batch, channels, width), dd and dbias: (batch, channels), db and dc: (batch, length, blocks of channels,
    width), all in float32."""
    across = tl.cdiv(channels, BLOCK_D)
    block = tl.program_id(0) % across
    sample, i = _channels(channels, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    token = t[:, None, None]
    live = i < channels
    inside = (n < width)[:, None] & live[None, :]
    wide = i.to(tl.int64)[None, :]
    rate = widen(tl.load(a_ptr + wide * width + n[:, None], mask=inside, other=0.0))
    back = _of_state(df_ptr, sample, f_b, f_d, f_n, wide, n, inside)
    bias, skip = _each(bias_ptr, i, live), _each(d_ptr, i, live)
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
        if PADDED:
            decay, come = _inside(decay, n, width), _inside(come, n, width)
        before = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        decays, brought = decay.to(tl.int32, bitcast=True), come.to(tl.int32, bitcast=True)
        for j in tl.static_range(T):
            here = token == j
            before = tl.where(here, state[None, :, :], before)
            state = _token(decays, here) * state + _token(brought, here)
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
        asked = g[:, None, :] * c[:, :, None]
        if PADDED:
            asked = _inside(asked, n, width)
        asked = asked.to(tl.int32, bitcast=True)
        whole = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        for r in tl.static_range(T):
            here = token == T - 1 - r
            back += _token(asked, here)
            whole = tl.where(here, back[None, :, :], whole)
            back *= _token(decays, here)
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
        # past the end the state may be infinite, and the step is -0
        past = step.to(tl.int32, bitcast=True) == -2147483648
        of_a += tl.sum(tl.where(past[:, None, :], 0.0, exponent * step[:, None, :]), 0)
        of_d += tl.sum(x * g, 0)
        of_bias += tl.sum(ddt, 0)
    if ds_ptr is not None:
        place = ds_ptr + sample * channels * width + wide * width + n[:, None]
        tl.store(place, narrow(back, ds_ptr.dtype.element_ty), mask=inside)
    tl.store(da_ptr + sample * channels * width + wide * width + n[:, None], of_a, mask=inside)
    tl.store(dd_ptr + sample * channels + i, of_d, mask=live)
    tl.store(dbias_ptr + sample * channels + i, of_bias, mask=live)


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
    grads = [torch.empty(0, dtype=x.dtype, device=x.device) for _ in own]
    for place, t in enumerate(own):
        if t is not None:
            grads[place] = torch.empty(t.shape, dtype=t.dtype, device=x.device)
    if batch * length * channels == 0:
        for t in grads:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            grads[8].copy_(grad_final_state)
        return tuple(grads)
    block_t, block_d, block_n = _many(width, channels, 512)
    across = triton.cdiv(channels, block_d)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    kept = torch.empty(batch, triton.cdiv(length, block_t), width, channels, **kind)
    shared = [torch.empty(batch, length, across, width, **kind) for _ in range(2)]
    of_a, of_d, of_bias = (torch.empty(batch, channels, m, **kind) for m in (width, 1, 1))
    rate, skip, bias = (None if t is None else t.contiguous() for t in (a, d, dt_bias))
    # with 32 numbers of a block for a thread, 255 registers spill on sm_90
    warps = max(1, min(8, block_t * block_d * block_n // (16 * target.wave)))
    launch(
        _blocks,
        (batch * across,),
        x,
        dt,
        rate,
        b,
        None,
        None,
        None,
        bias,
        initial_state,
        None,
        None,
        kept,
        length,
        channels,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *strides(None, 3),
        *strides(None, 3),
        *strides(initial_state, 3),
        dt_softplus,
        block_t,
        block_d,
        block_n,
        block_n != width,
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
        grads[0],
        grads[1],
        grads[6],
        None if initial_state is None else grads[8],
        of_a,
        *shared,
        of_d,
        of_bias,
        length,
        channels,
        width,
        *grad_y.stride(),
        *strides(grad_final_state, 3),
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *strides(z, 3),
        dt_softplus,
        block_t,
        block_d,
        block_n,
        block_n != width,
        device=x.device,
        num_warps=warps,
    )
    for one, out in zip(shared, (grads[3], grads[4]), strict=True):
        if width:
            _added(one, out, across, width, width, across * width)
    for place, one in ((2, of_a), (5, of_d), (7, of_bias)):
        if own[place] is not None and one.numel():
            each = one.numel() // batch
            _added(one, grads[place], batch, each, each, each)
    return tuple(grads)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    calls = without_data(target, dtype)
    kernels = recorded(functools.partial(selective_scan_backward, c[0], c[8], *c) for c in calls)  # gradients are alike
    # scalar registers lie in lanes of vector registers, none in memory
    allowed = {"_gradients": 0 if target.wave == 32 else 24}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in kernels]
