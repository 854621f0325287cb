"""Small floating-point formats: bfloat16, xf32, and 8-bit floats of both flavours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ferryman.backends.simulator.numerics import Array, Assumptions, bits32, float32_of


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
