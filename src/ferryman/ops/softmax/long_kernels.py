"""Softmax and cross entropy in Triton for rows of any length, in parts.

Every thread keeps a running maximum and sum of its own elements, and they merge once at the end of the row: a loss
reads the logits once whatever the vocabulary. Where the gradient goes over the logits, a row is read again, backwards,
by so few programs that the rows in work stay in the last cache: the second pass then reads no memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.backends.triton_rows import LONG_BLOCK, collapse_rows, lanes, long_warps, row_tile
from ferryman.ops.softmax import loss_kernels, triton_kernels
from ferryman.ops.softmax.implementations import SHORT
from ferryman.ops.softmax.loss_kernels import losses_over
from ferryman.ops.softmax.triton_kernels import _finite, losses_by

# Of the last cache, what the rows in work may fill: the rest is for their neighbours' lines and what else passes.
CACHED = 0.75


@triton.jit
def _online(x, maximum, total):
    """Adds exp of a chunk to each lane's running (maximum, sum). ``x`` is [lanes, n]; n elements of a lane share one
    rescaling, so the cost is 1 + 1/n exponentials an element."""
    larger = tl.maximum(maximum, tl.max(x, 1))
    # +inf too: then the sum is inf and so is the log-sum-exp, as torch.logsumexp has it
    shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
    total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
    return larger, total


@triton.jit
def _merge(maximum, total):
    """(row maximum, shift, sum of exp(x - shift)) of the lanes' running values."""
    larger = tl.max(maximum, 0)
    shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
    lane = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)  # what each lane has subtracted
    scale = tl.where(total == 0.0, 0.0, tl.exp(lane - shift))
    return larger, shift, tl.sum(tl.where(total == 0.0, 0.0, total * scale), 0)


@triton.jit(do_not_specialize=["rows"])
def _softmax_long(x_ptr, y_ptr, x_stride, rows, width, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    place = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    for start in range(0, width, BLOCK):
        x = widen(tl.load(x_ptr + start + place, mask=place < width - start, other=float("-inf")))
        maximum, total = _online(x, maximum, total)
    larger, _, total_sum = _merge(maximum, total)
    shift = _finite(larger)
    scale = tl.where(larger == float("inf"), float("nan"), tl.div_rn(1.0, total_sum))  # as torch: inf / inf
    col = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=float("-inf")))
        y = exp(x - shift, y_ptr.dtype.element_ty == tl.float32) * scale
        tl.store(y_ptr + start + col, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _softmax_long_backward(grad_ptr, y_ptr, out_ptr, grad_stride, y_stride, rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    y_ptr += row * y_stride
    out_ptr += row * width
    col = tl.arange(0, BLOCK)
    inner = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        inner += g * widen(tl.load(y_ptr + start + col, mask=mask, other=0.0))
    total = tl.sum(inner, 0)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        y = widen(tl.load(y_ptr + start + col, mask=mask, other=0.0))
        tl.store(out_ptr + start + col, narrow(y * (g - total), out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _loss(
    x_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    x_stride,
    rows,
    width,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    label = tl.load(target_ptr + row)
    valid = (label >= 0) & (label < width)
    place = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    plain = tl.zeros([BLOCK // GROUP], tl.float32)
    for start in range(0, width, BLOCK):
        mask = place < width - start
        x = widen(tl.load(x_ptr + start + place, mask=mask, other=float("-inf")))
        maximum, total = _online(x, maximum, total)
        if SMOOTH:
            plain += tl.sum(tl.where(mask, x, 0.0), 1)
    _, shift, total_sum = _merge(maximum, total)
    lse = shift + tl.log(total_sum)
    picked = widen(tl.load(x_ptr + label, mask=valid, other=float("nan")))
    loss = lse - picked
    if SMOOTH:
        mean = tl.div_rn(tl.sum(plain, 0), width + 0.0)
        loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(label == ignore_index, 0.0, loss))


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


# ------------------------------------------------------------------------------------------------------ launchers


def _group(x: Tensor) -> int:
    return 16 // x.element_size()  # one 16-byte load: the elements that a thread owns


def softmax(x: Tensor, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    width = x.shape[-1]
    x, rows, stride = collapse_rows(x)
    args = (x, y, stride, rows, width, LONG_BLOCK, _group(x))
    launch(_softmax_long, (rows,), *args, device=x.device, num_warps=long_warps(target))
    return y


def softmax_backward(grad: Tensor, y: Tensor, target: Target) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        return out
    width = y.shape[-1]
    y, rows, stride = collapse_rows(y)
    grad, _, grad_stride = collapse_rows(grad)
    args = (grad, y, out, grad_stride, stride, rows, width, LONG_BLOCK)
    launch(_softmax_long_backward, (rows,), *args, device=y.device, num_warps=long_warps(target))
    return out


def _losses(args: tuple[Any, ...], stride: int, target: Target) -> None:
    logits, rows = args[0], args[2].shape[0]
    options = (LONG_BLOCK, _group(logits))
    launch(_loss, (rows,), *args, *options, device=logits.device, num_warps=long_warps(target))


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor]:
    return losses_by(_losses, logits, labels, ignore_index, label_smoothing, target)


def _losses_over(args: tuple[Any, ...], stride: int, target: Target) -> None:
    work, rows, smooth = args[0], args[2].shape[0], args[-1]
    programs, block, warps = _long_plan(target, rows, work.shape[-1], work.element_size(), smooth)
    launch(_loss_over, (programs,), *args, block, _group(work), device=work.device, num_warps=warps)


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


def cross_entropy_inplace_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return losses_over(_losses_over, logits, labels, ignore_index, label_smoothing, target)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Vocabularies on and off the powers of two: what registers do not hold."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        if not row_tile(target, width, x.element_size(), rows).fits:
            softmax(x, target)
        if not row_tile(target, width, x.element_size(), rows, arrays=2).fits:
            softmax_backward(x, x, target)
        if width > SHORT:
            for smoothing in (0.0, 0.1):
                cross_entropy(x, labels, -100, smoothing, target)

    def calls_over(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        if not row_tile(target, width, x.element_size(), rows, arrays=2).fits:
            for smoothing in (0.0, 0.1):
                cross_entropy_inplace_grad(x, labels, -100, smoothing, target)

    plain = [lambda r=r, w=w: calls(r, w) for r, w in triton_kernels.SHAPES]
    over = [lambda r=r, w=w: calls_over(r, w) for r, w in loss_kernels.SHAPES]
    return recorded([*plain, *over])
