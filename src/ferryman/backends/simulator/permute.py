"""Values that travel between lanes through the crossbar of LDS: ds_bpermute, ds_permute, ds_swizzle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman.backends.simulator.access import check_address, data_registers
from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import LANES, Machine, pack, unpack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, refuse, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import accept


def _crossbar(name: str, move: Callable[[Machine, Array, Array], tuple[Array, Array]], operands: int) -> None:
    """``move(m, selector, data)`` -> (values, the lane that each came from, or -1)."""

    @register(name, "LDS")
    def decode(instruction: Instruction, context: Context) -> Step:
        accept(instruction, frozenset({"offset"}))
        target, *inputs = instruction.operands
        if len(inputs) != operands:
            raise refuse(instruction, f"{len(inputs)} sources where {operands} are needed")
        sources, data_sources = Sources(), Sources()
        select = vector_read(inputs[0], "u32", instruction, sources) if operands == 2 else None
        data = vector_read(inputs[-1], "b32", instruction, data_sources)
        (destination,) = data_registers(target, 1, instruction)
        offset: Any = instruction.modifiers.get("offset", 0)
        fixed = swizzle(offset, instruction) if select is None else None

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
            selector: Array = fixed if select is None else np.asarray(select(m)) + np.uint32(offset)
            value, origin = move(m, np.broadcast_to(selector, (m.count, LANES)), data(m))
            if m.absent is not None and move is not _push:
                m.borrow(_origin(move, np.broadcast_to(selector, (m.count, LANES))), None, instruction)
            taint = None
            register_read = data_sources.vectors[0]
            if m.sanitize and m.v_flag[register_read]:
                bits = m.taint(register_read, instruction)
                if bits is not None:
                    taint = pack(
                        np.ascontiguousarray(np.take_along_axis(unpack(bits), np.maximum(origin, 0), 1) & (origin >= 0))
                    )
            m.put(m.v_u32[destination], value)
            if m.sanitize and (taint is not None or m.v_flag[destination]):
                m.define(destination, taint, instruction)
            m.issue(m.lgkmcnt, (destination,))

        return step


def _pull(m: Machine, selector: Array, data: Array) -> tuple[Array, Array]:
    """ds_bpermute_b32: each lane reads the lane that it names, in bytes; 0 from an inactive one."""
    origin = _origin(_pull, selector)
    value = np.take_along_axis(np.broadcast_to(data, origin.shape), origin, 1)
    if m.full:
        return value, origin
    alive = np.take_along_axis(m.lanes, origin, 1)
    return np.where(alive, value, np.uint32(0)), np.where(alive, origin, -1)


def _origin(move: Any, selector: Array) -> Array:
    """The lane that each lane names, whether it is active or not."""
    if move is _pull:
        return ((selector >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
    return np.asarray(selector, np.int64)


def _push(m: Machine, selector: Array, data: Array) -> tuple[Array, Array]:
    """ds_permute_b32: each active lane writes to the lane that it names; the highest lane wins, others get 0."""
    aim = ((selector >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
    origin = np.full((m.count, LANES), -1)
    rows = np.arange(m.count)
    for lane in range(LANES):
        alive = m.lanes[:, lane]
        origin[rows[alive], aim[alive, lane]] = lane
    value = np.take_along_axis(np.broadcast_to(data, origin.shape), np.maximum(origin, 0), 1)
    return np.where(origin >= 0, value, np.uint32(0)), origin


def swizzle(offset: Any, instruction: Instruction) -> Array:
    """The source lane of each lane. CDNA3 ISA, DS_SWIZZLE_B32: from 0xe000 on the order of an FFT, from 0xc000 on a
    rotation, with bit 15 a permutation within four lanes, else bit masks (and, or, xor) within 32."""
    lane = np.arange(LANES, dtype=np.uint32)
    if isinstance(offset, int):
        if offset >= 0xC000:
            kept = offset & 31
            if offset >= 0xE000:
                reverse = np.array([int(f"{n & 31:05b}"[::-1], 2) for n in range(LANES)], np.uint32)
                moved = reverse >> np.uint32(kept.bit_count())
            else:
                by = -(offset >> 5 & 31) if offset & 0x400 else offset >> 5 & 31
                moved = (np.arange(LANES) + by & 31 & ~kept).astype(np.uint32)
            return (lane & 32) | moved | (lane & np.uint32(kept))
        if offset & 0x8000:
            table = np.array([(offset >> (2 * i)) & 3 for i in range(4)], np.uint32)
            return lane // 4 * 4 + table[lane % 4]
        keep, force, flip = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
        return (lane & 32) | ((((lane & 31) & np.uint32(keep)) | np.uint32(force)) ^ np.uint32(flip))
    words = str(offset).removeprefix("swizzle(").rstrip(")").split(",")
    kind, numbers = words[0].strip(), [w.strip() for w in words[1:]]
    if kind == "QUAD_PERM":
        return lane // 4 * 4 + np.array([int(n) for n in numbers], np.uint32)[lane % 4]
    if kind == "SWAP":
        return lane ^ np.uint32(int(numbers[0]))
    if kind == "REVERSE":
        return lane ^ np.uint32(int(numbers[0]) - 1)
    if kind == "BROADCAST":
        size, chosen = (int(n) for n in numbers)
        return lane // size * size + np.uint32(chosen)
    if kind == "BITMASK_PERM":
        pattern = numbers[0].strip('"')
        result = lane & np.uint32(32)
        for bit, letter in zip((16, 8, 4, 2, 1), pattern, strict=True):
            mine = lane & np.uint32(bit)
            letters: dict[str, Array] = {
                "0": lane * np.uint32(0),
                "1": lane * np.uint32(0) + np.uint32(bit),
                "p": mine,
                "i": mine ^ np.uint32(bit),
            }
            result = result | letters[letter]
        return result
    raise refuse(instruction, f"an unknown swizzle {offset}")


def _swizzled(m: Machine, origin: Array, data: Array) -> tuple[Array, Array]:
    source = np.asarray(origin, np.int64)
    value = np.take_along_axis(np.broadcast_to(data, source.shape), source, 1)
    if m.full:
        return value, source
    alive = np.take_along_axis(m.lanes, source, 1)
    return np.where(alive, value, np.uint32(0)), np.where(alive, source, -1)


_crossbar("ds_bpermute_b32", _pull, 2)
_crossbar("ds_permute_b32", _push, 2)
_crossbar("ds_swizzle_b32", _swizzled, 1)
