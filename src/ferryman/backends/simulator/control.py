"""Program flow: branches, barriers, waits, the end of a wave. A step that ends a straight run returns where to go on:
an instruction's index, None for the next one, or a verdict for the scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ferryman.backends.simulator.assembly import VCC, Immediate, Instruction, Word
from ferryman.backends.simulator.machine import Machine
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import refuse
from ferryman.backends.simulator.operations import Context, Step, register

BARRIER, FINISHED = "barrier", "finished"


class Branch:
    """Where some waves of the cohort go, and the others go on."""

    def __init__(self, taken: Array, target: int) -> None:
        self.taken, self.target = taken, target


def target_of(instruction: Instruction, context: Context) -> int:
    what = instruction.operands[0].what
    if not isinstance(what, Word) or what.name not in context.labels:
        raise refuse(instruction, "a branch to no label of this kernel")
    return context.labels[what.name]


@register("s_branch", "control", ends=True)
def _jump(instruction: Instruction, context: Context) -> Any:
    target = target_of(instruction, context)
    return lambda m: target


def _conditional(
    name: str, condition: Callable[[Machine], Array], reads: tuple[int, ...], uses_scc: bool = False
) -> None:
    @register(name, "control", ends=True)
    def decode(instruction: Instruction, context: Context) -> Any:
        target = target_of(instruction, context)

        def step(m: Machine) -> Any:
            if m.sanitize:
                _check(m, instruction, reads, uses_scc)
            taken = condition(m)
            if taken.all():
                return target
            return Branch(taken, target) if taken.any() else None

        return step


def _check(m: Machine, instruction: Instruction, reads: tuple[int, ...], uses_scc: bool) -> None:
    bad: Array | None = None
    if uses_scc and m.scc_undefined is not None:
        bad = m.scc_undefined[m.sel]
    for r in reads:
        bits = m.scalar_taint(r, instruction) if m.s_flag[r] else None
        if bits is not None:
            bad = bits != 0 if bad is None else bad | (bits != 0)
    if bad is not None and bad.any():
        m.report("uninitialised", "a branch depends on what nothing has written", instruction, bad)


_PAIR = (VCC, VCC + 1)
_conditional("s_cbranch_scc0", lambda m: ~m.scc[m.sel], (), True)
_conditional("s_cbranch_scc1", lambda m: m.scc[m.sel], (), True)
_conditional("s_cbranch_vccz", lambda m: m.s_u64[VCC // 2][m.sel] == 0, _PAIR)
_conditional("s_cbranch_vccnz", lambda m: m.s_u64[VCC // 2][m.sel] != 0, _PAIR)
_conditional("s_cbranch_execz", lambda m: m.exec_bits == 0, ())
_conditional("s_cbranch_execnz", lambda m: m.exec_bits != 0, ())


@register("s_endpgm", "control", ends=True)
def _end(instruction: Instruction, context: Context) -> Any:
    return lambda m: FINISHED


@register("s_barrier", "control", ends=True)
def _barrier(instruction: Instruction, context: Context) -> Any:
    return lambda m: BARRIER


@register("s_waitcnt", "control")
def _wait(instruction: Instruction, context: Context) -> Step:
    text = str(instruction.modifiers.get("counts", "")).strip()
    counts = {name: int(n, 0) for name, n in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+|0x[0-9a-f]+)\)", text)}
    if text in ("0", "0x0"):
        counts = {"vmcnt": 0, "lgkmcnt": 0}
    elif not counts or re.sub(r"(vmcnt|lgkmcnt|expcnt)\(\w+\)|[&\s]", "", text):
        raise refuse(instruction, "an unknown wait")
    vector, other = counts.get("vmcnt"), counts.get("lgkmcnt")

    def step(m: Machine) -> None:
        if vector is not None:
            m.wait(m.vmcnt, vector)
        if other is not None:
            m.wait(m.lgkmcnt, other)

    return step


@register("s_nop s_setprio s_sleep s_icache_inv s_dcache_wb buffer_wbl2 buffer_inv s_sethalt", "control")
def _nothing(instruction: Instruction, context: Context) -> Step:
    """Timing, priority and caches: this machine has none."""
    return lambda m: None


@register("s_setreg_imm32_b32", "control", ends=True)
def _set_mode(instruction: Instruction, context: Context) -> Any:
    """Of the hardware registers only MODE's rounding (bits 0-3) and denormals (bits 4-7)."""
    where, value = (o.what for o in instruction.operands)
    name = re.sub(r"\s", "", where.name) if isinstance(where, Word) else ""
    match = re.fullmatch(r"hwreg\(HW_REG_MODE,(\d+),(\d+)\)", name)
    if match is None or not isinstance(value, Immediate) or int(match[1]) + int(match[2]) > 8:
        raise refuse(instruction, "a write to a hardware register other than MODE's rounding and denormals")
    offset, size = int(match[1]), int(match[2])
    mask = ((1 << size) - 1) << offset
    bits = (int(value.value) << offset) & mask
    return lambda m: m.mode.changed(mask, bits)


@register("s_setreg_b32", "control", ends=True)
def _set_mode_from(instruction: Instruction, context: Context) -> Any:
    raise refuse(instruction, "a hardware register set from a scalar register")
