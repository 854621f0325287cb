"""What fills a tensor of a case: values from a counter, the same bits on every device and with every library version.

Values come from a counter (splitmix64 of a key and the element's index) through integer arithmetic and exact float64
sums only, so that another machine, or another vendor's device, rebuilds the same inputs bit for bit. The key is
hashed from the seed, the op, the case and the parameter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA, _FIRST, _SECOND = (_signed(w) for w in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

_LOW_HALVES = 0x0000FFFF0000FFFF  # of each half of a word, the lower 16 bits

_CPU_BLOCK, _BLOCK = 2**18, 2**24  # elements: temporaries stay in a core's caches; in 1 GiB of a device's memory


def _right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _nothing(name: str) -> Any:
    raise LookupError(f"this draw belongs to no case: it has no argument {name}")


@dataclass(frozen=True)
class Draw:
    """One tensor to fill: its shape and dtype, its place (op, parameter), and the key of its stream.

    ``given`` tells another argument of the same case by name: a scalar as it is, a tensor with its content, so that a
    page table fits lengths. ``shape_of`` tells another tensor's shape alone, without making it. ``low`` and ``high``
    are the integers' range.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: int
    op: str = ""
    parameter: str = ""
    given: Callable[[str], Any] = field(default=_nothing, repr=False, compare=False)
    shape_of: Callable[[str], tuple[int, ...]] = field(default=_nothing, repr=False, compare=False)
    low: int = 0
    high: int = 1

    @classmethod
    def of(
        cls,
        seed: int,
        op: str,
        case: str,
        parameter: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        **more: Any,
    ) -> Draw:
        """``more``: the other fields."""
        text = f"{seed}/{op}/{case}/{parameter}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return cls(shape, dtype, device, key, op, parameter, **more)

    def words(self, lane: int = 0) -> Tensor:
        """64 random bits per element (as int64); lanes are independent streams."""
        return self._in_blocks(torch.int64, lambda first, last: self._words(lane, first, last))

    def uniform(self, lane: int = 0) -> Tensor:
        """In [0, 1), 53 bits."""

        def block(first: int, last: int) -> Tensor:
            return _right(self._words(lane, first, last), 11).double() * 2.0**-53

        return self._in_blocks(torch.float64, block)

    def integers(self, low: int, high: int, lane: int = 0) -> Tensor:
        """Integers in [low, high), as float64."""
        return (self.uniform(lane) * (high - low)).floor() + low

    def normal(self, lane: int = 0, rounded: bool = False) -> Tensor:
        """Eight 16-bit uniforms summed exactly (Irwin-Hall), scaled to variance 1: kurtosis 2.85, at most 4.9.

        log, cos and sqrt differ between libraries in the last bit; a sum of integers does not. In float64, or
        ``rounded`` to the tensor's dtype block by block: experts' weights of 15 GB are 60 GB in float64.
        """

        def block(first: int, last: int) -> Tensor:
            one, other = (self._words(stream, first, last) for stream in (2 * lane + 101, 2 * lane + 102))
            # two sums at once, of 32 bits each
            pairs = (one & _LOW_HALVES).add_((one >> 16).bitwise_and_(_LOW_HALVES))
            pairs.add_(other & _LOW_HALVES).add_((other >> 16).bitwise_and_(_LOW_HALVES))
            total = (pairs & 0xFFFFFFFF).add_(pairs >> 32)
            return total.double().sub_(4 * 65535).mul_(math.sqrt(1.5) / 65536)

        return self._in_blocks(self.dtype if rounded else torch.float64, block)

    def _words(self, lane: int, first: int, last: int) -> Tensor:
        """The 64 random bits of the elements [first, last)."""
        start = _signed((self.key + lane * 0xD1342543DE82EF95) % 2**64)
        z = torch.arange(first + 1, last + 1, dtype=torch.int64, device=self.device).mul_(_GAMMA).add_(start)
        z = z.bitwise_xor_(_right(z, 30)).mul_(_FIRST)
        z = z.bitwise_xor_(_right(z, 27)).mul_(_SECOND)
        return z.bitwise_xor_(_right(z, 31))

    def _in_blocks(self, dtype: torch.dtype, make: Callable[[int, int], Tensor]) -> Tensor:
        """A tensor of the draw's shape, made block by block, so that large ones need little memory beside their own."""
        count = math.prod(self.shape)
        block = _CPU_BLOCK if self.device.type == "cpu" else _BLOCK
        if count <= block:
            return make(0, count).reshape(self.shape)
        out = torch.empty(count, dtype=dtype, device=self.device)
        for first in range(0, count, block):
            last = min(first + block, count)
            out[first:last] = make(first, last)
        return out.reshape(self.shape)

    def rows(self) -> Tensor:
        """The flat row index of every element, broadcastable to the shape."""
        outer = self.shape[:-1]
        return torch.arange(math.prod(outer), device=self.device).reshape((*outer, 1) if self.shape else ())

    def columns(self) -> Tensor:
        return torch.arange(self.shape[-1] if self.shape else 1, device=self.device).reshape([-1] if self.shape else [])

    def planted(self, kind: Tensor) -> Tensor:
        """Normal values with one NaN, +Inf, -Inf, or both Infs in a row, where its kind is 1 to 4. kind: (rows, 1)."""
        x = self.normal()
        if x.numel() == 0:
            return x
        width = self.shape[-1] if self.shape else 1
        column = self.columns()
        at = (self.rows() * 7 + 3) % width
        for value, where in (
            (math.nan, (kind == 1) & (column == at)),
            (math.inf, (kind == 2) & (column == at)),
            (-math.inf, (kind == 3) & (column == at)),
            (math.inf, (kind == 4) & (column == at)),
            (-math.inf, (kind == 4) & (column == (at + 1) % width)),
        ):
            x = x.masked_fill(where, value)
        return x


@dataclass(frozen=True)
class Fill:
    """``make`` gives float64 values, or where it is ``boolean``, true and false; ``meaning`` is what the docs print.

    independent: rounding errors behave as random ones. Equal terms round alike, and their errors add up in step: an
    honest sequential sum of 384 equal squares was 2.05 times as noisy as G3 allows, within a third of G2's bound.
    smooth: the ops that are drawn from it may be differentiated there, so that finite differences are the gradient.
    """

    name: str
    meaning: str
    make: Callable[[Draw], Tensor]
    independent: bool = True
    smooth: bool = True
    boolean: bool = False


def offset(means: Mapping[torch.dtype, float], otherwise: float = 1e3) -> Fill:
    """The fill "offset", normal values about a mean. An op that multiplies inputs needs a smaller mean in a dtype: a
    product then stays in its range, and the case stays a test of cancellation."""
    meaning = "normal about 1e3 (less where the op multiplies inputs)"
    return Fill("offset", meaning, lambda d: means.get(d.dtype, otherwise) + d.normal())


def _odd(d: Draw) -> Tensor:
    """From the first integer on that needs all of a 16-bit dtype's digits, as far as half more needs one digit more."""
    first = 2.0**10 if d.dtype == torch.float16 else 2.0**7
    return first + 1 + 2 * (d.uniform() * first / 6).floor()


TIES = (
    Fill("odd", "odd integers from 129 to 171, in float16 from 1025 to 1365: 1.5 of one is a tie", _odd),
    Fill("half_more", "1.5", lambda d: torch.full(d.shape, 1.5, dtype=torch.float64, device=d.device), False),
)


def level(rows: Tensor) -> Tensor:
    """A small integer for each row."""
    return (rows * 3 % 17 - 8).double()
