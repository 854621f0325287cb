"""`bias_act` in Triton, forward and backward: one read of each input, one write of each output.

The bias's gradient is summed in float32 by a fixed number of programs, and their sums in a fixed order: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import (
    exp,
    expm1_below,
    narrow,
    normal,
    normal_of_half,
    sigmoid,
    sigmoid_of_half,
    tanh,
    widen,
)
from ferryman.backends.triton_rows import collapse_rows, lanes

_KINDS = {
    name: kind
    for kind, name in enumerate(
        (
            *("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"),
            *("leaky_relu", "elu", "tanh", "sigmoid", "hardswish", "softcap"),
        )
    )
}
_SLOPES = {"leaky_relu": 0.01, "elu": 1.0}


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    if EXACT:
        s, rest = sigmoid(z)
    else:
        s, rest = sigmoid_of_half(z)
    return s, rest


@triton.jit
def _normal(z, EXACT: tl.constexpr):
    if EXACT:
        factor, density = normal(z)
    else:
        factor, density = normal_of_half(z)
    return factor, density


@triton.jit
def _logistic(z, KIND: tl.constexpr, EXACT: tl.constexpr):
    """(F, dF/dz) where the activation is z F(z): gelu_tanh, quick_gelu, silu."""
    if KIND == 1:
        # 0.5 (1 + tanh a) = sigmoid(2 a), a = sqrt(2 / pi) (z + 0.044715 z^3)
        square = z * z
        s, rest = _sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * square), EXACT)
        # past 1e4 the slope is 0 on both sides, and the square must not become infinite: 0 * inf
        bounded = tl.minimum(square, 1e8)
        return s, s * rest * (1.5957691216057308 + 0.21406448696540377 * bounded)
    if KIND == 2:
        s, rest = _sigmoid(1.702 * z, EXACT)
        return s, 1.702 * (s * rest)
    s, rest = _sigmoid(z, EXACT)
    return s, s * rest


@triton.jit
def _activated(z, alpha, KIND: tl.constexpr, EXACT: tl.constexpr):
    if KIND == 0:
        factor, _ = _normal(z, EXACT)
        return z * factor
    if KIND <= 3:
        factor, _ = _logistic(z, KIND, EXACT)
        return z * factor
    if KIND == 4:
        return tl.where(z <= 0, 0.0, z)
    if KIND == 5:
        return tl.where(z <= 0, 0.0, z * z)
    if KIND == 6:
        return tl.where(z > 0, z, z * alpha)
    if KIND == 7:
        return tl.where(z > 0, z, alpha * expm1_below(z, EXACT))
    if KIND == 8:
        return tanh(z)
    if KIND == 9:
        s, _ = _sigmoid(z, EXACT)
        return s
    if KIND == 11:
        return alpha * tanh(z / alpha)
    # a sixth after the product would leave float32
    inner = tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 6.0, z + 3.0))
    return z * (inner * 0.16666666666666666)


@triton.jit
def _gradient(d, z, alpha, KIND: tl.constexpr, EXACT: tl.constexpr):
    if KIND == 0:
        factor, slope = _normal(z, EXACT)
        return d * (factor + z * slope)
    if KIND <= 3:
        factor, slope = _logistic(z, KIND, EXACT)
        return d * (factor + z * slope)
    if KIND == 4:
        return tl.where(z <= 0, 0.0, d)
    if KIND == 5:
        return tl.where(z <= 0, 0.0, (2.0 * z) * d)
    if KIND == 6:
        return tl.where(z > 0, d, d * alpha)
    if KIND == 7:
        return tl.where(z > 0, d, d * (alpha * exp(z, EXACT)))
    if KIND == 8:
        t = tanh(z)
        return d * (1.0 - t * t)
    if KIND == 9:
        s, rest = _sigmoid(z, EXACT)
        return d * (s * rest)
    if KIND == 11:
        t = tanh(z / alpha)
        return d * (1.0 - t * t)
    return tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, d, d * (z * 0.3333333333333333 + 0.5)))


@triton.jit
def _tile(program, rows, width, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(first row, first column, row offsets, column offsets, mask) of a program's tile. FLAT: of one row."""
    if FLAT:
        first = 0
        start = program.to(tl.int64) * BLOCK
    else:
        across = tl.cdiv(width, BLOCK)
        first = (program // across).to(tl.int64) * ROWS
        start = (program % across).to(tl.int64) * BLOCK
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < width - start
    if ROWS > 1:
        mask = mask & (row < rows - first)
    return first, start, row, col, mask


@triton.jit(do_not_specialize=["rows", "alpha"])
def _forward(
    x_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    rows,
    width,
    alpha,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, start, row, col, mask = _tile(tl.program_id(0), rows, width, FLAT, ROWS, BLOCK)
    z = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + col), mask=mask))
    if bias_ptr is not None:
        z += widen(tl.load(bias_ptr + start + col, mask=col < width - start))
    y = narrow(_activated(z, alpha, KIND, y_ptr.dtype.element_ty == tl.float32), y_ptr.dtype.element_ty)
    tl.store(y_ptr + first * width + start + (row * width + col), y, mask=mask)


@triton.jit(do_not_specialize=["rows", "alpha"])
def _backward(
    grad_ptr,
    x_ptr,
    out_ptr,
    grad_stride,
    x_stride,
    rows,
    width,
    alpha,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, start, row, col, mask = _tile(tl.program_id(0), rows, width, FLAT, ROWS, BLOCK)
    d = widen(tl.load(grad_ptr + first * grad_stride + start + (row * grad_stride + col), mask=mask))
    z = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + col), mask=mask))
    g = _gradient(d, z, alpha, KIND, out_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + first * width + start + (row * width + col), narrow(g, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_each", "alpha"])
def _backward_columns(
    grad_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    grad_stride,
    x_stride,
    rows,
    rows_each,
    width,
    alpha,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a block of columns over a span of rows: x's gradient, and the sum of its float32 values."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < width - start
    bias = widen(tl.load(bias_ptr + start + col, mask=inside, other=0.0))
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for at in range(begin, end, ROWS):
        first = tl.full([], 1, tl.int64) * at
        mask = inside & (row < end - at)
        d = widen(tl.load(grad_ptr + first * grad_stride + start + (row * grad_stride + col), mask=mask, other=0.0))
        x = widen(tl.load(x_ptr + first * x_stride + start + (row * x_stride + col), mask=mask, other=0.0))
        g = _gradient(d, x + bias, alpha, KIND, out_ptr.dtype.element_ty == tl.float32)
        total += tl.where(mask, g, 0.0)  # 0 times an infinite bias would be NaN
        place = out_ptr + first * width + start + (row * width + col)
        tl.store(place, narrow(g, out_ptr.dtype.element_ty), mask=mask)
    line = tl.arange(0, BLOCK)
    place = partial_ptr + tl.program_id(1).to(tl.int64) * width + start
    tl.store(place + line, tl.sum(total, 0), mask=line < width - start)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials(out_ptr, partial_ptr, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the programs' sums in a fixed order."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, programs, ROWS):
        mask = (row < programs - start) & (col < width)[None, :]
        total += tl.load(partial_ptr + (start + row).to(tl.int64) * width + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + col, narrow(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=col < width)


# 8 elements a thread: one 16-byte load of each 16-bit input
TILE, WARPS = 1024, 4
# a block of columns is halved, down to LEAST, while the blocks of a row have more than IDLE times its columns
LEAST, IDLE = 128, 1.2
PROGRAMS = 8  # of a unit, where rows are summed


def _blocks(target: Target, width: int, rows: int, stride: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    tile = TILE * lanes(target) // 32
    block = min(tile, triton.next_power_of_2(width))
    while rows > 1 and block > LEAST and triton.cdiv(width, block) * block > IDLE * width:
        block //= 2
    together = min(tile // block, 64)
    return (1 if rows == 1 or together * stride >= 2**31 else together), block


def _options(target: Target) -> dict[str, bool]:
    """LLVM fuses products into sums in packed AMD code and not in scalar code, so that a sample's bits would change
    with its alignment; memory bounds these kernels, and fusing saves no time."""
    return {"enable_fp_fusion": False} if target.vendor == "amd" else {}


def _alpha(activation: str, alpha: float | None) -> float:
    return float(_SLOPES.get(activation, 0.0) if alpha is None else alpha)


def _views(flat: bool, *tensors: Tensor) -> tuple[list[Tensor], int, int, list[int]]:
    """(tensors, rows, width, elements from one row to the next)."""
    if flat:
        return list(tensors), 1, tensors[0].numel(), [0] * len(tensors)
    views = [collapse_rows(t) for t in tensors]
    return [v[0] for v in views], views[0][1], tensors[0].shape[-1], [v[2] for v in views]


def bias_act(x: Tensor, bias: Tensor | None, activation: str, alpha: float | None, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    flat = bias is None and x.is_contiguous()
    (x,), rows, width, (stride,) = _views(flat, x)
    together, block = _blocks(target, width, rows, stride)
    grid = (triton.cdiv(rows, together) * triton.cdiv(width, block),)
    launch(
        _forward,
        grid,
        x,
        None if bias is None else bias.contiguous(),
        y,
        stride,
        rows,
        width,
        _alpha(activation, alpha),
        _KINDS[activation],
        flat,
        together,
        block,
        device=y.device,
        num_warps=WARPS,
        **_options(target),
    )
    return y


def bias_act_backward(
    grad: Tensor, x: Tensor, bias: None, activation: str, alpha: float | None, target: Target
) -> tuple[Tensor, Tensor]:
    """Without a bias: elementwise."""
    out, nothing = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in (x.shape, 0))
    if x.numel() == 0:
        return out, nothing
    flat = x.is_contiguous() and grad.is_contiguous()
    (grad, x), rows, width, strides = _views(flat, grad, x)
    together, block = _blocks(target, width, rows, max(strides))
    launch(
        _backward,
        (triton.cdiv(rows, together) * triton.cdiv(width, block),),
        grad,
        x,
        out,
        *strides,
        rows,
        width,
        _alpha(activation, alpha),
        _KINDS[activation],
        flat,
        together,
        block,
        device=out.device,
        num_warps=WARPS,
        **_options(target),
    )
    return out, nothing


def bias_act_backward_columns(
    grad: Tensor, x: Tensor, bias: Tensor, activation: str, alpha: float | None, target: Target
) -> tuple[Tensor, Tensor]:
    """With a bias, whose gradient sums columns."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(bias.shape, dtype=bias.dtype, device=x.device)
    if x.numel() == 0:
        return out, total.zero_()
    (grad, x), rows, width, strides = _views(False, grad, x)
    together, block = _blocks(target, width, rows, max(strides))
    across = triton.cdiv(width, block)
    spans = max(1, min(triton.cdiv(rows, 4 * together), PROGRAMS * target.units // across))
    each = triton.cdiv(triton.cdiv(rows, spans), together) * together
    spans = triton.cdiv(rows, each)
    partial = torch.empty(spans, width, dtype=torch.float32, device=out.device)
    launch(
        _backward_columns,
        (across, spans),
        grad,
        x,
        bias.contiguous(),
        out,
        partial,
        *strides,
        rows,
        each,
        width,
        _alpha(activation, alpha),
        _KINDS[activation],
        together,
        block,
        device=out.device,
        num_warps=WARPS,
        **_options(target),
    )
    # of many spans, which are many for short rows: few columns and much at once, or few blocks wait for long
    lines, columns, warps = (32, 64, 4) if spans <= 32 else (512, 16, 8)
    launch(
        _sum_partials,
        (triton.cdiv(width, columns),),
        total,
        partial,
        spans,
        width,
        lines,
        columns,
        device=out.device,
        num_warps=warps,
    )
    return out, total


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Every activation on contiguous inputs with a bias and without; strided and narrow rows."""
    kind = getattr(torch, dtype)

    def calls(rows: int, width: int, gap: int, biased: bool, activation: str) -> None:
        x = torch.empty(rows, width + gap, dtype=kind, device="meta")[:, :width]
        bias = torch.empty(width, dtype=kind, device="meta") if biased else None
        alpha = 30.0 if activation == "softcap" else None
        grad = torch.empty(rows, width, dtype=kind, device="meta")
        bias_act(x, bias, activation, alpha, target)
        if bias is None:
            bias_act_backward(grad, x, None, activation, alpha, target)
        else:
            bias_act_backward_columns(grad, x, bias, activation, alpha, target)

    shapes = [(8192, 4096, 0, biased, name) for biased in (True, False) for name in _KINDS]
    shapes += [(4096, 64, 64, True, "gelu"), (4096, 64, 64, False, "gelu"), (61, 257, 0, True, "silu")]
    shapes += [(61, 257, 3, False, "silu"), (1, 1, 0, True, "tanh"), (1, 1, 0, False, "tanh")]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
