"""Scalar instructions (SOP1, SOP2, SOPC, SOPK): one value for each wave, and SCC.

A function of arrays for each, and the driver that reads operands, writes results and tells the sanitizer. The functions
stand in `scalar_bits`, `scalar_arithmetic` and `scalar_masks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ferryman.backends.simulator.assembly import EXEC, Immediate, Instruction, Operand, Register
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Read, Sources, refuse, scalar_read, scalar_write
from ferryman.backends.simulator.operations import Context, Step, register

F = TypeVar("F", bound=Callable[..., Any])
_U32 = np.uint32


def short(k: Array) -> Array:
    """The constant of an SOPK instruction: 16 bits, sign-extended."""
    return np.asarray(k, np.int64).astype(np.int16).astype(np.int32)


def undefined_bits(m: Machine, sources: Sources, instruction: Instruction) -> bool:
    """Whether any bit of any source is undefined."""
    undefined = False
    for r in sources.scalars:
        if m.s_flag[r] and m.scalar_taint(r, instruction) is not None:
            undefined = True
    return undefined


def flagged(m: Machine, sources: Sources) -> bool:
    flags = m.s_flag
    return any(flags[r] for r in sources.scalars)


def _reads(instruction: Instruction, kinds: list[str], inputs: list[Operand], sources: Sources) -> list[Read]:
    reads = []
    given = iter(inputs)
    for kind in kinds:
        if kind == "scc":
            reads.append(lambda m: m.scc[m.sel])
            continue
        operand = instruction.operands[0] if kind[0] == "+" else next(given)
        reads.append(scalar_read(operand, kind.lstrip("+"), instruction, sources))
    return reads


def scalar(names: str, signature: str, given: Callable[..., Any], *, bitwise: str = "") -> None:
    """Enter a function under each of ``names``. signature: "u32 scc = u32 u32": results, then sources; "scc" is the
    flag on either side. ``bitwise``: the operation whose undefined bits are followed one by one."""
    left, _, right = signature.partition(" = ")
    results, kinds = left.split(), right.split()

    def decode(instruction: Instruction, context: Context) -> Step:
        if instruction.modifiers:
            raise refuse(instruction, f"modifiers {', '.join(instruction.modifiers)}")
        targets = 0 if results[0] == "scc" else 1
        needed = targets + sum(k != "scc" and k[0] != "+" for k in kinds)
        if len(instruction.operands) != needed:
            raise refuse(instruction, f"{len(instruction.operands)} operands where {needed} are needed")
        sources = Sources()
        reads = _reads(instruction, kinds, list(instruction.operands[targets:]), sources)
        if not targets:
            return _compare(instruction, reads, sources, given)
        write, written = scalar_write(instruction.operands[0], results[0], instruction)
        sets_scc, uses_scc = results[-1] == "scc", "scc" in kinds
        follow = _follow(bitwise, instruction, sources) if bitwise else None

        def step(m: Machine) -> None:
            bad = m.sanitize and (flagged(m, sources) or (uses_scc and m.scc_undefined is not None))
            taint: list[Array] | None = None
            if bad:
                taint = follow(m) if follow is not None else None
                if follow is None and (undefined_bits(m, sources, instruction) or _scc_bad(m, uses_scc)):
                    taint = [np.full(m.count, 0xFFFFFFFF, _U32)] * len(written)
            value = given(*[read(m) for read in reads])
            if sets_scc:
                value, scc = value
                m.scc[m.sel] = scc
                mark_scc(m, taint is not None)
            if written[0] in (EXEC, EXEC + 1) and taint is not None and any(t.any() for t in taint):
                m.report("uninitialised", "EXEC is set from bits that nothing has written", instruction)
                taint = None
            write(m, value)
            if m.sanitize:
                for i, r in enumerate(written):
                    if taint is not None or m.s_flag[r]:
                        m.define_scalar(r, None if taint is None else taint[i], instruction)

        return step

    register(names, "scalar")(decode)


def scalar_operation(names: str, signature: str) -> Callable[[F], F]:
    """`scalar` as a decorator."""

    def enter(function: F) -> F:
        scalar(names, signature, function)
        return function

    return enter


def _scc_bad(m: Machine, used: bool) -> bool:
    return used and m.scc_undefined is not None and bool(m.scc_undefined[m.sel].any())


def mark_scc(m: Machine, undefined: bool) -> None:
    if not undefined and m.scc_undefined is None:
        return
    if m.scc_undefined is None:
        m.scc_undefined = np.zeros(m.waves, bool)
    m.scc_undefined[m.sel] = undefined
    if not m.scc_undefined.any():
        m.scc_undefined = None


def _follow(operation: str, instruction: Instruction, sources: Sources) -> Callable[[Machine], list[Array] | None]:
    """Undefined bits of a bitwise result: a defined 0 decides an and, a defined 1 an or."""
    left, right = instruction.operands[1], instruction.operands[-1]
    size = 2 if instruction.name.endswith("64") else 1

    def half(m: Machine, operand: Operand, i: int) -> tuple[Array, Array]:
        if isinstance(operand.what, Register):
            index = operand.what.index + i
            bits = m.scalar_taint(index, instruction) if m.s_flag[index] else None
            return m.s_u32[index][m.sel], np.zeros(m.count, _U32) if bits is None else bits
        number = operand.what.value if isinstance(operand.what, Immediate) else 0
        return np.full(m.count, (int(number) >> (32 * i)) & 0xFFFFFFFF, _U32), np.zeros(m.count, _U32)

    def taint(m: Machine) -> list[Array] | None:
        taints = []
        for i in range(size):
            (a, ua), (b, ub) = half(m, left, i), half(m, right, i)
            if operation == "move":
                taints.append(ua)
                continue
            if operation == "andn2":
                b = ~b
            if operation == "or":
                taints.append((ua & (ub | ~b)) | (ub & (ua | ~a)))
            else:
                taints.append((ua & (ub | b)) | (ub & (ua | a)))
        return taints if any(f.any() for f in taints) else None

    return taint


def _compare(instruction: Instruction, reads: list[Read], sources: Sources, function: Callable[..., Any]) -> Step:
    def step(m: Machine) -> None:
        bad = m.sanitize and flagged(m, sources) and undefined_bits(m, sources, instruction)
        m.scc[m.sel] = function(*[read(m) for read in reads])
        mark_scc(m, bad)

    return step
