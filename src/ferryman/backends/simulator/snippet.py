"""Run some lines of assembly on one workgroup with given registers and memory, and look at what they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferryman.backends.simulator.assembly import EXEC, M0, VCC, Instruction, Kernel, instruction
from ferryman.backends.simulator.counters import Counters
from ferryman.backends.simulator.findings import Finding, Findings
from ferryman.backends.simulator.lds import Shadow
from ferryman.backends.simulator.machine import CLEAN, LANES, Machine
from ferryman.backends.simulator.memory import Memory, Region
from ferryman.backends.simulator.numerics import Array, Assumptions
from ferryman.backends.simulator.program import Program, Reporter

BUDGET = 1_000_000


@dataclass(frozen=True)
class Result:
    """Registers afterwards: v[n] and a[n] uint32 [64], or [waves, 64] of several waves; s[n] an int, or a list."""

    v: Any
    a: Any
    s: Any
    exec: Any
    vcc: Any
    scc: Any
    m0: Any
    lds: Array
    findings: list[Finding]
    counters: Counters | None = None


class _File:
    def __init__(self, rows: Sequence[Array], offset: int, scalar: bool) -> None:
        self._rows, self._offset, self._scalar = rows, offset, scalar

    def __getitem__(self, n: int) -> Any:
        row = self._rows[n + self._offset]
        if self._scalar:
            return int(row[0]) if len(row) == 1 else [int(x) for x in row]
        return row[0].copy() if len(row) == 1 else row.copy()


def _one(values: Array) -> Any:
    return int(values[0]) if len(values) == 1 else [int(v) for v in values]


def execute(
    text: str,
    *,
    arch: str = "gfx942",
    waves: int = 1,
    v: Mapping[int, Any] | None = None,
    a: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    exec_mask: int = 2**64 - 1,
    vcc: int = 0,
    scc: int = 0,
    m0: int = 0,
    lds: Array | None = None,
    buffers: Sequence[Array] = (),
    denormals: bool = True,
    assumptions: Assumptions | None = None,
    scratch: int = 0,
    sanitize: bool = True,
    budget: int = BUDGET,
    count: bool = False,
) -> Result:
    """Run ``text`` (an s_endpgm is added) on one workgroup of ``waves`` waves.

    v, a: register -> [64] or [waves, 64] of 32-bit values, of which the bits are taken. s: register -> int. lds: its
    initial bytes, all of them defined. buffers: arrays that are global memory, at their own addresses. Registers that
    are not given count as never written. Raises AssemblyError, UnimplementedInstruction and SimulationError.
    """
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(";", 1)[0].split("//", 1)[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line:
            code.append(instruction(line, number))
    code.append(instruction("s_endpgm", len(text.splitlines()) + 1))
    flush = 3 if denormals else 0
    descriptor = {
        "group_segment_fixed_size": 0 if lds is None else len(lds),
        "private_segment_fixed_size": scratch,
        "float_denorm_mode_32": flush,
        "float_denorm_mode_16_64": flush,
    }
    program = Program(Kernel("snippet", arch, code, labels, descriptor, {}), arch, assumptions)
    findings, counters = Findings("snippet"), Counters(program) if count else None
    regions = [Region(b.ctypes.data, b.ctypes.data + b.nbytes, f"buffer {i}") for i, b in enumerate(buffers)]
    memory = Memory(regions, program.granule)
    size = descriptor["group_segment_fixed_size"]
    padded = -(-size // 16) * 16
    m = Machine(
        np.zeros(waves, int),
        np.arange(waves),
        padded,
        scratch,
        memory,
        findings,
        program.mode,
        program.assumptions,
        sanitize,
        counters=counters,
    )
    m.shadow = Shadow(m, program.lds_granule, waves)
    if lds is not None:
        m.lds[:size] = lds
        m.shadow.defined[...] = True
    for given, offset in ((v, 0), (a, 256)):
        for index, value in (given or {}).items():
            m.v_u32[index + offset][...] = np.ascontiguousarray(value).view(np.uint32)
            m.v_flag[index + offset] = CLEAN
    for index, number in {**(s or {}), VCC: vcc & 0xFFFFFFFF, VCC + 1: vcc >> 32, M0: m0}.items():
        m.s_u32[index][...] = number & 0xFFFFFFFF
        m.s_flag[index] = CLEAN
    m.s_u64[EXEC // 2][...] = np.uint64(exec_mask)
    m.scc[...] = bool(scc)
    m.refresh()
    with np.errstate(all="ignore"):
        counts: dict[int, int] = {}
        program._execute(m, findings, budget, counts)
        memory.finish(Reporter(findings))
        if counters is not None:
            counters.finish(counts, size, waves)
    return Result(
        _File(m.v_u32, 0, False),
        _File(m.v_u32, 256, False),
        _File(m.s_u32, 0, True),
        _one(m.s_u64[EXEC // 2]),
        _one(m.s_u64[VCC // 2]),
        _one(m.scc),
        _one(m.s_u32[M0]),
        m.lds[:size].copy(),
        findings.all(),
        counters,
    )


__all__ = ["LANES", "Result", "execute"]
