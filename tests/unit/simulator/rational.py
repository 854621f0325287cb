"""Exact binary floating point for the oracles: decode to rationals, compute, round once.

Nothing here touches NumPy or the machine's own floating point, so that an oracle cannot share a rounding with the
simulator that it judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt


@dataclass(frozen=True)
class Real:
    """A signed zero, a finite number, an infinity or NaN.

    `magnitude` is the absolute value; None stands for infinity. NaN is the one object `NAN`.
    """

    negative: bool
    magnitude: Fraction | None
    nan: bool = False

    @property
    def infinite(self) -> bool:
        return self.magnitude is None and not self.nan

    @property
    def zero(self) -> bool:
        return self.magnitude == 0

    @property
    def value(self) -> Fraction:
        """The signed rational; only of a finite number."""
        if self.magnitude is None:
            raise ValueError(f"{self} has no rational value")
        return -self.magnitude if self.negative else self.magnitude

    def __neg__(self) -> Real:
        return self if self.nan else Real(not self.negative, self.magnitude)

    def __abs__(self) -> Real:
        return self if self.nan else Real(False, self.magnitude)


NAN = Real(False, None, nan=True)


def real(value: int | float | Fraction) -> Real:
    value = Fraction(value)
    return Real(value < 0, abs(value))


def infinity(negative: bool = False) -> Real:
    return Real(negative, None)


@dataclass(frozen=True)
class Format:
    """A binary format. `special` says what the highest exponent holds.

    "ieee": infinities and NaNs; "fn": finite numbers, and NaN where every bit is set (OCP E4M3); "fnuz": finite numbers
    only, no negative zero, NaN is the sign bit alone (the float8 of CDNA3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    special: str = "ieee"
    bias_offset: int = 0

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1 + self.bias_offset

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def largest(self) -> int:
        """The bits of the largest finite number."""
        return {"ieee": self.infinity - 1, "fn": self.sign_bit - 2, "fnuz": self.sign_bit - 1}[self.special]

    @property
    def nan(self) -> int:
        quiet = self.infinity | 1 << (self.mantissa_bits - 1)
        return {"ieee": quiet, "fn": self.sign_bit - 1, "fnuz": self.sign_bit}[self.special]

    def is_nan(self, bits: int) -> bool:
        if self.special == "fnuz":
            return bits == self.sign_bit
        rest = bits & (self.sign_bit - 1)
        return rest == self.sign_bit - 1 if self.special == "fn" else rest > self.infinity

    def decode(self, bits: int) -> Real:
        if not 0 <= bits < 1 << self.bits:
            raise ValueError(f"{bits:#x} is not a {self.name}")
        if self.is_nan(bits):
            return NAN
        negative = bool(bits & self.sign_bit)
        rest = bits & (self.sign_bit - 1)
        if self.special == "ieee" and rest == self.infinity:
            return infinity(negative)
        exponent, mantissa = rest >> self.mantissa_bits, rest & ((1 << self.mantissa_bits) - 1)
        if exponent:
            mantissa |= 1 << self.mantissa_bits
        scale = max(exponent, 1) - self.bias - self.mantissa_bits
        return Real(negative, Fraction(mantissa) * Fraction(2) ** scale)

    def encode(self, number: Real, rounding: str = "nearest", flush: bool = False, saturate: bool = False) -> int:
        """Round to this format.

        rounding: nearest (ties to even), zero, up, down. flush: subnormal results become zero.
        """
        if number.nan:
            return self.nan
        sign = self.sign_bit if number.negative else 0
        if number.magnitude is None:
            return self._overflow(sign, "nearest", saturate)
        if number.magnitude == 0:
            return 0 if self.special == "fnuz" else sign
        lowest = 1 - self.bias
        scale = max(binary_exponent(number.magnitude), lowest) - self.mantissa_bits
        away = {"up": not number.negative, "down": number.negative}.get(rounding, False)
        units = round_integer(number.magnitude / Fraction(2) ** scale, "away" if away else rounding)
        if units >> (self.mantissa_bits + 1):
            units, scale = units >> 1, scale + 1
        if units >> self.mantissa_bits == 0 and flush:
            units = 0
        bits = ((scale + self.mantissa_bits + self.bias) << self.mantissa_bits) + units - (1 << self.mantissa_bits)
        if bits > self.largest:
            return self._overflow(sign, "nearest" if rounding == "nearest" or away else "zero", saturate)
        return 0 if self.special == "fnuz" and bits == 0 else sign | bits

    def _overflow(self, sign: int, rounding: str, saturate: bool) -> int:
        if rounding == "zero" or saturate:
            return sign | self.largest
        if self.special == "ieee":
            return sign | self.infinity
        return self.nan if self.special == "fnuz" else sign | self.nan


def binary_exponent(magnitude: Fraction) -> int:
    """The exponent e with 2**e <= magnitude < 2**(e + 1)."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if magnitude >= Fraction(2) ** guess else guess - 1


def round_integer(value: Fraction, rounding: str = "nearest") -> int:
    """A non-negative rational to an integer. rounding: nearest (ties to even), away; everything else cuts."""
    whole, rest = divmod(value.numerator, value.denominator)
    if rounding == "away":
        return whole + (rest > 0)
    if rounding != "nearest":
        return whole
    twice = 2 * rest
    return whole + (twice > value.denominator or (twice == value.denominator and whole & 1))


F64 = Format("f64", 11, 52)
F32 = Format("f32", 8, 23)
F16 = Format("f16", 5, 10)
BF16 = Format("bf16", 8, 7)
FP8_FNUZ = Format("fp8 fnuz", 4, 3, "fnuz", 1)
BF8_FNUZ = Format("bf8 fnuz", 5, 2, "fnuz", 1)
FP8_OCP = Format("fp8 ocp", 4, 3, "fn")
BF8_OCP = Format("bf8 ocp", 5, 2)


# -- arithmetic, exact; signs of zeros and special values as IEEE 754 states them


def add(a: Real, b: Real, rounding: str = "nearest") -> Real:
    if a.nan or b.nan or (a.infinite and b.infinite and a.negative != b.negative):
        return NAN
    if a.infinite or b.infinite:
        return a if a.infinite else b
    if a.zero and b.zero and a.negative == b.negative:
        return a
    total = a.value + b.value
    return real(total) if total else Real(rounding == "down", Fraction(0))


def sub(a: Real, b: Real) -> Real:
    return add(a, -b)


def mul(a: Real, b: Real) -> Real:
    if a.nan or b.nan or (a.infinite and b.zero) or (a.zero and b.infinite):
        return NAN
    negative = a.negative != b.negative
    if a.magnitude is None or b.magnitude is None:
        return infinity(negative)
    return Real(negative, a.magnitude * b.magnitude)


def fma(a: Real, b: Real, c: Real, rounding: str = "nearest") -> Real:
    return add(mul(a, b), c, rounding)


def div(a: Real, b: Real) -> Real:
    if a.nan or b.nan or (a.infinite and b.infinite) or (a.zero and b.zero):
        return NAN
    negative = a.negative != b.negative
    if a.magnitude is None or b.zero:
        return infinity(negative)
    return Real(negative, Fraction(0) if b.magnitude is None else a.magnitude / b.magnitude)


def sqrt(a: Real, places: int = 256) -> Real:
    """Truncated after `places` binary places of a scaled argument: far beyond every format here, so good to round."""
    if a.nan or a.zero:
        return a
    if a.negative:
        return NAN
    if a.magnitude is None:
        return a
    shift = places + (-binary_exponent(a.magnitude)) // 2
    scaled = a.magnitude * Fraction(4) ** shift
    root = isqrt(scaled.numerator // scaled.denominator)
    exact = root * root * scaled.denominator == scaled.numerator
    # One more half unit keeps an inexact root off every rounding boundary.
    return Real(False, (Fraction(root) + (0 if exact else Fraction(1, 2))) / Fraction(2) ** shift)


def less(a: Real, b: Real) -> bool:
    if a.nan or b.nan:
        return False
    if a.infinite or b.infinite:
        return _order(a) < _order(b)
    return a.value < b.value


def equal(a: Real, b: Real) -> bool:
    if a.nan or b.nan:
        return False
    if a.infinite or b.infinite:
        return _order(a) == _order(b)
    return a.value == b.value


def _order(a: Real) -> int:
    return 0 if not a.infinite else -1 if a.negative else 1


def floor(a: Real) -> Real:
    return _integral(a, lambda v: v.numerator // v.denominator)


def ceil(a: Real) -> Real:
    return _integral(a, lambda v: -(-v.numerator // v.denominator))


def trunc(a: Real) -> Real:
    return _integral(a, lambda v: abs(v).__floor__() * (-1 if v < 0 else 1))


def rndne(a: Real) -> Real:
    return _integral(a, lambda v: round_integer(abs(v)) * (-1 if v < 0 else 1))


def _integral(a: Real, to_integer) -> Real:
    if a.nan or a.infinite:
        return a
    return Real(a.negative, Fraction(abs(to_integer(a.value))))


def scale(a: Real, exponent: int) -> Real:
    """a * 2**exponent."""
    return a if a.magnitude is None or a.nan else Real(a.negative, a.magnitude * Fraction(2) ** exponent)
