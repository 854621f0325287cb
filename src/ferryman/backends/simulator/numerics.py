"""Arithmetic as the ISA defines it, on NumPy arrays: fused multiply-add, rounding, small formats, estimates.

What AMD does not document is a named assumption (`Assumptions`), never a silent choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

Array = Any  # an ndarray or a NumPy scalar, which broadcasts
SIGN, QUIET = np.uint32(0x80000000), np.float32("nan")
NEAREST, UP, DOWN, ZERO = 0, 1, 2, 3  # the MODE register's rounding modes
TINY = 2.0**-126


@dataclass(frozen=True)
class Assumptions:
    """Arithmetic that AMD does not document. The defaults are what public sources make most likely.

    mfma_order: how a matrix instruction adds its products to the accumulator. "exact": all of them and the accumulator
    at once, rounded once. "sequential": one product after another, each sum rounded. "pairs": products of each four
    consecutive k exactly, each such sum added and rounded. No public source states it: verdicts must hold under all.
    mfma_subnormals: "kept", or "flushed" in 16-bit inputs (CDNA2 flushes them; the CDNA3 ISA says that they are kept).
    xf32: how inputs lose their low 13 bits: "truncate", "nearest". The MI300 porting notes report a downward bias.
    estimates: v_rcp, v_rsq, v_sqrt, v_exp, v_log, v_sin, v_cos in float32, which the ISA gives 1 ulp: "nearest", or one
    ulp "above" or "below" the nearest, in magnitude, where the result is not exact.
    """

    mfma_order: Literal["exact", "sequential", "pairs"] = "exact"
    mfma_subnormals: Literal["kept", "flushed"] = "kept"
    xf32: Literal["truncate", "nearest"] = "truncate"
    estimates: Literal["nearest", "above", "below"] = "nearest"


@dataclass(frozen=True)
class Mode:
    """The MODE register: rounding and denormals of float32, and of float16 and float64. ``ieee``: signalling NaNs are
    quieted by min and max."""

    round32: int = NEAREST
    round64: int = NEAREST
    denormals32: int = 3
    denormals64: int = 3
    ieee: bool = True

    def changed(self, mask: int, bits: int) -> Mode:
        """With bits of the register replaced: 0-1 rounding of float32, 2-3 of float16 and float64, 4-7 denormals."""
        now = self.round32 | self.round64 << 2 | self.denormals32 << 4 | self.denormals64 << 6
        new = (now & ~mask) | bits
        return Mode(new & 3, (new >> 2) & 3, (new >> 4) & 3, (new >> 6) & 3, self.ieee)


def bits32(x: Array) -> Array:
    return np.asarray(x, np.float32).view(np.uint32)


def float32_of(bits: Array) -> Array:
    return np.asarray(bits, np.uint32).view(np.float32)


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd where it is not exact: a second rounding to fewer bits is then right."""
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    inexact = (error != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    even = (total.view(np.int64) & 1) == 0
    return np.where(inexact & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding. The product of two float32 is exact in float64; the sum is rounded there first, and
    only a sum that lands halfway between two float32, or below their normal range, can come out wrong by that."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    suspect = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if suspect.any() or (np.abs(total) < TINY).any():
        total = odd_sum(product, np.broadcast_to(np.asarray(c, np.float64), product.shape))
    return total.astype(np.float32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    return odd_sum(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)).astype(np.float16)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """One rounding: the product's low half by Dekker's splitting, then sums rounded to odd; in rationals where that
    overflows, underflows, or gives zero."""
    a, b, c = np.broadcast_arrays(np.asarray(a, np.float64), b, c)
    product = a * b
    split = 134217729.0
    ah, bh = a * split - (a * split - a), b * split - (b * split - b)
    al, bl = a - ah, b - bh
    low = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    low = np.where(np.isfinite(product) & np.isfinite(low), low, 0.0)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    plain = ~np.isfinite(total)
    # total + (error + low): the inner sum to odd, so that the outer one rounds right
    result = np.where(plain, total, total + odd_sum(np.where(plain, 0.0, error), np.where(plain, 0.0, low)))
    finite = np.isfinite(a) & np.isfinite(b)
    size = np.abs(product)
    extreme = (np.abs(a) > 2.0**990) | (np.abs(b) > 2.0**990) | ((size < 2.0**-900) & (a != 0) & (b != 0))
    hard = finite & (extreme | ~np.isfinite(product) | (result == 0))
    for index in zip(*np.nonzero(hard), strict=True):
        result[index] = _exact_fma(float(a[index]), float(b[index]), float(c[index]))
    return result


def _exact_fma(a: float, b: float, c: float) -> float:
    if not math.isfinite(c):
        return c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        negative = math.copysign(1, a) * math.copysign(1, b) < 0
        return -0.0 if negative and math.copysign(1, c) < 0 and (a == 0 or b == 0) else 0.0
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def directed32(x: Array, mode: int) -> Array:
    """float64 to float32 in a rounding mode; ``x`` exact, or rounded to odd."""
    return _directed(np.asarray(x, np.float64), mode, np.float32)


def directed16(x: Array, mode: int) -> Array:
    """float32 or float64 to float16 in a rounding mode."""
    return _directed(np.asarray(x), mode, np.float16)


def _directed(x: Array, mode: int, kind: type[np.floating[Any]]) -> Array:
    near = x.astype(kind)
    if mode == NEAREST:
        return near
    wide = near.astype(np.float64)
    down, up = np.nextafter(near, kind(-np.inf)), np.nextafter(near, kind(np.inf))
    if mode == UP:
        return np.where(wide < x, up, near)
    if mode == DOWN:
        return np.where(wide > x, down, near)
    return np.where((wide > x) & (x > 0), down, np.where((wide < x) & (x < 0), up, near))


def pair16(low: Array, high: Array) -> Array:
    """Two 16-bit values in one word."""
    low, high = (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) for x in np.broadcast_arrays(low, high))
    return low | (high << np.uint32(16))


def flush32(x: Array) -> Array:
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < np.float32(TINY), np.copysign(np.float32(0), x), x)


def flush16(x: Array) -> Array:
    return np.where(np.abs(x) < np.float16(2.0**-14), np.copysign(np.float16(0), x), x)


_QUIET_BITS = {2: (np.uint16, 1 << 9), 4: (np.uint32, 1 << 22), 8: (np.uint64, 1 << 51)}


def _quieted(extremum: Array, a: Array, b: Array) -> Array:
    """``extremum``, or NaN where an operand is a signalling one (the IEEE bit of MODE is set in compiled kernels)."""
    if not (np.any(a != a) or np.any(b != b)):
        return extremum
    signals = np.zeros(np.shape(extremum), bool)
    for x in (np.asarray(a), np.asarray(b)):
        word, quiet = _QUIET_BITS[x.dtype.itemsize]
        signals = signals | (np.isnan(x) & ((x.view(word) & word(quiet)) == 0))
    return np.where(signals, extremum.dtype.type(np.nan), extremum)


def maximum(a: Array, b: Array) -> Array:
    """IEEE 754-2008 maxNum: a number beats a quiet NaN, a signalling one gives NaN; +0 is above -0."""
    larger = _quieted(np.fmax(a, b), a, b)
    zero = larger == 0
    if zero.any():
        larger = np.where(zero & (np.signbit(a) != np.signbit(b)) & (a == b), np.abs(larger), larger)
    return larger


def minimum(a: Array, b: Array) -> Array:
    smaller = _quieted(np.fmin(a, b), a, b)
    zero = smaller == 0
    if zero.any():
        smaller = np.where(zero & (np.signbit(a) != np.signbit(b)) & (a == b), -np.abs(smaller), smaller)
    return smaller


def maximum3(a: Array, b: Array, c: Array) -> Array:
    return maximum(maximum(a, b), c)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    return minimum(minimum(a, b), c)


def median3(a: Array, b: Array, c: Array) -> Array:
    """The middle of three; with a NaN, the smallest of the three (CDNA3 ISA, V_MED3_F32)."""
    top = maximum3(a, b, c)
    middle = np.where(top == a, maximum(b, c), np.where(top == b, maximum(a, c), maximum(a, b)))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum3(a, b, c), middle) if np.any(nan) else middle


# -------------------------------------------------------------------------------------------------- estimates


def estimate(function: Callable[[Array], Array], assumptions: Assumptions) -> Callable[[Array], Array]:
    """A float32 instruction that is right to 1 ulp: subnormals are flushed on both sides (LLVM's AMDGPU backend scales
    its operands because of that)."""

    def evaluate(x: Array) -> Array:
        x = flush32(np.asarray(x, np.float32))
        exact = function(x.astype(np.float64))
        near = exact.astype(np.float32)
        if assumptions.estimates != "nearest":
            moved = np.nextafter(near, np.float32(0) if assumptions.estimates == "below" else np.copysign(np.inf, near))
            near = np.where((near != exact) & np.isfinite(near), moved.astype(np.float32), near)
        return flush32(near)

    return evaluate


def reciprocal(x: Array) -> Array:
    return 1.0 / x


def reciprocal_root(x: Array) -> Array:
    return 1.0 / np.sqrt(x)


def turn_sine(x: Array) -> Array:
    """v_sin_f32 takes turns, in [-256, 256]; beyond it gives 0."""
    return np.where(np.abs(x) <= 256, np.sin(2 * np.pi * np.fmod(x, 1.0)), np.where(np.isfinite(x), 0.0, np.nan))


def turn_cosine(x: Array) -> Array:
    return np.where(np.abs(x) <= 256, np.cos(2 * np.pi * np.fmod(x, 1.0)), np.where(np.isfinite(x), 1.0, np.nan))
