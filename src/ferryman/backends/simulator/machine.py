"""The machine: registers, EXEC, LDS and barriers of many waves that run together.

Waves that stand at the same instruction form a cohort, and an instruction runs once for all of a cohort: registers are
arrays [register][wave, lane]. A branch on which waves differ splits a cohort; waves that meet again are merged. The
cohort with the lowest program counter runs first, so that those in a loop catch up with those that left it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman.backends.simulator.assembly import EXEC, Instruction
from ferryman.backends.simulator.findings import Findings
from ferryman.backends.simulator.numerics import Array, Assumptions, Mode

LANES = 64
VECTORS, ACCUMULATORS = 256, 256  # a0 is register 256 of one file
SCALARS = 128
ALL_LANES = np.uint64(0xFFFFFFFFFFFFFFFF)
CLEAN, UNDEFINED, PENDING = 0, 1, 2
_SHIFTS = np.arange(64, dtype=np.uint64)
END = -1


def pack(lanes: Array) -> Array:
    """bool [waves, 64] -> uint64 [waves], lane 0 in bit 0."""
    return np.packbits(lanes, axis=-1, bitorder="little").view(np.uint64).reshape(lanes.shape[:-1])


def unpack(bits: Array) -> Array:
    """uint64 [waves] -> bool [waves, 64]."""
    return np.unpackbits(np.ascontiguousarray(bits).view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").view(bool)


class Counter:
    """Outstanding memory operations of one kind ("vmcnt", "lgkmcnt"): what each wave issued and what it waited for."""

    def __init__(self, waves: int, name: str) -> None:
        self.name = name
        self.issued = np.zeros(waves, np.int32)
        self.done = np.zeros(waves, np.int32)
        self.queue: list[tuple[Array, tuple[tuple[str, int], ...]]] = []
        self.unordered = np.zeros(waves, np.int32)  # the last scalar load, which may overtake what came before


class Machine:
    """Registers of ``waves`` waves: ``groups[i]`` is the workgroup of wave i in this batch, ``positions[i]`` its place
    in it. Arrays that instructions read and write have a row for each wave of the current cohort."""

    def __init__(
        self,
        groups: Array,
        positions: Array,
        lds_bytes: int,
        scratch_bytes: int,
        memory: Any,
        findings: Findings,
        mode: Mode,
        assumptions: Assumptions,
        sanitize: bool,
        first_group: int = 0,
        counters: Any = None,
    ) -> None:
        waves = len(groups)
        self.waves, self.groups, self.positions = waves, groups, positions
        self.memory, self.findings, self.mode, self.assumptions = memory, findings, mode, assumptions
        self.sanitize, self.first_group, self.counters = sanitize, first_group, counters
        vectors = np.zeros((VECTORS + ACCUMULATORS, waves, LANES), np.uint32)
        self.v_u32, self.v_i32, self.v_f32 = (list(vectors.view(t)) for t in (np.uint32, np.int32, np.float32))
        halves = vectors.view(np.uint16).reshape(*vectors.shape, 2)
        self.v_u16, self.v_i16, self.v_f16 = (list(halves.view(t)) for t in (np.uint16, np.int16, np.float16))
        scalars = np.zeros((SCALARS // 2, waves, 2), np.uint32)
        both = [scalars.view(t).transpose(0, 2, 1) for t in (np.uint32, np.int32, np.float32)]
        self.s_u32, self.s_i32, self.s_f32 = ([one for pair in pairs for one in pair] for pairs in both)
        pairs = scalars.view(np.uint64)[..., 0]
        self.s_u64, self.s_i64 = list(pairs), list(pairs.view(np.int64))
        self.scc = np.zeros(waves, bool)
        start = UNDEFINED if sanitize else CLEAN
        self.v_flag = bytearray([start] * len(self.v_u32))
        self.v_defined: list[Array | None] = [None] * len(self.v_u32)
        self.v_pending: dict[int, tuple[Counter, Array]] = {}
        self.s_flag = bytearray([start] * SCALARS)
        self.s_undefined: list[Array | None] = [None] * SCALARS
        self.s_pending: dict[int, tuple[Counter, Array]] = {}
        self.scc_undefined: Array | None = None
        self.v_origin: dict[int, str] = {}  # where what is undefined comes from
        self.s_origin: dict[int, str] = {}
        self.origin = ""  # of what was looked at last
        self.vmcnt, self.lgkmcnt = Counter(waves, "vmcnt"), Counter(waves, "lgkmcnt")
        self.lds_bytes = lds_bytes
        self.lds = np.zeros((int(groups.max()) + 1 if waves else 0) * lds_bytes + 16, np.uint8)
        self.absent: Array | None = None  # uint64 [waves]: lanes that the workgroup's size leaves out
        self.scratch = np.zeros((waves, LANES, scratch_bytes), np.uint8)
        self.shadow: Any = None  # what the sanitizer knows of LDS
        self.epoch = np.zeros(waves, np.int64)  # barriers passed
        self.at = np.zeros(waves, np.int64)  # program counter of the waves outside the cohort
        self.waiting = np.zeros(waves, bool)  # at a barrier
        self.sel: Any = slice(None)
        self.whole, self.contiguous, self.count = True, True, waves
        for index in (EXEC, EXEC + 1):
            self.s_flag[index] = CLEAN
        self.s_u64[EXEC // 2][...] = ALL_LANES
        self.refresh()

    # ------------------------------------------------------------------------------------------------- cohorts

    def select(self, waves: Array) -> None:
        """Make the waves with these indices (ascending) the cohort."""
        self.count = len(waves)
        first, last = int(waves[0]), int(waves[-1])
        self.whole = self.count == self.waves
        self.contiguous = last - first + 1 == self.count
        self.sel = slice(None) if self.whole else slice(first, last + 1) if self.contiguous else waves
        self.refresh()

    def members(self) -> Array:
        return np.arange(self.waves)[self.sel]

    def refresh(self) -> None:
        """EXEC was written, or the cohort changed."""
        self.exec_bits = self.s_u64[EXEC // 2][self.sel]
        self.full = bool((self.exec_bits == ALL_LANES).all())
        self._lanes: Array | None = None

    @property
    def lanes(self) -> Array:
        """bool [waves, 64]: the lanes that EXEC has on."""
        if self._lanes is None:
            self._lanes = unpack(self.exec_bits)
        return self._lanes

    # --------------------------------------------------------------------------------------------- vector values

    def row(self, register: Array) -> Array:
        return register if self.whole else register[self.sel]

    def put(self, register: Array, value: Array) -> None:
        """Write the active lanes of a register, given as one of the typed views."""
        if self.full:
            register[self.sel] = value
        elif self.contiguous:
            np.copyto(register[self.sel], value, where=self.lanes, casting="unsafe")
        else:
            part = register[self.sel]
            np.copyto(part, value, where=self.lanes, casting="unsafe")
            register[self.sel] = part

    def put_where(self, register: Array, value: Array, lanes: Array) -> None:
        """Write the lanes of ``lanes`` [waves, 64] that are active."""
        chosen = np.broadcast_to(lanes if self.full else lanes & self.lanes, (self.count, LANES))
        part = register[self.sel]
        np.copyto(part, value, where=chosen, casting="unsafe")
        if not self.contiguous:
            register[self.sel] = part

    # ------------------------------------------------------------------------------------------ the sanitizer's

    def report(
        self, kind: Any, message: str, instruction: Instruction, bad: Array | None = None, address: Array | None = None
    ) -> None:
        """``bad``: bool [waves] or [waves, 64] of the cohort; ``address``: of the same shape."""
        if kind == "uninitialised" and self.origin:
            message = f"{message} (first read: {self.origin})"
        if bad is None:
            self.findings.add(kind, message, instruction)
            return
        index = np.argwhere(bad)[0]
        wave = int(self.members()[index[0]])
        lane = int(index[1]) if len(index) > 1 else None
        place = None if address is None else int(np.broadcast_to(address, bad.shape)[tuple(index)])
        self.findings.add(
            kind,
            message,
            instruction,
            workgroup=self.first_group + int(self.groups[wave]),
            wave=int(self.positions[wave]),
            lane=lane,
            address=place,
        )

    def taint(self, register: int, instruction: Instruction) -> Array | None:
        """Lanes of a flagged vector register that nothing has written, as bits [waves]; None where all were."""
        if self.v_flag[register] & PENDING:
            self._await(
                self.v_pending, register, f"v{register}" if register < 256 else f"a{register - 256}", instruction
            )
        if not self.v_flag[register] & UNDEFINED:
            return None
        defined = self.v_defined[register]
        missing = np.full(self.count, ALL_LANES) if defined is None else ~defined[self.sel]
        if not missing.any():
            if defined is not None and (defined == ALL_LANES).all():
                self.v_flag[register] &= ~UNDEFINED
            return None
        self.origin = self.v_origin.get(register) or f"v{register} in line {instruction.line}"
        return missing

    def scalar_taint(self, register: int, instruction: Instruction) -> Array | None:
        """Bits of a flagged scalar register that nothing has written, uint32 [waves]; None where all were."""
        if self.s_flag[register] & PENDING:
            self._await(self.s_pending, register, f"s{register}", instruction)
        if not self.s_flag[register] & UNDEFINED:
            return None
        undefined = self.s_undefined[register]
        bits = np.full(self.count, 0xFFFFFFFF, np.uint32) if undefined is None else undefined[self.sel]
        if not bits.any():
            return None
        self.origin = self.s_origin.get(register) or f"s{register} in line {instruction.line}"
        return bits

    def _await(
        self, pending: dict[int, tuple[Counter, Array]], register: int, name: str, instruction: Instruction
    ) -> None:
        counter, sequence = pending[register]
        early = sequence[self.sel] > counter.done[self.sel]
        if early.any():
            message = f"{name} is used before the load into it was waited for ({counter.name})"
            self.report("missing-wait", message, instruction, early)

    def borrow(self, origin: Array, wanted: Array | None, instruction: Instruction) -> None:
        """A lane takes a value from lane ``origin`` [waves, 64], which does not exist where a workgroup does not fill
        its waves, as when code takes a wave for 32 lanes wide. ``wanted``: lanes that take one."""
        if self.absent is None or not self.sanitize:
            return
        missing = np.take_along_axis(unpack(self.absent[self.sel]), np.broadcast_to(origin, (self.count, LANES)), 1)
        missing = missing & self.lanes if wanted is None else missing & self.lanes & wanted
        if missing.any():
            message = "a lane takes a value from one that the workgroup does not have: waves are 64 lanes wide"
            self.report("wave-width", message, instruction, missing)

    def define(
        self,
        register: int,
        taint: Array | None,
        instruction: Instruction,
        lanes: Array | None = None,
        behind: Counter | None = None,
    ) -> None:
        """A vector register was written in the active lanes (or ``lanes``, as bits); those of ``taint`` with what is
        itself undefined. ``behind``: by a load that counts there, and comes back after those that count there too."""
        if self.v_flag[register] & PENDING:
            if self.v_pending[register][0] is not behind:
                self._await(
                    self.v_pending, register, f"v{register}" if register < 256 else f"a{register - 256}", instruction
                )
            self._settle(self.v_pending, self.v_flag, register)
        if taint is None and not self.v_flag[register] & UNDEFINED:
            return
        active = self.exec_bits if lanes is None else lanes
        defined = self.v_defined[register]
        if defined is None:
            clean = not self.v_flag[register] & UNDEFINED
            defined = self.v_defined[register] = np.full(self.waves, ALL_LANES if clean else 0, np.uint64)
        elif not self.v_flag[register] & UNDEFINED:
            defined[...] = ALL_LANES
        part = defined[self.sel] | active
        if taint is not None:
            part = part & ~(taint & active)
            self.v_origin[register] = self.origin
        defined[self.sel] = part
        if (defined == ALL_LANES).all():
            self.v_flag[register] &= ~UNDEFINED
            self.v_origin.pop(register, None)
        else:
            self.v_flag[register] |= UNDEFINED

    def define_scalar(self, register: int, undefined: Array | None, instruction: Instruction) -> None:
        """A scalar register was written; ``undefined``: bits that are not defined, uint32 [waves]."""
        if self.s_flag[register] & PENDING:
            self._await(self.s_pending, register, f"s{register}", instruction)
            self._settle(self.s_pending, self.s_flag, register)
        if undefined is None and not self.s_flag[register] & UNDEFINED:
            return
        known = self.s_undefined[register]
        if known is None or not self.s_flag[register] & UNDEFINED:
            everything = 0xFFFFFFFF if self.s_flag[register] & UNDEFINED else 0
            known = self.s_undefined[register] = np.full(self.waves, everything, np.uint32)
        known[self.sel] = 0 if undefined is None else undefined
        if undefined is not None:
            self.s_origin[register] = self.origin
        if known.any():
            self.s_flag[register] |= UNDEFINED
        else:
            self.s_flag[register] &= ~UNDEFINED
            self.s_origin.pop(register, None)

    def _settle(self, pending: dict[int, tuple[Counter, Array]], flags: bytearray, register: int) -> None:
        counter, sequence = pending[register]
        if (sequence <= counter.done).all():
            del pending[register]
            flags[register] &= ~PENDING

    def issue(
        self,
        counter: Counter,
        vectors: range | tuple[int, ...] = (),
        scalars: range | tuple[int, ...] = (),
        ordered: bool = True,
    ) -> None:
        """One more memory operation, which will write these registers when it is done."""
        counter.issued[self.sel] += 1
        if not ordered:
            counter.unordered[self.sel] = counter.issued[self.sel]
        if not self.sanitize:
            return
        sequence = np.zeros(self.waves, np.int32)
        sequence[self.sel] = counter.issued[self.sel]
        names = tuple(("v", r) for r in vectors) + tuple(("s", r) for r in scalars)
        for file, register in names:
            pending, flags = (self.v_pending, self.v_flag) if file == "v" else (self.s_pending, self.s_flag)
            before = pending.get(register)
            kept = sequence
            if before is not None and before[0] is counter and not self.whole:
                kept = np.maximum(before[1], sequence)
            pending[register] = (counter, kept)
            flags[register] |= PENDING
        if names:
            counter.queue.append((sequence, names))

    def wait(self, counter: Counter, left: int) -> None:
        """s_waitcnt: at most ``left`` operations are outstanding afterwards. A count above 0 says nothing where a
        scalar load is among them, as those come back in any order."""
        reached = counter.issued[self.sel] - np.int32(left)
        if left:
            out_of_order = counter.unordered[self.sel] > counter.done[self.sel]
            if out_of_order.any():
                reached = np.where(out_of_order, counter.done[self.sel], reached)
        counter.done[self.sel] = np.maximum(counter.done[self.sel], reached)
        kept = []
        for position, (sequence, names) in enumerate(counter.queue):
            if not (sequence <= counter.done).all():
                kept = counter.queue[position:]
                if self.whole:
                    break
                kept = [e for e in kept if not self._returned(counter, e)]
                break
            self._returned(counter, (sequence, names))
        counter.queue = kept

    def _returned(self, counter: Counter, entry: tuple[Array, tuple[tuple[str, int], ...]]) -> bool:
        sequence, names = entry
        if not (sequence <= counter.done).all():
            return False
        for file, register in names:
            pending, flags = (self.v_pending, self.v_flag) if file == "v" else (self.s_pending, self.s_flag)
            outstanding = pending.get(register)
            if outstanding is not None and outstanding[0] is counter and (outstanding[1] <= counter.done).all():
                del pending[register]
                flags[register] &= ~PENDING
        return True
