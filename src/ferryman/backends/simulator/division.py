"""The three instructions that a float32 division is made of."""

from __future__ import annotations

import numpy as np

from ferryman.backends.simulator.numerics import QUIET, TINY, Array, bits32, fma32, odd_sum


def _exponent(x: Array) -> Array:
    """The biased exponent field of float32."""
    return (bits32(x) >> np.uint32(23)) & np.uint32(0xFF)


def div_scale32(s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """(scaled operand, whether the quotient must be scaled back): s1 is the denominator, s2 the numerator, s0 the one
    of them that is asked for. CDNA3 ISA, V_DIV_SCALE_F32."""
    s0, s1, s2 = (np.asarray(x, np.float32) for x in np.broadcast_arrays(s0, s1, s2))
    e1, e2 = _exponent(s1).astype(np.int32), _exponent(s2).astype(np.int32)
    big, small = np.float32(2.0**64), np.float32(2.0**-64)
    zero = (s1 == 0) | (s2 == 0)
    subnormal = (e1 == 0) & (s1 != 0)
    with np.errstate(all="ignore"):
        inverse_tiny = np.abs(1.0 / s1.astype(np.float64)) < TINY
        quotient_tiny = np.abs(s2.astype(np.float64) / s1.astype(np.float64)) < TINY
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
