"""What inputs are filled with, as data, and how they lie in memory.

The fills that several ops share stand here; those of one op in its evidence. `ferryman.ops.draw` makes their values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.porting.inputs import probes

__all__ = [
    "DTYPES",
    "FILLS",
    "GUARD_BYTES",
    "SUBNORMAL",
    "Buffer",
    "Draw",
    "Fill",
    "dtype_name",
    "fill",
    "known",
    "strided",
]

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float16", "bfloat16", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int8", "int16", "int32", "int64", "uint8", "bool"),
    )
}
SUBNORMAL: Mapping[torch.dtype, float] = {
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-133,
    torch.float32: 2.0**-149,
    torch.float64: 2.0**-1074,
    torch.float8_e4m3fn: 2.0**-9,
    torch.float8_e4m3fnuz: 2.0**-10,
    torch.float8_e5m2: 2.0**-16,
    torch.float8_e5m2fnuz: 2.0**-17,
    torch.float8_e8m0fnu: 2.0**-127,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    """Row r of five: clean, NaN, +Inf, -Inf, both Infs."""
    return d.planted(d.rows() % 5)


def _masked(d: Draw) -> Tensor:
    """Half of the entries -inf; rows 1, 4, 7... hold nothing else."""
    hidden = (d.uniform(3) < 0.5) | (d.rows() % 3 == 1)
    return d.normal().masked_fill(hidden, -math.inf)


def _mask(d: Draw) -> Tensor:
    return (d.uniform() < 0.5) & (d.rows() % 3 != 1)


def _full(d: Draw, value: float) -> Tensor:
    return torch.full(d.shape, value, dtype=torch.float64, device=d.device)


def _between(d: Draw) -> Tensor:
    """A number that is a third of a step of float16 above 1, as its square is two thirds: where a term of a long sum is
    rounded to 16 bits, every term is rounded alike, and the result leans. Errors of random terms would cancel."""
    return _full(d, 1 + 2.0**-10 / 3)


def _in_turn(d: Draw) -> Tensor:
    return (1.0 - 2.0 * (d.columns() % 2)).double().expand(d.shape)


def _bias(d: Draw) -> Tensor:
    return d.normal().masked_fill((d.uniform(3) < 0.25) | (d.rows() % 7 == 3), -math.inf)


FILLS: Mapping[str, Fill] = {
    fill.name: fill
    for fill in (
        Fill("normal", "mean 0, variance 1", lambda d: d.normal(rounded=d.dtype.is_floating_point)),
        Fill("uniform", "in [0, 1): sums do not cancel", lambda d: d.uniform()),
        Fill("weight", "1 + 0.1 normal", lambda d: 1 + 0.1 * d.normal()),
        offset({}),
        Fill("constant", "0.7 everywhere", lambda d: _full(d, 0.7), independent=False),
        Fill("between", "1 + 2^-10 / 3 everywhere, between two numbers of float16", _between, independent=False),
        Fill("between_signs", "1 + 2^-10 / 3, + and - in turn", lambda d: _in_turn(d) * _between(d), independent=False),
        Fill("tiny", "2^-20 normal, every fourth element subnormal", _tiny),
        Fill("large", "squares leave float16; about 1e15 in the wider dtypes", _large),
        Fill("huge", "a quarter to a half of the dtype's largest, with signs", _huge),
        Fill("hundreds", "256 normal: beyond the largest number of 8 bits", lambda d: 256 * d.normal()),
        Fill("deep", "from -1 to -100: a sigmoid's left tail", lambda d: -1 - 99 * d.uniform()),
        Fill("moderate", "8 normal: into both tails of exp", lambda d: 8 * d.normal()),
        Fill("large_logits", "4 normal: scores of tens", lambda d: 4 * d.normal()),
        Fill("nonfinite", "normal with NaN and Infs planted, every fifth row clean", _nonfinite),
        Fill("masked", "normal with -inf, whole rows included", _masked),
        Fill("zeros", "0 everywhere", lambda d: _full(d, 0.0), independent=False),
        Fill("integer", "integers from -4 to 4: every partial sum is exact", probes.integer),
        Fill("unit", "in [-1, 1], as cosines are", lambda d: 2 * d.uniform() - 1),
        Fill("mask", "random bool, every third row empty", _mask, boolean=True),
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
        Fill("drawn", "integers from ``low`` to ``high``, which is left out", lambda d: d.integers(d.low, d.high)),
    )
}


def known() -> dict[str, Fill]:
    """Every fill by name: the common ones, and those that ops add."""
    own = {fill.name: fill for evidence in registry.evidences().values() for fill in evidence.fills}
    return {**own, **FILLS}


def fill(name: str, op: str = "") -> Fill:
    """A fill by name, as an op has it. Raises UnknownName."""
    evidence = registry.evidences().get(op)
    for own in evidence.fills if evidence is not None else ():
        if own.name == name:
            return own
    shared = FILLS.get(name) or known().get(name)
    if shared is None:
        raise UnknownName("fill", name, known())
    return shared


# --- memory layout -------------------------------------------------------------------------------------------------

GUARD_BYTES = 256
_STRIDED = re.compile(r"strided:(?P<strides>\d{1,9}(?:,\d{1,9})*|)\+(?P<offset>\d{1,9})")
# NaN in every floating dtype, -1 or the largest as an integer. Reading a guard or a gap shows in the result; writing
# one shows in the bytes.
_CANARY = 0xFF
_CANARIES = {torch.bool: 1, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}


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
        raw.fill_(_CANARIES.get(dtype, _CANARY))
        tensor = raw.view(dtype).as_strided(shape, strides, guard + shift)
        if not _shared(shape, strides):
            tensor.copy_(values)
        else:  # the first of the elements that share a place stands in it
            slots = _slots(tensor)
            count = torch.arange(len(slots), device=slots.device)
            first = torch.full((extent + guard + shift,), len(slots), device=slots.device)
            first.scatter_reduce_(0, slots, count, "amin")
            taken = first < len(slots)
            as_is = torch.uint8 if size == 1 else dtype  # PyTorch indexes no float of 8 bits
            there = values.reshape(-1)[first[taken]].to(dtype)
            raw.view(as_is)[: len(first)][taken] = there.view(as_is)
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


def laid_on_meta(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor without data, of the strides and the storage offset that a layout gives."""
    strides, offset = _strides(shape, layout)
    size = (
        offset + 1 + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True)) if all(shape) else offset
    )
    return torch.empty(size, dtype=dtype, device="meta").as_strided(shape, strides, offset)


def _strides(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """(strides, extra storage offset) in elements."""
    given = _STRIDED.fullmatch(layout)
    if given is not None:
        stated = tuple(int(n) for n in given["strides"].split(",") if n)
        if len(stated) != len(shape):
            raise UnknownName("layout for this shape", f"{layout} of {shape}", ["contiguous", "rows", "last", "offset"])
        return stated, int(given["offset"])
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
