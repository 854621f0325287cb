"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import (
    BF16,
    BOUNDS,
    F32,
    NOTHING,
    NUMBERS,
    RACE,
    STEP,
    SUM,
    UNSET,
    WAIT,
    Plant,
    Subject,
)

SOFTMAX = Subject("softmax", "triton.rows", F32, "wide")
SOFTMAX_HIP = Subject("softmax", "hip", BF16, "wide")
LOSS = Subject("cross_entropy", "triton", BF16, "wide")

PLANTS = [
    Plant(SOFTMAX, "a step of the sum left out", STEP.format(4), NOTHING, NUMBERS),
    Plant(SOFTMAX, "a step of the sum taken twice", STEP.format(2), r"\1 row_shr:1 \2", NUMBERS),
    Plant(
        SOFTMAX,
        "lane 15 of each row for lane 31",
        r"(v_add_f32_dpp \S+ \S+ \S+) row_bcast:31 (.*)",
        r"\1 row_bcast:15 \2",
        NUMBERS,
    ),
    Plant(
        SOFTMAX,
        "rows left out by the row mask",
        r"(v_mov_b32_dpp \S+ \S+) row_bcast:15 row_mask:0xa (.*)",
        r"\1 row_bcast:15 row_mask:0x2 \2",
        NUMBERS,
        after=SUM,
    ),
    Plant(
        SOFTMAX,
        "a quad permutation that moves nothing",
        r"(v_mov_b32_dpp \S+ \S+) quad_perm:\[1,0,3,2\] (.*)",
        r"\1 quad_perm:[0,1,2,3] \2",
        NUMBERS,
        after=SUM,
    ),
    Plant(
        SOFTMAX,
        "the wrong bank mask",
        r"(v_mov_b32_dpp \S+ \S+) row_shl:4 row_mask:0xf bank_mask:0x5",
        r"\1 row_shl:4 row_mask:0xf bank_mask:0xa",
        NUMBERS,
        after=SUM,
    ),
    Plant(
        SOFTMAX,
        "the wrong lane read",
        r"v_readlane_b32 (s\d+), (v\d+), 63",
        r"v_readlane_b32 \1, \2, 62",
        NUMBERS,
        which=1,
    ),
    Plant(SOFTMAX, "a barrier left out", r"s_barrier", NOTHING, RACE, which=-2),
    Plant(SOFTMAX, "the first barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(SOFTMAX, "no wait for an LDS read", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, which=-1),
    Plant(SOFTMAX, "no wait for a load", r"s_waitcnt vmcnt\(15\)", NOTHING, WAIT),
    Plant(SOFTMAX, "a wait that leaves one load too many", r"s_waitcnt vmcnt\(0\)", "s_waitcnt vmcnt(1)", WAIT),
    Plant(SOFTMAX, "an LDS write one word on", r"(ds_write_b32 \S+ \S+)", r"\1 offset:4", NUMBERS, after=SUM),
    Plant(SOFTMAX, "an LDS read one word on", r"(ds_read_b32 \S+ \S+)", r"\1 offset:4", BOUNDS + UNSET, after=SUM),
    Plant(
        SOFTMAX,
        "half of the waves' sums read",
        r"v_cmp_gt_u32_e64 (s\[\d+:\d+\]), 8, v0",
        r"v_cmp_gt_u32_e64 \1, 4, v0",
        NUMBERS,
    ),
    Plant(
        SOFTMAX,
        "a column too many",
        r"v_cmp_gt_i32_e64 (s\[\d+:\d+\], s8, v\d+)",
        r"v_cmp_ge_i32_e64 \1",
        BOUNDS,
        which=8,
    ),
    Plant(
        SOFTMAX, "a column too few", r"v_cmp_gt_i32_e64 (s\[\d+:\d+\]), s8, v8", r"v_cmp_gt_i32_e64 \1, s6, v8", NUMBERS
    ),
    Plant(
        SOFTMAX,
        "masked columns as zero, not as -inf",
        r"v_mov_b32_e32 (v\d+), 0xff800000",
        r"v_mov_b32_e32 \1, 0",
        NUMBERS,
    ),
    Plant(
        SOFTMAX, "a load one element on", r"(buffer_load_dword \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:4", NUMBERS
    ),
    Plant(
        SOFTMAX, "a store one element on", r"(buffer_store_dword \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:4", NUMBERS
    ),
    Plant(SOFTMAX, "a term added twice", r"v_add_f32_e32 (v\d+), v24, \1", r"v_fma_f32 \1, v24, 2.0, \1", NUMBERS),
    Plant(
        SOFTMAX,
        "the wrong constant for log2 e",
        r"v_mul_f32_e32 (v\d+), 0x3fb8aa3b, (v\d+)",
        r"v_mul_f32_e32 \1, 0x3fb80000, \2",
        NUMBERS,
    ),
    Plant(
        SOFTMAX_HIP,
        "a shuffle's address that is off by a lane",
        r"(ds_bpermute_b32 \S+ \S+ \S+)",
        r"\1 offset:4",
        NUMBERS,
        which=6,
    ),
    Plant(SOFTMAX_HIP, "no wait for a shuffle", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, after="ds_bpermute"),
    Plant(SOFTMAX_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(SOFTMAX_HIP, "no wait for the loads", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT),
    Plant(
        SOFTMAX_HIP,
        "a load at the wrong offset",
        r"(global_load_ushort \S+ \S+ off) offset:640",
        r"\1 offset:642",
        NUMBERS,
    ),
    Plant(SOFTMAX_HIP, "EXEC not restored after a load", r"s_or_b64 exec, exec, s\[36:37\]", NOTHING, NUMBERS),
    Plant(
        LOSS,
        "a step of the maximum left out",
        r"(v_mov_b32_dpp \S+ \S+) quad_perm:\[2,3,0,1\] (.*)",
        r"\1 quad_perm:[0,1,2,3] \2",
        NUMBERS,
        kernel="^_loss",
        which=-1,
    ),
    Plant(LOSS, "rows of other lanes in the mean", STEP.format(2), r"\1 row_shl:2 \2", NUMBERS, kernel="_mean"),
    Plant(LOSS, "a barrier left out of the mean", r"s_barrier", NOTHING, RACE, kernel="_mean"),
]
