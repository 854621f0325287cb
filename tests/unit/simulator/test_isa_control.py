"""Branches, loops, the end of a wave, barriers between waves, and instructions that only take time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferryman.errors import SimulationError
from tests.unit.simulator.harness import FULL, LANES, M32, execute, register

LANE = np.arange(LANES, dtype=np.uint32)

#: the branch, and whether it is taken for SCC 1, VCC 2, EXEC full
BRANCHES = {
    "s_branch": (True, True),
    "s_cbranch_scc0": (False, True),
    "s_cbranch_scc1": (True, False),
    "s_cbranch_vccz": (False, True),
    "s_cbranch_vccnz": (True, False),
    "s_cbranch_execz": (False, True),
    "s_cbranch_execnz": (True, False),
}
BRANCH_TEXTS = {
    name: register(f"s_mov_b32 s20, 1\n{name} .LBB0_{i}\ns_mov_b32 s20, 2\n.LBB0_{i}:\ns_mov_b32 s21, 3")
    for i, name in enumerate(BRANCHES)
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    """Once with SCC, VCC and EXEC set, once with all of them zero."""
    for taken, state in zip(
        BRANCHES[name], ({"scc": 1, "vcc": 2, "exec_mask": FULL}, {"scc": 0, "vcc": 0, "exec_mask": 0}), strict=True
    ):
        result = execute(BRANCH_TEXTS[name], **state)
        assert (int(result.s[20]), int(result.s[21])) == (1 if taken else 2, 3), (name, state)


LOOP = register("""
s_mov_b32 s20, 0
.LBB9_1:
v_add_u32_e32 v0, s20, v0
s_add_i32 s20, s20, 1
s_cmp_lt_i32 s20, s21
s_cbranch_scc1 .LBB9_1
v_mov_b32_e32 v1, s20
""")


def test_a_loop_counts() -> None:
    result = execute(LOOP, v={0: LANE}, s={21: 10})
    assert (result.v[0] == LANE + 45).all()
    assert (result.v[1] == 10).all()


DIVERGENT = register("""
v_cmp_gt_u32_e32 vcc, 20, v0
s_and_saveexec_b64 s[20:21], vcc
s_cbranch_execz .LBB8_2
v_mul_u32_u24_e32 v1, v0, v0
.LBB8_2:
s_or_b64 exec, exec, s[20:21]
v_add_u32_e32 v2, 1, v0
""")
PER_LANE_LOOP = register("""
s_mov_b64 s[20:21], exec
.LBB7_1:
v_add_u32_e32 v1, v1, v0
v_subrev_u32_e32 v2, 1, v2
v_cmp_ne_u32_e32 vcc, 0, v2
s_and_b64 exec, exec, vcc
s_cbranch_execnz .LBB7_1
s_mov_b64 exec, s[20:21]
""")


def test_divergence_by_exec() -> None:
    result = execute(DIVERGENT, v={0: LANE, 1: LANE + 100})
    assert (result.v[1] == np.where(LANE < 20, LANE * LANE, LANE + 100)).all()
    assert (result.v[2] == LANE + 1).all()
    assert int(result.exec) == FULL
    trips = LANE % 7 + 1
    result = execute(PER_LANE_LOOP, v={0: LANE, 1: LANE * 0, 2: trips})
    assert (result.v[1] == LANE * trips).all()


WAVES_APART = register("""
v_readfirstlane_b32 s20, v0
s_mov_b32 s22, 0
s_cmp_eq_u32 s20, 0
s_cbranch_scc1 .LBB6_2
.LBB6_1:
s_add_i32 s22, s22, s20
s_sub_i32 s20, s20, 1
s_cmp_lg_u32 s20, 0
s_cbranch_scc1 .LBB6_1
.LBB6_2:
v_mov_b32_e32 v1, s22
""")


def test_waves_take_different_ways() -> None:
    first = np.stack([LANE + w for w in range(5)])
    result = execute(WAVES_APART, waves=5, v={0: first})
    for wave in range(5):
        assert (np.asarray(result.v[1])[wave] == sum(range(wave + 1))).all()


NEIGHBOUR = """
v_lshlrev_b32_e32 v2, 2, v0
ds_write_b32 v2, v1
s_waitcnt lgkmcnt(0)
{barrier}
v_xor_b32_e32 v3, 0x100, v2
ds_read_b32 v4, v3
s_waitcnt lgkmcnt(0)
"""
WITH_BARRIER = register(NEIGHBOUR.format(barrier="s_barrier"))


def test_a_barrier_lets_waves_exchange() -> None:
    """Wave 0 reads what wave 1 wrote, and the other way about."""
    thread = np.arange(2 * LANES, dtype=np.uint32).reshape(2, LANES)
    result = execute(WITH_BARRIER, waves=2, v={0: thread, 1: thread * 3 + 1}, lds=np.zeros(512, np.uint8))
    assert (np.asarray(result.v[4]) == (thread ^ 64) * 3 + 1).all()
    assert not result.findings


QUIET = tuple(
    register(text)
    for text in (
        "s_nop 0",
        "s_nop 15",
        "v_nop",
        "s_setprio 1",
        "s_sleep 1",
        "s_waitcnt vmcnt(3) expcnt(2) lgkmcnt(1)",
        "s_waitcnt vmcnt(63)",
        "s_icache_inv",
        "s_dcache_wb",
        "buffer_wbl2 sc1",
        "buffer_inv sc1",
        "s_sethalt 0",
    )
)


@pytest.mark.parametrize("text", QUIET)
def test_instructions_that_only_take_time(text: str) -> None:
    result = execute(text, v={0: LANE}, s={20: 5}, vcc=3, scc=1, m0=7)
    assert (result.v[0] == LANE).all()
    assert (int(result.s[20]), int(result.vcc), int(result.scc), int(result.m0), int(result.exec)) == (5, 3, 1, 7, FULL)


END = register("s_mov_b32 s20, 1\ns_endpgm\ns_mov_b32 s20, 2")
FOR_EVER = register(".LBB5_1:\ns_nop 0\ns_branch .LBB5_1")
PAIR_CARRY = register("s_add_u32 s20, s22, s24\ns_addc_u32 s21, s23, s25")


def test_the_program_ends_where_it_says() -> None:
    assert int(execute(END).s[20]) == 1


def test_a_loop_without_end_is_an_error_that_says_so() -> None:
    with pytest.raises(SimulationError, match="snippet"):
        execute(FOR_EVER, budget=1000)


def test_a_64_bit_sum_of_two_words() -> None:
    a, b = 0xFFFFFFFF_FFFFFFF0, 0x00000001_00000020
    result = execute(PAIR_CARRY, s={22: a & M32, 23: a >> 32, 24: b & M32, 25: b >> 32})
    assert int(result.s[20]) | int(result.s[21]) << 32 == (a + b) & ((1 << 64) - 1)
    assert int(result.scc) == 1


# -- what an instruction that is not there says


def refusal(text: str, **arguments: Any) -> str:
    from ferryman.backends.simulator import snippet
    from ferryman.errors import FerrymanError

    with pytest.raises(FerrymanError) as caught:
        snippet.execute(text, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["v_frobnicate_b32 v0, v1", "s_nop 0\ns_load_dwordx3 s[0:2], s[4:5], 0x0", "v_add_f32_e32 v0, v1"]
)
def test_a_refusal_names_the_instruction_and_its_line(text: str) -> None:
    message = refusal(text, v={1: LANE})
    last = text.splitlines()[-1]
    assert last.split()[0] in message
    assert f"line {len(text.splitlines())}" in message


def test_an_instruction_of_another_arch_is_refused() -> None:
    assert "v_bitop3_b32" in refusal("v_bitop3_b32 v0, v1, v1, v1 bitop3:0x1", v={1: LANE}, arch="gfx942")
