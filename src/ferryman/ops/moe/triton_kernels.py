"""Products by experts in Triton. The grid follows from shapes alone: a program finds its expert from the offsets, and
programs beyond the last tile leave. Nothing waits for the device.

Limit for few tokens: the weights of the experts that they choose; for many: the matrix units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, narrow, normal, sigmoid, widen
from ferryman.errors import Unsupported

_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def _activated(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Logistic and normal distributions, not 1 + tanh and 1 + erf, which lose the digits of a negative gate."""
    if KIND == 0:
        factor, _ = sigmoid(x, EXACT)
    elif KIND == 1:
        factor, _ = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * (x * x)), EXACT)
    else:
        factor, _ = normal(x, EXACT)
    return x * factor


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
    y. GATED: act(product with the first n rows of the weight) * (product with the next n)."""
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
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_row + deep[None, :] * x_col
        weight_ptrs = (
            weight_ptr + own * weight_expert + col.to(tl.int64)[None, :] * weight_row + deep[:, None] * weight_col
        )
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, depth, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_ptrs, mask=row_inside[:, None], other=0.0)
                b = tl.load(weight_ptrs, mask=col_inside[None, :], other=0.0)
            else:
                left = deep < k - begin
                a = tl.load(x_ptrs, mask=row_inside[:, None] & left[None, :], other=0.0)
                b = tl.load(weight_ptrs, mask=left[:, None] & col_inside[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            if GATED:
                up_ptrs = weight_ptrs + n.to(tl.int64) * weight_row
                if EVEN_K:
                    c = tl.load(up_ptrs, mask=col_inside[None, :], other=0.0)
                else:
                    c = tl.load(up_ptrs, mask=left[:, None] & col_inside[None, :], other=0.0)
                total_up = tl.dot(a, c, total_up, input_precision="ieee")
            x_ptrs += BLOCK_K * x_col
            weight_ptrs += BLOCK_K * weight_col
        if bias_ptr is not None:
            there = col_inside & (expert < experts)
            bias_ptrs = bias_ptr + own * bias_expert + col
            total += widen(tl.load(bias_ptrs, mask=there, other=0.0))[None, :]
            if GATED:
                total_up += widen(tl.load(bias_ptrs + n, mask=there, other=0.0))[None, :]
        if GATED:
            total = _activated(total, KIND, y_ptr.dtype.element_ty == tl.float32) * total_up
        y_ptrs = y_ptr + target.to(tl.int64)[:, None] * n + col[None, :]
        tl.store(y_ptrs, narrow(total, y_ptr.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def grouped_weight_gradient(
    grad_ptr,
    x_ptr,
    out_ptr,
    offsets_ptr,
    rows,
    n,
    k,
    experts,
    grad_row,
    grad_col,
    x_row,
    x_col,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out (experts, n, k), dense = grad[rows of e].T @ x[rows of e]."""
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
        wide_row = row.to(tl.int64)
        a = tl.load(
            grad_ptr + wide_row[None, :] * grad_row + col[:, None] * grad_col,
            mask=inside[None, :] & (col < n)[:, None],
            other=0.0,
        )
        b = tl.load(
            x_ptr + wide_row[:, None] * x_row + deep[None, :] * x_col,
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
    """out (T, width) = the weighted sum of y's rows of a token; slots of no expert are left out."""
    across = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(slots):
        expert = tl.load(ids_ptr + token * ids_row + slot * ids_col)
        known = (expert >= 0) & (expert < experts)
        weight = widen(tl.load(weights_ptr + token * weights_row + slot * weights_col))
        y = widen(tl.load(y_ptr + (token * slots + slot) * width + col, mask=(col < width) & known, other=0.0))
        total += tl.where(known, weight, 0.0) * y
    tl.store(out_ptr + token * width + col, narrow(total, out_ptr.dtype.element_ty), mask=col < width)


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int


def _tile(target: Target, itemsize: int, rows: int, experts: int, gated: bool) -> Tile:
    """By how many rows an expert has on average."""
    mean = rows / experts
    if itemsize == 4:
        return Tile(16, 32, 32, 4) if mean <= 16 else Tile(32, 32, 32, 4)
    if mean <= 16:
        return Tile(16, 32 if gated else 64, 128, 4)
    if mean <= 64:
        return Tile(64, 32 if gated else 64, 64, 4)
    return Tile(128, 64 if gated else 128, 32 if target.wave == 32 and target.vendor == "amd" else 64, 8)


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
    tile = _tile(target, x.element_size(), rows, experts, gated)
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
    nothing = torch.empty(0, dtype=x.dtype, device=x.device)
    grad_x = _grouped(grad, weight.transpose(1, 2), offsets, target) if need_x else nothing
    if not need_weight:
        return grad_x, nothing
    if not x.numel() or not weight.numel():
        return grad_x, torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    experts, n, k = weight.shape
    grad_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    size, deep = (32, 32) if x.element_size() == 4 else (64, 32)
    launch(
        grouped_weight_gradient,
        (experts * triton.cdiv(n, size) * triton.cdiv(k, size),),
        grad,
        x,
        grad_weight,
        offsets.contiguous(),
        x.shape[0],
        n,
        k,
        experts,
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
    return grad_x, grad_weight


def moe_experts(
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
    (experts, width, inner), (tokens, slots) = down.shape, topk_ids.shape
    if not x.numel() or not topk_ids.numel():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    ids = topk_ids.reshape(-1)
    keys = torch.where((ids >= 0) & (ids < experts), ids, experts)
    keys, order = keys.sort(stable=True)
    ends = torch.searchsorted(
        keys, torch.arange(experts, dtype=keys.dtype, device=x.device), right=True, out_int32=True
    )
    order = order.int()
    hidden = torch.empty(len(ids), inner, dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    y = torch.zeros if not inner else torch.empty
    made = y(len(ids), width, dtype=x.dtype, device=x.device)
    if inner:
        _launch(
            x, gate_up, ends, hidden, target, rows=len(ids), bias=bias, take=order, slots=slots, activation=activation
        )
    own = None if bias is None else bias[:, 2 * inner :]
    _launch(hidden, down, ends, made, target, rows=len(ids), bias=own, put=order)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    launch(
        combine_rows,
        (tokens * triton.cdiv(width, block),),
        made,
        topk_ids,
        topk_weights,
        out,
        width,
        slots,
        experts,
        *topk_ids.stride(),
        *topk_weights.stride(),
        block,
        device=x.device,
        num_warps=4,
    )
    return out


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mixtral, Qwen3-MoE and DeepSeek-V3 from one token to many, and shapes off every tile."""
    kind = getattr(torch, dtype)

    def call(tokens: int, experts: int, slots: int, width: int, inner: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, gate_up, down = empty(tokens, width), empty(experts, 2 * inner, width), empty(experts, width, inner)
        ids, weights = empty(tokens, slots, dtype=torch.int32), empty(tokens, slots, dtype=torch.float32)
        moe_experts(x, gate_up, down, ids, weights, "silu", None, target)
        if width % 16:  # other activations differ in a few instructions: one shape shows them
            moe_experts(x, gate_up, down, ids, weights, "gelu", None, target)
            moe_experts(x, gate_up, down, ids, weights, "gelu_tanh", None, target)
        moe_experts(x, gate_up, down, ids, weights, "silu", empty(experts, 2 * inner + width), target)
        offsets = empty(experts, dtype=torch.int32)
        grouped_linear(x, gate_up, offsets, target)
        grouped_linear_backward(empty(tokens, 2 * inner), x, gate_up, offsets, True, True, target)

    layers = [(8, 2, 4096, 14_336), (128, 8, 2048, 768), (256, 8, 7168, 2048)]
    shapes = [(tokens, *layer) for tokens in (1, 512, 8192) for layer in layers] + [(17, 5, 3, 67, 37)]
    return recorded(lambda s=s: call(*s) for s in shapes)  # type: ignore[misc]
