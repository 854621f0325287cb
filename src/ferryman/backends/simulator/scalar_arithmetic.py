"""Scalar arithmetic and comparisons."""

from __future__ import annotations

import numpy as np

from ferryman.backends.simulator.numerics import Array
from ferryman.backends.simulator.scalar import scalar, scalar_operation, short

_U32, _I32, _U64, _I64 = np.uint32, np.int32, np.uint64, np.int64


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
    wide = np.asarray(old, _I64) + short(k)
    result = wide.astype(_I32)
    return result, _signed_overflow(result, wide)


scalar("s_mulk_i32", "i32 = +i32 i32", lambda old, k: old * short(k))


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
    scalar(f"s_cmpk_{_order}_i32", "scc = i32 i32", lambda a, k, f=_function: f(a, short(k)))
    scalar(f"s_cmpk_{_order}_u32", "scc = u32 u32", _function)
scalar("s_cmp_eq_u64", "scc = u64 u64", np.equal)
scalar("s_cmp_lg_u64", "scc = u64 u64", np.not_equal)
