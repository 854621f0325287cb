"""What inputs are filled with, as data: the same bits on every device and with every library version.

Values come from a counter (splitmix64 of a key and the element's index) through integer arithmetic and exact float64
sums only, so that another machine, or another vendor's device, rebuilds the same inputs bit for bit. The key is
hashed from the seed, the op, the case and the parameter.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import UnknownName
from ferryman.porting import probes

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip
SUBNORMAL: Mapping[torch.dtype, float] = {
    torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149, torch.float64: 2.0**-1074,
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA, _FIRST, _SECOND = (_signed(w) for w in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Draw:
    """One tensor to fill: its shape and storage dtype, its place (op, parameter), and the key of its stream."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: int
    op: str = ""
    parameter: str = ""

    @classmethod
    def of(cls, seed: int, op: str, case: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype,
           device: torch.device) -> Draw:  # fmt: skip
        text = f"{seed}/{op}/{case}/{parameter}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return cls(shape, dtype, device, key, op, parameter)

    def words(self, lane: int = 0) -> Tensor:
        """64 random bits per element (as int64); lanes are independent streams."""
        start = _signed((self.key + lane * 0xD1342543DE82EF95) % 2**64)
        z = torch.arange(1, math.prod(self.shape) + 1, dtype=torch.int64, device=self.device) * _GAMMA + start
        z = (z ^ _right(z, 30)) * _FIRST
        z = (z ^ _right(z, 27)) * _SECOND
        return (z ^ _right(z, 31)).reshape(self.shape)

    def uniform(self, lane: int = 0) -> Tensor:
        """In [0, 1), 53 bits."""
        return _right(self.words(lane), 11).double() * 2.0**-53

    def normal(self, lane: int = 0) -> Tensor:
        """Eight 16-bit uniforms summed exactly (Irwin-Hall), scaled to variance 1: kurtosis 2.85, at most 4.9.

        log, cos and sqrt differ between libraries in the last bit; a sum of integers does not.
        """
        total = None
        for word in (self.words(2 * lane + 101), self.words(2 * lane + 102)):
            for shift in (0, 16, 32, 48):
                part = (word >> shift) & 0xFFFF
                total = part if total is None else total + part
        assert total is not None
        return (total.double() - 4 * 65535) * (math.sqrt(1.5) / 65536)

    def rows(self) -> Tensor:
        """The flat row index of every element, broadcastable to the shape."""
        outer = self.shape[:-1]
        return torch.arange(math.prod(outer), device=self.device).reshape((*outer, 1) if self.shape else ())

    def columns(self) -> Tensor:
        return torch.arange(self.shape[-1] if self.shape else 1, device=self.device).reshape([-1] if self.shape else [])


@dataclass(frozen=True)
class Fill:
    """``make`` gives float64 values (or bool for masks); ``meaning`` is what the docs print.

    independent: rounding errors behave as random ones. Equal terms round alike, and their errors add up in step: an
    honest sequential sum of 384 equal squares was 2.05 times as noisy as G3 allows, within a third of G2's bound.
    """

    name: str
    meaning: str
    make: Callable[[Draw], Tensor]
    independent: bool = True


# Where an op multiplies inputs, a mean of 1e3 leaves the range of float16 (96 products of 1e6), or drowns attention's
# scores (64e6 / 8, whose float32 roundoff is a whole unit); a smaller mean keeps the case a test of cancellation.
_OFFSET_MEAN: Mapping[str, Mapping[torch.dtype, float]] = {
    "attention": dict.fromkeys(SUBNORMAL, 4.0),
    **{op: {torch.float16: 16.0} for op in ("linear", "silu_mul", "gelu_mul")},
}


def _offset(d: Draw) -> Tensor:
    mean = _OFFSET_MEAN.get(d.op.removesuffix("_backward"), {}).get(d.dtype, 1e3)
    return mean + d.normal()


def _tiny(d: Draw) -> Tensor:
    """2^-20, whose square is 1e-12 against an eps of 1e-6; every fourth element is subnormal in the storage dtype."""
    width = max(d.shape[-1], 1) if d.shape else 1
    subnormal = (d.words(7) & 0x1F).double() * SUBNORMAL[d.dtype]
    fourth = (torch.arange(math.prod(d.shape), device=d.device).reshape(d.shape) % width) % 4 == 3
    return torch.where(fourth, subnormal, d.normal() * 2.0**-20)


def _large(d: Draw) -> Tensor:
    """Squares leave float16 (4e4 of 65504), or reach 1e30 of float32's 3e38 so that a row's sum still fits."""
    return d.normal() * (2.0**13 if d.dtype == torch.float16 else 2.0**50)


def _huge(d: Draw) -> Tensor:
    return torch.finfo(d.dtype).max * (0.25 + 0.25 * d.uniform()) * torch.where(d.uniform(3) < 0.5, -1.0, 1.0)


def _nonfinite(d: Draw) -> Tensor:
    """Row r of five: clean, NaN, +Inf, -Inf, both Infs. Attention's keys stay clean and only its last head's values
    are planted, because one NaN key would hide every other row."""
    x = d.normal()
    if x.numel() == 0:
        return x
    width = d.shape[-1] if d.shape else 1
    row, column = d.rows(), d.columns()
    kind = row % 5
    if d.op.startswith("attention") and d.parameter in ("k", "v"):
        keys = d.shape[-2]
        planted = (row // keys == row.max() // keys) & (d.parameter == "v") & (row % keys % 4 == 1)
        kind = torch.where(planted, row % keys // 4 % 3 + 1, 0)
    at = (row * 7 + 3) % width
    for value, where in (
        (math.nan, (kind == 1) & (column == at)),
        (math.inf, (kind == 2) & (column == at)),
        (-math.inf, (kind == 3) & (column == at)),
        (math.inf, (kind == 4) & (column == at)),
        (-math.inf, (kind == 4) & (column == (at + 1) % width)),
    ):
        x = x.masked_fill(where, value)
    return x


def _masked(d: Draw) -> Tensor:
    """Half of the entries -inf; rows 1, 4, 7... hold nothing else."""
    hidden = (d.uniform(3) < 0.5) | (d.rows() % 3 == 1)
    return d.normal().masked_fill(hidden, -math.inf)


def _angles(d: Draw) -> Tensor:
    x = 2 * d.uniform() - 1
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., :half], x[..., 2 * half :]), -1)


def _mask(d: Draw) -> Tensor:
    return (d.uniform() < 0.5) & (d.rows() % 3 != 1)


def _full(d: Draw, value: float) -> Tensor:
    return torch.full(d.shape, value, dtype=torch.float64, device=d.device)


def _bias(d: Draw) -> Tensor:
    return d.normal().masked_fill((d.uniform(3) < 0.25) | (d.rows() % 7 == 3), -math.inf)


FILLS: Mapping[str, Fill] = {
    fill.name: fill
    for fill in (
        Fill("normal", "mean 0, variance 1", lambda d: d.normal()),
        Fill("uniform", "in [0, 1): sums do not cancel", lambda d: d.uniform()),
        Fill("weight", "1 + 0.1 normal", lambda d: 1 + 0.1 * d.normal()),
        Fill("offset", "normal about 1e3 (less where the op multiplies inputs)", _offset),
        Fill("constant", "0.7 everywhere", lambda d: _full(d, 0.7), independent=False),
        Fill("tiny", "2^-20 normal, every fourth element subnormal", _tiny),
        Fill("large", "squares leave float16; about 1e15 in the wider dtypes", _large),
        Fill("huge", "a quarter to a half of the dtype's largest, with signs", _huge),
        Fill("deep", "from -1 to -100: a sigmoid's left tail", lambda d: -1 - 99 * d.uniform()),
        Fill("moderate", "8 normal: into both tails of exp", lambda d: 8 * d.normal()),
        Fill("large_logits", "4 normal: scores of tens", lambda d: 4 * d.normal()),
        Fill("nonfinite", "normal with NaN and Infs planted, every fifth row clean", _nonfinite),
        Fill("masked", "normal with -inf, whole rows included", _masked),
        Fill("zeros", "0 everywhere", lambda d: _full(d, 0.0), independent=False),
        Fill("integer", "integers from -4 to 4: every partial sum is exact", probes.integer),
        Fill(
            "ties",
            "384; 3072 in float16: integers about it lie between two storable ones",
            probes.ties,
            independent=False,
        ),
        Fill("unit", "in [-1, 1], as cosines are", lambda d: 2 * d.uniform() - 1),
        Fill("angles", "in [-1, 1], both halves of a row alike: cosines as models make them", _angles),
        Fill("mask", "random bool, every third row empty", _mask),
        Fill("bias", "normal with -inf, whole rows included", _bias),
        Fill("digits", "-2, -1, 1 or 2", probes.digits, independent=False),
        Fill("fours", "-8, -4, 4 or 8", lambda d: 4 * probes.digits(d), independent=False),
        Fill("signs", "-1, 0 or 1", lambda d: (d.uniform() * 3).floor() - 1, independent=False),
        Fill(
            "sparse",
            "digits, at most 60 in a row or column: sums of products fit 8 bits",
            probes.sparse,
            independent=False,
        ),
        Fill("tally", "sparse without signs: sums cannot cancel", lambda d: probes.sparse(d).abs(), independent=False),
        Fill(
            "powers",
            "one power of two a row, with signs: the mean square is a power of four",
            probes.powers,
            independent=False,
        ),
        Fill(
            "levels",
            "an integer a row, plus and minus a power of two: so is the deviation",
            probes.levels,
            independent=False,
        ),
        Fill("plateaus", "one integer a row: deviation 0", probes.plateaus, independent=False),
        Fill("support", "2^n equal values a row, -inf elsewhere", probes.support, independent=False),
        Fill("single", "one small integer a row, -inf elsewhere", probes.single, independent=False),
        Fill("peaks", "one small integer a row, -128 and less elsewhere", probes.peaks, independent=False),
        Fill(
            "saturated", "gates from 32 on, or below -127: the sigmoid is 1 or 0", probes.saturated, independent=False
        ),
        Fill("codes", "rows of Walsh functions: each matches its own code alone", probes.codes, independent=False),
    )
}


def fill(name: str) -> Fill:
    """A fill by name. Raises UnknownName."""
    if name not in FILLS:
        raise UnknownName("fill", name, FILLS)
    return FILLS[name]


# --- memory layout -------------------------------------------------------------------------------------------------

GUARD_BYTES = 256
_STRIDED = re.compile(r"strided:(?P<strides>\d{1,9}(?:,\d{1,9})*|)\+(?P<offset>\d{1,9})")
_CANARY = 0xFF  # NaN in every floating dtype: reading a guard or a gap shows in the result, writing one in the bytes


@dataclass(frozen=True)
class Buffer:
    """One tensor inside an allocation of its own, with guards before and behind; ``pristine`` is its first state."""

    tensor: Tensor
    bytes: Tensor
    pristine: Tensor

    @classmethod
    def around(cls, values: Tensor, dtype: torch.dtype, layout: str) -> Buffer:
        """``values`` rounded to ``dtype`` and laid out; layouts as in `ferryman.ops.primitive.TensorSpec`."""
        return cls._laid(values, dtype, *_strides(tuple(values.shape), layout))

    @staticmethod
    def repeats(shape: tuple[int, ...], layout: str) -> bool:
        """Whether a layout makes elements share memory."""
        return _shared(shape, _strides(shape, layout)[0])

    @classmethod
    def holding(cls, tensor: Tensor, device: torch.device, aligned_as: Tensor | None = None) -> Buffer:
        """A copy of a tensor, with its strides, and its alignment (or another's) within 16 bytes, between guards."""
        shift = (tensor if aligned_as is None else aligned_as).data_ptr() % 16 // tensor.element_size()
        return cls._laid(tensor.detach().to(device), tensor.dtype, tensor.stride(), shift)

    @classmethod
    def _laid(cls, values: Tensor, dtype: torch.dtype, strides: tuple[int, ...], shift: int) -> Buffer:
        shape = tuple(values.shape)
        size = torch.empty((), dtype=dtype).element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if values.numel() else 0
        guard = GUARD_BYTES // size
        raw = torch.empty((2 * guard + shift + extent) * size, dtype=torch.uint8, device=values.device)
        raw.fill_(1 if dtype == torch.bool else _CANARY)
        tensor = raw.view(dtype).as_strided(shape, strides, guard + shift)
        if not _shared(shape, strides):
            tensor.copy_(values)
        else:  # the first of the elements that share a place stands in it
            slots = _slots(tensor)
            count = torch.arange(len(slots), device=slots.device)
            first = torch.full((extent + guard + shift,), len(slots), device=slots.device)
            first.scatter_reduce_(0, slots, count, "amin")
            taken = first < len(slots)
            raw.view(dtype)[: len(first)][taken] = values.reshape(-1)[first[taken]].to(dtype)
        return cls(tensor, raw, raw.clone())

    def to(self, device: torch.device) -> Buffer:
        """The same bytes in the same layout on another device."""
        raw = self.bytes.to(device, copy=True)
        x = self.tensor
        tensor = raw.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        return Buffer(tensor, raw, raw.clone())

    def untouched(self) -> bool:
        return torch.equal(self.bytes, self.pristine)

    def shared(self) -> bool:
        """Whether elements share memory."""
        return _shared(tuple(self.tensor.shape), self.tensor.stride())

    def overrun(self) -> bool:
        """Whether the change, if any, lies outside the tensor's own elements."""
        x, restored = self.tensor, self.bytes.clone()
        mine, was = restored.view(x.dtype), self.pristine.view(x.dtype)
        if _shared(tuple(x.shape), x.stride()):
            slots = _slots(x)
            mine[slots] = was[slots]
        else:
            place = (x.shape, x.stride(), x.storage_offset())
            mine.as_strided(*place).copy_(was.as_strided(*place))
        return not torch.equal(restored, self.pristine)


def _shared(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements may share memory: a step that does not leave what the smaller steps span."""
    span = 0
    for step, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and step <= span:
            return True
        span += (n - 1) * step
    return False


def _slots(tensor: Tensor) -> Tensor:
    """Where each element lies in the storage, in elements."""
    slots = torch.full((), int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        slots = slots.unsqueeze(-1) + torch.arange(n, device=tensor.device) * step
    return slots.reshape(-1)


def strided(strides: tuple[int, ...], offset: int = 0) -> str:
    """The layout with these strides, in elements; 0 repeats a dimension, and rows may overlap."""
    return f"strided:{','.join(map(str, strides))}+{offset}"


def _strides(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """(strides, extra storage offset) in elements."""
    given = _STRIDED.fullmatch(layout)
    if given is not None:
        found = tuple(int(n) for n in given["strides"].split(",") if n)
        if len(found) != len(shape):
            raise UnknownName("layout for this shape", f"{layout} of {shape}", ["contiguous", "rows", "last", "offset"])
        return found, int(given["offset"])
    if layout == "heads":
        if len(shape) != 4:
            raise UnknownName("layout for this shape", f"heads of {shape}", ["contiguous", "rows", "last", "offset"])
        _, heads, seq, depth = shape
        return (seq * heads * depth, depth, heads * depth, 1), 0
    if layout not in ("contiguous", "rows", "last", "offset"):
        raise UnknownName("layout", layout, ["contiguous", "rows", "last", "heads", "offset"])
    step = 2 if layout == "last" else 1
    strides: list[int] = []
    span = step
    for i, n in enumerate(reversed(shape)):
        strides.insert(0, span)
        # rows 7 elements apart: no row but the first is 16-byte aligned
        span = span * max(n, 1) + (7 if layout == "rows" and i == 0 else 0)
    return tuple(strides), 1 if layout == "offset" else 0
