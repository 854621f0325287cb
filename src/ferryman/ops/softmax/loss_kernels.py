"""Cross entropy whose gradient goes over the logits, in Triton: a row that fits in registers is read once.

Every thread's loads of what another may store are parted from the stores by a barrier. `long_kernels` has rows of any
length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.backends.triton_rows import collapse_rows, row_tile
from ferryman.ops.softmax.triton_kernels import _mean_loss

# Bytes that a program scales at a time, its warps (8 words of 16 bytes a thread on NVIDIA), and programs on a unit. On
# an H200 as many programs as there are pieces take 4% less time, but 42 us instead of 4 to find a gradient of 1.
FLAT_BYTES, FLAT_WARPS, FLAT_PROGRAMS = 16384, 4, 8


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _loss_over_short(
    x_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    scale_ptr,
    x_stride,
    rows,
    width,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows are read once, several a program where they are short. scale is 1 over the rows that count."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    line = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = line < rows - first
    mask = (col < width) & inside[:, None]
    label = tl.load(target_ptr + first + line, mask=inside, other=ignore_index)
    scale = tl.load(scale_ptr)
    counted = inside & (label != ignore_index)
    valid = (label >= 0) & (label < width) & inside
    place = x_ptr + first * x_stride + (line[:, None] * x_stride + col)
    x = widen(tl.load(place, mask=mask, other=float("-inf")))
    picked = widen(tl.load(x_ptr + first * x_stride + line * x_stride + label, mask=valid, other=float("nan")))
    maximum = tl.max(x, 1)
    shift = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)
    lse = shift + tl.log(tl.sum(tl.exp(x - shift[:, None]), 1))
    loss = lse - picked
    if SMOOTH:
        mean = tl.div_rn(tl.sum(tl.where(mask, x, 0.0), 1), width + 0.0)
        loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)
    tl.store(lse_ptr + first + line, lse, mask=inside)
    tl.store(loss_ptr + first + line, tl.where(counted, loss, 0.0), mask=inside)
    tl.debug_barrier()  # every load before any store, whichever threads hold an element
    factor = tl.where(counted, tl.where(valid, scale, float("nan")), 0.0)[:, None]
    kept = counted[:, None]
    even = tl.div_rn(smoothing, width + 0.0)
    hot = tl.where(valid, label, -1).to(tl.int32)[:, None]
    # an ignored row may hold anything, and its gradient is 0
    distance = tl.where(kept, x, 0.0) - tl.where(counted, lse, 0.0)[:, None]
    p = exp(distance, x_ptr.dtype.element_ty == tl.float32) - even
    d = tl.where(col == hot, p - (1.0 - smoothing), p) * factor
    tl.store(place, narrow(d, x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rest"])
def _scale_flat(x_ptr, grad_ptr, count, rest, BLOCK: tl.constexpr):
    """`_scale_over` for elements without gaps: ``count``, a multiple of 16, and ``rest`` after them. So rows of an odd
    number of elements are read in 16-byte words too, and programs that find a gradient of 1 are few."""
    grad = widen(tl.load(grad_ptr))
    if grad != 1.0:
        col = tl.arange(0, BLOCK)
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
            mask = col < count - start
            x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
            tl.store(x_ptr + start + col, narrow(x * grad, x_ptr.dtype.element_ty), mask=mask)
        if tl.program_id(0) == 0:
            last = tl.arange(0, 16)
            x = widen(tl.load(x_ptr + count + last, mask=last < rest, other=0.0))
            tl.debug_barrier()  # several waves hold these few, and one stores them
            tl.store(x_ptr + count + last, narrow(x * grad, x_ptr.dtype.element_ty), mask=last < rest)


@triton.jit(do_not_specialize=["rows"])
def _scale_over(x_ptr, grad_ptr, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x times grad, in place. The usual gradient of a loss is 1, and then nothing is read."""
    grad = widen(tl.load(grad_ptr))
    if grad != 1.0:
        across = tl.cdiv(width, BLOCK)
        first = (tl.program_id(0) // across).to(tl.int64) * ROWS
        start = (tl.program_id(0) % across) * BLOCK
        row = tl.arange(0, ROWS)[:, None]
        col = tl.arange(0, BLOCK)[None, :]
        mask = (col < width - start) & (row < rows - first)
        place = x_ptr + first * x_stride + start + (row * x_stride + col)
        x = widen(tl.load(place, mask=mask, other=0.0))
        tl.store(place, narrow(x * grad, x_ptr.dtype.element_ty), mask=mask)


Launch = Callable[[tuple[Any, ...], int, Target], None]


def losses_over(
    rows_by: Launch, logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, log-sum-exp of each row, gradient over the logits): ``rows_by`` launches the kernel of rows between a
    count of the rows that count and a sum."""
    device, width = logits.device, logits.shape[-1]
    lse = torch.empty(labels.shape, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    if logits.numel() == 0:
        return loss.fill_(float("nan")), lse.fill_(float("-inf")), logits
    labels = labels.contiguous()
    work, rows, stride = collapse_rows(logits)
    scale = torch.empty((), dtype=torch.float32, device=device)
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    launch(_inverse_count, (1,), labels, scale, rows, ignore_index, 1024, device=device, num_warps=4)
    smoothing = float(label_smoothing)
    args = (work, labels, losses, lse, scale, stride, rows, width, ignore_index, smoothing, smoothing != 0.0)
    rows_by(args, stride, target)
    launch(_mean_loss, (1,), losses, labels, loss, rows, ignore_index, True, 1024, device=device, num_warps=4)
    if work is not logits:
        logits.copy_(work)
    return loss, lse, logits


def _losses(args: tuple[Any, ...], stride: int, target: Target) -> None:
    work, rows = args[0], args[2].shape[0]
    tile = row_tile(target, work.shape[-1], work.element_size(), rows, stride, arrays=2)
    grid = (triton.cdiv(rows, tile.rows),)
    launch(_loss_over_short, grid, *args, tile.rows, tile.block, device=work.device, num_warps=tile.warps)


def cross_entropy_inplace_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return losses_over(_losses, logits, labels, ignore_index, label_smoothing, target)


def scale_flat(grad: Tensor, out_logits: Tensor, target: Target) -> Tensor:
    """`cross_entropy_inplace_grad_backward` of logits without gaps."""
    if out_logits.numel() == 0:
        return out_logits
    block, count = FLAT_BYTES // out_logits.element_size(), out_logits.numel()
    grid = (min(triton.cdiv(count, block), FLAT_PROGRAMS * max(1, target.units)),)
    whole = count // 16 * 16
    args = (out_logits, grad, whole, count - whole, block)
    launch(_scale_flat, grid, *args, device=out_logits.device, num_warps=FLAT_WARPS)
    return out_logits


def scale_rows(grad: Tensor, out_logits: Tensor, target: Target) -> Tensor:
    """`cross_entropy_inplace_grad_backward` of logits that lie anyhow."""
    if out_logits.numel() == 0:
        return out_logits
    width = out_logits.shape[-1]
    work, rows, stride = collapse_rows(out_logits)
    tile = row_tile(target, min(width, 4096), work.element_size(), rows, stride)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.block),)
    args = (work, grad, stride, rows, width, tile.rows, tile.block)
    launch(_scale_over, grid, *args, device=out_logits.device, num_warps=tile.warps)
    if work is not out_logits:
        out_logits.copy_(work)
    return out_logits


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _inverse_count(target_ptr, out_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """1 over the number of rows that count, by one program: every row's gradient has it as a factor."""
    col = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        mask = col < rows - start
        label = tl.load(target_ptr + start + col, mask=mask, other=0)
        count += (mask & (label != ignore_index)).to(tl.int32)
    tl.store(out_ptr, tl.div_rn(1.0, tl.sum(count, 0).to(tl.float32)))


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Classifier heads on and off the powers of two, and gradients of vocabularies without gaps and with them."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        if row_tile(target, width, x.element_size(), rows, arrays=2).fits:
            for smoothing in (0.0, 0.1):
                cross_entropy_inplace_grad(x, labels, -100, smoothing, target)
        grad = torch.empty((), dtype=torch.float32, device="meta")
        scale_flat(grad, x, target)
        scale_rows(grad, torch.empty(rows, width + 64, dtype=kind, device="meta")[:, :width], target)

    return recorded(lambda r=r, w=w: calls(r, w) for r, w in SHAPES)  # type: ignore[misc]


SHAPES = ((8192, 1000), (8192, 8192), (512, 32000), (512, 50257), (64, 128256), (4096, 128256), (3, 1))
