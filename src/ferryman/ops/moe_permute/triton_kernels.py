"""Rows sorted by expert, and summed back, in Triton. Slots are counted; a row is read and written once.

Limit: the rows' bytes. Sums are over a token's slots in their order, so that no atomics are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import narrow, widen
from ferryman.backends.triton_rows import RowTile, row_tile
from ferryman.ops.moe_permute.order_kernels import counted
from ferryman.ops.moe_permute.torch_kernels import places

PIECE = 4096  # elements of a row that a program takes at most


@triton.jit(do_not_specialize=["count"])
def rows_of_slots(
    x_ptr,
    source_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    count,
    width,
    slots,
    total,
    x_row,
    x_col,
    weights_row,
    weights_col,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (count, width), dense = x[source // slots], times the slot's weight where there are weights.

    0 where source is none of ``total`` slots, or place[source] is another row."""
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    present = row < count
    source = tl.load(source_ptr + row, mask=present, other=-1)
    mine = (source >= 0) & (source < total)
    if place_ptr is not None:
        mine = mine & (tl.load(place_ptr + source, mask=mine, other=-1) == row)
    token = (tl.where(mine, source, 0) // slots).to(tl.int64)
    here = col < width
    x = tl.load(x_ptr + token[:, None] * x_row + col[None, :] * x_col, mask=mine[:, None] & here[None, :], other=0.0)
    if weights_ptr is not None:
        at = weights_ptr + token * weights_row + (tl.where(mine, source, 0) % slots) * weights_col
        x = narrow(widen(x) * widen(tl.load(at, mask=mine, other=0.0))[:, None], out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(out_ptrs, x, mask=present[:, None] & here[None, :])


@triton.jit(do_not_specialize=["tokens"])
def sums_of_slots(
    y_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    tokens,
    width,
    slots,
    y_row,
    y_col,
    weights_row,
    weights_col,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (tokens, width), dense = the sum of y[place] over a token's slots, times their weights if there are any."""
    across = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    present = token < tokens
    here = col < width
    wide_token = token.to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for slot in range(slots):
        place = tl.load(place_ptr + wide_token * slots + slot, mask=present, other=-1)
        known = place >= 0
        y_ptrs = y_ptr + tl.where(known, place, 0).to(tl.int64)[:, None] * y_row + col[None, :] * y_col
        y = widen(tl.load(y_ptrs, mask=known[:, None] & here[None, :], other=0.0))
        if weights_ptr is not None:
            at = weights_ptr + wide_token * weights_row + slot * weights_col
            y = y * widen(tl.load(at, mask=known, other=0.0))[:, None]
        total += y
    out_ptrs = out_ptr + wide_token[:, None] * width + col[None, :]
    tl.store(out_ptrs, narrow(total, out_ptr.dtype.element_ty), mask=present[:, None] & here[None, :])


@triton.jit(do_not_specialize=["count"])
def products_of_slots(
    y_ptr,
    grad_ptr,
    place_ptr,
    out_ptr,
    count,
    width,
    slots,
    y_row,
    y_col,
    grad_row,
    grad_col,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (count,), by slot = the sum over columns of y[place] * grad[token]; 0 for a slot without a row."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = slot < count
    place = tl.load(place_ptr + slot, mask=present, other=-1)
    known = place >= 0
    y_rows = y_ptr + tl.where(known, place, 0).to(tl.int64) * y_row
    grad_rows = grad_ptr + (tl.where(known, slot, 0) // slots).to(tl.int64) * grad_row
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        col = begin + tl.arange(0, BLOCK)
        there = known[:, None] & (col < width)[None, :]
        y = widen(tl.load(y_rows[:, None] + col[None, :] * y_col, mask=there, other=0.0))
        total += y * widen(tl.load(grad_rows[:, None] + col[None, :] * grad_col, mask=there, other=0.0))
    tl.store(out_ptr + slot, narrow(tl.sum(total, 1), out_ptr.dtype.element_ty), mask=present)


def _tiled(target: Target, width: int, itemsize: int, rows: int) -> tuple[RowTile, int]:
    """(a tile, programs that cover so many rows)."""
    tile = row_tile(target, min(width, PIECE), itemsize, rows)
    return tile, triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.block)


def _strides(weights: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if weights is None else weights.stride()


def _rows(
    x: Tensor, source: Tensor, place: Tensor | None, weights: Tensor | None, shape: tuple[int, int], target: Target
) -> Tensor:
    """shape: tokens and slots of each."""
    (tokens, slots), width, count = shape, x.shape[1], len(source)
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if not tokens * slots:
        return out.zero_()
    tile, programs = _tiled(target, width, x.element_size(), count)
    args: tuple[Any, ...] = (x, source, place, weights, out, count, width, slots, tokens * slots)
    launch(
        rows_of_slots,
        (programs,),
        *args,
        *x.stride(),
        *_strides(weights),
        tile.rows,
        tile.block,
        device=x.device,
        num_warps=tile.warps,
    )
    return out


def _sums(y: Tensor, place: Tensor, weights: Tensor | None, shape: tuple[int, int], target: Target) -> Tensor:
    (tokens, slots), width = shape, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    if not y.numel() or not slots:
        return out.zero_()
    tile, programs = _tiled(target, width, 4, tokens)
    launch(
        sums_of_slots,
        (programs,),
        y,
        place,
        weights,
        out,
        tokens,
        width,
        slots,
        *y.stride(),
        *_strides(weights),
        tile.rows,
        tile.block,
        device=y.device,
        num_warps=tile.warps,
    )
    return out


def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    source, ends = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (topk_ids.numel(), num_experts))
    if topk_ids.numel():
        counted(topk_ids, source, ends, True)
    else:
        ends.zero_()
    return _rows(x, source, None, None, (topk_ids.shape[0], topk_ids.shape[1]), target), ends, source


def moe_permute_backward(grad: Tensor, source: Tensor, topk_ids: Tensor, target: Target) -> Tensor:
    place = places(source, topk_ids.numel())
    return _sums(grad, place, None, (topk_ids.shape[0], topk_ids.shape[1]), target)


def moe_combine(y: Tensor, source: Tensor, topk_weights: Tensor, target: Target) -> Tensor:
    place = places(source, topk_weights.numel())
    return _sums(y, place, topk_weights, (topk_weights.shape[0], topk_weights.shape[1]), target)


def moe_combine_backward(
    grad: Tensor,
    y: Tensor,
    source: Tensor,
    topk_weights: Tensor,
    need_y: bool,
    need_topk_weights: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    tokens, slots = topk_weights.shape
    place = places(source, tokens * slots)
    to_y, to_weights = y.new_empty(0), y.new_empty(0)
    if need_y:
        to_y = _rows(grad, source.contiguous(), place, topk_weights, (tokens, slots), target)
    if need_topk_weights:
        to_weights = torch.empty(tokens, slots, dtype=topk_weights.dtype, device=y.device)
        if not y.numel():
            return to_y, to_weights.zero_()
        if to_weights.numel():
            tile = row_tile(target, min(y.shape[1], 1024), 4, tokens * slots)
            launch(
                products_of_slots,
                (triton.cdiv(tokens * slots, tile.rows),),
                y,
                grad,
                place,
                to_weights,
                tokens * slots,
                y.shape[1],
                slots,
                *y.stride(),
                *grad.stride(),
                tile.rows,
                tile.block,
                device=y.device,
                num_warps=tile.warps,
            )
    return to_y, to_weights


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Layers of models, one token and many, and widths off every tile."""
    kind = getattr(torch, dtype)

    def calls(shape: tuple[int, int, int, int], weights: torch.dtype) -> None:
        tokens, experts, slots, width = shape

        def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, y = empty(tokens, width), empty(tokens * slots, width)
        ids, shares = empty(tokens, slots, dtype=torch.int32), empty(tokens, slots, dtype=weights)
        source = empty(tokens * slots, dtype=torch.int32)
        moe_permute(x, ids, experts, target)
        moe_permute_backward(y, source, ids, target)
        moe_combine(y, source, shares, target)
        moe_combine_backward(x, y, source, shares, True, True, target)

    shapes = [(1, 8, 2, 4096), (4096, 128, 8, 2048), (8192, 256, 8, 7168), (17, 5, 3, 67)]
    return recorded(lambda s=s, w=w: calls(s, w) for s in shapes for w in (kind, torch.float32))  # type: ignore[misc]
