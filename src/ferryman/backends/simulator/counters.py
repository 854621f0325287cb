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

LINE = 128  # bytes of a cache line of gfx942's L2
BANKS = 32  # of four bytes each, one access a cycle
_BANKS_950 = 64


@dataclass
class Access:
    """One load or store of the program, over all its executions."""

    bytes: int = 0
    lines: int = 0
    least: int = 0
    waves: int = 0

    @property
    def efficiency(self) -> float:
        """The least number of cache lines that the bytes need, over those that were touched."""
        return self.least / self.lines if self.lines else 1.0


@dataclass
class Counters:
    """``mix``: wave-instructions by group of the ISA manual; ``mnemonics``: by name. ``conflicts``: cycles that LDS
    accesses take beyond the least. ``occupancy``: waves that a SIMD can hold, by registers and LDS."""

    program: Any
    mix: Counter[str] = field(default_factory=Counter)
    mnemonics: Counter[str] = field(default_factory=Counter)
    accesses: dict[int, Access] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    lds_cycles: int = 0
    conflicts: int = 0
    occupancy: int = 0

    def access(self, m: Machine, instruction: Instruction, offset: Array, size: int, active: Array | None) -> None:
        """A global access: which cache lines each wave touches."""
        found = self.accesses.setdefault(instruction.line, Access())
        self.names[instruction.line] = instruction.name
        lines = np.concatenate([offset // LINE, (offset + (size - 1)) // LINE], axis=1)
        if active is not None:
            lines = np.where(np.concatenate([active, active], axis=1), lines, -1)
        ordered = np.sort(lines, axis=1)
        fresh = (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        touched = fresh.sum(1) + (ordered[:, 0] >= 0)
        lanes = np.full(m.count, LANES) if active is None else active.sum(1)
        found.bytes += int(lanes.sum()) * size
        found.lines += int(touched.sum())
        found.least += int((-(-lanes * size // LINE)).sum())
        found.waves += int((lanes > 0).sum())

    def lds(self, m: Machine, instruction: Instruction, address: Array, size: int, active: Array | None) -> None:
        """An LDS access: a bank gives one word a cycle; lanes that read the same word share it. Wide accesses go in
        groups of lanes that together need each bank once."""
        banks = _BANKS_950 if self.program.arch == "gfx950" else BANKS
        words = max(1, size // 4)
        group = max(1, banks // words)
        word = (address // 4)[..., None] + np.arange(words)
        if active is not None:
            word = np.where(active[..., None], word, -1)
        parts = np.sort(word.reshape(m.count, LANES // group, group * words), axis=-1)
        distinct = np.concatenate([np.ones((*parts.shape[:-1], 1), bool), parts[..., 1:] != parts[..., :-1]], -1) & (
            parts >= 0
        )
        flat = parts % banks + (np.arange(parts.shape[0] * parts.shape[1]) * banks).reshape(*parts.shape[:2], 1)
        load = np.bincount(flat[distinct].reshape(-1), minlength=parts.shape[0] * parts.shape[1] * banks)
        cycles = load.reshape(-1, banks).max(1)
        self.lds_cycles += int(cycles.sum())
        self.conflicts += int(np.maximum(cycles - 1, 0).sum())

    def finish(self, counts: dict[int, int], lds_bytes: int, waves: int) -> None:
        """Expand counts of blocks to instructions; occupancy from the kernel's own resources."""
        program = self.program
        blocks = program.blocks(program.mode)
        for first, times in counts.items():
            for index in range(first, first + blocks[first].size):
                name = program.instruction(index).name
                self.mnemonics[name] += times
                self.mix[TABLE[name].group] += times
        metadata = program.kernel.metadata
        registers = -(-max(int(metadata.get(".vgpr_count", 1)), 1) // 8) * 8
        by_registers = min(8, 512 // registers)
        limit = 163_840 if program.arch == "gfx950" else 65_536
        groups = limit // lds_bytes if lds_bytes else 16
        self.occupancy = max(0, min(by_registers, -(-groups * waves // 4)))

    @property
    def bytes_moved(self) -> int:
        return sum(a.bytes for a in self.accesses.values())
