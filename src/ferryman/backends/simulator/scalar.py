"""Scalar instructions (SOP1, SOP2, SOPC, SOPK): one value for each wave, and SCC."""

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
_U32, _I32, _U64, _I64 = np.uint32, np.int32, np.uint64, np.int64
_BITWISE = frozenset({"and", "or", "andn2"})


def _short(k: Array) -> Array:
    """The constant of an SOPK instruction: 16 bits, sign-extended."""
    return np.asarray(k, np.int64).astype(np.int16).astype(_I32)


def undefined_bits(m: Machine, sources: Sources, instruction: Instruction) -> bool:
    """Whether any bit of any source is undefined."""
    undefined = False
    for r in sources.scalars:
        if m.s_flag[r] and m.scalar_taint(r, instruction) is not None:
            undefined = True
    return undefined


def _flagged(m: Machine, sources: Sources) -> bool:
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
            bad = m.sanitize and (_flagged(m, sources) or (uses_scc and m.scc_undefined is not None))
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
        bad = m.sanitize and _flagged(m, sources) and undefined_bits(m, sources, instruction)
        m.scc[m.sel] = function(*[read(m) for read in reads])
        mark_scc(m, bad)

    return step


# ------------------------------------------------------------------------------------------- moves and bits
scalar("s_mov_b32", "u32 = u32", lambda a: a, bitwise="move")
scalar("s_movk_i32", "i32 = i32", lambda k: _short(k))
scalar("s_mov_b64", "u64 = u64", lambda a: a, bitwise="move")
scalar("s_cmov_b32", "u32 = u32 +u32 scc", lambda a, old, scc: np.where(scc, a, old))
scalar("s_cselect_b32", "u32 = u32 u32 scc", lambda a, b, scc: np.where(scc, a, b))
scalar("s_cselect_b64", "u64 = u64 u64 scc", lambda a, b, scc: np.where(scc, a, b))
for _size in ("32", "64"):
    _kind = f"u{_size}"

    def _with_scc(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
        def both(*values: Array) -> tuple[Array, Array]:
            result = function(*values)
            return result, result != 0

        return both

    scalar(f"s_and_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: a & b), bitwise="and")
    scalar(f"s_or_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: a | b), bitwise="or")
    scalar(f"s_andn2_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: a & ~b), bitwise="andn2")
    scalar(f"s_xor_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: a ^ b))
    scalar(f"s_xnor_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: ~(a ^ b)))
    scalar(f"s_nand_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: ~(a & b)))
    scalar(f"s_nor_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: ~(a | b)))
    scalar(f"s_orn2_b{_size}", f"{_kind} scc = {_kind} {_kind}", _with_scc(lambda a, b: a | ~b))
    scalar(f"s_not_b{_size}", f"{_kind} scc = {_kind}", _with_scc(lambda a: ~a))
_31, _63 = _U32(31), _U64(63)
scalar("s_lshl_b32", "u32 scc = u32 u32", _with_scc(lambda a, n: a << (n & _31)))
scalar("s_lshr_b32", "u32 scc = u32 u32", _with_scc(lambda a, n: a >> (n & _31)))
scalar("s_ashr_i32", "i32 scc = i32 i32", _with_scc(lambda a, n: a >> (n & _I32(31))))
scalar("s_lshl_b64", "u64 scc = u64 u32", _with_scc(lambda a, n: a << (np.asarray(n, _U64) & _63)))
scalar("s_lshr_b64", "u64 scc = u64 u32", _with_scc(lambda a, n: a >> (np.asarray(n, _U64) & _63)))
scalar("s_ashr_i64", "i64 scc = i64 u32", _with_scc(lambda a, n: a >> (np.asarray(n, _I64) & _I64(63))))
scalar("s_bfm_b32", "u32 = u32 u32", lambda n, o: ((_U32(1) << (n & _31)) - _U32(1)) << (o & _31))
scalar(
    "s_bfm_b64",
    "u64 = u32 u32",
    lambda n, o: ((_U64(1) << (np.asarray(n, _U64) & _63)) - _U64(1)) << (np.asarray(o, _U64) & _63),
)
scalar("s_pack_ll_b32_b16", "u32 = u32 u32", lambda a, b: (a & _U32(0xFFFF)) | (b << _U32(16)))
scalar("s_pack_lh_b32_b16", "u32 = u32 u32", lambda a, b: (a & _U32(0xFFFF)) | (b & _U32(0xFFFF0000)))
scalar("s_pack_hh_b32_b16", "u32 = u32 u32", lambda a, b: (a >> _U32(16)) | (b & _U32(0xFFFF0000)))


@scalar_operation("s_bfe_u32", "u32 scc = u32 u32")
def _extract(a: Array, field: Array) -> tuple[Array, Array]:
    """``field``: offset in bits 4:0, width in 22:16."""
    offset, size = field & _31, (field >> _U32(16)) & _U32(0x7F)
    mask = ((_U64(1) << np.minimum(size, _U32(32)).astype(_U64)) - _U64(1)).astype(_U32)
    result = (a >> offset) & mask
    return result, result != 0


@scalar_operation("s_bfe_i32", "i32 scc = i32 u32")
def _extract_signed(a: Array, field: Array) -> tuple[Array, Array]:
    offset, size = (field & _31).astype(_I64), np.minimum((field >> _U32(16)) & _U32(0x7F), _U32(32)).astype(_I64)
    shifted = np.asarray(a, _I64) >> offset
    up = _I64(64) - size
    result = np.where(size == 0, _I64(0), (shifted << np.minimum(up, 63)) >> np.minimum(up, 63)).astype(_I32)
    return result, result != 0


@scalar_operation("s_bfe_u64", "u64 scc = u64 u32")
def _extract64(a: Array, field: Array) -> tuple[Array, Array]:
    offset, size = (field & _U32(63)).astype(_U64), np.minimum((field >> _U32(16)) & _U32(0x7F), _U32(64)).astype(_U64)
    mask = np.where(size == 64, _U64(0xFFFFFFFFFFFFFFFF), (_U64(1) << (size & _63)) - _U64(1))
    result = (a >> offset) & mask
    return result, result != 0


@scalar_operation("s_bfe_i64", "i64 scc = i64 u32")
def _extract64_signed(a: Array, field: Array) -> tuple[Array, Array]:
    offset, size = (field & _U32(63)).astype(_I64), np.minimum((field >> _U32(16)) & _U32(0x7F), _U32(64)).astype(_I64)
    room = np.minimum(_I64(64) - size, _I64(63))
    result = np.where(size == 0, _I64(0), ((a >> offset) << room) >> room)
    return result, result != 0


def _bits(a: Array, size: int) -> Array:
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, size // 8), axis=1, bitorder="little")


def _lowest(size: int) -> Callable[[Array], Array]:
    def find(a: Array) -> Array:
        bits = _bits(np.atleast_1d(a), size)
        return np.where(bits.any(1), bits.argmax(1), -1).astype(_I32)

    return find


def _highest(size: int) -> Callable[[Array], Array]:
    def find(a: Array) -> Array:
        bits = _bits(np.atleast_1d(a), size)[:, ::-1]
        return np.where(bits.any(1), bits.argmax(1), -1).astype(_I32)

    return find


scalar("s_ff1_i32_b32", "i32 = u32", _lowest(32))
scalar("s_ff1_i32_b64", "i32 = u64", _lowest(64))
scalar("s_flbit_i32_b32", "i32 = u32", _highest(32))
scalar("s_flbit_i32_b64", "i32 = u64", _highest(64))
scalar("s_flbit_i32", "i32 = i32", lambda a: _highest(32)(np.where(a < 0, ~a, a).astype(_U32)))
scalar(
    "s_brev_b32",
    "u32 = u32",
    lambda a: np.packbits(_bits(np.atleast_1d(a), 32)[:, ::-1], axis=1, bitorder="little").view(_U32)[:, 0],
)
scalar("s_sext_i32_i8", "i32 = u32", lambda a: np.asarray(a, _U32).astype(np.int8).astype(_I32))
scalar("s_sext_i32_i16", "i32 = u32", lambda a: np.asarray(a, _U32).astype(np.int16).astype(_I32))


@scalar_operation("s_bcnt1_i32_b32", "i32 scc = u32")
def _count(a: Array) -> tuple[Array, Array]:
    total = _bits(np.atleast_1d(a), 32).sum(1).astype(_I32)
    return total, total != 0


@scalar_operation("s_bcnt1_i32_b64", "i32 scc = u64")
def _count64(a: Array) -> tuple[Array, Array]:
    total = _bits(np.atleast_1d(a), 64).sum(1).astype(_I32)
    return total, total != 0


scalar("s_bitset0_b32", "u32 = u32 +u32", lambda n, old: old & ~(_U32(1) << (n & _31)))
scalar("s_bitset1_b32", "u32 = u32 +u32", lambda n, old: old | (_U32(1) << (n & _31)))
scalar("s_bitcmp0_b32", "scc = u32 u32", lambda a, n: ((a >> (n & _31)) & _U32(1)) == 0)
scalar("s_bitcmp1_b32", "scc = u32 u32", lambda a, n: ((a >> (n & _31)) & _U32(1)) != 0)

# ----------------------------------------------------------------------------------------------- arithmetic


def _signed_overflow(result: Array, wide: Array) -> Array:
    return result.astype(_I64) != wide


@scalar_operation("s_add_i32", "i32 scc = i32 i32")
def _add(a: Array, b: Array) -> tuple[Array, Array]:
    wide = np.asarray(a, _I64) + b
    result = wide.astype(_I32)
    return result, _signed_overflow(result, wide)


@scalar_operation("s_sub_i32", "i32 scc = i32 i32")
def _subtract(a: Array, b: Array) -> tuple[Array, Array]:
    wide = np.asarray(a, _I64) - b
    result = wide.astype(_I32)
    return result, _signed_overflow(result, wide)


@scalar_operation("s_addk_i32", "i32 scc = +i32 i32")
def _add_constant(old: Array, k: Array) -> tuple[Array, Array]:
    wide = np.asarray(old, _I64) + _short(k)
    result = wide.astype(_I32)
    return result, _signed_overflow(result, wide)


scalar("s_mulk_i32", "i32 = +i32 i32", lambda old, k: old * _short(k))


@scalar_operation("s_add_u32", "u32 scc = u32 u32")
def _add_unsigned(a: Array, b: Array) -> tuple[Array, Array]:
    wide = np.asarray(a, _U64) + b
    return wide.astype(_U32), wide > _U64(0xFFFFFFFF)


@scalar_operation("s_addc_u32", "u32 scc = u32 u32 scc")
def _add_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    wide = np.asarray(a, _U64) + b + carry.astype(_U64)
    return wide.astype(_U32), wide > _U64(0xFFFFFFFF)


@scalar_operation("s_sub_u32", "u32 scc = u32 u32")
def _subtract_unsigned(a: Array, b: Array) -> tuple[Array, Array]:
    return a - b, np.broadcast_to(np.asarray(b) > a, np.broadcast_shapes(np.shape(a), np.shape(b)))


@scalar_operation("s_subb_u32", "u32 scc = u32 u32 scc")
def _subtract_borrow(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    taken = np.asarray(b, _U64) + borrow.astype(_U64)
    return (np.asarray(a, _U64) - taken).astype(_U32), taken > a


scalar("s_mul_i32", "i32 = i32 i32", lambda a, b: a * b)
scalar("s_mul_hi_u32", "u32 = u32 u32", lambda a, b: ((np.asarray(a, _U64) * b) >> _U64(32)).astype(_U32))
scalar("s_mul_hi_i32", "i32 = i32 i32", lambda a, b: ((np.asarray(a, _I64) * b) >> _I64(32)).astype(_I32))
scalar("s_min_i32", "i32 scc = i32 i32", lambda a, b: (np.minimum(a, b), a < b))
scalar("s_max_i32", "i32 scc = i32 i32", lambda a, b: (np.maximum(a, b), a >= b))
scalar("s_min_u32", "u32 scc = u32 u32", lambda a, b: (np.minimum(a, b), a < b))
scalar("s_max_u32", "u32 scc = u32 u32", lambda a, b: (np.maximum(a, b), a >= b))
scalar("s_abs_i32", "i32 scc = i32", lambda a: (np.abs(a), a != 0))
scalar("s_absdiff_i32", "i32 scc = i32 i32", lambda a, b: (np.abs(a - b), a != b))
for _shift in (1, 2, 3, 4):

    def _shifted_add(a: Array, b: Array, n: int = _shift) -> tuple[Array, Array]:
        wide = (np.asarray(a, _U64) << _U64(n)) + b
        return wide.astype(_U32), wide > _U64(0xFFFFFFFF)

    scalar(f"s_lshl{_shift}_add_u32", "u32 scc = u32 u32", _shifted_add)

# ----------------------------------------------------------------------------------------------- comparisons
_ORDERS = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
for _order, _function in _ORDERS.items():
    scalar(f"s_cmp_{_order}_i32", "scc = i32 i32", _function)
    scalar(f"s_cmp_{_order}_u32", "scc = u32 u32", _function)
    scalar(f"s_cmpk_{_order}_i32", "scc = i32 i32", lambda a, k, f=_function: f(a, _short(k)))
    scalar(f"s_cmpk_{_order}_u32", "scc = u32 u32", _function)
scalar("s_cmp_eq_u64", "scc = u64 u64", np.equal)
scalar("s_cmp_lg_u64", "scc = u64 u64", np.not_equal)

# -------------------------------------------------------------------------------------------- EXEC and masks
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
            if m.sanitize and _flagged(m, sources):
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
