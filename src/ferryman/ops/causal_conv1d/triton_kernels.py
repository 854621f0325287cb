"""`causal_conv1d` in Triton: one read and one write of memory.

Runs of positions serve 2 to 4 taps (`run_kernels.py`). Of other widths, a few tokens, or rows that are not whole
vectors, each tap is loaded apart, from the L1 cache (`sum_at`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import widen
from ferryman.backends.triton_rows import lanes
from ferryman.ops.causal_conv1d.run_kernels import activated, element, in_columns, in_rows


@triton.jit
def sum_at(
    x_ptr, state_ptr, weight_ptr, bias_ptr, d, known, at, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH: tl.constexpr
):
    """What the activation takes, at positions at + t. A loop that is long, or reads a state, is not unrolled: registers
    would not hold it."""
    z = tl.zeros_like(d * t).to(tl.float32)
    if WIDTH <= 4 and state_ptr is None:
        for k in tl.static_range(WIDTH):
            x = element(x_ptr, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
            z += widen(tl.load(weight_ptr + d * w_d + k * w_k, mask=known, other=0.0)) * x
    else:
        for k in tl.range(WIDTH, num_stages=1):
            x = element(x_ptr, state_ptr, d, known, at, t + (k - WIDTH + 1), length, x_d, x_l, s_d, s_l, WIDTH)
            z += widen(tl.load(weight_ptr + d * w_d + k * w_k, mask=known, other=0.0)) * x
    if bias_ptr is not None:
        z += widen(tl.load(bias_ptr + d, mask=known, other=0.0))
    return z


@triton.jit
def place_of(channels, across, BLOCK_D: tl.constexpr):
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
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """RUN: positions of a thread; 1: each tap is loaded apart. ROWS: positions are innermost."""
    sample, first, block = place_of(channels, across, BLOCK_D)
    start = block * (BLOCK_L if ROWS else BLOCK_L * RUN)
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
    y_ptr += sample * y_b + first * y_d + start.to(tl.int64) * y_l
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if RUN == 1:
        z = sum_at(
            here, state_ptr, weight_ptr, bias_ptr, d, known, start, t, length, x_d, x_l, s_d, s_l, w_d, w_k, WIDTH
        )
        tl.store(y_ptr + (d * y_d + t * y_l), activated(z, ACTIVE, dtype), mask=known & (t < length - start))
    else:
        bias = None
        if bias_ptr is not None:
            bias = widen(tl.load(bias_ptr + d, mask=known, other=0.0))
        if ROWS:
            in_rows(
                here,
                state_ptr,
                weight_ptr,
                bias,
                y_ptr,
                d,
                known,
                start,
                length,
                x_d,
                x_l,
                s_d,
                s_l,
                w_d,
                w_k,
                y_d,
                y_l,
                WIDTH,
                ACTIVE,
                BLOCK_D,
                BLOCK_L,
            )
        else:
            in_columns(
                here,
                state_ptr,
                weight_ptr,
                bias,
                y_ptr,
                d,
                known,
                channels - first,
                start,
                length,
                x_d,
                x_l,
                s_d,
                s_l,
                w_d,
                w_k,
                y_d,
                y_l,
                WIDTH,
                ACTIVE,
                BLOCK_D,
                BLOCK_L,
                RUN,
            )
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


class Tile(NamedTuple):
    """run: positions of a thread; a program takes ``length`` of them, or as many runs where channels are innermost."""

    d: int
    length: int
    warps: int
    run: int = 1

    def positions(self, rows: bool) -> int:
        return self.length if rows else self.length * self.run


THREADS = 128  # of a program of 8 times as many elements


def tile_for(target: Target, x: Tensor, elements: int, threads: int, least: int = 4) -> Tile:
    """Along x's innermost dimension 64 elements or more, so that loads are whole lines; ``elements`` in all, ``least``
    or more of a thread."""
    _, channels, length = x.shape
    inner, outer = (channels, length) if x.stride(1) == 1 else (length, channels)
    most = 64 if outer >= 16 else 256
    first = min(triton.next_power_of_2(max(inner, 1)), most)
    second = min(triton.next_power_of_2(max(outer, 1)), max(1, elements // first))
    d, across = (first, second) if x.stride(1) == 1 else (second, first)
    return Tile(d, across, max(1, min(threads, d * across // least) // lanes(target)))


_RUN = 16  # positions of a thread, where channels are innermost


def _run_tile(target: Target, x: Tensor, width: int) -> Tile:
    """A tile of `tile_for` where runs do not serve."""
    _, channels, length = x.shape
    whole = x.stride(2) == 1 and length % 16 == 0
    if not 2 <= width <= 4 or not (whole or x.stride(1) == 1) or length < 16:
        return tile_for(target, x, 8 * THREADS, THREADS)
    if x.stride(1) != 1:
        tile = tile_for(target, x, 16 * THREADS, THREADS)
        return tile._replace(run=8)
    d = min(triton.next_power_of_2(channels), 256)
    across = max(1, 16 * THREADS // x.element_size() // d)  # 16 bytes of a thread
    return Tile(d, across, max(1, min(THREADS, d * across // 4) // lanes(target)), _RUN)


def near(x: Tensor, tile: Tile) -> Tensor:
    """The tensor, or a copy where 32 bits do not count the elements that a tile spans."""
    spans = tile.d * x.stride(1) + 2 * tile.length * tile.run * x.stride(2)
    return x if spans < 2**31 else x.contiguous()


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of x's shape and layout, dense; dtype: None for x's."""
    batch, channels, length = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1:
        return torch.empty(batch, length, channels, dtype=dtype or x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(batch, channels, length, dtype=dtype or x.dtype, device=x.device)


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
    y, final = empty_like(x), torch.empty(batch, channels, width - 1, dtype=x.dtype, device=x.device)
    if batch * channels == 0:
        return y, final
    tile = _run_tile(target, x, width)
    x = near(x, tile)
    rows = x.stride(1) != 1
    across = max(1, triton.cdiv(length, tile.positions(rows)))
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
        tile.run,
        rows,
        device=x.device,
        num_warps=tile.warps,
    )
    return y, final


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

    shapes = [(2, 5376, 2048, 4, inner, True, state, True) for inner in (True, False) for state in (True, False)]
    shapes += [(64, 5376, 1, 4, True, True, True, True), (2, 1792, 2048, 4, True, False, False, False)]
    shapes += [(1, 67, 131, width, False, True, width > 1, True) for width in (1, 2, 3, 8)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
