"""Scalar moves and operations on bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.scalar import scalar, scalar_operation, short

_U32, _I32, _U64, _I64 = np.uint32, np.int32, np.uint64, np.int64

scalar("s_mov_b32", "u32 = u32", lambda a: a, bitwise="move")
scalar("s_movk_i32", "i32 = i32", lambda k: short(k))
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
