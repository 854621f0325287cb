"""Packed instructions (VOP3P): two operations on the halves of registers, or on pairs of registers; mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman.backends.simulator import numerics
from ferryman.backends.simulator.assembly import Immediate, Instruction, Operand
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import (
    Read,
    Sources,
    Write,
    constant,
    half_read,
    modifier_list,
    refuse,
    vector_index,
    vector_read,
    word_read,
)
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import accept, finished, half_write, undefined

_PACKED = frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"})


def _signed(read: Read, negate: int) -> Read:
    return (lambda m: -read(m)) if negate else read


def _packed_float(name: str, sources_wanted: int, function: Callable[..., Array]) -> None:
    """Two float32 operations on pairs of registers."""

    @register(name, "vector")
    def decode(instruction: Instruction, context: Context) -> Step:
        accept(instruction, _PACKED)
        target, *inputs = instruction.operands
        if len(inputs) != sources_wanted:
            raise refuse(instruction, f"{len(inputs)} sources where {sources_wanted} are needed")
        choose = modifier_list(instruction, "op_sel", 3, 0), modifier_list(instruction, "op_sel_hi", 3, 1)
        negate = modifier_list(instruction, "neg_lo", 3, 0), modifier_list(instruction, "neg_hi", 3, 0)
        halves, seen = [], []
        for part in (0, 1):
            sources = Sources()
            halves.append(
                [
                    _signed(word_read(o, bool(choose[part][i]), instruction, sources), negate[part][i])
                    for i, o in enumerate(inputs)
                ]
            )
            seen.append(sources)
        what: Any = target.what
        first = vector_index(what)
        low_function = finished(function, "f32", instruction, context, True)

        def step(m: Machine) -> None:
            # both before either is written: a source may be the destination
            low = low_function(*[read(m) for read in halves[0]])
            high = low_function(*[read(m) for read in halves[1]])
            taints = [undefined(m, s, instruction) for s in seen] if m.sanitize else [None, None]
            m.put(m.v_f32[first], low)
            m.put(m.v_f32[first + 1], high)
            if m.sanitize:
                for i, taint in enumerate(taints):
                    if taint is not None or m.v_flag[first + i]:
                        m.define(first + i, taint, instruction)

        return step


_packed_float("v_pk_fma_f32", 3, numerics.fma32)
_packed_float("v_pk_mul_f32", 2, lambda a, b: a * b)
_packed_float("v_pk_add_f32", 2, lambda a, b: a + b)


@register("v_pk_mov_b32", "vector")
def _packed_move(instruction: Instruction, context: Context) -> Step:
    """The low result from the first source, the high one from the second; op_sel picks the half of each."""
    accept(instruction, _PACKED)
    target, first, second = instruction.operands
    choose = modifier_list(instruction, "op_sel", 2, 0)
    what: Any = target.what
    index = vector_index(what)
    seen = [Sources(), Sources()]
    reads = [word_read(o, bool(choose[i]), instruction, seen[i]) for i, o in enumerate((first, second))]

    def step(m: Machine) -> None:
        values = [np.array(read(m)) for read in reads]
        taints = [undefined(m, s, instruction) for s in seen] if m.sanitize else [None, None]
        for i, value in enumerate(values):
            m.put(m.v_u32[index + i], value.view(np.uint32))
            if m.sanitize and (taints[i] is not None or m.v_flag[index + i]):
                m.define(index + i, taints[i], instruction)

    return step


def _packed_half(names: str, kind: str, function: Callable[..., Array], shifts: bool = False) -> None:
    """Two 16-bit operations on the halves of registers."""

    @register(names, "vector")
    def decode(instruction: Instruction, context: Context) -> Step:
        accept(instruction, _PACKED)
        target, *inputs = instruction.operands
        choose = modifier_list(instruction, "op_sel", 3, 0), modifier_list(instruction, "op_sel_hi", 3, 1)
        negate = modifier_list(instruction, "neg_lo", 3, 0), modifier_list(instruction, "neg_hi", 3, 0)
        if "clamp" in instruction.modifiers and kind != "f16":
            raise refuse(instruction, f"clamp on {kind}")
        sources = Sources()
        halves = [
            [
                _signed(half_read(o, kind, bool(choose[p][i]), instruction, sources), negate[p][i])
                for i, o in enumerate(inputs)
            ]
            for p in (0, 1)
        ]
        what: Any = target.what
        index = vector_index(what)
        whole = finished(function, kind, instruction, context, True)

        def step(m: Machine) -> None:
            taint = undefined(m, sources, instruction) if m.sanitize else None
            low, high = (whole(*[read(m) for read in half]) for half in halves)
            m.put(m.v_u32[index], numerics.pair16(low, high))
            if m.sanitize and (taint is not None or m.v_flag[index]):
                m.define(index, taint, instruction)

        return step


_packed_half("v_pk_add_f16", "f16", lambda a, b: a + b)
_packed_half("v_pk_mul_f16", "f16", lambda a, b: a * b)
_packed_half("v_pk_fma_f16", "f16", numerics.fma16)
_packed_half("v_pk_max_f16", "f16", numerics.maximum)
_packed_half("v_pk_min_f16", "f16", numerics.minimum)
_packed_half("v_pk_add_u16", "u16", lambda a, b: a + b)
_packed_half("v_pk_sub_u16", "u16", lambda a, b: a - b)
_packed_half("v_pk_add_i16", "i16", lambda a, b: a + b)
_packed_half("v_pk_sub_i16", "i16", lambda a, b: a - b)
_packed_half("v_pk_mul_lo_u16", "u16", lambda a, b: a * b)
_packed_half("v_pk_mad_u16", "u16", lambda a, b, c: a * b + c)
_packed_half("v_pk_mad_i16", "i16", lambda a, b, c: a * b + c)
_packed_half("v_pk_max_u16", "u16", np.maximum)
_packed_half("v_pk_min_u16", "u16", np.minimum)
_packed_half("v_pk_max_i16", "i16", np.maximum)
_packed_half("v_pk_min_i16", "i16", np.minimum)
_packed_half("v_pk_lshlrev_b16", "u16", lambda n, a: a << (n & np.uint16(15)))
_packed_half("v_pk_lshrrev_b16", "u16", lambda n, a: a >> (n & np.uint16(15)))
_packed_half("v_pk_ashrrev_i16", "i16", lambda n, a: a >> (n & np.int16(15)))


def _mixed_read(i: int, operand: Operand, instruction: Instruction, sources: Sources) -> Read:
    """A source of v_fma_mix: float32, or (op_sel_hi) a float16 in the half that op_sel picks."""
    half = modifier_list(instruction, "op_sel_hi", 3, 0)[i]
    if not half:
        return vector_read(operand, "f32", instruction, sources)
    if isinstance(operand.what, Immediate):
        value = np.float32(constant(operand.what.value, "f16"))
        return lambda m: value
    high = bool(modifier_list(instruction, "op_sel", 3, 0)[i])
    plain = half_read(operand, "f16", high, instruction, sources)

    def read(m: Machine) -> Array:
        value = plain(m).astype(np.float32)
        if operand.absolute:
            value = np.abs(value)
        return -value if operand.negate else value

    return read


@register("v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16", "vector")
def _mixed(instruction: Instruction, context: Context) -> Step:
    """A fused multiply-add whose sources are float32 or float16; the f16 forms round once more and keep the other
    half."""
    accept(instruction, _PACKED)
    target, *inputs = instruction.operands
    sources = Sources()
    reads = [_mixed_read(i, o, instruction, sources) for i, o in enumerate(inputs)]
    function: Callable[..., Array] = numerics.fma32
    if instruction.name == "v_fma_mix_f32":
        function = finished(function, "f32", instruction, context, True)
        what: Any = target.what
        index = vector_index(what)

        write: Write = lambda m, value: m.put(m.v_f32[index], value)  # noqa: E731 - as the other form
    else:
        write, index = half_write(target, "f16", instruction.name == "v_fma_mixhi_f16", instruction)
        function = finished(_fma_to_half, "f16", instruction, context, True)

    def step(m: Machine) -> None:
        taint = undefined(m, sources, instruction) if m.sanitize else None
        write(m, function(*[read(m) for read in reads]))
        if m.sanitize and (taint is not None or m.v_flag[index]):
            m.define(index, taint, instruction)

    return step


def _fma_to_half(a: Array, b: Array, c: Array) -> Array:
    return numerics.fma32(a, b, c).astype(np.float16)
