"""`selective_scan` in Triton: a program takes a few channels of a sample, and its part of the state stays in registers.

One token is `_scan`. Many are `_blocks`: a warp reads blocks of 8 tokens, the next one while it computes one, so that
no token waits for memory. In a block's tensors, (tokens, states, channels), lanes lie along channels and states, so
that a token is a choice among registers, and tokens follow each other as they do in the meaning. The choice is a sum of
integers, with zeros that the compiler knows: it costs no instruction, where a sum of floats would.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, sigmoid, softplus, widen


@triton.jit
def _channels(channels, BLOCK_D: tl.constexpr):
    """(sample, channels) of a program."""
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    return (program // across).to(tl.int64), (program % across) * BLOCK_D + tl.arange(0, BLOCK_D)


@triton.jit
def _each(ptr, i, live):
    """A number of each channel; zeros without."""
    each = tl.zeros(i.shape, tl.float32)
    if ptr is not None:
        each = widen(tl.load(ptr + i, mask=live, other=0.0))
    return each


@triton.jit
def _of_state(ptr, sample, s_b, s_d, s_n, wide, n, inside):
    """A state as (states, channels); zeros without."""
    state = tl.zeros([n.shape[0], wide.shape[1]], tl.float32)
    if ptr is not None:
        state = widen(tl.load(ptr + sample * s_b + wide * s_d + n[:, None] * s_n, mask=inside, other=0.0))
    return state


@triton.jit
def _token(values, here):
    """One token of a block, of integers that are floats' bits."""
    return tl.sum(tl.where(here, values, 0), 0).to(tl.float32, bitcast=True)


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
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    sample, i = _channels(channels, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    live, kept = i < channels, n < width
    inside = live[:, None] & kept[None, :]
    rate = widen(tl.load(a_ptr + i[:, None] * width + n[None, :], mask=inside, other=0.0))
    state = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if state_ptr is not None:
        at = state_ptr + sample * s_b + i.to(tl.int64)[:, None] * s_d + n[None, :] * s_n
        state = widen(tl.load(at, mask=inside, other=0.0))
    bias, skip = _each(bias_ptr, i, live), _each(d_ptr, i, live)
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
        decay, come = exp(step[:, None] * rate), (step * x)[:, None] * b[None, :]
        if PADDED:
            decay, come = tl.where(kept[None, :], decay, 0.0), tl.where(kept[None, :], come, 0.0)
        state = decay * state + come
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
    absent = tl.full([], -2147483648, tl.int32).to(tl.float32, bitcast=True)  # -0.0, which Triton makes 0.0
    return tl.where(live, step, absent)  # a token past the end leaves the state as it is


@triton.jit
def _inside(values, n, width):
    """Of (tokens, states, channels), 0 where there is no state: an infinite x times the 0 there would be NaN."""
    return tl.where((n < width)[None, :, None], values, 0.0)


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
    PADDED: tl.constexpr,
):
    """``kept``: (batch, blocks of tokens, width, channels), the state before each block. No y: the states alone."""
    sample, i = _channels(channels, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    token = t[:, None, None]
    live = i < channels
    inside = (n < width)[:, None] & live[None, :]
    wide = i.to(tl.int64)[None, :]
    rate = widen(tl.load(a_ptr + wide * width + n[:, None], mask=inside, other=0.0)) * 1.4426950408889634
    state = _of_state(state_ptr, sample, s_b, s_d, s_n, wide, n, inside)
    bias, skip = _each(bias_ptr, i, live), _each(d_ptr, i, live)
    x_ptr += sample * x_b
    dt_ptr += sample * t_b
    b_ptr += sample * b_b
    if kept_ptr is not None:
        kept_ptr += sample * tl.cdiv(length, T) * width * channels
    x_next = _taken(x_ptr, 0, x_l, x_d, t, i, length, channels)
    dt_next = _taken(dt_ptr, 0, t_l, t_d, t, i, length, channels)
    b_next = _taken(b_ptr, 0, b_l, b_n, t, n, length, width)
    if y_ptr is not None:
        c_ptr += sample * c_b
        y_ptr += sample * length * channels
        c_next = _taken(c_ptr, 0, c_l, c_n, t, n, length, width)
    if z_ptr is not None:
        z_ptr += sample * z_b
        z_next = _taken(z_ptr, 0, z_l, z_d, t, i, length, channels)
    for at in tl.range(0, length, T, num_stages=1):
        if kept_ptr is not None:
            tl.store(kept_ptr + n[:, None].to(tl.int64) * channels + wide, state, mask=inside)
            kept_ptr += width * channels
        known = (t < length - at)[:, None] & live[None, :]
        x = widen(x_next)
        step = _stepped(dt_next, bias, known, SOFTPLUS)
        b = widen(b_next)
        if y_ptr is not None:
            c = widen(c_next)
            c_next = _taken(c_ptr, at + T, c_l, c_n, t, n, length, width)
        if z_ptr is not None:
            z = widen(z_next)
            z_next = _taken(z_ptr, at + T, z_l, z_d, t, i, length, channels)
        x_next = _taken(x_ptr, at + T, x_l, x_d, t, i, length, channels)
        dt_next = _taken(dt_ptr, at + T, t_l, t_d, t, i, length, channels)
        b_next = _taken(b_ptr, at + T, b_l, b_n, t, n, length, width)
        decay = _power_of_two(step[:, None, :], rate[None, :, :])
        come = (step * x)[:, None, :] * b[:, :, None]
        if PADDED:
            decay, come = _inside(decay, n, width), _inside(come, n, width)
        if y_ptr is not None:
            seen = tl.zeros([T, BLOCK_N, BLOCK_D], tl.float32)
        decay, come = decay.to(tl.int32, bitcast=True), come.to(tl.int32, bitcast=True)
        for j in tl.static_range(T):
            here = token == j
            state = _token(decay, here) * state + _token(come, here)
            if y_ptr is not None:
                seen = tl.where(here, state[None, :, :], seen)
        if y_ptr is not None:
            y = tl.sum(seen * c[:, :, None], 1)
            if d_ptr is not None:
                y += skip[None, :] * x
            if z_ptr is not None:
                gate, _ = sigmoid(z)
                y *= z * gate
            out = y_ptr + tl.full([], 1, tl.int64) * at * channels + t[:, None] * channels + wide
            tl.store(out, narrow(y, y_ptr.dtype.element_ty), mask=known)
    if final_ptr is not None:
        tl.store(final_ptr + sample * channels * width + wide * width + n[:, None], state, mask=inside)


def _many(width: int, channels: int, state: int) -> tuple[int, int, int]:
    """(tokens, channels, states) of a program with so many numbers of the state, and eight times as many of a block."""
    block_n = max(1, triton.next_power_of_2(width))
    block_d = max(1, min(triton.next_power_of_2(channels), 128, state // block_n))
    return max(2, min(8, 8 * state // (block_n * block_d))), block_d, block_n


class _Plan(NamedTuple):
    """A kernel, channels of a program, and what it takes: ``kept`` outputs, blocks' sizes, warps."""

    kernel: Any
    block_d: int
    kept: tuple[None, ...]
    options: tuple[int, ...]
    warps: int


def _launch(
    plan: _Plan,
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
) -> tuple[Tensor, Tensor]:
    batch, length, channels = x.shape
    width = b.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(batch, channels, width, dtype=torch.float32, device=x.device)
    if batch * channels == 0:
        return y, final
    own = [None if t is None else t.contiguous() for t in (d, dt_bias)]
    launch(
        plan.kernel,
        (batch * triton.cdiv(channels, plan.block_d),),
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
        *plan.kept,
        length,
        channels,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *strides(z, 3),
        *strides(initial_state, 3),
        dt_softplus,
        *plan.options,
        device=x.device,
        num_warps=plan.warps,
    )
    return y, final


def blocks(
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
    """Of two tokens or more."""
    block_t, block_d, block_n = _many(b.shape[2], x.shape[2], 4 * target.wave)
    plan = _Plan(_blocks, block_d, (None,), (block_t, block_d, block_n, block_n != b.shape[2]), 1)
    return _launch(plan, x, dt, a, b, c, d, z, dt_bias, initial_state, dt_softplus)


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
    """Token by token: a warp, and 16 numbers of the state for each of its threads."""
    block_n = max(1, triton.next_power_of_2(b.shape[2]))
    block_d = min(triton.next_power_of_2(x.shape[2]), max(16, 512 // block_n))
    options = (block_d, block_n, block_n != b.shape[2], 4)
    plan = _Plan(_scan, block_d, (), options, max(1, min(8, block_d * block_n // 512)))
    return _launch(plan, x, dt, a, b, c, d, z, dt_bias, initial_state, dt_softplus)


# Mamba's and Jamba's channels, and small odd ones; many tokens and one
SHAPES = ((2048, 8192, 16, False, True), (1, 8192, 16, True, True), (37, 13, 11, True, False))


def without_data(target: Target, dtype: str) -> list[list[Any]]:
    """A call's arguments of each of these sizes."""
    kind = getattr(torch, dtype)

    def call(length: int, channels: int, width: int, state: bool, gate: bool) -> list[Any]:
        x = torch.empty(2, length, channels, dtype=kind, device="meta")
        b = torch.empty(2, length, width, dtype=kind, device="meta")
        a = torch.empty(channels, width, dtype=torch.float32, device="meta")
        own = torch.empty(channels, dtype=torch.float32, device="meta")
        kept = torch.empty(2, channels, width, dtype=torch.float32, device="meta") if state else None
        return [x, x, a, b, b, own, x if gate else None, own, kept, True, target]

    return [call(*shape) for shape in SHAPES]


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    calls = without_data(target, dtype)
    return recorded(functools.partial(blocks if call[0].shape[1] > 1 else selective_scan, *call) for call in calls)
