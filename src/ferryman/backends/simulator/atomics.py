"""Atomic operations on global memory and LDS. Lanes act one after another, in the order of lanes, waves, workgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman.backends.simulator import formats
from ferryman.backends.simulator.access import (
    buffer_address,
    check_address,
    check_data,
    data_registers,
    global_address,
)
from ferryman.backends.simulator.assembly import Instruction, Operand, Word
from ferryman.backends.simulator.lds import in_bounds
from ferryman.backends.simulator.machine import LANES, Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, refuse, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import accept

_U32 = np.uint32
Update = Callable[[Any, Any], Any]  # (what is there, the operand) -> what will be


def _f32(function: Callable[[Any, Any], Any]) -> Update:
    return lambda old, new: np.asarray(function(old.view(np.float32), new.view(np.float32)), np.float32).view(_U32)


def _i32(function: Callable[[Any, Any], Any]) -> Update:
    return lambda old, new: np.asarray(function(old.view(np.int32), new.view(np.int32)), np.int32).view(_U32)


def _halves(dtype: str) -> Update:
    def update(old: Any, new: Any) -> Any:
        a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint16) for x in (old, new))
        if dtype == "f16":
            result = (a.view(np.float16) + b.view(np.float16)).view(np.uint16)
        else:
            result = formats.f32_to_bf16(formats.bf16_to_f32(a) + formats.bf16_to_f32(b)).astype(np.uint16)
        return result.view(_U32).reshape(np.shape(old))

    return update


UPDATES: dict[str, Update] = {
    "swap": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "smin": _i32(np.minimum),
    "smax": _i32(np.maximum),
    "umin": np.minimum,
    "umax": np.maximum,
    "inc": lambda old, new: np.where(old >= new, _U32(0), old + _U32(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - _U32(1)),
    "add_f32": _f32(lambda a, b: a + b),
    "pk_add_f16": _halves("f16"),
    "pk_add_bf16": _halves("bf16"),
}


def apply(words: Array, index: Array, operand: Array, update: Update) -> Array:
    """Update ``words[index]`` one after another; returns what each found."""
    previous = np.empty(len(index), _U32)
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    # the n-th update of every address at once: addresses differ within a round
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.array([], int)
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.r_[starts, len(ordered)]))
    for turn in range(int(rank.max()) + 1 if len(rank) else 0):
        chosen = order[rank == turn]
        previous[chosen] = words[index[chosen]]
        words[index[chosen]] = update(previous[chosen], operand[chosen])
    return previous


def _global(kind: str) -> None:
    update = UPDATES[kind]

    families = ("global", "flat") if kind == "pk_add_bf16" else ("global", "flat", "buffer")

    @register(" ".join(f"{family}_atomic_{kind}" for family in families), "atomics")
    def decode(instruction: Instruction, context: Context) -> Step:
        returns = bool(instruction.modifiers.get("sc0") or instruction.modifiers.get("glc"))
        sources = Sources()
        operands = list(instruction.operands)
        if instruction.name.startswith("buffer"):
            data, *rest = operands
            target = data if returns else None
            address = buffer_address(rest, instruction, sources, 4)
        else:
            target = operands.pop(0) if returns else None
            vaddr, data, *more = operands
            address = global_address(vaddr, more[0] if more else Operand(Word("off")), instruction, sources)
        (value,) = data_registers(data, 1, instruction)
        into = None if target is None else data_registers(target, 1, instruction)[0]
        data_sources = Sources([value])

        def step(m: Machine) -> None:
            place, active = address(m)
            if m.sanitize:
                check_address(m, sources, instruction, active)
            offset, good, region = m.memory.locate(m, place, 4, active, instruction, True)
            if m.sanitize:
                check_data(m, data_sources, good, instruction, place)
                m.memory.note_store(m, offset, 4, good, region, instruction, atomic=True)
            if m.counters is not None:
                m.counters.access(m, instruction, offset, 4, good)
            chosen = np.ones(offset.shape, bool) if good is None else good
            words = m.memory.words
            previous = apply(words, offset[chosen] >> 2, m.row(m.v_u32[value])[chosen], update)
            if into is not None:
                result = np.zeros(offset.shape, _U32)
                result[chosen] = previous
                m.put(m.v_u32[into], result)
                if m.sanitize and m.v_flag[into]:
                    m.define(into, None, instruction)
            m.issue(m.vmcnt, () if into is None else (into,))

        return step


for _kind in UPDATES:
    _global(_kind)

_LDS_NAMES = {
    "add_u32": "add",
    "sub_u32": "sub",
    "inc_u32": "inc",
    "dec_u32": "dec",
    "min_i32": "smin",
    "max_i32": "smax",
    "min_u32": "umin",
    "max_u32": "umax",
    "and_b32": "and",
    "or_b32": "or",
    "xor_b32": "xor",
    "add_f32": "add_f32",
    "pk_add_f16": "pk_add_f16",
    "pk_add_bf16": "pk_add_bf16",
}


def _local(name: str, kind: str, returns: bool) -> None:
    update = UPDATES[kind]

    @register(name, "atomics")
    def decode(instruction: Instruction, context: Context) -> Step:
        accept(instruction, frozenset({"offset"}))
        operands = list(instruction.operands)
        into = data_registers(operands.pop(0), 1, instruction)[0] if returns else None
        if len(operands) != 2:
            raise refuse(instruction, "an atomic without an address and a value")
        sources = Sources()
        lane = vector_read(operands[0], "u32", instruction, sources)
        (value,) = data_registers(operands[1], 1, instruction)
        constant = int(instruction.modifiers.get("offset", 0))
        data_sources = Sources([value])

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
            start = np.broadcast_to(np.asarray(lane(m)).astype(np.int64) + constant, (m.count, LANES))
            address, active = in_bounds(m, start, 4, instruction)
            taint = None
            if m.sanitize:
                check_data(m, data_sources, active, instruction, address)
                place = m.shadow.places(m, address, 4)
                unwritten = ~m.shadow.defined[place].all(-1) & (m.lanes if active is None else active)
                if unwritten.any():
                    m.report(
                        "uninitialised", "an atomic on LDS that nothing has written", instruction, unwritten, address
                    )
                m.shadow.atomic(m, place, active, instruction, address)
            if m.counters is not None:
                m.counters.lds(m, instruction, address, 4, active)
            chosen = np.ones((m.count, LANES), bool) if active is None else active
            index = ((m.groups[m.sel].astype(np.int64) * m.lds_bytes)[:, None] + address)[chosen] >> 2
            previous = apply(m.lds.view(_U32), index, m.row(m.v_u32[value])[chosen], update)
            if into is not None:
                result = np.zeros((m.count, LANES), _U32)
                result[chosen] = previous
                m.put(m.v_u32[into], result)
                if m.sanitize and m.v_flag[into]:
                    m.define(into, taint, instruction)
            m.issue(m.lgkmcnt, () if into is None else (into,))

        return step


for _name, _kind in _LDS_NAMES.items():
    _local(f"ds_{_name}", _kind, False)
    _local("ds_{}_rtn_{}".format(*_name.rsplit("_", 1)), _kind, True)
