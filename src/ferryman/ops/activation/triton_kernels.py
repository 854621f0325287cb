"""Gated activations in Triton, forward and backward: one read of each input, one write of each output.

GELU is written with the logistic and normal distributions, not with 1 + tanh and 1 + erf, which lose every digit of a
negative gate's small result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import narrow, normal, sigmoid, widen
from ferryman.backends.triton_rows import collapse_rows, lanes

SILU, GELU_TANH, GELU = 0, 1, 2
_KINDS = {"tanh": GELU_TANH, "none": GELU}


@triton.jit
def _factor(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """(F, dF/dx) where the activation is x F(x)."""
    if KIND == 0:
        s, rest = sigmoid(x, EXACT)
        return s, s * rest
    if KIND == 1:
        # 0.5 (1 + tanh z) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        square = x * x
        s, rest = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square), EXACT)
        # past 1e4 the slope is 0 on both sides, and the square must not become infinite: 0 * inf
        bounded = tl.minimum(square, 1e8)
        return s, s * rest * (1.5957691216057308 + 0.21406448696540377 * bounded)
    return normal(x, EXACT)


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


@triton.jit(do_not_specialize=["rows"])
def _gated(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    rows,
    width,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, start, row, col, mask = _tile(tl.program_id(0), rows, width, FLAT, ROWS, BLOCK)
    g = widen(tl.load(gate_ptr + first * gate_stride + start + (row * gate_stride + col), mask=mask))
    u = widen(tl.load(up_ptr + first * up_stride + start + (row * up_stride + col), mask=mask))
    factor, _ = _factor(g, KIND, y_ptr.dtype.element_ty == tl.float32)
    y = narrow(g * factor * u, y_ptr.dtype.element_ty)
    tl.store(y_ptr + first * width + start + (row * width + col), y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    grad_stride,
    gate_stride,
    up_stride,
    rows,
    width,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, start, row, col, mask = _tile(tl.program_id(0), rows, width, FLAT, ROWS, BLOCK)
    d = widen(tl.load(grad_ptr + first * grad_stride + start + (row * grad_stride + col), mask=mask))
    g = widen(tl.load(gate_ptr + first * gate_stride + start + (row * gate_stride + col), mask=mask))
    u = widen(tl.load(up_ptr + first * up_stride + start + (row * up_stride + col), mask=mask))
    factor, slope = _factor(g, KIND, grad_up_ptr.dtype.element_ty == tl.float32)
    place = first * width + start + (row * width + col)
    tl.store(grad_gate_ptr + place, narrow(d * u * (factor + g * slope), grad_gate_ptr.dtype.element_ty), mask=mask)
    # a large d times a large g would leave float32
    tl.store(grad_up_ptr + place, narrow(d * (g * factor), grad_up_ptr.dtype.element_ty), mask=mask)


# 8 elements a thread: one 16-byte load of each 16-bit input
TILE, WARPS = 1024, 4


def _launch(kernel: Any, inputs: list[Tensor], outputs: list[Tensor], kind: int, target: Target) -> None:
    if outputs[0].numel() == 0:
        return
    flat = all(t.is_contiguous() for t in inputs)
    if flat:
        rows, width, strides = 1, outputs[0].numel(), [0] * len(inputs)
    else:
        views = [collapse_rows(t) for t in inputs]
        inputs, rows, strides = [v[0] for v in views], views[0][1], [v[2] for v in views]
        width = outputs[0].shape[-1]
    tile = TILE * lanes(target) // 32
    block = min(tile, triton.next_power_of_2(width))
    together = min(tile // block, 64)
    if rows == 1 or together * max(strides) >= 2**31:
        together = 1
    grid = (triton.cdiv(rows, together) * triton.cdiv(width, block),)
    args = (*inputs, *outputs, *strides, rows, width, kind, flat, together, block)
    # LLVM fuses products into sums in packed AMD code and not in scalar code, so that a sample's bits would change with
    # its alignment (found on simulated gfx942); memory bounds these kernels, and fusing saves no time
    options = {"enable_fp_fusion": False} if target.vendor == "amd" else {}
    launch(kernel, grid, *args, device=outputs[0].device, num_warps=WARPS, **options)


def _forward(gate: Tensor, up: Tensor, kind: int, target: Target) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_gated, [gate, up], [y], kind, target)
    return y


def _backward(grad: Tensor, gate: Tensor, up: Tensor, kind: int, target: Target) -> tuple[Tensor, Tensor]:
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _launch(_gated_backward, [grad, gate, up], [grad_gate, grad_up], kind, target)
    return grad_gate, grad_up


def silu_mul(gate: Tensor, up: Tensor, target: Target) -> Tensor:
    return _forward(gate, up, SILU, target)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    return _backward(grad, gate, up, SILU, target)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str, target: Target) -> Tensor:
    return _forward(gate, up, _KINDS[approximate], target)


def gelu_mul_backward(
    grad: Tensor, gate: Tensor, up: Tensor, approximate: str, target: Target
) -> tuple[Tensor, Tensor]:
    return _backward(grad, gate, up, _KINDS[approximate], target)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Contiguous inputs, the halves of a fused projection (strided rows), and narrow strided rows."""

    def calls(rows: int, width: int, fused: bool) -> None:
        x = torch.empty(rows, width * (2 if fused else 1), dtype=getattr(torch, dtype), device="meta")
        gate, up = x.chunk(2, -1) if fused else (x, x)
        grad = torch.empty(rows, width, dtype=x.dtype, device="meta")
        silu_mul(gate, up, target)
        silu_mul_backward(grad, gate, up, target)
        for approximate in ("tanh", "none"):
            gelu_mul(gate, up, approximate, target)
            gelu_mul_backward(grad, gate, up, approximate, target)

    shapes = [
        (8192, 14336, False),
        (4096, 11008, True),
        (4096, 64, True),
        (61, 257, False),
        (61, 257, True),
        (1, 1, False),
    ]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
