"""The gated RMS norm in Triton, forward and backward.

A program takes one group of columns of some rows. Groups that registers hold are read once; longer ones again, from L2.
Gradients of the weight are summed in float32 by a fixed number of programs, and those sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, sigmoid, widen
from ferryman.backends.triton_rows import LONG_BLOCK, collapse_rows, lanes, long_warps, row_tile


@triton.jit
def _act(z, SILU: tl.constexpr, EXACT: tl.constexpr):
    """(activation, slope) of a gate."""
    s, rest = sigmoid(z, EXACT)
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
FUSED_WIDTH = 4096  # columns of a group whose gradients stay in registers
COLUMN_ROWS, COLUMNS = 16, 128


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
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    size = x.shape[-1] if group_size is None else group_size
    groups = x.shape[-1] // size
    x, rows, x_stride = collapse_rows(x)
    gate, _, gate_stride = collapse_rows(gate)
    weight = None if weight is None else weight.contiguous()
    args = (x, gate, weight, y, x_stride, gate_stride, rows, groups, size, float(eps))
    options = (norm_before_gate, cast_before_weight, activation == "silu")
    itemsize = max(x.element_size(), gate.element_size())
    tile = row_tile(target, size, itemsize, rows * groups, max(x_stride, gate_stride), 2)
    if tile.fits:
        grid = (triton.cdiv(rows, tile.rows) * groups,)
        launch(_gated_norm, grid, *args, *options, tile.rows, tile.block, device=x.device, num_warps=tile.warps)
    else:
        warps = long_warps(target)
        launch(_gated_norm_long, (rows * groups,), *args, *options, LONG_BLOCK, device=x.device, num_warps=warps)
    return y


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
    groups = width // size
    x, rows, x_stride = collapse_rows(x)
    gate, _, gate_stride = collapse_rows(gate)
    grad, _, grad_stride = collapse_rows(grad)
    weight = None if weight is None else weight.contiguous()
    silu = activation == "silu"
    itemsize = max(t.element_size() for t in (x, gate, grad))
    tile = row_tile(target, size, itemsize, rows * groups, max(x_stride, gate_stride, grad_stride), 4)
    # 16 elements a thread spill the masks of a wave of 64 lanes, and 8192 columns everywhere
    warps = tile.warps * (2 if tile.block > 2048 else 1)
    fits = tile.fits and tile.block <= FUSED_WIDTH
    given = (grad, x, gate, weight, grad_x, grad_gate)
    strides = (grad_stride, x_stride, gate_stride)
    partial: Any = None
    if fits:
        tiles = triton.cdiv(rows, tile.rows)
        programs = tiles
        if weight is not None:
            most = target.units * max(1, RESIDENT // (warps * lanes(target)))
            programs = min(tiles, max(1, most // groups))
            partial = torch.empty(programs, width, dtype=torch.float32, device=device)
        launch(
            _gated_norm_backward,
            (programs * groups,),
            *given,
            partial,
            *strides,
            rows,
            tiles,
            programs,
            groups,
            size,
            float(eps),
            norm_before_gate,
            silu,
            tile.rows,
            tile.block,
            device=device,
            num_warps=warps,
        )
    else:
        scale = None if weight is None else torch.empty(rows * groups, dtype=torch.float32, device=device)
        launch(
            _gated_norm_long_backward,
            (rows * groups,),
            *given,
            scale,
            *strides,
            rows,
            groups,
            size,
            float(eps),
            norm_before_gate,
            silu,
            LONG_BLOCK // 2,
            device=device,
            num_warps=long_warps(target),
        )
        if scale is not None:
            blocks = groups * triton.cdiv(size, COLUMNS)
            programs = max(1, min(triton.cdiv(rows, 4 * COLUMN_ROWS), 4 * target.units // blocks))
            each = triton.cdiv(triton.cdiv(rows, programs), COLUMN_ROWS) * COLUMN_ROWS
            programs = triton.cdiv(rows, each)
            partial = torch.empty(programs, width, dtype=torch.float32, device=device)
            launch(
                _gated_columns,
                (blocks, programs),
                grad,
                x,
                gate,
                scale,
                partial,
                *strides,
                rows,
                each,
                groups,
                size,
                norm_before_gate,
                silu,
                COLUMN_ROWS,
                COLUMNS,
                device=device,
                num_warps=4,
            )
    if partial is not None:
        programs = partial.shape[0]
        together, columns, few = (32, 64, 4) if programs <= 32 else (512, 16, 8)
        grid = (triton.cdiv(width, columns),)
        launch(
            _sum_partials,
            grid,
            grad_weight,
            partial,
            programs,
            width,
            together,
            columns,
            device=device,
            num_warps=few,
        )
    return grad_x, grad_gate, grad_weight


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Heads of Qwen3-Next, Mamba2's rows whole and in groups, odd and long ones; both places of the gate."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int, size: int | None, first: bool, cast: bool, wide: bool, activation: str) -> None:
        x = torch.empty(rows, width, dtype=torch.float32 if wide else kind, device="meta")
        gate = torch.empty(rows, width, dtype=kind, device="meta")
        w = torch.empty(width, dtype=kind, device="meta")
        gated_rms_norm(x, gate, w, 1e-6, size, first, cast, activation, target)
        gated_rms_norm_backward(x, x, gate, w, 1e-6, size, first, activation, target)

    shapes: tuple[tuple[Any, ...], ...] = (
        (2**17, 128, None, True, True, False, "silu"),
        (2**17, 128, None, True, False, False, "sigmoid"),
        (4096, 5120, None, False, True, False, "silu"),
        (4096, 8192, 1024, False, True, False, "silu"),
        (4096, 3072, None, False, False, True, "silu"),
        (8192, 257, None, True, False, False, "silu"),
        (64, 8192, None, False, True, False, "silu"),
        (64, 65_536, None, False, True, False, "silu"),
        (64, 65_536, None, True, False, False, "silu"),
        (1, 4096, None, False, True, False, "silu"),
        (3, 1, None, True, True, False, "silu"),
    )
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
