"""Runs of positions of `causal_conv1d`, of 2 to 4 taps.

A thread takes a run of positions of its channels: it loads their weights once and a position once, and the 3 positions
before stay in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton_lang import narrow, sigmoid, widen


@triton.jit
def element(x_ptr, state_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, WIDTH: tl.constexpr):
    """x at positions at + t; ``x_ptr`` points to at. The state, or zeros, stand before x, and zeros past its end."""
    x = widen(tl.load(x_ptr + (d * x_d + t * x_l), mask=known & (t >= -at) & (t < length - at), other=0.0))
    if state_ptr is not None:
        early = known & (t < -at) & (t > -WIDTH - at)
        x += widen(tl.load(state_ptr + d * s_d + (at + t + (WIDTH - 1)) * s_l, mask=early, other=0.0))
    return x


@triton.jit
def _of_four(a, b, c, x, w_a, w_b, w_c, w_x, bias, WIDTH: tl.constexpr):
    """The sum at x's position, oldest tap first, as `sum_at` adds."""
    z = tl.zeros_like(x)
    if WIDTH >= 4:
        z += w_a * a
    if WIDTH >= 3:
        z += w_b * b
    if WIDTH >= 2:
        z += w_c * c
    z += w_x * x
    if bias is not None:
        z += bias
    return z


@triton.jit
def _four_sums(a, b, c, x0, x1, x2, x3, w_a, w_b, w_c, w_x, bias, WIDTH: tl.constexpr):
    """The sums at four positions; a, b and c stand before them."""
    z0 = _of_four(a, b, c, x0, w_a, w_b, w_c, w_x, bias, WIDTH)
    z1 = _of_four(b, c, x0, x1, w_a, w_b, w_c, w_x, bias, WIDTH)
    z2 = _of_four(c, x0, x1, x2, w_a, w_b, w_c, w_x, bias, WIDTH)
    z3 = _of_four(x0, x1, x2, x3, w_a, w_b, w_c, w_x, bias, WIDTH)
    return z0, z1, z2, z3


@triton.jit
def _three_before(x_ptr, state_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, WIDTH: tl.constexpr):
    """The elements at t - 3, t - 2 and t - 1, as far as there are taps for them."""
    a = element(x_ptr, state_ptr, d, known & (WIDTH >= 4), at, t - 3, length, x_d, x_l, s_d, s_l, WIDTH)
    b = element(x_ptr, state_ptr, d, known & (WIDTH >= 3), at, t - 2, length, x_d, x_l, s_d, s_l, WIDTH)
    c = element(x_ptr, state_ptr, d, known & (WIDTH >= 2), at, t - 1, length, x_d, x_l, s_d, s_l, WIDTH)
    return a, b, c


@triton.jit
def activated(z, ACTIVE: tl.constexpr, dtype: tl.constexpr):
    if ACTIVE:
        s, _ = sigmoid(z, dtype == tl.float32)
        z = z * s
    return narrow(z, dtype)


@triton.jit
def _four_weights(weight_ptr, channels, w_d, w_k, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The last 4 taps of each channel. One load of all, whose neighbours in memory are neighbouring lanes': a load of
    a tap alone touches a line for every channel."""
    d = tl.arange(0, BLOCK_D)[:, None]
    k = tl.arange(0, 4)[None, :] + (WIDTH - 4)
    w = widen(tl.load(weight_ptr + d * w_d + k * w_k, mask=(d < channels) & (k >= 0), other=0.0))
    even, odd = tl.split(tl.reshape(w, [BLOCK_D, 2, 2]))
    w_a, w_c = tl.split(even)
    w_b, w_x = tl.split(odd)
    return w_a[:, None], w_b[:, None], w_c[:, None], w_x[:, None]


@triton.jit
def _row(x_ptr, d, known, t, left, x_d, x_l):
    return tl.load(x_ptr + (d * x_d + t * x_l), mask=known & (t < left), other=0.0)


@triton.jit
def in_columns(
    here,
    state_ptr,
    weight_ptr,
    bias,
    y_ptr,
    d,
    known,
    left,
    at,
    length,
    x_d,
    x_l,
    s_d,
    s_l,
    w_d,
    w_k,
    y_d,
    y_l,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    RUN: tl.constexpr,
):
    """Channels are innermost: BLOCK_L runs of RUN positions, four loads in flight. left: channels from the first on.

    Each sum is stored before the next is computed: four at once spill in float32 (ptxas, sm_87 to sm_100).
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    w_a, w_b, w_c, w_x = _four_weights(weight_ptr, left, w_d, w_k, WIDTH, BLOCK_D)
    t = tl.arange(0, BLOCK_L)[None, :] * RUN
    a, b, c = _three_before(here, state_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, WIDTH)
    end = length - at
    for _ in tl.range(0, RUN, 4, num_stages=1):
        x0 = _row(here, d, known, t, end, x_d, x_l)
        x1 = _row(here, d, known, t + 1, end, x_d, x_l)
        x2 = _row(here, d, known, t + 2, end, x_d, x_l)
        x3 = _row(here, d, known, t + 3, end, x_d, x_l)
        to = y_ptr + (d * y_d + t * y_l)
        x0 = widen(x0)
        z = _of_four(a, b, c, x0, w_a, w_b, w_c, w_x, bias, WIDTH)
        tl.store(to, activated(z, ACTIVE, dtype), mask=known & (t < end))
        a = widen(x1)
        z = _of_four(b, c, x0, a, w_a, w_b, w_c, w_x, bias, WIDTH)
        tl.store(to + y_l, activated(z, ACTIVE, dtype), mask=known & (t + 1 < end))
        b = widen(x2)
        z = _of_four(c, x0, a, b, w_a, w_b, w_c, w_x, bias, WIDTH)
        tl.store(to + 2 * y_l, activated(z, ACTIVE, dtype), mask=known & (t + 2 < end))
        c = widen(x3)
        z = _of_four(x0, a, b, c, w_a, w_b, w_c, w_x, bias, WIDTH)
        tl.store(to + 3 * y_l, activated(z, ACTIVE, dtype), mask=known & (t + 3 < end))
        t += 4


@triton.jit
def in_rows(
    here,
    state_ptr,
    weight_ptr,
    bias,
    y_ptr,
    d,
    known,
    at,
    length,
    x_d,
    x_l,
    s_d,
    s_l,
    w_d,
    w_k,
    y_d,
    y_l,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Positions are innermost, and 8 divide their number: a vector of 8, and the 3 before it."""
    w_a = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 4) * w_k, mask=known & (WIDTH >= 4), other=0.0))
    w_b = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 3) * w_k, mask=known & (WIDTH >= 3), other=0.0))
    w_c = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 2) * w_k, mask=known & (WIDTH >= 2), other=0.0))
    w_x = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 1) * w_k, mask=known, other=0.0))
    first = tl.arange(0, BLOCK_L // 8)[None, :] * 8
    a, b, c = _three_before(here, state_ptr, d, known, at, first, length, x_d, x_l, s_d, s_l, WIDTH)
    t = tl.arange(0, BLOCK_L)[None, :]
    inside = known & (t // 8 * 8 < length - at)
    x = widen(tl.load(here + (d * x_d + t * x_l), mask=inside, other=0.0))
    even, odd = tl.split(tl.reshape(x, [BLOCK_D, BLOCK_L // 8, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    z0, z1, z2, z3 = _four_sums(a, b, c, x0, x1, x2, x3, w_a, w_b, w_c, w_x, bias, WIDTH)
    z4, z5, z6, z7 = _four_sums(x1, x2, x3, x4, x5, x6, x7, w_a, w_b, w_c, w_x, bias, WIDTH)
    even = tl.join(tl.join(z0, z4), tl.join(z2, z6))
    odd = tl.join(tl.join(z1, z5), tl.join(z3, z7))
    z = tl.reshape(tl.join(even, odd), [BLOCK_D, BLOCK_L])
    tl.store(y_ptr + (d * y_d + t * y_l), activated(z, ACTIVE, y_ptr.dtype.element_ty), mask=inside)
