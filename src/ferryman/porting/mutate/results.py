"""Rules over the values that a kernel writes: scales, roundings, special values, elements, stale memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.porting.mutate.rule import written


@written("scale")
def a_thousandth_more(y: Tensor) -> Tensor:
    """Every result times 1.001."""
    return (y.float() * 1.001).to(y.dtype)


@written("scale")
def a_hundredth_more(y: Tensor) -> Tensor:
    """Every result times 1.01."""
    return (y.float() * 1.01).to(y.dtype)


@written("scale")
def two_hundredths_more(y: Tensor) -> Tensor:
    """Every result times 1.02."""
    return (y.float() * 1.02).to(y.dtype)


@written("scale")
def twice(y: Tensor) -> Tensor:
    """Every result doubled: fn read as fnuz."""
    return y * 2


@written("scale")
def other_largest(y: Tensor) -> Tensor:
    """Every result times 448 / 240: the scale of the other 8-bit format."""
    return (y.float() * (448 / 240)).to(y.dtype)


@written("rounding undeclared")
def through_8_bits(y: Tensor) -> Tensor:
    """Results kept in e4m3 on the way."""
    return y.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(y.dtype)


@written("saturation")
def saturated_at_448(y: Tensor) -> Tensor:
    """Results beyond 448 become 448."""
    return y.clamp(-448, 448)


@written("special values")
def nan_becomes_zero(y: Tensor) -> Tensor:
    """NaN is hidden."""
    return torch.where(y.isnan(), 0.0, y).to(y.dtype)


@written("special values")
def nan_injected(y: Tensor) -> Tensor:
    """One NaN."""
    flat = y.reshape(-1).clone()
    flat[flat.numel() // 2] = torch.nan
    return flat.reshape(y.shape)


@written("special values")
def infinity_clamped(y: Tensor) -> Tensor:
    """Infinities become the largest number."""
    most = torch.finfo(y.dtype).max
    return torch.where(y.isinf(), y.sign() * most, y).to(y.dtype)


@written("special values")
def nan_for_a_negative_zero(y: Tensor) -> Tensor:
    """Code 0x80, -0 in e4m3fn, is left for fnuz, where it is NaN: a negative number that rounds to 0 there."""
    small = (y.float().clamp(-448, 448).to(torch.float8_e4m3fn).float() == 0) & torch.signbit(y)
    return torch.where(small, torch.nan, y).to(y.dtype)


@written("elements")
def zero_row(y: Tensor) -> Tensor:
    """One row is zero."""
    rows = y.reshape(-1, y.shape[-1]) if y.dim() else y.reshape(1, 1)
    rows[rows.shape[0] // 2] = 0
    return rows.reshape(y.shape)


@written("elements")
def last_rows_swapped(y: Tensor) -> Tensor:
    """Two rows are swapped where their number is no multiple of 16."""
    rows = y.reshape(-1, y.shape[-1]).clone() if y.dim() else y.reshape(1, 1)
    if rows.shape[0] % 16 and rows.shape[0] > 1:
        rows[-2:] = rows[-2:].flip(0)
    return rows.reshape(y.shape)


@written("elements")
def columns_rotated(y: Tensor) -> Tensor:
    """Every column is its neighbour's."""
    return y.roll(1, -1) if y.dim() else y


@written("stale output")
def last_column_stale(y: Tensor) -> Tensor:
    """The last column holds what memory held."""
    if y.dim():
        y[..., -1] = torch.empty_like(y[..., -1]).fill_(_old(y))
    return y


@written("stale output")
def last_element_stale(y: Tensor) -> Tensor:
    """The last element holds what memory held."""
    flat = y.reshape(-1).clone()
    flat[-1] = _old(y)
    return flat.reshape(y.shape)


@written("stale output")
def first_row_stale(y: Tensor) -> Tensor:
    """The first row holds what memory held."""
    rows = y.reshape(-1, y.shape[-1]).clone() if y.dim() else y.reshape(1, 1).clone()
    rows[0] = _old(y)
    return rows.reshape(y.shape)


def _old(y: Tensor) -> float:
    return float(torch.empty(1, dtype=y.dtype).fill_(7.5))
