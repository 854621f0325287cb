"""RMS and layer norm in Triton of rows of any length, in parts: what is read twice comes from L2 the second time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, widen
from ferryman.backends.triton_rows import LONG_BLOCK, long_warps
from ferryman.ops.norm.backward_kernels import Backward, backward_by
from ferryman.ops.norm.calls_kernels import model_calls
from ferryman.ops.norm.columns_kernels import statistics_of, sums_of_columns
from ferryman.ops.norm.triton_kernels import forward_by


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


# ------------------------------------------------------------------------------------------------------ launchers


def _rows(args: tuple[Any, ...], rows: int, target: Target) -> None:
    launch(_norm_long, (rows,), *args, LONG_BLOCK, device=args[0].device, num_warps=long_warps(target))


def _sums(given: Backward, target: Target) -> Tensor | None:
    statistics = statistics_of(given) if any(given.wanted) else None
    launch(
        _norm_long_backward,
        (given.rows,),
        given.grad,
        given.x,
        given.weight,
        given.extra,
        given.out,
        statistics,
        *given.strides,
        given.rows,
        given.width,
        given.eps,
        given.centred,
        LONG_BLOCK,
        device=given.x.device,
        num_warps=long_warps(target),
    )
    return None if statistics is None else sums_of_columns(given, statistics, target)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target) -> Tensor:
    return forward_by(_rows, x, None, weight, None, eps, False, cast_before_weight, target)[0]


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return backward_by(_sums, grad, None, x, weight, None, eps, False, target)[:2]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = forward_by(_rows, x, residual, weight, None, eps, False, cast_before_weight, target)
    assert total is not None
    return y, total


def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, residual_out: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return backward_by(_sums, grad_y, grad_residual, residual_out, weight, None, eps, False, target)[:2]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target) -> Tensor:
    return forward_by(_rows, x, None, weight, bias, eps, True, False, target)[0]


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_by(_sums, grad, None, x, weight, bias, eps, True, target)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    y, total = forward_by(_rows, x, residual, weight, bias, eps, True, False, target)
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
    return backward_by(_sums, grad_y, grad_residual, residual_out, weight, bias, eps, True, target)


# What `ferryman compile` accepts: bytes a thread. All others spill nothing.
_SPILLS = {("sm_100", "float32", "_norm_long_backward"): 8}


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What these launchers are chosen for, of `model_calls`."""
    ours = [(op, args) for line, op, args in model_calls(target, dtype) if line == "long"]
    units = recorded(lambda op=op, args=args: globals()[op](*args, target) for op, args in ours)  # type: ignore[misc]
    return [replace(one, spills_allowed=_SPILLS.get((target.arch, dtype, one.name), 0)) for one in units]
