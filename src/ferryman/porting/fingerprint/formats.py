"""The number formats that matrix units read, and the exact values that the probes build in them.

A probe states *products*; a route factors each into two numbers of its format, so that the exponent range is twice the
format's: e4m3 spans 2^-18 to 2^16, which is what makes a 34-bit window possible in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """One input format of a matrix unit, and how the probes use its range.

    bits: significand bits, the implicit one included. least, most: exponents of the smallest subnormal and of the
    largest power of two. normal: exponent of the smallest normal number. absorber, unit: exponents of the products that
    recover the order of a sum; narrow: a second pair, for accumulators that overflow on the first. leading: exponent
    of the product that dominates a sum when widths are probed; floor: of the smallest normal product that may lie below
    it and still be seen in the result's dtype. partner: the format of the right factor, where it is another one.
    """

    key: str
    name: str
    dtype: torch.dtype
    bits: int
    least: int
    normal: int
    most: int
    absorber: int
    unit: int
    narrow: tuple[int, int] | None
    leading: int
    floor: int
    partner: str | None = None

    @property
    def right(self) -> Format:
        return self if self.partner is None else FORMATS[self.partner]

    @property
    def terms(self) -> int:
        """How many terms are placed in the tree: enough for four steps of the widest unit known (Hopper's fp8 takes 32
        at once, its 16-bit formats 16)."""
        return 128 if self.key == "fp8" else 64

    @property
    def window(self) -> int:
        """The most fraction bits below the leading one that can be told; quarter steps need two more."""
        return self.leading - self.floor - 2


def _wide(key: str, name: str, dtype: torch.dtype, bits: int, least: int) -> Format:
    """A format with float32's exponents: the window is 60 bits, beyond any accumulator but an exact one."""
    return Format(key, name, dtype, bits, least, -126, 127, 60, 0, None, 30, -32)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        # 2^30 overflows a float16 accumulator, 1.5 * 2^15 does not; a float16 result holds the units of 2^-14
        Format("f16", "float16", torch.float16, 11, -24, -14, 15, 30, -14, (14, -4), 15, -14),
        _wide("bf16", "bfloat16", torch.bfloat16, 8, -133),
        _wide("f32", "float32", torch.float32, 24, -149),
        _wide("tf32", "tf32", torch.float32, 24, -149),
        # units are products of subnormals: in normal numbers the window would be 28 bits, too few for 64 terms
        Format("fp8", "e4m3fn", torch.float8_e4m3fn, 4, -9, -6, 8, 16, -18, None, 16, -12),
        # cuBLAS multiplies no e5m2 by e5m2
        Format("fp8", "e5m2", torch.float8_e5m2, 3, -16, -14, 15, 23, -20, None, 23, -20, "e4m3fn"),
        Format("fp8", "e4m3fnuz", torch.float8_e4m3fnuz, 4, -10, -7, 7, 14, -20, None, 14, -14),
        Format("fp8", "e5m2fnuz", torch.float8_e5m2fnuz, 3, -17, -15, 15, 22, -20, None, 22, -20, "e4m3fnuz"),
    )
}


def factor(products: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Two float64 tensors whose product is ``products`` exactly, each representable in ``form``; zeros are 0 * 1.

    The second is a power of two near the root of the magnitude, so both stay as normal as the product allows.
    Raises ValueError for a product that cannot be made.
    """
    exponent = torch.frexp(products).exponent - 1
    half = torch.div(exponent, 2, rounding_mode="floor").clamp(form.right.least, form.right.most)
    right = torch.where(products == 0, 1.0, torch.ldexp(torch.ones_like(products), half))
    left = products / right
    for side, dtype in ((left, form.dtype), (right, form.right.dtype)):
        lost = side.to(dtype).double() != side
        if lost.any():
            wrong = products[lost][0].item()
            raise ValueError(f"the product {wrong!r} has no two factors in {form.name}")
    return left, right
