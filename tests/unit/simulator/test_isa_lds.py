"""LDS: every width of read and write, the two-address forms, 16-bit halves, atomics in lane order, transposed reads."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.simulator import rational as q
from tests.unit.simulator.harness import FULL, LANES, M32, M64, PARTIAL, execute, implemented, register, same, signed

WAIT = "\ns_waitcnt lgkmcnt(0)"
SIZE = 16384


def lds_content() -> np.ndarray:
    return np.random.default_rng(11).integers(0, 256, SIZE, dtype=np.uint8)


OLD = [np.arange(LANES, dtype=np.uint32) * (k + 3) + 1000 * k for k in range(4)]


def _words(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def _piece(data: bytes, width: int, at: int = 0) -> list[int]:
    return _words(data[at : at + width])


# name -> (stride of the lanes' addresses, [(unit, offset of each part)], bytes of each part)
READS = {
    "ds_read_b32 v0, v8": (4, [0], 4),
    "ds_read_b32 v0, v8 offset:20": (4, [20], 4),
    "ds_read_b64 v[0:1], v8": (8, [0], 8),
    "ds_read_b64 v[0:1], v8 offset:64": (8, [64], 8),
    "ds_read_b96 v[0:2], v8 offset:16": (16, [16], 12),
    "ds_read_b128 v[0:3], v8": (16, [0], 16),
    "ds_read_b128 v[0:3], v8 offset:4096": (16, [4096], 16),
    "ds_read2_b32 v[0:1], v8 offset1:1": (4, [0, 4], 4),
    "ds_read2_b32 v[0:1], v8 offset0:7 offset1:255": (4, [28, 1020], 4),
    "ds_read2_b64 v[0:3], v8 offset1:1": (8, [0, 8], 8),
    "ds_read2_b64 v[0:3], v8 offset0:3 offset1:200": (8, [24, 1600], 8),
    "ds_read2st64_b32 v[0:1], v8 offset1:1": (4, [0, 256], 4),
    "ds_read2st64_b32 v[0:1], v8 offset0:2 offset1:9": (4, [512, 2304], 4),
    "ds_read2st64_b64 v[0:3], v8 offset1:1": (8, [0, 512], 8),
    "ds_read2st64_b64 v[0:3], v8 offset0:5 offset1:2": (8, [2560, 1024], 8),
}
READ_TEXTS = {register(text + WAIT): what for text, what in READS.items()}


@pytest.mark.parametrize("text", READ_TEXTS)
@pytest.mark.parametrize("mask", [FULL, PARTIAL])
def test_reads(text: str, mask: int) -> None:
    stride, offsets, width = READ_TEXTS[text]
    lds = lds_content()
    address = (np.arange(LANES, dtype=np.uint32) * 37 % 64) * np.uint32(stride) + np.uint32(128)
    result = execute(text, v={8: address, **dict(enumerate(OLD))}, lds=lds, exec_mask=mask)
    assert not result.findings
    for lane in range(LANES):
        parts = [w for offset in offsets for w in _piece(lds.tobytes(), width, int(address[lane]) + offset)]
        expected = parts if mask >> lane & 1 else [int(OLD[k][lane]) for k in range(len(parts))]
        got = [int(result.v[k][lane]) for k in range(len(parts))]
        assert got == expected, (text, lane)


WRITES = {
    "ds_write_b32 v8, v0": (4, [0], 4),
    "ds_write_b32 v8, v0 offset:20": (4, [20], 4),
    "ds_write_b64 v8, v[0:1] offset:64": (8, [64], 8),
    "ds_write_b96 v8, v[0:2]": (16, [0], 12),
    "ds_write_b128 v8, v[0:3]": (16, [0], 16),
    "ds_write_b128 v8, v[0:3] offset:8192": (16, [8192], 16),
    "ds_write2_b32 v8, v0, v1 offset1:128": (4, [0, 512], 4),
    "ds_write2_b32 v8, v0, v1 offset0:100 offset1:200": (4, [400, 800], 4),
    "ds_write2_b64 v8, v[0:1], v[2:3] offset1:64": (8, [0, 512], 8),
    "ds_write2_b64 v8, v[0:1], v[2:3] offset0:64 offset1:255": (8, [512, 2040], 8),
    "ds_write2st64_b32 v8, v0, v1 offset1:1": (4, [0, 256], 4),
    "ds_write2st64_b32 v8, v0, v1 offset0:3 offset1:4": (4, [768, 1024], 4),
    "ds_write2st64_b64 v8, v[0:1], v[2:3] offset1:1": (8, [0, 512], 8),
    "ds_write2st64_b64 v8, v[0:1], v[2:3] offset0:2 offset1:6": (8, [1024, 3072], 8),
}
WRITE_TEXTS = {register(text): what for text, what in WRITES.items()}


@pytest.mark.parametrize("text", WRITE_TEXTS)
@pytest.mark.parametrize("mask", [FULL, PARTIAL])
def test_writes(text: str, mask: int) -> None:
    stride, offsets, width = WRITE_TEXTS[text]
    lds = lds_content()
    address = (np.arange(LANES, dtype=np.uint32) * 37 % 64) * np.uint32(stride)
    result = execute(text, v={8: address, **dict(enumerate(OLD))}, lds=lds.copy(), exec_mask=mask)
    assert not result.findings
    expected = lds.copy()
    for part, offset in enumerate(offsets):
        for lane in range(LANES):
            if mask >> lane & 1:
                data = b"".join(int(OLD[part * width // 4 + k][lane]).to_bytes(4, "little") for k in range(width // 4))
                at = int(address[lane]) + offset
                expected[at : at + width] = np.frombuffer(data, np.uint8)
    assert (result.lds == expected).all(), text


def _narrow(name: str) -> Callable[[int, int], int]:
    """(memory, destination before) -> destination after."""
    width = 8 if "8" in name.split("_")[2] else 16
    with_sign = name.split("_")[2].startswith("i")

    def value(memory: int) -> int:
        part = memory & ((1 << width) - 1)
        return signed(part, width) if with_sign else part

    if name.endswith("_d16"):
        return lambda memory, old: old & 0xFFFF0000 | value(memory) & 0xFFFF
    if name.endswith("_d16_hi"):
        return lambda memory, old: old & 0xFFFF | (value(memory) & 0xFFFF) << 16
    return lambda memory, old: value(memory) & M32


NARROW = {
    register(f"{name} v0, v8 offset:2" + WAIT): _narrow(name)
    for name in (
        "ds_read_u8",
        "ds_read_i8",
        "ds_read_u16",
        "ds_read_i16",
        "ds_read_u8_d16",
        "ds_read_u8_d16_hi",
        "ds_read_i8_d16",
        "ds_read_i8_d16_hi",
        "ds_read_u16_d16",
        "ds_read_u16_d16_hi",
    )
}


@pytest.mark.parametrize("text", NARROW)
def test_narrow_reads(text: str) -> None:
    lds = lds_content()
    address = np.arange(LANES, dtype=np.uint32) * 2
    result = execute(text, v={0: OLD[1], 8: address}, lds=lds, exec_mask=PARTIAL)
    for lane in range(LANES):
        old = int(OLD[1][lane])
        memory = int.from_bytes(lds[int(address[lane]) + 2 : int(address[lane]) + 4].tobytes(), "little")
        expected = NARROW[text](memory, old) if PARTIAL >> lane & 1 else old
        assert int(result.v[0][lane]) == expected, (text, lane)


NARROW_WRITES = {
    register("ds_write_b8 v8, v0 offset:1"): (0, 1),
    register("ds_write_b16 v8, v0 offset:6"): (0, 2),
    register("ds_write_b8_d16_hi v8, v0 offset:1"): (16, 1),
    register("ds_write_b16_d16_hi v8, v0 offset:6"): (16, 2),
}


@pytest.mark.parametrize("text", NARROW_WRITES)
def test_narrow_writes(text: str) -> None:
    shift, width = NARROW_WRITES[text]
    offset = int(text.rsplit(":", 1)[1])
    lds, data = lds_content(), np.arange(LANES, dtype=np.uint32) * np.uint32(0x01030507)
    address = np.arange(LANES, dtype=np.uint32) * 4
    result = execute(text, v={0: data, 8: address}, lds=lds.copy(), exec_mask=PARTIAL)
    expected = lds.copy()
    for lane in range(LANES):
        if PARTIAL >> lane & 1:
            for k in range(width):
                expected[int(address[lane]) + offset + k] = int(data[lane]) >> shift + 8 * k & 0xFF
    assert (result.lds == expected).all()


ACCUMULATOR_ACCESS = register(
    "ds_read_b128 a[0:3], v8 offset:16\ns_waitcnt lgkmcnt(0)\nds_write_b128 v9, a[0:3]" + WAIT
)


def test_accumulation_registers_load_and_store() -> None:
    lds = lds_content()
    result = execute(
        ACCUMULATOR_ACCESS,
        v={8: np.arange(LANES, dtype=np.uint32) * 16, 9: np.arange(LANES, dtype=np.uint32) * 16 + 4096},
        lds=lds.copy(),
    )
    assert not result.findings
    assert (result.lds[4096 : 4096 + 1024] == lds[16 : 16 + 1024]).all()


# -- atomics: (memory, data, data2) -> memory after; the lanes of a wave act one after another


def _unsigned(width: int) -> dict[str, Callable[..., int]]:
    low = (1 << width) - 1
    return {
        "add_u": lambda m, d: (m + d) & low,
        "sub_u": lambda m, d: (m - d) & low,
        "rsub_u": lambda m, d: (d - m) & low,
        "inc_u": lambda m, d: 0 if m >= d else m + 1,
        "dec_u": lambda m, d: d if m == 0 or m > d else m - 1,
        "min_i": lambda m, d: min(signed(m, width), signed(d, width)) & low,
        "max_i": lambda m, d: max(signed(m, width), signed(d, width)) & low,
        "min_u": min,
        "max_u": max,
        "and_b": lambda m, d: m & d,
        "or_b": lambda m, d: m | d,
        "xor_b": lambda m, d: m ^ d,
    }


def _float_atomic(form: q.Format, kind: str) -> Callable[[int, int], int]:
    def apply(memory: int, data: int) -> int:
        m, d = form.decode(memory), form.decode(data)
        if kind == "add":
            return form.encode(q.add(m, d))
        smaller = q.less(d, m)
        return data if (smaller if kind == "min" else q.less(m, d)) else memory

    return apply


def _pair(form: q.Format) -> Callable[[int, int], int]:
    one = _float_atomic(form, "add")
    return lambda m, d: one(m & 0xFFFF, d & 0xFFFF) | one(m >> 16, d >> 16) << 16


def _atomics() -> list[tuple[str, bool, int, Callable[..., int], str]]:
    """(text, returns, bytes, operation, type)"""
    table: list[tuple[str, bool, int, Callable[..., int], str]] = []
    for width in (32, 64):
        data, into = ("v4", "v0") if width == 32 else ("v[4:5]", "v[0:1]")
        for name, operation in _unsigned(width).items():
            table.append((f"ds_{name}{width} v8, {data}", False, width // 8, operation, "b"))
            table.append(
                (f"ds_{name.replace('_', '_rtn_')}{width} {into}, v8, {data}", True, width // 8, operation, "b")
            )
        table.append((f"ds_wrxchg_rtn_b{width} {into}, v8, {data}", True, width // 8, lambda m, d: d, "b"))
        form = q.F32 if width == 32 else q.F64
        for kind in ("add", "min", "max"):
            table.append((f"ds_{kind}_f{width} v8, {data}", False, width // 8, _float_atomic(form, kind), f"f{width}"))
            table.append(
                (f"ds_{kind}_rtn_f{width} {into}, v8, {data}", True, width // 8, _float_atomic(form, kind), f"f{width}")
            )
    for kind, form in (("f16", q.F16), ("bf16", q.BF16)):
        table.append((f"ds_pk_add_{kind} v8, v4", False, 4, _pair(form), kind))
        table.append((f"ds_pk_add_rtn_{kind} v0, v8, v4", True, 4, _pair(form), kind))
    return table


ATOMICS = [(register(text + WAIT), *rest) for text, *rest in _atomics()]
ATOMICS = [case for case in ATOMICS if implemented(case[0])]


def atomic_values(kind: str, width: int, count: int, seed: int) -> list[int]:
    """Values whose sums are exact, so that an order other than lane by lane gives them too."""
    rng = np.random.default_rng(seed)
    if kind in ("b", "b32"):
        small = [int(x) for x in rng.integers(0, 40, count)]
        return [
            x if i % 3 else (x * 0x9E3779B97F4A7C15 + 0x80000000) & ((1 << 8 * width) - 1) for i, x in enumerate(small)
        ]
    form = {"f32": q.F32, "f64": q.F64, "f16": q.F16, "bf16": q.BF16}[kind]
    numbers = [form.encode(q.real(int(x))) for x in rng.integers(-3, 4, 2 * count)]
    if form.bits >= 32:
        return numbers[:count]
    return [a | b << 16 for a, b in zip(numbers[:count], numbers[count:], strict=True)]


def _split(values: list[int], width: int, first: int) -> dict[int, np.ndarray]:
    return {first + k: np.array([x >> 32 * k & M32 for x in values], np.uint32) for k in range(width // 4)}


@pytest.mark.parametrize("case", ATOMICS, ids=[c[0].split("\n")[0] for c in ATOMICS])
@pytest.mark.parametrize("apart", [True, False], ids=["one each", "shared"])
def test_atomics(case: tuple, apart: bool) -> None:
    """Every lane on a place of its own, where the value before is returned; and sixteen lanes on each of four places,
    where the sum of all is what can be said."""
    text, returns, width, operation, kind = case
    places = LANES if apart else 4
    memory = atomic_values(kind, width, places, 1)
    data = atomic_values(kind, width, LANES, 2)
    if "inc" in text or "dec" in text:
        data = [data[n % places] for n in range(LANES)]
    if "xchg" in text and not apart:
        data = [data[n % places] for n in range(LANES)]
    lds = np.zeros(2048, np.uint8)
    lds[: places * width] = np.frombuffer(b"".join(x.to_bytes(width, "little") for x in memory), np.uint8)
    address = np.array([n % places * width for n in range(LANES)], np.uint32)
    v = {8: address, 0: OLD[0], 1: OLD[1], **_split(data, width, 4)}
    result = execute(text, v=v, lds=lds, exec_mask=PARTIAL)
    assert not result.findings
    current = list(memory)
    seen: list[int | None] = []
    for lane in range(LANES):
        if not PARTIAL >> lane & 1:
            seen.append(None)
            continue
        seen.append(current[lane % places])
        current[lane % places] = operation(current[lane % places], data[lane])
    if "rsub" in text and not apart:
        return  # the result depends on the order of the lanes, which is not documented
    got = [int.from_bytes(result.lds[k * width : (k + 1) * width].tobytes(), "little") for k in range(places)]
    assert got == current, (text, [hex(x) for x in got[:4]], [hex(x) for x in current[:4]])
    if returns and apart:
        for lane in range(LANES):
            expected = seen[lane] if seen[lane] is not None else int(OLD[0][lane]) | int(OLD[1][lane]) << 32
            now = int(result.v[0][lane]) | (int(result.v[1][lane]) << 32 if width == 8 else 0)
            assert now == expected & (M64 if width == 8 else M32), (text, lane)


COMPARE_SWAP = {
    register("ds_cmpst_rtn_b32 v0, v8, v4, v6" + WAIT): 4,
    register("ds_cmpst_rtn_b64 v[0:1], v8, v[4:5], v[6:7]" + WAIT): 8,
    register("ds_cmpst_b32 v8, v4, v6" + WAIT): 4,
    register("ds_cmpst_b64 v8, v[4:5], v[6:7]" + WAIT): 8,
}


@pytest.mark.parametrize("text", COMPARE_SWAP)
def test_compare_and_store(text: str) -> None:
    """The first data operand is compared, the second stored."""
    width = COMPARE_SWAP[text]
    memory = [(n * 0x1_0000_0001) & ((1 << 8 * width) - 1) for n in range(LANES)]
    compare = [m if n % 3 else m + 1 for n, m in enumerate(memory)]
    new = [(n * 0x7_0000_0003 + 5) & ((1 << 8 * width) - 1) for n in range(LANES)]
    lds = np.frombuffer(b"".join(x.to_bytes(width, "little") for x in memory), np.uint8).copy()
    v = {
        0: OLD[0],
        1: OLD[1],
        8: np.arange(LANES, dtype=np.uint32) * width,
        **_split(compare, width, 4),
        **_split(new, width, 6),
    }
    result = execute(text, v=v, lds=lds)
    for lane in range(LANES):
        got = int.from_bytes(result.lds[lane * width : (lane + 1) * width].tobytes(), "little")
        assert got == (new[lane] if lane % 3 else memory[lane]), (text, lane)
        if "rtn" in text:
            now = int(result.v[0][lane]) | (int(result.v[1][lane]) << 32 if width == 8 else 0)
            assert now == memory[lane]


ROUNDED_ADD = register("ds_add_f32 v8, v4" + WAIT)


def test_float_atomics_round_to_nearest() -> None:
    a = np.array(
        [0x3F800000, 0x3F800001, 0x4B7FFFFF, 0x7F7FFFFF, 0x3DCCCCCD, 0xBF800000, 0x7F800000, 0x80000000] * 8, np.uint32
    )
    b = np.array(
        [0x33800000, 0x33800000, 0x3F000000, 0x73800000, 0x3E4CCCCD, 0x3F800000, 0xFF800000, 0x80000000] * 8, np.uint32
    )
    result = execute(ROUNDED_ADD, v={8: np.arange(LANES, dtype=np.uint32) * 4, 4: b}, lds=a.view(np.uint8).copy())
    for lane in range(LANES):
        got = int.from_bytes(result.lds[4 * lane : 4 * lane + 4].tobytes(), "little")
        expected = q.F32.encode(q.add(q.F32.decode(int(a[lane])), q.F32.decode(int(b[lane]))))
        assert same(got, expected, "f32"), (lane, hex(got), hex(expected))


# -- gfx950: the reads that transpose elements over 16 lanes

TRANSPOSED = {
    register(f"ds_read_b64_tr_b{bits} v[0:1], v8{' offset:2048' if offset else ''}" + WAIT, "gfx950"): (
        bits // 8,
        offset,
    )
    for bits in (16, 8)
    for offset in (0, 2048)
}


@pytest.mark.parametrize("text", TRANSPOSED)
def test_transposed_read(text: str) -> None:
    """A row of 16 elements is what 4 lanes address (2 for bytes); lane l of the 16 gets element l of each row.

    Source: the layout that ROCm/rocm-systems pull request 10175 checked on hardware,
        and Triton's lowering (pull request
    8525: on CDNA4 a row is spread over 2 lanes for bytes and over 4 for halves).
    """
    size, offset = TRANSPOSED[text]
    count = 8 // size
    lanes_of_a_row = 16 // count
    lds = lds_content()
    address = (np.arange(LANES, dtype=np.uint32) * 29 % 64) * np.uint32(24)
    result = execute(text, arch="gfx950", v={8: address}, lds=lds)
    for lane in range(LANES):
        group, column = lane // 16 * 16, lane % 16
        expected = []
        for row in range(count):
            at = int(address[group + lanes_of_a_row * row + column // count]) + offset + size * (column % count)
            expected.append(int.from_bytes(lds[at : at + size].tobytes(), "little"))
        packed = int(result.v[0][lane]) | int(result.v[1][lane]) << 32
        got = [packed >> 8 * size * k & ((1 << 8 * size) - 1) for k in range(count)]
        assert got == expected, (lane, got, expected)
