"""RMS and layer norm in Triton, forward and backward.

Rows of up to 32768 elements stay in registers: one read, one write. Longer rows are read again, from L2. Gradients of
weight and bias are summed in float32 by a fixed number of programs, and those sums in a fixed order: no atomics.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, inverse_root, narrow, widen
from ferryman.backends.triton_rows import LONG_BLOCK, RowTile, collapse_rows, lanes, long_warps, row_tile

# ------------------------------------------------------------------------------------------------------- forward


@triton.jit
def _over(total, n, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """total / n, rounded once. A WHOLE row has a power of two of columns, which its inverse divides by as exactly."""
    if WHOLE:
        return total * (1.0 / BLOCK)
    return tl.div_rn(total, n)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    rows,
    width,
    eps,
    CENTRED: tl.constexpr,
    CAST: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    n = width + 0.0  # not width.to(tl.float32): a width of 1 is compiled in, and a constant has no .to
    inside = col < (BLOCK if WHOLE else width)
    mask = inside
    if ROWS > 1:
        mask = inside & (row < rows - first)
    x = widen(tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=mask, other=0.0))
    if residual_ptr is not None:
        other = residual_ptr + first * residual_stride + (row * residual_stride + col)
        total = narrow(x + widen(tl.load(other, mask=mask, other=0.0)), sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + first * width + (row * width + col), total, mask=mask)
        x = widen(total)
    if CENTRED:
        mean = _over(tl.sum(x, 1), n, WHOLE, BLOCK)
        x = tl.where(inside if WHOLE else mask, x - mean[:, None], 0.0)
    variance = _over(tl.sum(x * x, 1), n, WHOLE, BLOCK)
    y = x * inverse_root(variance + eps)[:, None]
    if weight_ptr is not None:
        if CAST:
            y = widen(narrow(y, y_ptr.dtype.element_ty))
        y = y * widen(tl.load(weight_ptr + col, mask=inside, other=0.0))
    if bias_ptr is not None:
        y = y + widen(tl.load(bias_ptr + col, mask=inside, other=0.0))
    tl.store(y_ptr + first * width + (row * width + col), narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_sum(x_ptr, residual_ptr, sum_dtype: tl.constexpr, col, mask):
    """A chunk of a row in float32; with a residual, of the rounded sum."""
    x = widen(tl.load(x_ptr + col, mask=mask, other=0.0))
    if residual_ptr is not None:
        x = widen(narrow(x + widen(tl.load(residual_ptr + col, mask=mask, other=0.0)), sum_dtype))
    return x


@triton.jit
def _long_statistics(
    x_ptr, residual_ptr, sum_dtype: tl.constexpr, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """(mean, 1 / deviation) of a row read in chunks: each lane runs Welford's update, then the lanes merge."""
    col = tl.arange(0, BLOCK)
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    count = 0.0
    for start in range(0, width, BLOCK):
        mask = col < width - start
        if residual_ptr is None:
            x = _row_sum(x_ptr + start, None, sum_dtype, col, mask)
        else:
            x = _row_sum(x_ptr + start, residual_ptr + start, sum_dtype, col, mask)
        if CENTRED:
            count += 1.0
            d = x - mean
            moved = mean + d * tl.div_rn(1.0, count)
            squares += tl.where(mask, d * (x - moved), 0.0)
            mean = tl.where(mask, moved, mean)
        else:
            squares += x * x
    n = width + 0.0
    centre = 0.0
    if CENTRED:
        lane = ((width - col + BLOCK - 1) // BLOCK).to(tl.float32)  # how many elements each lane saw
        lane = tl.maximum(lane, 0.0)
        centre = tl.div_rn(tl.sum(lane * mean, 0), n)
        squares += lane * (mean - centre) * (mean - centre)
    return centre, inverse_root(tl.div_rn(tl.sum(squares, 0), n) + eps)


@triton.jit(do_not_specialize=["rows"])
def _norm_long(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    rows,
    width,
    eps,
    CENTRED: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        sum_ptr += row * width
    dtype = y_ptr.dtype.element_ty
    mean, scale = _long_statistics(x_ptr, residual_ptr, dtype, width, eps, CENTRED, BLOCK)
    col = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        if residual_ptr is None:
            x = _row_sum(x_ptr + start, None, dtype, col, mask)
        else:
            x = _row_sum(x_ptr + start, residual_ptr + start, dtype, col, mask)
            tl.store(sum_ptr + start + col, narrow(x, dtype), mask=mask)
        y = (x - mean) * scale
        if weight_ptr is not None:
            if CAST:
                y = widen(narrow(y, dtype))
            y = y * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))
        if bias_ptr is not None:
            y = y + widen(tl.load(bias_ptr + start + col, mask=mask, other=0.0))
        tl.store(y_ptr + start + col, narrow(y, dtype), mask=mask)


# ------------------------------------------------------------------------------------------------------ backward


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
    end (``partial_ptr``), or the row statistics go to ``statistics_ptr`` for `_norm_columns`, where a row is too wide
    for that. Both halves of a tile's rows, a thread's own, are added at once: with 16 registers more, the last quarter
    of layer_norm's programs waits for the others."""
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
            mean = _over(x_sum, n, WHOLE, BLOCK)
            x = tl.where(inside if WHOLE else mask, x - mean[:, None], 0.0)
        squares, products = _two_sums(x * x, scaled * x)
        scale = inverse_root(_over(squares, n, WHOLE, BLOCK) + eps)
        unit = x * scale[:, None]
        if WEIGHT_GRAD:
            product = tl.where(mask, g * unit, 0.0)  # rows past the end have an infinite scale where eps is 0
            weight_sum += tl.sum(tl.reshape(product, [ROWS // HALF, HALF, BLOCK]), 0)
        out = scaled - unit * _over(products * scale, n, WHOLE, BLOCK)[:, None]
        if CENTRED:
            out -= _over(g_sum, n, WHOLE, BLOCK)[:, None]
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


@triton.jit(do_not_specialize=["rows"])
def _norm_long_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    extra_ptr,
    out_ptr,
    statistics_ptr,
    grad_stride,
    x_stride,
    extra_stride,
    rows,
    width,
    eps,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_ptr += row * grad_stride
    out_ptr += row * width
    mean, scale = _long_statistics(x_ptr, None, tl.float32, width, eps, CENTRED, BLOCK)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + row, mean)
        tl.store(statistics_ptr + rows + row, scale)
    col = tl.arange(0, BLOCK)
    inner = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        if weight_ptr is not None:
            g = g * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        inner += tl.where(mask, g * ((x - mean) * scale), 0.0)
        total += g
    n = width + 0.0
    inner_mean = tl.div_rn(tl.sum(inner, 0), n)
    grad_mean = 0.0
    if CENTRED:
        grad_mean = tl.div_rn(tl.sum(total, 0), n)
    for start in range(0, width, BLOCK):
        mask = col < width - start
        g = widen(tl.load(grad_ptr + start + col, mask=mask, other=0.0))
        if weight_ptr is not None:
            g = g * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))
        x = widen(tl.load(x_ptr + start + col, mask=mask, other=0.0))
        out = (g - (x - mean) * scale * inner_mean - grad_mean) * scale
        if extra_ptr is not None:
            out += widen(tl.load(extra_ptr + row * extra_stride + start + col, mask=mask, other=0.0))
        tl.store(out_ptr + start + col, narrow(out, out_ptr.dtype.element_ty), mask=mask)


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
FUSED_WIDTH = 8192  # wider rows leave no registers for the sums over rows: 16 elements a thread of five arrays
COLUMN_ROWS, COLUMNS = 32, 128
SHORT = 1024  # columns


def _tile(target: Target, width: int, itemsize: int, rows: int, stride: int, arrays: int) -> RowTile:
    """`row_tile`, but of SHORT rows 1024 elements by two warps where it takes several by four: up to 10% on an H200."""
    tile = row_tile(target, width, itemsize, rows, stride, arrays)
    if target.vendor != "nvidia" or tile.rows == 1 or tile.block > SHORT:
        return tile
    elements = min(SHORT, tile.rows * tile.block // 2)
    return tile._replace(rows=max(1, elements // tile.block), warps=2)


def _whole(tile: RowTile, width: int) -> bool:
    """Whether a row needs no mask. Without one, ptxas spills layer_norm of 8192 columns in float16 on sm_90."""
    return tile.block == width <= SHORT


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    cast: bool,
    target: Target,
) -> tuple[Tensor, Tensor | None]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    if x.numel() == 0:
        return y, total
    width = x.shape[-1]
    x, rows, stride = collapse_rows(x)
    other_stride = 0
    if residual is not None:
        residual, _, other_stride = collapse_rows(residual)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    args = (x, residual, weight, bias, y, total, stride, other_stride, rows, width, float(eps), centred, cast)
    tile = _tile(target, width, x.element_size(), rows, max(stride, other_stride), 1 if residual is None else 2)
    if tile.fits:
        grid = (triton.cdiv(rows, tile.rows),)
        launch(_norm, grid, *args, _whole(tile, width), tile.rows, tile.block, device=x.device, num_warps=tile.warps)
    else:
        launch(_norm_long, (rows,), *args, LONG_BLOCK, device=x.device, num_warps=long_warps(target))
    return y, total


def _backward(
    grad: Tensor,
    extra: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
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
    weight = None if weight is None else weight.contiguous()
    wanted = [p is not None for p in (weight, bias)]
    tile = _tile(target, width, x.element_size(), rows, max(x_stride, grad_stride, extra_stride), 2)
    # a layer norm's with a sum keeps one array more: half as many columns in float32
    widest = FUSED_WIDTH // 2 if centred and extra is not None and x.element_size() == 4 else FUSED_WIDTH
    fused = sum(wanted) > 0 and width <= widest and tile.fits
    statistics = None
    if sum(wanted) and not fused:
        statistics = torch.empty(2, rows, dtype=torch.float32, device=device)
    partial = None
    if tile.fits:
        tiles = triton.cdiv(rows, tile.rows)
        # threads that hide the latency; more programs only lengthen the final sum, and those that wait for others to
        # end double the time
        programs = min(tiles, target.units * max(1, RESIDENT // (tile.warps * lanes(target)))) if fused else tiles
        if fused:
            partial = torch.empty(sum(wanted), programs, width, dtype=torch.float32, device=device)
        # float32 rows, rows read element by element, and a layer norm's with a sum leave no registers for the next ones
        ahead = fused and x.element_size() == 2 and width % 16 == 0 and not (centred and extra is not None)
        capped = {}
        if ahead and target.vendor == "nvidia" and target.registers_per_unit:
            capped = {"maxnreg": target.registers_per_unit // RESIDENT}
        launch(
            _norm_backward,
            (programs,),
            grad,
            x,
            weight,
            extra,
            out,
            partial,
            statistics,
            grad_stride,
            x_stride,
            extra_stride,
            rows,
            tiles,
            width,
            float(eps),
            centred,
            fused and wanted[0],
            fused and wanted[1],
            ahead,
            _whole(tile, width),
            tile.rows,
            tile.block,
            device=device,
            num_warps=tile.warps,
            **capped,
        )
    else:
        launch(
            _norm_long_backward,
            (rows,),
            grad,
            x,
            weight,
            extra,
            out,
            statistics,
            grad_stride,
            x_stride,
            extra_stride,
            rows,
            width,
            float(eps),
            centred,
            LONG_BLOCK,
            device=device,
            num_warps=long_warps(target),
        )
    if statistics is not None:
        blocks = triton.cdiv(width, COLUMNS)
        programs = max(1, min(triton.cdiv(rows, 4 * COLUMN_ROWS), 4 * target.units // blocks))
        each = triton.cdiv(triton.cdiv(rows, programs), COLUMN_ROWS) * COLUMN_ROWS
        programs = triton.cdiv(rows, each)
        partial = torch.empty(sum(wanted), programs, width, dtype=torch.float32, device=device)
        launch(
            _norm_columns,
            (blocks, programs),
            grad,
            x,
            statistics,
            partial,
            grad_stride,
            x_stride,
            rows,
            each,
            width,
            centred,
            wanted[0],
            wanted[1],
            COLUMN_ROWS,
            COLUMNS,
            device=device,
            num_warps=4,
        )
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


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target) -> Tensor:
    return _forward(x, None, weight, None, eps, False, cast_before_weight, target)[0]


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return _backward(grad, None, x, weight, None, eps, False, target)[:2]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = _forward(x, residual, weight, None, eps, False, cast_before_weight, target)
    assert total is not None
    return y, total


def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, residual_out: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return _backward(grad_y, grad_residual, residual_out, weight, None, eps, False, target)[:2]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target) -> Tensor:
    return _forward(x, None, weight, bias, eps, True, False, target)[0]


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, None, x, weight, bias, eps, True, target)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = _forward(x, residual, weight, bias, eps, True, False, target)
    assert total is not None
    return y, total


def add_layer_norm_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad_y, grad_residual, residual_out, weight, bias, eps, True, target)


# What `ferryman compile` accepts: bytes a thread on NVIDIA, registers on AMD. All others spill nothing.
_SPILLS = {
    ("sm_100", "float32", "_norm_long_backward"): 8,
    ("gfx90a", "bfloat16", "_norm"): 2,
    ("gfx90a", "float16", "_norm"): 2,
}


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What the launchers choose for head_dim, hidden sizes on and off the powers of two, and rows beyond registers."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int) -> None:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        w = torch.empty(width, dtype=kind, device="meta")
        for cast in (False, True):
            rms_norm(x, w, 1e-6, cast, target)
            add_rms_norm(x, x, w, 1e-6, cast, target)
        rms_norm(x, None, 1e-6, False, target)
        for weight, bias in ((w, w), (w, None), (None, None)):
            layer_norm(x, weight, bias, 1e-5, target)
            add_layer_norm(x, x, weight, bias, 1e-5, target)
        rms_norm_backward(x, x, w, 1e-6, target)
        add_rms_norm_backward(x, x, x, w, 1e-6, target)
        layer_norm_backward(x, x, w, w, 1e-5, target)
        add_layer_norm_backward(x, x, x, w, w, 1e-5, target)

    shapes = [(2**17, 128), (8192, 257), (4096, 1024), (8192, 4096), (4096, 5120), (8192, 8192), (1024, 16384)]
    shapes += [(1, 4096), (512, 32768), (64, 131072), (3, 1)]  # a width of 1 is compiled in
    found = recorded(lambda r=r, w=w: calls(r, w) for r, w in shapes)  # type: ignore[misc]
    return [replace(one, spills_allowed=_SPILLS.get((target.arch, dtype, one.name), 0)) for one in found]
