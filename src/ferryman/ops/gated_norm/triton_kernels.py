"""The gated RMS norm in Triton, forward and backward, of groups that registers hold: each is read once.

A program takes one group of columns of some rows. Gradients of the weight are summed in float32 by a fixed number of
programs, and those sums in a fixed order. `long_kernels` has groups of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, sigmoid, sigmoid_of_half, widen
from ferryman.backends.triton_rows import collapse_rows, lanes, row_tile
from ferryman.ops.gated_norm.calls_kernels import model_calls


@triton.jit
def _act(z, SILU: tl.constexpr, EXACT: tl.constexpr):
    """(activation, slope) of a gate."""
    if EXACT:
        s, rest = sigmoid(z)
    else:
        s, rest = sigmoid_of_half(z)
    if SILU:
        return z * s, s * (1.0 + z * rest)
    return s, s * rest


@triton.jit
def _finish(n, a, weight_ptr, col, inside, dtype: tl.constexpr, FIRST: tl.constexpr, CAST: tl.constexpr):
    """The result of the normalised values: weight, and the gate where it follows."""
    if weight_ptr is not None:
        if CAST:
            n = widen(narrow(n, dtype))
        n = n * widen(tl.load(weight_ptr + col, mask=inside, other=0.0))
    if FIRST:
        if CAST:
            n = widen(narrow(n, dtype))
        n = n * a
    return narrow(n, dtype)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // groups).to(tl.int64) * ROWS
    start = (tl.program_id(0) % groups) * size
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < size
    mask = inside
    if ROWS > 1:
        mask = inside & (row < rows - first)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + col), mask=mask, other=0.0))
    z = widen(tl.load(gate_ptr + first * gate_stride + start + (row * gate_stride + col), mask=mask, other=0.0))
    a, _ = _act(z, SILU, dtype == tl.float32)
    if not FIRST:
        x = x * a
    n = x * inverse_root(tl.div_rn(tl.sum(x * x, 1), size + 0.0) + eps)[:, None]
    if weight_ptr is not None:
        weight_ptr += start
    y = _finish(n, a, weight_ptr, col, inside, dtype, FIRST, CAST)
    width = groups * size
    tl.store(y_ptr + first * width + start + (row * width + col), y, mask=mask)


@triton.jit
def _gradients(g, x, z, a, slope, weight, scale, inner, FIRST: tl.constexpr):
    """(grad_x, grad_gate), from 1 / root mean square and the mean of what is normalised times what comes to it."""
    if FIRST:
        n = x * scale
        return (g * a * weight - n * inner) * scale, g * weight * n * slope
    d = (g * weight - x * a * scale * inner) * scale
    return d * a, d * x * slope


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def _gated_norm_backward(
    grad_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    grad_x_ptr,
    grad_gate_ptr,
    partial_ptr,
    grad_stride,
    x_stride,
    gate_stride,
    rows,
    tiles,
    programs,
    groups,
    size,
    eps,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``programs`` of each group go over the tiles of rows; the weight's gradient stays in registers until the end."""
    program = tl.program_id(0) // groups
    start = (tl.program_id(0) % groups) * size
    width = groups * size
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < size
    n_columns = size + 0.0
    exact: tl.constexpr = grad_x_ptr.dtype.element_ty == tl.float32
    weight = 1.0
    if weight_ptr is not None:
        weight = widen(tl.load(weight_ptr + start + col, mask=inside, other=0.0))
        total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(program, tiles, programs):
        first = tl.full([], ROWS, tl.int64) * tile
        mask = inside & (row < rows - first)
        x = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + col), mask=mask, other=0.0))
        z = widen(tl.load(gate_ptr + first * gate_stride + start + (row * gate_stride + col), mask=mask, other=0.0))
        g = widen(tl.load(grad_ptr + first * grad_stride + start + (row * grad_stride + col), mask=mask, other=0.0))
        a, slope = _act(z, SILU, exact)
        u = x
        came = g
        if FIRST:
            came = g * a
        else:
            u = x * a
        scale = inverse_root(tl.div_rn(tl.sum(u * u, 1), n_columns) + eps)[:, None]
        inner = tl.div_rn(tl.sum(came * weight * (u * scale), 1), n_columns)[:, None]
        if weight_ptr is not None:
            # rows past the end have an infinite scale where eps is 0
            total += tl.where(mask, came * (u * scale), 0.0)
        grad_x, grad_gate = _gradients(g, x, z, a, slope, weight, scale, inner, FIRST)
        place = first * width + start + (row * width + col)
        tl.store(grad_x_ptr + place, narrow(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_gate_ptr + place, narrow(grad_gate, grad_gate_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        line = tl.arange(0, BLOCK)
        place = partial_ptr + program.to(tl.int64) * width + start
        tl.store(place + line, tl.sum(total, 0), mask=line < size)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials(out_ptr, partial_ptr, programs, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Adds the programs' partial sums in a fixed order."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, programs, ROWS):
        mask = (row < programs - start) & (col < width)[None, :]
        total += tl.load(partial_ptr + (start + row).to(tl.int64) * width + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + col, narrow(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=col < width)


# ------------------------------------------------------------------------------------------------------ launchers

RESIDENT = 512  # threads of a unit that hide the latency


class Groups(NamedTuple):
    """How rows are cut: ``groups`` of ``size`` columns. stride: the most elements from row to row. itemsize: of the
    widest elements."""

    rows: int
    groups: int
    size: int
    stride: int
    itemsize: int


def forward_by(
    rows_by: Callable[[tuple[Any, ...], Groups, Target], None],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    options: tuple[bool, bool, bool],
    target: Target,
) -> Tensor:
    """The result: ``rows_by`` launches the kernel."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    size = x.shape[-1] if group_size is None else group_size
    groups = x.shape[-1] // size
    x, rows, x_stride = collapse_rows(x)
    gate, _, gate_stride = collapse_rows(gate)
    weight = None if weight is None else weight.contiguous()
    args = (x, gate, weight, y, x_stride, gate_stride, rows, groups, size, float(eps), *options)
    itemsize = max(x.element_size(), gate.element_size())
    rows_by(args, Groups(rows, groups, size, max(x_stride, gate_stride), itemsize), target)
    return y


def _rows(args: tuple[Any, ...], cut: Groups, target: Target) -> None:
    tile = row_tile(target, cut.size, cut.itemsize, cut.rows * cut.groups, cut.stride, 2)
    grid = (triton.cdiv(cut.rows, tile.rows) * cut.groups,)
    launch(_gated_norm, grid, *args, tile.rows, tile.block, device=args[0].device, num_warps=tile.warps)


class Backward(NamedTuple):
    """A call of the backward, rows of one stride apart."""

    grad: Tensor
    x: Tensor
    gate: Tensor
    weight: Tensor | None
    grad_x: Tensor
    grad_gate: Tensor
    strides: tuple[int, int, int]
    eps: float
    options: tuple[bool, bool]


def backward_by(
    sums_by: Callable[[Backward, Groups, Target], Tensor | None],
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    options: tuple[bool, bool],
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate and weight: ``sums_by`` launches what gives the first two, and programs' sums for the
    weight's (program, column), which are added here."""
    device, width = x.device, x.shape[-1]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=device)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=device)
    if weight is None:
        grad_weight = torch.empty(0, dtype=x.dtype, device=device)
    else:
        grad_weight = torch.empty(width, dtype=weight.dtype, device=device)
    if x.numel() == 0:
        return grad_x, grad_gate, grad_weight.zero_()
    size = width if group_size is None else group_size
    x, rows, x_stride = collapse_rows(x)
    gate, _, gate_stride = collapse_rows(gate)
    grad, _, grad_stride = collapse_rows(grad)
    weight = None if weight is None else weight.contiguous()
    strides = (grad_stride, x_stride, gate_stride)
    itemsize = max(t.element_size() for t in (x, gate, grad))
    given = Backward(grad, x, gate, weight, grad_x, grad_gate, strides, float(eps), options)
    partial = sums_by(given, Groups(rows, width // size, size, max(strides), itemsize), target)
    if partial is not None:
        programs = partial.shape[0]
        together, columns, few = (32, 64, 4) if programs <= 32 else (512, 16, 8)
        args = (grad_weight, partial, programs, width, together, columns)
        launch(_sum_partials, (triton.cdiv(width, columns),), *args, device=device, num_warps=few)
    return grad_x, grad_gate, grad_weight


def _sums(given: Backward, cut: Groups, target: Target) -> Tensor | None:
    rows, groups, size = cut.rows, cut.groups, cut.size
    tile = row_tile(target, size, cut.itemsize, rows * groups, cut.stride, 4)
    # 16 elements a thread spill the masks of a wave of 64 lanes, and 8192 columns everywhere
    warps = tile.warps * (2 if tile.block > 2048 else 1)
    tiles = triton.cdiv(rows, tile.rows)
    programs = tiles
    partial = None
    if given.weight is not None:
        most = target.units * max(1, RESIDENT // (warps * lanes(target)))
        programs = min(tiles, max(1, most // groups))
        partial = torch.empty(programs, groups * size, dtype=torch.float32, device=given.x.device)
    launch(
        _gated_norm_backward,
        (programs * groups,),
        *given[:6],
        partial,
        *given.strides,
        rows,
        tiles,
        programs,
        groups,
        size,
        given.eps,
        *given.options,
        tile.rows,
        tile.block,
        device=given.x.device,
        num_warps=warps,
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
    ours = [(op, args) for line, op, args in model_calls(target, dtype) if line == "rows"]
    return recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
