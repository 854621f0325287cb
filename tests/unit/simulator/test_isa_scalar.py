"""Scalar instructions on integers: values, SCC, EXEC. Source: "CDNA3" Instruction Set Architecture, SOP1 to SOPK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.unit.simulator.harness import M32, M64, execute, implemented, register, signed

EDGES32 = (
    0,
    1,
    2,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFFFF,
    0x8000,
    0x7FFFFFFE,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
    0xCCCCCCCC,
    0xFFFF3333,
)
EDGES64 = (0, 1, 63, 64, 0xFFFFFFFF, 1 << 32, 0x7FFFFFFFFFFFFFFF, 1 << 63, M64, 0xFFFFFFFF00000000, 0xAAAA5555CCCC3333)
SHIFTS = (0, 1, 5, 31, 32, 33, 63, 64, 0xFFFFFFFF)
PAIRS32 = tuple((a, b) for i, a in enumerate(EDGES32) for b in (EDGES32[-i - 1], EDGES32[(i * 5 + 2) % 18], 0x80000000))
FEWER32 = PAIRS32[::2]  # for what works bit by bit, and for comparisons
PAIRS64 = tuple((a, b) for i, a in enumerate(EDGES64) for b in (EDGES64[-i - 1], EDGES64[(i * 3 + 1) % 11], a))
SHIFTED32 = tuple((a, b) for a in (1, 0x80000001, 0x7FFFFFFF, 0xFFFF0000) for b in SHIFTS)
SHIFTED64 = tuple((a, b) for a in (1, 0x8000000000000001, 0x00FF00FF00FF0000) for b in SHIFTS)

KEEP = "SCC as before"


@dataclass(frozen=True)
class Scalar:
    """s[0:1] = f(s[2:3], s[4:5]), or one word where a type is 32 bits wide.

    oracle(*operands, scc) gives (value, scc); a value of None leaves the destination, KEEP leaves SCC.
    """

    text: str
    operands: tuple[tuple[int, ...], ...]
    oracle: Callable[..., tuple[int | None, object]]
    wide: tuple[bool, ...] = (False, False, False)  # destination, sources
    sccs: tuple[int, ...] = (0, 1)
    old: int = 0x1234567_89ABCDEF
    extra: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        register(self.line())

    def line(self) -> str:
        names = {
            name: f"s[{n}:{n + 1}]" if wide else f"s{n}"
            for name, n, wide in zip("dab", (0, 2, 4), self.wide, strict=True)
        }
        return self.text.format(**names)


ALL, TWO, WIDE = (True, True, True), (False, False, False), (True, True, False)


def one(values: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((x,) for x in values)


def nonzero(function: Callable[..., int], width: int = 32) -> Callable[..., tuple[int, int]]:
    """SCC says that the result is not zero."""
    low = (1 << width) - 1
    return lambda *operands: (function(*operands[:-1]) & low, int(function(*operands[:-1]) & low != 0))


def plain(function: Callable[..., int], width: int = 32) -> Callable[..., tuple[int, object]]:
    low = (1 << width) - 1
    return lambda *operands: (function(*operands[:-1]) & low, KEEP)


def overflow(operation: Callable[[int, int], int]) -> Callable[..., tuple[int, int]]:
    def oracle(a: int, b: int, scc: int) -> tuple[int, int]:
        exact = operation(signed(a), signed(b))
        return exact & M32, int(not -(2**31) <= exact < 2**31)

    return oracle


def first(bits: int, width: int, high: bool) -> int:
    if not bits:
        return -1
    return width - bits.bit_length() if high else (bits & -bits).bit_length() - 1


def sign_run(bits: int, width: int) -> int:
    value = signed(bits, width)
    value = ~value if value < 0 else value
    return width - value.bit_length() if value else -1


def wqm(bits: int, width: int) -> int:
    return sum(0xF << n for n in range(0, width, 4) if bits >> n & 0xF)


def quadmask(bits: int, width: int) -> int:
    return sum(1 << n // 4 for n in range(0, width, 4) if bits >> n & 0xF)


def reverse(bits: int, width: int) -> int:
    return int(f"{bits:0{width}b}"[::-1], 2)


def bfe(width: int, with_sign: bool) -> Callable[[int, int], int]:
    def oracle(a: int, b: int) -> int:
        start, size = b & (width - 1), min(b >> 16 & 0x7F, width)
        if not with_sign:
            return a >> start & ((1 << size) - 1)
        return signed(signed(a, width) >> start, size) if size else 0

    return oracle


FIELDS = tuple(start | size << 16 for start, size in ((0, 8), (4, 4), (31, 1), (8, 0), (0, 32), (16, 16), (5, 20)))
FIELDS64 = tuple(start | size << 16 for start, size in ((0, 8), (60, 4), (32, 32), (8, 0), (0, 64), (31, 2)))

ARITHMETIC = [
    Scalar("s_add_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((a + b) & M32, int(a + b > M32))),
    Scalar("s_sub_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((a - b) & M32, int(b > a))),
    Scalar("s_add_i32 {d}, {a}, {b}", PAIRS32, overflow(lambda a, b: a + b)),
    Scalar("s_sub_i32 {d}, {a}, {b}", PAIRS32, overflow(lambda a, b: a - b)),
    Scalar("s_addc_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((a + b + c) & M32, int(a + b + c > M32))),
    Scalar("s_subb_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((a - b - c) & M32, int(b + c > a))),
    Scalar(
        "s_min_i32 {d}, {a}, {b}",
        PAIRS32,
        lambda a, b, c: (min(signed(a), signed(b)) & M32, int(signed(a) < signed(b))),
    ),
    Scalar(
        "s_max_i32 {d}, {a}, {b}",
        PAIRS32,
        lambda a, b, c: (max(signed(a), signed(b)) & M32, int(signed(a) >= signed(b))),
    ),
    Scalar("s_min_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: (min(a, b), int(a < b))),
    Scalar("s_max_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: (max(a, b), int(a >= b))),
    Scalar("s_mul_i32 {d}, {a}, {b}", PAIRS32, plain(lambda a, b: a * b)),
    Scalar("s_mul_hi_u32 {d}, {a}, {b}", PAIRS32, plain(lambda a, b: a * b >> 32)),
    Scalar("s_mul_hi_i32 {d}, {a}, {b}", PAIRS32, plain(lambda a, b: signed(a) * signed(b) >> 32)),
    Scalar("s_absdiff_i32 {d}, {a}, {b}", PAIRS32, nonzero(lambda a, b: abs(signed(signed(a) - signed(b))))),
    Scalar("s_abs_i32 {d}, {a}", one(EDGES32), nonzero(lambda a: abs(signed(a)))),
    Scalar("s_lshl1_add_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((2 * a + b) & M32, int(2 * a + b > M32))),
    Scalar("s_lshl2_add_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((4 * a + b) & M32, int(4 * a + b > M32))),
    Scalar("s_lshl3_add_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((8 * a + b) & M32, int(8 * a + b > M32))),
    Scalar("s_lshl4_add_u32 {d}, {a}, {b}", PAIRS32, lambda a, b, c: ((16 * a + b) & M32, int(16 * a + b > M32))),
    Scalar("s_add_i32 {d}, {a}, -7", one(EDGES32), lambda a, c: overflow(lambda x, y: x + y)(a, M32 - 6, c)),
    Scalar("s_sub_i32 {d}, 0, {a}", one(EDGES32), lambda a, c: overflow(lambda x, y: x - y)(0, a, c)),
    Scalar(
        "s_add_u32 {d}, {a}, 0x12345678", one(EDGES32), lambda a, c: ((a + 0x12345678) & M32, int(a + 0x12345678 > M32))
    ),
]

LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
BITS = [
    unit
    for name, function in LOGIC.items()
    for unit in (
        Scalar(f"s_{name}_b32 {{d}}, {{a}}, {{b}}", FEWER32, nonzero(function)),
        Scalar(f"s_{name}_b64 {{d}}, {{a}}, {{b}}", PAIRS64, nonzero(function, 64), ALL),
    )
]
BITS += [
    Scalar("s_lshl_b32 {d}, {a}, {b}", SHIFTED32, nonzero(lambda a, b: a << (b & 31))),
    Scalar("s_lshr_b32 {d}, {a}, {b}", SHIFTED32, nonzero(lambda a, b: a >> (b & 31))),
    Scalar("s_ashr_i32 {d}, {a}, {b}", SHIFTED32, nonzero(lambda a, b: signed(a) >> (b & 31))),
    Scalar("s_lshl_b64 {d}, {a}, {b}", SHIFTED64, nonzero(lambda a, b: a << (b & 63), 64), WIDE),
    Scalar("s_lshr_b64 {d}, {a}, {b}", SHIFTED64, nonzero(lambda a, b: a >> (b & 63), 64), WIDE),
    Scalar("s_ashr_i64 {d}, {a}, {b}", SHIFTED64, nonzero(lambda a, b: signed(a, 64) >> (b & 63), 64), WIDE),
    Scalar(
        "s_bfm_b32 {d}, {a}, {b}",
        tuple((a, b) for a in SHIFTS for b in (0, 4, 31, 33)),
        plain(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    ),
    Scalar(
        "s_bfm_b64 {d}, {a}, {b}",
        tuple((a, b) for a in SHIFTS for b in (0, 4, 63, 65)),
        plain(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), 64),
        (True, False, False),
    ),
    Scalar(
        "s_bfe_u32 {d}, {a}, {b}", tuple((a, b) for a in EDGES32 for b in FIELDS), nonzero(bfe(32, False)), sccs=(0,)
    ),
    Scalar(
        "s_bfe_i32 {d}, {a}, {b}", tuple((a, b) for a in EDGES32 for b in FIELDS), nonzero(bfe(32, True)), sccs=(0,)
    ),
    Scalar(
        "s_bfe_u64 {d}, {a}, {b}",
        tuple((a, b) for a in EDGES64 for b in FIELDS64),
        nonzero(bfe(64, False), 64),
        WIDE,
        sccs=(0,),
    ),
    Scalar(
        "s_bfe_i64 {d}, {a}, {b}",
        tuple((a, b) for a in EDGES64 for b in FIELDS64),
        nonzero(bfe(64, True), 64),
        WIDE,
        sccs=(0,),
    ),
    Scalar("s_not_b32 {d}, {a}", one(EDGES32), nonzero(lambda a: ~a)),
    Scalar("s_not_b64 {d}, {a}", one(EDGES64), nonzero(lambda a: ~a, 64), ALL),
    Scalar("s_brev_b32 {d}, {a}", one(EDGES32), plain(lambda a: reverse(a, 32))),
    Scalar("s_brev_b64 {d}, {a}", one(EDGES64), plain(lambda a: reverse(a, 64), 64), ALL),
    Scalar("s_bcnt0_i32_b32 {d}, {a}", one(EDGES32), nonzero(lambda a: 32 - a.bit_count())),
    Scalar("s_bcnt1_i32_b32 {d}, {a}", one(EDGES32), nonzero(lambda a: a.bit_count())),
    Scalar("s_bcnt0_i32_b64 {d}, {a}", one(EDGES64), nonzero(lambda a: 64 - a.bit_count()), (False, True, False)),
    Scalar("s_bcnt1_i32_b64 {d}, {a}", one(EDGES64), nonzero(lambda a: a.bit_count()), (False, True, False)),
    Scalar("s_ff0_i32_b32 {d}, {a}", one(EDGES32), plain(lambda a: first(a ^ M32, 32, False))),
    Scalar("s_ff1_i32_b32 {d}, {a}", one(EDGES32), plain(lambda a: first(a, 32, False))),
    Scalar("s_ff0_i32_b64 {d}, {a}", one(EDGES64), plain(lambda a: first(a ^ M64, 64, False)), (False, True, False)),
    Scalar("s_ff1_i32_b64 {d}, {a}", one(EDGES64), plain(lambda a: first(a, 64, False)), (False, True, False)),
    Scalar("s_flbit_i32_b32 {d}, {a}", one(EDGES32), plain(lambda a: first(a, 32, True))),
    Scalar("s_flbit_i32_b64 {d}, {a}", one(EDGES64), plain(lambda a: first(a, 64, True)), (False, True, False)),
    Scalar("s_flbit_i32 {d}, {a}", one(EDGES32), plain(lambda a: sign_run(a, 32))),
    Scalar("s_flbit_i32_i64 {d}, {a}", one(EDGES64), plain(lambda a: sign_run(a, 64)), (False, True, False)),
    Scalar("s_sext_i32_i8 {d}, {a}", one(EDGES32), plain(lambda a: signed(a, 8))),
    Scalar("s_sext_i32_i16 {d}, {a}", one(EDGES32), plain(lambda a: signed(a, 16))),
    Scalar("s_bitset0_b32 {d}, {a}", one(SHIFTS), plain(lambda a: 0x89ABCDEF & ~(1 << (a & 31)))),
    Scalar("s_bitset1_b32 {d}, {a}", one(SHIFTS), plain(lambda a: 0x89ABCDEF | 1 << (a & 31))),
    Scalar(
        "s_bitset0_b64 {d}, {a}",
        one(SHIFTS),
        plain(lambda a: 0x1234567_89ABCDEF & ~(1 << (a & 63)), 64),
        (True, False, False),
    ),
    Scalar(
        "s_bitset1_b64 {d}, {a}",
        one(SHIFTS),
        plain(lambda a: 0x1234567_89ABCDEF | 1 << (a & 63), 64),
        (True, False, False),
    ),
    Scalar("s_wqm_b32 {d}, {a}", one(EDGES32), nonzero(lambda a: wqm(a, 32))),
    Scalar("s_wqm_b64 {d}, {a}", one(EDGES64), nonzero(lambda a: wqm(a, 64), 64), ALL),
    Scalar("s_quadmask_b32 {d}, {a}", one(EDGES32), nonzero(lambda a: quadmask(a, 32))),
    Scalar("s_quadmask_b64 {d}, {a}", one(EDGES64), nonzero(lambda a: quadmask(a, 64), 64), ALL),
    Scalar(
        "s_bitreplicate_b64_b32 {d}, {a}",
        one(EDGES32),
        plain(lambda a: sum(3 << 2 * n for n in range(32) if a >> n & 1), 64),
        (True, False, False),
    ),
    Scalar("s_pack_ll_b32_b16 {d}, {a}, {b}", FEWER32, plain(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16)),
    Scalar("s_pack_lh_b32_b16 {d}, {a}, {b}", FEWER32, plain(lambda a, b: a & 0xFFFF | (b >> 16) << 16)),
    Scalar("s_pack_hh_b32_b16 {d}, {a}, {b}", FEWER32, plain(lambda a, b: a >> 16 | (b >> 16) << 16)),
]

MOVES = [
    Scalar("s_mov_b32 {d}, {a}", one(EDGES32), plain(lambda a: a)),
    Scalar("s_mov_b32 {d}, 0xdeadbeef", ((),), plain(lambda: 0xDEADBEEF)),
    Scalar("s_mov_b32 {d}, -16", ((),), plain(lambda: -16)),
    Scalar("s_mov_b32 {d}, 1.0", ((),), plain(lambda: 0x3F800000)),
    Scalar("s_mov_b64 {d}, {a}", one(EDGES64), plain(lambda a: a, 64), ALL),
    Scalar("s_mov_b64 {d}, -1", ((),), plain(lambda: -1, 64), ALL),
    Scalar("s_mov_b64 {d}, 5", ((),), plain(lambda: 5, 64), ALL),
    Scalar("s_cmov_b32 {d}, {a}", one(EDGES32), lambda a, c: (a if c else None, KEEP)),
    Scalar("s_cmov_b64 {d}, {a}", one(EDGES64), lambda a, c: (a if c else None, KEEP), ALL),
    Scalar("s_cselect_b32 {d}, {a}, {b}", FEWER32, lambda a, b, c: (a if c else b, KEEP)),
    Scalar("s_cselect_b64 {d}, {a}, {b}", PAIRS64, lambda a, b, c: (a if c else b, KEEP), ALL),
    Scalar("s_cselect_b64 {d}, -1, 0", ((),), lambda c: (M64 if c else 0, KEEP), ALL),
    Scalar("s_movk_i32 {d}, 0x8000", ((),), plain(lambda: -0x8000)),
    Scalar("s_movk_i32 {d}, 0x1234", ((),), plain(lambda: 0x1234)),
    Scalar("s_cmovk_i32 {d}, -2", ((),), lambda c: (M32 - 1 if c else None, KEEP)),
]


def _destination_as_source() -> list[Scalar]:
    """s_addk_i32 and s_mulk_i32 read what they write, so that the value before is the operand."""
    table = []
    add = overflow(lambda a, b: a + b)
    for old in EDGES32:
        table += [
            Scalar("s_addk_i32 {d}, 0x7fff", ((),), lambda c, old=old: add(old, 0x7FFF, c), old=old),
            Scalar("s_addk_i32 {d}, 0xffff", ((),), lambda c, old=old: add(old, M32, c), old=old),
            Scalar("s_mulk_i32 {d}, 0x8001", ((),), lambda c, old=old: (old * -0x7FFF & M32, KEEP), old=old),
        ]
    return table


COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _compares() -> list[Scalar]:
    table = []
    for name, holds in COMPARES.items():
        table += [
            Scalar(
                f"s_cmp_{name}_i32 {{a}}, {{b}}", FEWER32, lambda a, b, c, f=holds: (None, int(f(signed(a), signed(b))))
            ),
            Scalar(f"s_cmp_{name}_u32 {{a}}, {{b}}", FEWER32, lambda a, b, c, f=holds: (None, int(f(a, b)))),
            Scalar(
                f"s_cmpk_{name}_i32 {{a}}, 0xfffe",
                one((*EDGES32, M32 - 1)),
                lambda a, c, f=holds: (None, int(f(signed(a), -2))),
            ),
            Scalar(
                f"s_cmpk_{name}_u32 {{a}}, 0xfffe",
                one((*EDGES32, 0xFFFE)),
                lambda a, c, f=holds: (None, int(f(a, 0xFFFE))),
            ),
        ]
    for name in ("eq", "lg"):
        table.append(
            Scalar(
                f"s_cmp_{name}_u64 {{a}}, {{b}}",
                PAIRS64,
                lambda a, b, c, f=COMPARES[name]: (None, int(f(a, b))),
                (False, True, True),
            )
        )
    for bit in (0, 1):
        table += [
            Scalar(
                f"s_bitcmp{bit}_b32 {{a}}, {{b}}",
                SHIFTED32,
                lambda a, b, c, bit=bit: (None, int(a >> (b & 31) & 1 == bit)),
            ),
            Scalar(
                f"s_bitcmp{bit}_b64 {{a}}, {{b}}",
                SHIFTED64,
                lambda a, b, c, bit=bit: (None, int(a >> (b & 63) & 1 == bit)),
                (False, True, False),
            ),
        ]
    return table


TABLE = ARITHMETIC + BITS + MOVES + _destination_as_source() + _compares()
TABLE = [case for case in TABLE if implemented(case.line())]


@pytest.mark.daily(7)
@pytest.mark.parametrize("case", TABLE, ids=[f"{c.line()} #{i}" for i, c in enumerate(TABLE)])
def test_scalar(case: Scalar) -> None:
    for index, operands in enumerate(case.operands):
        for scc in case.sccs if index < 8 else (index % 2,):
            s = {0: case.old & M32, 1: case.old >> 32 & M32}
            for number, value in zip((2, 4), operands, strict=False):
                s[number], s[number + 1] = value & M32, value >> 32
            result = execute(case.line(), s=s, scc=scc)
            value, flag = case.oracle(*operands, scc)
            where = f"{case.line()} of {[hex(x) for x in operands]}, SCC {scc}"
            got = int(result.s[0]) | (int(result.s[1]) << 32 if case.wide[0] else 0)
            expected = case.old & (M64 if case.wide[0] else M32) if value is None else value
            assert got == expected, f"{where}: {got:#x}, expected {expected:#x}"
            assert int(result.scc) == (scc if flag is KEEP else flag), f"{where}: SCC {result.scc}"
            assert not result.findings


# -- EXEC, M0, VCC

SAVES: dict[str, Callable[[int, int], int]] = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}
SAVE_TEXTS = {register(f"s_{name}_saveexec_b64 s[20:21], s[22:23]"): function for name, function in SAVES.items()}
WRITE_TEXTS = {
    register("s_andn1_wrexec_b64 s[20:21], s[22:23]"): lambda s, e: ~s & e,
    register("s_andn2_wrexec_b64 s[20:21], s[22:23]"): lambda s, e: s & ~e,
}
EXECS = ((M64, 0xFF00FF00FF00FF00), (0xF0F0F0F00F0F0F0F, 0xFF00FF00FF00FF00), (0x5, 0xA), (0, 0), (1, M64))


@pytest.mark.parametrize("text", [*SAVE_TEXTS, *WRITE_TEXTS])
def test_saving_exec(text: str) -> None:
    """The old EXEC, or for _wrexec the new one, is the result; SCC says that a lane is still on."""
    for mask, source in EXECS:
        result = execute(text, s={20: 1, 21: 2, 22: source & M32, 23: source >> 32}, exec_mask=mask)
        after = (SAVE_TEXTS | WRITE_TEXTS)[text](source, mask) & M64
        expected = after if "wrexec" in text else mask
        assert int(result.exec) == after, (text, hex(mask), hex(source))
        assert int(result.s[20]) | int(result.s[21]) << 32 == expected
        assert int(result.scc) == int(after != 0)


SPECIAL = {
    register("s_mov_b64 exec, s[22:23]"): lambda r, v: int(r.exec) == v,
    register("s_or_b64 exec, exec, s[22:23]"): lambda r, v: int(r.exec) == v | 0xFF,
    register("s_andn2_b64 exec, exec, s[22:23]"): lambda r, v: int(r.exec) == 0xFF & ~v,
    register("s_mov_b32 exec_lo, s22"): lambda r, v: int(r.exec) == v & M32,
    register("s_mov_b64 vcc, s[22:23]"): lambda r, v: int(r.vcc) == v,
    register("s_and_b64 vcc, exec, s[22:23]"): lambda r, v: int(r.vcc) == v & 0xFF and int(r.scc) == int(v & 0xFF != 0),
    register("s_andn2_b64 vcc, exec, s[22:23]"): lambda r, v: int(r.vcc) == 0xFF & ~v,
    register("s_mov_b32 vcc_lo, s22"): lambda r, v: int(r.vcc) == v & M32 | 7 << 32,
    register("s_mov_b32 vcc_hi, s22"): lambda r, v: int(r.vcc) == (v & M32) << 32 | 7,
    register("s_mov_b32 m0, s22"): lambda r, v: int(r.m0) == v & M32,
    register("s_add_i32 m0, m0, s22"): lambda r, v: int(r.m0) == (v + 9) & M32,
    register("s_cselect_b64 vcc, -1, 0"): lambda r, v: int(r.vcc) == M64,
    register("s_mov_b64 s[20:21], exec"): lambda r, v: int(r.s[20]) == 0xFF and int(r.s[21]) == 0,
}


@pytest.mark.parametrize("text", SPECIAL)
def test_special_registers(text: str) -> None:
    for value in (0, 0xF0F0_0000_1234_5678, M64, 0xFF):
        result = execute(
            text, s={20: 1, 21: 1, 22: value & M32, 23: value >> 32}, exec_mask=0xFF, vcc=7 << 32 | 7, m0=9, scc=1
        )
        assert SPECIAL[text](result, value), (text, hex(value), hex(int(result.exec)), hex(int(result.vcc)))


INDEXED = {
    register("s_movrels_b32 s20, s10"): lambda r: int(r.s[20]) == 113,
    register("s_movreld_b32 s10, s20"): lambda r: int(r.s[13]) == 77,
}


@pytest.mark.parametrize("text", INDEXED)
def test_scalar_registers_indexed_by_m0(text: str) -> None:
    assert INDEXED[text](execute(text, s={**{10 + n: 110 + n for n in range(6)}, 20: 77}, m0=3))


SET_MODE = register("s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s22\ns_nop 0")
GET_MODE = register("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5\ns_getreg_b32 s20, hwreg(HW_REG_MODE, 0, 4)")


def test_mode_register_round_trip() -> None:
    assert int(execute(GET_MODE, s={20: 99}).s[20]) == 5


def test_mode_register_from_a_scalar_register() -> None:
    assert not execute(SET_MODE, s={22: 5}).findings
