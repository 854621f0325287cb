"""Gradients of the norms in Triton whose sums over rows are a pass of their own, over columns.

A row that fits registers, but not beside the sums of weight and bias over rows, is read once for x's gradient; another
kernel reads all again and sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import widen
from ferryman.ops.norm.backward_kernels import Backward, backward_by, gradients_of_tiles
from ferryman.ops.norm.calls_kernels import model_calls

COLUMN_ROWS, COLUMNS = 32, 128


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _norm_columns(
    grad_ptr,
    x_ptr,
    statistics_ptr,
    partial_ptr,
    grad_stride,
    x_stride,
    rows,
    rows_each,
    width,
    CENTRED: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sums over a span of rows of grad * normalised x, and of grad, for a block of columns."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    inside = col < width
    weight_sum = tl.zeros([ROWS, COLS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLS], tl.float32)
    begin = tl.program_id(1) * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = inside & (row < rows)[:, None]
        g = widen(tl.load(grad_ptr + row[:, None] * grad_stride + col, mask=mask, other=0.0))
        if BIAS_GRAD:
            bias_sum += g
        if WEIGHT_GRAD:
            x = widen(tl.load(x_ptr + row[:, None] * x_stride + col, mask=mask, other=0.0))
            scale = tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)
            if CENTRED:
                x -= tl.load(statistics_ptr + row, mask=row < rows, other=0.0)[:, None]
            weight_sum += tl.where(mask, g * (x * scale[:, None]), 0.0)
    line = tl.program_id(0) * COLS + tl.arange(0, COLS)
    if WEIGHT_GRAD:
        place = partial_ptr + tl.program_id(1).to(tl.int64) * width
        tl.store(place + line, tl.sum(weight_sum, 0), mask=line < width)
    if BIAS_GRAD:
        place = partial_ptr + (tl.program_id(1) + tl.num_programs(1) * WEIGHT_GRAD).to(tl.int64) * width
        tl.store(place + line, tl.sum(bias_sum, 0), mask=line < width)


def sums_of_columns(given: Backward, statistics: Tensor, target: Target) -> Tensor:
    """Programs' sums for weight and bias over spans of rows, from the rows' statistics."""
    rows, width, wanted = given.rows, given.width, given.wanted
    blocks = triton.cdiv(width, COLUMNS)
    programs = max(1, min(triton.cdiv(rows, 4 * COLUMN_ROWS), 4 * target.units // blocks))
    each = triton.cdiv(triton.cdiv(rows, programs), COLUMN_ROWS) * COLUMN_ROWS
    programs = triton.cdiv(rows, each)
    partial = torch.empty(sum(wanted), programs, width, dtype=torch.float32, device=given.x.device)
    launch(
        _norm_columns,
        (blocks, programs),
        given.grad,
        given.x,
        statistics,
        partial,
        *given.strides[:2],
        rows,
        each,
        width,
        given.centred,
        *wanted,
        COLUMN_ROWS,
        COLUMNS,
        device=given.x.device,
        num_warps=4,
    )
    return partial


def statistics_of(given: Backward) -> Tensor:
    """Where a kernel puts each row's mean and 1 / deviation."""
    return torch.empty(2, given.rows, dtype=torch.float32, device=given.x.device)


def _sums(given: Backward, target: Target) -> Tensor:
    statistics = statistics_of(given)
    gradients_of_tiles(given, statistics, target)
    return sums_of_columns(given, statistics, target)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return backward_by(_sums, grad, None, x, weight, None, eps, False, target)[:2]


def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, residual_out: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return backward_by(_sums, grad_y, grad_residual, residual_out, weight, None, eps, False, target)[:2]


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_by(_sums, grad, None, x, weight, bias, eps, True, target)


def add_layer_norm_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_by(_sums, grad_y, grad_residual, residual_out, weight, bias, eps, True, target)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What these launchers are chosen for, of `model_calls`."""
    ours = [(op, args) for line, op, args in model_calls(target, dtype) if line == "columns"]
    return recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
