"""Products by experts in Triton. The grid follows from shapes alone: a program finds its expert from the offsets, and
programs beyond the last tile leave. Nothing waits for the device.

Limit for few tokens: the weights of the experts that they choose; for many: the matrix units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, narrow, normal, sigmoid, widen
from ferryman.errors import Unsupported
from ferryman.ops.moe_permute.implementations import MOST
from ferryman.ops.moe_permute.order_kernels import slots_by_count, slots_by_rank

_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "swiglu_oai": 3, "swiglu_oai_interleaved": 4}
_ALPHA: tl.constexpr = tl.constexpr(1.702)
_LIMIT: tl.constexpr = tl.constexpr(7.0)


@triton.jit
def _activated(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Logistic and normal distributions, not 1 + tanh and 1 + erf, which lose the digits of a negative gate."""
    if KIND == 0:
        factor, _ = sigmoid(x, EXACT)
    elif KIND >= 3:
        x = tl.where(x > _LIMIT, _LIMIT, x)
        factor, _ = sigmoid(_ALPHA * x, EXACT)
    elif KIND == 1:
        factor, _ = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * (x * x)), EXACT)
    else:
        factor, _ = normal(x, EXACT)
    return x * factor


@triton.jit
def _opened(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """(the activation, its slope)."""
    if KIND == 0:
        factor, rest = sigmoid(x, EXACT)
        steep = factor * rest
    elif KIND >= 3:
        above = x > _LIMIT
        x = tl.where(above, _LIMIT, x)
        factor, rest = sigmoid(_ALPHA * x, EXACT)
        steep = _ALPHA * (factor * rest)
    elif KIND == 1:
        square = x * x
        factor, rest = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square), EXACT)
        # past 1e4 the slope is 0, and the square must not become infinite: 0 * inf
        steep = factor * rest * (1.5957691216057308 + 0.21406448696540377 * tl.minimum(square, 1e8))
    else:
        factor, steep = normal(x, EXACT)
    slope = factor + x * steep
    if KIND >= 3:
        slope = tl.where(above, 0.0, slope)
    return x * factor, slope


@triton.jit
def _multiplied(up, KIND: tl.constexpr):
    """(what the activated gate is multiplied by, its slope)."""
    slope = tl.full(up.shape, 1.0, tl.float32)
    if KIND >= 3:
        slope = tl.where(tl.abs(up) > _LIMIT, 0.0, slope)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    return up, slope


@triton.jit
def _tile_of(offsets_ptr, place, rows, experts, BY_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, first row, end of its rows) of a tile; nothing is left where first >= end. Expert number ``experts``
    owns the rows that are no expert's.

    BY_ROW: tile ``place`` begins at that row, if the row is a BLOCK_M-th of its expert's. Else expert e's tiles have
    the numbers from start // BLOCK_M + e on, which no two experts share: rows // BLOCK_M + experts + 1 are enough.
    """
    index = tl.arange(0, BLOCK_E)
    end = tl.load(offsets_ptr + index, mask=index < experts, other=rows)
    end = tl.minimum(tl.maximum(end, 0), rows)
    if BY_ROW:
        expert = tl.min(tl.where((index < experts) & (end > place), index, experts), 0)
    else:
        # the last e whose number is not beyond place: no earlier end moves it past
        expert = tl.min(tl.where(index < experts, tl.maximum(index, place - end // BLOCK_M), experts), 0)
    start = tl.max(tl.where(index < expert, end, 0), 0)
    stop = tl.max(tl.where(index <= expert, end, 0), 0)
    if BY_ROW:
        first = tl.where((place - start) % BLOCK_M == 0, place, rows)
    else:
        first = start + (place - start // BLOCK_M - expert) * BLOCK_M
    return expert, first, stop


@triton.jit(do_not_specialize=["rows"])
def grouped_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    offsets_ptr,
    take_ptr,
    put_ptr,
    rows,
    tiles,
    n,
    k,
    experts,
    slots,
    x_row,
    x_col,
    weight_expert,
    weight_row,
    weight_col,
    bias_expert,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BY_ROW: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y (rows, n), dense = x @ weight[e].T + bias[e]. take: a place's row of x is take[place] // slots; put: its row of
    y. GATED: act(product with the first n rows of the weight) * (product with the next n). KIND 4: with the even rows
    and the odd ones, which are loaded and multiplied side by side, and divided after."""
    PAIR: tl.constexpr = 2 if GATED and KIND == 4 else 1
    place = tl.program_id(0) % tiles
    tile_n = (tl.program_id(0) // tiles) * BLOCK_N
    expert, first, stop = _tile_of(offsets_ptr, place, rows, experts, BY_ROW, BLOCK_M, BLOCK_E)
    if first < stop:
        row = first + tl.arange(0, BLOCK_M)
        col = tile_n + tl.arange(0, BLOCK_N)
        deep = tl.arange(0, BLOCK_K)
        row_inside = row < stop
        col_inside = col < n
        source = row
        target = row
        if take_ptr is not None:
            source = tl.load(take_ptr + row, mask=row_inside, other=0) // slots
        if put_ptr is not None:
            target = tl.load(put_ptr + row, mask=row_inside, other=0)
        own = tl.minimum(expert, experts - 1).to(tl.int64)
        depth = tl.where(expert < experts, k, 0)
        line = tile_n * PAIR + tl.arange(0, BLOCK_N * PAIR)
        line_inside = line < n * PAIR
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_row + deep[None, :] * x_col
        weight_ptrs = (
            weight_ptr + own * weight_expert + line.to(tl.int64)[None, :] * weight_row + deep[:, None] * weight_col
        )
        total = tl.zeros([BLOCK_M, BLOCK_N * PAIR], tl.float32)
        total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, depth, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_ptrs, mask=row_inside[:, None], other=0.0)
                b = tl.load(weight_ptrs, mask=line_inside[None, :], other=0.0)
            else:
                left = deep < k - begin
                a = tl.load(x_ptrs, mask=row_inside[:, None] & left[None, :], other=0.0)
                b = tl.load(weight_ptrs, mask=left[:, None] & line_inside[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            if GATED and PAIR == 1:
                up_ptrs = weight_ptrs + tl.cast(n, tl.int64) * weight_row
                if EVEN_K:
                    c = tl.load(up_ptrs, mask=col_inside[None, :], other=0.0)
                else:
                    c = tl.load(up_ptrs, mask=left[:, None] & col_inside[None, :], other=0.0)
                total_up = tl.dot(a, c, total_up, input_precision="ieee")
            x_ptrs += BLOCK_K * x_col
            weight_ptrs += BLOCK_K * weight_col
        if bias_ptr is not None:
            there = line_inside & (expert < experts)
            bias_ptrs = bias_ptr + own * bias_expert + line
            total += widen(tl.load(bias_ptrs, mask=there, other=0.0))[None, :]
            if GATED and PAIR == 1:
                total_up += widen(tl.load(bias_ptrs + n, mask=there, other=0.0))[None, :]
        if PAIR == 2:
            total, total_up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N, 2]))
        if GATED:
            total_up, _ = _multiplied(total_up, KIND)
            total = _activated(total, KIND, y_ptr.dtype.element_ty == tl.float32) * total_up
        y_ptrs = y_ptr + target.to(tl.int64)[:, None] * n + col[None, :]
        tl.store(y_ptrs, narrow(total, y_ptr.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def grouped_weight_gradient(
    grad_ptr,
    x_ptr,
    out_ptr,
    offsets_ptr,
    grad_take_ptr,
    x_take_ptr,
    rows,
    n,
    k,
    experts,
    slots,
    grad_row,
    grad_col,
    x_row,
    x_col,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out (experts, n, k), dense = grad[rows of e].T @ x[rows of e]. take: a place's row is take[place] // slots."""
    across = tl.cdiv(n, BLOCK_N) * tl.cdiv(k, BLOCK_K)
    expert = tl.program_id(0) // across
    tile = tl.program_id(0) % across
    col = (tile % tl.cdiv(n, BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
    deep = (tile // tl.cdiv(n, BLOCK_N)) * BLOCK_K + tl.arange(0, BLOCK_K)
    index = tl.arange(0, BLOCK_E)
    end = tl.load(offsets_ptr + index, mask=index < experts, other=0)
    end = tl.minimum(tl.maximum(end, 0), rows)
    start = tl.max(tl.where(index < expert, end, 0), 0)
    stop = tl.max(tl.where(index <= expert, end, 0), 0)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(start, stop, BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        inside = row < stop
        grad_source = row
        x_source = row
        if grad_take_ptr is not None:
            grad_source = tl.load(grad_take_ptr + row, mask=inside, other=0) // slots
        if x_take_ptr is not None:
            x_source = tl.load(x_take_ptr + row, mask=inside, other=0) // slots
        a = tl.load(
            grad_ptr + grad_source.to(tl.int64)[None, :] * grad_row + col[:, None] * grad_col,
            mask=inside[None, :] & (col < n)[:, None],
            other=0.0,
        )
        b = tl.load(
            x_ptr + x_source.to(tl.int64)[:, None] * x_row + deep[None, :] * x_col,
            mask=inside[:, None] & (deep < k)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    out_ptrs = out_ptr + (expert.to(tl.int64) * n + col.to(tl.int64)[:, None]) * k + deep[None, :]
    tl.store(out_ptrs, narrow(total, out_ptr.dtype.element_ty), mask=(col < n)[:, None] & (deep < k)[None, :])


@triton.jit
def combine_rows(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    width,
    slots,
    experts,
    ids_row,
    ids_col,
    weights_row,
    weights_col,
    BLOCK: tl.constexpr,
):
    """out (T, width) = the weighted sum of y's rows of a token; slots of no expert are left out. Without weights: 1."""
    across = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(slots):
        expert = tl.load(ids_ptr + token * ids_row + slot * ids_col)
        known = (expert >= 0) & (expert < experts)
        y = widen(tl.load(y_ptr + (token * slots + slot) * width + col, mask=(col < width) & known, other=0.0))
        if weights_ptr is not None:
            weight = widen(tl.load(weights_ptr + token * weights_row + slot * weights_col))
            y = tl.where(known, weight, 0.0) * y
        total += y
    tl.store(out_ptr + token * width + col, narrow(total, out_ptr.dtype.element_ty), mask=col < width)


@triton.jit(do_not_specialize=["rows"])
def gated_gradient(
    x_ptr,
    grad_ptr,
    weight_ptr,
    down_ptr,
    bias_ptr,
    shares_ptr,
    dh_ptr,
    a_ptr,
    part_ptr,
    offsets_ptr,
    take_ptr,
    rows,
    tiles,
    n,
    k,
    experts,
    slots,
    x_row,
    x_col,
    grad_row,
    grad_col,
    weight_expert,
    weight_row,
    weight_col,
    down_expert,
    down_row,
    down_col,
    bias_expert,
    shares_row,
    shares_col,
    KIND: tl.constexpr,
    BY_ROW: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gate, up, and the gradient that comes from behind, u = grad @ down, in one loop over a row's k columns.

    dh (rows, 2 n): the gradient of the first product. a (rows, n): the gated activation times its share; both by place.
    part (rows, tiles of n), by slot: this tile's sum of the activation times u, of which a share's gradient is made.
    KIND 4: gate and up are even and odd columns.
    """
    PAIR: tl.constexpr = 2 if KIND == 4 else 1
    place = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    tile_n = part * BLOCK_N
    expert, first, stop = _tile_of(offsets_ptr, place, rows, experts, BY_ROW, BLOCK_M, BLOCK_E)
    if first < stop:
        row = first + tl.arange(0, BLOCK_M)
        col = tile_n + tl.arange(0, BLOCK_N)
        deep = tl.arange(0, BLOCK_K)
        row_inside = row < stop
        col_inside = col < n
        slot = tl.load(take_ptr + row, mask=row_inside, other=0)
        token = (slot // slots).to(tl.int64)
        own = tl.minimum(expert, experts - 1).to(tl.int64)
        depth = tl.where(expert < experts, k, 0)
        x_ptrs = x_ptr + token[:, None] * x_row + deep[None, :] * x_col
        grad_ptrs = grad_ptr + token[:, None] * grad_row + deep[None, :] * grad_col
        wide_col = col.to(tl.int64)[None, :]
        line = tile_n * PAIR + tl.arange(0, BLOCK_N * PAIR)
        line_inside = line < n * PAIR
        weight_ptrs = weight_ptr + own * weight_expert + line.to(tl.int64)[None, :] * weight_row
        weight_ptrs += deep[:, None] * weight_col
        down_ptrs = down_ptr + own * down_expert + wide_col * down_col + deep.to(tl.int64)[:, None] * down_row
        gate = tl.zeros([BLOCK_M, BLOCK_N * PAIR], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        behind = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, depth, BLOCK_K):
            at_row = row_inside[:, None]
            at_col = col_inside[None, :]
            at_line = line_inside[None, :]
            if not EVEN_K:
                left = deep < k - begin
                at_row = at_row & left[None, :]
                at_col = at_col & left[:, None]
                at_line = at_line & left[:, None]
            x = tl.load(x_ptrs, mask=at_row, other=0.0)
            gate = tl.dot(x, tl.load(weight_ptrs, mask=at_line, other=0.0), gate, input_precision="ieee")
            if PAIR == 1:
                up_ptrs = weight_ptrs + tl.cast(n, tl.int64) * weight_row
                up = tl.dot(x, tl.load(up_ptrs, mask=at_col, other=0.0), up, input_precision="ieee")
            above = tl.load(grad_ptrs, mask=at_row, other=0.0)
            behind = tl.dot(above, tl.load(down_ptrs, mask=at_col, other=0.0), behind, input_precision="ieee")
            x_ptrs += BLOCK_K * x_col
            grad_ptrs += BLOCK_K * grad_col
            weight_ptrs += BLOCK_K * weight_col
            down_ptrs += tl.cast(down_row, tl.int64) * BLOCK_K
        if bias_ptr is not None:
            there = line_inside & (expert < experts)
            bias_ptrs = bias_ptr + own * bias_expert + line
            gate += widen(tl.load(bias_ptrs, mask=there, other=0.0))[None, :]
            if PAIR == 1:
                up += widen(tl.load(bias_ptrs + n, mask=there, other=0.0))[None, :]
        if PAIR == 2:
            gate, up = tl.split(tl.reshape(gate, [BLOCK_M, BLOCK_N, 2]))
        share_ptrs = shares_ptr + token * shares_row + (slot % slots) * shares_col
        share = widen(tl.load(share_ptrs, mask=row_inside & (expert < experts), other=0.0))[:, None]
        opened, steep = _opened(gate, KIND, a_ptr.dtype.element_ty == tl.float32)
        up, passed = _multiplied(up, KIND)
        # beyond the columns the weights are 0: times an infinite x, NaN
        sums = tl.sum(tl.where(col_inside[None, :], opened * up * behind, 0.0), 1)
        tl.store(part_ptr + slot.to(tl.int64) * tl.cdiv(n, BLOCK_N) + part, sums, mask=row_inside)
        inside = row_inside[:, None] & col_inside[None, :]
        wide_row = row.to(tl.int64)[:, None]
        tl.store(
            a_ptr + wide_row * n + col[None, :], narrow(share * (opened * up), a_ptr.dtype.element_ty), mask=inside
        )
        moved = share * behind
        to_gate = narrow(moved * up * steep, dh_ptr.dtype.element_ty)
        to_up = narrow(moved * opened * passed, dh_ptr.dtype.element_ty)
        dh_ptrs = dh_ptr + wide_row * (2 * n) + line[None, :]
        if PAIR == 2:
            both = tl.reshape(tl.join(to_gate, to_up), [BLOCK_M, BLOCK_N * 2])
            tl.store(dh_ptrs, both, mask=row_inside[:, None] & line_inside[None, :])
        else:
            tl.store(dh_ptrs, to_gate, mask=inside)
            tl.store(dh_ptrs + n, to_up, mask=inside)


@triton.jit
def share_gradient(
    part_ptr,
    grad_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    parts,
    width,
    experts,
    slots,
    grad_row,
    grad_col,
    bias_expert,
    ids_row,
    ids_col,
    BLOCK: tl.constexpr,
):
    """out (T, slots): the sum of a slot's parts, and of the gradient times the bias; 0 for a slot of no expert."""
    token = (tl.program_id(0) // slots).to(tl.int64)
    slot = tl.program_id(0) % slots
    at = token * slots + slot
    expert = tl.load(ids_ptr + token * ids_row + slot * ids_col)
    known = (expert >= 0) & (expert < experts)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, parts, BLOCK):
        total += tl.load(part_ptr + at * parts + begin + lane, mask=begin + lane < parts, other=0.0)
    if bias_ptr is not None:
        own = tl.where(known, expert, 0).to(tl.int64)
        for begin in range(0, width, BLOCK):
            there = begin + lane < width
            above = tl.load(grad_ptr + token * grad_row + (begin + lane) * grad_col, mask=there, other=0.0)
            bias = tl.load(bias_ptr + own * bias_expert + begin + lane, mask=there, other=0.0)
            total += widen(above) * widen(bias)
    tl.store(out_ptr + at, narrow(tl.where(known, tl.sum(total, 0), 0.0), out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def grouped_sums(
    value_ptr,
    shares_ptr,
    out_ptr,
    offsets_ptr,
    take_ptr,
    rows,
    n,
    experts,
    slots,
    value_row,
    value_col,
    shares_row,
    shares_col,
    out_row,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[e, :n] = the sum of value's rows of e. take: as above, and each row counts by its slot's share."""
    across = tl.cdiv(n, BLOCK)
    expert = tl.program_id(0) // across
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, BLOCK_E)
    end = tl.load(offsets_ptr + index, mask=index < experts, other=0)
    end = tl.minimum(tl.maximum(end, 0), rows)
    start = tl.max(tl.where(index < expert, end, 0), 0)
    stop = tl.max(tl.where(index <= expert, end, 0), 0)
    total = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        inside = row < stop
        source = row
        if take_ptr is not None:
            slot = tl.load(take_ptr + row, mask=inside, other=0)
            source = slot // slots
        value_ptrs = value_ptr + source.to(tl.int64)[:, None] * value_row + col[None, :] * value_col
        value = widen(tl.load(value_ptrs, mask=inside[:, None] & (col < n)[None, :], other=0.0))
        if take_ptr is not None:
            share_ptrs = shares_ptr + source.to(tl.int64) * shares_row + (slot % slots) * shares_col
            value = value * widen(tl.load(share_ptrs, mask=inside, other=0.0))[:, None]
        total += value
    sums = tl.sum(total, 0)
    tl.store(out_ptr + expert.to(tl.int64) * out_row + col, narrow(sums, out_ptr.dtype.element_ty), mask=col < n)


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int


def _rdna(target: Target) -> bool:
    return target.vendor == "amd" and target.wave == 32


def _ampere(target: Target) -> bool:
    """sm_80 to sm_89, whose assembler spills tiles that it holds on later ones: they are half as deep there."""
    return target.arch.startswith("sm_8")


def _deep(target: Target) -> int:
    """Of float32. RDNA has no matrix instructions for it: a lane holds its operands of all of a tile's depth."""
    return 16 if _rdna(target) else 32


def _tile(target: Target, itemsize: int, rows: int, experts: int, gated: bool) -> Tile:
    """By how many rows an expert has on average."""
    mean = rows / experts
    if itemsize == 4:
        deep = _deep(target)
        return Tile(16, 32, deep, 4) if mean <= 16 else Tile(32, 32, deep, 4)
    if mean <= 16:
        return Tile(16, 32 if gated else 64, 64 if gated and _ampere(target) else 128, 4)
    if mean <= 64:
        return Tile(64, 32 if gated else 64, 64, 4)
    return Tile(128, 64 if gated else 128, 32 if _rdna(target) else 64, 8)


def _narrow(tile: Tile, k: int) -> Tile:
    """Rows that no 16 bytes divide are loaded element by element, each with an address and a mask in registers."""
    return tile._replace(k=min(tile.k, 32)) if k % 16 else tile


def _stages(target: Target, tile: Tile, itemsize: int, gated: bool) -> int:
    if target.vendor != "nvidia":
        return 2
    each = (tile.m + tile.n * (1 + gated)) * tile.k * itemsize
    return max(2, min(4, target.shared_memory // each))


def _refuse(x: Tensor) -> None:
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("experts: Triton's interpreter multiplies bfloat16 as raw integers; use float16 or float32")


def _experts_block(experts: int) -> int:
    return triton.next_power_of_2(experts + 1)


def _launch(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    y: Tensor,
    target: Target,
    *,
    rows: int,
    bias: Tensor | None = None,
    take: Tensor | None = None,
    put: Tensor | None = None,
    slots: int = 1,
    activation: str | None = None,
) -> None:
    experts, n, k = len(weight), y.shape[1], weight.shape[2]
    gated = activation is not None
    tile = _narrow(_tile(target, x.element_size(), rows, experts, gated), k)
    tiles = rows // tile.m + experts + 1
    by_row = rows <= tiles
    if by_row:
        tiles = rows
    launch(
        grouped_tile,
        (tiles * triton.cdiv(n, tile.n),),
        x,
        weight,
        bias,
        y,
        offsets,
        take,
        put,
        rows,
        tiles,
        n,
        k,
        experts,
        slots,
        *x.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        gated,
        _KINDS[activation or "silu"],
        by_row,
        k % tile.k == 0,
        _experts_block(experts),
        tile.m,
        tile.n,
        tile.k,
        device=x.device,
        num_warps=tile.warps,
        num_stages=_stages(target, tile, x.element_size(), gated),
    )


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    _refuse(x)
    shape = (x.shape[0], weight.shape[1])
    if not x.numel() or not weight.numel():
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, offsets.contiguous(), y, target, rows=x.shape[0])
    return y


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    return _grouped(x, weight, offsets, target)


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    _refuse(x)
    grad_x = _grouped(grad, weight.transpose(1, 2), offsets, target) if need_x else x.new_empty(0)
    if not need_weight:
        return grad_x, x.new_empty(0)
    if not x.numel() or not weight.numel():
        return grad_x, torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    return grad_x, _over_rows(grad, x, offsets.contiguous(), len(weight), rows=len(x))


def _over_rows(
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
    experts: int,
    *,
    rows: int,
    grad_take: Tensor | None = None,
    x_take: Tensor | None = None,
    slots: int = 1,
) -> Tensor:
    n, k = grad.shape[1], x.shape[1]
    grad_weight = torch.empty(experts, n, k, dtype=x.dtype, device=x.device)
    size, deep = (32, 32) if x.element_size() == 4 else (64, 32)
    launch(
        grouped_weight_gradient,
        (experts * triton.cdiv(n, size) * triton.cdiv(k, size),),
        grad,
        x,
        grad_weight,
        offsets,
        grad_take,
        x_take,
        rows,
        n,
        k,
        experts,
        slots,
        *grad.stride(),
        *x.stride(),
        _experts_block(experts),
        deep,
        size,
        size,
        device=x.device,
        num_warps=4,
        num_stages=2,
    )
    return grad_weight


_Order = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # `slots_by_rank` or `slots_by_count`


def _moe_experts(
    order_of: _Order,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    target: Target,
) -> Tensor:
    _refuse(x)
    (experts, width, inner), slots = down.shape, topk_ids.shape[1]
    if not x.numel() or not topk_ids.numel():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    order, ends = order_of(topk_ids, experts)
    rows = len(order)
    hidden = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    y = torch.zeros if not inner else torch.empty
    by_slot = y(rows, width, dtype=x.dtype, device=x.device)
    if inner:
        _launch(x, gate_up, ends, hidden, target, rows=rows, bias=bias, take=order, slots=slots, activation=activation)
    own = None if bias is None else bias[:, 2 * inner :]
    _launch(hidden, down, ends, by_slot, target, rows=rows, bias=own, put=order)
    return _combined(by_slot, topk_ids, topk_weights, x, experts)


moe_experts_ranked = functools.partial(_moe_experts, slots_by_rank)
moe_experts_counted = functools.partial(_moe_experts, slots_by_count)


def _combined(by_slot: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, like: Tensor, experts: int) -> Tensor:
    (tokens, width), slots = like.shape, topk_ids.shape[1]
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    block = min(1024, triton.next_power_of_2(width))
    launch(
        combine_rows,
        (tokens * triton.cdiv(width, block),),
        by_slot,
        topk_ids,
        topk_weights,
        out,
        width,
        slots,
        experts,
        *topk_ids.stride(),
        *((0, 0) if topk_weights is None else topk_weights.stride()),
        block,
        device=like.device,
        num_warps=4,
    )
    return out


def _gradient_tile(target: Target, itemsize: int, rows: int, experts: int) -> Tile:
    """Three sums of m x n, so that a row has fewer columns than forward."""
    mean = rows / experts
    if itemsize == 4:
        return Tile(16, 32, _deep(target), 4)
    if mean <= 16:
        return Tile(16, 32, 64, 4)
    return Tile(32 if _rdna(target) else 64, 32, 32 if _ampere(target) else 64, 4)


def _moe_experts_backward(
    order_of: _Order,
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    need_x: bool,
    need_gate_up: bool,
    need_down: bool,
    need_topk_weights: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _refuse(x)
    (experts, width, inner), slots = down.shape, topk_ids.shape[1]
    rows = topk_ids.numel()

    def empty(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    def nothing(like: Tensor, need: bool) -> Tensor:
        kind = like.dtype if need else x.dtype
        return torch.zeros(like.shape if need else 0, dtype=kind, device=x.device)

    to_x, to_gate_up, to_down = nothing(x, False), nothing(gate_up, False), nothing(down, False)
    to_weights, to_bias = nothing(topk_weights, False), nothing(x, False)
    if not x.numel() or not rows or not inner:
        if bias is not None and inner == 0 and x.numel() and rows:
            raise Unsupported("moe_experts_backward: experts without an inner width, and with a bias: use 'torch'")
        return (
            nothing(x, need_x),
            nothing(gate_up, need_gate_up),
            nothing(down, need_down),
            nothing(topk_weights, need_topk_weights),
            to_bias if bias is None else nothing(bias, need_bias),
        )
    order, ends = order_of(topk_ids, experts)
    bias = None if bias is None else bias.contiguous()
    tile = _narrow(_gradient_tile(target, x.element_size(), rows, experts), width)
    parts = triton.cdiv(inner, tile.n)
    dh, a, part = empty(rows, 2 * inner), empty(rows, inner), empty(rows, parts, dtype=torch.float32)
    tiles = rows // tile.m + experts + 1
    by_row = rows <= tiles
    if by_row:
        tiles = rows
    launch(
        gated_gradient,
        (tiles * parts,),
        x,
        grad,
        gate_up,
        down,
        bias,
        topk_weights,
        dh,
        a,
        part,
        ends,
        order,
        rows,
        tiles,
        inner,
        width,
        experts,
        slots,
        *x.stride(),
        *grad.stride(),
        *gate_up.stride(),
        *down.stride(),
        0 if bias is None else bias.stride(0),
        *topk_weights.stride(),
        _KINDS[activation],
        by_row,
        width % tile.k == 0,
        _experts_block(experts),
        tile.m,
        tile.n,
        tile.k,
        device=x.device,
        num_warps=tile.warps,
        num_stages=2,
    )
    if need_x:
        by_slot = empty(rows, width)
        _launch(dh, gate_up.transpose(1, 2), ends, by_slot, target, rows=rows, put=order)
        to_x = _combined(by_slot, topk_ids, None, x, experts)
    if need_gate_up:
        to_gate_up = _over_rows(dh, x, ends, experts, rows=rows, x_take=order, slots=slots)
    if need_down:
        to_down = _over_rows(grad, a, ends, experts, rows=rows, grad_take=order, slots=slots)
    if need_topk_weights:
        to_weights = empty(*topk_ids.shape, dtype=topk_weights.dtype)
        own = None if bias is None else bias[:, 2 * inner :]
        launch(
            share_gradient,
            (rows,),
            part,
            grad,
            own,
            topk_ids,
            to_weights,
            parts,
            width,
            experts,
            slots,
            *grad.stride(),
            0 if own is None else own.stride(0),
            *topk_ids.stride(),
            256,
            device=x.device,
            num_warps=4,
        )
    if need_bias and bias is not None:
        to_bias = empty(*bias.shape)
        _sums(dh, None, None, to_bias, ends, rows=rows, slots=1)
        _sums(grad, topk_weights, order, to_bias[:, 2 * inner :], ends, rows=rows, slots=slots)
    return to_x, to_gate_up, to_down, to_weights, to_bias


moe_experts_backward_ranked = functools.partial(_moe_experts_backward, slots_by_rank)
moe_experts_backward_counted = functools.partial(_moe_experts_backward, slots_by_count)


def _sums(
    value: Tensor, shares: Tensor | None, take: Tensor | None, out: Tensor, ends: Tensor, *, rows: int, slots: int
) -> None:
    """Into the first columns of out, as many as value has."""
    experts, n, block = len(ends), value.shape[1], 64
    launch(
        grouped_sums,
        (experts * triton.cdiv(n, block),),
        value,
        shares,
        out,
        ends,
        take,
        rows,
        n,
        experts,
        slots,
        *value.stride(),
        *((0, 0) if shares is None else shares.stride()),
        out.stride(0),
        _experts_block(experts),
        16,
        block,
        device=value.device,
        num_warps=4,
    )


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mixtral, Qwen3-MoE and DeepSeek-V3 from one token to many, and shapes off every tile."""
    kind = getattr(torch, dtype)

    def call(tokens: int, experts: int, slots: int, width: int, inner: int) -> None:
        few = tokens * slots <= MOST
        forward = moe_experts_ranked if few else moe_experts_counted
        backward = moe_experts_backward_ranked if few else moe_experts_backward_counted

        def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, gate_up, down = empty(tokens, width), empty(experts, 2 * inner, width), empty(experts, width, inner)
        ids, weights = empty(tokens, slots, dtype=torch.int32), empty(tokens, slots, dtype=torch.float32)
        forward(x, gate_up, down, ids, weights, "silu", None, target)
        if width % 16:  # other activations differ in a few instructions: one shape shows them
            forward(x, gate_up, down, ids, weights, "gelu", None, target)
            forward(x, gate_up, down, ids, weights, "gelu_tanh", None, target)
            forward(x, gate_up, down, ids, weights, "swiglu_oai", None, target)
        forward(x, gate_up, down, ids, weights, "silu", empty(experts, 2 * inner + width), target)
        offsets = empty(experts, dtype=torch.int32)
        grouped_linear(x, gate_up, offsets, target)
        grouped_linear_backward(empty(tokens, 2 * inner), x, gate_up, offsets, True, True, target)
        everything = (True,) * 5
        grad = empty(tokens, width)
        for activation in ("silu", "gelu", "gelu_tanh", "swiglu_oai") if width % 16 else ("silu",):
            backward(grad, x, gate_up, down, ids, weights, activation, None, *everything, target)
        bias = empty(experts, 2 * inner + width)
        backward(grad, x, gate_up, down, ids, weights, "silu", bias, *everything, target)
        if width == inner:  # gpt-oss, whose weights' columns are next to each other
            gate_up, down = empty(experts, width, 2 * inner).mT, empty(experts, inner, width).mT
            forward(x, gate_up, down, ids, weights, "swiglu_oai_interleaved", bias, target)
            backward(grad, x, gate_up, down, ids, weights, "swiglu_oai_interleaved", bias, *everything, target)

    layers = [(8, 2, 4096, 14_336), (128, 8, 2048, 768), (256, 8, 7168, 2048), (128, 4, 2880, 2880)]
    shapes = [(tokens, *layer) for tokens in (1, 512, 8192) for layer in layers] + [(17, 5, 3, 67, 37)]
    return recorded(lambda s=s: call(*s) for s in shapes)  # type: ignore[misc]
