"""Vector floating-point instructions: arithmetic, conversions, comparisons, division, packed and mixed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ferryman.backends.simulator import division, formats, numerics
from ferryman.backends.simulator.assembly import Instruction
from ferryman.backends.simulator.numerics import NEAREST, Array
from ferryman.backends.simulator.operands import (
    modifier_list,
)
from ferryman.backends.simulator.operations import Context, Step, register
from ferryman.backends.simulator.vector import build, vector, vector_operation
from ferryman.backends.simulator.vector_integer import _select  # noqa: F401 - integer forms are entered first

_U32 = np.uint32


def _wide(function: Callable[..., Array]) -> Callable[..., Array]:
    """The operation on float64, exact or rounded to odd, for a directed rounding."""
    return lambda *values: function(*(np.asarray(v, np.float64) for v in values))


def rounded(names: str, signature: str, near: Callable[..., Any], odd: Callable[..., Any]) -> None:
    """An operation that obeys the MODE register's rounding of float32: ``odd`` is exact in float64 or rounds to odd."""

    def decode(instruction: Instruction, context: Context) -> Step:
        mode = context.mode.round32
        wide = _wide(odd)

        def directed(*v: Array) -> Array:
            result = numerics.directed32(wide(*v), mode)
            if mode == numerics.DOWN and near is not product:  # x - x is -0
                result = np.where((result == 0) & (np.asarray(v[0]) != 0), np.float32(-0.0), result)
            return result

        chosen = near if mode == NEAREST else directed
        return build(instruction, context, signature, chosen, obeys=True)

    register(names, "vector")(decode)


def product(a: Array, b: Array) -> Array:
    return a * b


def _product_sum(a: Array, b: Array, c: Array) -> Array:
    product = a * b
    return numerics.odd_sum(product, np.broadcast_to(c, np.shape(product)))


rounded("v_add_f32", "f32 = f32 f32", lambda a, b: a + b, numerics.odd_sum)
rounded("v_sub_f32", "f32 = f32 f32", lambda a, b: a - b, lambda a, b: numerics.odd_sum(a, -b))
rounded("v_subrev_f32", "f32 = f32 f32", lambda a, b: b - a, lambda a, b: numerics.odd_sum(b, -a))
rounded("v_mul_f32", "f32 = f32 f32", product, product)
rounded("v_fma_f32", "f32 = f32 f32 f32", numerics.fma32, _product_sum)
rounded("v_fmac_f32", "f32 = f32 f32 +f32", numerics.fma32, _product_sum)
rounded("v_fmaak_f32", "f32 = f32 f32 f32", numerics.fma32, _product_sum)
rounded("v_fmamk_f32", "f32 = f32 f32 f32", lambda a, k, c: numerics.fma32(a, k, c), _product_sum)
vector("v_mul_legacy_f32", "f32 = f32 f32", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b))
vector("v_max_f32", "f32 = f32 f32", numerics.maximum, obeys=True)
vector("v_min_f32", "f32 = f32 f32", numerics.minimum, obeys=True)
vector("v_max3_f32", "f32 = f32 f32 f32", numerics.maximum3, obeys=True)
vector("v_min3_f32", "f32 = f32 f32 f32", numerics.minimum3, obeys=True)
vector("v_med3_f32", "f32 = f32 f32 f32", numerics.median3, obeys=True)
vector("v_add_f64", "f64 = f64 f64", lambda a, b: a + b)
vector("v_mul_f64", "f64 = f64 f64", lambda a, b: a * b)
vector("v_fma_f64", "f64 = f64 f64 f64", numerics.fma64)
vector("v_fmac_f64", "f64 = f64 f64 +f64", numerics.fma64)
vector("v_max_f64", "f64 = f64 f64", numerics.maximum, obeys=True)
vector("v_min_f64", "f64 = f64 f64", numerics.minimum, obeys=True)
vector("v_add_f16", "f16 = f16 f16", lambda a, b: a + b)
vector("v_sub_f16", "f16 = f16 f16", lambda a, b: a - b)
vector("v_subrev_f16", "f16 = f16 f16", lambda a, b: b - a)
vector("v_mul_f16", "f16 = f16 f16", lambda a, b: a * b)
vector("v_fma_f16", "f16 = f16 f16 f16", numerics.fma16, keeps_high=True)
vector("v_max_f16", "f16 = f16 f16", numerics.maximum, obeys=True)
vector("v_min_f16", "f16 = f16 f16", numerics.minimum, obeys=True)

# ------------------------------------------------------------------------------------ rounding and exponents
vector("v_rndne_f32", "f32 = f32", np.rint, obeys=True)
vector("v_floor_f32", "f32 = f32", np.floor, obeys=True)
vector("v_ceil_f32", "f32 = f32", np.ceil, obeys=True)
vector("v_trunc_f32", "f32 = f32", np.trunc, obeys=True)
vector("v_fract_f32", "f32 = f32", lambda a: np.minimum(a - np.floor(a), np.float32(1 - 2.0**-24)))
vector("v_floor_f64", "f64 = f64", np.floor, obeys=True)
vector("v_rndne_f64", "f64 = f64", np.rint, obeys=True)
vector(
    "v_ldexp_f32",
    "f32 = f32 i32",
    lambda a, n: np.ldexp(a.astype(np.float64), np.clip(n, -300, 300)).astype(np.float32),
)
vector("v_ldexp_f64", "f64 = f64 i32", lambda a, n: np.ldexp(a, np.clip(n, -2200, 2200)))
vector("v_frexp_mant_f32", "f32 = f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a), obeys=True)
vector("v_frexp_exp_i32_f32", "i32 = f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32))

# ------------------------------------------------------------------------------------------------- estimates
for _name, _function in {
    "v_rcp_f32": numerics.reciprocal,
    "v_rcp_iflag_f32": numerics.reciprocal,
    "v_rsq_f32": numerics.reciprocal_root,
    "v_sqrt_f32": np.sqrt,
    "v_exp_f32": np.exp2,
    "v_log_f32": np.log2,
    "v_sin_f32": numerics.turn_sine,
    "v_cos_f32": numerics.turn_cosine,
}.items():

    def _decode(instruction: Instruction, context: Context, function: Any = _function) -> Step:
        return build(instruction, context, "f32 = f32", numerics.estimate(function, context.assumptions))

    register(_name, "vector")(_decode)

for _name, _function in {
    "v_rcp_f16": numerics.reciprocal,
    "v_rsq_f16": numerics.reciprocal_root,
    "v_sqrt_f16": np.sqrt,
    "v_exp_f16": np.exp2,
    "v_log_f16": np.log2,
}.items():
    vector(_name, "f16 = f16", lambda a, f=_function: f(a.astype(np.float64)).astype(np.float16))

# --------------------------------------------------------------------------------------------------- division
vector("v_div_scale_f32", "f32 mask = f32 f32 f32", division.div_scale32)
vector("v_div_fmas_f32", "f32 = f32 f32 f32 vcc", division.div_fmas32)
vector("v_div_fixup_f32", "f32 = f32 f32 f32", division.div_fixup32, obeys=True)


# ------------------------------------------------------------------------------------------------ conversions
def _to_integer(low: int, high: int, dtype: Any) -> Callable[[Array], Array]:
    """Towards zero, saturating; NaN gives 0."""

    def convert(a: Array) -> Array:
        wide = np.asarray(a, np.float64)
        return np.clip(np.trunc(np.where(np.isnan(wide), 0, wide)), low, high).astype(np.int64).astype(dtype)

    return convert


vector("v_cvt_i32_f32", "i32 = f32", _to_integer(-(2**31), 2**31 - 1, np.int32))
vector("v_cvt_u32_f32", "u32 = f32", _to_integer(0, 2**32 - 1, np.uint32))
vector("v_cvt_i16_f16", "i16 = f16", _to_integer(-(2**15), 2**15 - 1, np.int16))
vector("v_cvt_u16_f16", "u16 = f16", _to_integer(0, 2**16 - 1, np.uint16))
vector("v_cvt_i32_f64", "i32 = f64", _to_integer(-(2**31), 2**31 - 1, np.int32))
vector("v_cvt_u32_f64", "u32 = f64", _to_integer(0, 2**32 - 1, np.uint32))
vector("v_cvt_f32_i32", "f32 = i32", lambda a: a.astype(np.float32))
vector("v_cvt_f32_u32", "f32 = u32", lambda a: a.astype(np.float32))
vector("v_cvt_f64_i32", "f64 = i32", lambda a: a.astype(np.float64), obeys=True)
vector("v_cvt_f64_u32", "f64 = u32", lambda a: a.astype(np.float64), obeys=True)
vector("v_cvt_f64_f32", "f64 = f32", lambda a: a.astype(np.float64), obeys=True)
vector("v_cvt_f32_f64", "f32 = f64", lambda a: a.astype(np.float32))
vector("v_cvt_f32_f16", "f32 = f16", lambda a: a.astype(np.float32), obeys=True)
vector("v_cvt_f16_u16", "f16 = u16", lambda a: a.astype(np.float16))
vector("v_cvt_f16_i16", "f16 = i16", lambda a: a.astype(np.float16))
for _byte in range(4):
    vector(
        f"v_cvt_f32_ubyte{_byte}", "f32 = u32", lambda a, n=_byte: ((a >> _U32(8 * n)) & _U32(0xFF)).astype(np.float32)
    )


@register("v_cvt_f16_f32", "vector")
def _to_half(instruction: Instruction, context: Context) -> Step:
    mode = context.mode.round64
    return build(instruction, context, "f16 = f32", lambda a: numerics.directed16(a, mode), obeys=True)


@vector_operation("v_cvt_pkrtz_f16_f32", "b32 = f32 f32")
def _pair_to_zero(a: Array, b: Array) -> Array:
    return numerics.pair16(numerics.directed16(a, numerics.ZERO), numerics.directed16(b, numerics.ZERO))


@register("v_pack_b32_f16", "vector")
def _pack(instruction: Instruction, context: Context) -> Step:
    return build(instruction, context, "b32 = f16 f16", numerics.pair16)


def _float8_convert(names: str, decode_kind: Callable[[str], formats.Float8]) -> None:
    @register(names, "vector")
    def decode(instruction: Instruction, context: Context) -> Step:
        kind = decode_kind(instruction.name)
        if context.arch != "gfx942":
            kind = formats.FP8_OCP if kind is formats.FP8_FNUZ else formats.BF8_OCP
        if instruction.name.startswith("v_cvt_f32"):
            return build(instruction, context, "f32 = u32", lambda a: formats.float8_to_f32(a, kind))
        if instruction.name.startswith("v_cvt_pk_f32"):
            high = instruction.modifiers.get("op_sel", (0,))[0] or instruction.modifiers.get("src0_sel") == "WORD_1"
            shift = _U32(16 if high else 0)

            def both(a: Array) -> Array:
                low = formats.float8_to_f32(a >> shift, kind).view(_U32).astype(np.uint64)
                top = formats.float8_to_f32((a >> shift) >> _U32(8), kind).view(_U32).astype(np.uint64)
                return low | (top << np.uint64(32))

            plain = Instruction(instruction.name, "e32", instruction.operands, {}, instruction.text, instruction.line)
            return build(plain, context, "b64 = u32", both)
        selected = modifier_list(instruction, "op_sel", 4, 0)
        shift = _U32(16 if selected[3 if len(instruction.modifiers.get("op_sel", ())) == 4 else 2] else 0)

        def narrow(a: Array, b: Array, old: Array) -> Array:
            pair = formats.f32_to_float8(a, kind) | (formats.f32_to_float8(b, kind) << _U32(8))
            return (old & ~(_U32(0xFFFF) << shift)) | (pair << shift)

        plain = Instruction(instruction.name, "e64", instruction.operands, {}, instruction.text, instruction.line)
        return build(plain, context, "b32 = f32 f32 +b32", narrow)


_float8_convert("v_cvt_f32_fp8 v_cvt_pk_f32_fp8 v_cvt_pk_fp8_f32", lambda name: formats.FP8_FNUZ)
_float8_convert("v_cvt_f32_bf8 v_cvt_pk_f32_bf8 v_cvt_pk_bf8_f32", lambda name: formats.BF8_FNUZ)

# ------------------------------------------------------------------------------------------------ comparisons
_ORDERED = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def _unless(compare: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b: ~compare(a, b)


def _different(a: Array, b: Array) -> Array:
    return (a < b) | (a > b)


def _ordered(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


_COMPARISONS: dict[str, Callable[..., Array]] = {
    **_ORDERED,
    **{f"n{k}": _unless(f) for k, f in _ORDERED.items()},
    "lg": _different,
    "nlg": _unless(_different),
    "o": _ordered,
    "u": _unless(_ordered),
}
for _kind in ("f16", "f32", "f64"):
    for _order, _compare in _COMPARISONS.items():
        vector(f"v_cmp_{_order}_{_kind}", f"mask = {_kind} {_kind}", _compare)


@vector_operation("v_cmp_class_f32", "mask = f32 u32", arithmetic=False)
def _class(a: Array, wanted: Array) -> Array:
    """Bit 0 signalling NaN, 1 quiet NaN, then -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf."""
    bits = numerics.bits32(a)
    magnitude, negative = bits & _U32(0x7FFFFFFF), bits >> _U32(31) != 0
    nan = magnitude > _U32(0x7F800000)
    quiet = (bits & _U32(0x00400000)) != 0
    size = np.where(
        magnitude == _U32(0x7F800000), 0, np.where(magnitude >= _U32(0x00800000), 1, np.where(magnitude != 0, 2, 3))
    )
    place = np.where(nan, np.where(quiet, 1, 0), np.where(negative, 2 + size, 9 - size)).astype(_U32)
    return ((np.asarray(wanted, _U32) >> place) & _U32(1)) != 0
