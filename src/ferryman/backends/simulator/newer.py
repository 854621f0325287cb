"""What gfx950 (CDNA4) adds to gfx942: conversions, swaps of lanes, transposed LDS reads, ternary bit operations."""

from __future__ import annotations

import numpy as np

from ferryman.backends.simulator import formats, numerics
from ferryman.backends.simulator.access import check_address, data_registers
from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.lds import fetch, in_bounds
from ferryman.backends.simulator.machine import LANES, Machine, pack, unpack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import accept, build, vector, vector_operation

CDNA4 = frozenset({"gfx950"})
_U32 = np.uint32


def _nan_minimum(a: Array, b: Array) -> Array:
    """IEEE 754-2019 minimum: a NaN wins; -0 is below +0."""
    return np.where(np.isnan(a) | np.isnan(b), numerics.QUIET, numerics.minimum(a, b)).astype(np.float32)


def _nan_maximum(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), numerics.QUIET, numerics.maximum(a, b)).astype(np.float32)


vector("v_minimum3_f32", "f32 = f32 f32 f32", lambda a, b, c: _nan_minimum(_nan_minimum(a, b), c), arches=CDNA4)
vector("v_maximum3_f32", "f32 = f32 f32 f32", lambda a, b, c: _nan_maximum(_nan_maximum(a, b), c), arches=CDNA4)
vector(
    "v_cvt_pk_bf16_f32",
    "b32 = f32 f32",
    lambda a, b: formats.f32_to_bf16(a) | (formats.f32_to_bf16(b) << _U32(16)),
    arches=CDNA4,
)


@vector_operation("v_cvt_pk_f16_f32", "b32 = f32 f32", arches=CDNA4)
def _pair(a: Array, b: Array) -> Array:
    low, high = (np.asarray(x).astype(np.float16).view(np.uint16).astype(_U32) for x in (a, b))
    return low | (high << _U32(16))


@register("v_bitop3_b32", "vector", arches=CDNA4)
def _ternary(instruction: Instruction, context: Context) -> Step:
    """Any function of three bits: bit (4 a + 2 b + c) of the modifier is the result."""
    accept(instruction, frozenset({"bitop3"}))
    truth = int(instruction.modifiers.get("bitop3", 0))

    def function(a: Array, b: Array, c: Array) -> Array:
        result = _U32(0)
        for term in range(8):
            if truth >> term & 1:
                result = result | ((a if term & 4 else ~a) & (b if term & 2 else ~b) & (c if term & 1 else ~c))
        return result

    plain = Instruction(instruction.name, "e64", instruction.operands, {}, instruction.text, instruction.line)
    return build(plain, context, "b32 = b32 b32 b32", function)


def _swap(name: str, size: int) -> None:
    @register(name, "lanes", arches=CDNA4)
    def decode(instruction: Instruction, context: Context) -> Step:
        """The odd rows of the first register change places with the even rows of the second; rows of ``size`` lanes."""
        accept(instruction, frozenset())
        (first,), (second,) = (data_registers(o, 1, instruction) for o in instruction.operands)
        odd = (np.arange(LANES) // size) % 2 == 1
        other = np.arange(LANES) ^ size

        def step(m: Machine) -> None:
            a, b = np.array(m.row(m.v_u32[first])), np.array(m.row(m.v_u32[second]))
            taints = []
            for r in (first, second):
                bits = m.taint(r, instruction) if m.sanitize and m.v_flag[r] else None
                taints.append(np.zeros((m.count, LANES), bool) if bits is None else unpack(bits))
            m.put(m.v_u32[first], np.where(odd, b[:, other], a))
            m.put(m.v_u32[second], np.where(odd, b, a[:, other]))
            if m.sanitize:
                left = np.where(odd, taints[1][:, other], taints[0])
                right = np.where(odd, taints[1], taints[0][:, other])
                for r, taint in ((first, left), (second, right)):
                    if taint.any() or m.v_flag[r]:
                        m.define(r, pack(np.ascontiguousarray(taint)) if taint.any() else None, instruction)

        return step


_swap("v_permlane16_swap_b32", 16)
_swap("v_permlane32_swap_b32", 32)


def _transposed(name: str, bits: int) -> None:
    @register(name, "LDS", arches=CDNA4)
    def decode(instruction: Instruction, context: Context) -> Step:
        """Sixteen lanes read 64 bits each, and element n of lane (q, r) comes from element r of lane (n, q), lanes
        counted in rows of ``16 / count``. Source: the drawing in Triton's pull request 8525."""
        accept(instruction, frozenset({"offset"}))
        target, base = instruction.operands
        sources = Sources()
        lane = vector_read(base, "u32", instruction, sources)
        registers = data_registers(target, 2, instruction)
        constant = int(instruction.modifiers.get("offset", 0))
        count = 64 // bits
        dtype = np.uint16 if bits == 16 else np.uint8

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
            start = np.broadcast_to(np.asarray(lane(m)).astype(np.int64) + constant, (m.count, LANES))
            address, active = in_bounds(m, start, 8, instruction)
            taint = None
            if m.sanitize:
                taint = m.shadow.read(m, m.shadow.places(m, address, 8), active, instruction, address)
                if taint is not None:  # an element of a lane reaches others of its sixteen
                    spread = unpack(taint).reshape(m.count, 4, 16).any(-1)
                    taint = pack(np.ascontiguousarray(np.repeat(spread, 16, axis=1)))
            if m.counters is not None:
                m.counters.lds(m, instruction, address, 8, active)
            words = np.stack(fetch(m, address, 8), -1)
            elements = np.ascontiguousarray(words).view(dtype).reshape(m.count, 4, count, 16 // count, count)
            moved = np.ascontiguousarray(elements.transpose(0, 1, 3, 4, 2)).reshape(m.count, LANES, count)
            result = moved.view(_U32)
            for i, r in enumerate(registers):
                m.put(m.v_u32[r], result[..., i])
                if m.sanitize and (taint is not None or m.v_flag[r]):
                    m.define(r, taint, instruction)
            m.issue(m.lgkmcnt, registers)

        return step


_transposed("ds_read_b64_tr_b16", 16)
_transposed("ds_read_b64_tr_b8", 8)
