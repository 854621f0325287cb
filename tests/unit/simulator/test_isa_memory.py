"""Buffer, global, flat, scratch and scalar memory on simulated memory, with addresses as the ABI forms them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.simulator.harness import FULL, LANES, M32, PARTIAL, execute, register, signed

WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
OLD = [np.arange(LANES, dtype=np.uint32) * (k + 3) + 1000 * k for k in range(4)]
RAW = 0x00020000  # word 3 of a raw buffer's descriptor: 32-bit data, no swizzle, no stride


def memory(count: int = 8192, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def pair(address: int) -> tuple[int, int]:
    return address & M32, address >> 32


def descriptor(array: np.ndarray, records: int | None = None, stride: int = 0) -> dict[int, int]:
    """s[8:11]: base, stride, number of records (bytes where the stride is 0), format."""
    low, high = pair(array.ctypes.data)
    return {8: low, 9: high & 0xFFFF | stride << 16, 10: array.nbytes if records is None else records, 11: RAW}


def at(array: np.ndarray, start: int, width: int) -> int:
    return int.from_bytes(array.view(np.uint8).reshape(-1)[start : start + width].tobytes(), "little")


def joined(result: Any, lane: int, count: int, bank: str = "v") -> int:
    return sum(int(getattr(result, bank)[k][lane]) << 32 * k for k in range(count))


# -- loads and stores: (name, bytes, what a load does with memory and the register before)

LOADS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "ubyte": (1, lambda m, old: m),
    "sbyte": (1, lambda m, old: signed(m, 8) & M32),
    "ushort": (2, lambda m, old: m),
    "sshort": (2, lambda m, old: signed(m, 16) & M32),
    "dword": (4, lambda m, old: m),
    "dwordx2": (8, lambda m, old: m),
    "dwordx3": (12, lambda m, old: m),
    "dwordx4": (16, lambda m, old: m),
    "ubyte_d16": (1, lambda m, old: old & 0xFFFF0000 | m),
    "ubyte_d16_hi": (1, lambda m, old: old & 0xFFFF | m << 16),
    "sbyte_d16": (1, lambda m, old: old & 0xFFFF0000 | signed(m, 8) & 0xFFFF),
    "sbyte_d16_hi": (1, lambda m, old: old & 0xFFFF | (signed(m, 8) & 0xFFFF) << 16),
    "short_d16": (2, lambda m, old: old & 0xFFFF0000 | m),
    "short_d16_hi": (2, lambda m, old: old & 0xFFFF | m << 16),
}
STORES = {
    "byte": (1, 0),
    "short": (2, 0),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
    "byte_d16_hi": (1, 16),
    "short_d16_hi": (2, 16),
}


def _registers(width: int, bank: str = "v") -> str:
    count = max(width // 4, 1)
    return f"{bank}0" if count == 1 else f"{bank}[0:{count - 1}]"


#: space -> (address operands after or before the data, byte offset beyond the lane's own)
SPACES = {
    "buffer": ("v8, s[8:11], 0 offen", 0),
    "buffer offset": ("v8, s[8:11], 0 offen offset:48", 48),
    "buffer soffset": ("v8, s[8:11], s12 offen offset:16", 80),
    "global": ("v[8:9], off", 0),
    "global offset": ("v[8:9], off offset:-32", -32),
    "global saddr": ("v8, s[14:15]", 0),
    "global saddr offset": ("v8, s[14:15] offset:4095", 4095),
    "flat": ("v[8:9]", 0),
    "flat offset": ("v[8:9] offset:64", 64),
}


def _load_texts() -> list[tuple[str, str, str]]:
    texts = []
    for space, (operands, _) in SPACES.items():
        kind = space.split()[0]
        for name, (width, _) in LOADS.items():
            if space != kind and name not in ("ushort", "dword", "dwordx4"):
                continue
            texts.append((space, name, register(f"{kind}_load_{name} {_registers(width)}, {operands}" + WAIT)))
    return texts


def _address(array: np.ndarray, space: str, offsets: np.ndarray) -> dict[int, np.ndarray]:
    if space.startswith("buffer") or "saddr" in space:
        return {8: offsets.astype(np.uint32)}
    full = offsets.astype(np.uint64) + np.uint64(array.ctypes.data)
    return {8: (full & np.uint64(M32)).astype(np.uint32), 9: (full >> np.uint64(32)).astype(np.uint32)}


def _scalars(array: np.ndarray) -> dict[int, int]:
    low, high = pair(array.ctypes.data)
    return {**descriptor(array), 12: 64, 14: low, 15: high}


LOAD_TEXTS = _load_texts()


@pytest.mark.parametrize(("space", "name", "text"), LOAD_TEXTS, ids=[t.split("\n")[0] for _, _, t in LOAD_TEXTS])
def test_loads(space: str, name: str, text: str) -> None:
    width, meaning = LOADS[name]
    array, extra = memory(), SPACES[space][1]
    offsets = (np.arange(LANES) * 37 % 64) * width + 128
    for mask in (FULL, PARTIAL):
        v = {**dict(enumerate(OLD)), **_address(array, space, offsets)}
        result = execute(text, v=v, s=_scalars(array), buffers=[array], exec_mask=mask)
        assert not result.findings, result.findings
        count = max(width // 4, 1)
        for lane in range(LANES):
            old = sum(int(OLD[k][lane]) << 32 * k for k in range(count))
            expected = meaning(at(array, int(offsets[lane]) + extra, width), old) if mask >> lane & 1 else old
            assert joined(result, lane, count) == expected, (text, lane)


def _store_texts() -> list[tuple[str, str, str]]:
    texts = []
    for space, (operands, _) in SPACES.items():
        kind = space.split()[0]
        for name, (width, _) in STORES.items():
            if space != kind and name not in ("short", "dword", "dwordx4"):
                continue
            data = _registers(width)
            if kind == "buffer":
                text = f"buffer_store_{name} {data}, {operands}"
            else:
                first, _, rest = operands.partition(", ") if kind == "global" else operands.partition(" ")
                text = f"{kind}_store_{name} {first}, {data}" + (f", {rest}" if kind == "global" else f" {rest}")
            texts.append((space, name, register(text.rstrip() + WAIT)))
    return texts


STORE_TEXTS = _store_texts()


@pytest.mark.parametrize(("space", "name", "text"), STORE_TEXTS, ids=[t.split("\n")[0] for _, _, t in STORE_TEXTS])
def test_stores(space: str, name: str, text: str) -> None:
    (width, shift), extra = STORES[name], SPACES[space][1]
    offsets = (np.arange(LANES) * 37 % 64) * max(width, 4) + 128
    data = [x * np.uint32(0x01234567) for x in OLD]
    for mask in (FULL, PARTIAL):
        array = memory()
        expected = array.copy()
        for lane in range(LANES):
            if mask >> lane & 1:
                value = sum(int(data[k][lane]) << 32 * k for k in range(4)) >> shift
                start = int(offsets[lane]) + extra
                expected[start : start + width] = np.frombuffer(
                    (value & ((1 << 8 * width) - 1)).to_bytes(width, "little"), np.uint8
                )
        v = {**dict(enumerate(data)), **_address(array, space, offsets)}
        result = execute(text, v=v, s=_scalars(array), buffers=[array], exec_mask=mask)
        assert not result.findings, result.findings
        assert (array == expected).all(), text


ACCUMULATORS = {
    register("buffer_load_dwordx4 a[0:3], v8, s[8:11], 0 offen" + WAIT),
    register("global_load_dwordx4 a[0:3], v[10:11], off" + WAIT),
}


@pytest.mark.parametrize("text", sorted(ACCUMULATORS))
def test_loads_to_accumulation_registers(text: str) -> None:
    array = memory()
    offsets = np.arange(LANES) * 16
    v = {8: offsets.astype(np.uint32), **{k + 2: x for k, x in _address(array, "global", offsets).items()}}
    result = execute(text, v=v, s=descriptor(array), buffers=[array])
    assert all(joined(result, lane, 4, "a") == at(array, 16 * lane, 16) for lane in range(LANES))


UNALIGNED = [
    case
    for case in LOAD_TEXTS
    if case[0] in ("global", "flat") and case[1] in ("ushort", "dword", "dwordx2", "dwordx4")
]


@pytest.mark.parametrize(("space", "name", "text"), UNALIGNED, ids=[t.split("\n")[0] for _, _, t in UNALIGNED])
def test_unaligned_loads(space: str, name: str, text: str) -> None:
    """Unaligned access is on for every kernel of the amdhsa ABI (LLVM: unaligned-access-mode)."""
    width, _ = LOADS[name]
    array = memory()
    for first in (1, 2, 3):
        offsets = np.arange(LANES) * (width + first) + first
        result = execute(text, v=_address(array, space, offsets), buffers=[array])
        for lane in range(LANES):
            expected = at(array, int(offsets[lane]), width)
            assert joined(result, lane, max(width // 4, 1)) == expected, (text, lane)


EXACT = [case for case in LOAD_TEXTS + STORE_TEXTS if case[0] in ("global", "flat", "buffer")]


@pytest.mark.parametrize(("space", "name", "text"), EXACT, ids=[t.split("\n")[0] for _, _, t in EXACT])
def test_the_last_byte_is_inside_and_the_next_is_not(space: str, name: str, text: str) -> None:
    """Memory that ends with the last lane's access gives no finding; one byte less does, for that lane."""
    width = (STORES if "_store_" in text else LOADS)[name][0]
    for missing in (0, 1):
        whole = memory(LANES * 16)
        array = whole[: LANES * width - missing]
        offsets = np.arange(LANES) * width
        v = {**dict(enumerate(OLD)), **_address(array, space, offsets)}
        s = {**_scalars(array), **descriptor(array, 1 << 20)}
        findings = execute(text, v=v, s=s, buffers=[array]).findings
        assert [(f.kind, f.lane) for f in findings] == [("out-of-bounds", LANES - 1)] * missing, [
            str(f) for f in findings
        ]


TWO_ARRAYS = register("global_load_dword v0, v[8:9], off" + WAIT + "\nglobal_store_dword v[10:11], v0, off")


def test_lanes_in_several_arrays() -> None:
    whole = memory(4096)
    arrays = [whole[:256], whole[1024:1280], whole[2048:2560]]
    which = np.arange(LANES) % 3
    address = np.array([arrays[w].ctypes.data + 4 * (n // 3) for n, w in enumerate(which)], np.uint64)
    target = np.array([arrays[2].ctypes.data + 256 + 4 * n for n in range(LANES)], np.uint64)
    v = {
        n: x.astype(np.uint32)
        for n, x in ((8, address), (9, address >> np.uint64(32)), (10, target), (11, target >> np.uint64(32)))
    }
    result = execute(TWO_ARRAYS, v=v, buffers=arrays)
    assert not result.findings, [str(f) for f in result.findings]
    expected = [at(arrays[w], 4 * (n // 3), 4) for n, w in enumerate(which)]
    assert [int(x) for x in result.v[0]] == expected
    assert [at(arrays[2], 256 + 4 * n, 4) for n in range(LANES)] == expected
    between = v | {
        8: np.full(LANES, (arrays[0].ctypes.data + 512) & M32, np.uint32),
        9: np.full(LANES, arrays[0].ctypes.data >> 32, np.uint32),
    }
    assert {f.kind for f in execute(TWO_ARRAYS, v=between, buffers=arrays).findings} >= {"out-of-bounds"}


# -- buffer descriptors

OUTSIDE = {
    register("buffer_load_dword v0, v8, s[8:11], 0 offen" + WAIT): (0, 4, 0),
    register("buffer_load_dword v0, v8, s[8:11], 0 offen offset:64" + WAIT): (64, 4, 0),
    register("buffer_load_ushort v0, v8, s[8:11], 0 offen" + WAIT): (0, 2, 0),
    register("buffer_load_dwordx2 v[0:1], v8, s[8:11], 0 offen" + WAIT): (0, 8, 0),
}


@pytest.mark.parametrize("text", OUTSIDE)
def test_buffer_loads_out_of_range_give_zero(text: str) -> None:
    """Whole elements: an offset of -1 as unsigned is far outside, and is how a mask is spelt."""
    extra, width, _ = OUTSIDE[text]
    array = memory()
    records = 30 * width + 64
    offsets = np.array([n * width if n % 5 else 0x80000000 for n in range(LANES)], np.uint32)
    result = execute(text, v={0: OLD[0], 1: OLD[1], 8: offsets}, s=descriptor(array, records), buffers=[array])
    for lane in range(LANES):
        start = int(offsets[lane]) + extra
        expected = at(array, start, width) if start + width <= records else 0
        assert joined(result, lane, max(width // 4, 1)) == expected, (text, lane)


DROPPED = register("buffer_store_dword v0, v8, s[8:11], 0 offen" + WAIT)


def test_buffer_stores_out_of_range_are_dropped() -> None:
    array = memory()
    before = array.copy()
    offsets = np.array([n * 4 if n % 2 else 0x80000000 + n for n in range(LANES)], np.uint32)
    execute(DROPPED, v={0: OLD[1], 8: offsets}, s=descriptor(array, 128), buffers=[array])
    expected = before.copy()
    for lane in range(1, 32, 2):
        expected[4 * lane : 4 * lane + 4] = np.frombuffer(int(OLD[1][lane]).to_bytes(4, "little"), np.uint8)
    assert (array == expected).all()


NO_VECTOR_OFFSET = register("buffer_load_dword v0, off, s[8:11], 0 offset:36" + WAIT)
WHOLE_OFFSET = register("buffer_load_dword v0, off, s[8:11], s12 offset:4" + WAIT)


def test_buffer_loads_without_a_vector_offset() -> None:
    array = memory()
    assert (execute(NO_VECTOR_OFFSET, s=descriptor(array), buffers=[array]).v[0] == at(array, 36, 4)).all()
    assert (execute(WHOLE_OFFSET, s={**descriptor(array), 12: 100}, buffers=[array]).v[0] == at(array, 104, 4)).all()


# -- scalar loads


def _span(count: int) -> str:
    """The end of a load's name, and its destination."""
    return " s20" if count == 1 else f"x{count} s[20:{19 + count}]"


SCALAR_LOADS = {
    register(f"s_load_dword{_span(n)}, s[14:15], {offset}\ns_waitcnt lgkmcnt(0)"): (n, offset)
    for n in (1, 2, 4, 8, 16)
    for offset in ("0x0", "0x24", "-0x10")
}


@pytest.mark.parametrize("text", SCALAR_LOADS)
def test_scalar_loads(text: str) -> None:
    count, offset = SCALAR_LOADS[text]
    array = memory(512)
    low, high = pair(array.ctypes.data + 64)
    result = execute(text, s={14: low, 15: high}, buffers=[array])
    assert not result.findings
    assert [int(result.s[20 + k]) for k in range(count)] == [
        at(array, 64 + int(offset, 0) + 4 * k, 4) for k in range(count)
    ]


SCALAR_BUFFERS = {
    register(f"s_buffer_load_dword{_span(n)}, s[8:11], 0x8\ns_waitcnt lgkmcnt(0)"): n for n in (1, 2, 4, 8, 16)
}
SCALAR_REGISTER = register("s_load_dword s20, s[14:15], s16\ns_waitcnt lgkmcnt(0)")


def test_scalar_load_with_a_register_offset() -> None:
    array = memory(512)
    low, high = pair(array.ctypes.data)
    assert int(execute(SCALAR_REGISTER, s={14: low, 15: high, 16: 44}, buffers=[array]).s[20]) == at(array, 44, 4)


@pytest.mark.parametrize("text", SCALAR_BUFFERS)
def test_scalar_buffer_loads(text: str) -> None:
    array = memory(512)
    result = execute(text, s=descriptor(array), buffers=[array])
    count = SCALAR_BUFFERS[text]
    assert [int(result.s[20 + k]) for k in range(count)] == [at(array, 8 + 4 * k, 4) for k in range(count)]


# -- scratch: every lane has its own memory

SCRATCH = {
    register("scratch_store_dword off, v2, off\nscratch_load_dword v0, off, off" + WAIT): 1,
    register(
        "scratch_store_dword off, v2, off offset:8\ns_waitcnt vmcnt(0)\nscratch_load_dword v0, off, off offset:8" + WAIT
    ): 1,
    register(
        "scratch_store_dwordx2 off, v[2:3], off offset:16\nscratch_load_dwordx2 v[0:1], off, off offset:16" + WAIT
    ): 2,
    register(
        "scratch_store_dwordx4 off, v[2:5], off offset:32\nscratch_load_dwordx4 v[0:3], off, off offset:32" + WAIT
    ): 4,
    register("scratch_store_dword v8, v2, off\nscratch_load_dword v0, v8, off" + WAIT): 1,
    register("scratch_store_dword off, v2, s20\nscratch_load_dword v0, off, s20" + WAIT): 1,
    register("scratch_store_short off, v2, off offset:4\nscratch_load_ushort v0, off, off offset:4" + WAIT): 0,
}


@pytest.mark.parametrize("text", SCRATCH)
def test_scratch(text: str) -> None:
    count = SCRATCH[text]
    data = {2 + k: OLD[k] * np.uint32(77) for k in range(4)}
    v = {**{k: x for k, x in enumerate(OLD) if k < 2}, **data, 8: np.full(LANES, 24, np.uint32)}
    result = execute(text, v=v, s={20: 12}, exec_mask=PARTIAL, scratch=256)
    assert not result.findings, result.findings
    for lane in range(LANES):
        if PARTIAL >> lane & 1:
            expected = [int(data[2 + k][lane]) for k in range(max(count, 1))]
            if count == 0:
                expected = [expected[0] & 0xFFFF]
            assert [int(result.v[k][lane]) for k in range(len(expected))] == expected, (text, lane)


def _scratch_parts() -> dict[str, Callable[[int, int], int]]:
    """Store one whole word, load a part of it; and store a part into a word, load all of it."""
    table: dict[str, Callable[[int, int], int]] = {}
    for name, (width, meaning) in LOADS.items():
        if width <= 2:
            text = f"scratch_store_dword off, v2, off offset:4\nscratch_load_{name} v0, off, off offset:4"
            table[register(text + WAIT)] = lambda data, old, width=width, meaning=meaning: meaning(
                data & ((1 << 8 * width) - 1), old
            )
    for name, (width, shift) in STORES.items():
        if width <= 2:
            text = (
                f"scratch_store_dword off, v3, off\nscratch_store_{name} off, v2, off\nscratch_load_dword v0, off, off"
            )
            table[register(text + WAIT)] = lambda data, old, width=width, shift=shift: (
                0x55667788 & ~((1 << 8 * width) - 1) | data >> shift & ((1 << 8 * width) - 1)
            )
    return table


SCRATCH_PARTS = _scratch_parts()
SCRATCH_THREE = register("scratch_store_dwordx3 off, v[2:4], off\nscratch_load_dwordx3 v[6:8], off, off" + WAIT)


@pytest.mark.parametrize("text", SCRATCH_PARTS)
def test_scratch_parts(text: str) -> None:
    data = (np.arange(LANES, dtype=np.uint64) * 0x04ED_0F8F % (1 << 32)).astype(np.uint32)
    result = execute(
        text, v={0: OLD[1], 2: data, 3: np.full(LANES, 0x55667788, np.uint32)}, exec_mask=PARTIAL, scratch=256
    )
    assert not result.findings, result.findings
    for lane in range(LANES):
        old = int(OLD[1][lane])
        expected = SCRATCH_PARTS[text](int(data[lane]), old) if PARTIAL >> lane & 1 else old
        assert int(result.v[0][lane]) == expected, (text, lane)


def test_scratch_of_three_words() -> None:
    result = execute(SCRATCH_THREE, v={2 + k: OLD[k] for k in range(3)}, scratch=64)
    assert all((result.v[6 + k] == OLD[k]).all() for k in range(3))
