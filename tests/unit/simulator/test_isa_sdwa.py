"""SDWA: parts of registers as sources and destination, sign-extended, kept or cleared around the result.

Source: "CDNA3" Instruction Set Architecture, SDWA.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import LANES, M32, PARTIAL, execute, register, same, signed


def _select(bits: int, select: str, extend: bool = False) -> int:
    width = {"BYTE": 8, "WORD": 16, "DWOR": 32}[select[:4]]
    at = width * int(select[-1]) if select != "DWORD" else 0
    part = bits >> at & ((1 << width) - 1)
    return signed(part, width) & M32 if extend else part


def _deposit(result: int, old: int, select: str, unused: str) -> int:
    if select == "DWORD":
        return result & M32
    width = 8 if select.startswith("BYTE") else 16
    at, low = width * int(select[-1]), (1 << width) - 1
    part = (result & low) << at
    if unused == "UNUSED_PRESERVE":
        return old & ~(low << at) & M32 | part
    if unused == "UNUSED_SEXT" and result >> width - 1 & 1:
        part |= M32 << at + width & M32
    return part


SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
INTEGER_OPERATIONS = {
    "v_add_u32": lambda a, b: a + b,
    "v_and_b32": lambda a, b: a & b,
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_sub_u32": lambda a, b: a - b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_max_u32": max,
    "v_min_u32": min,
}


def _sdwa_cases() -> list[tuple[str, str, str, str, str, str, bool]]:
    cases = []
    for i, name in enumerate(INTEGER_OPERATIONS):
        for j, select in enumerate(SELECTS):
            other, into, unused = SELECTS[(i + j) % 7], SELECTS[(i + 2 * j + 3) % 7], UNUSED[(i + j) % 3]
            extend = j % 2 == 1 and select != "DWORD"
            first = "sext(v2)" if extend else "v2"
            tail = f"dst_sel:{into} dst_unused:{unused} src0_sel:{select} src1_sel:{other}"
            cases.append((register(f"{name}_sdwa v0, {first}, v3 {tail}"), name, select, other, into, unused, extend))
    return cases


SDWA = _sdwa_cases()


@pytest.mark.parametrize("case", SDWA, ids=[c[0] for c in SDWA])
def test_sdwa_selects(case: tuple) -> None:
    text, name, select, other, into, unused, extend = case
    rng = np.random.default_rng(3)
    old, a, b = (rng.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    result = execute(text, v={0: old, 2: a, 3: b}, exec_mask=PARTIAL)
    for lane in range(LANES):
        x, y, before = int(a[lane]), int(b[lane]), int(old[lane])
        value = INTEGER_OPERATIONS[name](_select(x, select, extend), _select(y, other)) & M32
        expected = _deposit(value, before, into, unused) if PARTIAL >> lane & 1 else before
        assert int(result.v[0][lane]) == expected, (
            text,
            lane,
            hex(x),
            hex(y),
            hex(int(result.v[0][lane])),
            hex(expected),
        )


def _half(bits: int, upper: bool = False) -> q.Real:
    return q.F16.decode(bits >> 16 if upper else bits & 0xFFFF)


#: text -> the result of (first source, second source, destination before); None: the select by VCC
FLOAT_SDWA: dict[str, Callable[[int, int, int], int] | None] = {
    "v_cvt_f32_f16_sdwa v0, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1": lambda a, b, old: q.F32.encode(
        _half(a, True)
    ),
    "v_cvt_f32_f16_sdwa v0, -v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0": lambda a, b, old: q.F32.encode(
        -_half(a)
    ),
    "v_add_f16_sdwa v0, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
    "src0_sel:WORD_1 src1_sel:WORD_0": lambda a, b, old: (
        old & 0xFFFF | q.F16.encode(q.add(_half(a, True), _half(b))) << 16
    ),
    "v_mul_f16_sdwa v0, v2, |v3| dst_sel:WORD_0 dst_unused:UNUSED_PAD "
    "src0_sel:WORD_0 src1_sel:WORD_1": lambda a, b, old: q.F16.encode(q.mul(_half(a), abs(_half(b, True)))),
    "v_cvt_f16_f32_sdwa v0, v4 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD": lambda a, b, old: (
        old & 0xFFFF | q.F16.encode(q.F32.decode(0x3F8C0000)) << 16
    ),
    "v_mov_b32_sdwa v0, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0": lambda a, b, old: (
        old & 0xFFFF | (a & 0xFFFF) << 16
    ),
    "v_cndmask_b32_sdwa v0, v2, v3, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1": None,
}
for _text in FLOAT_SDWA:
    register(_text)


@pytest.mark.parametrize("text", FLOAT_SDWA)
def test_sdwa_of_floats_and_moves(text: str) -> None:
    rng = np.random.default_rng(5)
    old = rng.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32)
    a, b = (
        rng.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32) & np.uint32(0xBFFFBFFF) for _ in range(2)
    )
    chosen = 0x1234_5678_9ABC_DEF0
    result = execute(text, v={0: old, 2: a, 3: b, 4: np.full(LANES, 0x3F8C0000, np.uint32)}, vcc=chosen)
    for lane in range(LANES):
        x, y, before = int(a[lane]), int(b[lane]), int(old[lane])
        oracle = FLOAT_SDWA[text]
        expected = oracle(x, y, before) if oracle else y >> 16 if chosen >> lane & 1 else x
        got = int(result.v[0][lane])
        nan = expected >> 16 == 0 and same(got, expected, "f16")
        assert got == expected or nan or same(got, expected, "f32"), (
            text,
            lane,
            hex(x),
            hex(y),
            hex(got),
            hex(expected),
        )


COMPARE_SDWA = {
    "v_cmp_lt_u32_sdwa s[30:31], v2, v3 src0_sel:BYTE_0 src1_sel:DWORD": lambda a, b: a & 0xFF < b,
    "v_cmp_lt_f16_sdwa vcc, v2, v3 src0_sel:WORD_1 src1_sel:DWORD": lambda a, b: q.less(_half(a, True), _half(b)),
    "v_cmp_o_f16_sdwa vcc, v2, v3 src0_sel:WORD_1 src1_sel:WORD_1": lambda a, b: (
        not (_half(a, True).nan or _half(b, True).nan)
    ),
    "v_cmp_eq_u32_sdwa vcc, sext(v2), v3 src0_sel:WORD_0 src1_sel:DWORD": lambda a, b: signed(a, 16) & M32 == b,
}
for _text in COMPARE_SDWA:
    register(_text)


@pytest.mark.parametrize("text", COMPARE_SDWA)
def test_sdwa_compares(text: str) -> None:
    oracle = COMPARE_SDWA[text]
    a = np.array([0x7E001234 if n % 7 == 0 else 0x3C00FFFF - n * 0x01000101 for n in range(LANES)], dtype=np.int64)
    a = (a & M32).astype(np.uint32)
    b = np.array([0xFFFFFFFF if n % 5 == 0 else 0x7C013800 + n if n % 3 else n for n in range(LANES)], dtype=np.uint32)
    result = execute(text, v={2: a, 3: b}, exec_mask=PARTIAL)
    got = result.vcc if "vcc" in text else result.s[30] | result.s[31] << 32
    expected = sum(oracle(int(x), int(y)) << n for n, (x, y) in enumerate(zip(a, b, strict=True))) & PARTIAL
    assert int(got) == expected, (text, hex(int(got)), hex(expected))
