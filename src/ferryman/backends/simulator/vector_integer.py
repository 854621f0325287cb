"""Vector integer, bit and select instructions."""

from __future__ import annotations

import numpy as np

from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.machine import Machine, pack
from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.operands import Sources, refuse, scalar_read, scalar_write, vector_read
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import build, undefined, vector, vector_operation

_U32, _I32, _U64, _I64 = np.uint32, np.int32, np.uint64, np.int64
_FIVE, _SIX = np.uint32(31), np.uint64(63)

# ------------------------------------------------------------------------------------------- moves and bits
vector("v_mov_b32", "b32 = b32", lambda a: a, arithmetic=False)
vector("v_mov_b64", "b64 = b64", lambda a: a, arithmetic=False, carries=True)
vector(
    "v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32 v_accvgpr_read v_accvgpr_write", "b32 = b32", lambda a: a
)
vector("v_not_b32", "b32 = b32", lambda a: ~a)
vector("v_and_b32", "b32 = b32 b32", lambda a, b: a & b)
vector("v_or_b32", "b32 = b32 b32", lambda a, b: a | b)
vector("v_xor_b32", "b32 = b32 b32", lambda a, b: a ^ b)
vector("v_xnor_b32", "b32 = b32 b32", lambda a, b: ~(a ^ b))
vector("v_or3_b32", "b32 = b32 b32 b32", lambda a, b, c: a | b | c)
vector("v_and_or_b32", "b32 = b32 b32 b32", lambda a, b, c: (a & b) | c)
vector("v_bfi_b32", "b32 = b32 b32 b32", lambda a, b, c: (a & b) | (~a & c))
vector("v_lshlrev_b32", "b32 = u32 b32", lambda n, a: a << (n & _FIVE))
vector("v_lshrrev_b32", "b32 = u32 u32", lambda n, a: a >> (n & _FIVE))
vector("v_ashrrev_i32", "i32 = i32 i32", lambda n, a: a >> (n & _I32(31)))
vector("v_lshl_or_b32", "b32 = b32 u32 b32", lambda a, n, b: (a << (n & _FIVE)) | b)
vector("v_lshlrev_b64", "b64 = u32 u64", lambda n, a: a << (np.asarray(n, _U64) & _SIX), carries=True)
vector("v_lshrrev_b64", "b64 = u32 u64", lambda n, a: a >> (np.asarray(n, _U64) & _SIX))
vector("v_ashrrev_i64", "i64 = u32 i64", lambda n, a: a >> (np.asarray(n, _I64) & _I64(63)))
vector("v_lshlrev_b16", "b16 = u16 u16", lambda n, a: a << (n & np.uint16(15)))
vector("v_lshrrev_b16", "b16 = u16 u16", lambda n, a: a >> (n & np.uint16(15)))
vector("v_ashrrev_i16", "i16 = i16 i16", lambda n, a: a >> (n & np.int16(15)))


@vector_operation("v_bfrev_b32", "b32 = b32")
def _reverse(a: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        m, n = _U32(mask), _U32(shift)
        a = ((a >> n) & m) | ((a & m) << n)
    return a


@vector_operation("v_bfe_u32", "u32 = u32 u32 u32")
def _extract(a: Array, offset: Array, size: Array) -> Array:
    return (a >> (offset & _FIVE)) & ((_U32(1) << (size & _FIVE)) - _U32(1))


@vector_operation("v_bfe_i32", "i32 = u32 u32 u32")
def _extract_signed(a: Array, offset: Array, size: Array) -> Array:
    size = (size & _FIVE).astype(_I64)
    shifted = np.asarray(a, _U32).view(_I32).astype(_I64) >> (offset & _FIVE).astype(_I64)
    room = np.minimum(_I64(64) - size, _I64(63))
    return np.where(size == 0, 0, (shifted << room) >> room).astype(_I32)


@vector_operation("v_bfm_b32", "b32 = u32 u32")
def _mask(size: Array, offset: Array) -> Array:
    return ((_U32(1) << (size & _FIVE)) - _U32(1)) << (offset & _FIVE)


@vector_operation("v_alignbit_b32", "b32 = u32 u32 u32")
def _align_bit(high: Array, low: Array, n: Array) -> Array:
    wide = (np.asarray(high, _U64) << _U64(32)) | low
    return (wide >> (n & _FIVE).astype(_U64)).astype(_U32)


@vector_operation("v_alignbyte_b32", "b32 = u32 u32 u32")
def _align_byte(high: Array, low: Array, n: Array) -> Array:
    wide = (np.asarray(high, _U64) << _U64(32)) | low
    return (wide >> ((n & _U32(3)) * _U32(8)).astype(_U64)).astype(_U32)


@vector_operation("v_perm_b32", "b32 = u32 u32 u32")
def _permute_bytes(high: Array, low: Array, select: Array) -> Array:
    """Byte i of the result by byte i of ``select``: 0-3 of ``low``, 4-7 of ``high``, 8-11 signs, 12 zero, above 255."""
    wide = (np.asarray(high, _U64) << _U64(32)) | low
    result = _U32(0)
    for i in range(4):
        s = (select >> _U32(8 * i)) & _U32(0xFF)
        plain = (wide >> ((s & _U32(7)).astype(_U64) * _U64(8))) & _U64(0xFF)
        if np.max(s) > 7:
            sign = (wide >> ((s & _U32(3)).astype(_U64) * _U64(16) + _U64(15))) & _U64(1)
            plain = np.where(s > 12, _U64(0xFF), np.where(s == 12, _U64(0), np.where(s >= 8, sign * _U64(0xFF), plain)))
        result = result | (np.asarray(plain).astype(_U32) << _U32(8 * i))
    return result


@vector_operation("v_ffbh_u32", "u32 = u32")
def _first_high(a: Array) -> Array:
    """Zeros above the highest set bit; -1 where there is none."""
    exponent = np.frexp(a.astype(np.float64))[1]
    return np.where(a == 0, _U32(0xFFFFFFFF), (32 - exponent).astype(_U32))


@vector_operation("v_ffbl_b32", "u32 = u32")
def _first_low(a: Array) -> Array:
    lowest = a & (~a + _U32(1))
    return np.where(a == 0, _U32(0xFFFFFFFF), (np.frexp(lowest.astype(np.float64))[1] - 1).astype(_U32))


@vector_operation("v_ffbh_i32", "u32 = i32")
def _first_high_signed(a: Array) -> Array:
    """Bits above the first that differs from the sign; -1 where none does."""
    magnitude = np.where(a < 0, ~a, a).astype(_U32)
    return np.where(magnitude == 0, _U32(0xFFFFFFFF), (32 - np.frexp(magnitude.astype(np.float64))[1]).astype(_U32))


@vector_operation("v_bcnt_u32_b32", "u32 = u32 u32")
def _count(a: Array, b: Array) -> Array:
    octets = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(*np.shape(a), 4), axis=-1)
    return octets.sum(-1).astype(_U32) + b


# ----------------------------------------------------------------------------------------------- arithmetic
vector("v_add_u32", "u32 = u32 u32", lambda a, b: a + b)
vector("v_sub_u32", "u32 = u32 u32", lambda a, b: a - b)
vector("v_subrev_u32", "u32 = u32 u32", lambda a, b: b - a)
vector("v_add_i32", "i32 = i32 i32", lambda a, b: a + b)
vector("v_sub_i32", "i32 = i32 i32", lambda a, b: a - b)
vector("v_add3_u32", "u32 = u32 u32 u32", lambda a, b, c: a + b + c)
vector("v_lshl_add_u32", "u32 = u32 u32 u32", lambda a, n, b: (a << (n & _FIVE)) + b)
vector("v_add_lshl_u32", "u32 = u32 u32 u32", lambda a, b, n: (a + b) << (n & _FIVE))
vector("v_xad_u32", "u32 = u32 u32 u32", lambda a, b, c: (a ^ b) + c)
vector("v_lshl_add_u64", "u64 = u64 u32 u64", lambda a, n, b: (a << np.asarray(n & _U32(7), _U64)) + b, carries=True)
vector("v_mul_lo_u32", "u32 = u32 u32", lambda a, b: a * b)
vector("v_mul_hi_u32", "u32 = u32 u32", lambda a, b: ((np.asarray(a, _U64) * b) >> _U64(32)).astype(_U32))
vector("v_mul_hi_i32", "i32 = i32 i32", lambda a, b: ((np.asarray(a, _I64) * b) >> _I64(32)).astype(_I32))
vector("v_min_u32", "u32 = u32 u32", np.minimum)
vector("v_max_u32", "u32 = u32 u32", np.maximum)
vector("v_min_i32", "i32 = i32 i32", np.minimum)
vector("v_max_i32", "i32 = i32 i32", np.maximum)
vector("v_min3_u32", "u32 = u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
vector("v_max3_u32", "u32 = u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
vector("v_min3_i32", "i32 = i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
vector("v_max3_i32", "i32 = i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
vector("v_med3_i32", "i32 = i32 i32 i32", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))
vector("v_med3_u32", "u32 = u32 u32 u32", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))
vector("v_sad_u32", "u32 = u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)
vector("v_mul_u32_u24", "u32 = u32 u32", lambda a, b: (a & _U32(0xFFFFFF)) * (b & _U32(0xFFFFFF)))
vector("v_mad_u32_u24", "u32 = u32 u32 u32", lambda a, b, c: (a & _U32(0xFFFFFF)) * (b & _U32(0xFFFFFF)) + c)
vector("v_add_u16", "u16 = u16 u16", lambda a, b: a + b)
vector("v_sub_u16", "u16 = u16 u16", lambda a, b: a - b)
vector("v_subrev_u16", "u16 = u16 u16", lambda a, b: b - a)
vector("v_mul_lo_u16", "u16 = u16 u16", lambda a, b: a * b)
vector("v_min_u16", "u16 = u16 u16", np.minimum)
vector("v_max_u16", "u16 = u16 u16", np.maximum)
vector("v_min_i16", "i16 = i16 i16", np.minimum)
vector("v_max_i16", "i16 = i16 i16", np.maximum)
vector("v_mad_u16", "u16 = u16 u16 u16", lambda a, b, c: a * b + c, keeps_high=True)
vector("v_mad_legacy_u16", "u16 = u16 u16 u16", lambda a, b, c: a * b + c)


def _signed24(a: Array) -> Array:
    return (a << _I32(8)) >> _I32(8)


vector("v_mul_i32_i24", "i32 = i32 i32", lambda a, b: _signed24(a) * _signed24(b))
vector("v_mad_i32_i24", "i32 = i32 i32 i32", lambda a, b, c: _signed24(a) * _signed24(b) + c)


@vector_operation("v_mul_hi_u32_u24", "u32 = u32 u32")
def _high24(a: Array, b: Array) -> Array:
    return ((np.asarray(a & _U32(0xFFFFFF), _U64) * (b & _U32(0xFFFFFF))) >> _U64(32)).astype(_U32)


@vector_operation("v_mad_u64_u32", "u64 mask = u32 u32 u64", carries=True)
def _mad64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    total = np.asarray(a, _U64) * b + c
    return total, total < c


@vector_operation("v_mad_i64_i32", "i64 mask = i32 i32 i64", carries=True)
def _mad64_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = np.asarray(a, _I64) * b
    total = product + c
    return total, ((product ^ total) & (c ^ total)) < 0


def _carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    wide = np.asarray(a, _U64) + b + carry.astype(_U64)
    return wide.astype(_U32), wide > _U64(0xFFFFFFFF)


def _borrow(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    taken = np.asarray(b, _U64) + borrow.astype(_U64)
    return (np.asarray(a, _U64) - taken).astype(_U32), taken > a


_NONE = np.zeros((), bool)
vector("v_add_co_u32", "u32 mask = u32 u32", lambda a, b: _carry(a, b, _NONE))
vector("v_sub_co_u32", "u32 mask = u32 u32", lambda a, b: _borrow(a, b, _NONE))
vector("v_subrev_co_u32", "u32 mask = u32 u32", lambda a, b: _borrow(b, a, _NONE))
vector("v_addc_co_u32", "u32 mask = u32 u32 mask", _carry)
vector("v_subb_co_u32", "u32 mask = u32 u32 mask", _borrow)
vector("v_subbrev_co_u32", "u32 mask = u32 u32 mask", lambda a, b, c: _borrow(b, a, c))

# ----------------------------------------------------------------------------------------------- comparisons
_ORDERS = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
}
for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _order, _compare in _ORDERS.items():
        vector(f"v_cmp_{_order}_{_kind}", f"mask = {_kind} {_kind}", _compare)


# -------------------------------------------------------------------------------------------- lanes and selects


@register("v_cndmask_b32", "vector")
def _select(instruction: Instruction, context: Context) -> Step:
    """The taken side alone decides whether a lane is defined, so this reads the sanitizer's bits itself."""
    if instruction.encoding in ("dpp", "sdwa"):
        choose = lambda a, b, mask: np.where(mask, b, a)  # noqa: E731
        return build(instruction, context, "b32 = b32 b32 mask", choose, arithmetic=False)
    sides: list[Sources] = [Sources(), Sources(), Sources()]
    for source, operand in zip(sides[:2], instruction.operands[1:3], strict=True):
        vector_read(operand, "f32", instruction, source)  # a sign is allowed
    mask = vector_read(instruction.operands[3], "mask", instruction, sides[2])
    target_sources = Sources()
    vector_read(instruction.operands[0], "b32", instruction, target_sources)
    target = target_sources.vectors[0]
    floats = any(o.negate or o.absolute for o in instruction.operands[1:3])
    kind = "f32" if floats else "b32"
    a, b = (vector_read(o, kind, instruction, Sources()) for o in instruction.operands[1:3])

    def step(m: Machine) -> None:
        chosen = mask(m)
        value = np.where(chosen, b(m), a(m))
        if m.sanitize:
            # the sides are looked at before the result is written: it may be one of them
            taints = [undefined(m, s, instruction) for s in sides]
            m.put(m.v_u32[target], value.view(np.uint32))
            if any(t is not None for t in taints) or m.v_flag[target]:
                zero = np.zeros(m.count, np.uint64)
                left, right, selector = (zero if t is None else t for t in taints)
                bits = pack(np.ascontiguousarray(np.broadcast_to(chosen, (m.count, 64))))
                taint = (left & ~bits) | (right & bits) | selector
                m.define(target, taint if taint.any() else None, instruction)
        else:
            m.put(m.v_u32[target], value.view(np.uint32))

    return step


@vector_operation("v_mbcnt_lo_u32_b32", "u32 = u32 u32")
def _count_below_low(mask: Array, base: Array) -> Array:
    """How many of the mask's bits belong to lanes below this one, lanes 0 to 31."""
    lane = np.arange(64)
    below = np.where(lane >= 32, 0xFFFFFFFF, (1 << np.minimum(lane, 31)) - 1).astype(_U32)
    return _count(np.broadcast_to(np.asarray(mask, _U32) & below, np.broadcast_shapes(np.shape(mask), (64,))), base)


@vector_operation("v_mbcnt_hi_u32_b32", "u32 = u32 u32")
def _count_below_high(mask: Array, base: Array) -> Array:
    lane = np.arange(64)
    below = np.where(lane < 32, 0, (1 << np.maximum(lane - 32, 0)) - 1).astype(_U32)
    return _count(np.broadcast_to(np.asarray(mask, _U32) & below, np.broadcast_shapes(np.shape(mask), (64,))), base)


def _lane_taint(m: Machine, bits: Array | None, lane: Array) -> Array | None:
    if bits is None:
        return None
    flags = (bits >> lane.astype(np.uint64)) & np.uint64(1)
    return np.where(flags != 0, _U32(0xFFFFFFFF), _U32(0)) if flags.any() else None


@register("v_readlane_b32 v_readfirstlane_b32", "lanes")
def _read_lane(instruction: Instruction, context: Context) -> Step:
    """One lane to a scalar register, whatever EXEC says; v_readfirstlane takes the first active lane, or lane 0."""
    target, source = instruction.operands[:2]
    sources, scalars = Sources(), Sources()
    read = vector_read(source, "b32", instruction, sources)
    if len(sources.vectors) != 1:
        raise refuse(instruction, "a source that is no vector register")
    write, written = scalar_write(target, "b32", instruction)
    first = instruction.name == "v_readfirstlane_b32"
    number = None if first else scalar_read(instruction.operands[2], "u32", instruction, scalars)

    def step(m: Machine) -> None:
        if number is None:
            lane = np.where(m.exec_bits == 0, 0, m.lanes.argmax(1))
        else:
            lane = np.broadcast_to(np.asarray(number(m)) & _U32(63), (m.count,)).astype(np.int64)
        taint = None
        if m.sanitize:
            if m.v_flag[sources.vectors[0]]:
                taint = _lane_taint(m, m.taint(sources.vectors[0], instruction), lane)
            for r in scalars.scalars:
                if m.s_flag[r] and m.scalar_taint(r, instruction) is not None:
                    m.report("uninitialised", f"the lane number s{r} is not defined", instruction)
        write(m, read(m)[np.arange(m.count), lane])
        if m.sanitize and (taint is not None or m.s_flag[written[0]]):
            m.define_scalar(written[0], taint, instruction)

    return step


@register("v_writelane_b32", "lanes")
def _write_lane(instruction: Instruction, context: Context) -> Step:
    """A scalar to one lane, whatever EXEC says."""
    sources, target_sources = Sources(), Sources()
    vector_read(instruction.operands[0], "b32", instruction, target_sources)
    target = target_sources.vectors[0]
    value = scalar_read(instruction.operands[1], "b32", instruction, sources)
    number = scalar_read(instruction.operands[2], "u32", instruction, sources)

    def step(m: Machine) -> None:
        lane = np.broadcast_to(np.asarray(number(m)) & _U32(63), (m.count,)).astype(np.uint64)
        taint = undefined(m, sources, instruction) if m.sanitize else None
        part = m.v_u32[target][m.sel]
        part[np.arange(m.count), lane.astype(np.int64)] = value(m)
        if not m.contiguous:
            m.v_u32[target][m.sel] = part
        if m.sanitize and (taint is not None or m.v_flag[target]):
            m.define(target, taint, instruction, np.uint64(1) << lane)

    return step


@register("v_nop", "vector")
def _nothing(instruction: Instruction, context: Context) -> Step:
    return lambda m: None
