"""Operands as typed values: how an instruction's text becomes reads and writes of registers.

A type names what an operation computes with: f32 i32 u32 b32, f16 i16 u16 b16 (the low half, unless selected), f64 i64
u64 b64 (two registers), mask (a bit for each lane, in a scalar pair), and for packed operations 2f32 2f16 2u16 2i16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferryman.backends.simulator.assembly import EXEC, Immediate, Instruction, Operand, Register, Word
from ferryman.backends.simulator.machine import LANES, Machine, pack, unpack
from ferryman.backends.simulator.numerics import Array
from ferryman.errors import UnimplementedInstruction

Read = Callable[[Machine], Array]
Write = Callable[[Machine, Array], None]
DTYPES = {
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "b32": np.uint32,
    "f16": np.float16,
    "i16": np.int16,
    "u16": np.uint16,
    "b16": np.uint16,
    "f64": np.float64,
    "i64": np.int64,
    "u64": np.uint64,
    "b64": np.uint64,
}
_FORMATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def width(kind: str) -> int:
    """Registers that a value of this type takes in one lane."""
    if kind.startswith("2f32"):
        return 2
    return 2 if kind.endswith("64") or kind == "mask" else 1


def refuse(instruction: Instruction, why: str) -> UnimplementedInstruction:
    return UnimplementedInstruction(
        f"{why}: {instruction.text} (line {instruction.line}); the simulator has no such form"
    )


@dataclass
class Sources:
    """The registers that an instruction reads, for the sanitizer: vector registers, scalar ones, masks (pairs)."""

    vectors: list[int] = field(default_factory=list)
    scalars: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)


def vector_index(register: Register) -> int:
    return register.index + (256 if register.file == "a" else 0)


def constant_bits(value: int | float, kind: str) -> int:
    """The bits that a constant of the text stands for in an operand of a type: a float in the operand's own format, an
    integer as it is, sign-extended."""
    size = 64 if kind.endswith("64") else 32 if kind.endswith("32") or kind.startswith("2") else 16
    if isinstance(value, float):
        form = _FORMATS.get("f16" if size == 16 or kind in ("2f16", "2u16", "2i16") else f"f{size}", "<f")
        packed = struct.pack(form, value)
        return int.from_bytes(packed, "little")
    return value & ((1 << size) - 1)


def constant(value: int | float, kind: str) -> Array:
    base = kind.removeprefix("2")
    size = DTYPES[base]
    bits = constant_bits(value, base)
    return np.frombuffer(bits.to_bytes(np.dtype(size).itemsize, "little"), size)[0]


def scalar_constant(operand: Operand, kind: str) -> Array | None:
    return constant(operand.what.value, kind) if isinstance(operand.what, Immediate) else None


def _register(operand: Operand, instruction: Instruction, count: int) -> Register:
    what = operand.what
    if not isinstance(what, Register):
        raise refuse(instruction, f"an operand that is no register ({what})")
    if what.count != count:
        raise refuse(instruction, f"an operand of {what.count} registers where {count} are needed")
    return what


def scalar_read(operand: Operand, kind: str, instruction: Instruction, sources: Sources) -> Read:
    """A scalar operand: [waves], or one constant."""
    value = scalar_constant(operand, kind)
    if value is not None:
        return lambda m: value
    what = operand.what
    if isinstance(what, Word):
        if what.name in ("scc", "src_scc"):
            return lambda m: m.scc[m.sel].astype(DTYPES[kind])
        if what.name in ("src_vccz", "src_execz"):
            pair = 53 if what.name == "src_vccz" else 63
            return lambda m: (m.s_u64[pair][m.sel] == 0).astype(DTYPES[kind])
        raise refuse(instruction, f"an unknown operand {what.name}")
    register = _register(operand, instruction, width(kind))
    if register.file != "s":
        raise refuse(instruction, "a vector register as a scalar operand")
    index = register.index
    sources.scalars += range(index, index + register.count)
    if kind.endswith("64"):
        if index % 2:
            raise refuse(instruction, "a pair of scalar registers that begins with an odd one")
        pair, signed = index // 2, kind == "i64"
        if kind == "f64":
            return lambda m: m.s_u64[pair][m.sel].view(np.float64)
        return (lambda m: m.s_i64[pair][m.sel]) if signed else (lambda m: m.s_u64[pair][m.sel])
    if kind == "f32":
        return lambda m: m.s_f32[index][m.sel]
    if kind == "i32":
        return lambda m: m.s_i32[index][m.sel]
    if kind in ("i16", "u16", "b16", "f16"):
        dtype = DTYPES[kind]
        return lambda m: (m.s_u32[index][m.sel] & np.uint32(0xFFFF)).astype(np.uint16).view(dtype)
    return lambda m: m.s_u32[index][m.sel]


def scalar_write(operand: Operand, kind: str, instruction: Instruction) -> tuple[Write, tuple[int, ...]]:
    """(how to write [waves], the registers written)."""
    register = _register(operand, instruction, width(kind))
    if register.file != "s":
        raise refuse(instruction, "a vector register as a scalar destination")
    index = register.index
    changes_exec = index in (EXEC, EXEC + 1)

    def write(m: Machine, value: Array) -> None:
        if kind.endswith("64"):
            (m.s_i64 if kind == "i64" else m.s_u64)[index // 2][m.sel] = value
        else:
            (m.s_i32 if kind == "i32" else m.s_f32 if kind == "f32" else m.s_u32)[index][m.sel] = value
        if changes_exec:
            m.refresh()

    return write, tuple(range(index, index + register.count))


def _modified(read: Read, operand: Operand, kind: str) -> Read:
    """With the absolute value and the sign that the text asks for."""
    if not (operand.negate or operand.absolute):
        return read
    if "f" not in kind:
        raise UnimplementedInstruction(f"a sign or an absolute value on an operand of type {kind}")
    if operand.absolute and operand.negate:
        return lambda m: -np.abs(read(m))
    if operand.absolute:
        return lambda m: np.abs(read(m))
    return lambda m: -read(m)


def _column(read: Read) -> Read:
    def column(m: Machine) -> Array:
        value = read(m)
        return value[:, None] if value.ndim else value

    return column


def vector_read(operand: Operand, kind: str, instruction: Instruction, sources: Sources) -> Read:
    """An operand of a vector instruction: [waves, 64], or what broadcasts to it."""
    what = operand.what
    if kind == "mask":
        return mask_read(operand, instruction, sources)
    if not isinstance(what, Register) or what.file == "s":
        return _modified(_column(scalar_read(operand, kind, instruction, sources)), operand, kind)
    register = _register(operand, instruction, width(kind))
    index = vector_index(register)
    sources.vectors += range(index, index + register.count)
    if kind.endswith("64"):
        dtype = DTYPES[kind]

        def pair(m: Machine) -> Array:
            low, high = m.row(m.v_u32[index]), m.row(m.v_u32[index + 1])
            return ((high.astype(np.uint64) << np.uint64(32)) | low).view(dtype)

        return _modified(pair, operand, kind)
    if kind.endswith("16"):
        name = "v_" + kind.replace("b", "u")
        return _modified(lambda m: m.row(getattr(m, name)[index])[..., 0], operand, kind)
    name = "v_" + kind.replace("b", "u")

    def read(m: Machine) -> Array:
        row = getattr(m, name)[index]
        return row if m.whole else row[m.sel]

    return _modified(read, operand, kind)


def half_read(operand: Operand, kind: str, high: bool, instruction: Instruction, sources: Sources) -> Read:
    """One half of a 32-bit operand, as f16, u16 or i16 (packed and mixed operations)."""
    if isinstance(operand.what, Immediate):
        bits = constant_bits(operand.what.value, "f16" if isinstance(operand.what.value, float) else "b32")
        part = (bits >> 16 if high else bits) & 0xFFFF
        value = np.frombuffer(part.to_bytes(2, "little"), DTYPES[kind])[0]
        return lambda m: value
    register = _register(operand, instruction, 1)
    dtype = DTYPES[kind]
    if register.file == "s":
        index, shift = register.index, np.uint32(16 if high else 0)
        sources.scalars.append(index)
        return lambda m: ((m.s_u32[index][m.sel] >> shift) & np.uint32(0xFFFF)).astype(np.uint16).view(dtype)[:, None]
    index, place, name = vector_index(register), int(high), "v_" + kind.replace("b", "u")
    sources.vectors.append(index)
    return lambda m: m.row(getattr(m, name)[index])[..., place]


def word_read(operand: Operand, high: bool, instruction: Instruction, sources: Sources) -> Read:
    """One of the two float32 of a packed operand."""
    what = operand.what
    if isinstance(what, Immediate):
        if high:
            raise refuse(instruction, "the high half of a constant")
        value = constant(what.value, "f32")
        return lambda m: value
    if not isinstance(what, Register) or what.count != 2:
        raise refuse(instruction, "a packed float32 operand that is no pair of registers")
    part = Operand(Register(what.file, what.index + high))
    return vector_read(part, "f32", instruction, sources)


def mask_read(operand: Operand, instruction: Instruction, sources: Sources) -> Read:
    """A bit for each lane, as bool [waves, 64]."""
    if isinstance(operand.what, Immediate):
        bits = constant_bits(operand.what.value, "b64")
        lanes = unpack(np.array([bits], np.uint64))
        return lambda m: lanes
    register = _register(operand, instruction, 2)
    if register.file != "s" or register.index % 2:
        raise refuse(instruction, "a mask that is no aligned pair of scalar registers")
    pair = register.index // 2
    sources.masks.append(register.index)
    return lambda m: unpack(m.s_u64[pair][m.sel])


def mask_write(operand: Operand, instruction: Instruction) -> tuple[Write, int]:
    """Write bool [waves, 64] to a pair: inactive lanes give 0. Also the pair's first register."""
    register = _register(operand, instruction, 2)
    if register.file != "s" or register.index % 2:
        raise refuse(instruction, "a mask that is no aligned pair of scalar registers")
    pair, changes_exec = register.index // 2, register.index == EXEC

    def write(m: Machine, value: Array) -> None:
        bits = pack(np.ascontiguousarray(np.broadcast_to(value, (m.count, LANES))))
        m.s_u64[pair][m.sel] = bits if m.full else bits & m.exec_bits
        if changes_exec:
            m.refresh()

    return write, register.index


def vector_write(operand: Operand, kind: str, instruction: Instruction) -> tuple[Write, tuple[int, ...]]:
    """(how to write the active lanes, the registers written). 16-bit results clear the high half."""
    register = _register(operand, instruction, width(kind))
    if register.file == "s":
        raise refuse(instruction, "a scalar destination of a vector operation")
    index = vector_index(register)
    written = tuple(range(index, index + register.count))
    if kind.endswith("64"):

        def pair(m: Machine, value: Array) -> None:
            bits = np.asarray(value).view(np.uint64)
            m.put(m.v_u32[index], bits & np.uint64(0xFFFFFFFF))
            m.put(m.v_u32[index + 1], bits >> np.uint64(32))

        return pair, written
    if kind.endswith("16"):
        return (lambda m, value: m.put(m.v_u32[index], np.asarray(value, DTYPES[kind]).view(np.uint16))), written
    name = "v_" + kind.replace("b", "u")
    return (lambda m, value: m.put(getattr(m, name)[index], value)), written


def modifier_list(instruction: Instruction, name: str, length: int, default: int) -> tuple[int, ...]:
    values: Any = instruction.modifiers.get(name)
    if values is None:
        return (default,) * length
    return tuple(values) + (default,) * (length - len(values))
