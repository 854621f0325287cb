"""Softmax and cross entropy over the last dimension in Triton, forward and backward: rows that registers hold.

Of softmax those are rows of up to 32768 elements, of cross entropy up to 2048 classes, several rows a program.
`long_kernels` has rows of any length. The gradient of a given loss has one kernel: it needs no sum over a row.
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
from ferryman.backends.triton_rows import collapse_rows, configured, row_tile, rows_of, tiles_beside
from ferryman.ops.softmax.implementations import SHORT

# ------------------------------------------------------------------------------------------------------- softmax


@triton.jit
def _finite(maximum):
    """The maximum to subtract: 0 for a row of -inf alone, whose terms are then 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit(do_not_specialize=["rows"])
def _softmax(x_ptr, y_ptr, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < width
    if ROWS > 1:
        mask = mask & (row < rows - first)
    x = widen(tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=mask, other=float("-inf")))
    # a maximum that skips NaN is enough: exp(NaN - m) makes the sum NaN, and with it the whole row
    e = exp(x - _finite(tl.max(x, 1))[:, None], y_ptr.dtype.element_ty == tl.float32)
    y = e * tl.div_rn(1.0, tl.sum(e, 1))[:, None]
    tl.store(y_ptr + first * width + (row * width + col), narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _softmax_backward(
    grad_ptr, y_ptr, out_ptr, grad_stride, y_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < width
    if ROWS > 1:
        mask = mask & (row < rows - first)
    g = widen(tl.load(grad_ptr + first * grad_stride + (row * grad_stride + col), mask=mask, other=0.0))
    y = widen(tl.load(y_ptr + first * y_stride + (row * y_stride + col), mask=mask, other=0.0))
    out = y * (g - tl.sum(g * y, 1)[:, None])
    tl.store(out_ptr + first * width + (row * width + col), narrow(out, out_ptr.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------- cross entropy


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _loss_short(
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Several rows a program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    line = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = line < rows - first
    mask = (col < width) & inside[:, None]
    label = tl.load(target_ptr + first + line, mask=inside, other=0)
    valid = (label >= 0) & (label < width) & inside
    x_ptr += first * x_stride
    x = widen(tl.load(x_ptr + (line[:, None] * x_stride + col), mask=mask, other=float("-inf")))
    maximum = tl.max(x, 1)
    shift = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)
    lse = shift + tl.log(tl.sum(tl.exp(x - shift[:, None]), 1))
    picked = widen(tl.load(x_ptr + line * x_stride + label, mask=valid, other=float("nan")))
    loss = lse - picked
    if SMOOTH:
        mean = tl.div_rn(tl.sum(tl.where(mask, x, 0.0), 1), width + 0.0)
        loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)
    tl.store(lse_ptr + first + line, lse, mask=inside)
    tl.store(loss_ptr + first + line, tl.where(label == ignore_index, 0.0, loss), mask=inside)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _mean_loss(value_ptr, target_ptr, out_ptr, rows, ignore_index, ROW_LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """One program, so that the order is fixed: sum / count, where value is every row's loss, or (not ROW_LOSS) the
    gradient of the mean. Its 12 bytes a row are nothing beside a row of logits."""
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        mask = col < rows - start
        label = tl.load(target_ptr + start + col, mask=mask, other=0)
        count += (mask & (label != ignore_index)).to(tl.int32)
        if ROW_LOSS:
            total += tl.load(value_ptr + start + col, mask=mask, other=0.0)
    if ROW_LOSS:
        value = tl.sum(total, 0)
    else:
        value = tl.load(value_ptr)
    tl.store(out_ptr, tl.div_rn(value, tl.sum(count, 0).to(tl.float32)))


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _loss_backward(
    x_ptr,
    target_ptr,
    lse_ptr,
    scale_ptr,
    out_ptr,
    x_stride,
    rows,
    width,
    ignore_index,
    smoothing,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = tl.cdiv(width, BLOCK)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    start = (tl.program_id(0) % across) * BLOCK
    line = tl.arange(0, ROWS)
    inside = line < rows - first
    label = tl.load(target_ptr + first + line, mask=inside, other=ignore_index)
    lse = tl.load(lse_ptr + first + line, mask=inside, other=0.0)
    scale = tl.load(scale_ptr)
    counted = inside & (label != ignore_index)
    valid = (label >= 0) & (label < width)
    # a row's fate is in its factors, so that an element costs nothing more: 0 where ignored, NaN out of range
    scale = tl.where(counted, tl.where(valid, scale, float("nan")), 0.0)
    lse = tl.where(counted, lse, 0.0)
    even = tl.div_rn(smoothing, width + 0.0)
    hot = tl.where(valid, label - start, -1).to(tl.int32)
    row = line[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    # ignored rows are not read: their gradient is 0 whatever their logits hold
    mask = (place < width - start) & counted[:, None]
    x = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + place), mask=mask, other=0.0))
    p = exp(x - lse[:, None], out_ptr.dtype.element_ty == tl.float32) - even
    d = tl.where(place == hot[:, None], p - (1.0 - smoothing), p) * scale[:, None]
    out = out_ptr + first * width + start + (row * width + place)
    tl.store(out, narrow(d, out_ptr.dtype.element_ty), mask=(place < width - start) & inside[:, None])


# ------------------------------------------------------------------------------------------------------ launchers

Launch = Callable[[tuple[Any, ...], int, Target], None]


def softmax(x: Tensor, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    width = x.shape[-1]
    x, rows, stride = collapse_rows(x)
    tile = configured(row_tile(target, width, x.element_size(), rows, stride), target)
    grid = (triton.cdiv(rows, tile.rows),)
    launch(_softmax, grid, x, y, stride, rows, width, tile.rows, tile.block, device=x.device, num_warps=tile.warps)
    return y


def configurations(x: Tensor, target: Target) -> dict[str, float]:
    """Of `softmax`, for the menu."""
    if x.numel() == 0:
        return {}
    rows, stride = rows_of(x)
    return tiles_beside(row_tile(target, x.shape[-1], x.element_size(), rows, stride), target, stride)


def configurations_backward(grad: Tensor, y: Tensor, target: Target) -> dict[str, float]:
    """Of `softmax_backward`, for the menu."""
    if y.numel() == 0:
        return {}
    (rows, stride), (_, other) = rows_of(y), rows_of(grad)
    most = max(stride, other)
    return tiles_beside(row_tile(target, y.shape[-1], y.element_size(), rows, most, arrays=2), target, most)


def softmax_backward(grad: Tensor, y: Tensor, target: Target) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        return out
    width = y.shape[-1]
    y, rows, stride = collapse_rows(y)
    grad, _, grad_stride = collapse_rows(grad)
    tile = configured(row_tile(target, width, y.element_size(), rows, max(stride, grad_stride), arrays=2), target)
    grid = (triton.cdiv(rows, tile.rows),)
    args = (grad, y, out, grad_stride, stride, rows, width, tile.rows, tile.block)
    launch(_softmax_backward, grid, *args, device=y.device, num_warps=tile.warps)
    return out


def losses_by(
    rows_by: Launch, logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp of each row): ``rows_by`` launches the kernel of rows, and one program adds up."""
    device = logits.device
    lse = torch.empty(labels.shape, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    labels, width = labels.contiguous(), logits.shape[-1]
    if logits.numel() == 0:
        return loss.fill_(float("nan")), lse.fill_(float("-inf"))
    logits, rows, stride = collapse_rows(logits)
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    smoothing = float(label_smoothing)
    args = (logits, labels, losses, lse, stride, rows, width, ignore_index, smoothing, smoothing != 0.0)
    rows_by(args, stride, target)
    launch(_mean_loss, (1,), losses, labels, loss, rows, ignore_index, True, 1024, device=device, num_warps=4)
    return loss, lse


def _losses(args: tuple[Any, ...], stride: int, target: Target) -> None:
    logits, rows = args[0], args[2].shape[0]
    tile = row_tile(target, logits.shape[-1], logits.element_size(), rows, stride, arrays=2)
    grid = (triton.cdiv(rows, tile.rows),)
    launch(_loss_short, grid, *args, tile.rows, tile.block, device=logits.device, num_warps=tile.warps)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor]:
    return losses_by(_losses, logits, labels, ignore_index, label_smoothing, target)


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> Tensor:
    device = logits.device
    out = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    if logits.numel() == 0:
        return out
    labels, lse, width = labels.contiguous(), lse.contiguous(), logits.shape[-1]
    logits, rows, stride = collapse_rows(logits)
    scale = torch.empty((), dtype=torch.float32, device=device)
    launch(_mean_loss, (1,), grad, labels, scale, rows, ignore_index, False, 1024, device=device, num_warps=4)
    tile = row_tile(target, min(width, 4096), logits.element_size(), rows, stride)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.block),)
    args = (logits, labels, lse, scale, out, stride, rows, width, ignore_index, float(label_smoothing))
    launch(_loss_backward, grid, *args, tile.rows, tile.block, device=device, num_warps=tile.warps)
    return out


SHAPES = ((2**17, 128), (8192, 1000), (4096, 1031), (8192, 8192), (512, 32000), (512, 50257), (64, 128256), (3, 1))


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Attention scores and classifier heads, on and off the powers of two; gradients of vocabularies."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        value = torch.empty((), dtype=torch.float32, device="meta")
        lse = torch.empty(rows, dtype=torch.float32, device="meta")
        if row_tile(target, width, x.element_size(), rows).fits:
            softmax(x, target)
        if row_tile(target, width, x.element_size(), rows, arrays=2).fits:
            softmax_backward(x, x, target)
        for smoothing in (0.0, 0.1):
            if width <= SHORT:
                cross_entropy(x, labels, -100, smoothing, target)
            cross_entropy_backward(value, x, labels, lse, -100, smoothing, target)

    return recorded(lambda r=r, w=w: calls(r, w) for r, w in SHAPES)  # type: ignore[misc]
