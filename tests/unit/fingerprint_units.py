"""Simulated matrix units in integer arithmetic, which the probes must recover exactly; and this host's fingerprint."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.porting import fingerprint
from ferryman.porting.fingerprint import Fingerprint

_SCALE = 320  # every value is an integer multiple of 2^-320


def _round(value: int, shift: int, rule: str) -> int:
    """``value`` to a multiple of 2^shift."""
    if shift <= 0:
        return value
    rest = value & ((1 << shift) - 1)
    if not rest:
        return value
    low, half = value >> shift, 1 << (shift - 1)
    if rule == "toward-zero":
        up = value < 0
    elif rule == "nearest-even":
        up = rest > half or (rest == half and bool(low & 1))
    elif rule == "nearest-away":
        up = rest > half or (rest == half and value > 0)
    else:
        up = {"down": False, "up": True}[rule]
    return (low + up) << shift


def _to_bits(value: int, bits: int, rule: str) -> int:
    """``value`` to ``bits`` significant bits."""
    return _round(value, abs(value).bit_length() - bits, rule)


@dataclass(frozen=True)
class Unit:
    """A unit that adds ``block`` products at once.

    aligned: significant bits of every addend, below the largest exponent among them (None: exact). stored: bits of a
    partial sum. joined: the accumulator is one of the addends, else it is added to the block's sum afterwards.
    inputs: significand bits read (None: all). promote: every so many terms the partial sum is added to an outer one of
    24 bits, rounded to nearest. splits: so many strided sums, added pairwise at the end.
    """

    block: int = 1
    aligned: int | None = None
    align_rule: str = "toward-zero"
    stored: int = 24
    rule: str = "nearest-even"
    joined: bool = True
    inputs: int | None = None
    input_rule: str = "nearest-even"
    flush_inputs: int | None = None
    flush_outputs: bool = False
    promote: int | None = None
    splits: int = 1
    backwards: bool = False

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        rows = zip(left.tolist(), right.tolist(), strict=True)
        product = functools.cache(self._product)  # the probes' factors are few
        results = [self._row([product(a, b) for a, b in zip(*row, strict=True)]) for row in rows]
        return torch.tensor(results, dtype=torch.float64)

    def _row(self, products: list[tuple[int, int]]) -> float:
        if self.backwards:
            products = products[::-1]
        sums = [self._chain(products[i :: self.splits]) for i in range(self.splits)]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [_to_bits(a + b, self.stored, self.rule) for a, b in zip(sums[:half], sums[half:], strict=True)]
        value = math.ldexp(float(sums[0]), -_SCALE)
        return 0.0 if self.flush_outputs and abs(value) < 2.0**-126 else value

    def _read(self, value: float) -> float:
        if self.flush_inputs is not None and abs(value) < 2.0**self.flush_inputs:
            return 0.0
        if self.inputs is None or value == 0:
            return value
        return math.ldexp(float(_to_bits(int(math.ldexp(value, 200)), self.inputs, self.input_rule)), -200)

    def _product(self, a: float, b: float) -> tuple[int, int]:
        """(the exact product, the sum of the exponents: what hardware aligns by)."""
        a, b = self._read(a), self._read(b)
        if a == 0 or b == 0:
            return 0, -(10**6)
        return int(math.ldexp(a * b, _SCALE)), math.frexp(a)[1] - 1 + math.frexp(b)[1] - 1

    def _add(self, terms: Sequence[tuple[int, int]]) -> int:
        if self.aligned is None:
            return _to_bits(sum(v for v, _ in terms), self.stored, self.rule)
        shift = max(e for _, e in terms) + _SCALE - (self.aligned - 1)
        return _to_bits(sum(_round(v, shift, self.align_rule) for v, _ in terms), self.stored, self.rule)

    def _chain(self, products: Sequence[tuple[int, int]]) -> int:
        outer, total = 0, 0
        for start in range(0, len(products), self.block):
            if self.promote is not None and start % self.promote == 0:
                outer, total = _to_bits(outer + total, 24, "nearest-even"), 0
            group = list(products[start : start + self.block])
            if self.joined:
                exponent = total.bit_length() - 1 - _SCALE if total >= 0 else (-total).bit_length() - 1 - _SCALE
                total = self._add([*group, (total, exponent if total else -(10**6))])
            else:
                total = _to_bits(total + self._add(group), self.stored, self.rule)
        return _to_bits(outer + total, 24, "nearest-even") if self.promote is not None else total


def in_order(add: Callable[[Sequence[float]], float]) -> Callable[[Tensor], Tensor]:
    """A sum of Python floats as a route: (P, K) terms to P sums."""
    return lambda terms: torch.tensor([add(row) for row in terms.tolist()], dtype=torch.float64)


@functools.cache
def measured_here() -> Fingerprint:
    """This host's own fingerprint, once for each test process."""
    return fingerprint.fingerprint("cpu")
