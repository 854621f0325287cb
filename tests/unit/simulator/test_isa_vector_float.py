"""Vector floating point: correctly rounded arithmetic, exactly.

Sources: "CDNA3" Instruction Set Architecture (VOP1, VOP2, VOP3, VOP3P; input and output modifiers); for what 16-bit
results do to the upper half of a register, LLVM's GCNSubtarget::zeroesHigh16BitsOfDest and the manual's OP_SEL forms.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import (
    Row,
    check,
    f32_bits,
    halves,
    rounded,
    rows,
    signed,
)
from tests.unit.simulator.rational import F16, F32, NAN, Real

F, H, D = ("f32", "f32", "f32"), ("f16", "f16", "f16"), ("f64", "f64", "f64")
ONE = q.real(1)


def fmin(a: Real, b: Real) -> Real:
    """IEEE 754-2008 minNum: a number wins over a quiet NaN; -0 is below +0."""
    if a.nan or b.nan:
        return b if a.nan else a
    if a.zero and b.zero:
        return a if a.negative else b
    return a if q.less(a, b) else b


def fmax(a: Real, b: Real) -> Real:
    return -fmin(-a, -b)


def fmin3(a: Real, b: Real, c: Real) -> Real:
    return fmin(fmin(a, b), c)


def fmax3(a: Real, b: Real, c: Real) -> Real:
    return fmax(fmax(a, b), c)


def fmed3(a: Real, b: Real, c: Real) -> Real:
    if a.nan or b.nan or c.nan:
        return fmin3(a, b, c)
    top = fmax3(a, b, c)
    if q.equal(top, a):
        return fmax(b, c)
    return fmax(a, c) if q.equal(top, b) else fmax(a, b)


def mul_legacy(a: Real, b: Real) -> Real:
    return q.real(0) if a.zero or b.zero else q.mul(a, b)


def clamp(a: Real) -> Real:
    """To [0, 1]; NaN becomes 0, for DX10_CLAMP is set in every kernel here."""
    return q.real(0) if a.nan else fmin(fmax(a, q.real(0)), ONE)


def ldexp(kind: str) -> Callable[[int, int], int]:
    form, width = {"f32": (F32, 32), "f16": (F16, 16), "f64": (q.F64, 32)}[kind]

    def oracle(value: int, exponent: int) -> int:
        by = max(min(signed(exponent, width), 5000), -5000)
        return form.encode(q.scale(form.decode(value & ((1 << form.bits) - 1)), by))

    return oracle


def frexp(kind: str, part: str) -> Callable[[int], int]:
    form = {"f32": F32, "f16": F16, "f64": q.F64}[kind]

    def oracle(bits: int) -> int:
        number = form.decode(bits & ((1 << form.bits) - 1))
        plain = number.nan or number.infinite or number.zero
        exponent = 0 if plain else q.binary_exponent(number.magnitude) + 1
        if part == "exponent":
            return exponent & (0xFFFF if kind == "f16" else 0xFFFFFFFF)
        return form.encode(number if plain else q.scale(number, -exponent))

    return oracle


# -- add, multiply, fused multiply-add, minimum, maximum


def _arithmetic(kind: str) -> list[Row]:
    pair, triple = (kind,) * 2, (kind,) * 3
    e = "_e32" if kind != "f64" else ""
    arithmetic = [
        Row(f"v_add_{kind}{e} {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, q.add)),
        Row(f"v_mul_{kind}{e} {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, q.mul)),
        Row(f"v_min_{kind}{e} {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, fmin)),
        Row(f"v_max_{kind}{e} {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, fmax)),
    ]
    if kind != "f64":
        arithmetic += [
            Row(f"v_sub_{kind}_e32 {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, q.sub)),
            Row(f"v_subrev_{kind}_e32 {{d}}, {{a}}, {{b}}", pair, kind, rounded(kind, lambda a, b: q.sub(b, a))),
        ]
    for name in ("floor", "ceil", "trunc", "rndne"):
        arithmetic.append(Row(f"v_{name}_{kind}_e32 {{d}}, {{a}}", (kind,), kind, rounded(kind, getattr(q, name))))
    arithmetic.append(Row(f"v_frexp_mant_{kind}_e32 {{d}}, {{a}}", (kind,), kind, frexp(kind, "mantissa")))
    size = "i16" if kind == "f16" else "i32"
    arithmetic.append(Row(f"v_frexp_exp_{size}_{kind}_e32 {{d}}, {{a}}", (kind,), "b32", frexp(kind, "exponent")))
    by = (0, 1, 0xFFFFFFFF, 5, 0xFFFFFFE0, 24, 127, 0xFFFFFF6B, 0xFFFFFF81, 300, 0xFFFFFE00, 0x7FFFFFFF, 0x80000000)
    by = tuple(x & 0xFFFF for x in by) if kind == "f16" else by
    arithmetic.append(
        Row(
            f"v_ldexp_{kind}{'_e32' if kind == 'f16' else ''} {{d}}, {{a}}, {{b}}",
            (kind, "b32"),
            kind,
            ldexp(kind),
            edges=(None, by),
        )
    )
    three = "f16 kept" if kind == "f16" else kind
    if kind == "f16":  # the OP_SEL form writes one half and keeps the other
        keep = lambda f: lambda a, b, c, old: old & 0xFFFF0000 | rounded(kind, f)(a, b, c)  # noqa: E731
        arithmetic.append(Row("v_fma_f16 {d}, {a}, {b}, {c}", (*triple, "old:kept"), three, keep(q.fma)))
    else:
        arithmetic.append(Row(f"v_fma_{kind} {{d}}, {{a}}, {{b}}, {{c}}", triple, kind, rounded(kind, q.fma)))
    if kind == "f32":
        arithmetic += [
            Row("v_min3_f32 {d}, {a}, {b}, {c}", triple, kind, rounded(kind, fmin3)),
            Row("v_max3_f32 {d}, {a}, {b}, {c}", triple, kind, rounded(kind, fmax3)),
            Row("v_med3_f32 {d}, {a}, {b}, {c}", triple, kind, rounded(kind, fmed3)),
        ]
    return arithmetic


PLAIN = [*_arithmetic("f32"), *_arithmetic("f16"), *_arithmetic("f64")]
PLAIN += [
    Row("v_fmac_f32_e32 {d}, {a}, {b}", ("f32", "f32", "old:f32"), "f32", rounded("f32", q.fma)),
    Row(
        "v_fmac_f32_e64 {d}, -{a}, |{b}|",
        ("f32", "f32", "old:f32"),
        "f32",
        rounded("f32", lambda a, b, c: q.fma(-a, abs(b), c)),
    ),
    Row("v_fmac_f64_e32 {d}, {a}, {b}", ("f64", "f64", "old:f64"), "f64", rounded("f64", q.fma)),
    Row(
        "v_fmac_f32_e32 {d}, 0x3fb8aa3b, {b}",
        ("f32", "f32", "old:f32"),
        "f32",
        rounded("f32", lambda a, b, c: q.fma(F32.decode(0x3FB8AA3B), b, c)),
    ),
    Row(
        "v_fmamk_f32 {d}, {a}, 0x3fb8aa3b, {b}",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: q.fma(a, F32.decode(0x3FB8AA3B), b)),
    ),
    Row(
        "v_fmaak_f32 {d}, {a}, {b}, 0xbf317218",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: q.fma(a, b, F32.decode(0xBF317218))),
    ),
    Row("v_mul_legacy_f32 {d}, {a}, {b}", ("f32", "f32"), "f32", rounded("f32", mul_legacy)),
    # a signalling NaN is not passed over: IEEE mode is set
    Row(
        "v_min_f32_e32 {d}, {a}, {b}",
        ("f32", "f32"),
        "f32",
        lambda a, b: F32.nan,
        edges=((0x7F800001, 0xFFA00000), None),
    ),
    Row(
        "v_max_f32_e32 {d}, {a}, {b}",
        ("f32", "f32"),
        "f32",
        lambda a, b: F32.nan,
        edges=((0x7F800001, 0xFFA00000), None),
    ),
]

MODIFIERS = [
    Row("v_add_f32_e64 {d}, -{a}, {b}", ("f32", "f32"), "f32", rounded("f32", lambda a, b: q.add(-a, b))),
    Row("v_add_f32_e64 {d}, {a}, -{b}", ("f32", "f32"), "f32", rounded("f32", q.sub)),
    Row("v_sub_f32_e64 {d}, 1.0, |{b}|", ("f32", "f32"), "f32", rounded("f32", lambda a, b: q.sub(ONE, abs(b)))),
    Row(
        "v_mul_f32_e64 {d}, -|{a}|, s20",
        ("f32",),
        "f32",
        rounded("f32", lambda a: q.mul(-abs(a), F32.decode(0x3FB8AA3B))),
        s={20: 0x3FB8AA3B},
    ),
    Row(
        "v_mul_f32_e64 {d}, {a}, {b} clamp",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: clamp(q.mul(a, b))),
        edges=((0x3F000000, 0x40000000, 0x7FC00000, 0x7F800000), (0x3F800000, 0x3F000000, 0x00000001, 0x7F800000)),
    ),
    Row(
        "v_add_f32_e64 {d}, {a}, {b} clamp",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: clamp(q.add(a, b))),
        edges=((0xC0000000, 0x3F000000, 0x7FC00000), (0x3F800000, 0xFF800000, 0x3E800000)),
    ),
    Row("v_max_f32_e64 {d}, |{a}|, |{b}|", ("f32", "f32"), "f32", rounded("f32", lambda a, b: fmax(abs(a), abs(b)))),
    Row(
        "v_min_f32_e64 {d}, |{a}|, s20",
        ("f32",),
        "f32",
        rounded("f32", lambda a: fmin(abs(a), q.real(2))),
        s={20: 0x40000000},
    ),
    Row("v_fma_f32 {d}, -{a}, {b}, {c}", F, "f32", rounded("f32", lambda a, b, c: q.fma(-a, b, c))),
    Row("v_fma_f32 {d}, -{a}, {b}, 1.0", ("f32", "f32"), "f32", rounded("f32", lambda a, b: q.fma(-a, b, ONE))),
    Row(
        "v_fma_f32 {d}, s20, {a}, -{b}",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: q.fma(q.real(3), a, -b)),
        s={20: 0x40400000},
    ),
    Row("v_fma_f32 {d}, {a}, |{b}|, -|{c}|", F, "f32", rounded("f32", lambda a, b, c: q.fma(a, abs(b), -abs(c)))),
    Row(
        "v_add_f32_e32 {d}, 0.15915494, {b}",
        ("f32", "f32"),
        "f32",
        rounded("f32", lambda a, b: q.add(F32.decode(0x3E22F983), b)),
    ),
    Row("v_add_f32_e32 {d}, 0x41c80000, {b}", ("f32", "f32"), "f32", rounded("f32", lambda a, b: q.add(q.real(25), b))),
    # An integer constant in a float operand is its bits, a subnormal; a float one is the float of the operand's width.
    Row("v_add_f32_e32 {d}, 1, {b}", ("f32", "f32"), "f32", rounded("f32", lambda a, b: q.add(F32.decode(1), b))),
    Row("v_add_f16_e32 {d}, 4.0, {b}", ("f16", "f16"), "f16", rounded("f16", lambda a, b: q.add(q.real(4), b))),
    Row("v_mul_f64 {d}, {a}, -0.5", ("f64",), "f64", rounded("f64", lambda a: q.mul(a, q.real(Fraction(-1, 2))))),
    Row("v_max3_f32 {d}, |{a}|, -{b}, {c}", F, "f32", rounded("f32", lambda a, b, c: fmax3(abs(a), -b, c))),
]


def minimum(a: Real, b: Real) -> Real:
    """IEEE 754-2019 minimum: NaN wins."""
    return NAN if a.nan or b.nan else fmin(a, b)


def maximum(a: Real, b: Real) -> Real:
    return -minimum(-a, -b)


NEWER = [
    Row(
        "v_minimum3_f32 {d}, {a}, {b}, {c}",
        F,
        "f32",
        rounded("f32", lambda a, b, c: minimum(minimum(a, b), c)),
        arch="gfx950",
    ),
    Row(
        "v_maximum3_f32 {d}, {a}, {b}, {c}",
        F,
        "f32",
        rounded("f32", lambda a, b, c: maximum(maximum(a, b), c)),
        arch="gfx950",
    ),
    Row(
        "v_minimum3_f32 {d}, |{a}|, s20, s20",
        ("f32",),
        "f32",
        rounded("f32", lambda a: minimum(abs(a), q.real(3))),
        arch="gfx950",
        s={20: 0x40400000},
    ),
]


# -- packed and mixed


def _pk32(
    text: str,
    function: Callable[..., Real],
    count: int,
    low=(0, 0, 0),
    high=(1, 1, 1),
    neg_low=(0, 0, 0),
    neg_high=(0, 0, 0),
    constant: int | None = None,
    s: dict[int, int] | None = None,
) -> Row:
    """A packed f32 row: low and high say which half of each source makes the lower and the upper result."""

    def oracle(*bits: int) -> int:
        sources = list(bits) + ([] if constant is None else [constant])
        word = 0
        for shift, select, negate in ((0, low, neg_low), (32, high, neg_high)):
            numbers = []
            for i, value in enumerate(sources):
                number = F32.decode(value >> 32 * select[i] & 0xFFFFFFFF)
                numbers.append(-number if negate[i] else number)
            word |= F32.encode(function(*numbers)) << shift
        return word

    return Row(text, ("pkf32",) * count, "pkf32", oracle, s=s or {})


def _mix(
    text: str,
    low: tuple[int, ...],
    high: tuple[int, ...],
    into: str,
    change: Callable[..., tuple[Real, ...]] = lambda *x: x,
) -> Row:
    """v_fma_mix: op_sel_hi says that a source is f16, op_sel which half of it."""

    def oracle(a: int, b: int, c: int, old: int) -> int:
        numbers = []
        for value, second, half in zip((a, b, c), low, high, strict=True):
            numbers.append(F16.decode(value >> 16 * second & 0xFFFF) if half else F32.decode(value))
        result = q.fma(*change(*numbers))
        if into == "f32":
            return F32.encode(result)
        result = F32.decode(F32.encode(result))  # f32_to_f16(fma(..)): rounded to f32 and then to f16
        if into == "low":
            return old & 0xFFFF0000 | F16.encode(result)
        return F16.encode(result) << 16 | old & 0xFFFF

    # Bits that are good as f32 and as two f16.
    either = (
        0x3C003800,
        0x40003C00,
        0xC2003555,
        0x00003C00,
        0x7C000001,
        0x3555BC00,
        0xBF804000,
        0x33800400,
        0x477FE000,
    )
    writes = {"f32": "f32", "low": "f16 kept", "high": "pkf16"}[into]
    return Row(text, ("b32", "b32", "b32", "old:kept"), writes, oracle, edges=(either,) * 3)


PACKED = [
    _pk32("v_pk_mul_f32 {d}, {a}, {b}", q.mul, 2),
    _pk32("v_pk_add_f32 {d}, {a}, {b}", q.add, 2),
    _pk32("v_pk_fma_f32 {d}, {a}, {b}, {c}", q.fma, 3),
    _pk32("v_pk_mul_f32 {d}, {a}, {b} op_sel_hi:[1,0]", q.mul, 2, high=(1, 0, 1)),
    _pk32("v_pk_mul_f32 {d}, {a}, {b} op_sel_hi:[0,1]", q.mul, 2, high=(0, 1, 1)),
    _pk32("v_pk_mul_f32 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]", q.mul, 2, low=(1, 0, 0), high=(0, 1, 1)),
    _pk32("v_pk_mul_f32 {d}, {a}, {b} op_sel:[0,1]", q.mul, 2, low=(0, 1, 0)),
    _pk32(
        "v_pk_mul_f32 {d}, {a}, s[20:21]",
        lambda a, b: q.mul(a, b),
        1,
        constant=0xBF800000_40400000,
        s={20: 0x40400000, 21: 0xBF800000},
    ),
    _pk32(
        "v_pk_mul_f32 {d}, {a}, s[20:21] op_sel_hi:[1,0]",
        lambda a, b: q.mul(a, b),
        1,
        high=(1, 0),
        constant=0xBF800000_40400000,
        s={20: 0x40400000, 21: 0xBF800000},
    ),
    _pk32("v_pk_add_f32 {d}, {a}, {b} neg_lo:[0,1] neg_hi:[0,1]", q.add, 2, neg_low=(0, 1, 0), neg_high=(0, 1, 0)),
    _pk32(
        "v_pk_add_f32 {d}, {a}, {b} op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[1,0]",
        q.add,
        2,
        high=(1, 0, 1),
        neg_low=(0, 1, 0),
        neg_high=(1, 0, 0),
    ),
    _pk32("v_pk_add_f32 {d}, {a}, 1.0 op_sel_hi:[1,0]", lambda a, b: q.add(a, b), 1, high=(1, 0), constant=0x3F800000),
    _pk32(
        "v_pk_fma_f32 {d}, {a}, {b}, {c} op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[1,0,0]",
        q.fma,
        3,
        high=(1, 0, 1),
        neg_low=(1, 0, 0),
        neg_high=(1, 0, 0),
    ),
    _pk32(
        "v_pk_fma_f32 {d}, {a}, {b}, {c} op_sel:[0,0,1] op_sel_hi:[1,1,0] neg_lo:[0,0,1] neg_hi:[0,0,1]",
        q.fma,
        3,
        low=(0, 0, 1),
        high=(1, 1, 0),
        neg_low=(0, 0, 1),
        neg_high=(0, 0, 1),
    ),
    Row("v_pk_add_f16 {d}, {a}, {b}", ("pkf16", "pkf16"), "pkf16", halves(rounded("f16", q.add))),
    Row("v_pk_mul_f16 {d}, {a}, {b}", ("pkf16", "pkf16"), "pkf16", halves(rounded("f16", q.mul))),
    Row("v_pk_min_f16 {d}, {a}, {b}", ("pkf16", "pkf16"), "pkf16", halves(rounded("f16", fmin))),
    Row("v_pk_max_f16 {d}, {a}, {b}", ("pkf16", "pkf16"), "pkf16", halves(rounded("f16", fmax))),
    Row("v_pk_fma_f16 {d}, {a}, {b}, {c}", ("pkf16",) * 3, "pkf16", halves(rounded("f16", q.fma))),
    Row(
        "v_pk_add_f16 {d}, {a}, {b} neg_lo:[0,1] neg_hi:[0,1]",
        ("pkf16", "pkf16"),
        "pkf16",
        halves(rounded("f16", q.sub)),
    ),
    Row(
        "v_pk_mul_f16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]",
        ("pkf16", "pkf16"),
        "pkf16",
        lambda a, b: rounded("f16", q.mul)(a >> 16, b & 0xFFFF) | rounded("f16", q.mul)(a & 0xFFFF, b >> 16) << 16,
    ),
    Row(
        "v_pk_add_f16 {d}, {a}, 2.0 op_sel_hi:[1,0]",
        ("pkf16",),
        "pkf16",
        halves(rounded("f16", lambda a: q.add(a, q.real(2)))),
    ),
    _mix("v_fma_mix_f32 {d}, {a}, {b}, {c}", (0, 0, 0), (0, 0, 0), "f32"),
    _mix("v_fma_mix_f32 {d}, {a}, {b}, {c} op_sel_hi:[1,1,0]", (0, 0, 0), (1, 1, 0), "f32"),
    _mix("v_fma_mix_f32 {d}, {a}, {b}, {c} op_sel:[1,1,0] op_sel_hi:[1,1,0]", (1, 1, 0), (1, 1, 0), "f32"),
    _mix(
        "v_fma_mix_f32 {d}, -{a}, |{b}|, {c} op_sel_hi:[1,1,1]",
        (0, 0, 0),
        (1, 1, 1),
        "f32",
        lambda a, b, c: (-a, abs(b), c),
    ),
    _mix(
        "v_fma_mix_f32 {d}, -|{a}|, {b}, {c} op_sel:[1,0,0] op_sel_hi:[1,0,0]",
        (1, 0, 0),
        (1, 0, 0),
        "f32",
        lambda a, b, c: (-abs(a), b, c),
    ),
    _mix("v_fma_mixlo_f16 {d}, {a}, {b}, {c}", (0, 0, 0), (0, 0, 0), "low"),
    _mix("v_fma_mixlo_f16 {d}, {a}, {b}, {c} op_sel_hi:[0,1,1]", (0, 0, 0), (0, 1, 1), "low"),
    _mix("v_fma_mixhi_f16 {d}, {a}, {b}, {c}", (0, 0, 0), (0, 0, 0), "high"),
    _mix("v_fma_mixhi_f16 {d}, {a}, {b}, {c} op_sel:[0,1,1] op_sel_hi:[0,1,1]", (0, 1, 1), (0, 1, 1), "high"),
]

# Sums of two products: the order of rounding is not documented, so the operands are small integers, which are exact.
SMALL_PAIRS = tuple(
    F16.encode(q.real(a)) | F16.encode(q.real(b)) << 16 for a, b in ((1, 2), (-3, 5), (0, 7), (100, -100), (33, 31))
)
SMALL_BF = tuple(
    q.BF16.encode(q.real(a)) | q.BF16.encode(q.real(b)) << 16 for a, b in ((1, 2), (-3, 5), (0, 7), (100, -100))
)
SMALL = tuple(f32_bits(x) for x in (0, 1, -7, 4096))


def _dot2(form: q.Format) -> Callable[[int, int, int], int]:
    def oracle(a: int, b: int, c: int) -> int:
        total = F32.decode(c).value
        for at in (0, 16):
            total += form.decode(a >> at & 0xFFFF).value * form.decode(b >> at & 0xFFFF).value
        return f32_bits(total)

    return oracle


DOTS = [
    Row(
        "v_dot2_f32_f16 {d}, {a}, {b}, {c}",
        ("b32", "b32", "f32"),
        "f32",
        _dot2(F16),
        edges=(SMALL_PAIRS, SMALL_PAIRS, SMALL),
    ),
    Row(
        "v_dot2c_f32_f16_e32 {d}, {a}, {b}",
        ("b32", "b32", "old:f32"),
        "f32",
        _dot2(F16),
        edges=(SMALL_PAIRS, SMALL_PAIRS, SMALL),
    ),
    Row(
        "v_dot2_f32_bf16 {d}, {a}, {b}, {c}",
        ("b32", "b32", "f32"),
        "f32",
        _dot2(q.BF16),
        arch="gfx950",
        edges=(SMALL_BF, SMALL_BF, SMALL),
    ),
    Row(
        "v_dot2c_f32_bf16_e32 {d}, {a}, {b}",
        ("b32", "b32", "old:f32"),
        "f32",
        _dot2(q.BF16),
        arch="gfx950",
        edges=(SMALL_BF, SMALL_BF, SMALL),
    ),
]


@pytest.mark.daily(7)
@rows(PLAIN + MODIFIERS + NEWER + PACKED + DOTS)
def test_vector_float(row: Row) -> None:
    check(row)
