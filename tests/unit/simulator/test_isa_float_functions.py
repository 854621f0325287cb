"""Division, transcendental functions and what the MODE register does to float32.

Division exactly; v_rcp, v_rsq, v_sqrt, v_exp, v_log within one unit in the last place, as the "CDNA3" Instruction Set
Architecture states them, and their special values exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from ferryman.errors import UnimplementedInstruction
from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import (
    F32_EDGES,
    FULL,
    PARTIAL,
    Row,
    check,
    execute,
    f32_bits,
    register,
    rounded,
    rows,
    same,
    spread,
)
from tests.unit.simulator.rational import F16, F32, NAN, Real

F = ("f32", "f32", "f32")
ONE = q.real(1)


# -- division: v_div_scale, v_rcp, v_fma, v_div_fmas, v_div_fixup give the correctly rounded quotient

DIVISION = register("""
v_div_scale_f32 v10, s[10:11], v3, v3, v2
v_div_scale_f32 v11, vcc, v2, v3, v2
v_rcp_f32_e32 v12, v10
v_fma_f32 v13, -v10, v12, 1.0
v_fmac_f32_e32 v12, v13, v12
v_mul_f32_e32 v13, v11, v12
v_fma_f32 v14, -v10, v13, v11
v_fmac_f32_e32 v13, v14, v12
v_fma_f32 v10, -v10, v13, v11
v_div_fmas_f32 v10, v10, v12, v13
v_div_fixup_f32 v0, v10, v3, v2
""")

#: pairs whose quotient is subnormal, a tie between two, at the edge of overflow, or whose reciprocal is subnormal
HARD_QUOTIENTS = (
    (0x00800000, 0x40000000),
    (0x00800001, 0x40000000),
    (0x00000003, 0x40000000),
    (0x00000001, 0x3F000000),
    (0x7F7FFFFF, 0x3F7FFFFF),
    (0x7F7FFFFF, 0x3F800001),
    (0x7F7FFFFF, 0x00800000),
    (0x00000001, 0x7F7FFFFF),
    (0x3F800000, 0x7F7FFFFF),
    (0x3F800000, 0x7F000000),
    (0x3F800000, 0x00000001),
    (0x3F800000, 0x007FFFFF),
    (0x00FFFFFF, 0x3F7FFFFF),
    (0x40400000, 0x7F000003),
    (0x7E967699, 0x7F000001),
    (0x00012345, 0x00000007),
    (0x40000000, 0x40400000),
    (0x3F800000, 0x40400000),
    (0xC1200000, 0x40400000),
    (0x01000000, 0x7E000000),
    (0x1F800001, 0x5F7FFFFF),
    (0x5F800000, 0x1F800001),
    (0x7F000000, 0x3F000000),
    (0x7F7FFFFF, 0x7F7FFFFF),
    (0x00000001, 0x00000001),
    (0x80000001, 0x00000002),
    (0x0C000000, 0x4C000003),
    (0x0BFFFFFF, 0x4C800001),
)


@pytest.mark.parametrize("estimates", ["nearest", "above", "below"])
def test_division_is_correctly_rounded(estimates: str) -> None:
    """With v_rcp correctly rounded, exactly; with v_rcp one unit off, a quotient next to a tie may be too."""
    from ferryman.backends.simulator.numerics import Assumptions

    assumptions = Assumptions(estimates=estimates)  # type: ignore[arg-type]
    pairs = list(HARD_QUOTIENTS)
    pairs += [(a, b) for a in F32_EDGES for b in F32_EDGES]
    rng = np.random.default_rng(7)
    pairs += [(int(a), int(b)) for a, b in rng.integers(0, 1 << 32, (600, 2))]
    # quotients around the smallest normal number: exponents that differ by 120 to 155
    for down in range(120, 156):
        a, b = (int(x) for x in rng.integers(0, 1 << 23, 2))
        pairs.append(((160 - down) << 23 | a, 160 << 23 | b))
    for start in range(0, len(pairs), 512):
        part = pairs[start : start + 512]
        part += [(0x3F800000, 0x3F800000)] * (-len(part) % 64)
        waves = len(part) // 64
        shape = (waves, 64) if waves > 1 else (64,)
        v = {2 + i: np.array([p[i] for p in part], dtype=np.uint32).reshape(shape) for i in (0, 1)}
        result = execute(DIVISION, waves=waves, v=v, assumptions=assumptions)
        assert not result.findings
        for (a, b), got in zip(part, np.asarray(result.v[0]).reshape(-1), strict=True):
            expected = F32.encode(q.div(F32.decode(a), F32.decode(b)))
            assert same(int(got), expected, "f32", int(estimates != "nearest")), (
                f"{a:#010x} / {b:#010x}: {int(got):#010x}, expected {expected:#010x}"
            )


def _fixup(quotient: Real, below: Real, above: Real) -> Real | None:
    """The manual's table, without its two rows for quotients out of range, which the division test covers."""
    negative = below.negative != above.negative
    if above.nan or below.nan or (below.zero and above.zero) or (below.infinite and above.infinite):
        return NAN
    if below.zero or above.infinite:
        return q.infinity(negative)
    if below.infinite or above.zero:
        return Real(negative, Fraction(0))
    return Real(negative, quotient.magnitude) if not quotient.nan else NAN


ORDINARY = (0x3F800000, 0xBFC00000, 0x40490FDB, 0x42F6E979, 0xC2F6E979)
SPECIAL = (0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000)
#: v_div_scale leaves ordinary operands alone and clears the flag; v_div_fmas without the flag is a fused multiply-add.
SINGLE = [
    Row(
        "v_div_fixup_f32 {d}, {a}, {b}, {c}",
        F,
        "f32",
        rounded("f32", _fixup),
        edges=(ORDINARY, ORDINARY + SPECIAL, ORDINARY + SPECIAL),
    ),
    Row(
        "v_div_scale_f32 {d}, vcc, {a}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (a, 0),
        edges=(ORDINARY, ORDINARY),
        mask_out="vcc",
    ),
    Row(
        "v_div_scale_f32 {d}, s[30:31], {b}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (b, 0),
        edges=(ORDINARY, ORDINARY),
        mask_out="30",
    ),
    # numerator / denominator above 2**96: the denominator is scaled by 2**64, the numerator is not, and the flag is set
    Row(
        "v_div_scale_f32 {d}, vcc, {b}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (F32.encode(q.scale(F32.decode(b), 64)), 1),
        edges=((0x7E800000, 0x7F000001), (0x0D800000, 0x0A123456)),
        mask_out="vcc",
    ),
    Row(
        "v_div_scale_f32 {d}, vcc, {a}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (a, 1),
        edges=((0x7E800000, 0x7F000001), (0x0D800000, 0x0A123456)),
        mask_out="vcc",
    ),
    # a subnormal denominator: both are scaled, and the flag stays clear
    Row(
        "v_div_scale_f32 {d}, vcc, {b}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (F32.encode(q.scale(F32.decode(b), 64)), 0),
        edges=((0x01000000, 0x02000001), (0x00000001, 0x00712345)),
        mask_out="vcc",
    ),
    Row(
        "v_div_scale_f32 {d}, vcc, {a}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (F32.encode(q.scale(F32.decode(a), 64)), 0),
        edges=((0x01000000, 0x02000001), (0x00000001, 0x00712345)),
        mask_out="vcc",
    ),
    # a tiny numerator: exponent at most 23, so that a remainder would be subnormal
    Row(
        "v_div_scale_f32 {d}, vcc, {a}, {b}, {a}",
        ("f32", "f32"),
        "f32",
        lambda a, b: (F32.encode(q.scale(F32.decode(a), 64)), 0),
        edges=((0x01000000, 0x0B800000), (0x0C800000, 0x05123456)),
        mask_out="vcc",
    ),
    Row("v_div_fmas_f32 {d}, {a}, {b}, {c}", F, "f32", lambda a, b, c, k: rounded("f32", q.fma)(a, b, c), vcc=0),
]


@rows(SINGLE)
def test_division_steps(row: Row) -> None:
    check(row)


# -- transcendental functions


def _within(kind: str, function: Callable[[Real], Real]) -> Callable[[int], int]:
    return rounded(kind, function)


def _mp(name: str) -> Callable[[Real], Real]:
    """exp2, log2, sin and cos of a turn, by mpmath (a dependency of PyTorch's sympy), at 120 bits."""
    import mpmath

    def function(a: Real) -> Real:
        with mpmath.workprec(160):
            x = mpmath.mpf(a.value.numerator) / a.value.denominator
            y = {"exp2": lambda: mpmath.power(2, x), "log2": lambda: mpmath.log(x, 2)}[name]()
            sign, mantissa, exponent, _ = y._mpf_
            value = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
        return q.real(-value if sign else value)

    return function


def exp2(a: Real) -> Real:
    if a.nan or a.infinite:
        return q.real(0) if a.infinite and a.negative else a
    if abs(a.value) > 2000:  # beyond every format: a number that rounds to the same infinity or zero
        return q.real(Fraction(2) ** (-2000 if a.negative else 2000))
    return _mp("exp2")(a)


def log2(a: Real) -> Real:
    if a.zero:
        return q.infinity(negative=True)
    if a.nan or a.negative:
        return NAN
    return a if a.infinite else _mp("log2")(a)


def reciprocal(a: Real) -> Real:
    return q.div(ONE, a)


def rsqrt(a: Real) -> Real:
    if a.zero:
        return q.infinity(a.negative)
    if a.nan or a.negative:
        return NAN
    return q.real(0) if a.infinite else q.sqrt(q.div(ONE, a))


# Normal arguments whose results are normal: what these instructions do with subnormal numbers is an assumption.
NORMAL = (
    0x3F800000,
    0xBF800000,
    0x40000000,
    0x3F000000,
    0x40400000,
    0x3EAAAAAB,
    0x40490FDB,
    0x3F7FFFFF,
    0x3F800001,
    0x42F6E979,
    0x3DFCD6EA,
    0x501502F9,
    0x2F2BCC77,
    0x7E000000,
    0x01800000,
    0xC0A00000,
    0xBE4CCCCD,
    0x4B189680,
)
EXPONENTS = (
    0x3F800000,
    0xBF800000,
    0x3F000000,
    0xBF000000,
    0x42FC0000,
    0xC2F80000,
    0x40490FDB,
    0xC0490FDB,
    0x3DCCCCCD,
    0x33800000,
    0xB3800000,
    0x42FE0000,
    0x41200000,
    0xC1A55555,
    0x42FFFFFF,
)
SPECIALS = (0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000)
EXACT = {
    "v_rcp_f32": reciprocal,
    "v_rcp_iflag_f32": reciprocal,
    "v_rsq_f32": rsqrt,
    "v_sqrt_f32": q.sqrt,
    "v_exp_f32": exp2,
    "v_log_f32": log2,
}
HALF_NORMAL = (0x3C00, 0xBC00, 0x4000, 0x3800, 0x4200, 0x3555, 0x4248, 0x3BFF, 0x3C01, 0x5640, 0x2E66, 0x7000, 0x0C00)
HALF_SPECIALS = (0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00)
EXACT_F16 = {"v_rcp_f16": reciprocal, "v_rsq_f16": rsqrt, "v_sqrt_f16": q.sqrt, "v_exp_f16": exp2, "v_log_f16": log2}

APPROXIMATE = [
    Row(
        f"{name}_e32 {{d}}, {{a}}",
        ("f32",),
        "f32",
        rounded("f32", function),
        close=1,
        edges=(EXPONENTS if "exp" in name else NORMAL,),
    )
    for name, function in EXACT.items()
]
APPROXIMATE += [
    Row(
        f"{name}_e32 {{d}}, {{a}}",
        ("f16",),
        "f16",
        rounded("f16", function),
        close=1,
        edges=(tuple(x for x in HALF_NORMAL if "exp" not in name or x not in (0x5640, 0x7000)),),
    )
    for name, function in EXACT_F16.items()
]
APPROXIMATE_SPECIAL = [
    Row(f"{name}_e32 {{d}}, {{a}}", ("f32",), "f32", rounded("f32", function), edges=(SPECIALS,))
    for name, function in EXACT.items()
]
APPROXIMATE_SPECIAL += [
    Row(f"{name}_e32 {{d}}, {{a}}", ("f16",), "f16", rounded("f16", function), edges=(HALF_SPECIALS,))
    for name, function in EXACT_F16.items()
]
APPROXIMATE_SPECIAL += [
    # powers of two are exact
    Row(
        "v_exp_f32_e32 {d}, {a}",
        ("f32",),
        "f32",
        rounded("f32", exp2),
        edges=(tuple(f32_bits(x) for x in range(-126, 129, 3)),),
    ),
    Row(
        "v_log_f32_e32 {d}, {a}",
        ("f32",),
        "f32",
        rounded("f32", log2),
        edges=(tuple(f32_bits(Fraction(2) ** x) for x in range(-126, 128, 3)),),
    ),
    Row(
        "v_rcp_f32_e32 {d}, {a}",
        ("f32",),
        "f32",
        rounded("f32", reciprocal),
        edges=(tuple(f32_bits(Fraction(2) ** x) for x in range(-125, 127, 3)),),
    ),
    Row(
        "v_exp_f32_e32 {d}, {a}",
        ("f32",),
        "f32",
        rounded("f32", exp2),
        edges=((f32_bits(128), f32_bits(1000), f32_bits(-1000), 0x7F7FFFFF, 0xFF7FFFFF),),
    ),
]


@rows(APPROXIMATE)
def test_within_one_unit(row: Row) -> None:
    check(row)


@rows(APPROXIMATE_SPECIAL)
def test_special_values_exactly(row: Row) -> None:
    check(row)


TURNS = (
    0x00000000,
    0x3E800000,
    0x3F000000,
    0x3F400000,
    0x3F800000,
    0xBE800000,
    0x3DCCCCCD,
    0x3E2AAAAB,
    0x40200000,
    0xC0300000,
)


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_sine_of_turns(name: str, kind: str) -> None:
    """The argument is in turns; the error is absolute, for it is small where the function vanishes."""
    import mpmath

    form = F32 if kind == "f32" else F16
    arguments = TURNS if kind == "f32" else (0, 0x3400, 0x3800, 0x3A00, 0x3C00, 0xB400, 0x2E66)
    text = SINES[name, kind]
    v = {1: np.array([arguments[i % len(arguments)] for i in range(64)], dtype=np.uint32)}
    result = execute(text, v=v, exec_mask=FULL)
    for lane in range(64):
        x = form.decode(arguments[lane % len(arguments)]).value
        with mpmath.workprec(120):
            exact = getattr(mpmath, name)(2 * mpmath.pi * mpmath.mpf(x.numerator) / x.denominator)
        got = form.decode(int(result.v[0][lane])).value
        assert abs(float(got) - float(exact)) <= 2.0 ** (-20 if kind == "f32" else -10), (name, float(x))


SINES = {(n, k): register(f"v_{n}_{k}_e32 v0, v1") for n in ("sin", "cos") for k in ("f32", "f16")}

FRACT = Row(
    "v_fract_f32_e32 {d}, {a}",
    ("f32",),
    "f32",
    rounded("f32", lambda a: q.sub(a, q.floor(a)) if not a.zero else q.real(0)),
    edges=(
        (0, 0x3F800000, 0x3FC00000, 0xBFC00000, 0xBF800000, 0x40490FDB, 0xC0490FDB, 0x4B000000, 0x00000001, 0x7FC00000),
    ),
)


def test_fraction() -> None:
    check(FRACT)


# -- the mode register's bits


def flushed(function: Callable[..., Real]) -> Callable[..., int]:
    """Subnormal sources and results of f32 become zero of their sign."""

    def squash(bits: int) -> int:
        return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits

    def oracle(*bits: int) -> int:
        return F32.encode(function(*(F32.decode(squash(b)) for b in bits)), flush=True)

    return oracle


FLUSHED = {
    register("v_add_f32_e32 v0, v2, v4"): (q.add, 2),
    register("v_mul_f32_e32 v0, v2, v4"): (q.mul, 2),
    register("v_fma_f32 v0, v2, v4, v6"): (q.fma, 3),
}


@pytest.mark.parametrize("text", FLUSHED)
def test_subnormals_flushed_when_the_mode_says_so(text: str) -> None:
    function, count = FLUSHED[text]
    tuples = Row(text, ("f32",) * count, "", lambda: 0).tuples()[:512]
    tuples += [(0, 0, 0)[:count]] * (-len(tuples) % 64)
    waves = len(tuples) // 64
    v = {2 * (i + 1): np.array([t[i] for t in tuples], dtype=np.uint32).reshape(waves, 64) for i in range(count)}
    result = execute(text, waves=waves, v=v, denormals=False)
    for t, got in zip(tuples, np.asarray(result.v[0]).reshape(-1), strict=True):
        expected = flushed(function)(*t)
        # Whether a result that rounds up to the smallest normal number counts as subnormal is not documented.
        if (
            expected & 0x7FFFFFFF == 0x00800000
            or F32.encode(function(*(F32.decode(b) for b in t))) & 0x7FFFFFFF == 0x00800000
        ):
            continue
        assert same(int(got), expected, "f32"), (text, [hex(b) for b in t], hex(int(got)), hex(expected))


ROUNDING = {0: "nearest", 1: "up", 2: "down", 3: "zero"}
SUM_AND_PRODUCT = "v_add_f32_e32 v0, v2, v4\nv_mul_f32_e32 v1, v2, v4"
MODES = {
    mode: register(f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), {mode}\n" + SUM_AND_PRODUCT) for mode in ROUNDING
}


@pytest.mark.parametrize("mode", MODES)
def test_rounding_modes_of_f32(mode: int) -> None:
    a = [0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800001, 0x80800001, 0x3EAAAAAB]
    b = [0x33000000, 0xB3000000, 0x33800001, 0x3F800000, 0x73800000, 0x3F7FFFFF, 0x3EAAAAAB, 0xBF800001]
    pairs = [(x, y) for x in a for y in b]
    v = {2: np.array([x for x, _ in pairs], dtype=np.uint32), 4: np.array([y for _, y in pairs], dtype=np.uint32)}
    result = execute(MODES[mode], v=v)
    for lane, (x, y) in enumerate(pairs):
        numbers = F32.decode(x), F32.decode(y)
        for register_number, number in ((0, q.add(*numbers, ROUNDING[mode])), (1, q.mul(*numbers))):
            expected = F32.encode(number, ROUNDING[mode])
            got = int(result.v[register_number][lane])
            assert got == expected, (ROUNDING[mode], register_number, hex(x), hex(y), hex(got), hex(expected))


HALVES = [(a, b) for a in (0x3C00, 0xBC00, 0x3C01, 0x7BFF, 0x0401) for b in (0x1000, 0x9000, 0x13FF, 0x7000, 0xBC00)]
SINGLES = [0x3F801000, 0xBF801000, 0x3F801001, 0x477FF000, 0x33000001, 0xB3000001, 0x387FE001]
DOUBLES = [(a, b) for a in (0x3FF0000000000001, 0xBFF0000000000001) for b in (0x3CA0000000000000, 0xBCA0000000000001)]
SET_NARROW = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), {}\n"
TO_HALF = {mode: register(SET_NARROW.format(mode) + "v_cvt_f16_f32_e32 v0, v2") for mode in ROUNDING}
ADD_HALF = {mode: register(SET_NARROW.format(mode) + "v_add_f16_e32 v0, v2, v4") for mode in ROUNDING}
ADD_DOUBLE = {mode: register(SET_NARROW.format(mode) + "v_add_f64 v[0:1], v[2:3], v[4:5]") for mode in ROUNDING}


@pytest.mark.parametrize("mode", ROUNDING)
def test_rounding_modes_of_the_conversion_to_f16(mode: int) -> None:
    """Bits 2 and 3 of MODE are those of f16 and f64."""
    result = execute(TO_HALF[mode], v={2: spread(SINGLES, 1).astype(np.uint32)})
    for bits, got in zip(SINGLES, result.v[0], strict=False):
        assert int(got) == F16.encode(F32.decode(bits), ROUNDING[mode]), (ROUNDING[mode], hex(bits), hex(int(got)))


@pytest.mark.parametrize("mode", ROUNDING)
def test_rounding_modes_of_f16_and_f64_sums(mode: int) -> None:
    """To nearest they are exact; the other modes are refused, not guessed."""
    name = ROUNDING[mode]
    if mode:
        for text in (ADD_HALF[mode], ADD_DOUBLE[mode]):
            with pytest.raises(UnimplementedInstruction, match="a rounding mode of f(16|64) other than to nearest"):
                execute(text, v={n: np.zeros(64, np.uint32) for n in (2, 3, 4, 5)})
        return
    a, b = (spread([pair[i] for pair in HALVES], 1) for i in (0, 1))
    result = execute(ADD_HALF[mode], v={2: a.astype(np.uint32), 4: b.astype(np.uint32)})
    for (x, y), got in zip(HALVES, result.v[0], strict=False):
        assert int(got) == F16.encode(q.add(F16.decode(x), F16.decode(y), name), name), (name, hex(x), hex(y))
    a, b = (spread([pair[i] for pair in DOUBLES], 1) for i in (0, 1))
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    v = {2: a & low, 3: a >> high, 4: b & low, 5: b >> high}
    result = execute(ADD_DOUBLE[mode], v={n: x.astype(np.uint32) for n, x in v.items()})
    for lane, (x, y) in enumerate(DOUBLES):
        got = int(result.v[0][lane]) | int(result.v[1][lane]) << 32
        assert got == q.F64.encode(q.add(q.F64.decode(x), q.F64.decode(y), name), name), (name, hex(x), hex(y))


OMOD = {register(f"v_add_f32_e64 v0, v2, v4 {text}") for text in ("mul:2", "mul:4", "div:2")}


@pytest.mark.parametrize("text", sorted(OMOD))
def test_output_modifier_is_ignored_in_ieee_mode(text: str) -> None:
    """LLVM, SIFoldOperands: omod is ignored by hardware if the IEEE bit is enabled; it is in every kernel here."""
    v = {2: np.full(64, f32_bits(3), np.uint32), 4: np.full(64, f32_bits(4), np.uint32)}
    result = execute(text, v=v, exec_mask=PARTIAL | 1)
    assert int(result.v[0][0]) == f32_bits(7)
