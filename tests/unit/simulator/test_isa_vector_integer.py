"""Vector integer and bit instructions, on integers. Source: "CDNA3" Instruction Set Architecture, VOP1, VOP2, VOP3."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.simulator.harness import M32, M64, PARTIAL, Row, check, halves, rows, signed

B1, B2, B3 = ("b32",), ("b32", "b32"), ("b32", "b32", "b32")


def _first_one(bits: int, width: int, high: bool) -> int:
    """The distance of the first set bit from the top or from the bottom; -1 if there is none."""
    if not bits:
        return M32
    return width - bits.bit_length() if high else (bits & -bits).bit_length() - 1


def _first_sign_change(bits: int, width: int = 32) -> int:
    value = signed(bits, width)
    value = ~value if value < 0 else value
    return width - value.bit_length() if value else M32


def _reverse(bits: int) -> int:
    return int(f"{bits:032b}"[::-1], 2)


def _perm(high: int, low: int, select: int) -> int:
    data = (high << 32 | low).to_bytes(8, "little")
    result = 0
    for position in range(4):
        which = select >> 8 * position & 0xFF
        if which >= 13:
            byte = 0xFF
        elif which == 12:
            byte = 0
        elif which >= 8:  # the sign of byte 1, 3, 5 or 7
            byte = 0xFF if data[2 * (which - 8) + 1] & 0x80 else 0
        else:
            byte = data[which]
        result |= byte << 8 * position
    return result


def _bfe_i(value: int, offset: int, width: int) -> int:
    offset, width = offset & 31, width & 31
    return signed(signed(value) >> offset, width) & M32 if width else 0


def _bytes(value: int) -> list[int]:
    return list(value.to_bytes(4, "little"))


def _sad8(a: int, b: int, c: int, masked: bool = False) -> int:
    return (c + sum(abs(x - y) for x, y in zip(_bytes(a), _bytes(b), strict=True) if y or not masked)) & M32


def _med(a: int, b: int, c: int) -> int:
    return sorted((a, b, c))[1]


def i(function: Callable[..., int]) -> Callable[..., int]:
    """An oracle on signed 32-bit integers."""
    return lambda *bits: function(*(signed(b) for b in bits)) & M32


def _sat_u8(value: int) -> int:
    return min(max(value, 0), 255)


SELECTS = (0x07060504, 0x03020100, 0x0C0C0C0C, 0x0B0A0908, 0x0D0EFF0C, 0x01050307, 0x05040100, 0x07060302, 0x00000000)

VOP1 = [
    Row("v_mov_b32_e32 {d}, {a}", B1, "b32", lambda a: a),
    Row("v_mov_b32_e32 {d}, 0x12345678", B1, "b32", lambda a: 0x12345678, alias=False),
    Row("v_mov_b32_e32 {d}, -16", B1, "b32", lambda a: 0xFFFFFFF0, alias=False),
    Row("v_mov_b32_e32 {d}, 64", B1, "b32", lambda a: 64, alias=False),
    Row("v_mov_b32_e32 {d}, 0.15915494", B1, "b32", lambda a: 0x3E22F983, alias=False),
    Row("v_mov_b32_e32 {d}, -4.0", B1, "b32", lambda a: 0xC0800000, alias=False),
    Row("v_mov_b32_e32 {d}, s20", B1, "b32", lambda a: 0xFEDCBA98, s={20: 0xFEDCBA98}, alias=False),
    Row("v_mov_b64_e32 {d}, {a}", ("b64",), "b64", lambda a: a),
    Row(
        "v_mov_b64_e32 {d}, s[20:21]",
        ("b64",),
        "b64",
        lambda a: 0xAAAA5555_00000001,
        s={20: 1, 21: 0xAAAA5555},
        alias=False,
    ),
    Row("v_mov_b64_e32 {d}, -1", ("b64",), "b64", lambda a: M64, alias=False),
    Row("v_not_b32_e32 {d}, {a}", B1, "b32", lambda a: a ^ M32),
    Row("v_bfrev_b32_e32 {d}, {a}", B1, "b32", _reverse),
    Row("v_ffbh_u32_e32 {d}, {a}", B1, "b32", lambda a: _first_one(a, 32, True)),
    Row("v_ffbl_b32_e32 {d}, {a}", B1, "b32", lambda a: _first_one(a, 32, False)),
    Row("v_ffbh_i32_e32 {d}, {a}", B1, "b32", _first_sign_change),
    Row(
        "v_sat_pk_u8_i16_e32 {d}, {a}",
        ("pk16",),
        "b32",
        lambda a: _sat_u8(signed(a, 16)) | _sat_u8(signed(a >> 16, 16)) << 8,
    ),
]

VOP2 = [
    Row("v_add_u32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a + b) & M32),
    Row("v_add_u32_e32 {d}, -1, {b}", B2, "b32", lambda a, b: (b - 1) & M32),
    Row("v_sub_u32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a - b) & M32),
    Row("v_subrev_u32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: (b - a) & M32),
    Row("v_add_i32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a + b) & M32),
    Row("v_sub_i32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a - b) & M32),
    Row("v_add_u32_e64 {d}, {a}, {b} clamp", B2, "b32", lambda a, b: min(a + b, M32)),
    Row("v_sub_u32_e64 {d}, {a}, {b} clamp", B2, "b32", lambda a, b: max(a - b, 0)),
    Row("v_add_i32 {d}, {a}, {b} clamp", B2, "b32", i(lambda a, b: max(min(a + b, 2**31 - 1), -(2**31)))),
    Row("v_and_b32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: a & b),
    Row("v_and_b32_e32 {d}, 0xff00ff, {b}", B2, "b32", lambda a, b: b & 0xFF00FF),
    Row("v_or_b32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: a | b),
    Row("v_xor_b32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: a ^ b),
    Row("v_xnor_b32_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: a ^ b ^ M32),
    Row("v_min_i32_e32 {d}, {a}, {b}", B2, "b32", i(min)),
    Row("v_max_i32_e32 {d}, {a}, {b}", B2, "b32", i(max)),
    Row("v_min_u32_e32 {d}, {a}, {b}", B2, "b32", min),
    Row("v_max_u32_e32 {d}, {a}, {b}", B2, "b32", max),
    Row("v_lshlrev_b32_e32 {d}, {a}, {b}", ("shift", "b32"), "b32", lambda a, b: b << (a & 31) & M32),
    Row("v_lshrrev_b32_e32 {d}, {a}, {b}", ("shift", "b32"), "b32", lambda a, b: b >> (a & 31)),
    Row("v_ashrrev_i32_e32 {d}, {a}, {b}", ("shift", "b32"), "b32", lambda a, b: signed(b) >> (a & 31) & M32),
    Row("v_mul_i32_i24_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: signed(a, 24) * signed(b, 24) & M32),
    Row("v_mul_hi_i32_i24_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: signed(a, 24) * signed(b, 24) >> 32 & M32),
    Row("v_mul_u32_u24_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M32),
    Row("v_mul_hi_u32_u24_e32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    # 16-bit forms of VOP2 clear the upper half on GFX9 (LLVM, GCNSubtarget::zeroesHigh16BitsOfDest).
    Row("v_add_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: (a + b) & 0xFFFF),
    Row("v_sub_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: (a - b) & 0xFFFF),
    Row("v_subrev_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: (b - a) & 0xFFFF),
    Row("v_mul_lo_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: a * b & 0xFFFF),
    Row("v_lshlrev_b16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: b << (a & 15) & 0xFFFF),
    Row("v_lshrrev_b16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: (b & 0xFFFF) >> (a & 15)),
    Row("v_ashrrev_i16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: signed(b, 16) >> (a & 15) & 0xFFFF),
    Row("v_max_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: max(a & 0xFFFF, b & 0xFFFF)),
    Row("v_min_u16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: min(a & 0xFFFF, b & 0xFFFF)),
    Row("v_max_i16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF),
    Row("v_min_i16_e32 {d}, {a}, {b}", ("b16", "b16"), "b32", lambda a, b: min(signed(a, 16), signed(b, 16)) & 0xFFFF),
    Row("v_dot4c_i32_i8_e32 {d}, {a}, {b}", ("b32", "b32", "old:b32"), "b32", lambda a, b, c: _dot(a, b, c, 8, True)),
    Row("v_dot2c_i32_i16_e32 {d}, {a}, {b}", ("b32", "b32", "old:b32"), "b32", lambda a, b, c: _dot(a, b, c, 16, True)),
    Row("v_dot8c_i32_i4_e32 {d}, {a}, {b}", ("b32", "b32", "old:b32"), "b32", lambda a, b, c: _dot(a, b, c, 4, True)),
]


def _dot(a: int, b: int, c: int, width: int, with_sign: bool) -> int:
    low = (1 << width) - 1
    total = c
    for at in range(0, 32, width):
        x, y = a >> at & low, b >> at & low
        total += signed(x, width) * signed(y, width) if with_sign else x * y
    return total & M32


VOP3 = [
    Row("v_mul_lo_u32 {d}, {a}, {b}", B2, "b32", lambda a, b: a * b & M32),
    Row("v_mul_hi_u32 {d}, {a}, {b}", B2, "b32", lambda a, b: a * b >> 32),
    Row("v_mul_hi_i32 {d}, {a}, {b}", B2, "b32", lambda a, b: signed(a) * signed(b) >> 32 & M32),
    Row("v_add3_u32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: (a + b + c) & M32),
    Row("v_add3_u32 {d}, {a}, s20, 7", B3, "b32", lambda a, b, c: (a + 0x80000001 + 7) & M32, s={20: 0x80000001}),
    Row("v_add_lshl_u32 {d}, {a}, {b}, {c}", ("b32", "b32", "shift"), "b32", lambda a, b, c: (a + b) << (c & 31) & M32),
    Row(
        "v_lshl_add_u32 {d}, {a}, {b}, {c}", ("b32", "shift", "b32"), "b32", lambda a, b, c: ((a << (b & 31)) + c) & M32
    ),
    Row("v_lshl_or_b32 {d}, {a}, {b}, {c}", ("b32", "shift", "b32"), "b32", lambda a, b, c: (a << (b & 31) | c) & M32),
    Row("v_and_or_b32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: a & b | c),
    Row("v_or3_b32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: a | b | c),
    Row("v_xad_u32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: ((a ^ b) + c) & M32),
    Row("v_xad_u32 {d}, {a}, -1, 1", B3, "b32", lambda a, b, c: -a & M32),
    Row("v_bfi_b32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: a & b | (a ^ M32) & c),
    Row(
        "v_bfe_u32 {d}, {a}, {b}, {c}",
        ("b32", "shift", "shift"),
        "b32",
        lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    ),
    Row("v_bfe_i32 {d}, {a}, {b}, {c}", ("b32", "shift", "shift"), "b32", _bfe_i),
    Row("v_bfm_b32 {d}, {a}, {b}", ("shift", "shift"), "b32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31) & M32),
    Row(
        "v_alignbit_b32 {d}, {a}, {b}, {c}",
        ("b32", "b32", "shift"),
        "b32",
        lambda a, b, c: (a << 32 | b) >> (c & 31) & M32,
    ),
    Row(
        "v_alignbyte_b32 {d}, {a}, {b}, {c}",
        ("b32", "b32", "shift"),
        "b32",
        lambda a, b, c: (a << 32 | b) >> 8 * (c & 3) & M32,
    ),
    Row("v_perm_b32 {d}, {a}, {b}, {c}", B3, "b32", _perm, edges=(None, (0x80FF7F00, 0x00010203, 0xFFFEFDFC), SELECTS)),
    Row("v_perm_b32 {d}, {a}, {b}, s20", B2, "b32", lambda a, b: _perm(a, b, 0x07060302), s={20: 0x07060302}),
    Row("v_min3_i32 {d}, {a}, {b}, {c}", B3, "b32", i(min)),
    Row("v_max3_i32 {d}, {a}, {b}, {c}", B3, "b32", i(max)),
    Row("v_med3_i32 {d}, {a}, {b}, {c}", B3, "b32", i(_med)),
    Row("v_min3_u32 {d}, {a}, {b}, {c}", B3, "b32", min),
    Row("v_max3_u32 {d}, {a}, {b}, {c}", B3, "b32", max),
    Row("v_med3_u32 {d}, {a}, {b}, {c}", B3, "b32", _med),
    Row("v_mad_i32_i24 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: (signed(a, 24) * signed(b, 24) + c) & M32),
    Row("v_mad_u32_u24 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: ((a & 0xFFFFFF) * (b & 0xFFFFFF) + c) & M32),
    Row("v_mad_u32_u16 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: ((a & 0xFFFF) * (b & 0xFFFF) + c) & M32),
    Row("v_mad_i32_i16 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: (signed(a, 16) * signed(b, 16) + c) & M32),
    Row("v_sad_u8 {d}, {a}, {b}, {c}", B3, "b32", _sad8),
    Row("v_sad_hi_u8 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: ((_sad8(a, b, 0) << 16) + c) & M32),
    Row("v_msad_u8 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _sad8(a, b, c, masked=True)),
    Row(
        "v_sad_u16 {d}, {a}, {b}, {c}",
        B3,
        "b32",
        lambda a, b, c: (abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c) & M32,
    ),
    Row("v_sad_u32 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: (abs(a - b) + c) & M32),
    Row(
        "v_lerp_u8 {d}, {a}, {b}, {c}",
        B3,
        "b32",
        lambda a, b, c: sum(((a >> n & 0xFF) + (b >> n & 0xFF) + (c >> n & 1) >> 1) << n for n in (0, 8, 16, 24)),
    ),
    Row("v_bcnt_u32_b32 {d}, {a}, {b}", B2, "b32", lambda a, b: (a.bit_count() + b) & M32),
    Row("v_cvt_pk_u16_u32 {d}, {a}, {b}", B2, "b32", lambda a, b: min(a, 0xFFFF) | min(b, 0xFFFF) << 16),
    Row("v_cvt_pk_i16_i32 {d}, {a}, {b}", B2, "b32", lambda a, b: _sat_i16(a) | _sat_i16(b) << 16),
    Row("v_lshlrev_b64 {d}, {a}, {b}", ("shift", "b64"), "b64", lambda a, b: b << (a & 63) & M64),
    Row("v_lshrrev_b64 {d}, {a}, {b}", ("shift", "b64"), "b64", lambda a, b: b >> (a & 63)),
    Row("v_ashrrev_i64 {d}, {a}, {b}", ("shift", "b64"), "b64", lambda a, b: signed(b, 64) >> (a & 63) & M64),
    Row("v_lshlrev_b64 {d}, 2, {b}", ("shift", "b64"), "b64", lambda a, b: b << 2 & M64),
    Row(
        "v_lshl_add_u64 {d}, {a}, {b}, {c}",
        ("b64", "b32", "b64"),
        "b64",
        lambda a, b, c: ((a << (b & 7)) + c) & M64,
        edges=(None, (0, 1, 2, 3, 4), None),
    ),
    Row(
        "v_lshl_add_u64 {d}, {a}, 0, s[20:21]", ("b64",), "b64", lambda a: (a + 0x1_FFFFFFFF) & M64, s={20: M32, 21: 1}
    ),
    Row(
        "v_pack_b32_f16 {d}, {a}, {b}",
        B2,
        "b32",
        lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
        edges=((0x12345678, 0xFFFF0001), (0x9ABC1234, 0x0003FFFF)),
    ),
    Row(
        "v_pack_b32_f16 {d}, {a}, {b} op_sel:[1,0,0]",
        B2,
        "b32",
        lambda a, b: a >> 16 | (b & 0xFFFF) << 16,
        edges=((0x12345678, 0x3FFF0001), (0x9ABC1234, 0x0003FFFF)),
    ),
    Row(
        "v_pack_b32_f16 {d}, {a}, {b} op_sel:[1,1,0]",
        B2,
        "b32",
        lambda a, b: a >> 16 | (b >> 16) << 16,
        edges=((0x12345678, 0x3FFF0001), (0x3ABC1234, 0x0003FFFF)),
    ),
    # the forms of GFX9 with op_sel keep the other half of the destination
    Row(
        "v_mad_u16 {d}, {a}, {b}, {c}",
        ("b16", "b16", "b16", "old:kept"),
        "b32",
        lambda a, b, c, old: old & 0xFFFF0000 | (a * b + c) & 0xFFFF,
    ),
    Row("v_mad_legacy_u16 {d}, {a}, {b}, {c}", ("b16", "b16", "b16"), "b32", lambda a, b, c: (a * b + c) & 0xFFFF),
    Row(
        "v_mad_i16 {d}, {a}, {b}, {c}",
        ("b16", "b16", "b16", "old:kept"),
        "b32",
        lambda a, b, c, old: old & 0xFFFF0000 | (a * b + c) & 0xFFFF,
    ),
]


def _sat_i16(bits: int) -> int:
    return max(min(signed(bits), 0x7FFF), -0x8000) & 0xFFFF


CARRY_IN = 0xFF00_F0F0_3333_5555


CARRIES = [
    Row("v_add_co_u32_e32 {d}, vcc, {a}, {b}", B2, "b32", lambda a, b: ((a + b) & M32, a + b > M32), mask_out="vcc"),
    Row("v_sub_co_u32_e32 {d}, vcc, {a}, {b}", B2, "b32", lambda a, b: ((a - b) & M32, b > a), mask_out="vcc"),
    Row("v_subrev_co_u32_e32 {d}, vcc, {a}, {b}", B2, "b32", lambda a, b: ((b - a) & M32, a > b), mask_out="vcc"),
    Row(
        "v_add_co_u32_e64 {d}, s[30:31], {a}, {b}", B2, "b32", lambda a, b: ((a + b) & M32, a + b > M32), mask_out="30"
    ),
    Row("v_sub_co_u32_e64 {d}, s[30:31], {a}, {b}", B2, "b32", lambda a, b: ((a - b) & M32, b > a), mask_out="30"),
    Row(
        "v_addc_co_u32_e32 {d}, vcc, {a}, {b}, vcc",
        B2,
        "b32",
        lambda a, b, k: ((a + b + k) & M32, a + b + k > M32),
        vcc=CARRY_IN,
        mask_out="vcc",
    ),
    Row(
        "v_subb_co_u32_e32 {d}, vcc, {a}, {b}, vcc",
        B2,
        "b32",
        lambda a, b, k: ((a - b - k) & M32, b + k > a),
        vcc=CARRY_IN,
        mask_out="vcc",
    ),
    Row(
        "v_subbrev_co_u32_e32 {d}, vcc, {a}, {b}, vcc",
        B2,
        "b32",
        lambda a, b, k: ((b - a - k) & M32, a + k > b),
        vcc=CARRY_IN,
        mask_out="vcc",
    ),
    Row(
        "v_addc_co_u32_e64 {d}, s[30:31], 0, {b}, vcc",
        B2,
        "b32",
        lambda a, b, k: ((b + k) & M32, b + k > M32),
        vcc=CARRY_IN,
        mask_out="30",
    ),
    Row(
        "v_mad_u64_u32 {d}, s[30:31], {a}, {b}, {c}",
        ("b32", "b32", "b64"),
        "b64",
        lambda a, b, c: ((a * b + c) & M64, a * b + c > M64),
        mask_out="30",
    ),
    Row(
        "v_mad_i64_i32 {d}, s[30:31], {a}, {b}, {c}",
        ("b32", "b32", "b64"),
        "b64",
        lambda a, b, c: (signed(a) * signed(b) + c) & M64,
    ),
    Row("v_cndmask_b32_e32 {d}, {a}, {b}, vcc", B2, "b32", lambda a, b, k: b if k else a, vcc=CARRY_IN),
    Row("v_cndmask_b32_e32 {d}, 3, {b}, vcc", B2, "b32", lambda a, b, k: b if k else 3, vcc=PARTIAL),
    Row("v_cndmask_b32_e64 {d}, {a}, {b}, vcc", B2, "b32", lambda a, b, k: b if k else a, vcc=CARRY_IN),
]

PACKED = [
    Row("v_pk_add_u16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: a + b)),
    Row("v_pk_sub_u16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: a - b)),
    Row("v_pk_add_i16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: a + b)),
    Row("v_pk_sub_i16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: a - b)),
    Row("v_pk_mul_lo_u16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: a * b)),
    Row("v_pk_mad_u16 {d}, {a}, {b}, {c}", ("pk16", "pk16", "pk16"), "b32", halves(lambda a, b, c: a * b + c)),
    Row("v_pk_mad_i16 {d}, {a}, {b}, {c}", ("pk16", "pk16", "pk16"), "b32", halves(lambda a, b, c: a * b + c)),
    Row("v_pk_lshlrev_b16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: b << (a & 15))),
    Row("v_pk_lshrrev_b16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: b >> (a & 15))),
    Row("v_pk_ashrrev_i16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: signed(b, 16) >> (a & 15))),
    Row("v_pk_max_i16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: max(signed(a, 16), signed(b, 16)))),
    Row("v_pk_min_i16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(lambda a, b: min(signed(a, 16), signed(b, 16)))),
    Row("v_pk_max_u16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(max)),
    Row("v_pk_min_u16 {d}, {a}, {b}", ("pk16", "pk16"), "b32", halves(min)),
    Row(
        "v_pk_add_u16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]",
        ("pk16", "pk16"),
        "b32",
        lambda a, b: ((a >> 16) + (b & 0xFFFF)) & 0xFFFF | ((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16,
    ),
    Row("v_pk_mov_b32 {d}, {a}, {b} op_sel:[0,1]", ("b64", "b64"), "b64", lambda a, b: a & M32 | (b >> 32) << 32),
    Row("v_pk_mov_b32 {d}, {a}, {b} op_sel:[1,0]", ("b64", "b64"), "b64", lambda a, b: a >> 32 | (b & M32) << 32),
    Row("v_dot2_i32_i16 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 16, True)),
    Row("v_dot2_u32_u16 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 16, False)),
    Row("v_dot4_i32_i8 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 8, True)),
    Row("v_dot4_u32_u8 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 8, False)),
    Row("v_dot8_i32_i4 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 4, True)),
    Row("v_dot8_u32_u4 {d}, {a}, {b}, {c}", B3, "b32", lambda a, b, c: _dot(a, b, c, 4, False)),
]


def _ternary(truth: int) -> Callable[[int, int, int], int]:
    """Bit 4 a + 2 b + c of the truth table."""
    return lambda a, b, c: sum(
        (truth >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32)
    )


TERNARY = [
    Row(
        f"v_bitop3_b32 {{d}}, {{a}}, {{b}}, {{c}} bitop3:{truth:#x}",
        B3,
        "b32",
        _ternary(truth),
        arch="gfx950",
        limit=128,
    )
    for truth in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x96, 0xE8, 0x6C, 0xEC, 0x78, 0xFF)
]
TERNARY += [
    Row(
        "v_bitop3_b32 {d}, {a}, 16, s20 bitop3:0xde",
        B1,
        "b32",
        lambda a: _ternary(0xDE)(a, 16, 0xFF00FF0F),
        arch="gfx950",
        s={20: 0xFF00FF0F},
    ),
]


@rows(TERNARY)
def test_any_function_of_three_bits(row: Row) -> None:
    check(row)


@pytest.mark.daily(7)
@rows(VOP1 + VOP2 + VOP3 + CARRIES + PACKED)
def test_vector_integer(row: Row) -> None:
    check(row)
