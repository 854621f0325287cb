"""Operands that come from other lanes or parts of a register: DPP and SDWA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ferryman.backends.simulator.assembly import Instruction, Operand, Register
from ferryman.backends.simulator.machine import LANES, Machine, pack, unpack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import DTYPES, Read, Sources, refuse, vector_index, vector_read

LANE = np.arange(LANES)
_ROW, _IN_ROW = LANE // 16 * 16, LANE % 16


class Movement(NamedTuple):
    """DPP: ``source`` is the lane that each lane reads, ``valid`` whether there is one, ``enabled`` the lanes that
    row_mask and bank_mask leave on; ``zero``: bound_ctrl, which reads 0 where there is none instead of not writing."""

    source: Array
    valid: Array
    enabled: Array
    zero: bool


def movement(instruction: Instruction) -> Movement:
    """CDNA3 ISA, "Data parallel primitives". Raises UnimplementedInstruction."""
    controls = instruction.modifiers
    everywhere = np.ones(LANES, bool)
    source, valid = LANE, everywhere
    if "quad_perm" in controls:
        source = LANE // 4 * 4 + np.array(controls["quad_perm"])[LANE % 4]
    elif "row_shl" in controls:
        source, valid = LANE + controls["row_shl"], _IN_ROW + controls["row_shl"] < 16
    elif "row_shr" in controls:
        source, valid = LANE - controls["row_shr"], controls["row_shr"] <= _IN_ROW
    elif "row_ror" in controls:
        source = _ROW + (_IN_ROW - controls["row_ror"]) % 16
    elif "wave_shl" in controls:
        source, valid = LANE + 1, LANE < LANES - 1
    elif "wave_shr" in controls:
        source, valid = LANE - 1, LANE > 0
    elif "wave_rol" in controls:
        source = (LANE + 1) % LANES
    elif "wave_ror" in controls:
        source = (LANE - 1) % LANES
    elif "row_mirror" in controls:
        source = _ROW + 15 - _IN_ROW
    elif "row_half_mirror" in controls:
        source = LANE // 8 * 8 + 7 - LANE % 8
    elif controls.get("row_bcast") == 15:
        source, valid = _ROW - 1, LANE >= 16
    elif controls.get("row_bcast") == 31:
        source, valid = np.full(LANES, 31), LANE >= 32
    elif "row_newbcast" in controls:
        source = _ROW + controls["row_newbcast"]
    else:
        raise refuse(instruction, "an unknown DPP control")
    rows, banks = controls.get("row_mask", 15), controls.get("bank_mask", 15)
    enabled = ((rows >> (LANE // 16)) & 1).astype(bool) & ((banks >> (_IN_ROW // 4)) & 1).astype(bool)
    return Movement(np.where(valid, source, 0), valid, enabled, "bound_ctrl" in controls)


class Moved:
    """A DPP source: its value, the lanes that the result may be written to, and how undefined lanes travel."""

    def __init__(self, operand: Operand, kind: str, instruction: Instruction) -> None:
        self.how = movement(instruction)
        self.sources = Sources()
        if not isinstance(operand.what, Register) or kind.endswith("64"):
            raise refuse(instruction, "a DPP source that is no vector register of 32 bits")
        self.register = vector_index(operand.what)
        plain = Operand(operand.what)
        self._bits = vector_read(plain, "b32", instruction, self.sources)
        self._kind, self._negate, self._absolute = kind, operand.negate, operand.absolute

    def reaches(self, m: Machine) -> Array:
        """Lanes that read an active lane: bool [64] or [waves, 64]."""
        return self.how.valid if m.full else self.how.valid & m.lanes[:, self.how.source]

    def read(self, m: Machine) -> Array:
        bits = self._bits(m)[:, self.how.source]
        if self.how.zero:
            bits = np.where(self.reaches(m), bits, np.uint32(0))
        return typed(bits, self._kind, self._negate, self._absolute)

    def writes(self, m: Machine) -> Array:
        return self.how.enabled if self.how.zero else self.how.enabled & self.reaches(m)

    def taint(self, m: Machine, undefined: Array) -> Array:
        return pack(np.ascontiguousarray(unpack(undefined)[:, self.how.source] & self.reaches(m)))


def typed(bits: Array, kind: str, negate: bool = False, absolute: bool = False) -> Array:
    """uint32 as the type that an operation computes with."""
    if kind.endswith("16"):
        value = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(DTYPES[kind])
    else:
        value = np.ascontiguousarray(bits).view(DTYPES[kind])
    if absolute:
        value = np.abs(value)
    return -value if negate else value


_PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}


def part_read(operand: Operand, kind: str, part: str, instruction: Instruction, sources: Sources) -> Read:
    """An SDWA source: a byte or a word of a register, extended with zeros or with its sign."""
    shift, size = _PARTS[part]
    raw = vector_read(Operand(operand.what), "b32", instruction, sources)

    def read(m: Machine) -> Array:
        bits = np.asarray(raw(m))
        if size < 32:
            bits = (bits >> np.uint32(shift)) & np.uint32((1 << size) - 1)
            if operand.sext:
                top = np.uint32(1 << (size - 1))
                bits = (bits ^ top) - top
        return typed(bits, kind, operand.negate, operand.absolute)

    return read


def part_write(register: int, instruction: Instruction) -> Callable[[Machine, Array], None]:
    """An SDWA destination: the result's low bits in a byte or a word; the rest zero, sign-extended or kept."""
    shift, size = _PARTS[str(instruction.modifiers.get("dst_sel", "DWORD"))]
    rest = instruction.modifiers.get("dst_unused", "UNUSED_PAD")

    def write(m: Machine, value: Array) -> None:
        value = np.asarray(value)
        bits = value.view(np.uint16).astype(np.uint32) if value.dtype.itemsize == 2 else value.view(np.uint32)
        if size < 32:
            mask = np.uint32((1 << size) - 1)
            bits = (bits & mask) << np.uint32(shift)
            if rest == "UNUSED_PRESERVE":
                bits = bits | (m.row(m.v_u32[register]) & ~np.uint32(int(mask) << shift))
            elif rest == "UNUSED_SEXT":
                top = np.uint32(1 << (shift + size - 1))
                bits = (bits ^ top) - top
        m.put(m.v_u32[register], bits)

    return write
