"""The backward of `causal_conv1d` in Triton.

With an activation a first pass writes the gradient of the sum before it, in float32: each of a position's taps needs
it, and it takes as many loads as the forward. Then a program takes a block of channels over a span of positions of one
sample, and keeps its own part of the gradients of weight and bias; these parts are added up in a fixed order. There are
no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import narrow, sigmoid, widen
from ferryman.ops.causal_conv1d.run_kernels import element
from ferryman.ops.causal_conv1d.triton_kernels import THREADS, empty_like, near, place_of, sum_at, tile_for

SPANS = 4  # programs of a unit, where the gradients of weights are summed


@triton.jit(do_not_specialize=["length", "across"])
def _slopes(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    g_ptr,
    channels,
    length,
    across,
    g_b,
    g_d,
    g_l,
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
    EXACT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """g: the gradient of the sum that SiLU takes, in float32."""
    sample, first, block = place_of(channels, across, BLOCK_D)
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
    z = sum_at(here, state_ptr, weight_ptr, bias_ptr, d, known, start, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH)
    s, rest = sigmoid(z, EXACT)
    inside = known & (t < length - start)
    dy_ptr += sample * g_b + first * g_d + start.to(tl.int64) * g_l
    g = widen(tl.load(dy_ptr + (d * g_d + t * g_l), mask=inside, other=0.0)) * (s * (1.0 + z * rest))
    g_ptr += sample * y_b + first * y_d + start.to(tl.int64) * y_l
    tl.store(g_ptr + (d * y_d + t * y_l), g, mask=inside)


@triton.jit
def _under(dy, weight_ptr, d, t, known, at, length, j, g_d, g_l, w_d, w_k, WIDTH: tl.constexpr):
    """What tap j brings to the gradient of x."""
    ahead = WIDTH - 1 - j
    valid = (t + ahead >= -at) & (t + ahead < length - at)
    g = widen(tl.load(dy + (d * g_d + (t + ahead) * g_l), mask=known & valid, other=0.0))
    weight = widen(tl.load(weight_ptr + d * w_d + j * w_k, mask=known, other=0.0))
    return tl.where(valid, weight * g, 0.0)


@triton.jit(do_not_specialize=["length", "across", "each"])
def _backward(
    dy_ptr,
    df_ptr,
    x_ptr,
    weight_ptr,
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
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dy: of the sum before the activation. part: (programs of a block of channels, channels, COLUMNS): the weight's
    gradient, then the bias's."""
    sample, first, block = place_of(channels, across, BLOCK_D)
    d = tl.arange(0, BLOCK_D)[:, None]
    t = tl.arange(0, BLOCK_L)[None, :]
    known = d < channels - first
    column = tl.arange(0, COLUMNS)[None, :]
    dy_ptr += sample * g_b + first * g_d
    x_ptr += sample * x_b + first * x_d
    dx_ptr += sample * y_b + first * y_d
    weight_ptr += first * w_d
    if state_ptr is not None:
        state_ptr += sample * s_b + first * s_d
        ds_ptr += (sample * channels + first) * (WIDTH - 1)
    if df_ptr is not None:
        df_ptr += sample * f_b + first * f_d
    own = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    # of few taps each position has its own sums, added up once at the end, and all loads of a tile are in flight
    FEW: tl.constexpr = WIDTH <= 4 and state_ptr is None
    if FEW:
        taps_0 = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
        taps_1 = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
        taps_2 = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
        taps_3 = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
        of_bias = tl.zeros([BLOCK_D, BLOCK_L], tl.float32)
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
        if FEW:
            for j in tl.static_range(WIDTH - 1):
                total += _under(dy, weight_ptr, d, t, known, at, length, j, g_d, g_l, w_d, w_k, WIDTH)
        else:
            for j in tl.range(WIDTH - 1, num_stages=1):
                total += _under(dy, weight_ptr, d, t, known, at, length, j, g_d, g_l, w_d, w_k, WIDTH)
        valid = (t >= -at) & (t < length - at)
        g = widen(tl.load(dy + (d * g_d + t * g_l), mask=known & valid, other=0.0))
        weight = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 1) * w_k, mask=known, other=0.0))
        total += tl.where(valid, weight * g, 0.0)
        if FEW:
            for k in tl.static_range(WIDTH):
                x = element(x_at, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
                come = tl.where(valid, g * x, 0.0)
                if k == 0:
                    taps_0 += come
                elif k == 1:
                    taps_1 += come
                elif k == 2:
                    taps_2 += come
                else:
                    taps_3 += come
            of_bias += g
        else:
            for k in tl.range(WIDTH, num_stages=1):
                x = element(x_at, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
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
    if FEW:
        own += tl.where(column == 0, tl.sum(taps_0, 1)[:, None], 0.0)
        own += tl.where(column == 1, tl.sum(taps_1, 1)[:, None], 0.0)
        own += tl.where(column == 2, tl.sum(taps_2, 1)[:, None], 0.0)
        own += tl.where(column == 3, tl.sum(taps_3, 1)[:, None], 0.0)
        own += tl.where(column == WIDTH, tl.sum(of_bias, 1)[:, None], 0.0)
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
    summed = tl.sum(total, 0)
    own = narrow(summed, weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + channel * WIDTH + column, own, mask=mask & (column < WIDTH))
    if bias_ptr is not None:
        tl.store(bias_ptr + channel, narrow(summed, bias_ptr.dtype.element_ty), mask=mask & (column == WIDTH))


def _before_activation(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, target: Target
) -> Tensor:
    """The gradient of what SiLU takes, of x's shape and layout, in float32."""
    slope = empty_like(x, torch.float32)
    batch, channels, length = x.shape
    if not length:
        return slope
    tile = tile_for(target, x, 8 * THREADS, THREADS, 2)  # with 4 of a thread a token's tile spills on sm_89
    across = triton.cdiv(length, tile.length)
    launch(
        _slopes,
        (batch * triton.cdiv(channels, tile.d) * across,),
        grad_y,
        x,
        weight,
        bias,
        state,
        slope,
        channels,
        length,
        across,
        *grad_y.stride(),
        *x.stride(),
        *weight.stride(),
        *strides(state, 3),
        *slope.stride(),
        weight.shape[1],
        x.dtype == torch.float32,
        tile.d,
        tile.length,
        device=x.device,
        num_warps=tile.warps,
    )
    return slope


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
    dx, own = empty_like(x), torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    of_bias = x.new_empty(0) if bias is None else torch.empty(channels, dtype=bias.dtype, device=x.device)
    of_state = torch.empty(0 if initial_state is None else initial_state.shape, dtype=x.dtype, device=x.device)
    if batch * channels == 0:
        return dx, own.zero_(), of_bias.zero_(), of_state
    x, grad_y = (near(y, tile_for(target, x, 8 * THREADS, THREADS)) for y in (x, grad_y))
    bias = None if bias is None else bias.contiguous()
    if activation is not None:
        grad_y = _before_activation(grad_y, x, weight, bias, initial_state, target)
    tile = tile_for(target, x, 1024, 256)
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
        causal_conv1d_backward(x, before, x, weight, bias, before, activation, target)

    shapes = [(2, 5376, 2048, 4, inner, True, state, True) for inner in (True, False) for state in (True, False)]
    shapes += [(64, 5376, 1, 4, True, True, True, True), (2, 1792, 2048, 4, True, False, False, False)]
    shapes += [(1, 67, 131, width, False, True, True, True) for width in (2, 3, 8)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
