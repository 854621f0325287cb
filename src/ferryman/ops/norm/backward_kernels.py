"""Gradients of the norms in Triton over rows that stay in registers: one read, one write.

Gradients of weight and bias are summed in float32 by a fixed number of programs, and those sums in a fixed order: no
atomics. `columns_kernels` sums them in a pass of its own, `long_kernels` has rows of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, inverse_root, narrow, widen
from ferryman.backends.triton_rows import collapse_rows, lanes
from ferryman.ops.norm.calls_kernels import model_calls
from ferryman.ops.norm.triton_kernels import is_whole, over, tile_of


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b):
    """Row sums of two [rows, columns] arrays in one pass: one exchange between warps where two would wait twice."""
    if INTERPRETED:  # there, what is not a plain sum is added by Python, element by element
        return tl.sum(a, 1), tl.sum(b, 1)
    return tl.reduce((a, b), 1, _add_both)


@triton.jit
def _tile_of(ptr, first, stride, row, col, mask):
    return tl.load(ptr + first * stride + (row * stride + col), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    extra_ptr,
    out_ptr,
    partial_ptr,
    statistics_ptr,
    grad_stride,
    x_stride,
    extra_stride,
    rows,
    tiles,
    width,
    eps,
    CENTRED: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Persistent over tiles of rows, the next of which is read AHEAD while one is reduced: one tile at a time reaches
    half of a copy's speed on an H200. Sums for weight and bias stay in registers until the
    end (``partial_ptr``), or the row statistics go to ``statistics_ptr`` for `columns_kernels`, where a row is
    too wide for that. Both halves of a tile's rows, a thread's own, are added at once: with 16 registers more, the last
    quarter of layer_norm's programs waits for the others."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < (BLOCK if WHOLE else width)
    n = width + 0.0
    step = tl.num_programs(0)
    HALF: tl.constexpr = max(ROWS // 2, 1)
    if WEIGHT_GRAD:
        weight_sum = tl.zeros([HALF, BLOCK], tl.float32)
    if BIAS_GRAD:
        bias_sum = tl.zeros([HALF, BLOCK], tl.float32)
    if weight_ptr is not None and ROWS > 1:
        weight = widen(tl.load(weight_ptr + col, mask=inside, other=0.0))
    if AHEAD:
        ahead = tl.program_id(0).to(tl.int64) * ROWS
        more = inside & (row < rows - ahead)
        x_next = _tile_of(x_ptr, ahead, x_stride, row, col, more)
        g_next = _tile_of(grad_ptr, ahead, grad_stride, row, col, more)
        if extra_ptr is not None and ROWS == 1:
            extra_next = _tile_of(extra_ptr, ahead, extra_stride, row, col, more)
    for tile in range(tl.program_id(0), tiles, step):
        first = tl.full([], ROWS, tl.int64) * tile
        mask = inside & (row < rows - first)
        if AHEAD:
            x = widen(x_next)
            g = widen(g_next)
            ahead = first + step * ROWS
            more = inside & (row < rows - ahead)
            x_next = _tile_of(x_ptr, ahead, x_stride, row, col, more)
            g_next = _tile_of(grad_ptr, ahead, grad_stride, row, col, more)
            if extra_ptr is not None and ROWS == 1:
                extra = extra_next
                extra_next = _tile_of(extra_ptr, ahead, extra_stride, row, col, more)
        else:
            x = widen(_tile_of(x_ptr, first, x_stride, row, col, mask))
            g = widen(_tile_of(grad_ptr, first, grad_stride, row, col, mask))
            if extra_ptr is not None and ROWS == 1:
                extra = _tile_of(extra_ptr, first, extra_stride, row, col, mask)
        if extra_ptr is not None and ROWS > 1:  # read ahead, it would not fit the registers
            extra = _tile_of(extra_ptr, first, extra_stride, row, col, mask)
        if BIAS_GRAD:
            bias_sum += tl.sum(tl.reshape(g, [ROWS // HALF, HALF, BLOCK]), 0)
        scaled = g
        if weight_ptr is not None:
            if ROWS == 1:  # read again for every tile, from L1: kept, it would hold registers
                weight = widen(tl.load(weight_ptr + col, mask=inside, other=0.0))
            scaled = g * weight
        if CENTRED:
            x_sum, g_sum = _two_sums(x, scaled)
            mean = over(x_sum, n, WHOLE, BLOCK)
            x = tl.where(inside if WHOLE else mask, x - mean[:, None], 0.0)
        squares, products = _two_sums(x * x, scaled * x)
        scale = inverse_root(over(squares, n, WHOLE, BLOCK) + eps)
        unit = x * scale[:, None]
        if WEIGHT_GRAD:
            product = tl.where(mask, g * unit, 0.0)  # rows past the end have an infinite scale where eps is 0
            weight_sum += tl.sum(tl.reshape(product, [ROWS // HALF, HALF, BLOCK]), 0)
        out = scaled - unit * over(products * scale, n, WHOLE, BLOCK)[:, None]
        if CENTRED:
            out -= over(g_sum, n, WHOLE, BLOCK)[:, None]
        out = out * scale[:, None]
        if extra_ptr is not None:
            out += widen(extra)
        tl.store(out_ptr + first * width + (row * width + col), narrow(out, out_ptr.dtype.element_ty), mask=mask)
        if statistics_ptr is not None:
            line = tl.arange(0, ROWS)
            tl.store(statistics_ptr + rows + first + line, scale, mask=line < rows - first)
            if CENTRED:
                tl.store(statistics_ptr + first + line, mean, mask=line < rows - first)
    line = tl.arange(0, BLOCK)
    if WEIGHT_GRAD:
        place = partial_ptr + tl.program_id(0).to(tl.int64) * width
        tl.store(place + line, tl.sum(weight_sum, 0), mask=line < width)
    if BIAS_GRAD:
        place = partial_ptr + (tl.program_id(0) + step * WEIGHT_GRAD).to(tl.int64) * width
        tl.store(place + line, tl.sum(bias_sum, 0), mask=line < width)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials(first_ptr, second_ptr, partial_ptr, programs, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Adds the programs' partial sums in a fixed order; the second result's follow the first's."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)[:, None]
    partial_ptr += tl.program_id(1).to(tl.int64) * programs * width
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, programs, ROWS):
        mask = (row < programs - start) & (col < width)[None, :]
        total += tl.load(partial_ptr + (start + row).to(tl.int64) * width + col[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + col, narrow(result, first_ptr.dtype.element_ty), mask=col < width)
    else:
        tl.store(second_ptr + col, narrow(result, second_ptr.dtype.element_ty), mask=col < width)


# ------------------------------------------------------------------------------------------------------ launchers

RESIDENT = 512  # threads of a unit


class Backward(NamedTuple):
    """A call of a backward, whose rows lie ``strides`` apart. wanted: whether weight and bias get a gradient."""

    grad: Tensor
    x: Tensor
    weight: Tensor | None
    extra: Tensor | None
    out: Tensor
    strides: tuple[int, int, int]
    rows: int
    width: int
    eps: float
    centred: bool
    wanted: tuple[bool, bool]


def backward_by(
    sums_by: Callable[[Backward, Target], Tensor | None],
    grad: Tensor,
    extra: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias: ``sums_by`` launches what gives x's, and programs' sums for the others
    (which, program, column). They are added here."""
    width, device = x.shape[-1], x.device
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    grads = [
        torch.empty(0, dtype=x.dtype, device=device) if p is None else torch.empty(width, dtype=p.dtype, device=device)
        for p in (weight, bias)
    ]
    if x.numel() == 0:
        return out, grads[0].zero_(), grads[1].zero_()
    x, rows, x_stride = collapse_rows(x)
    grad, _, grad_stride = collapse_rows(grad)
    extra_stride = 0
    if extra is not None:
        extra, _, extra_stride = collapse_rows(extra)
    wanted = (weight is not None, bias is not None)
    weight = None if weight is None else weight.contiguous()
    strides = (grad_stride, x_stride, extra_stride)
    partial = sums_by(Backward(grad, x, weight, extra, out, strides, rows, width, float(eps), centred, wanted), target)
    if partial is not None:
        results = [g for g, w in zip(grads, wanted, strict=True) if w]
        # of many programs, which are many for short rows: few columns and much at once, or few blocks wait for long
        together, columns, warps = (32, 64, 4) if partial.shape[1] <= 32 else (512, 16, 8)
        launch(
            _sum_partials,
            (triton.cdiv(width, columns), len(results)),
            results[0],
            results[-1],
            partial,
            partial.shape[1],
            width,
            together,
            columns,
            device=device,
            num_warps=warps,
        )
    return out, grads[0], grads[1]


def gradients_of_tiles(given: Backward, statistics: Tensor | None, target: Target) -> Tensor | None:
    """x's gradient, and each program's sums for weight and bias; or, into ``statistics``, those of the rows."""
    x, rows, width, wanted = given.x, given.rows, given.width, given.wanted
    tile = tile_of(target, width, x.element_size(), rows, max(given.strides), 2)
    fused = any(wanted) and statistics is None
    tiles = triton.cdiv(rows, tile.rows)
    # threads that hide the latency; more programs only lengthen the final sum, and those that wait for others to end
    # double the time
    programs = min(tiles, target.units * max(1, RESIDENT // (tile.warps * lanes(target)))) if fused else tiles
    partial = None
    if fused:
        partial = torch.empty(sum(wanted), programs, width, dtype=torch.float32, device=x.device)
    # float32 rows, rows read element by element, and a layer norm's with a sum leave no registers for the next ones
    ahead = fused and x.element_size() == 2 and width % 16 == 0 and not (given.centred and given.extra is not None)
    capped = {}
    if ahead and target.vendor == "nvidia" and target.registers_per_unit:
        capped = {"maxnreg": target.registers_per_unit // RESIDENT}
    launch(
        _norm_backward,
        (programs,),
        given.grad,
        x,
        given.weight,
        given.extra,
        given.out,
        partial,
        statistics,
        *given.strides,
        rows,
        tiles,
        width,
        given.eps,
        given.centred,
        fused and wanted[0],
        fused and wanted[1],
        ahead,
        is_whole(tile, width),
        tile.rows,
        tile.block,
        device=x.device,
        num_warps=tile.warps,
        **capped,
    )
    return partial


def _sums(given: Backward, target: Target) -> Tensor | None:
    return gradients_of_tiles(given, None, target)


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
    calls = model_calls(target, dtype)
    ours = [(op, args) for line, op, args in calls if line == "rows" and op.endswith("_backward")]
    return recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
