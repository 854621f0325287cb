"""Loads and stores of global memory (GLOBAL, FLAT, BUFFER, SMEM), of scratch, and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman.backends.simulator.assembly import Immediate, Instruction, Operand, Register, Word
from ferryman.backends.simulator.machine import LANES, Machine, unpack
from ferryman.backends.simulator.memory import Memory
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Read, Sources, refuse, scalar_read, vector_index, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import undefined
from ferryman.errors import SimulationError

# name -> (bytes, sign-extends, half of the register that is written or None for all of it)
_LOADS: dict[str, tuple[int, bool, int | None]] = {
    "dword": (4, False, None),
    "dwordx2": (8, False, None),
    "dwordx3": (12, False, None),
    "dwordx4": (16, False, None),
    "ubyte": (1, False, None),
    "sbyte": (1, True, None),
    "ushort": (2, False, None),
    "sshort": (2, True, None),
    "short_d16": (2, False, 0),
    "short_d16_hi": (2, False, 1),
    "ubyte_d16": (1, False, 0),
    "ubyte_d16_hi": (1, False, 1),
    "sbyte_d16": (1, True, 0),
    "sbyte_d16_hi": (1, True, 1),
}
_STORES: dict[str, tuple[int, int]] = {  # bytes, shift of the data
    "byte": (1, 0),
    "byte_d16_hi": (1, 16),
    "short": (2, 0),
    "short_d16_hi": (2, 16),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}
_CACHE = frozenset({"sc0", "sc1", "nt", "glc", "slc", "dlc", "offset", "offen", "idxen", "lds"})
Address = Callable[[Machine], tuple[Array, Array | None]]  # (addresses, the active lanes or None for all)


def widths(instruction: Instruction) -> int | None:
    """Bytes of a global access, for the race shadow; None for other instructions."""
    family, _, rest = instruction.name.partition("_")
    kind = rest.partition("_")[2]
    if family not in ("global", "flat", "buffer"):
        return None
    if rest.startswith("atomic"):
        return 4
    access = _LOADS.get(kind) if rest.startswith("load") else _STORES.get(kind)
    return None if access is None else access[0]


def _active(m: Machine) -> Array | None:
    return None if m.full else m.lanes


def check_address(m: Machine, sources: Sources, instruction: Instruction, active: Array | None) -> None:
    taint = undefined(m, sources, instruction)
    if taint is not None:
        bad = unpack(taint & m.exec_bits)
        if bad.any():
            m.report("uninitialised", "an address depends on what nothing has written", instruction, bad)


def _offset(instruction: Instruction) -> int:
    return int(instruction.modifiers.get("offset", 0))


def _lanes_of(operand: Operand, instruction: Instruction) -> Operand:
    """An address of each lane: vector registers, nothing else."""
    if not isinstance(operand.what, Register) or operand.what.file == "s":
        raise refuse(instruction, "an address that is no vector register")
    return operand


def global_address(vaddr: Operand, saddr: Operand, instruction: Instruction, sources: Sources) -> Address:
    """A 64-bit address in vector registers, or a scalar base and a 32-bit offset, plus the constant offset."""
    constant = np.uint64(_offset(instruction) & 0xFFFFFFFFFFFFFFFF)
    if isinstance(saddr.what, Word):
        if saddr.what.name != "off":
            raise refuse(instruction, f"an address {saddr.what.name}")
        wide = vector_read(_lanes_of(vaddr, instruction), "u64", instruction, sources)
        return lambda m: (wide(m) + constant, _active(m))
    if isinstance(saddr.what, Immediate):
        raise refuse(instruction, "a constant as the base of an address")
    narrow = vector_read(_lanes_of(vaddr, instruction), "u32", instruction, sources)
    base = scalar_read(saddr, "u64", instruction, sources)
    return lambda m: (base(m)[:, None] + narrow(m) + constant, _active(m))


def buffer_address(parts: list[Operand], instruction: Instruction, sources: Sources, size: int) -> Address:
    """Base and size from the resource descriptor; lanes past its size do nothing (CDNA3 ISA, raw buffers)."""
    vaddr, resource, soffset = parts
    if "idxen" in instruction.modifiers:
        raise refuse(instruction, "a structured buffer")
    what = resource.what
    if not isinstance(what, Register) or what.file != "s" or what.count != 4 or what.index % 4:
        raise refuse(instruction, "a resource descriptor that is no aligned group of four scalar registers")
    words = what.index
    sources.scalars += range(words, words + 4)
    constant = np.uint64(_offset(instruction))
    moved = scalar_read(soffset, "u32", instruction, sources)
    lane: Read | None = None
    if "offen" in instruction.modifiers:
        lane = vector_read(_lanes_of(vaddr, instruction), "u32", instruction, sources)

    def address(m: Machine) -> tuple[Array, Array | None]:
        high, limit = m.s_u32[words + 1][m.sel], m.s_u32[words + 2][m.sel]
        if (high >> np.uint32(16)).any():
            raise SimulationError(f"a strided or swizzled buffer: {instruction.text} (line {instruction.line})")
        base = ((high & np.uint32(0xFFFF)).astype(np.uint64) << np.uint64(32)) | m.s_u32[words][m.sel]
        extra = np.asarray(moved(m)).astype(np.uint64)
        offset = (np.zeros((m.count, LANES), np.uint64) if lane is None else lane(m).astype(np.uint64)) + constant
        room = limit.astype(np.int64) - extra.astype(np.int64)
        inside = (
            offset.view(np.int64) + (size - 1) < room[:, None]
            if room.ndim
            else offset.view(np.int64) + (size - 1) < room
        )
        base = base + extra
        addresses = base[:, None] + offset
        if inside.all():
            return addresses, _active(m)
        return addresses, inside if m.full else inside & m.lanes

    return address


def data_registers(operand: Operand, count: int, instruction: Instruction) -> range:
    what = operand.what
    if not isinstance(what, Register) or what.file == "s" or what.count != count:
        raise refuse(instruction, f"data that is not {count} vector registers")
    first = vector_index(what)
    return range(first, first + count)


def extended(words: list[Array], size: int, signed: bool) -> list[Array]:
    if not signed:
        return words
    top = np.uint32(1 << (8 * size - 1))
    return [(words[0] ^ top) - top]


def _load(instruction: Instruction, target: Operand, address: Address, sources: Sources, kind: str, flat: bool) -> Step:
    size, signed, half = _LOADS[kind]
    registers = data_registers(target, max(1, size // 4), instruction)
    buffer = instruction.name.startswith("buffer")

    def step(m: Machine) -> None:
        memory: Memory = m.memory
        place, active = address(m)
        if m.sanitize:
            check_address(m, sources, instruction, active)
        offset, good, region = memory.locate(m, place, size, active, instruction, False)
        if m.sanitize:
            memory.note_load(m, offset, size, good, region, instruction)
        if m.counters is not None:
            m.counters.access(m, instruction, offset, size, good)
        words = extended(memory.load(offset, size), size, signed)
        if good is not None and (buffer or good is not active):
            words = [np.where(good, w, np.uint32(0)) for w in words]
        for r, word in zip(registers, words, strict=True):
            if half is None:
                m.put(m.v_u32[r], word)
            else:
                m.put(m.v_u16[r][..., half], word.astype(np.uint16))
            if m.sanitize and m.v_flag[r]:
                m.define(r, None, instruction, behind=None if flat else m.vmcnt)
        m.issue(m.vmcnt, registers)
        if flat:
            m.issue(m.lgkmcnt, registers)

    return step


def _store(instruction: Instruction, data: Operand, address: Address, sources: Sources, kind: str, flat: bool) -> Step:
    size, shift = _STORES[kind]
    registers = data_registers(data, max(1, size // 4), instruction)
    data_sources = Sources(list(registers))

    def step(m: Machine) -> None:
        memory: Memory = m.memory
        place, active = address(m)
        if m.sanitize:
            check_address(m, sources, instruction, active)
        offset, good, region = memory.locate(m, place, size, active, instruction, True)
        if m.sanitize:
            check_data(m, data_sources, good, instruction, place)
            memory.note_store(m, offset, size, good, region, instruction)
        if m.counters is not None:
            m.counters.access(m, instruction, offset, size, good)
        words = [m.row(m.v_u32[r]) >> np.uint32(shift) if shift else m.row(m.v_u32[r]) for r in registers]
        memory.store(offset, words, size, good)
        m.issue(m.vmcnt)
        if flat:
            m.issue(m.lgkmcnt)

    return step


def check_data(m: Machine, sources: Sources, good: Array | None, instruction: Instruction, place: Array | None) -> None:
    """Undefined data matters in the lanes that are stored."""
    if not any(m.v_flag[r] for r in sources.vectors):
        return
    taint = undefined(m, sources, instruction)
    if taint is None:
        return
    bad = unpack(taint)
    bad = bad & (m.lanes if good is None else good)
    if bad.any():
        m.report("uninitialised", "what is stored was never written", instruction, bad, place)


def _accept(instruction: Instruction, *more: str) -> None:
    unknown = sorted(set(instruction.modifiers) - _CACHE - set(more))
    if unknown or instruction.modifiers.get("lds"):
        raise refuse(instruction, f"modifiers {', '.join(unknown) or 'lds'}")


def _enter(kind: str, families: tuple[str, ...], loads: bool) -> None:
    word = "load" if loads else "store"

    @register(" ".join(f"{f}_{word}_{kind}" for f in families), "memory")
    def decode(instruction: Instruction, context: Context) -> Step:
        _accept(instruction)
        sources = Sources()
        family = instruction.name.partition("_")[0]
        size = (_LOADS if loads else _STORES)[kind][0]
        if family == "buffer":
            data, *rest = instruction.operands
            if len(rest) != 3:
                raise refuse(instruction, f"{len(rest) + 1} operands where 4 are needed")
            address = buffer_address(rest, instruction, sources, size)
        elif loads:
            data, vaddr, *more = instruction.operands
            address = global_address(vaddr, more[0] if more else Operand(Word("off")), instruction, sources)
        else:
            vaddr, data, *more = instruction.operands
            address = global_address(vaddr, more[0] if more else Operand(Word("off")), instruction, sources)
        builder = _load if loads else _store
        return builder(instruction, data, address, sources, kind, family == "flat")


for _kind in _LOADS:
    _enter(_kind, ("global", "flat", "buffer"), True)
for _kind in _STORES:
    _enter(_kind, ("global", "flat", "buffer"), False)

# ------------------------------------------------------------------------------------------------ scalar loads


def _scalar_load(names: str, count: int) -> None:
    @register(names, "memory")
    def decode(instruction: Instruction, context: Context) -> Step:
        target, base, offset = instruction.operands
        unknown = set(instruction.modifiers) - {"offset", "glc"}
        if unknown:
            raise refuse(instruction, f"modifiers {', '.join(sorted(unknown))}")
        sources = Sources()
        buffer = instruction.name.startswith("s_buffer")
        where: Any = base.what
        if buffer:
            pair, limit_at = Operand(Register("s", where.index, 2)), where.index + 2
            sources.scalars.append(limit_at)
        else:
            pair = base
        start = scalar_read(pair, "u64", instruction, sources)
        if isinstance(offset.what, Immediate):
            constant = np.uint64(int(offset.what.value) & 0xFFFFFFFFFFFFFFFF)
            moved: Read = lambda m: constant  # noqa: E731 - one of two forms of the same thing
        else:
            register_offset = scalar_read(offset, "u32", instruction, sources)
            extra = np.uint64(_offset(instruction))
            moved = lambda m: register_offset(m).astype(np.uint64) + extra  # noqa: E731
        what: Any = target.what
        if what.file != "s" or what.count != count:
            raise refuse(instruction, f"a destination that is not {count} scalar registers")
        registers = range(what.index, what.index + count)

        def step(m: Machine) -> None:
            if m.sanitize and any(m.s_flag[r] and m.scalar_taint(r, instruction) is not None for r in sources.scalars):
                m.report("uninitialised", "an address depends on what nothing has written", instruction)
            first = start(m) & np.uint64(0x0000FFFFFFFFFFFF) if buffer else start(m)
            address = np.broadcast_to(first + moved(m), (m.count,))
            offset, good, region = m.memory.locate(
                m, np.ascontiguousarray(address), 4 * count, None, instruction, False
            )
            if m.sanitize:
                m.memory.note_load(m, offset, 4 * count, good, region, instruction)
            if m.counters is not None:
                m.counters.access(m, instruction, offset, 4 * count, good)
            index = offset >> 2
            for i, r in enumerate(registers):
                word = m.memory.words[index + i]
                m.s_u32[r][m.sel] = word if good is None else np.where(good, word, np.uint32(0))
                if m.sanitize and m.s_flag[r]:
                    m.define_scalar(r, None, instruction)
            m.issue(m.lgkmcnt, scalars=registers, ordered=False)

        return step


for _count in (1, 2, 4, 8, 16):
    _suffix = "" if _count == 1 else f"x{_count}"
    _scalar_load(f"s_load_dword{_suffix}", _count)
    _scalar_load(f"s_buffer_load_dword{_suffix}", _count)

# ----------------------------------------------------------------------------------------------------- scratch


def _scratch(kind: str, loads: bool) -> None:
    word = "load" if loads else "store"

    @register(f"scratch_{word}_{kind}", "memory")
    def decode(instruction: Instruction, context: Context) -> Step:
        """Private memory of each lane: a vector offset or none, a scalar offset or none, and a constant."""
        _accept(instruction)
        if loads:
            data, vaddr, saddr = instruction.operands
            size, signed, half = _LOADS[kind]
        else:
            vaddr, data, saddr = instruction.operands
            (size, shift), signed, half = _STORES[kind], False, None
        sources = Sources()
        lane = None if isinstance(vaddr.what, Word) else vector_read(vaddr, "u32", instruction, sources)
        base = None if isinstance(saddr.what, Word) else scalar_read(saddr, "u32", instruction, sources)
        registers = data_registers(data, max(1, size // 4), instruction)
        constant = _offset(instruction)

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
            place = np.full((m.count, LANES), constant, np.int64)
            if lane is not None:
                place = place + lane(m).astype(np.int64)
            if base is not None:
                place = place + base(m).astype(np.int64)[:, None]
            bad = (place < 0) | (place + size > m.scratch.shape[2])
            if not m.full:
                bad &= m.lanes
            if bad.any():
                message = f"{size} bytes outside the {m.scratch.shape[2]} bytes of scratch that a lane has"
                m.report("out-of-bounds", message, instruction, bad, place.view(np.uint64))
                place = np.where(bad, 0, place)
            waves, lanes = np.arange(m.waves)[m.sel][:, None, None], np.arange(LANES)[None, :, None]
            index = (waves, lanes, place[..., None] + np.arange(size))
            if loads:
                octets = m.scratch[index].astype(np.uint32)
                for i, r in enumerate(registers):
                    part = octets[..., 4 * i : 4 * i + 4]
                    word = (part << (np.arange(part.shape[-1], dtype=np.uint32) * np.uint32(8))).sum(
                        -1, dtype=np.uint32
                    )
                    if half is None:
                        m.put(m.v_u32[r], extended([word], size, signed)[0])
                    else:
                        m.put(m.v_u16[r][..., half], extended([word], size, signed)[0].astype(np.uint16))
                    if m.sanitize and m.v_flag[r]:
                        m.define(r, None, instruction, behind=m.vmcnt)
                m.issue(m.vmcnt, registers)
                return
            words = np.stack([m.row(m.v_u32[r]) >> np.uint32(shift) for r in registers], -1)
            octets = np.ascontiguousarray(words).view(np.uint8)[..., :size]
            old = m.scratch[index]
            m.scratch[index] = octets if m.full else np.where(m.lanes[..., None], octets, old)
            m.issue(m.vmcnt)

        return step


for _kind in _LOADS:
    _scratch(_kind, True)
for _kind in _STORES:
    _scratch(_kind, False)
