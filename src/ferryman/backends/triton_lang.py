"""Device functions that Ferryman's Triton kernels share: rounding, and portable mathematics with known errors.

Nothing here is a vendor's library function: one source, the same digits to within the rounding of exp2 and division on
every target. Errors are in float32 ulp, measured by tests/unit/test_triton_rowops.py against float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton import interpreting

INTERPRETED: tl.constexpr = tl.constexpr(interpreting())
"""Whether kernels are interpreted here. Then bf16 ``tl.dot`` is silently wrong: kernels with one refuse bf16."""


@triton.jit
def widen(x):
    """``x`` in float32. The interpreter loses bf16 subnormals, so there the bits are moved by hand."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to ``dtype``, to nearest even. The interpreter truncates bf16: there it is done by hand."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def exp(x, EXACT: tl.constexpr = True):
    """exp2's error plus 0.5 ulp over the whole range. Not EXACT: exp2(x * log2 e) alone, 64 ulp more at -87, which a
    16-bit result cannot show."""
    if INTERPRETED or not EXACT:
        return tl.exp(x)
    product = x * 1.4426950216293335
    # the product's own rounding error, and the part of log2(e) that float32 leaves out
    rest = tl.fma(x, 1.4426950216293335, -product) + x * 1.9259629911266175e-08
    rest = tl.where(tl.abs(product) < 128.0, rest, 0.0)  # an infinite power times a negative rest would be -inf
    power = tl.exp2(product)
    return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def exp_to_infinity(x):
    """`exp` where x may be beyond 88.7, or infinite: an infinite power times a rest of 0 is NaN there."""
    return tl.where(x * 1.4426950216293335 >= 128.0, float("inf"), exp(x))


@triton.jit
def reciprocal(x):
    """1 / x for x in [1, 2^100], within 1 ulp: a fast division and one Newton step. An IEEE division branches for every
    element: with it and the exact exp, silu_mul took 57 instructions an element on sm_90, with neither 34."""
    r = 1.0 / x
    return tl.fma(r, tl.fma(-x, r, 1.0), r)


@triton.jit
def sigmoid(x, EXACT: tl.constexpr = True):
    """(sigmoid(x), 1 - sigmoid(x)), each with small *relative* error for any x: no cancellation, no overflow."""
    e = exp(-tl.abs(x), EXACT)
    large = reciprocal(1.0 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def reciprocal_of_root(x):
    """1 / x for x in [1, 2^100], within 1 ulp: half the instructions of `reciprocal`, whose division tests its range.
    The square of 1 / sqrt(x), and a Newton step."""
    r = tl.rsqrt(x)
    r = r * r
    return tl.fma(r, tl.fma(-x, r, 1.0), r)


@triton.jit
def sigmoid_of_half(x):
    """`sigmoid` for a result of 16 bits: an exponential below 2^-126 is 0."""
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    large = reciprocal_of_root(1.0 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def expm1_below(x, EXACT: tl.constexpr = True):
    """exp(x) - 1 for x <= 0, within 4 ulp: a polynomial above -0.5 (our fit of degree 5, 1.2e-9), `exp` below."""
    p = 1.124026020988822e-03
    p = p * x + 8.190391585230827e-03
    p = p * x + 4.163041338324547e-02
    p = p * x + 1.6666248440742493e-01
    p = p * x + 4.999998211860657e-01
    p = p * x + 1.0
    return tl.where(x > -0.5, x * p, exp(x, EXACT) - 1.0)


@triton.jit
def tanh(x):
    """3 ulp, small arguments included: an odd polynomial below 0.625 (our fit, 0.07 ulp), exponentials above."""
    square = x * x
    p = -5.717044696211815e-03
    p = p * square + 2.0650586113333702e-02
    p = p * square - 5.374349653720856e-02
    p = p * square + 1.3331490755081177e-01
    p = p * square - 3.333328366279602e-01
    near = x + x * (square * p)
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # e <= 0.29 here: exp2's argument needs no second word
    far = (1.0 - e) * reciprocal_of_root(1.0 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def softplus(z):
    """max(z, 0) + log1p(exp(-abs(z))), by the odd series of the logarithm: no digit of a small result is lost."""
    e = exp(-tl.abs(z))
    r = e * reciprocal(2.0 + e)
    square = r * r
    p = 0.058823529411764705
    p = p * square + 0.06666666666666667
    p = p * square + 0.07692307692307693
    p = p * square + 0.09090909090909091
    p = p * square + 0.1111111111111111
    p = p * square + 0.14285714285714285
    p = p * square + 0.2
    p = p * square + 0.3333333333333333
    return tl.where(z > 0, z, 0.0) + 2.0 * (r + r * (square * p))


@triton.jit
def normal(x, EXACT: tl.constexpr = True):
    """(cumulative distribution, density) of the standard normal at x, with small *relative* error in both tails.

    The tail is exp(-x^2/2) q(t), t = 1 / (1 + 0.35 abs(x)); q is our own degree-10 fit of erfcx, relative error 3e-9 on
    0..14. 1 + erf(x / sqrt 2) would lose every digit by x = -5.
    """
    a = tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL)  # exp(-200) is 0 already, and 20^2 is exact
    square = a * a
    lost = tl.fma(a, a, -square)
    bell = exp(-0.5 * square, EXACT) * (1.0 - 0.5 * lost)
    t = reciprocal(1.0 + 0.35 * a)
    q = 0.01836301200091839
    q = q * t - 0.10105621069669724
    q = q * t + 0.2124243825674057
    q = q * t - 0.18512718379497528
    q = q * t + 0.026084674522280693
    q = q * t + 0.0014171033399179578
    q = q * t + 0.035078298300504684
    q = q * t + 0.0916176289319992
    q = q * t + 0.12187554687261581
    q = q * t + 0.1396956890821457
    q = q * t + 0.13962705433368683
    tail = bell * (q * t)
    return tl.where(x < 0, tail, 1.0 - tail), bell * 0.3989422804014327


@triton.jit
def normal_of_half(x):
    """`normal` for a result of 16 bits: the tail's fit has degree 5, error 1.5e-7 near 0 and 1.3e-4 of a small tail."""
    a = tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL)
    bell = tl.exp2(a * a * -0.7213475204444817)
    t = reciprocal_of_root(1.0 + 0.3 * a)
    q = -0.07620247453451157
    q = q * t + 0.21067656576633453
    q = q * t - 0.006939725950360298
    q = q * t + 0.13618722558021545
    q = q * t + 0.11653133481740952
    q = q * t + 0.11974691599607468
    tail = bell * (q * t)
    return tl.where(x < 0, tail, 1.0 - tail), bell * 0.3989422804014327


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), correctly rounded twice; ``tl.rsqrt`` is approximate on both vendors, by different amounts."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))
