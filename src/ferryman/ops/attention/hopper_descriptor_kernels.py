"""TMA descriptors of attention on Hopper: which tensors one can stand for, and how a kernel builds it, in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


@gluon.jit
def described(
    ptr,
    batch,
    heads,
    length,
    width,
    stride_b,
    stride_h,
    stride_m,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    layout: gl.constexpr,
):
    """A (batch, heads, length, width) tensor, of which a copy takes ``ROWS`` rows and COLUMNS columns of one head; of
    columns beyond ``width`` it reads zeros, and writes nothing."""
    shape = [batch, heads, length, width]
    return tma.make_tensor_descriptor(ptr, shape, [stride_b, stride_h, stride_m, 1], [1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def described_numbers(ptr, length, COUNT: gl.constexpr, layout: gl.constexpr):
    """``length`` numbers side by side, of which a copy takes ``COUNT``."""
    return tma.make_tensor_descriptor(ptr, [length], [1], [COUNT], layout)


def strides(x: torch.Tensor) -> tuple[int, ...]:
    """Over (batch, head, row); those of dimensions of one element are as good as any, and arbitrary."""
    return tuple(x.shape[-1] if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False))


def describable(x: torch.Tensor, over: tuple[int, ...]) -> bool:
    """Whether a descriptor can stand for ``x``, ``over`` its `strides`: 16-byte aligned rows, none of them expanded."""
    step = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return aligned and all(s > 0 and s % step == 0 and s < 2**39 for s in over)


def operand(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x``, or a copy where a descriptor cannot stand for it, and its `strides`."""
    over = strides(x)
    if describable(x, over):
        return x, over
    x = x.clone(memory_format=torch.contiguous_format)
    return x, strides(x)
