"""Vector instructions (VOP1, VOP2, VOP3, VOP3P): one function of arrays for each, and the driver that reads operands,
writes results under EXEC and tells the sanitizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ferryman.backends.simulator import numerics
from ferryman.backends.simulator.assembly import VCC, Instruction, Operand, Register
from ferryman.backends.simulator.lanes import Moved, part_read, part_write
from ferryman.backends.simulator.machine import ALL_LANES, Machine, pack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import (
    DTYPES,
    Read,
    Sources,
    Write,
    half_read,
    mask_write,
    modifier_list,
    refuse,
    vector_index,
    vector_read,
    vector_write,
)
from ferryman.backends.simulator.operations import Context, Step, register

F = TypeVar("F", bound=Callable[..., Any])
_VCC = Operand(Register("s", VCC, 2))
_OUTPUT_SCALES = {("mul", 2): 2.0, ("mul", 4): 4.0, ("div", 2): 0.5}
_PLAIN = frozenset({"clamp", "mul", "div", "op_sel"})
_DPP = frozenset(
    [
        "quad_perm",
        "row_shl",
        "row_shr",
        "row_ror",
        "wave_shl",
        "wave_shr",
        "wave_rol",
        "wave_ror",
        "row_mirror",
        "row_half_mirror",
        "row_bcast",
        "row_newbcast",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
    ]
)
_SDWA = frozenset(["dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp"])


def accept(instruction: Instruction, known: frozenset[str]) -> None:
    """Refuse modifiers that would be ignored."""
    unknown = sorted(set(instruction.modifiers) - known)
    if unknown:
        raise refuse(instruction, f"modifiers {', '.join(unknown)}")


def undefined(m: Machine, sources: Sources, instruction: Instruction) -> Array | None:
    """Lanes in which some source is undefined, as bits [waves]; None where none is."""
    lanes: Array | None = None
    for r in sources.vectors:
        if m.v_flag[r]:
            bits = m.taint(r, instruction)
            if bits is not None:
                lanes = bits if lanes is None else lanes | bits
    for r in sources.scalars:
        if m.s_flag[r]:
            part = m.scalar_taint(r, instruction)
            if part is not None:
                bits = np.where(part != 0, ALL_LANES, np.uint64(0))
                lanes = bits if lanes is None else lanes | bits
    for r in sources.masks:
        if m.s_flag[r] or m.s_flag[r + 1]:
            low, high = m.scalar_taint(r, instruction), m.scalar_taint(r + 1, instruction)
            zero = np.zeros(m.count, np.uint32)
            low, high = zero if low is None else low, zero if high is None else high
            bits = (high.astype(np.uint64) << np.uint64(32)) | low
            if bits.any():
                lanes = bits if lanes is None else lanes | bits
    return lanes


def mark_mask(m: Machine, first: int, taint: Array | None, instruction: Instruction) -> None:
    """A pair of scalar registers got a bit for each lane."""
    if taint is not None:
        taint = taint & m.exec_bits
    for half in (0, 1):
        if taint is not None or m.s_flag[first + half]:
            part = (
                None if taint is None else ((taint >> np.uint64(32 * half)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
            )
            m.define_scalar(first + half, part, instruction)


def flushed(read: Read, kind: str, context: Context) -> Read:
    """Subnormal inputs as zero where the MODE register says so."""
    if kind == "f32" and not context.mode.denormals32 & 1:
        return lambda m: numerics.flush32(read(m))
    if kind == "f16" and not context.mode.denormals64 & 1:
        return lambda m: numerics.flush16(read(m))
    return read


def finished(
    function: Callable[..., Any],
    kind: str,
    instruction: Instruction,
    context: Context,
    arithmetic: bool,
    obeys: bool = False,
) -> Any:
    """Output scale, clamp and flushing of results, around an operation with one float result. ``obeys``: it rounds as
    the MODE register says; others are refused in modes other than to nearest."""
    mode = context.mode.round32 if kind == "f32" else context.mode.round64
    if arithmetic and not obeys and kind in ("f32", "f16", "f64") and mode != numerics.NEAREST:
        raise refuse(instruction, f"a rounding mode of {kind} other than to nearest")
    stages: list[Callable[[Array], Array]] = []
    for key, factor in _OUTPUT_SCALES.items():
        if instruction.modifiers.get(key[0]) == key[1]:
            if kind not in ("f32", "f16"):
                raise refuse(instruction, f"an output scale on {kind}")
            if context.mode.ieee:  # the hardware ignores it then (LLVM, SIFoldOperands)
                continue
            stages.append(functools.partial(np.multiply, np.asarray(factor, DTYPES[kind])))
    if "clamp" in instruction.modifiers and instruction.name == "v_sub_u32":
        return lambda a, b: np.where(a >= b, function(a, b), DTYPES[kind](0))  # it saturates
    if "clamp" in instruction.modifiers:
        if kind not in ("f32", "f16", "f64"):
            raise refuse(instruction, f"clamp on {kind}")
        one, zero = DTYPES[kind](1), DTYPES[kind](0)
        stages.append(lambda x: np.where(np.isnan(x), zero, np.minimum(np.maximum(x, zero), one)))
    if arithmetic and kind == "f32" and not context.mode.denormals32 & 2:
        stages.append(numerics.flush32)
    if arithmetic and kind == "f16" and not context.mode.denormals64 & 2:
        stages.append(numerics.flush16)
    if not stages:
        return function

    def after(*values: Array) -> Array:
        result = function(*values)
        for stage in stages:
            result = stage(result)
        return result

    return after


def _source(i: int, operand: Operand, kind: str, instruction: Instruction, sources: Sources, high: int) -> Read:
    if instruction.encoding == "sdwa" and f"src{i}_sel" in instruction.modifiers:
        part = str(instruction.modifiers[f"src{i}_sel"])
        return part_read(operand, kind, part, instruction, sources)
    if high and kind.endswith("16"):
        plain = half_read(operand, kind, True, instruction, sources)
        if operand.negate or operand.absolute:
            sign = -1 if operand.negate else 1
            return lambda m: DTYPES[kind](sign) * (np.abs(plain(m)) if operand.absolute else plain(m))
        return plain
    return vector_read(operand, kind, instruction, sources)


def build(
    instruction: Instruction,
    context: Context,
    signature: str,
    function: Callable[..., Any],
    *,
    arithmetic: bool = True,
    keeps_high: bool = False,
    carries: bool = False,
    obeys: bool = False,
) -> Step:
    """A step from a signature: "f32 mask = f32 f32 +f32": results, then sources. "+f32" is the destination read as a
    source, "vcc" a mask that the text does not name. ``arithmetic``: floats obey the MODE register's denormals.
    ``obeys``: see `finished`. ``carries``: the low half of a 64-bit result does not depend on the high halves of its
    sources."""
    left, _, right = signature.partition(" = ")
    results, kinds = left.split(), right.split()
    accept(instruction, _DPP if instruction.encoding == "dpp" else _SDWA if instruction.encoding == "sdwa" else _PLAIN)
    operands = list(instruction.operands)
    given = [k for k in kinds if k[0] != "+" and k != "vcc"]
    if len(operands) != len(results) + len(given):
        raise refuse(instruction, f"{len(operands)} operands where {len(results) + len(given)} are needed")
    targets, inputs = operands[: len(results)], iter(operands[len(results) :])
    sources, reads = Sources(), []
    moved: Moved | None = None
    selected = modifier_list(instruction, "op_sel", 4, 0)
    for i, kind in enumerate(kinds):
        if kind == "vcc":
            reads.append(vector_read(_VCC, "mask", instruction, sources))
            continue
        operand = targets[0] if kind[0] == "+" else next(inputs)
        kind = kind.lstrip("+")
        if instruction.encoding == "dpp" and i == 0:
            moved = Moved(operand, kind, instruction)
            reads.append(moved.read)
        else:
            high = selected[i] if i < 3 else 0
            read = _source(i, operand, kind, instruction, sources, high)
            reads.append(flushed(read, kind, context) if arithmetic else read)
    if len(results) == 1:
        function = finished(function, results[0], instruction, context, arithmetic, obeys)
    elif instruction.modifiers.get("clamp"):
        raise refuse(instruction, "clamp on an operation with two results")
    high_result = bool(selected[len(given)]) if "op_sel" in instruction.modifiers else False
    writes, written, masks = _destinations(results, targets, instruction, keeps_high, high_result)
    if instruction.encoding == "sdwa" and results[0] != "mask":
        writes[0] = part_write(written[0], instruction)
    low = _low_half(kinds, operands[len(results) :], instruction) if carries else None
    return _step(instruction, function, reads, sources, writes, tuple(written), tuple(masks), moved, low)


def _low_half(kinds: list[str], operands: list[Operand], instruction: Instruction) -> Sources:
    """What the low half of a 64-bit result depends on."""
    sources = Sources()
    for kind, operand in zip(kinds, operands, strict=True):
        what = operand.what
        if kind.endswith("64") and isinstance(what, Register):
            operand = Operand(Register(what.file, what.index))
        vector_read(operand, "b32", instruction, sources)
    return sources


def _destinations(
    results: list[str], targets: list[Operand], instruction: Instruction, keeps_high: bool, high: bool
) -> tuple[list[Write], list[int], list[int]]:
    writes: list[Write] = []
    written: list[int] = []
    masks: list[int] = []
    for kind, operand in zip(results, targets, strict=True):
        if kind == "mask":
            write, first = mask_write(operand, instruction)
            masks.append(first)
        elif kind.endswith("16") and (keeps_high or high):
            write, index = half_write(operand, kind, high, instruction)
            written.append(index)
        else:
            write, more = vector_write(operand, kind, instruction)
            written += more
        writes.append(write)
    return writes, written, masks


def half_write(operand: Operand, kind: str, high: bool, instruction: Instruction) -> tuple[Write, int]:
    """Write one half of a register; the other half stays."""
    if not isinstance(operand.what, Register) or operand.what.file == "s":
        raise refuse(instruction, "a destination that is no vector register")
    index, place = vector_index(operand.what), int(high)
    name = "v_" + kind.replace("b", "u")

    def write(m: Machine, value: Array) -> None:
        m.put(getattr(m, name)[index][..., place], value)

    return write, index


def _step(
    instruction: Instruction,
    function: Callable[..., Any],
    reads: list[Read],
    sources: Sources,
    writes: list[Write],
    written: tuple[int, ...],
    masks: tuple[int, ...],
    moved: Moved | None,
    low: Sources | None,
) -> Step:
    if moved is not None:
        return _moved_step(instruction, function, reads, sources, writes, written, masks, moved)
    only = writes[0] if len(writes) == 1 else None
    vectors, scalars, pairs = tuple(sources.vectors), tuple(sources.scalars), tuple(sources.masks)

    def step(m: Machine) -> None:
        taint = None
        if m.sanitize:
            flags, more = m.v_flag, m.s_flag
            for r in vectors:
                if flags[r]:
                    taint = undefined(m, sources, instruction)
                    break
            else:
                for r in scalars:
                    if more[r]:
                        taint = undefined(m, sources, instruction)
                        break
                else:
                    for r in pairs:
                        if more[r] or more[r + 1]:
                            taint = undefined(m, sources, instruction)
                            break
        half = taint if taint is None or low is None else undefined(m, low, instruction)
        value = function(*[read(m) for read in reads])
        if only is not None:
            only(m, value)
        else:
            for write, one in zip(writes, value, strict=True):
                write(m, one)
        if m.sanitize:
            for r in written:
                bits = half if r == written[0] else taint
                if bits is not None or m.v_flag[r]:
                    m.define(r, bits, instruction)
            for first in masks:
                mark_mask(m, first, taint, instruction)

    return step


def _moved_step(
    instruction: Instruction,
    function: Callable[..., Any],
    reads: list[Read],
    sources: Sources,
    writes: list[Write],
    written: tuple[int, ...],
    masks: tuple[int, ...],
    moved: Moved,
) -> Step:
    if masks or len(written) != 1 or len(writes) != 1:
        raise refuse(instruction, "a DPP operation without one result of 32 bits")
    target = written[0]

    def step(m: Machine) -> None:
        lanes = moved.writes(m)
        if m.absent is not None:
            m.borrow(moved.how.source, moved.how.valid & moved.how.enabled, instruction)
        taint = undefined(m, sources, instruction) if m.sanitize else None
        if m.sanitize and m.v_flag[moved.register]:
            bits = m.taint(moved.register, instruction)
            if bits is not None:
                there = moved.taint(m, bits)
                taint = there if taint is None else taint | there
        value = np.asarray(function(*[read(m) for read in reads]))
        if value.dtype.itemsize == 2:
            value = value.view(np.uint16).astype(np.uint32)
        m.put_where(m.v_u32[target], value.view(np.uint32), lanes)
        if m.sanitize and (taint is not None or m.v_flag[target]):
            chosen = pack(np.ascontiguousarray(np.broadcast_to(lanes, (m.count, 64)))) & m.exec_bits
            m.define(target, taint, instruction, chosen)

    return step


def vector(
    names: str, signature: str, function: Callable[..., Any], *, arches: frozenset[str] | None = None, **options: bool
) -> None:
    """Enter a function of arrays under each of ``names``; the signature and the options are those of `build`."""

    def decode(instruction: Instruction, context: Context) -> Step:
        return build(instruction, context, signature, function, **options)

    register(names, "vector", arches=arches)(decode)


def vector_operation(
    names: str, signature: str, *, arches: frozenset[str] | None = None, **options: bool
) -> Callable[[F], F]:
    """`vector` as a decorator."""

    def enter(function: F) -> F:
        vector(names, signature, function, arches=arches, **options)
        return function

    return enter
