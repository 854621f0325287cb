"""Run one instruction on many operand tuples, one tuple a lane, and compare with an oracle on bits.

A `Row` is data: the instruction's text, the types of what it reads and writes, and the oracle. Every row is registered
when its table is imported, so that `test_isa_coverage.py` can hold the tables against what the simulator implements,
    and
give every text to LLVM's assembler.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.unit.simulator import rational as q

LANES = 64
FULL = (1 << LANES) - 1
PARTIAL = 0x5A5A_00FF_8001_F0F3
M32 = 0xFFFF_FFFF
M64 = (1 << 64) - 1

#: arch -> every instruction text of the tables
TEXTS: dict[str, list[str]] = {"gfx942": [], "gfx950": []}


def register(text: str, arch: str = "gfx942") -> str:
    TEXTS[arch].append(text)
    return text


def base(text: str) -> str:
    """The mnemonic without the suffix that names its encoding."""
    return re.sub(r"_(e32|e64|dpp|sdwa)$", "", text.split()[0])


def signed(bits: int, width: int = 32) -> int:
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


# -- the values that every type is tried at

#: zeros, subnormals, the smallest normal number, near one, halves, ties for integers, large, the largest, inf, NaN.
F32_EDGES = (
    0x00000000,
    0x80000000,
    0x00000001,
    0x80000001,
    0x007FFFFF,
    0x807FFFFF,
    0x00800000,
    0x80800000,
    0x3F800000,
    0xBF800000,
    0x3F7FFFFF,
    0x3F800001,
    0x3F000000,
    0xBF000000,
    0x3FC00000,
    0x40200000,
    0xC0200000,
    0x40490FDB,
    0x4B000000,
    0x4B800001,
    0xCB7FFFFF,
    0x4F000000,
    0xCF000000,
    0x4F800000,
    0x4EFFFFFF,
    0x1E3CE508,
    0xE0AD78EC,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC12345,
    0x33000000,
    0x477FF000,
    0x387FE000,
)
F16_EDGES = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x03FF,
    0x83FF,
    0x0400,
    0x8400,
    0x3C00,
    0xBC00,
    0x3BFF,
    0x3C01,
    0x3800,
    0xB800,
    0x3E00,
    0x4100,
    0xC100,
    0x4248,
    0x6400,
    0x6801,
    0x77FF,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE12,
    0x1234,
)
F64_EDGES = (
    0,
    1 << 63,
    1,
    (1 << 63) | 1,
    0x000FFFFFFFFFFFFF,
    0x0010000000000000,
    0x3FF0000000000000,
    0xBFF0000000000000,
    0x3FF0000000000001,
    0x3FE0000000000000,
    0x3FF8000000000000,
    0x4004000000000000,
    0xC004000000000000,
    0x41DFFFFFFFC00000,
    0xC1E0000000000000,
    0xC1E0000000200000,
    0x41EFFFFFFFE00000,
    0x41F0000000000000,
    0x3690000000000000,
    0x47EFFFFFF0000000,
    0x4330000000000001,
    0x7FEFFFFFFFFFFFFF,
    0xFFEFFFFFFFFFFFFF,
    0x7FF0000000000000,
    0xFFF0000000000000,
    0x7FF8000000000000,
    0x3FF0000010000000,
    0x3FF0000030000000,
)
I32_EDGES = (
    0,
    1,
    2,
    3,
    5,
    31,
    32,
    33,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x1000000,
    0x12345678,
    0x55555555,
    0xAAAAAAAA,
    0x7FFFFFFE,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFF8000,
    0xFFFFFFFE,
    0xFFFFFFFF,
)
I64_EDGES = (
    0,
    1,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 32,
    0x0123456789ABCDEF,
    0x7FFFFFFFFFFFFFFF,
    1 << 63,
    0x8000000000000001,
    M64 - 1,
    M64,
    0xAAAAAAAA55555555,
    0xFFFFFFFF00000000,
)
PAIRS_F16 = tuple(a | b << 16 for a, b in zip(F16_EDGES, F16_EDGES[5:] + F16_EDGES[:5], strict=True))
PAIRS_I16 = (0, 0x00010001, 0x7FFF8000, 0x80007FFF, 0xFFFFFFFF, 0x0001FFFF, 0xFFFE0002, 0x12345678, 0x000F0010)

EDGES: dict[str, tuple[int, ...]] = {
    "f32": F32_EDGES,
    "f16": F16_EDGES,
    "f64": F64_EDGES,
    "b32": I32_EDGES,
    "b64": I64_EDGES,
    "pk16": PAIRS_I16,
    "pkf16": PAIRS_F16,
    "b16": (0, 1, 2, 15, 16, 17, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xABCD1234, 0xFFFF0000),
    "bf16": (0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x3F81, 0x4049, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0),
    "kept": (0xDEADBEEF, 0x00010002),
    "shift": (0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 0xFFFFFFFF),
}
FORMATS = {"f64": q.F64, "f32": q.F32, "f16": q.F16, "bf16": q.BF16}
WIDE = frozenset({"f64", "b64", "pkf32"})


@dataclass(frozen=True)
class Row:
    """One instruction, lane by lane.

    text: sources are v[2], v[4], v[6] (pairs where a type is 64 bits wide), the destination v[0]; `{d}`, `{a}`, `{b}`,
    `{c}` stand for them and take their own width. reads: the types of a, b, c; last,
        "old:type" for what the destination
    held before, where the instruction reads or keeps it.
    writes: the result's type. oracle: bits in, bits out. `vcc` (a mask) is given before; `mask_out` names what takes
    one bit a lane ("vcc" or an SGPR pair) and makes the oracle return (bits, bit) or, without a vector result, the bit.
    """

    text: str
    reads: tuple[str, ...]
    writes: str
    oracle: Callable[..., Any]
    arch: str = "gfx942"
    edges: tuple[tuple[int, ...] | None, ...] = ()
    vcc: int | None = None
    mask_out: str | None = None
    s: dict[int, int] = field(default_factory=dict)
    close: int = 0  # units in the last place allowed; 0: exactly
    alias: bool = True
    setup: str = ""
    limit: int = 512

    def __post_init__(self) -> None:
        register(self.line(), self.arch)

    @property
    def id(self) -> str:
        return re.sub(r"[{}]", "", self.text) + (f" vcc={self.vcc:#x}" if self.vcc else "")

    def line(self, destination: int = 0) -> str:
        names = {name: _name(number, kind) for name, number, kind in zip("abc", (2, 4, 6), self.reads, strict=False)}
        return self.text.format(d=_name(destination, self.writes), **names)

    def tuples(self) -> list[tuple[int, ...]]:
        sets = []
        for index, kind in enumerate(_kinds(self)):
            own = self.edges[index] if index < len(self.edges) else None
            sets.append(own or EDGES[{"pkf32": "f32"}.get(kind, kind)])
        # A pair of floats takes another edge in its upper half.
        sets = [
            tuple(x | (values[(i * 7 + 3) % len(values)] << 32) for i, x in enumerate(values))
            if kind == "pkf32"
            else values
            for kind, values in zip(_kinds(self), sets, strict=True)
        ]
        every = list(itertools.product(*sets))
        if len(every) > self.limit:
            every = random.Random(self.text).sample(every, self.limit)
        return every


def _kinds(row: Row) -> list[str]:
    return [kind.removeprefix("old:") for kind in row.reads]


def _name(number: int, kind: str) -> str:
    return f"v[{number}:{number + 1}]" if kind in WIDE else f"v{number}"


#: Forms of implemented instructions that the simulator does not have. Such a refusal is honest, and is listed here:
#: one that is not fails its test.
REFUSED = re.compile(
    r"clamp on [iu]32|modifiers (abid, cbsz|blgp): v_mfma|a hardware register set from a scalar register: s_setreg_b32"
    r"|an output scale, which the hardware ignores in IEEE mode"
)


@functools.lru_cache(maxsize=4096)
def implemented(text: str, arch: str = "gfx942") -> bool:
    """Whether the simulator has every instruction of a text. `test_isa_coverage.py`: it refuses the others by name."""
    from ferryman.backends.simulator import snippet
    from ferryman.backends.simulator.program import supported

    assert snippet.LANES == LANES  # the whole machine is loaded: without it the table is empty
    return all(base(line) in supported(arch) for line in instructions(text))


def execute(text: str, **arguments: Any) -> Any:
    """`snippet.execute`. A text that is not implemented, or a form that `REFUSED` lists, skips the test."""
    from ferryman.backends.simulator import snippet
    from ferryman.errors import UnimplementedInstruction

    if not implemented(text, arguments.get("arch", "gfx942")):
        pytest.skip(f"{text.splitlines()[0]} is not implemented")
    try:
        return snippet.execute(text, **arguments)
    except UnimplementedInstruction as error:
        if not REFUSED.search(str(error)):
            raise
        pytest.skip(str(error))


def instructions(text: str) -> list[str]:
    lines = (line.split("//")[0].split(";")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.endswith(":")]


def spread(values: Sequence[int], waves: int) -> np.ndarray:
    """Cycle values over [waves, 64] lanes."""
    cycled = itertools.islice(itertools.cycle(values), waves * LANES)
    return np.array(list(cycled), dtype=np.uint64)


def check(row: Row) -> None:
    """Full EXEC over every tuple; then one wave with lanes off, and one whose destination is its first source."""
    tuples = row.tuples()
    waves = min(-(-len(tuples) // LANES), 8)
    _run(row, tuples, waves, FULL, 0)
    _run(row, tuples[: 3 * LANES : 3] or tuples, 1, PARTIAL, 0)
    own = row.reads and (row.reads[0] in WIDE) == (row.writes in WIDE)
    if row.alias and row.writes and own and not any(kind.startswith("old:") for kind in row.reads):
        _run(row, tuples[: 5 * LANES : 5] or tuples, 1, FULL, 2)


def _run(row: Row, tuples: list[tuple[int, ...]], waves: int, mask: int, destination: int) -> None:
    count = waves * LANES
    used = list(itertools.islice(itertools.cycle(tuples), count))
    v: dict[int, np.ndarray] = {}
    old = [0xA5A50000_DEAD0000 | lane << 34 | lane for lane in range(count)]
    sources = []
    for index, kind in enumerate(row.reads):
        values = [t[index] for t in used]
        if kind.startswith("old:"):
            old = values
        else:
            sources.append((2 * (index + 1), kind, values))
    if destination == 0 and row.writes:
        _place(v, 0, old, row.writes in WIDE, waves)
    for number, kind, values in sources:
        _place(v, number, values, kind in WIDE, waves)
    initial = {number: array.copy() for number, array in v.items()}
    text = (row.setup + "\n" if row.setup else "") + row.line(destination)
    extra = {} if row.vcc is None else {"vcc": row.vcc}
    result = execute(text, arch=row.arch, waves=waves, v=v, s=dict(row.s), exec_mask=mask, **extra)
    assert not result.findings, result.findings
    bits_out = None
    if row.mask_out:
        assert waves >= 1
        bits_out = _mask(result, row.mask_out, waves)
    wide = row.writes in WIDE
    got = _collect(result, destination, wide, count) if row.writes else [0] * count
    before = [int(x) for x in _join(initial, destination, wide, count)] if row.writes else got
    for lane in range(count):
        active = mask >> (lane % LANES) & 1
        arguments = list(used[lane])
        where = f"{row.line(destination)} lane {lane} of " + ", ".join(f"{x:#x}" for x in used[lane])
        if not active:
            assert got[lane] == before[lane], f"{where}: a lane that is off was written"
            if bits_out is not None:
                assert bits_out[lane] == 0, f"{where}: a lane that is off gave a bit"
            continue
        if row.vcc is not None:
            arguments.append(row.vcc >> (lane % LANES) & 1)
        expected = row.oracle(*arguments)
        if row.mask_out:
            expected, bit = expected if row.writes else (0, expected)
            assert bits_out is not None and bits_out[lane] == int(bit), f"{where}: bit {bits_out[lane]}, expected {bit}"
        if row.writes:
            assert same(got[lane], expected, row.writes, row.close), (
                f"{where}: {got[lane]:#x}, expected {expected:#x} ({row.writes})"
            )


def _place(v: dict[int, np.ndarray], number: int, values: list[int], wide: bool, waves: int) -> None:
    shape = (waves, LANES) if waves > 1 else (LANES,)
    v[number] = np.array([x & M32 for x in values], dtype=np.uint32).reshape(shape)
    if wide:
        v[number + 1] = np.array([x >> 32 & M32 for x in values], dtype=np.uint32).reshape(shape)


def _join(v: Any, number: int, wide: bool, count: int) -> list[int]:
    low = [int(x) for x in np.asarray(v[number]).reshape(-1)[:count]]
    if not wide:
        return low
    return [a | int(b) << 32 for a, b in zip(low, np.asarray(v[number + 1]).reshape(-1)[:count], strict=True)]


def _collect(result: Any, number: int, wide: bool, count: int) -> list[int]:
    return _join(result.v, number, wide, count)


def _mask(result: Any, name: str, waves: int) -> list[int]:
    def of(value: Any) -> list[int]:
        return [int(x) for x in value] if isinstance(value, (list, tuple, np.ndarray)) else [int(value)]

    if name == "vcc":
        masks = of(result.vcc)
    elif name == "exec":
        masks = of(result.exec)
    else:
        number = int(name)
        masks = [a | b << 32 for a, b in zip(of(result.s[number]), of(result.s[number + 1]), strict=True)]
    assert len(masks) == waves, f"{len(masks)} masks of {waves} waves"
    return [mask >> lane & 1 for mask in masks for lane in range(LANES)]


def same(got: int, expected: int, kind: str, close: int = 0) -> bool:
    """Bit equality; NaN by class, part by part."""
    if kind in ("pkf16", "pkbf16", "pkf32"):
        part, width = kind.removeprefix("pk"), 32 if kind == "pkf32" else 16
        low = (1 << width) - 1
        return same(got & low, expected & low, part, close) and same(got >> width, expected >> width, part, close)
    if kind == "f16 kept":  # the upper half is as it was
        return got >> 16 == expected >> 16 and same(got & 0xFFFF, expected & 0xFFFF, "f16", close)
    if kind not in FORMATS:
        return got == expected
    form = FORMATS[kind]
    if got >> form.bits:
        return False  # bits above the result must be zero, and a NaN does not excuse them
    if form.is_nan(got) or form.is_nan(expected):
        return form.is_nan(got) and form.is_nan(expected)
    if got == expected:
        return True
    if not close or (got ^ expected) & form.sign_bit:
        return False
    return abs(got - expected) <= close and form.infinity not in (got & ~form.sign_bit, expected & ~form.sign_bit)


# -- oracles of floating point: decode, compute exactly, round once


def rounded(kind: str, function: Callable[..., q.Real], reads: Iterable[str] | None = None) -> Callable[..., int]:
    """An oracle on bits from a function on `Real`s. reads: the operands' formats, where they are not `kind`."""
    names = tuple(reads or ())

    def oracle(*bits: int) -> int:
        numbers = []
        for index, value in enumerate(bits):
            form = FORMATS[names[index] if names else kind]
            numbers.append(form.decode(value & ((1 << form.bits) - 1)))
        return FORMATS[kind].encode(function(*numbers))

    return oracle


def halves(function: Callable[..., int]) -> Callable[..., int]:
    """A packed 16-bit oracle from one on 16-bit values."""

    def oracle(*bits: int) -> int:
        low = function(*(b & 0xFFFF for b in bits))
        return low & 0xFFFF | (function(*(b >> 16 & 0xFFFF for b in bits)) & 0xFFFF) << 16

    return oracle


def f32_bits(value: int | float | Fraction) -> int:
    return q.F32.encode(q.real(value))


def rows(table: Sequence[Row]) -> Any:
    """The parametrisation of a table: those rows whose instruction is implemented."""
    kept = [row for row in table if implemented(row.line(), row.arch)]
    seen: dict[str, int] = {}
    ids = []
    for row in kept:
        seen[row.id] = seen.get(row.id, 0) + 1
        ids.append(row.id if seen[row.id] == 1 else f"{row.id} #{seen[row.id]}")
    return pytest.mark.parametrize("row", kept, ids=ids)
