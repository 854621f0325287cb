"""RMS and layer norm in Triton of rows that stay in registers: one read, one write. `long_kernels` has any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, widen
from ferryman.backends.triton_rows import RowTile, collapse_rows, configured, row_tile, rows_of, tiles_beside
from ferryman.ops.norm.calls_kernels import model_calls

# ------------------------------------------------------------------------------------------------------- forward


@triton.jit
def over(total, n, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
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
        mean = over(tl.sum(x, 1), n, WHOLE, BLOCK)
        x = tl.where(inside if WHOLE else mask, x - mean[:, None], 0.0)
    variance = over(tl.sum(x * x, 1), n, WHOLE, BLOCK)
    y = x * inverse_root(variance + eps)[:, None]
    if weight_ptr is not None:
        if CAST:
            y = widen(narrow(y, y_ptr.dtype.element_ty))
        y = y * widen(tl.load(weight_ptr + col, mask=inside, other=0.0))
    if bias_ptr is not None:
        y = y + widen(tl.load(bias_ptr + col, mask=inside, other=0.0))
    tl.store(y_ptr + first * width + (row * width + col), narrow(y, y_ptr.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------ launchers

SHORT = 1024  # columns


def tile_of(target: Target, width: int, itemsize: int, rows: int, stride: int, arrays: int) -> RowTile:
    """`row_tile`, but of SHORT rows 1024 elements by two warps where it takes several by four: up to 10% on an H200."""
    tile = row_tile(target, width, itemsize, rows, stride, arrays)
    if target.vendor != "nvidia" or tile.rows == 1 or tile.block > SHORT:
        return tile
    elements = min(SHORT, tile.rows * tile.block // 2)
    return tile._replace(rows=max(1, elements // tile.block), warps=2)


def is_whole(tile: RowTile, width: int) -> bool:
    """Whether a row needs no mask. Without one, ptxas spills layer_norm of 8192 columns in float16 on sm_90."""
    return tile.block == width <= SHORT


def forward_by(
    rows_by: Callable[[tuple[Any, ...], int, Target], None],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    cast: bool,
    target: Target,
) -> tuple[Tensor, Tensor | None]:
    """(result, sum with the residual): ``rows_by`` launches the kernel on so many rows."""
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
    rows_by(args, rows, target)
    return y, total


def _rows(args: tuple[Any, ...], rows: int, target: Target) -> None:
    x, residual, width = args[0], args[1], args[0].shape[-1]
    plan = tile_of(target, width, x.element_size(), rows, max(args[6:8]), 1 if residual is None else 2)
    tile = configured(plan, target)
    grid = (triton.cdiv(rows, tile.rows),)
    launch(_norm, grid, *args, is_whole(tile, width), tile.rows, tile.block, device=x.device, num_warps=tile.warps)


def configurations(x: Tensor, *rest: Any) -> dict[str, float]:
    """Of a norm without a residual, for the menu. rest: what else its launcher takes."""
    return _configurations(rest[-1], x)


def configurations_added(x: Tensor, residual: Tensor, *rest: Any) -> dict[str, float]:
    """Of a norm with a residual."""
    return _configurations(rest[-1], x, residual)


def _configurations(target: Target, *tensors: Tensor) -> dict[str, float]:
    x = tensors[0]
    if x.numel() == 0:
        return {}
    rows, stride = rows_of(x)[0], max(rows_of(t)[1] for t in tensors)
    plan = tile_of(target, x.shape[-1], x.element_size(), rows, stride, len(tensors))
    return tiles_beside(plan, target, stride)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target) -> Tensor:
    return forward_by(_rows, x, None, weight, None, eps, False, cast_before_weight, target)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = forward_by(_rows, x, residual, weight, None, eps, False, cast_before_weight, target)
    assert total is not None
    return y, total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target) -> Tensor:
    return forward_by(_rows, x, None, weight, bias, eps, True, False, target)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = forward_by(_rows, x, residual, weight, bias, eps, True, False, target)
    assert total is not None
    return y, total


# What `ferryman compile` accepts: bytes a thread on NVIDIA, registers on AMD. All others spill nothing.
_SPILLS = {
    ("gfx90a", "bfloat16", "_norm"): 2,
    ("gfx90a", "float16", "_norm"): 2,
}


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What these launchers are chosen for, of `model_calls`."""
    ours = [
        (op, args) for line, op, args in model_calls(target, dtype) if line == "rows" and not op.endswith("_backward")
    ]
    units = recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
    return [replace(one, spills_allowed=_SPILLS.get((target.arch, dtype, one.name), 0)) for one in units]
