"""Counters of a launch: instruction mix, bytes moved, coalescing, LDS bank conflicts, occupancy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import LANES, Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operations import TABLE

LINE = 128  # bytes of a cache line of gfx942's and gfx950's L2
BANKS = {"gfx942": 32, "gfx950": 64}  # of four bytes each, one access a cycle
LDS_OF_UNIT = {"gfx942": 65_536, "gfx950": 163_840}
SIMDS, MOST_WAVES = 4, 8  # of a compute unit; of a SIMD
REGISTERS, GRANULE = 512, 8  # vector and accumulation registers of a SIMD's lane, given out in eights
GROUPS = 16  # workgroups of several waves that a compute unit has barriers for
_ALIGNED = 64  # what torch aligns to on a CPU; a device's allocator aligns to whole lines
_REGION = np.int64(1) << 40  # lines of different regions never meet


@dataclass
class Access:
    """One load, store or atomic of the program, over all its executions. bytes: that each wave asked for, once each.
    lines: of the cache, that each wave touched. least: lines that those bytes need."""

    bytes: int = 0
    lines: int = 0
    least: int = 0
    waves: int = 0

    @property
    def efficiency(self) -> float:
        """The least number of cache lines that the bytes need, over those that were touched: 1 is coalesced."""
        return self.least / self.lines if self.lines else 1.0


@dataclass
class Counters:
    """``mix``: wave-instructions by group of the ISA manual; ``mnemonics``: by name. ``accesses``: by line in the
    text. ``lds_cycles``: that LDS accesses take; ``conflicts``: those of them beyond the least. ``occupancy``: waves
    that a SIMD can hold, by vector registers, LDS and places for workgroups, on average over the four of a unit."""

    program: Any
    mix: Counter[str] = field(default_factory=Counter)
    mnemonics: Counter[str] = field(default_factory=Counter)
    accesses: dict[int, Access] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    lds_cycles: int = 0
    conflicts: int = 0
    occupancy: float = 0.0
    lds_bytes: int = 0

    def access(self, m: Machine, instruction: Instruction, offset: Array, size: int, active: Array | None) -> None:
        """A global access of ``size`` bytes at ``offset`` [waves, lanes] from the memory's base; [waves] if scalar.

        A region's first bytes count as the start of a line: where a tensor of this process lies is an accident.
        """
        counts = self.accesses.setdefault(instruction.line, Access())
        self.names[instruction.line] = instruction.name
        if offset.ndim == 1:
            offset, active = offset[:, None], None if active is None else active[:, None]
        region = np.searchsorted(m.memory._start_array, offset, "right") - 1
        starts = (m.memory.base + m.memory._start_array) // _ALIGNED * _ALIGNED - m.memory.base
        place = offset - starts[region] + region * _REGION
        if active is not None:
            place = np.where(active, place, np.iinfo(np.int64).max - LINE)
        place = np.sort(place, axis=1)
        valid = np.ones(place.shape, bool) if active is None else place < np.iinfo(np.int64).max - LINE
        # each access adds the bytes that the one before it in memory does not have
        step = np.diff(place, axis=1, prepend=place[:, :1] - LINE)
        new = np.where(valid, np.minimum(step, size), 0).sum(1)
        lines = np.stack([place // LINE, (place + (size - 1)) // LINE], -1).reshape(len(place), -1)
        before = np.concatenate([np.full((len(place), 1), -1), np.maximum.accumulate(lines, axis=1)[:, :-1]], 1)
        touched = ((lines > before) & np.repeat(valid, 2, axis=1)).sum(1)
        counts.bytes += int(new.sum())
        counts.lines += int(touched.sum())
        counts.least += int((-(-new // LINE)).sum())
        counts.waves += int(valid.any(1).sum())

    def lds(self, m: Machine, instruction: Instruction, address: Array, size: int, active: Array | None) -> None:
        """An LDS access: a bank gives one word a cycle; lanes that use the same word share it. Wide accesses go in
        runs of lanes that together need each bank once (which lanes the hardware takes together is not documented)."""
        banks = BANKS[self.program.arch]
        words = max(1, size // 4)
        group = max(1, min(LANES, banks // (1 << (words - 1).bit_length())))
        word = (address // 4)[..., None] + np.arange(words)
        if active is not None:
            word = np.where(active[..., None], word, -1)
        parts = np.sort(word.reshape(m.count, LANES // group, group * words), axis=-1)
        distinct = (np.diff(parts, axis=-1, prepend=-2) != 0) & (parts >= 0)
        flat = parts % banks + (np.arange(parts.shape[0] * parts.shape[1]) * banks).reshape(*parts.shape[:2], 1)
        load = np.bincount(flat[distinct].reshape(-1), minlength=parts.shape[0] * parts.shape[1] * banks)
        cycles = load.reshape(-1, banks).max(1)
        self.lds_cycles += int(cycles.sum())
        self.conflicts += int(np.maximum(cycles - 1, 0).sum())

    def finish(self, counts: dict[int, int], lds_bytes: int, waves: int) -> None:
        """Expand counts of blocks to instructions; occupancy from the kernel's own resources, for workgroups of
        ``waves`` waves with ``lds_bytes`` of LDS."""
        program = self.program
        blocks = program.blocks(program.mode)
        for first, times in counts.items():
            for index in range(first, first + blocks[first].size):
                name = program.instruction(index).name
                self.mnemonics[name] += times
                self.mix[TABLE[name].group] += times
        registers = -(-max(self.resource("vgpr_count"), 1) // GRANULE) * GRANULE
        groups = SIMDS * min(MOST_WAVES, REGISTERS // registers) // waves
        if waves > 1:
            groups = min(groups, GROUPS)
        if lds_bytes:
            groups = min(groups, LDS_OF_UNIT[program.arch] // lds_bytes)
        self.lds_bytes, self.occupancy = lds_bytes, groups * waves / SIMDS

    def resource(self, name: str) -> int:
        """A number of the kernel's metadata: vgpr_count (accumulation registers included), vgpr_spill_count, .."""
        return int(self.program.kernel.metadata.get(f".{name}", 0))

    @property
    def waves(self) -> int:
        return self.mnemonics["s_endpgm"]

    @property
    def bytes_moved(self) -> int:
        return sum(a.bytes for a in self.accesses.values())

    @property
    def efficiency(self) -> float:
        """Of coalescing, over all accesses."""
        lines = sum(a.lines for a in self.accesses.values())
        return sum(a.least for a in self.accesses.values()) / lines if lines else 1.0
