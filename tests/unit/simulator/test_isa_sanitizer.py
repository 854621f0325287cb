"""The sanitizer: each kind of finding is reported where it is, and not where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.unit.simulator.harness import LANES, execute, register
from tests.unit.simulator.test_isa_memory import descriptor, pair

LANE = np.arange(LANES, dtype=np.uint32)


def _global(array: np.ndarray, offsets: np.ndarray) -> dict[int, np.ndarray]:
    full = array.ctypes.data + offsets.astype(np.int64)
    return {8: (full & 0xFFFFFFFF).astype(np.uint32), 9: (full >> 32).astype(np.uint32)}


def _waves(count: int) -> np.ndarray:
    return np.arange(count * LANES, dtype=np.uint32).reshape(count, LANES)


@dataclass(frozen=True)
class Case:
    """A snippet that shows one kind of finding at an instruction, or (kind None) nothing."""

    name: str
    text: str
    kind: str | None
    at: str = ""
    lane: int | None = None
    waves: int = 1
    lds: int | None = None
    v: dict[int, np.ndarray] | None = None
    setup: str = ""  # "global" or "buffer": a memory of 1024 bytes behind v[8:9] or s[8:11]
    offsets: tuple[int, int] = (4, 0)  # bytes a lane, and the first one
    arguments: dict[str, Any] | None = None


LOAD = "global_load_dword {}, v[8:9], off\n"
TWO_LOADS = LOAD.format("v0") + LOAD.format("v2") + "s_waitcnt vmcnt(1)\nv_add_u32_e32 v3, {}, v1"
STORE = "\nglobal_store_dword v[8:9], {}, off"
CHOICE = "v_mov_b32_e32 v6, 1\ns_mov_b64 s[30:31], {}\nv_cndmask_b32_e64 v7, v6, v5, s[30:31]" + STORE.format("v7")
FOUR_LANES = "s_mov_b64 exec, 15\nv_mov_b32_e32 v6, 1\ns_mov_b64 exec, -1"
NEXT_LANE = FOUR_LANES + "\nv_mov_b32_dpp v7, v6 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1" + STORE.format("v7")
APART = FOUR_LANES + "\ns_mov_b64 exec, -16\nv_mov_b32_e32 v7, 1\ns_mov_b64 exec, -1\nv_add_u32_e32 v6, v6, v7"
APART += STORE.format("v6")
MASKED = "s_mov_b64 s[36:37], 0\ns_{}_b64 s[30:31], s[40:41], s[36:37]\nv_cndmask_b32_e64 v7, 0, 1, s[30:31]"
MASKED += STORE.format("v7")
BY_WAVE = "v_readfirstlane_b32 s20, v1\ns_cmp_eq_u32 s20, 0\ns_cbranch_scc1 .LBB0_1\n"
WRITE_READ = "ds_write_b32 v2, v1\n{wait}{barrier}ds_read_b32 v4, v3\ns_waitcnt lgkmcnt(0)"
W, B = "s_waitcnt lgkmcnt(0)\n", "s_barrier\n"
LDS_ADDRESSES = {1: _waves(2), 2: _waves(2) * 4, 3: (_waves(2) ^ 64) * 4}
OWN_ADDRESSES = {1: _waves(2), 2: _waves(2) * 4, 3: _waves(2) * 4}
COUNTER = {1: _waves(2) * 0 + 1, 2: _waves(2) * 0}

CASES = [
    # memory out of bounds
    Case("global load inside", "global_load_dword v0, v[8:9], off\ns_waitcnt vmcnt(0)", None, setup="global"),
    Case(
        "global load past the end",
        "global_load_dword v0, v[8:9], off\ns_waitcnt vmcnt(0)",
        "out-of-bounds",
        "global_load_dword",
        62,
        setup="global",
        offsets=(4, 1024 - 62 * 4),
    ),
    Case(
        "global load before the start",
        "global_load_dword v0, v[8:9], off offset:-8\ns_waitcnt vmcnt(0)",
        "out-of-bounds",
        "global_load_dword",
        0,
        setup="global",
    ),
    Case(
        "global load across the end",
        "global_load_dwordx4 v[0:3], v[8:9], off\ns_waitcnt vmcnt(0)",
        "out-of-bounds",
        "global_load_dwordx4",
        63,
        setup="global",
        offsets=(16, 8),
    ),
    Case(
        "global store past the end",
        "global_store_dword v[8:9], v1, off",
        "out-of-bounds",
        "global_store_dword",
        60,
        setup="global",
        offsets=(4, 1024 - 60 * 4),
    ),
    Case("global store inside", "global_store_dword v[8:9], v1, off", None, setup="global"),
    Case(
        "lanes that are off read nothing",
        "global_load_dword v0, v[8:9], off\ns_waitcnt vmcnt(0)",
        None,
        setup="global",
        offsets=(4, 1024 - 32 * 4),
        arguments={"exec_mask": 0xFFFFFFFF},
    ),
    Case(
        "buffer load masked by a far offset",
        "buffer_load_dword v0, v8, s[8:11], 0 offen\ns_waitcnt vmcnt(0)",
        None,
        setup="buffer masked",
    ),
    Case(
        "buffer load whose descriptor passes the memory",
        "buffer_load_dword v0, v8, s[8:11], 0 offen\ns_waitcnt vmcnt(0)",
        "out-of-bounds",
        "buffer_load_dword",
        60,
        setup="buffer too long",
        offsets=(4, 1024 - 60 * 4),
    ),
    Case(
        "LDS read past the end",
        "ds_read_b32 v0, v2\ns_waitcnt lgkmcnt(0)",
        "out-of-bounds",
        "ds_read_b32",
        32,
        lds=128,
        v={2: LANE * 4},
    ),
    Case("LDS read inside", "ds_read_b32 v0, v2\ns_waitcnt lgkmcnt(0)", None, lds=256, v={2: LANE * 4}),
    Case(
        "LDS write past the end",
        "ds_write_b64 v2, v[4:5]",
        "out-of-bounds",
        "ds_write_b64",
        30,
        lds=240,
        v={2: LANE * 8, 4: LANE, 5: LANE},
        arguments={"exec_mask": 0xFFFFFFFF},
    ),
    Case(
        "scalar load past the end",
        "s_load_dwordx4 s[20:23], s[14:15], 0x3f8\ns_waitcnt lgkmcnt(0)",
        "out-of-bounds",
        "s_load_dwordx4",
        None,
        setup="scalar",
    ),
    Case("scalar load inside", "s_load_dwordx4 s[20:23], s[14:15], 0x3f0\ns_waitcnt lgkmcnt(0)", None, setup="scalar"),
    Case(
        "scratch past the end",
        "scratch_store_dword off, v1, off offset:64",
        "out-of-bounds",
        "scratch_store_dword",
        0,
        v={1: LANE},
        arguments={"scratch": 64},
    ),
    Case(
        "scratch up to its end",
        "scratch_store_dword off, v1, off offset:60",
        None,
        v={1: LANE},
        arguments={"scratch": 64},
    ),
    # what nothing has written. A value may be moved about; a store, an address or a branch may not depend on it
    Case(
        "store of a register that nothing wrote",
        "global_store_dword v[8:9], v5, off",
        "uninitialised",
        "global_store_dword",
        0,
        setup="global",
    ),
    Case(
        "store of a sum with a register that nothing wrote",
        "v_add_u32_e32 v6, v1, v5\nglobal_store_dword v[8:9], v6, off",
        "uninitialised",
        "",
        0,
        setup="global",
    ),
    Case(
        "address from a register that nothing wrote",
        "ds_read_b32 v0, v5\ns_waitcnt lgkmcnt(0)",
        "uninitialised",
        "ds_read_b32",
        0,
        lds=256,
    ),
    Case(
        "branch on a mask that nothing wrote",
        "v_cmp_eq_u32_e32 vcc, 0, v5\ns_cbranch_vccz .LBB0_1\ns_nop 0\n.LBB0_1:\ns_nop 0",
        "uninitialised",
        "",
        None,
    ),
    Case(
        "lanes that were off when it was written",
        FOUR_LANES + STORE.format("v6"),
        "uninitialised",
        "global_store_dword",
        4,
        setup="global",
    ),
    Case("written before the store", "v_mov_b32_e32 v6, 1\nglobal_store_dword v[8:9], v6, off", None, setup="global"),
    Case(
        "a select that takes what nothing wrote",
        CHOICE.format(16),
        "uninitialised",
        "global_store_dword",
        4,
        setup="global",
    ),
    Case("a select that leaves what nothing wrote", CHOICE.format(0), None, setup="global"),
    Case(
        "a lane moved from where nothing was written",
        NEXT_LANE,
        "uninitialised",
        "global_store_dword",
        5,
        setup="global",
    ),
    Case(
        "a read of LDS that the workgroup was given",
        "ds_read_b32 v6, v2" + "\n" + W + STORE.format("v6").strip(),
        None,
        setup="global",
        lds=256,
        v={2: LANE * 4},
    ),
    Case(
        "a sum of registers that nothing wrote in different lanes",
        APART,
        "uninitialised",
        "global_store_dword",
        0,
        setup="global",
    ),
    Case("an unwritten mask cleared by zero", MASKED.format("and"), None, setup="global"),
    Case("an unwritten mask or zero", MASKED.format("or"), "uninitialised", "global_store_dword", 0, setup="global"),
    # races between waves
    Case("exchange over a barrier", WRITE_READ.format(wait=W, barrier=B), None, waves=2, lds=512, v=LDS_ADDRESSES),
    Case(
        "exchange without a barrier",
        WRITE_READ.format(wait=W, barrier=""),
        "race",
        "",
        None,
        waves=2,
        lds=512,
        v=LDS_ADDRESSES,
    ),
    Case("own data without a barrier", WRITE_READ.format(wait=W, barrier=""), None, waves=2, lds=512, v=OWN_ADDRESSES),
    Case(
        "two waves write one place",
        "v_mov_b32_e32 v2, 0\nds_write_b32 v2, v1",
        "race",
        "ds_write_b32",
        None,
        waves=2,
        lds=64,
        v={1: _waves(2)},
        arguments={"exec_mask": 1},
    ),
    Case("atomics on one place", "ds_add_u32 v2, v1\ns_waitcnt lgkmcnt(0)", None, waves=2, lds=64, v=COUNTER),
    Case(
        "read of an atomic's place over a barrier",
        "ds_add_u32 v2, v1\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v4, v2\ns_waitcnt lgkmcnt(0)",
        None,
        waves=2,
        lds=64,
        v=COUNTER,
    ),
    Case(
        "read of an atomic's place without a barrier",
        "ds_add_u32 v2, v1\ns_waitcnt lgkmcnt(0)\nds_read_b32 v4, v2\ns_waitcnt lgkmcnt(0)",
        "race",
        "",
        None,
        waves=2,
        lds=64,
        v=COUNTER,
    ),
    Case(
        "a write that overtakes a reader",
        "ds_read_b32 v4, v3\ns_waitcnt lgkmcnt(0)\nds_write_b32 v2, v1",
        "race",
        "",
        None,
        waves=2,
        lds=512,
        v=LDS_ADDRESSES,
    ),
    Case(
        "two waves write one global place",
        "global_store_dword v[8:9], v1, off",
        "race",
        "global_store_dword",
        None,
        waves=2,
        setup="global",
    ),
    Case("global atomics on one place", "global_atomic_add_f32 v[8:9], v1, off", None, waves=2, setup="global"),
    # waits
    Case(
        "a load used without a wait",
        "global_load_dword v0, v[8:9], off\nv_add_u32_e32 v3, v0, v1",
        "missing-wait",
        "v_add_u32_e32",
        None,
        setup="global",
    ),
    Case(
        "a load used after its wait",
        "global_load_dword v0, v[8:9], off\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v3, v0, v1",
        None,
        setup="global",
    ),
    Case("the first of two loads after a wait that leaves one", TWO_LOADS.format("v0"), None, setup="global"),
    Case(
        "the second of two loads after a wait that leaves one",
        TWO_LOADS.format("v2"),
        "missing-wait",
        "v_add_u32_e32",
        None,
        setup="global",
    ),
    Case(
        "two loads into one register, which arrive in order",
        LOAD.format("v0") + LOAD.format("v0") + "s_waitcnt vmcnt(0)\nv_add_u32_e32 v3, v0, v1",
        None,
        setup="global",
    ),
    Case(
        "the first of two loads into one register waited for",
        LOAD.format("v0") + LOAD.format("v0") + "s_waitcnt vmcnt(1)\nv_add_u32_e32 v3, v0, v1",
        "missing-wait",
        "v_add_u32_e32",
        None,
        setup="global",
    ),
    Case(
        "a wait on the other counter",
        "ds_read_b32 v0, v2\ns_waitcnt vmcnt(0)\nv_mov_b32_e32 v3, v0",
        "missing-wait",
        "v_mov_b32_e32",
        None,
        lds=256,
        v={2: LANE * 4},
    ),
    Case(
        "a load's register written before it arrives",
        "global_load_dword v0, v[8:9], off\nv_mov_b32_e32 v0, 0\ns_waitcnt vmcnt(0)",
        "missing-wait",
        "v_mov_b32_e32",
        None,
        setup="global",
    ),
    Case(
        "a scalar load used without a wait",
        "s_load_dword s20, s[14:15], 0x0\ns_add_i32 s21, s20, 1",
        "missing-wait",
        "s_add_i32",
        None,
        setup="scalar",
    ),
    Case(
        "a scalar load used after its wait",
        "s_load_dword s20, s[14:15], 0x0\ns_waitcnt lgkmcnt(0)\ns_add_i32 s21, s20, 1",
        None,
        setup="scalar",
    ),
    Case(
        "an atomic's result without a wait",
        "ds_add_rtn_u32 v0, v2, v1\nv_mov_b32_e32 v3, v0",
        "missing-wait",
        "v_mov_b32_e32",
        None,
        lds=256,
        v={1: LANE, 2: LANE * 4},
    ),
    Case(
        "a permute's result without a wait",
        "ds_bpermute_b32 v0, v2, v1\nv_mov_b32_e32 v3, v0",
        "missing-wait",
        "v_mov_b32_e32",
        None,
        v={1: LANE, 2: LANE * 4},
    ),
    Case(
        "a store of a loaded register without a wait",
        "ds_read_b32 v0, v2\nglobal_store_dword v[8:9], v0, off",
        "missing-wait",
        "global_store_dword",
        None,
        lds=256,
        setup="global",
        v={2: LANE * 4},
    ),
    # barriers
    Case(
        "waves at different barriers",
        BY_WAVE + "s_barrier\ns_endpgm\n.LBB0_1:\ns_barrier",
        "divergent-barrier",
        "",
        None,
        waves=2,
        v={1: _waves(2)},
    ),
    Case(
        "a barrier that every wave reaches", BY_WAVE + "s_nop 0\n.LBB0_1:\ns_barrier", None, waves=2, v={1: _waves(2)}
    ),
    # the manual: if some waves have already terminated, s_barrier waits on the surviving ones only
    Case(
        "a barrier after another wave has ended",
        BY_WAVE + "s_barrier\n.LBB0_1:\ns_nop 0",
        None,
        waves=2,
        v={1: _waves(2)},
    ),
]
for _case in CASES:
    register(_case.text)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_findings(case: Case) -> None:
    array = np.zeros(1024, np.uint8)
    stride, first = case.offsets
    v = dict(case.v or {})
    s: dict[int, int] = {}
    buffers: list[np.ndarray] = []
    if case.setup:
        buffers = [array]
        v.setdefault(1, _waves(case.waves) if case.waves > 1 else LANE)
        low, high = pair(array.ctypes.data)
        s = {**descriptor(array), 14: low, 15: high}
    if case.setup == "global":
        v |= _global(array, LANE * stride + first)
    if case.setup.startswith("buffer"):
        v[8] = (
            np.where(LANE % 3 == 0, 0x80000000, LANE * 4).astype(np.uint32)
            if "masked" in case.setup
            else LANE * stride + first
        )
        s |= descriptor(array, 4096 if "too long" in case.setup else None)
    if case.waves > 1:
        v = {n: np.broadcast_to(x, (case.waves, LANES)).copy() for n, x in v.items()}
    lds = None if case.lds is None else np.zeros(case.lds, np.uint8)
    result = execute(case.text, waves=case.waves, v=v, s=s, lds=lds, buffers=buffers, **(case.arguments or {}))
    if case.kind is None:
        assert not result.findings, [str(f) for f in result.findings]
        return
    assert result.findings, f"{case.name}: nothing was found"
    assert {f.kind for f in result.findings} == {case.kind}, [str(f) for f in result.findings]
    finding = result.findings[0]
    assert finding.message
    if case.at:
        assert case.at in finding.instruction, str(finding)
        lines = [n for n, line in enumerate(case.text.splitlines(), 1) if line.startswith(case.at)]
        assert finding.line in lines, str(finding)
    if case.lane is not None:
        assert finding.lane == case.lane, str(finding)
    if case.kind == "out-of-bounds":
        assert finding.address is not None


# -- a workgroup that does not fill its wave

OTHER_HALF = "v_xor_b32_e32 v2, 32, v0\nv_lshlrev_b32_e32 v2, 2, v2\nds_bpermute_b32 v1, v2, v0\ns_waitcnt lgkmcnt(0)"
BORROWING = {
    "v_mov_b32_dpp v1, v0 wave_ror:1 row_mask:0xf bank_mask:0xf": "wave_ror:1",
    OTHER_HALF: "ds_bpermute_b32",
    "ds_swizzle_b32 v1, v0 offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)": None,
    "v_mov_b32_dpp v1, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf": None,
}
for _text in BORROWING:
    register(_text)


@pytest.mark.parametrize("text", BORROWING)
@pytest.mark.parametrize("threads", [32, 64])
def test_values_of_lanes_that_the_workgroup_lacks(text: str, threads: int) -> None:
    """Code that takes a wave for 64 lanes wide where the workgroup has 32 threads, or reaches over its half of it."""
    from ferryman.backends.simulator.assembly import Kernel, instruction
    from ferryman.backends.simulator.program import Program

    code = [instruction(line, number) for number, line in enumerate([*text.splitlines(), "s_endpgm"], 1)]
    program = Program(Kernel("launched", "gfx942", code, {}, {"group_segment_fixed_size": 0}, {}), "gfx942")
    findings = program.run((2, 1, 1), threads, b"", []).findings
    at = BORROWING[text]
    if threads == 64 or at is None:
        assert not findings, [str(f) for f in findings]
        return
    assert {f.kind for f in findings} == {"wave-width"}, [str(f) for f in findings]
    assert at in findings[0].instruction
    assert findings[0].lane is not None
