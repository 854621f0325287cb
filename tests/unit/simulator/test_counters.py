"""Counters, on snippets whose lines, bytes, bank cycles and waves can be counted by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from ferryman.backends.simulator import snippet
from ferryman.backends.simulator.counters import Counters
from tests.unit.simulator.harness import LANES

LANE = np.arange(LANES, dtype=np.uint32)
WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"


def buffer(bytes_: int, shift: int = 0) -> np.ndarray:
    """Memory that begins ``shift`` bytes behind a multiple of 128, as a tensor with a storage offset does."""
    raw = np.zeros(bytes_ + 512, np.uint8)
    start = -raw.ctypes.data % 128 + shift
    return raw[start : start + bytes_]


def count(text: str, array: np.ndarray, offsets: np.ndarray, **more: object) -> Counters:
    address = array.ctypes.data + offsets.astype(np.int64)
    v = {
        8: (address & 0xFFFFFFFF).astype(np.uint32),
        9: (address >> 32).astype(np.uint32),
        1: LANE,
        2: LANE,
        3: LANE,
        4: LANE,
    }
    result = snippet.execute(text + WAIT, v=v, buffers=[array], count=True, **more)  # type: ignore[arg-type]
    assert result.counters is not None and not result.findings, result.findings
    return result.counters


# offsets by lane, bytes each, EXEC, (bytes, lines, least)
FULL = (1 << LANES) - 1
ACCESSES = {
    "a row of dwords: 256 bytes, two lines": ("global_load_dword v0, v[8:9], off", LANE * 4, FULL, (256, 2, 2)),
    "a row of 16 bytes: eight lines": ("global_load_dwordx4 v[4:7], v[8:9], off", LANE * 16, FULL, (1024, 8, 8)),
    "every second dword: twice the lines": ("global_load_dword v0, v[8:9], off", LANE * 8, FULL, (256, 4, 2)),
    "a line for each lane": ("global_load_dword v0, v[8:9], off", LANE * 128, FULL, (256, 64, 2)),
    "one dword for all": ("global_load_dword v0, v[8:9], off", LANE * 0, FULL, (4, 1, 1)),
    "backwards is as good": ("global_load_dword v0, v[8:9], off", (63 - LANE) * 4, FULL, (256, 2, 2)),
    "overlapping pairs": ("global_load_dwordx2 v[4:5], v[8:9], off", LANE * 4, FULL, (260, 3, 3)),
    "bytes": ("global_load_ubyte v0, v[8:9], off", LANE, FULL, (64, 1, 1)),
    "32 lanes": ("global_load_dword v0, v[8:9], off", LANE * 4, 0xFFFFFFFF, (128, 1, 1)),
    "every fourth lane": ("global_load_dword v0, v[8:9], off", LANE * 4, 0x1111_1111_1111_1111, (64, 2, 1)),
    "no lane": ("global_load_dword v0, v[8:9], off", LANE * 4, 0, (0, 0, 0)),
    "a store": ("global_store_dwordx2 v[8:9], v[2:3], off", LANE * 8, FULL, (512, 4, 4)),
    "an atomic": ("global_atomic_add_f32 v[8:9], v1, off", LANE * 4, FULL, (256, 2, 2)),
    # each ends in the line that the next begins in
    "across lines": ("global_load_dwordx4 v[4:7], v[8:9], off offset:8", LANE * 128 + 112, FULL, (1024, 65, 8)),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_bytes_and_lines_of_an_access(name: str) -> None:
    text, offsets, mask, expected = ACCESSES[name]
    counters = count(text, buffer(64 * 128 + 16), offsets, exec_mask=mask)
    ((line, access),) = counters.accesses.items()
    assert (access.bytes, access.lines, access.least) == expected
    assert line == 1 and counters.names[1] == text.split()[0] and access.waves == (mask != 0)
    assert access.efficiency == (expected[2] / expected[1] if expected[1] else 1.0)
    assert counters.bytes_moved == expected[0]


@pytest.mark.parametrize("shift", [0, 64])
def test_where_this_process_puts_a_tensor_does_not_count(shift: int) -> None:
    counters = count("global_load_dword v0, v[8:9], off", buffer(256, shift), LANE * 4)
    assert counters.accesses[1].lines == 2


def test_an_offset_of_one_element_costs_a_line() -> None:
    counters = count("global_load_dword v0, v[8:9], off", buffer(256, 4), LANE * 4)
    assert counters.accesses[1].lines == 3 and counters.efficiency == pytest.approx(2 / 3)


def test_lines_of_different_tensors_are_different() -> None:
    near, far, lane = buffer(64), buffer(64), LANE.astype(np.int64)
    address = np.where(LANE < 16, near.ctypes.data + lane * 4, far.ctypes.data + (lane % 16) * 4)
    v = {8: (address & 0xFFFFFFFF).astype(np.uint32), 9: (address >> 32).astype(np.uint32)}
    result = snippet.execute("global_load_dword v0, v[8:9], off" + WAIT, v=v, buffers=[near, far], count=True)
    assert result.counters is not None
    assert (result.counters.accesses[1].bytes, result.counters.accesses[1].lines) == (128, 2)


def test_a_scalar_load_is_one_access_of_a_wave() -> None:
    array = buffer(256)
    s = {14: array.ctypes.data & 0xFFFFFFFF, 15: array.ctypes.data >> 32}
    result = snippet.execute(
        "s_load_dwordx8 s[16:23], s[14:15], 0x70" + WAIT, s=s, buffers=[array], waves=3, count=True
    )
    assert result.counters is not None
    access = result.counters.accesses[1]
    assert (access.bytes, access.lines, access.least, access.waves) == (
        96,
        6,
        3,
        3,
    )  # bytes 112 to 144: two lines a wave


def lds(text: str, addresses: np.ndarray, arch: str = "gfx942", mask: int = FULL) -> tuple[int, int]:
    """(cycles, conflicts)"""
    v = {8: addresses.astype(np.uint32), **dict.fromkeys(range(8), LANE)}
    memory = np.zeros(60_000, np.uint8)
    result = snippet.execute(text + WAIT, arch=arch, v=v, lds=memory, exec_mask=mask, count=True)
    assert result.counters is not None and not result.findings, result.findings
    return result.counters.lds_cycles, result.counters.conflicts


# 32 banks of four bytes, so that 64 lanes of a dword take two cycles at least
BANKS = {
    "a row of dwords": ("ds_read_b32 v0, v8", LANE * 4, (2, 0)),
    "stride of 32 dwords: one bank for all": ("ds_read_b32 v0, v8", LANE * 128, (64, 62)),
    "stride of 33 dwords: every bank once": ("ds_read_b32 v0, v8", LANE * 132, (2, 0)),
    "stride of 2 dwords: every bank twice": ("ds_read_b32 v0, v8", LANE * 8, (4, 2)),
    "one word for all": ("ds_read_b32 v0, v8", LANE * 0 + 4, (2, 0)),
    "bytes of the same words": ("ds_read_u8 v0, v8", LANE, (2, 0)),
    "a row of 8 bytes": ("ds_read_b64 v[0:1], v8", LANE * 8, (4, 0)),
    "a row of 12 bytes": ("ds_read_b96 v[0:2], v8", LANE * 12, (8, 0)),
    "a row of 16 bytes": ("ds_read_b128 v[0:3], v8", LANE * 16, (8, 0)),
    "16 bytes, 128 apart": ("ds_read_b128 v[0:3], v8", LANE * 128, (64, 56)),
    "writes": ("ds_write_b32 v8, v1", LANE * 128, (64, 62)),
    "two pieces": ("ds_read2_b32 v[0:1], v8 offset0:0 offset1:64", LANE * 4, (4, 0)),
    "an atomic": ("ds_add_u32 v8, v1", LANE * 128, (64, 62)),
}


@pytest.mark.parametrize("name", BANKS)
def test_cycles_of_banks(name: str) -> None:
    text, addresses, expected = BANKS[name]
    assert lds(text, addresses) == expected


def test_lanes_that_are_off_use_no_bank() -> None:
    assert lds("ds_read_b32 v0, v8", LANE * 128, mask=0xF) == (4, 3)
    assert lds("ds_read_b32 v0, v8", LANE * 128, mask=0) == (0, 0)


def test_gfx950_has_64_banks() -> None:
    assert lds("ds_read_b32 v0, v8", LANE * 4, "gfx950") == (1, 0)
    assert lds("ds_read_b32 v0, v8", LANE * 256, "gfx950") == (64, 63)
    assert lds("ds_read_b64_tr_b16 v[0:1], v8", LANE * 8, "gfx950") == (2, 0)


def test_the_mix_counts_wave_instructions() -> None:
    """Four waves; two of them go three times round a loop of three, the others once."""
    text = """v_readfirstlane_b32 s20, v1
    .LBB0_1:
    s_sub_i32 s20, s20, 1
    s_cmp_gt_i32 s20, 0
    s_cbranch_scc1 .LBB0_1
    v_add_u32_e32 v2, v1, v1
    v_mfma_f32_32x32x8_f16 a[0:15], v[4:5], v[6:7], 0"""
    turns = np.repeat(np.array([1, 3, 1, 3], np.uint32)[:, None], LANES, 1)
    v = {1: turns, **{n: np.zeros((4, LANES), np.uint32) for n in range(4, 8)}}
    result = snippet.execute(text, waves=4, v=v, count=True)
    counters = result.counters
    assert counters is not None and counters.waves == 4
    loops = 2 * 1 + 2 * 3
    assert counters.mix == Counter(lanes=4, scalar=2 * loops, control=loops + 4, vector=4, matrix=4)
    assert counters.mnemonics["v_mfma_f32_32x32x8_f16"] == 4 and counters.mnemonics["s_cbranch_scc1"] == loops


@pytest.mark.parametrize(
    ("arch", "registers", "waves", "lds_bytes", "expected"),
    [
        ("gfx942", 64, 4, 0, 8),  # 512 registers: eight waves of 64
        ("gfx942", 65, 4, 0, 7),  # given out in eights: 72
        ("gfx942", 128, 4, 0, 4),
        ("gfx942", 256, 4, 0, 2),
        ("gfx942", 512, 4, 0, 1),
        ("gfx942", 168, 8, 0, 2),  # three waves of 168, so 12 in a unit: one workgroup of eight
        ("gfx942", 32, 4, 32_768, 2),  # two workgroups' LDS
        ("gfx942", 32, 4, 40_000, 1),
        ("gfx950", 32, 4, 40_000, 4),  # 160 KiB: four of them
        ("gfx942", 32, 1, 65_536, 0.25),  # one wave in the whole unit
        ("gfx942", 32, 1, 0, 8),  # single waves need no barrier
        ("gfx942", 32, 2, 0, 8),
        ("gfx942", 512, 16, 0, 0),  # such a workgroup fits no unit
    ],
)
def test_occupancy(arch: str, registers: int, waves: int, lds_bytes: int, expected: float) -> None:
    kernel = SimpleNamespace(metadata={".vgpr_count": registers})
    program = SimpleNamespace(arch=arch, kernel=kernel, mode=None, blocks=lambda mode: {})
    counters = Counters(program)
    counters.finish({}, lds_bytes, waves)
    assert counters.occupancy == expected
