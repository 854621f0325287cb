"""The gated RMS norm in Triton of groups of any length, in parts: what is read twice comes from L2 the second time.

The weight's gradient is summed by a pass over columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, widen
from ferryman.backends.triton_rows import LONG_BLOCK, long_warps
from ferryman.ops.gated_norm.calls_kernels import model_calls
from ferryman.ops.gated_norm.triton_kernels import (
    Backward,
    Groups,
    _act,
    _finish,
    _gradients,
    backward_by,
    forward_by,
)

COLUMN_ROWS, COLUMNS = 16, 128


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_long(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    gate_stride,
    rows,
    groups,
    size,
    eps,
    FIRST: tl.constexpr,
    CAST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // groups).to(tl.int64)
    first = (tl.program_id(0) % groups) * size
    x_ptr += row * x_stride + first
    gate_ptr += row * gate_stride + first
    y_ptr += row * (groups * size) + first
    if weight_ptr is not None:
        weight_ptr += first
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        mask = col < size - start
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        if not FIRST:
            z = widen(tl.load(gate_ptr + start + col, mask=mask, other=0.0))
            a, _ = _act(z, SILU, dtype == tl.float32)
            x = x * a
        squares += x * x
    scale = inverse_root(tl.div_rn(tl.sum(squares, 0), size + 0.0) + eps)
    for start in range(0, size, BLOCK):
        mask = col < size - start
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        z = widen(tl.load(gate_ptr + start + col, mask=mask, other=0.0))
        a, _ = _act(z, SILU, dtype == tl.float32)
        if not FIRST:
            x = x * a
        y = _finish(x * scale, a, weight_ptr, start + col, mask, dtype, FIRST, CAST)
        tl.store(y_ptr + start + col, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_long_backward(
    grad_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    grad_x_ptr,
    grad_gate_ptr,
    scale_ptr,
    grad_stride,
    x_stride,
    gate_stride,
    rows,
    groups,
    size,
    eps,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // groups).to(tl.int64)
    first = (tl.program_id(0) % groups) * size
    width = groups * size
    x_ptr += row * x_stride + first
    gate_ptr += row * gate_stride + first
    grad_ptr += row * grad_stride + first
    grad_x_ptr += row * width + first
    grad_gate_ptr += row * width + first
    exact: tl.constexpr = grad_x_ptr.dtype.element_ty == tl.float32
    if weight_ptr is not None:
        weight_ptr += first
    col = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        mask = col < size - start
        u = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        if not FIRST:
            z = widen(tl.load(gate_ptr + start + col, mask=mask, other=0.0))
            a, _ = _act(z, SILU, exact)
            u = u * a
        squares += u * u
    scale = inverse_root(tl.div_rn(tl.sum(squares, 0), size + 0.0) + eps)
    if scale_ptr is not None:
        tl.store(scale_ptr + tl.program_id(0), scale)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        mask = col < size - start
        u = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        z = widen(tl.load(gate_ptr + start + col, mask=mask, other=0.0))
        came = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        a, _ = _act(z, SILU, exact)
        if FIRST:
            came = came * a
        else:
            u = u * a
        if weight_ptr is not None:
            came = came * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))
        products += tl.where(mask, came * (u * scale), 0.0)
    inner = tl.div_rn(tl.sum(products, 0), size + 0.0)
    for start in range(0, size, BLOCK):
        mask = col < size - start
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        z = widen(tl.load(gate_ptr + start + col, mask=mask, other=0.0))
        g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        a, slope = _act(z, SILU, exact)
        weight = 1.0
        if weight_ptr is not None:
            weight = widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))
        grad_x, grad_gate = _gradients(g, x, z, a, slope, weight, scale, inner, FIRST)
        tl.store(grad_x_ptr + start + col, narrow(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_gate_ptr + start + col, narrow(grad_gate, grad_gate_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _gated_columns(
    grad_ptr,
    x_ptr,
    gate_ptr,
    scale_ptr,
    partial_ptr,
    grad_stride,
    x_stride,
    gate_stride,
    rows,
    rows_each,
    groups,
    size,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sums over a span of rows of the weight's gradient, for a block of columns of a group."""
    blocks = tl.cdiv(size, COLS)
    group = tl.program_id(0) // blocks
    within = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)[None, :]
    inside = within < size
    col = group * size + within
    exact: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    total = tl.zeros([ROWS, COLS], tl.float32)
    begin = tl.program_id(1) * rows_each
    for start in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = inside & (row < rows)[:, None]
        g = widen(tl.load(grad_ptr + row[:, None] * grad_stride + col, mask=mask, other=0.0))
        x = widen(tl.load(x_ptr + row[:, None] * x_stride + col, mask=mask, other=0.0))
        z = widen(tl.load(gate_ptr + row[:, None] * gate_stride + col, mask=mask, other=0.0))
        a, _ = _act(z, SILU, exact)
        scale = tl.load(scale_ptr + row * groups + group, mask=row < rows, other=0.0)[:, None]
        if FIRST:
            product = (g * a) * (x * scale)
        else:
            product = g * (x * a * scale)
        total += tl.where(mask, product, 0.0)
    line = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    place = partial_ptr + tl.program_id(1).to(tl.int64) * (groups * size) + group * size
    tl.store(place + line, tl.sum(total, 0), mask=line < size)


# ------------------------------------------------------------------------------------------------------ launchers


def _rows(args: tuple[Any, ...], cut: Groups, target: Target) -> None:
    grid = (cut.rows * cut.groups,)
    launch(_gated_norm_long, grid, *args, LONG_BLOCK, device=args[0].device, num_warps=long_warps(target))


def _sums(given: Backward, cut: Groups, target: Target) -> Tensor | None:
    rows, groups, size, device = cut.rows, cut.groups, cut.size, given.x.device
    scale = None
    if given.weight is not None:
        scale = torch.empty(rows * groups, dtype=torch.float32, device=device)
    launch(
        _gated_norm_long_backward,
        (rows * groups,),
        *given[:6],
        scale,
        *given.strides,
        rows,
        groups,
        size,
        given.eps,
        *given.options,
        LONG_BLOCK // 2,
        device=device,
        num_warps=long_warps(target),
    )
    if scale is None:
        return None
    blocks = groups * triton.cdiv(size, COLUMNS)
    programs = max(1, min(triton.cdiv(rows, 4 * COLUMN_ROWS), 4 * target.units // blocks))
    each = triton.cdiv(triton.cdiv(rows, programs), COLUMN_ROWS) * COLUMN_ROWS
    programs = triton.cdiv(rows, each)
    partial = torch.empty(programs, groups * size, dtype=torch.float32, device=device)
    launch(
        _gated_columns,
        (blocks, programs),
        given.grad,
        given.x,
        given.gate,
        scale,
        partial,
        *given.strides,
        rows,
        each,
        groups,
        size,
        *given.options,
        COLUMN_ROWS,
        COLUMNS,
        device=device,
        num_warps=4,
    )
    return partial


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    cast_before_weight: bool,
    activation: str,
    target: Target,
) -> Tensor:
    options = (norm_before_gate, cast_before_weight, activation == "silu")
    return forward_by(_rows, x, gate, weight, eps, group_size, options, target)


def gated_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (norm_before_gate, activation == "silu")
    return backward_by(_sums, grad, x, gate, weight, eps, group_size, options, target)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What these launchers are chosen for, of `model_calls`."""
    ours = [(op, args) for line, op, args in model_calls(target, dtype) if line == "long"]
    return recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
