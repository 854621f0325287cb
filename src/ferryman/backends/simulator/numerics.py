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
_TINY = 2.0**-126


@dataclass(frozen=True)
class Assumptions:
    """Arithmetic that AMD does not document. The defaults are what public sources make most likely.

    mfma_order: how a matrix instruction adds its products to the accumulator. "exact": all of them and the accumulator
    at once, rounded once. "sequential": one product after another, each sum rounded. "pairs": products of each four
    consecutive k exactly, each such sum added and rounded. No public source states it: verdicts must hold under all.
    mfma_subnormals: "kept", or "flushed" in 16-bit inputs and results (CDNA2 flushes them; the CDNA3 ISA says that
    they are kept).
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
    if suspect.any() or (np.abs(total) < _TINY).any():
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
    hard = finite & (~np.isfinite(product) | ((size < 2.0**-900) & (product != 0)) | (result == 0) | (np.abs(a) > 2.0**990)
                     | (np.abs(b) > 2.0**990) | ((a != 0) & (b != 0) & (product == 0)))  # fmt: skip
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
    near = np.asarray(x, np.float64).astype(np.float32)
    if mode == NEAREST:
        return near
    wide = near.astype(np.float64)
    down, up = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    if mode == UP:
        return np.where(wide < x, up, near)
    if mode == DOWN:
        return np.where(wide > x, down, near)
    return np.where((wide > x) & (x > 0), down, np.where((wide < x) & (x < 0), up, near))


def directed16(x: Array, mode: int) -> Array:
    """float32 or float64 to float16 in a rounding mode."""
    near = np.asarray(x).astype(np.float16)
    if mode == NEAREST:
        return near
    wide = near.astype(np.float64)
    down, up = np.nextafter(near, np.float16(-np.inf)), np.nextafter(near, np.float16(np.inf))
    if mode == UP:
        return np.where(wide < x, up, near)
    if mode == DOWN:
        return np.where(wide > x, down, near)
    return np.where((wide > x) & (x > 0), down, np.where((wide < x) & (x < 0), up, near))


def flush32(x: Array) -> Array:
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < np.float32(_TINY), np.copysign(np.float32(0), x), x)


def flush16(x: Array) -> Array:
    return np.where(np.abs(x) < np.float16(2.0**-14), np.copysign(np.float16(0), x), x)


_QUIET_BITS = {2: (np.uint16, 1 << 9), 4: (np.uint32, 1 << 22), 8: (np.uint64, 1 << 51)}


def _quieted(found: Array, a: Array, b: Array) -> Array:
    """``found``, or NaN where an operand is a signalling one (the IEEE bit of MODE is set in compiled kernels)."""
    if not (np.any(a != a) or np.any(b != b)):
        return found
    signals = np.zeros(np.shape(found), bool)
    for x in (np.asarray(a), np.asarray(b)):
        word, quiet = _QUIET_BITS[x.dtype.itemsize]
        signals = signals | (np.isnan(x) & ((x.view(word) & word(quiet)) == 0))
    return np.where(signals, found.dtype.type(np.nan), found)


def maximum(a: Array, b: Array) -> Array:
    """IEEE 754-2008 maxNum: a number beats a quiet NaN, a signalling one gives NaN; +0 is above -0."""
    found = _quieted(np.fmax(a, b), a, b)
    zero = found == 0
    if zero.any():
        found = np.where(zero & (np.signbit(a) != np.signbit(b)) & (a == b), np.abs(found), found)
    return found


def minimum(a: Array, b: Array) -> Array:
    found = _quieted(np.fmin(a, b), a, b)
    zero = found == 0
    if zero.any():
        found = np.where(zero & (np.signbit(a) != np.signbit(b)) & (a == b), -np.abs(found), found)
    return found


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


# --------------------------------------------------------------------------------------------------- division


def _exponent(x: Array) -> Array:
    """The biased exponent field of float32."""
    return (bits32(x) >> np.uint32(23)) & np.uint32(0xFF)


def div_scale32(s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """(scaled operand, whether the quotient must be scaled back): s1 is the denominator, s2 the numerator, s0 the one of
    them that is asked for. CDNA3 ISA, V_DIV_SCALE_F32."""
    s0, s1, s2 = (np.asarray(x, np.float32) for x in np.broadcast_arrays(s0, s1, s2))
    e1, e2 = _exponent(s1).astype(np.int32), _exponent(s2).astype(np.int32)
    big, small = np.float32(2.0**64), np.float32(2.0**-64)
    zero = (s1 == 0) | (s2 == 0)
    subnormal = (e1 == 0) & (s1 != 0)
    with np.errstate(all="ignore"):
        inverse_tiny = np.abs(1.0 / s1.astype(np.float64)) < _TINY
        quotient_tiny = np.abs(s2.astype(np.float64) / s1.astype(np.float64)) < _TINY
    far = ~zero & (e2 - e1 >= 96)
    both = ~zero & ~far & ~subnormal & inverse_tiny & quotient_tiny
    tiny_inverse = ~zero & ~far & ~subnormal & inverse_tiny & ~quotient_tiny
    tiny_quotient = ~zero & ~far & ~subnormal & ~inverse_tiny & quotient_tiny
    low = ~(zero | far | subnormal | inverse_tiny | quotient_tiny) & (e2 <= 23)
    is_denominator, is_numerator = bits32(s0) == bits32(s1), bits32(s0) == bits32(s2)
    result = s0.copy()
    result = np.where(far & is_denominator, s0 * big, result)
    result = np.where(~zero & ~far & subnormal, s0 * big, result)
    # The manual's text says 2**64 here too, with which every such denominator (above 2**126) would become infinite.
    result = np.where(both & is_denominator, s0 * small, result)
    result = np.where(tiny_inverse, s0 * small, result)
    result = np.where(tiny_quotient & is_numerator, s0 * big, result)
    result = np.where(low, s0 * big, result)
    result = np.where(zero, QUIET, result)
    return result.astype(np.float32), far | both | tiny_quotient


def div_fmas32(s0: Array, s1: Array, s2: Array, scaled: Array) -> Array:
    """a * b + c, and where VCC says so times 2**32 (2**64 back and 2**-32 ahead are the two directions of scaling)."""
    plain = fma32(s0, s1, s2)
    if not np.any(scaled):
        return plain
    a, b, c = (np.asarray(x, np.float64) for x in (s0, s1, s2))
    up = _exponent(np.broadcast_to(np.asarray(s2, np.float32), plain.shape)) > 127
    total = odd_sum(np.broadcast_to(a * b, plain.shape), np.broadcast_to(c, plain.shape))
    factor = np.where(up, 2.0**64, 2.0**-64)
    return np.where(scaled, (total * factor).astype(np.float32), plain)


def div_fixup32(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The special cases of a division. CDNA3 ISA, V_DIV_FIXUP_F32."""
    q, d, n = (np.asarray(x, np.float32) for x in np.broadcast_arrays(quotient, denominator, numerator))
    negative = np.signbit(d) != np.signbit(n)
    signed = np.where(negative, -np.abs(q), np.abs(q))
    infinite = np.where(negative, np.float32(-np.inf), np.float32(np.inf))
    zero = np.where(negative, np.float32(-0.0), np.float32(0.0))
    e_d, e_n = _exponent(d).astype(np.int32), _exponent(n).astype(np.int32)
    # the steps of a quotient that overflows end in inf - inf
    result = np.where(np.isnan(q), infinite, signed)
    result = np.where(e_d == 255, zero, result)
    result = np.where(e_n - e_d < -150, zero, result)
    result = np.where((np.isinf(n)) | (d == 0), infinite, result)
    result = np.where(np.isinf(d) | (n == 0), zero, result)
    result = np.where((np.isinf(d) & np.isinf(n)) | ((d == 0) & (n == 0)), QUIET, result)
    result = np.where(np.isnan(d), d, result)
    return np.where(np.isnan(n), n, result).astype(np.float32)


# ---------------------------------------------------------------------------------------------- small formats


def bf16_to_f32(bits: Array) -> Array:
    return float32_of(np.asarray(bits, np.uint32) << np.uint32(16))


def f32_to_bf16(x: Array) -> Array:
    """To nearest even; a NaN stays a NaN (v_cvt_pk_bf16_f32)."""
    bits = bits32(x)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint32)


def xf32(x: Array, assumptions: Assumptions) -> Array:
    """float32 with 10 bits of mantissa, as v_mfma_*_xf32 reads its inputs."""
    bits = bits32(x)
    if assumptions.xf32 == "nearest":
        finite = np.isfinite(x)
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        bits = np.where(finite, rounded, bits)
    return float32_of(bits & np.uint32(0xFFFFE000))


@dataclass(frozen=True)
class Float8:
    """An 8-bit float. ``fnuz``: one zero and one NaN (0x80), no infinity (CDNA3); else OCP."""

    exponent: int
    mantissa: int
    bias: int
    fnuz: bool

    def table(self) -> Array:
        """The value of each of the 256 codes, in float32."""
        values = np.zeros(256, np.float64)
        top = (1 << self.exponent) - 1
        for code in range(256):
            sign, e, m = code >> 7, (code >> self.mantissa) & top, code & ((1 << self.mantissa) - 1)
            scale = 2.0 ** (max(e, 1) - self.bias - self.mantissa)
            value = (m + (0 if e == 0 else 1 << self.mantissa)) * scale
            if self.fnuz and code == 0x80:
                value = float("nan")
            elif not self.fnuz and e == top:
                if self.exponent == 5:
                    value = float("inf") if m == 0 else float("nan")
                elif m == (1 << self.mantissa) - 1:
                    value = float("nan")
            values[code] = -value if sign else value
        return values.astype(np.float32)

    @property
    def largest(self) -> float:
        return float(np.nanmax(np.where(np.isfinite(self.table()), self.table(), 0)))


FP8_FNUZ, BF8_FNUZ = Float8(4, 3, 8, True), Float8(5, 2, 16, True)
FP8_OCP, BF8_OCP = Float8(4, 3, 7, False), Float8(5, 2, 15, False)
_TABLES: dict[Float8, Array] = {}


def float8_to_f32(codes: Array, kind: Float8) -> Array:
    if kind not in _TABLES:
        _TABLES[kind] = kind.table()
    return _TABLES[kind][np.asarray(codes, np.uint32) & np.uint32(0xFF)]


def f32_to_float8(x: Array, kind: Float8, saturate: bool = False) -> Array:
    """To nearest even. Out of range: NaN (fnuz, and OCP e4m3) or infinity (OCP e5m2), unless it saturates."""
    x = np.asarray(x, np.float32)
    magnitude = np.abs(x).astype(np.float64)
    lowest = 1 - kind.bias
    with np.errstate(all="ignore"):
        exponent = np.where(magnitude > 0, np.floor(np.log2(np.where(magnitude > 0, magnitude, 1))), lowest)
    exponent = np.maximum(np.where(np.isfinite(exponent), exponent, lowest), lowest)
    step = np.exp2(exponent - kind.mantissa)
    units = np.rint(np.where(np.isfinite(magnitude), magnitude, 0) / step)
    carried = units >= 2 ** (kind.mantissa + 1)
    exponent, units = exponent + carried, np.where(carried, units / 2, units)
    value = units * np.exp2(exponent - kind.mantissa)
    normal = units >= 2**kind.mantissa
    field = np.where(normal, exponent + kind.bias, 0).astype(np.int64)
    code = (field << kind.mantissa) | (units.astype(np.int64) & ((1 << kind.mantissa) - 1))
    largest = kind.largest
    over = (value > largest) | np.isinf(x)
    top = (((1 << kind.exponent) - 1) << kind.mantissa) | ((1 << kind.mantissa) - 1)
    if kind.fnuz:
        big, nan = top, 0x80
    elif kind.exponent == 5:
        big, nan = top - (1 << kind.mantissa), 0x7F
    else:
        big, nan = top - 1, 0x7F
    infinite = 0x7C if kind.exponent == 5 and not kind.fnuz else nan
    code = np.where(over, big if saturate else infinite, code)
    code = np.where(np.signbit(x) & ~(kind.fnuz & ((code == 0) | (code == 0x80))), code | 0x80, code)
    code = np.where(np.isnan(x), nan, code)
    return code.astype(np.uint32)
