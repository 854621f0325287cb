"""Whether int8 products accumulate exactly in 32 bits, and what happens beyond them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ferryman.porting.fingerprint.matrix import Answer

NAMES = ("exact", "overflow")
ROWS = 128
_TERMS = 1024
# 128 * 128 * 2^17 is 2^31, the first sum that does not fit; 2^24 is where a float32 accumulator loses odd numbers
_FULL = 2**17

Product = Callable[[Tensor, Tensor], Tensor]
"""(ROWS, K) and (ROWS, K) int8 to (ROWS, ROWS) int32: the first times the second's transpose."""


def probe(product: Product) -> Iterator[Answer]:
    """Sums of up to 127 * 127 * 1024 with odd results, against 64-bit integers; then one of exactly 2^31."""
    steps = torch.arange(ROWS * _TERMS, dtype=torch.int64).reshape(ROWS, _TERMS)
    near = (127 - (steps * 2654435761 >> 20) % 3).to(torch.int8)  # 125 to 127, by a fixed multiplicative hash
    mixed = ((steps * 2654435761 >> 16) % 256 - 128).to(torch.int8)
    wrong = 0
    for left, right in ((near, near.flip(0)), (mixed, mixed.flip(1)), (near, mixed)):
        expected = left.double() @ right.double().t()  # below 2^24 * 2^7: exact in float64
        wrong += int((product(left, right).double().cpu() != expected).sum())
    detail: dict[str, object] = {"wrong": wrong, "of": 3 * ROWS * ROWS, "terms": _TERMS}
    yield Answer("exact", "no" if wrong else "yes", None, detail)
    low = torch.full((ROWS, _FULL), -128, dtype=torch.int8)
    seen = set(product(low, low).cpu().flatten().tolist())
    named = {-(2**31): "wraps", 2**31 - 1: "saturates"}
    if len(seen) == 1 and (value := next(iter(seen))) in named:
        yield Answer("overflow", named[value])
    else:
        yield Answer("overflow", None, f"2^31 became {sorted(seen)[:4]}")
