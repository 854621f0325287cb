"""`causal_conv1d` in Triton. Forward: one read and one write of memory; what a tap reads again lies in the L1 cache.

Backward: one pass, too. A program takes a block of channels over a span of positions of one sample. It computes the sum
before the activation again for each tap of the gradient, rather than write it, and keeps its own part of the gradients
of weight and bias; these parts are added up in a fixed order. No atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import narrow, sigmoid, widen
from ferryman.backends.triton_rows import lanes


@triton.jit
def _element(x_ptr, state_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, WIDTH: tl.constexpr):
    """x at positions at + t; ``x_ptr`` points to at. The state, or zeros, stand before x, and zeros past its end."""
    x = widen(tl.load(x_ptr + (d * x_d + t * x_l), mask=known & (t >= -at) & (t < length - at), other=0.0))
    if state_ptr is not None:
        early = known & (t < -at) & (t > -WIDTH - at)
        x += widen(tl.load(state_ptr + d * s_d + (at + t + (WIDTH - 1)) * s_l, mask=early, other=0.0))
    return x


@triton.jit
def _sum(
    x_ptr, state_ptr, weight_ptr, bias_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH: tl.constexpr
):
    """What the activation takes, at positions at + t. Long loops are not unrolled: registers would not hold them."""
    z = tl.zeros_like(d * t).to(tl.float32)
    if WIDTH <= 4:
        for k in tl.static_range(WIDTH):
            x = _element(x_ptr, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
            z += widen(tl.load(weight_ptr + d * w_d + k * w_k, mask=known, other=0.0)) * x
    else:
        for k in tl.range(WIDTH, num_stages=1):
            x = _element(x_ptr, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
            z += widen(tl.load(weight_ptr + d * w_d + k * w_k, mask=known, other=0.0)) * x
    if bias_ptr is not None:
        z += widen(tl.load(bias_ptr + d, mask=known, other=0.0))
    return z


@triton.jit
def _slope(
    dy_ptr,
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    d,
    known,
    at,
    t,
    length,
    g_d,
    g_l,
    x_d,
    x_l,
    s_d,
    s_l,
    w_d,
    w_k,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The gradient of the sum at positions at + t; 0 outside x."""
    valid = known & (t >= -at) & (t < length - at)
    g = widen(tl.load(dy_ptr + (d * g_d + t * g_l), mask=valid, other=0.0))
    if ACTIVE:
        z = _sum(x_ptr, state_ptr, weight_ptr, bias_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH)
        s, rest = sigmoid(z, EXACT)
        g = tl.where(valid, g * (s * (1.0 + z * rest)), 0.0)
    return g


@triton.jit
def _place(channels, across, BLOCK_D: tl.constexpr):
    """(sample, first channel, which block of positions) of a program."""
    program = tl.program_id(0)
    down = tl.cdiv(channels, BLOCK_D)
    sample = program // (across * down)
    rest = program % (across * down)
    return sample.to(tl.int64), (rest // across).to(tl.int64) * BLOCK_D, rest % across


@triton.jit(do_not_specialize=["length", "across"])
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    channels,
    length,
    across,
    x_b,
    x_d,
    x_l,
    w_d,
    w_k,
    s_b,
    s_d,
    s_l,
    y_b,
    y_d,
    y_l,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    sample, first, block = _place(channels, across, BLOCK_D)
    start = block * BLOCK_L
    d = tl.arange(0, BLOCK_D)[:, None]
    t = tl.arange(0, BLOCK_L)[None, :]
    known = d < channels - first
    x_ptr += sample * x_b + first * x_d
    weight_ptr += first * w_d
    if bias_ptr is not None:
        bias_ptr += first
    if state_ptr is not None:
        state_ptr += sample * s_b + first * s_d
    here = x_ptr + start.to(tl.int64) * x_l
    z = _sum(here, state_ptr, weight_ptr, bias_ptr, d, known, start, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH)
    if ACTIVE:
        s, _ = sigmoid(z, y_ptr.dtype.element_ty == tl.float32)
        z = z * s
    y_ptr += sample * y_b + first * y_d + start.to(tl.int64) * y_l
    tl.store(y_ptr + (d * y_d + t * y_l), narrow(z, y_ptr.dtype.element_ty), mask=known & (t < length - start))
    if block == across - 1:
        # the last WIDTH - 1 positions, as they are
        final_ptr += (sample * channels + first) * (WIDTH - 1)
        for j in tl.range(WIDTH - 1, num_stages=1):
            at = length + j - (WIDTH - 1)
            last = tl.load(x_ptr + at.to(tl.int64) * x_l + d * x_d, mask=known & (at >= 0), other=0.0)
            if state_ptr is not None:
                kept = tl.load(state_ptr + d * s_d + (length + j) * s_l, mask=known & (at < 0), other=0.0)
                last = tl.where(at < 0, kept, last)
            tl.store(final_ptr + d * (WIDTH - 1) + j, last, mask=known)


@triton.jit(do_not_specialize=["length", "across", "each"])
def _backward(
    dy_ptr,
    df_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    dx_ptr,
    ds_ptr,
    part_ptr,
    channels,
    length,
    across,
    each,
    g_b,
    g_d,
    g_l,
    f_b,
    f_d,
    f_l,
    x_b,
    x_d,
    x_l,
    w_d,
    w_k,
    s_b,
    s_d,
    s_l,
    y_b,
    y_d,
    y_l,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """part: (programs of a block of channels, channels, COLUMNS): the weight's gradient, then the bias's."""
    sample, first, block = _place(channels, across, BLOCK_D)
    d = tl.arange(0, BLOCK_D)[:, None]
    t = tl.arange(0, BLOCK_L)[None, :]
    known = d < channels - first
    column = tl.arange(0, COLUMNS)[None, :]
    dy_ptr += sample * g_b + first * g_d
    x_ptr += sample * x_b + first * x_d
    dx_ptr += sample * y_b + first * y_d
    weight_ptr += first * w_d
    if bias_ptr is not None:
        bias_ptr += first
    if state_ptr is not None:
        state_ptr += sample * s_b + first * s_d
        ds_ptr += (sample * channels + first) * (WIDTH - 1)
    if df_ptr is not None:
        df_ptr += sample * f_b + first * f_d
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    own = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    begin = block * each
    end = tl.minimum(begin + each, length)
    if state_ptr is not None:
        # the positions of the state stand before the first span's
        begin = tl.where(block == 0, -((WIDTH - 2 + BLOCK_L) // BLOCK_L) * BLOCK_L, begin)
    for at in tl.range(begin, end, BLOCK_L, num_stages=1):
        place = tl.full([], 1, tl.int64) * at
        dy = dy_ptr + place * g_l
        x_at = x_ptr + place * x_l
        total = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
        # a position stands under tap j of y at WIDTH - 1 - j positions on
        for j in tl.range(WIDTH - 1, num_stages=1):
            ahead = WIDTH - 1 - j
            g = _slope(
                dy,
                x_at,
                state_ptr,
                weight_ptr,
                bias_ptr,
                d,
                known,
                at,
                t + ahead,
                length,
                g_d,
                g_l,
                x_d,
                x_l,
                s_d,
                s_l,
                w_d,
                w_k,
                WIDTH,
                ACTIVE,
                EXACT,
            )
            weight = widen(tl.load(weight_ptr + d * w_d + j * w_k, mask=known, other=0.0))
            total += tl.where((t + ahead >= -at) & (t + ahead < length - at), weight * g, 0.0)
        g = _slope(
            dy,
            x_at,
            state_ptr,
            weight_ptr,
            bias_ptr,
            d,
            known,
            at,
            t,
            length,
            g_d,
            g_l,
            x_d,
            x_l,
            s_d,
            s_l,
            w_d,
            w_k,
            WIDTH,
            ACTIVE,
            EXACT,
        )
        valid = (t >= -at) & (t < length - at)
        weight = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 1) * w_k, mask=known, other=0.0))
        total += tl.where(valid, weight * g, 0.0)
        for k in tl.range(WIDTH, num_stages=1):
            x = _element(x_at, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
            own += tl.where(column == k, tl.sum(tl.where(valid, g * x, 0.0), 1)[:, None], 0.0)
        own += tl.where(column == WIDTH, tl.sum(g, 1)[:, None], 0.0)
        if df_ptr is not None:
            kept = t + (at - length + WIDTH - 1)
            last = known & (kept >= 0) & (kept < WIDTH - 1)
            total += widen(tl.load(df_ptr + d * f_d + kept * f_l, mask=last, other=0.0))
        out = narrow(total, dx_ptr.dtype.element_ty)
        dx = dx_ptr + place * y_l
        tl.store(dx + (d * y_d + t * y_l), out, mask=known & (t >= -at) & (t < end - at))
        if state_ptr is not None:
            early = known & (t < -at) & (t > -WIDTH - at)
            tl.store(ds_ptr + d * (WIDTH - 1) + (at + t + (WIDTH - 1)), out, mask=early)
    part_ptr += ((sample * across + block) * channels + first) * COLUMNS
    tl.store(part_ptr + (d * COLUMNS + column), own, mask=known & (column <= WIDTH))


@triton.jit(do_not_specialize=["parts"])
def _add(
    part_ptr,
    weight_ptr,
    bias_ptr,
    parts,
    channels,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the programs' parts in a fixed order. A part is a row of channels x COLUMNS numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = at // COLUMNS
    column = at % COLUMNS
    mask = (channel < channels) & (column <= WIDTH)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        place = (start + row).to(tl.int64)[:, None] * (channels * COLUMNS) + at[None, :]
        total += tl.load(part_ptr + place, mask=(row < parts - start)[:, None] & mask[None, :], other=0.0)
    found = tl.sum(total, 0)
    own = narrow(found, weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + channel * WIDTH + column, own, mask=mask & (column < WIDTH))
    if bias_ptr is not None:
        tl.store(bias_ptr + channel, narrow(found, bias_ptr.dtype.element_ty), mask=mask & (column == WIDTH))


class Tile(NamedTuple):
    d: int
    length: int
    warps: int


SPANS = 4  # programs of a unit, where the gradients of weights are summed


def _tile(target: Target, x: Tensor, elements: int, threads: int) -> Tile:
    """Along x's innermost dimension 64 elements or more, so that loads are whole lines; ``elements`` in all."""
    _, channels, length = x.shape
    inner, outer = (channels, length) if x.stride(1) == 1 else (length, channels)
    most = 64 if outer >= 16 else 256
    first = min(triton.next_power_of_2(max(inner, 1)), most)
    second = min(triton.next_power_of_2(max(outer, 1)), max(1, elements // first))
    d, across = (first, second) if x.stride(1) == 1 else (second, first)
    return Tile(d, across, max(1, min(threads, d * across // 4) // lanes(target)))


def _near(x: Tensor, tile: Tile) -> Tensor:
    """The tensor, or a copy where 32 bits do not count the elements that a tile spans."""
    return x if tile.d * x.stride(1) + 2 * tile.length * x.stride(2) < 2**31 else x.contiguous()


def _empty(x: Tensor) -> Tensor:
    batch, channels, length = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1:
        return torch.empty(batch, length, channels, dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(batch, channels, length, dtype=x.dtype, device=x.device)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, channels, length = x.shape
    width = weight.shape[1]
    y, final = _empty(x), torch.empty(batch, channels, width - 1, dtype=x.dtype, device=x.device)
    if batch * channels == 0:
        return y, final
    tile = _tile(target, x, 2048, 128 if target.wave == 32 else 256)
    x = _near(x, tile)
    across = max(1, triton.cdiv(length, tile.length))
    launch(
        _forward,
        (batch * triton.cdiv(channels, tile.d) * across,),
        x,
        weight,
        None if bias is None else bias.contiguous(),
        initial_state,
        y,
        final,
        channels,
        length,
        across,
        *x.stride(),
        *weight.stride(),
        *strides(initial_state, 3),
        *y.stride(),
        width,
        activation is not None,
        tile.d,
        tile.length,
        device=x.device,
        num_warps=tile.warps,
    )
    return y, final


def causal_conv1d_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, channels, length = x.shape
    width = weight.shape[1]
    dx, own = _empty(x), torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    of_bias = x.new_empty(0) if bias is None else torch.empty(channels, dtype=bias.dtype, device=x.device)
    of_state = torch.empty(0 if initial_state is None else initial_state.shape, dtype=x.dtype, device=x.device)
    if batch * channels == 0:
        return dx, own.zero_(), of_bias.zero_(), of_state
    tile = _tile(target, x, 1024, 256)
    x, grad_y = _near(x, tile), _near(grad_y, tile)
    blocks = triton.cdiv(channels, tile.d)
    across = max(1, min(triton.cdiv(length, 4 * tile.length), triton.cdiv(SPANS * target.units, batch * blocks)))
    each = max(1, triton.cdiv(triton.cdiv(length, across), tile.length)) * tile.length
    across = max(1, triton.cdiv(length, each))
    columns = triton.next_power_of_2(width + 1)
    part = torch.empty(batch * across, channels, columns, dtype=torch.float32, device=x.device)
    launch(
        _backward,
        (batch * blocks * across,),
        grad_y,
        grad_final_state,
        x,
        weight,
        None if bias is None else bias.contiguous(),
        initial_state,
        dx,
        of_state,
        part,
        channels,
        length,
        across,
        each,
        *grad_y.stride(),
        *strides(grad_final_state, 3),
        *x.stride(),
        *weight.stride(),
        *strides(initial_state, 3),
        *dx.stride(),
        width,
        activation is not None,
        tile.d,
        tile.length,
        columns,
        device=x.device,
        num_warps=tile.warps,
    )
    rows, block = (8, 128) if batch * across <= 8 else (64, 64)
    launch(
        _add,
        (triton.cdiv(channels * columns, block),),
        part,
        own,
        None if bias is None else of_bias,
        batch * across,
        channels,
        width,
        columns,
        rows,
        block,
        device=x.device,
        num_warps=4,
    )
    return dx, own, of_bias, of_state


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Channels of models, innermost and not; many tokens and one, states and none, each width."""
    kind = getattr(torch, dtype)

    def calls(
        batch: int, channels: int, length: int, width: int, inner: bool, biased: bool, state: bool, silu: bool
    ) -> None:
        x = torch.empty(batch, channels, length, dtype=kind, device="meta")
        if inner:
            x = torch.empty(batch, length, channels, dtype=kind, device="meta").transpose(1, 2)
        weight = torch.empty(channels, width, dtype=kind, device="meta")
        bias = torch.empty(channels, dtype=kind, device="meta") if biased else None
        before = torch.empty(batch, channels, width - 1, dtype=kind, device="meta") if state else None
        activation = "silu" if silu else None
        causal_conv1d(x, weight, bias, before, activation, target)
        causal_conv1d_backward(x, before, x, weight, bias, before, activation, target)

    shapes = [(2, 5376, 2048, 4, inner, True, state, True) for inner in (True, False) for state in (True, False)]
    shapes += [(64, 5376, 1, 4, True, True, True, True), (2, 1792, 2048, 4, True, False, False, False)]
    shapes += [(1, 67, 131, width, False, True, True, True) for width in (2, 3, 8)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
