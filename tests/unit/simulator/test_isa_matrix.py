"""Matrix instructions: which lane and register holds which element, exactly, and what rounding is documented.

Sources: AMD's matrix instruction calculator and "CDNA3" Instruction Set Architecture, 7 (layouts); operands are small
integers, so that every order of accumulation gives the same exact sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import LANES, M32, execute, register, signed

FNUZ, OCP = {"fp8": q.FP8_FNUZ, "bf8": q.BF8_FNUZ}, {"fp8": q.FP8_OCP, "bf8": q.BF8_OCP}


@dataclass(frozen=True)
class Shape:
    """One MFMA: m x n x k, `blocks` of them; kinds of A and B; each lane holds `per_lane` consecutive k of a row."""

    name: str
    m: int
    k: int
    a: str
    b: str
    per_lane: int
    blocks: int = 1
    arch: str = "gfx942"
    tail: str = ""

    @property
    def out(self) -> str:
        return "i32" if "i32" in self.name.split("_")[2] else "f32" if "f64" not in self.name else "f64"

    @property
    def results(self) -> int:
        return self.m * self.m * self.blocks // LANES

    @property
    def words(self) -> int:
        """32-bit registers of an operand."""
        return max(1, self.per_lane * BITS[self.a] // 32)

    def element_of_operand(self, lane: int, index: int) -> tuple[int, int, int]:
        """(block, row of A or column of B, k) of a lane's element."""
        row = lane % self.m
        group = lane // self.m
        if self.blocks > 1:
            return group % self.blocks, row, index + self.per_lane * (group // self.blocks)
        return 0, row, group * self.per_lane + index

    def element_of_result(self, lane: int, register_number: int) -> tuple[int, int, int]:
        """(block, row, column) of a lane's result."""
        column = lane % self.m
        if self.m == 32:
            block, r = divmod(register_number, 16)
            return block, 8 * (r // 4) + 4 * (lane // 32) + r % 4, column
        if self.m == 16:
            block, r = divmod(register_number, 4)
            return block, (4 * r + lane // 16 if self.out == "f64" else 4 * (lane // 16) + r), column
        if self.out == "f64":
            return lane // 4 % 4, lane // 16, column
        return lane // 4, register_number, column


BITS = {"f32": 32, "xf32": 32, "f64": 64, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8}

SHAPES = [
    Shape("v_mfma_f32_32x32x2_f32", 32, 2, "f32", "f32", 1),
    Shape("v_mfma_f32_16x16x4_f32", 16, 4, "f32", "f32", 1),
    Shape("v_mfma_f32_32x32x1_2b_f32", 32, 1, "f32", "f32", 1, 2),
    Shape("v_mfma_f32_16x16x1_4b_f32", 16, 1, "f32", "f32", 1, 4),
    Shape("v_mfma_f32_4x4x1_16b_f32", 4, 1, "f32", "f32", 1, 16),
    Shape("v_mfma_f32_32x32x4_xf32", 32, 4, "xf32", "xf32", 2),
    Shape("v_mfma_f32_16x16x8_xf32", 16, 8, "xf32", "xf32", 2),
    Shape("v_mfma_f32_32x32x8_f16", 32, 8, "f16", "f16", 4),
    Shape("v_mfma_f32_16x16x16_f16", 16, 16, "f16", "f16", 4),
    Shape("v_mfma_f32_32x32x4_2b_f16", 32, 4, "f16", "f16", 4, 2),
    Shape("v_mfma_f32_16x16x4_4b_f16", 16, 4, "f16", "f16", 4, 4),
    Shape("v_mfma_f32_4x4x4_16b_f16", 4, 4, "f16", "f16", 4, 16),
    Shape("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16", "bf16", 4),
    Shape("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", "bf16", 4),
    Shape("v_mfma_f32_32x32x4_2b_bf16", 32, 4, "bf16", "bf16", 4, 2),
    Shape("v_mfma_f32_16x16x4_4b_bf16", 16, 4, "bf16", "bf16", 4, 4),
    Shape("v_mfma_f32_4x4x4_16b_bf16", 4, 4, "bf16", "bf16", 4, 16),
    Shape("v_mfma_i32_32x32x16_i8", 32, 16, "i8", "i8", 8),
    Shape("v_mfma_i32_16x16x32_i8", 16, 32, "i8", "i8", 8),
    Shape("v_mfma_i32_32x32x4_2b_i8", 32, 4, "i8", "i8", 4, 2),
    Shape("v_mfma_i32_16x16x4_4b_i8", 16, 4, "i8", "i8", 4, 4),
    Shape("v_mfma_i32_4x4x4_16b_i8", 4, 4, "i8", "i8", 4, 16),
    *(
        Shape(f"v_mfma_f32_{m}x{m}x{k}_{a}_{b}", m, k, a, b, 8)
        for m, k in ((32, 16), (16, 32))
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    ),
    Shape("v_mfma_f64_16x16x4_f64", 16, 4, "f64", "f64", 1),
    Shape("v_mfma_f64_4x4x4_4b_f64", 4, 4, "f64", "f64", 1, 4),
]
SHAPES_950 = [
    Shape("v_mfma_f32_32x32x16_f16", 32, 16, "f16", "f16", 8, arch="gfx950"),
    Shape("v_mfma_f32_16x16x32_f16", 16, 32, "f16", "f16", 8, arch="gfx950"),
    Shape("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16", "bf16", 8, arch="gfx950"),
    Shape("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16", "bf16", 8, arch="gfx950"),
    Shape("v_mfma_i32_32x32x32_i8", 32, 32, "i8", "i8", 16, arch="gfx950"),
    Shape("v_mfma_i32_16x16x64_i8", 16, 64, "i8", "i8", 16, arch="gfx950"),
    Shape("v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8", "fp8", 32, arch="gfx950"),
    Shape("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8", "bf8", 32, arch="gfx950", tail=" blgp:1"),
    Shape("v_mfma_f32_32x32x64_f8f6f4", 32, 64, "bf8", "fp8", 32, arch="gfx950", tail=" cbsz:1"),
    Shape("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "bf8", "bf8", 32, arch="gfx950", tail=" cbsz:1 blgp:1"),
    # the shapes of gfx942 stay
    Shape("v_mfma_f32_32x32x8_f16", 32, 8, "f16", "f16", 4, arch="gfx950"),
    Shape("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", "bf16", 4, arch="gfx950"),
    Shape("v_mfma_f32_32x32x2_f32", 32, 2, "f32", "f32", 1, arch="gfx950"),
    Shape("v_mfma_f32_16x16x4_f32", 16, 4, "f32", "f32", 1, arch="gfx950"),
    Shape("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8", "fp8", 8, arch="gfx950"),
    Shape("v_mfma_f32_16x16x32_bf8_fp8", 16, 32, "bf8", "fp8", 8, arch="gfx950"),
]
EVERY = SHAPES + SHAPES_950
DONE = "\ns_nop 15\ns_nop 15"


def _span(bank: str, first: int, count: int) -> str:
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def _text(shape: Shape, out: str = "a", operand: tuple[str, str] = ("v", "v"), c: str | None = None) -> str:
    results = shape.results * (2 if shape.out == "f64" else 1)
    a, b = _span(operand[0], 64, shape.words), _span(operand[1], 80, shape.words)
    d = _span(out, 0, results)
    return f"{shape.name} {d}, {a}, {b}, {d if c is None else c}{shape.tail}" + DONE


#: shape -> its instruction with accumulators in either bank, a constant one, and an operand from the other bank
FORMS = {
    "accumulators": {s: register(_text(s), s.arch) for s in EVERY},
    "vectors": {s: register(_text(s, "v"), s.arch) for s in EVERY},
    "zero": {s: register(_text(s, "a", c="0"), s.arch) for s in EVERY},
    "sources in accumulators": {s: register(_text(s, "a", ("a", "v")), s.arch) for s in EVERY},
}


def _format(kind: str, arch: str) -> q.Format | None:
    if kind in ("fp8", "bf8"):
        return (FNUZ if arch == "gfx942" else OCP)[kind]
    return {"f32": q.F32, "xf32": q.F32, "f64": q.F64, "f16": q.F16, "bf16": q.BF16}.get(kind)


def _operand(shape: Shape, kind: str, numbers: np.ndarray) -> list[np.ndarray]:
    """The registers that hold numbers[block, row, k]."""
    form, bits = _format(kind, shape.arch), BITS[kind]
    registers = np.zeros((shape.words, LANES), dtype=np.uint64)
    for lane in range(LANES):
        packed = 0
        for index in range(shape.per_lane):
            value = int(numbers[shape.element_of_operand(lane, index)])
            code = value & 0xFF if form is None else form.encode(q.real(value))
            packed |= code << bits * index
        for word in range(shape.words):
            registers[word, lane] = packed >> 32 * word & M32
    return [r.astype(np.uint32) for r in registers]


def _accumulators(shape: Shape, numbers: np.ndarray) -> list[np.ndarray]:
    words = 2 if shape.out == "f64" else 1
    registers = np.zeros((shape.results * words, LANES), dtype=np.uint32)
    for lane in range(LANES):
        for r in range(shape.results):
            value = int(numbers[shape.element_of_result(lane, r)])
            code = value & M32 if shape.out == "i32" else (q.F64 if words == 2 else q.F32).encode(q.real(value))
            for word in range(words):
                registers[r * words + word, lane] = code >> 32 * word & M32
    return list(registers)


def _operands(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small integers that every format holds, different enough that a wrong row, column or k shows."""
    rng = np.random.default_rng(seed)
    low, high = (-128, 128) if shape.a == "i8" else (-2, 5) if {"fp8", "bf8"} & {shape.a, shape.b} else (-8, 9)
    a = rng.integers(low, high, (shape.blocks, shape.m, shape.k))
    b = rng.integers(low, high, (shape.blocks, shape.m, shape.k))
    return a, b, rng.integers(-1000, 1000, (shape.blocks, shape.m, shape.m))


@dataclass(frozen=True)
class _Multiplication:
    """Registers of A, B and C, and of the result with C and without it."""

    a: list[np.ndarray]
    b: list[np.ndarray]
    c: list[np.ndarray]
    added: list[np.ndarray]
    alone: list[np.ndarray]


@functools.cache
def _multiplication(shape: Shape) -> _Multiplication:
    a, b, c = _operands(shape, 17)
    product = np.einsum("bik,bjk->bij", a, b)
    return _Multiplication(
        _operand(shape, shape.a, a),
        _operand(shape, shape.b, b),
        _accumulators(shape, c),
        _accumulators(shape, product + c),
        _accumulators(shape, product),
    )


def _check_layout(shape: Shape, form: str, **options: Any) -> None:
    known = _multiplication(shape)
    bank = "v" if form == "vectors" else "a"
    v: dict[int, np.ndarray] = {}
    accumulators: dict[int, np.ndarray] = {}
    (accumulators if bank == "a" else v).update(enumerate(known.c))
    first = accumulators if form == "sources in accumulators" else v
    first.update({64 + i: r for i, r in enumerate(known.a)})
    v.update({80 + i: r for i, r in enumerate(known.b)})
    # Matrix instructions take no notice of EXEC.
    some = 0xFFFF_0000_1234_5678
    result = execute(FORMS[form][shape], arch=shape.arch, v=v, a=accumulators, exec_mask=some, **options)
    assert not result.findings, result.findings
    for number, values in enumerate(known.alone if form == "zero" else known.added):
        got = np.asarray(getattr(result, bank)[number])
        wrong = np.flatnonzero(got != values)
        assert not len(wrong), (
            f"{shape.name} register {number}, lane {wrong[0]}: {got[wrong[0]]:#x}, expected {values[wrong[0]]:#x}"
        )


@pytest.mark.daily(7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", EVERY, ids=[f"{s.arch} {s.name}{s.tail}" for s in EVERY])
def test_layouts(shape: Shape, form: str) -> None:
    _check_layout(shape, form)


VARIANTS = [
    {"mfma_order": order, "mfma_subnormals": subnormals, "xf32": xf32}
    for order in ("exact", "sequential", "pairs")
    for subnormals in ("kept", "flushed")
    for xf32 in ("truncate", "nearest")
]


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_exact_sums_hold_under_every_assumption(variant: dict[str, str]) -> None:
    """What the assumptions leave open is rounding: sums of small integers have none."""
    from ferryman.backends.simulator.numerics import Assumptions

    for name in (
        "v_mfma_f32_32x32x2_f32",
        "v_mfma_f32_16x16x8_xf32",
        "v_mfma_f32_32x32x8_bf16",
        "v_mfma_f32_4x4x4_16b_f16",
        "v_mfma_f32_16x16x32_fp8_bf8",
        "v_mfma_i32_16x16x32_i8",
        "v_mfma_f32_16x16x32_f16",
    ):
        _check_layout(_named(name), "accumulators", assumptions=Assumptions(**variant))  # type: ignore[arg-type]


OVERLAPPING = register("v_mfma_f32_32x32x8_f16 v[0:15], v[64:65], v[80:81], v[16:31]" + DONE)


def test_another_accumulator_than_the_result() -> None:
    shape = next(s for s in SHAPES if s.name == "v_mfma_f32_32x32x8_f16")
    a, b, c = _operands(shape, 5)
    v = {16 + i: r for i, r in enumerate(_accumulators(shape, c))}
    v |= {64 + i: r for i, r in enumerate(_operand(shape, "f16", a))} | {
        80 + i: r for i, r in enumerate(_operand(shape, "f16", b))
    }
    result = execute(OVERLAPPING, v=v)
    expected = _accumulators(shape, np.einsum("bik,bjk->bij", a, b) + c)
    assert all((result.v[n] == x).all() for n, x in enumerate(expected))


# -- one product into one accumulator: what each format's arithmetic is documented to be


def _single(shape: Shape, a: int, b: int, c: int, text: str) -> int:
    """The bits of D[0][0] for one product of the operands' own bits."""
    v = {64 + i: np.zeros(LANES, np.uint32) for i in range(shape.words)} | {
        80 + i: np.zeros(LANES, np.uint32) for i in range(shape.words)
    }
    v[64][0], v[80][0] = a, b
    accumulators = {n: np.zeros(LANES, np.uint32) for n in range(shape.results)}
    accumulators[0][0] = c
    return int(execute(text, arch=shape.arch, v=v, a=accumulators).a[0][0])


def _named(name: str) -> Shape:
    return next(s for s in EVERY if s.name == name)


SINGLE_F32 = (
    (0x3F800001, 0x3F800001, 0x00000000),
    (0x3F800001, 0x3F800001, 0xBF800000),
    (0x7F7FFFFF, 0x40000000, 0x00000000),
    (0x7F800000, 0x00000000, 0x00000000),
    (0x7F800000, 0x3F800000, 0xFF800000),
    (0x7FC00000, 0x3F800000, 0x3F800000),
    (0x3EAAAAAB, 0x40400000, 0xBF800000),
    (0x7F800000, 0xBF800000, 0x3F800000),
)


@pytest.mark.parametrize("name", ["v_mfma_f32_32x32x2_f32", "v_mfma_f32_16x16x4_f32"])
def test_one_f32_product(name: str) -> None:
    """A single product with an accumulator is a fused multiply-add, whatever the order of further ones."""
    shape = _named(name)
    for a, b, c in SINGLE_F32:
        got = _single(shape, a, b, c, FORMS["accumulators"][shape])
        expected = q.F32.encode(q.fma(*(q.F32.decode(x) for x in (a, b, c))))
        assert got == expected or (q.F32.is_nan(got) and q.F32.is_nan(expected)), (
            hex(a),
            hex(b),
            hex(c),
            hex(got),
            hex(expected),
        )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("v_mfma_f32_32x32x8_f16", q.F16),
        ("v_mfma_f32_16x16x16_f16", q.F16),
        ("v_mfma_f32_32x32x8_bf16", q.BF16),
        ("v_mfma_f32_16x16x16_bf16", q.BF16),
    ],
)
def test_subnormal_16_bit_operands_count(name: str, form: q.Format) -> None:
    """CDNA2 flushes them; CDNA3 does not (PyTorch, numerical accuracy notes: "applies only to MI200")."""
    shape = _named(name)
    for a in (1, 1 << (form.mantissa_bits - 1), (1 << form.mantissa_bits) - 1):
        one = form.encode(q.real(1024))
        got = _single(shape, a, one, 0, FORMS["accumulators"][shape])
        exact = q.mul(form.decode(a), q.real(1024))
        assert got == q.F32.encode(exact), (name, hex(a), hex(got))


def test_infinities_and_nan_of_16_bit_operands() -> None:
    for name, form in (("v_mfma_f32_32x32x8_f16", q.F16), ("v_mfma_f32_16x16x16_bf16", q.BF16)):
        shape = _named(name)
        text = FORMS["accumulators"][shape]
        one = form.encode(q.real(1))
        assert _single(shape, form.infinity, one, 0, text) == 0x7F800000
        assert _single(shape, form.infinity | form.sign_bit, one, 0, text) == 0xFF800000
        assert q.F32.is_nan(_single(shape, form.nan, one, 0, text))
        assert q.F32.is_nan(_single(shape, form.infinity, 0, 0, text))


def test_integer_products_wrap_at_32_bits() -> None:
    shape = _named("v_mfma_i32_32x32x16_i8")
    got = _single(shape, 0x7F, 0x7F, 0x7FFFFFFF, FORMS["accumulators"][shape])
    assert got == (0x7FFFFFFF + 127 * 127) & M32
    assert signed(_single(shape, 0x80, 0x80, 0, FORMS["accumulators"][shape])) == 128 * 128
    assert signed(_single(shape, 0x80, 0x7F, 0, FORMS["accumulators"][shape])) == -128 * 127


def test_xf32_keeps_ten_bits_of_mantissa() -> None:
    """xf32 has the exponent of f32 and ten bits of mantissa: numbers that fit pass, others land on a neighbour."""
    shape = _named("v_mfma_f32_32x32x4_xf32")
    text = FORMS["accumulators"][shape]
    for bits in (0x3F802000, 0x3FFFE000, 0x7E002000, 0xC2F6E000, 0x00802000):
        assert _single(shape, bits, 0x3F800000, 0, text) == bits, hex(bits)
    for bits in (0x3F801FFF, 0x3F803001, 0x42F6E979):
        got = _single(shape, bits, 0x3F800000, 0, text)
        assert got in (bits & ~0x1FFF, (bits & ~0x1FFF) + 0x2000), (hex(bits), hex(got))


BROADCASTS = {
    register("v_mfma_f32_32x32x1_2b_f32 a[0:31], v64, v80, a[0:31] cbsz:1 abid:1" + DONE): (
        "v_mfma_f32_32x32x1_2b_f32",
        (1, 1),
        None,
    ),
    register("v_mfma_f32_4x4x1_16b_f32 a[0:3], v64, v80, a[0:3] cbsz:2 abid:3" + DONE): (
        "v_mfma_f32_4x4x1_16b_f32",
        (2, 3),
        None,
    ),
    register("v_mfma_f32_32x32x1_2b_f32 a[0:31], v64, v80, a[0:31] blgp:1" + DONE): (
        "v_mfma_f32_32x32x1_2b_f32",
        None,
        1,
    ),
}


@pytest.mark.parametrize("text", BROADCASTS)
def test_broadcast_of_blocks(text: str) -> None:
    """cbsz, abid: in groups of 2**cbsz blocks, block abid's A serves all. blgp 1: B's first 32 lanes serve all."""
    name, broadcast, pattern = BROADCASTS[text]
    shape = _named(name)
    a, b, c = _operands(shape, 3)
    used_a, used_b = a.copy(), b.copy()
    if broadcast:
        size = 1 << broadcast[0]
        for block in range(shape.blocks):
            used_a[block] = a[block // size * size + broadcast[1]]
    if pattern == 1:
        used_b[1] = b[0]
    v = {64: _operand(shape, "f32", a)[0], 80: _operand(shape, "f32", b)[0]}
    result = execute(text, v=v, a=dict(enumerate(_accumulators(shape, c))))
    expected = _accumulators(shape, np.einsum("bik,bjk->bij", used_a, used_b) + c)
    assert all((result.a[n] == x).all() for n, x in enumerate(expected)), text
