"""A kernel ready to run: its instructions decoded into straight runs of steps, and the scheduler of cohorts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# the groups enter their instructions in the table
from ferryman.backends.simulator import (  # noqa: F401
    access,
    atomics,
    control,
    lds,
    matrix,
    newer,
    packed,
    permute,
    scalar_arithmetic,
    scalar_bits,
    scalar_masks,
    vector_float,
    vector_integer,
)
from ferryman.backends.simulator.arguments import with_hidden
from ferryman.backends.simulator.assembly import Instruction, Kernel
from ferryman.backends.simulator.control import BARRIER, FINISHED, Branch
from ferryman.backends.simulator.counters import Counters
from ferryman.backends.simulator.findings import Finding, Findings
from ferryman.backends.simulator.lds import Shadow, smallest
from ferryman.backends.simulator.machine import CLEAN, LANES, Machine
from ferryman.backends.simulator.memory import Memory, Region
from ferryman.backends.simulator.numerics import Array, Assumptions, Mode
from ferryman.backends.simulator.operations import TABLE, Context, Operation, Step, operation
from ferryman.errors import AssemblyError, FerrymanError, SimulationError

ARCHES = ("gfx942", "gfx950")
BATCH_WAVES = 256  # waves that run together; their registers fill some MiB
BATCH_BYTES = 1 << 30
BUDGET = 200_000_000  # instructions of one launch, all waves together
STEPS = 5_000_000  # of a batch: a loop that does not end is found within a minute or two
_MOST_GROUPS = 1 << 24


def supported(arch: str) -> frozenset[str]:
    """Mnemonics, without encodings, that are implemented for an arch."""
    return frozenset(n for n, o in TABLE.items() if o.arches is None or arch in o.arches)


@dataclass
class Block:
    """A straight run of instructions, and what ends it."""

    first: int
    steps: list[Step]
    end: Any | None  # the step that decides where to go on; None falls through to the next block
    size: int


@dataclass(frozen=True)
class Report:
    """What a launch showed. ``executed``: wave-instructions; ``steps``: decoded steps, each for a whole cohort."""

    findings: list[Finding]
    counters: Counters | None
    executed: int
    steps: int
    seconds: float
    counts: Mapping[int, int] = field(default_factory=dict)


class Program:
    """Decodes a kernel for an arch. Raises UnimplementedInstruction at once for what no one implements."""

    def __init__(self, kernel: Kernel, arch: str, assumptions: Assumptions | None = None) -> None:
        if arch not in ARCHES:
            raise SimulationError(f"the simulator executes {', '.join(ARCHES)}; this kernel is for {arch}")
        if kernel.arch != arch:
            raise SimulationError(f"{kernel.name} is compiled for {kernel.arch or 'no target'}, the device is {arch}")
        wave = int(kernel.metadata.get(".wavefront_size", LANES))
        if wave != LANES:
            raise SimulationError(f"{kernel.name} is compiled for waves of {wave} lanes; those of {arch} have {LANES}")
        self.kernel, self.arch = kernel, arch
        self.assumptions = assumptions or Assumptions()
        d = kernel.descriptor
        self.mode = Mode(
            d.get("float_round_mode_32", 0),
            d.get("float_round_mode_16_64", 0),
            d.get("float_denorm_mode_32", 3),
            d.get("float_denorm_mode_16_64", 3),
            bool(d.get("ieee_mode", 1)),
        )
        accesses = [w for i in kernel.instructions if (w := access.widths(i)) is not None]
        self.granule = min([4, *accesses])
        self.lds_granule = min([4, *(w for i in kernel.instructions if (w := smallest(i)) is not None)])
        self._blocks: dict[Mode, dict[int, Block]] = {}
        self.blocks(self.mode)

    def blocks(self, mode: Mode) -> dict[int, Block]:
        """Blocks by their first instruction, decoded for a state of the MODE register."""
        if mode not in self._blocks:
            self._blocks[mode] = self._decode(mode)
        return self._blocks[mode]

    def _decode(self, mode: Mode) -> dict[int, Block]:
        code, labels = self.kernel.instructions, self.kernel.labels
        context = Context(self.arch, mode, self.assumptions, self.kernel.symbols, labels)
        leaders = {0, *labels.values()}
        blocks: dict[int, Block] = {}
        first, steps = 0, list[Step]()
        for index, instruction in enumerate(code):
            entry = operation(instruction, self.arch, self.kernel.name)
            step = self._step(entry, instruction, context)
            if entry.ends:
                blocks[first] = Block(first, steps, step, index + 1 - first)
                first, steps = index + 1, []
                continue
            steps.append(step)
            if index + 1 in leaders:
                blocks[first] = Block(first, steps, None, index + 1 - first)
                first, steps = index + 1, []
        if steps:
            blocks[first] = Block(first, steps, None, len(code) - first)
        return blocks

    def _step(self, entry: Operation, instruction: Instruction, context: Context) -> Any:
        try:
            return entry.decode(instruction, context)
        except FerrymanError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            where = f"{self.kernel.name}, line {instruction.line}"
            raise AssemblyError(f"{where}: operands that {instruction.name} cannot have: {instruction.text}") from error

    def instruction(self, index: int) -> Instruction:
        return self.kernel.instructions[index]

    # ---------------------------------------------------------------------------------------------------- run

    def run(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: bytes,
        regions: list[Region],
        *,
        dynamic_lds: int = 0,
        lds_limit: int = 65_536,
        sanitize: bool = True,
        count: bool = False,
        budget: int = BUDGET,
    ) -> Report:
        """Execute a launch: ``grid`` workgroups of ``threads``; ``arguments`` is the kernel's argument block.

        Raises SimulationError for a launch that a device would refuse, or that spends the instruction budget.
        """
        groups = grid[0] * grid[1] * grid[2]
        lds_bytes = max(int(self.kernel.descriptor["group_segment_fixed_size"]), 0) + dynamic_lds
        self._refuse(grid, groups, threads, lds_bytes, lds_limit, len(arguments))
        kernarg = np.frombuffer(with_hidden(self.kernel, arguments, grid, threads, dynamic_lds), np.uint8)
        start = kernarg.ctypes.data
        memory = Memory([*regions, Region(start, start + len(kernarg), "the kernel's arguments", False)], self.granule)
        findings = Findings(self.kernel.name)
        counters = Counters(self) if count else None
        waves = -(-threads // LANES)
        each = max(1, BATCH_WAVES // waves)
        if lds_bytes:
            each = max(1, min(each, BATCH_BYTES // (lds_bytes * 4)))
        began, executed, steps = time.perf_counter(), 0, 0
        counts: dict[int, int] = {}
        with np.errstate(all="ignore"):
            for first in range(0, groups, each):
                number = min(each, groups - first)
                machine = self._machine(
                    grid, first, number, threads, start, memory, findings, lds_bytes, sanitize, counters
                )
                done, taken = self._execute(machine, findings, budget - executed, counts)
                executed, steps = executed + done, steps + taken
        if sanitize:
            memory.finish(Reporter(findings))
        if counters is not None:
            counters.finish(counts, lds_bytes, waves)
        return Report(findings.all(), counters, executed, steps, time.perf_counter() - began, counts)

    def _refuse(
        self, grid: tuple[int, int, int], groups: int, threads: int, lds_bytes: int, limit: int, given: int
    ) -> None:
        name = self.kernel.name
        if min(grid) < 0 or groups > _MOST_GROUPS:
            raise SimulationError(
                f"{name}: a grid of {grid} is {groups} workgroups; the simulator runs up to {_MOST_GROUPS}"
            )
        most = int(self.kernel.metadata.get(".max_flat_workgroup_size", 1024))
        if not 1 <= threads <= most:
            raise SimulationError(f"{name}: workgroups of {threads} threads, the kernel was compiled for 1 to {most}")
        if lds_bytes > limit:
            raise SimulationError(f"{name}: {lds_bytes} bytes of LDS for a workgroup, the device has {limit}")
        needed = int(self.kernel.metadata.get(".kernarg_segment_size", 0))
        explicit = max(
            (
                a[".offset"] + a[".size"]
                for a in self.kernel.arguments
                if not str(a[".value_kind"]).startswith("hidden")
            ),
            default=0,
        )
        if not explicit <= given <= max(needed, explicit):
            raise SimulationError(f"{name}: {given} bytes of arguments, the kernel takes {explicit} to {needed}")

    def _machine(
        self,
        grid: tuple[int, int, int],
        first: int,
        number: int,
        threads: int,
        arguments: int,
        memory: Memory,
        findings: Findings,
        lds_bytes: int,
        sanitize: bool,
        counters: Counters | None,
    ) -> Machine:
        waves = -(-threads // LANES)
        groups, positions = np.repeat(np.arange(number), waves), np.tile(np.arange(waves), number)
        d = self.kernel.descriptor
        padded = -(-lds_bytes // 16) * 16
        scratch = max(d.get("private_segment_fixed_size", 0), 0)
        m = Machine(
            groups, positions, padded, scratch, memory, findings, self.mode, self.assumptions, sanitize, first, counters
        )
        m.shadow = Shadow(m, self.lds_granule, waves)
        self._start_scalars(m, grid, first + groups, arguments)
        lane = np.arange(LANES, dtype=np.uint32)
        thread = (positions.astype(np.uint32) * np.uint32(LANES))[:, None] + lane
        m.v_u32[0][...] = thread  # x in bits 0 to 9; y and z are 0, workgroups have one dimension
        m.v_flag[0] = CLEAN
        alive = np.minimum(threads - positions * LANES, LANES)
        bits = np.where(
            alive >= 64,
            np.uint64(0xFFFFFFFFFFFFFFFF),
            (np.uint64(1) << (alive.astype(np.uint64) & np.uint64(63))) - np.uint64(1),
        )
        m.s_u64[63][...] = bits
        m.absent = None if threads % LANES == 0 else ~bits
        m.refresh()
        return m

    def _start_scalars(self, m: Machine, grid: tuple[int, int, int], group: Array, arguments: int) -> None:
        """User and system scalar registers in the order of the AMDGPU ABI."""
        d = self.kernel.descriptor
        at = 0
        for name, size in (
            ("private_segment_buffer", 4),
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("flat_scratch_init", 2),
            ("private_segment_size", 1),
        ):
            if d.get(f"user_sgpr_{name}", 0) != 1:
                continue
            if name == "kernarg_segment_ptr":
                m.s_u64[at // 2][...] = arguments
                m.s_flag[at] = m.s_flag[at + 1] = CLEAN
            at += size
        at = max(at, d.get("user_sgpr_count", at))
        x = group % grid[0]
        y, z = group // grid[0] % grid[1], group // (grid[0] * grid[1])
        for axis, value in (("x", x), ("y", y), ("z", z)):
            if d.get(f"system_sgpr_workgroup_id_{axis}", 1 if axis == "x" else 0) == 1:
                m.s_u32[at][...] = value
                m.s_flag[at] = CLEAN
                at += 1

    # ---------------------------------------------------------------------------------------------- scheduling

    def _execute(self, m: Machine, findings: Findings, budget: int, counts: dict[int, int]) -> tuple[int, int]:
        """Run all waves to their end. Returns (wave-instructions, steps)."""
        blocks = self.blocks(m.mode)
        executed = steps = pc = 0
        alive = np.ones(m.waves, bool)
        m.at[...] = 0
        others = False
        while True:
            block = blocks.get(pc)
            if block is None:
                raise SimulationError(f"{self.kernel.name}: control leaves the code at instruction {pc}")
            for step in block.steps:
                step(m)
            executed += block.size * m.count
            steps += block.size
            counts[pc] = counts.get(pc, 0) + m.count
            if executed > budget or steps > STEPS:
                where = self.instruction(pc)
                raise SimulationError(
                    f"{self.kernel.name}: stopped after {executed} wave-instructions near line {where.line} "
                    f"({where.text}); a loop that does not end, or a budget that is too small"
                )
            result = None if block.end is None else block.end(m)
            following = pc + block.size
            if result is None:
                pc = following
            elif isinstance(result, int):
                pc = result
            elif isinstance(result, Mode):
                m.mode, pc = result, following
                blocks = self.blocks(result)
            elif isinstance(result, Branch):
                members = m.members()
                m.at[members] = np.where(result.taken, result.target, following)
                others, pc = self._next(m, alive)
                continue
            elif result == BARRIER:
                if m.whole and not others:
                    m.shadow.barrier(m)
                    m.epoch += 1
                    pc = following
                else:
                    m.at[m.sel] = following
                    m.waiting[m.sel] = True
                    others, pc = self._next(m, alive, self.instruction(following - 1))
                continue
            elif result == FINISHED:
                alive[m.sel] = False
                if not alive.any():
                    return executed, steps
                others, pc = self._next(m, alive, self.instruction(following - 1))
                continue
            if others:
                m.at[m.sel] = pc
                others, pc = self._next(m, alive)

    def _next(self, m: Machine, alive: Array, instruction: Instruction | None = None) -> tuple[bool, int]:
        """Choose the cohort that runs next: (whether any live wave stands elsewhere, its program counter)."""
        runnable = alive & ~m.waiting
        if m.waiting.any():
            self._release(m, alive, instruction)
            runnable = alive & ~m.waiting
        if not runnable.any():  # everyone waits, at different barriers of the same workgroup
            stuck = np.flatnonzero(m.waiting)
            m.select(stuck)
            at = self.instruction(int(m.at[stuck].min()) - 1)
            m.report(
                "divergent-barrier", "waves of one workgroup wait at different barriers", at, np.ones(m.count, bool)
            )
            m.waiting[...] = False
            runnable = alive
        pc = int(m.at[runnable].min())
        chosen = np.flatnonzero(runnable & (m.at == pc))
        m.select(chosen)
        return len(chosen) < int(alive.sum()), pc

    @staticmethod
    def _release(m: Machine, alive: Array, instruction: Instruction | None) -> None:
        """Let go of the workgroups of which every live wave waits at the same barrier."""
        size = int(m.groups.max()) + 1
        living = np.bincount(m.groups[alive], minlength=size)
        waiting = np.bincount(m.groups[m.waiting], minlength=size)
        ready = (living == waiting) & (waiting > 0)
        if not ready.any():
            return
        lowest = np.full(size, np.iinfo(np.int64).max)
        highest = np.full(size, -1)
        np.minimum.at(lowest, m.groups[m.waiting], m.at[m.waiting])
        np.maximum.at(highest, m.groups[m.waiting], m.at[m.waiting])
        ready &= lowest == highest
        freed = m.waiting & ready[m.groups]
        if freed.any():
            # only the waves that pass take part in this barrier
            kept = m.sel, m.whole, m.contiguous, m.count
            m.shadow.barrier(m)
            m.epoch[freed] += 1
            m.waiting[freed] = False
            m.sel, m.whole, m.contiguous, m.count = kept


class Reporter:
    """What `Memory.finish` needs of a machine once all have ended."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
