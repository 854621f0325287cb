"""LDS: the memory of a workgroup (DS instructions), its races, and the permutes that go through its crossbar."""

from __future__ import annotations

import numpy as np

from ferryman.backends.simulator.access import check_address, check_data, data_registers, extended
from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import LANES, Machine, pack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, refuse, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import accept

# name -> (bytes, sign-extends, half that is written)
READS: dict[str, tuple[int, bool, int | None]] = {
    "b32": (4, False, None),
    "b64": (8, False, None),
    "b96": (12, False, None),
    "b128": (16, False, None),
    "u8": (1, False, None),
    "i8": (1, True, None),
    "u16": (2, False, None),
    "i16": (2, True, None),
    "u16_d16": (2, False, 0),
    "u16_d16_hi": (2, False, 1),
    "u8_d16": (1, False, 0),
    "u8_d16_hi": (1, False, 1),
}
WRITES: dict[str, tuple[int, int]] = {
    "b8": (1, 0),
    "b8_d16_hi": (1, 16),
    "b16": (2, 0),
    "b16_d16_hi": (2, 16),
    "b32": (4, 0),
    "b64": (8, 0),
    "b96": (12, 0),
    "b128": (16, 0),
}
_MANY = np.int64(0xFF)
_INFINITE = np.uint32(0xFF000000)  # float32's infinity without its sign


def smallest(instruction: Instruction) -> int | None:
    """Bytes of an LDS access, for the shadow; None for other instructions."""
    name = instruction.name
    if not name.startswith("ds_") or "permute" in name or "swizzle" in name:
        return None
    for start, table in (("ds_read_", READS), ("ds_write_", WRITES)):
        kind = name.removeprefix(start)
        if name.startswith(start) and kind in table:
            return table[kind][0]
    return 4


class Shadow:
    """Who wrote and who read each granule of LDS since which barrier, and what was ever written."""

    def __init__(self, m: Machine, granule: int, waves_of_group: int) -> None:
        size = len(m.lds) // granule + 16
        self.granule, self.alone = granule, waves_of_group == 1
        self.defined = np.zeros(size, bool)
        self.writers = np.zeros(size, np.int64)
        self.readers = np.zeros(size, np.int64)
        self.atomics = np.zeros(size, bool)  # whether the last writer was an atomic operation
        self.unfinished: list[tuple[Array, Array, Array]] = []  # granules, waves, sequence numbers

    def places(self, m: Machine, address: Array, size: int) -> Array:
        start = (m.groups[m.sel].astype(np.int64) * m.lds_bytes)[:, None] + address
        return (start // self.granule)[..., None] + np.arange(max(1, size // self.granule))

    @staticmethod
    def _stamps(m: Machine) -> Array:
        return (((m.epoch[m.sel] + 1) << 8) | m.positions[m.sel])[:, None, None]

    @staticmethod
    def _clash(before: Array, mine: Array) -> Array:
        """Another wave of the workgroup, since the same barrier."""
        return ((before >> 8) == (mine >> 8)) & (before != mine)

    def read(
        self, m: Machine, place: Array, active: Array | None, instruction: Instruction, address: Array
    ) -> Array | None:
        """Lanes whose bytes nothing has written, as bits; None where there are none."""
        missing = ~self.defined[place].all(-1)
        if active is not None:
            missing &= active
        if not self.alone:
            mine = np.broadcast_to(self._stamps(m), place.shape)
            if active is not None:
                place, mine = place[active], mine[active]
            clash = self._clash(self.writers[place], mine)
            if clash.any():
                self._report(m, clash, active, instruction, address, "reads LDS that another wave writes")
            before = self.readers[place]
            new = np.where(self._clash(before, mine), (mine & ~_MANY) | _MANY, mine)
            self.readers[place] = new
            several = self.readers[place] != new
            if several.any():
                self.readers[place[several]] = (mine[several] & ~_MANY) | _MANY
        return pack(missing) if missing.any() else None

    def write(
        self, m: Machine, place: Array, active: Array | None, instruction: Instruction, address: Array
    ) -> tuple[Array, Array] | None:
        """Lanes that write what another wave wrote since the barrier, and what another writes right now; None if none.
        That is no race where both write the same values, as compilers do with values that several waves hold."""
        mine = np.broadcast_to(self._stamps(m), place.shape)
        waves = np.broadcast_to(m.members()[:, None, None], place.shape)
        if active is not None:
            place, mine, waves = place[active], mine[active], waves[active]
        self.defined[place] = True
        self.atomics[place] = False
        if self.alone:
            return None
        clash = self._clash(self.readers[place], mine)
        if clash.any():
            self._report(m, clash, active, instruction, address, "writes LDS that another wave reads")
        earlier = self._clash(self.writers[place], mine)
        self.writers[place] = mine
        now = self.writers[place] != mine
        sequence = np.zeros(m.waves, np.int32)
        sequence[m.sel] = m.lgkmcnt.issued[m.sel] + 1
        self.unfinished.append((place, waves, sequence))
        return (self._lanes(m, earlier, active), self._lanes(m, now, active)) if earlier.any() or now.any() else None

    def atomic(self, m: Machine, place: Array, active: Array | None, instruction: Instruction, address: Array) -> None:
        """Atomics do not race with each other; anything plain since the same barrier does."""
        mine = np.broadcast_to(self._stamps(m), place.shape)
        if active is not None:
            place, mine = place[active], mine[active]
        self.defined[place] = True
        if not self.alone:
            before, was_atomic = self.writers[place], self.atomics[place]
            clash = (self._clash(before, mine) & ~was_atomic) | self._clash(self.readers[place], mine)
            if clash.any():
                self._report(m, clash, active, instruction, address, "updates LDS that another wave uses")
            shared = self._clash(before, mine) & was_atomic
            self.writers[place] = np.where(shared, mine | _MANY, mine)
            several = (self.writers[place] != mine) & ~shared
            self.writers[place[several]] = mine[several] | _MANY
        self.atomics[place] = True

    @staticmethod
    def _lanes(m: Machine, clash: Array, active: Array | None) -> Array:
        lanes = np.zeros((m.count, LANES), bool)
        if active is None:
            lanes |= clash.any(-1)
        else:
            lanes[active] = clash.any(-1)
        return lanes

    def _report(
        self, m: Machine, clash: Array, active: Array | None, instruction: Instruction, address: Array, what: str
    ) -> None:
        self.race(m, self._lanes(m, clash, active), instruction, address, what)

    @staticmethod
    def race(m: Machine, lanes: Array, instruction: Instruction, address: Array, what: str) -> None:
        m.report("race", f"a wave {what}, with no barrier between", instruction, lanes, address)

    def barrier(self, m: Machine) -> None:
        """Writes that their wave has not waited for happen after the barrier too."""
        kept = []
        for place, waves, sequence in self.unfinished:
            late = sequence > m.lgkmcnt.done
            if not late.any():
                continue
            chosen = late[waves]
            if chosen.any():
                stamp = ((m.epoch[waves] + 1) << 8) | m.positions[waves]
                self.writers[place[chosen]] = stamp[chosen]
                kept.append((place, waves, np.where(late, sequence, 0)))
        self.unfinished = kept


def in_bounds(m: Machine, address: Array, size: int, instruction: Instruction) -> tuple[Array, Array | None]:
    """(addresses that are safe, lanes that may go on or None for all)."""
    active = None if m.full else m.lanes
    bad = address + size > m.lds_bytes
    if not m.full:
        bad &= m.lanes
    if bad.any():
        message = (
            f"{size} bytes at LDS address {int(address[tuple(np.argwhere(bad)[0])])}, the workgroup has {m.lds_bytes}"
        )
        m.report("out-of-bounds", message, instruction, bad, address)
        active = ~bad if active is None else active & ~bad
    if active is not None:
        address = np.where(active, address, 0)
        if m.lds_bytes < size:
            address, active = np.zeros_like(address), np.zeros(address.shape, bool)
    return address, active


def fetch(m: Machine, address: Array, size: int) -> list[Array]:
    index = (m.groups[m.sel].astype(np.int64) * m.lds_bytes)[:, None] + address
    if size <= 2:
        octets = [m.lds[index + i].astype(np.uint32) << np.uint32(8 * i) for i in range(size)]
        return [octets[0] if size == 1 else octets[0] | octets[1]]
    if (index & 3).any():
        octet = m.lds[index[..., None] + np.arange(size)]
        words = np.ascontiguousarray(octet).view(np.uint32)
        return [words[..., i] for i in range(size // 4)]
    words32 = m.lds.view(np.uint32)
    index >>= 2
    return [words32.take(index + i) for i in range(size // 4)]


def _deposit(m: Machine, address: Array, words: list[Array], size: int, active: Array | None) -> None:
    index = (m.groups[m.sel].astype(np.int64) * m.lds_bytes)[:, None] + address
    words = [np.broadcast_to(w, index.shape) for w in words]
    if active is not None:
        index, words = index[active], [w[active] for w in words]
    if size <= 2 or (index & 3).any():
        for i in range(size):
            m.lds[index + i] = (words[i // 4] >> np.uint32(8 * (i % 4))) & np.uint32(0xFF)
        return
    words32 = m.lds.view(np.uint32)
    for i, word in enumerate(words):
        words32[(index >> 2) + i] = word


def _differs(there: list[Array], words: list[Array], size: int) -> Array:
    """Lanes whose words are not the same, two NaN counted as the same: which of its operands' payloads a sum of NaN
    takes depends on their order, and no kernel may rely on it."""
    mask = np.uint32(0xFFFFFFFF if size >= 4 else (1 << (8 * size)) - 1)
    lanes = np.zeros(there[0].shape, bool)
    for a, b in zip(there, words, strict=True):
        apart = (a & mask) != (b & mask)
        if size >= 4 and apart.any():
            apart &= ~((a << np.uint32(1) > _INFINITE) & (b << np.uint32(1) > _INFINITE))
        lanes |= apart
    return lanes


def _parts(instruction: Instruction, size: int, two: bool) -> list[int]:
    """Byte offsets of the one or two pieces that an instruction moves."""
    if not two:
        accept(instruction, frozenset({"offset"}))
        return [int(instruction.modifiers.get("offset", 0))]
    accept(instruction, frozenset({"offset0", "offset1"}))
    step = size * (64 if "st64" in instruction.name else 1)
    return [int(instruction.modifiers.get(f"offset{i}", 0)) * step for i in (0, 1)]


def _read(names: str, kind: str, two: bool) -> None:
    size, signed, half = READS[kind]
    count = max(1, size // 4)

    @register(names, "LDS")
    def decode(instruction: Instruction, context: Context) -> Step:
        target, base = instruction.operands
        sources = Sources()
        lane = vector_read(base, "u32", instruction, sources)
        offsets = _parts(instruction, size, two)
        registers = data_registers(target, count * len(offsets), instruction)

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
            start = np.asarray(lane(m)).astype(np.int64)
            words: list[Array] = []
            taints: list[Array | None] = []
            for offset in offsets:
                address, active = in_bounds(m, np.broadcast_to(start + offset, (m.count, LANES)), size, instruction)
                taint = None
                if m.sanitize:
                    taint = m.shadow.read(m, m.shadow.places(m, address, size), active, instruction, address)
                if m.counters is not None:
                    m.counters.lds(m, instruction, address, size, active)
                words += extended(fetch(m, address, size), size, signed)
                taints += [taint] * count
            for r, word, taint in zip(registers, words, taints, strict=True):
                if half is None:
                    m.put(m.v_u32[r], word)
                else:
                    m.put(m.v_u16[r][..., half], word.astype(np.uint16))
                if m.sanitize and (taint is not None or m.v_flag[r]):
                    m.define(r, taint, instruction)
            m.issue(m.lgkmcnt, registers)

        return step


def _write(names: str, kind: str, two: bool) -> None:
    size, shift = WRITES[kind]
    count = max(1, size // 4)

    @register(names, "LDS")
    def decode(instruction: Instruction, context: Context) -> Step:
        base, *data = instruction.operands
        sources = Sources()
        lane = vector_read(base, "u32", instruction, sources)
        offsets = _parts(instruction, size, two)
        if len(data) != len(offsets):
            raise refuse(instruction, f"{len(data)} pieces of data where {len(offsets)} are needed")
        groups = [data_registers(d, count, instruction) for d in data]
        data_sources = Sources([r for g in groups for r in g])

        def step(m: Machine) -> None:
            if m.sanitize:
                check_address(m, sources, instruction, None)
                # undefined data may be stored to LDS: it is reported where it is used
            start = np.asarray(lane(m)).astype(np.int64)
            for offset, registers in zip(offsets, groups, strict=True):
                address, active = in_bounds(m, np.broadcast_to(start + offset, (m.count, LANES)), size, instruction)
                words = [m.row(m.v_u32[r]) >> np.uint32(shift) if shift else m.row(m.v_u32[r]) for r in registers]
                clash = None
                if m.sanitize:
                    check_data(m, data_sources, active, instruction, address)
                    clash = m.shadow.write(m, m.shadow.places(m, address, size), active, instruction, address)
                if m.counters is not None:
                    m.counters.lds(m, instruction, address, size, active)
                there = None if clash is None else _differs(fetch(m, address, size), words, size)
                _deposit(m, address, words, size, active)
                if clash is not None:
                    bad = (clash[0] & there) | (clash[1] & _differs(fetch(m, address, size), words, size))
                    if bad.any():
                        m.shadow.race(m, bad, instruction, address, "writes LDS that another wave writes")
            m.issue(m.lgkmcnt)

        return step


for _kind in READS:
    _read(f"ds_read_{_kind}", _kind, False)
for _kind in WRITES:
    _write(f"ds_write_{_kind}", _kind, False)
for _kind in ("b32", "b64"):
    _read(f"ds_read2_{_kind} ds_read2st64_{_kind}", _kind, True)
    _write(f"ds_write2_{_kind} ds_write2st64_{_kind}", _kind, True)
