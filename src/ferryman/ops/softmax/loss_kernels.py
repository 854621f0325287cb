"""Cross entropy whose gradient goes over the logits, in Triton: two passes over a row in one program.

A row that fits in registers is read once. A longer one is read once for its log-sum-exp and again, backwards, for the
gradient, by so few programs that the rows in work stay in the last cache: the second pass then reads no memory. Every
thread's loads of what another may store are parted from the stores by a barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.backends.triton_rows import LONG_BLOCK, collapse_rows, lanes, long_warps, row_tile
from ferryman.ops.softmax.triton_kernels import _group, _mean_loss, _merge, _online

# Of the last cache, what the rows in work may fill: the rest is for their neighbours' lines and what else passes.
CACHED = 0.75
# Bytes that a program scales at a time, its warps (8 words of 16 bytes a thread on NVIDIA), and programs on a unit. On
# an H200 as many programs as there are pieces take 4% less time, but 42 us instead of 4 to find a gradient of 1.
FLAT_BYTES, FLAT_WARPS, FLAT_PROGRAMS = 16384, 4, 8


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _loss_over(
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
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Programs share the rows out among them. scale is 1 over the rows that count."""
    scale = tl.load(scale_ptr)
    place = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    col = tl.arange(0, BLOCK)
    last = tl.cdiv(width, BLOCK) - 1
    even = tl.div_rn(smoothing, width + 0.0)
    row_ptr = x_ptr + tl.program_id(0).to(tl.int64) * x_stride
    step = tl.num_programs(0).to(tl.int64) * x_stride
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        label = tl.load(target_ptr + row)
        counted = label != ignore_index
        valid = (label >= 0) & (label < width)
        picked = widen(tl.load(row_ptr + label, mask=valid, other=float("nan")))
        maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK // GROUP], tl.float32)
        plain = tl.zeros([BLOCK // GROUP], tl.float32)
        for start in range(0, width, BLOCK):
            mask = place < width - start
            x = widen(tl.load(row_ptr + start + place, mask=mask, other=float("-inf")))
            maximum, total = _online(x, maximum, total)
            if SMOOTH:
                plain += tl.sum(tl.where(mask, x, 0.0), 1)
        _, shift, total_sum = _merge(maximum, total)
        lse = shift + tl.log(total_sum)
        loss = lse - picked
        if SMOOTH:
            mean = tl.div_rn(tl.sum(plain, 0), width + 0.0)
            loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)
        tl.store(lse_ptr + row, lse)
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        tl.debug_barrier()  # the logits that the first pass and ``picked`` read are written by other threads below
        # a row's fate is in its factors, as in `_loss_backward`: 0 where ignored, NaN out of range
        factor = tl.where(counted, tl.where(valid, scale, float("nan")), 0.0)
        shifted = tl.where(counted, lse, 0.0)
        hot = tl.where(valid, label, -1).to(tl.int32)
        for back in range(last + 1):
            start = (last - back) * BLOCK  # what was read last is nearest
            mask = col < width - start
            x = widen(tl.load(row_ptr + start + col, mask=mask & counted, other=0.0))
            p = exp(x - shifted, x_ptr.dtype.element_ty == tl.float32) - even
            d = tl.where(col == hot - start, p - (1.0 - smoothing), p) * factor
            tl.store(row_ptr + start + col, narrow(d, x_ptr.dtype.element_ty), mask=mask)
        row_ptr += step


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
    """`_loss_over` for rows that fit in registers: read once, several a program where they are short."""
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


def cross_entropy_inplace_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
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
    tile = row_tile(target, width, logits.element_size(), rows, stride, arrays=2)
    if tile.fits:
        args = (work, labels, losses, lse, scale, stride, rows, width, ignore_index, smoothing, smoothing != 0.0)
        grid = (triton.cdiv(rows, tile.rows),)
        launch(_loss_over_short, grid, *args, tile.rows, tile.block, device=device, num_warps=tile.warps)
    else:
        programs, block, warps = _long_plan(target, rows, width, logits.element_size(), smoothing != 0.0)
        launch(
            _loss_over,
            (programs,),
            work,
            labels,
            losses,
            lse,
            scale,
            stride,
            rows,
            width,
            ignore_index,
            smoothing,
            smoothing != 0.0,
            block,
            _group(logits),
            device=device,
            num_warps=warps,
        )
    launch(_mean_loss, (1,), losses, labels, loss, rows, ignore_index, True, 1024, device=device, num_warps=4)
    if work is not logits:
        logits.copy_(work)
    return loss, lse, logits


def _long_plan(target: Target, rows: int, width: int, itemsize: int, smooth: bool) -> tuple[int, int, int]:
    """(programs, elements at a time, warps): as many programs as keep the rows in work within the last cache, two on a
    unit, or one that has as much in flight (a mean beside it takes those registers); one for each row where not even
    those would."""
    together = 0 if target.vendor == "cpu" else int(CACHED * target.l2_bytes) // (target.units * width * itemsize)
    together = min(together, 2)
    block = LONG_BLOCK * 4 // (together * itemsize) if together else LONG_BLOCK
    if smooth or lanes(target) == 64:  # 12 scalar registers spilled on gfx942
        block = min(block, LONG_BLOCK)
    if target.arch.startswith("sm_8") and width % 16:  # ptxas took 64 registers of 128, and spilled 16 bytes
        block = min(block, LONG_BLOCK // 2)
    return min(rows, together * target.units) if together else rows, block, long_warps(target)


def cross_entropy_inplace_grad_backward(grad: Tensor, out_logits: Tensor, target: Target) -> Tensor:
    if out_logits.numel() == 0:
        return out_logits
    if out_logits.is_contiguous():
        block, count = FLAT_BYTES // out_logits.element_size(), out_logits.numel()
        grid = (min(triton.cdiv(count, block), FLAT_PROGRAMS * max(1, target.units)),)
        whole = count // 16 * 16
        launch(
            _scale_flat,
            grid,
            out_logits,
            grad,
            whole,
            count - whole,
            block,
            device=out_logits.device,
            num_warps=FLAT_WARPS,
        )
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
    """Classifier heads and vocabularies, on and off the powers of two, in registers and in two passes."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        for smoothing in (0.0, 0.1):
            cross_entropy_inplace_grad(x, labels, -100, smoothing, target)
        grad = torch.empty((), dtype=torch.float32, device="meta")
        for scaled in (x, torch.empty(rows, width + 64, dtype=kind, device="meta")[:, :width]):
            cross_entropy_inplace_grad_backward(grad, scaled, target)

    shapes = [(8192, 1000), (8192, 8192), (512, 32000), (512, 50257), (64, 128256), (4096, 128256), (3, 1)]
    return recorded(lambda r=r, w=w: calls(r, w) for r, w in shapes)  # type: ignore[misc]
