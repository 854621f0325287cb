"""Scalar instructions that save EXEC and set it (s_and_saveexec_b64 ..)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ferryman.backends.simulator.assembly import EXEC, Instruction
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, scalar_read, scalar_write
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.scalar import flagged, mark_scc

_U32, _U64 = np.uint32, np.uint64
_SAVES: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda e, s: s & e,
    "or": lambda e, s: s | e,
    "xor": lambda e, s: s ^ e,
    "andn2": lambda e, s: s & ~e,
    "andn1": lambda e, s: ~s & e,
    "orn2": lambda e, s: s | ~e,
    "nand": lambda e, s: ~(s & e),
    "nor": lambda e, s: ~(s | e),
    "xnor": lambda e, s: ~(s ^ e),
}


def _save(operation: str) -> None:
    function = _SAVES[operation]

    @register(f"s_{operation}_saveexec_b64", "scalar")
    def decode(instruction: Instruction, context: Context) -> Step:
        """The destination gets EXEC, and EXEC the result."""
        sources = Sources()
        read = scalar_read(instruction.operands[1], "u64", instruction, sources)
        write, written = scalar_write(instruction.operands[0], "u64", instruction)

        def step(m: Machine) -> None:
            if m.sanitize and flagged(m, sources):
                _check_mask(m, sources, instruction)
            old = np.array(m.exec_bits)
            value = function(old, read(m))
            write(m, old)
            m.s_u64[EXEC // 2][m.sel] = value
            m.refresh()
            m.scc[m.sel] = value != 0
            mark_scc(m, False)
            if m.sanitize:
                for r in written:
                    if m.s_flag[r]:
                        m.define_scalar(r, None, instruction)

        return step


def _check_mask(m: Machine, sources: Sources, instruction: Instruction) -> None:
    """Undefined bits matter only in lanes that are active."""
    for half, r in enumerate(sources.scalars):
        bits = m.scalar_taint(r, instruction) if m.s_flag[r] else None
        if bits is not None:
            active = ((m.exec_bits >> _U64(32 * half)) & _U64(0xFFFFFFFF)).astype(_U32)
            bad = (bits & active) != 0
            if bad.any():
                m.report("uninitialised", f"EXEC is set from bits of s{r} that nothing has written", instruction, bad)


for _operation in _SAVES:
    _save(_operation)
