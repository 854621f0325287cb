"""Matrix instructions (MFMA): the layout of operands over lanes, and the arithmetic under its named assumptions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferryman.backends.simulator import formats
from ferryman.backends.simulator.assembly import Immediate, Instruction, Operand, Register
from ferryman.backends.simulator.machine import ALL_LANES, LANES, Machine
from ferryman.backends.simulator.numerics import Array, Assumptions
from ferryman.backends.simulator.operands import Sources, constant, refuse, vector_index
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import undefined


@dataclass(frozen=True)
class Shape:
    """``blocks`` products of [side, depth] by [depth, side]."""

    side: int
    depth: int
    blocks: int = 1

    @property
    def each(self) -> int:
        """Values of k that a lane holds."""
        return self.side * self.depth * self.blocks // LANES

    @property
    def results(self) -> int:
        """Accumulators in a lane."""
        return self.side * self.side * self.blocks // LANES

    def operand(self, values: Array) -> Array:
        """[waves, 64, each] -> [waves, blocks, side, depth]. Lane l holds row l % side; lanes that share it hold
        successive runs of k, or successive blocks."""
        waves = len(values)
        groups = LANES // self.side // self.blocks
        shaped = values.reshape(waves, self.blocks, groups, self.side, self.each)
        return shaped.transpose(0, 1, 3, 2, 4).reshape(waves, self.blocks, self.side, self.depth)

    def spread(self, result: Array) -> Array:
        """[waves, blocks, side, side] -> [results, waves, 64]. Rows go in fours to the lanes that share a column."""
        waves, lanes = len(result), LANES // self.side
        if self.side == 4:  # sixteen blocks: each lane has a column of its own block
            return result.transpose(2, 0, 1, 3).reshape(4, waves, LANES)
        runs = self.side // (4 * lanes)
        shaped = result.reshape(waves, self.blocks, runs, lanes, 4, self.side)
        return shaped.transpose(1, 2, 4, 0, 3, 5).reshape(self.results, waves, LANES)

    def gather(self, registers: Array) -> Array:
        """The inverse of `spread`."""
        waves, lanes = registers.shape[1], LANES // self.side
        if self.side == 4:
            return registers.reshape(4, waves, self.blocks, 4).transpose(1, 2, 0, 3)
        runs = self.side // (4 * lanes)
        shaped = registers.reshape(self.blocks, runs, 4, waves, lanes, self.side)
        return shaped.transpose(3, 0, 1, 4, 2, 5).reshape(waves, self.blocks, self.side, self.side)


Decode = Callable[[Array, Assumptions], Array]  # uint32 [waves, 64, registers] -> float64 [waves, 64, each]


def _halves(words: Array) -> Array:
    return np.ascontiguousarray(words).view(np.uint16)


def _flush16(x: Array, assumptions: Assumptions, least: float) -> Array:
    return np.where(np.abs(x) < least, np.copysign(0.0, x), x) if assumptions.mfma_subnormals == "flushed" else x


def _float16(words: Array, assumptions: Assumptions) -> Array:
    return _flush16(_halves(words).view(np.float16).astype(np.float64), assumptions, 2.0**-14)


def _bfloat16(words: Array, assumptions: Assumptions) -> Array:
    return _flush16(formats.bf16_to_f32(_halves(words)).astype(np.float64), assumptions, 2.0**-126)


def _float32(words: Array, assumptions: Assumptions) -> Array:
    return np.ascontiguousarray(words).view(np.float32).astype(np.float64)


def _xfloat32(words: Array, assumptions: Assumptions) -> Array:
    return formats.xf32(np.ascontiguousarray(words).view(np.float32), assumptions).astype(np.float64)


def _integer8(words: Array, assumptions: Assumptions) -> Array:
    return np.ascontiguousarray(words).view(np.int8).astype(np.float64)


def _float8(kind: formats.Float8) -> Decode:
    return lambda words, assumptions: formats.float8_to_f32(np.ascontiguousarray(words).view(np.uint8), kind).astype(
        np.float64
    )


def _product(a: Array, b: Array, c: Array, assumptions: Assumptions) -> Array:
    """a [.., side, k], b [.., side, k], c [.., side, side] float32 -> float32."""
    right = b.swapaxes(-1, -2)
    if assumptions.mfma_order == "exact":
        return (a @ right + c).astype(np.float32)
    step = 1 if assumptions.mfma_order == "sequential" else 4
    total = c.astype(np.float32)
    for k in range(0, a.shape[-1], step):
        total = (a[..., k : k + step] @ right[..., k : k + step, :] + total).astype(np.float32)
    return total


def _integer_product(a: Array, b: Array, c: Array, assumptions: Assumptions) -> Array:
    return ((a @ b.swapaxes(-1, -2)).astype(np.int64) + c).astype(np.int32)


def matrix(
    name: str,
    shape: Shape,
    first: Decode,
    second: Decode,
    registers: int,
    integer: bool = False,
    arches: frozenset[str] | None = None,
    kinds: Callable[..., Any] | None = None,
) -> None:
    """Enter one instruction. ``registers``: of each input operand. ``kinds``: picks the formats from modifiers."""

    @register(name, "matrix", arches=arches)
    def decode(instruction: Instruction, context: Context) -> Step:
        left, right, wide = first, second, (registers, registers)
        known: set[str] = set()
        if kinds is not None:
            left, right, wide = kinds(instruction, context)
            known = {"cbsz", "blgp"}
        unknown = sorted(k for k, v in instruction.modifiers.items() if k not in known and v)
        if unknown:
            raise refuse(instruction, f"modifiers {', '.join(unknown)}")
        target, a, b, c = instruction.operands
        groups = [_registers(o, n, instruction) for o, n in zip((a, b), wide, strict=True)]
        destination = _registers(target, shape.results, instruction)
        sources = Sources([r for g in groups for r in g])
        start = _accumulator(c, shape, instruction, sources, integer)
        assumptions = context.assumptions
        multiply = _integer_product if integer else _product
        dtype = np.int32 if integer else np.float32

        def step(m: Machine) -> None:
            # MFMA does not look at EXEC
            taint = (
                undefined(m, sources, instruction) if m.sanitize and any(m.v_flag[r] for r in sources.vectors) else None
            )
            x, y = (
                shape.operand(how(np.stack([m.row(m.v_u32[r]) for r in g], -1), assumptions))
                for how, g in zip((left, right), groups, strict=True)
            )
            result = shape.spread(multiply(x, y, start(m), assumptions).astype(dtype))
            rows = m.v_i32 if integer else m.v_f32
            for r, value in zip(destination, result, strict=True):
                rows[r][m.sel] = value
            if m.sanitize:
                spoilt = None if taint is None else np.where(taint != 0, ALL_LANES, np.uint64(0))
                everywhere = np.full(m.count, ALL_LANES)
                for r in destination:
                    if spoilt is not None or m.v_flag[r]:
                        m.define(r, spoilt, instruction, everywhere)

        return step


def _registers(operand: Operand, count: int, instruction: Instruction) -> range:
    what = operand.what
    if not isinstance(what, Register) or what.file == "s" or what.count != count:
        raise refuse(instruction, f"an operand that is not {count} vector registers")
    return range(vector_index(what), vector_index(what) + count)


def _accumulator(
    operand: Operand, shape: Shape, instruction: Instruction, sources: Sources, integer: bool
) -> Callable[[Machine], Array]:
    if isinstance(operand.what, Immediate):
        value = constant(operand.what.value, "i32" if integer else "f32")
        return lambda m: np.full((m.count, shape.blocks, shape.side, shape.side), value)
    registers = _registers(operand, shape.results, instruction)
    sources.vectors += registers
    if integer:
        return lambda m: shape.gather(np.stack([m.row(m.v_i32[r]) for r in registers])).astype(np.int64)
    return lambda m: shape.gather(np.stack([m.row(m.v_f32[r]) for r in registers]))


_CDNA3, _CDNA4 = frozenset({"gfx942"}), frozenset({"gfx950"})
_NAME = re.compile(r"v_mfma_(?:f32|i32)_(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+)")


def _enter(
    names: str, decode: Decode, registers: int, *, integer: bool = False, arches: frozenset[str] | None = None
) -> None:
    for name in names.split():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(name)
        matrix(
            name, Shape(int(match[1]), int(match[2]), int(match[3] or 1)), decode, decode, registers, integer, arches
        )


_enter(
    "v_mfma_f32_32x32x2_f32 v_mfma_f32_16x16x4_f32 v_mfma_f32_32x32x1_2b_f32 v_mfma_f32_16x16x1_4b_f32 "
    "v_mfma_f32_4x4x1_16b_f32",
    _float32,
    1,
)
_enter("v_mfma_f32_32x32x4_xf32 v_mfma_f32_16x16x8_xf32", _xfloat32, 2, arches=_CDNA3)
_enter(
    "v_mfma_f32_32x32x8_f16 v_mfma_f32_16x16x16_f16 v_mfma_f32_32x32x4_2b_f16 v_mfma_f32_16x16x4_4b_f16 "
    "v_mfma_f32_4x4x4_16b_f16",
    _float16,
    2,
)
_enter(
    "v_mfma_f32_32x32x8_bf16 v_mfma_f32_16x16x16_bf16 v_mfma_f32_32x32x4_2b_bf16 v_mfma_f32_16x16x4_4b_bf16 "
    "v_mfma_f32_4x4x4_16b_bf16",
    _bfloat16,
    2,
)
_enter("v_mfma_i32_32x32x16_i8 v_mfma_i32_16x16x32_i8", _integer8, 2, integer=True)
_enter("v_mfma_i32_32x32x4_2b_i8 v_mfma_i32_16x16x4_4b_i8 v_mfma_i32_4x4x4_16b_i8", _integer8, 1, integer=True)
_enter("v_mfma_f32_32x32x16_f16 v_mfma_f32_16x16x32_f16", _float16, 4, arches=_CDNA4)
_enter("v_mfma_f32_32x32x16_bf16 v_mfma_f32_16x16x32_bf16", _bfloat16, 4, arches=_CDNA4)
_enter("v_mfma_i32_32x32x32_i8 v_mfma_i32_16x16x64_i8", _integer8, 4, integer=True, arches=_CDNA4)
_ON = {"fp8": (formats.FP8_FNUZ, formats.FP8_OCP), "bf8": (formats.BF8_FNUZ, formats.BF8_OCP)}


def _eights(instruction: Instruction, context: Context) -> tuple[Decode, Decode, tuple[int, int]]:
    """fp8 and bf8, as the two last words of the name; which flavour is the arch's."""
    flavour = 0 if context.arch == "gfx942" else 1
    words = instruction.name.rsplit("_", 2)[1:]
    left, right = (_float8(_ON[w][flavour]) for w in words)
    return left, right, (2, 2)


def _scaled(instruction: Instruction, context: Context) -> tuple[Decode, Decode, tuple[int, int]]:
    """v_mfma_*_f8f6f4: cbsz and blgp name the format of A and B; 6 and 4 bits are not implemented."""
    decoders = []
    for modifier in ("cbsz", "blgp"):
        code = int(instruction.modifiers.get(modifier, 0))
        if code > 1:
            raise refuse(instruction, f"{modifier}:{code} (6- and 4-bit floats)")
        decoders.append(_float8((formats.FP8_OCP, formats.BF8_OCP)[code]))
    return decoders[0], decoders[1], (8, 8)


for _left in ("fp8", "bf8"):
    for _right in ("fp8", "bf8"):
        for _side, _depth in ((32, 16), (16, 32)):
            matrix(
                f"v_mfma_f32_{_side}x{_side}x{_depth}_{_left}_{_right}",
                Shape(_side, _depth),
                _float32,
                _float32,
                2,
                kinds=_eights,
            )
for _side, _depth in ((32, 64), (16, 128)):
    matrix(
        f"v_mfma_f32_{_side}x{_side}x{_depth}_f8f6f4",
        Shape(_side, _depth),
        _float32,
        _float32,
        8,
        kinds=_scaled,
        arches=_CDNA4,
    )
