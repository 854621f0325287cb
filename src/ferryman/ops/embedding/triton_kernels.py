"""Rows of a table in Triton. Forward: one read and one write of what is asked for.

Backward: ids are sorted, stably, so that a row of the gradient is the sum of a run of places, in their order. The
sorted places are cut into pieces of one length. A piece that one id fills is summed by a program of its own; then a
program for each row adds such sums and what is left of its run at both ends. Float32 until it is stored, no atomics,
bitwise repeatable, each row of the gradient is written once. Limit: the gradient's bytes; where one id has n of all
places, the time of about sqrt(n) steps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import narrow, widen
from ferryman.backends.triton_rows import lanes, row_tile

PIECE = 4096  # elements of a row that a program takes at most
LANES = 1024  # elements that are added up at a time: more places of a narrow row
SHORTEST, LONGEST = 64, 2048  # places of a piece


@triton.jit(do_not_specialize=["count"])
def _embedding(
    ids_ptr,
    weight_ptr,
    y_ptr,
    weight_row,
    count,
    height,
    width,
    scale,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = tl.cdiv(width, BLOCK)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    start = (tl.program_id(0) % across) * BLOCK
    line = tl.arange(0, ROWS)
    present = line < count - first
    index = tl.load(ids_ptr + first + line, mask=present, other=-1).to(tl.int64)
    inside = (index >= 0) & (index < height)
    col = start + tl.arange(0, BLOCK)[None, :]
    here = col < width
    row = tl.where(inside, index, 0) * weight_row
    x = tl.load(weight_ptr + row[:, None] + col, mask=here & inside[:, None], other=float("nan"))
    if SCALED:
        x = narrow(widen(x) * scale, y_ptr.dtype.element_ty)
    tl.store(y_ptr + (first + line)[:, None] * width + col, x, mask=here & present[:, None])


@triton.jit
def _sum(total, grad_ptr, order_ptr, begin, end, grad_row, col, here, RUN: tl.constexpr):
    """The sum of the gradient's rows at the places ``begin`` to ``end``, added to ``total``."""
    for at in range(begin, end, RUN):
        run = at + tl.arange(0, RUN)
        place = tl.load(order_ptr + run, mask=run < end, other=0)
        mask = (run < end)[:, None] & here[None, :]
        total += tl.sum(widen(tl.load(grad_ptr + place[:, None] * grad_row + col[None, :], mask=mask, other=0.0)), 0)
    return total


@triton.jit
def _embedding_backward_pieces(
    grad_ptr,
    ordered_ptr,
    order_ptr,
    sums_ptr,
    grad_row,
    width,
    height,
    piece_size,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of those pieces that one row of the table fills; the others are left as they are, and not read."""
    across = tl.cdiv(width, BLOCK)
    piece = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    here = col < width
    begin = piece * piece_size
    row = tl.load(ordered_ptr + begin)
    if (row == tl.load(ordered_ptr + begin + piece_size - 1)) & (row >= 0) & (row < height):
        total = tl.zeros([BLOCK], tl.float32)
        total = _sum(total, grad_ptr, order_ptr, begin, begin + piece_size, grad_row, col, here, RUN)
        tl.store(sums_ptr + piece * width + col, total, mask=here)


@triton.jit
def _embedding_backward(
    grad_ptr,
    order_ptr,
    bounds_ptr,
    sums_ptr,
    out_ptr,
    grad_row,
    width,
    scale,
    piece_size,
    SCALED: tl.constexpr,
    PIECES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """bounds: where the run of each row of the table begins in ``order``, and where the last one ends. PIECES:
    whether there are sums of pieces."""
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    here = col < width
    begin = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    if PIECES:
        first, last = (begin + piece_size - 1) // piece_size, end // piece_size
        head = tl.minimum(first * piece_size, end)
        total = _sum(total, grad_ptr, order_ptr, begin, head, grad_row, col, here, RUN)
        for at in range(first, last, RUN):
            piece = at + tl.arange(0, RUN)
            mask = (piece < last)[:, None] & here[None, :]
            total += tl.sum(tl.load(sums_ptr + piece[:, None] * width + col[None, :], mask=mask, other=0.0), 0)
        total = _sum(total, grad_ptr, order_ptr, tl.maximum(last * piece_size, head), end, grad_row, col, here, RUN)
    else:
        total = _sum(total, grad_ptr, order_ptr, begin, end, grad_row, col, here, RUN)
    if SCALED:
        total = total * scale
    tl.store(out_ptr + row * width + col, narrow(total, out_ptr.dtype.element_ty), mask=here)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def embedding(ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    height, width = weight.shape
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if y.numel() == 0:
        return y
    ids, weight = ids.contiguous(), _dense(weight)
    tile = row_tile(target, min(width, PIECE), weight.element_size(), ids.numel())
    grid = (triton.cdiv(ids.numel(), tile.rows) * triton.cdiv(width, tile.block),)
    args = (ids, weight, y, weight.stride(0), ids.numel(), height, width, 1.0 if scale is None else float(scale))
    launch(
        _embedding, grid, *args, scale is not None, tile.rows, tile.block, device=weight.device, num_warps=tile.warps
    )
    return y


def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    height, width = weight.shape
    out = torch.empty(height, width, dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    grad = _dense(grad.reshape(ids.numel(), width))
    ordered, order = torch.sort(ids.reshape(-1).long(), stable=True)
    # ids below 0 lie before the first bound, and ids past the table after the last
    rows = torch.arange(height + 1, dtype=torch.int64, device=weight.device)
    bounds = torch.searchsorted(ordered, rows)
    block = min(triton.next_power_of_2(width), LANES)
    run = max(4, min(LANES // block, 128))
    warps = min(4, max(1, block * run // (4 * lanes(target))))
    across, count = triton.cdiv(width, block), ids.numel()
    piece = min(max(triton.next_power_of_2(math.isqrt(count)), SHORTEST), LONGEST)
    pieces = count // piece
    sums = torch.empty(pieces, width, dtype=torch.float32, device=weight.device)
    launched = {"device": weight.device, "num_warps": warps}
    if pieces:
        args = (grad, ordered, order, sums, grad.stride(0), width, height, piece)
        launch(_embedding_backward_pieces, (pieces * across,), *args, run, block, **launched)
    given = (grad, order, bounds, sums, out, grad.stride(0), width, 1.0 if scale is None else float(scale), piece)
    launch(_embedding_backward, (height * across,), *given, scale is not None, pieces > 0, run, block, **launched)
    return out


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Tables of models, one token and many, ids of both kinds, with a scale and without."""
    kind = getattr(torch, dtype)

    def calls(count: int, height: int, width: int) -> None:
        weight = torch.empty(height, width, dtype=kind, device="meta")
        grad = torch.empty(count, width, dtype=kind, device="meta")
        for ids in (torch.empty(count, dtype=i, device="meta") for i in (torch.int64, torch.int32)):
            for scale in (None, 2.5):
                embedding(ids, weight, scale, target)
                embedding_backward(grad, ids, weight, scale, target)

    shapes = [
        (1, 128_256, 4096),
        (8192, 32_000, 896),
        (8192, 50_257, 768),
        (1 << 20, 32, 8),
        (512, 256_000, 5376),
        (5, 37, 67),
        (3, 5, 1),
    ]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
