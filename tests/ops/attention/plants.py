"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import BF16, F16, NOTHING, NUMBERS, RACE, WAIT, Plant, Subject

ATTENTION_950 = Subject("attention", "triton", BF16, "causal", "mi355x")
ATTENTION = Subject("attention", "triton", BF16, "causal")
BACKWARD = Subject("attention_backward", "triton", F16, "causal")

MASKED = r"\.LBB0_6:"  # in attention, the loop over the tiles that the mask cuts

PLANTS = [
    Plant(
        ATTENTION,
        "a part of q k left out",
        r"v_mfma_f32_32x32x8_bf16 v\[50:65\], .*",
        NOTHING,
        NUMBERS,
        after=MASKED,
        which=3,
    ),
    Plant(
        ATTENTION,
        "rows and columns of q k exchanged",
        r"v_mfma_f32_32x32x8_bf16 (v\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), 0",
        r"v_mfma_f32_32x32x8_bf16 \1, \3, \2, 0",
        NUMBERS,
        after=MASKED,
    ),
    Plant(ATTENTION, "a part of p v left out", r"v_mfma_f32_32x32x8_bf16 .*", NOTHING, NUMBERS, which=-1),
    Plant(
        ATTENTION,
        "p v into the other accumulator",
        r"v_mfma_f32_32x32x8_bf16 v\[18:33\], (.*), v\[18:33\]",
        r"v_mfma_f32_32x32x8_bf16 v[2:17], \1, v[18:33]",
        NUMBERS,
        which=-1,
    ),
    Plant(
        ATTENTION,
        "halves of v exchanged",
        r"v_perm_b32 (v\d+), (v\d+), (v\d+), (s\d+)",
        r"v_perm_b32 \1, \3, \2, \4",
        NUMBERS,
        after=MASKED,
    ),
    Plant(
        ATTENTION,
        "a row's sum of its own lanes only",
        r"ds_bpermute_b32 (v\d+), v\d+, (v\d+)",
        r"v_mov_b32_e32 \1, 0",
        NUMBERS,
        which=-1,
    ),
    Plant(ATTENTION, "no wait for a shuffle", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, which=-1),
    Plant(
        ATTENTION,
        "an LDS write that another key's row takes",
        r"(ds_write_b32 \S+ \S+) offset:256",
        r"\1 offset:384",
        NUMBERS,
        after=MASKED,
    ),
    Plant(ATTENTION, "a key tile read before it is written", r"s_barrier", NOTHING, RACE, after=MASKED, which=1),
    Plant(ATTENTION, "a value tile read before it is written", r"s_barrier", NOTHING, RACE, which=-1),
    Plant(ATTENTION, "no wait for the keys", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT, after=MASKED),
    Plant(ATTENTION, "no wait for the queries", r"s_waitcnt vmcnt\(2\)", NOTHING, WAIT),
    Plant(
        ATTENTION,
        "a key behind the diagonal seen",
        r"v_cmp_lt_i32_e64 (s\[\d+:\d+\], v\d+, v\d+)",
        r"v_cmp_le_i32_e64 \1",
        NUMBERS,
        after=MASKED,
        count=31,
    ),
    Plant(BACKWARD, "a product left out of dq", r"v_mfma_f32_(\S+) .*", NOTHING, NUMBERS, kernel="dq", which=-1),
    Plant(BACKWARD, "a product left out of dk or dv", r"v_mfma_f32_(\S+) .*", NOTHING, NUMBERS, kernel="dkv"),
    Plant(
        BACKWARD,
        "operands of a product exchanged",
        r"v_mfma_f32_16x16x16_f16 (a\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), (a\[\d+:\d+\])",
        r"v_mfma_f32_16x16x16_f16 \1, \3, \2, \4",
        NUMBERS,
        kernel="dkv",
        which=4,
    ),
    Plant(BACKWARD, "a barrier left out", r"s_barrier", NOTHING, RACE, kernel="dq", which=-1),
    Plant(BACKWARD, "another barrier left out", r"s_barrier", NOTHING, RACE, kernel="dkv", which=-2),
    Plant(BACKWARD, "no wait for a tile", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT, kernel="dq", which=-1),
    Plant(
        BACKWARD,
        "an LDS write at the wrong row",
        r"(ds_write2st64_b64 \S+ \S+ \S+) offset1:8",
        r"\1 offset1:9",
        NUMBERS,
        kernel="dkv",
    ),
    Plant(
        ATTENTION_950,
        "a transposed read of another row",
        r"(ds_read_b64_tr_b16 \S+ \S+) offset:7232",
        r"\1 offset:7168",
        NUMBERS,
        which=-1,
    ),
    Plant(
        ATTENTION_950,
        "a plain read for a transposed one",
        r"ds_read_b64_tr_b16 (\S+ \S+) offset:1024",
        r"ds_read_b64 \1 offset:1024",
        NUMBERS,
        which=-1,
    ),
    Plant(ATTENTION_950, "a swap of lanes left out", r"v_permlane32_swap_b32_e32 .*", NOTHING, NUMBERS, which=-1),
    Plant(
        ATTENTION_950,
        "rows of sixteen swapped, not of thirty-two",
        r"v_permlane32_swap_b32_e32 (.*)",
        r"v_permlane16_swap_b32_e32 \1",
        NUMBERS,
        which=-1,
    ),
    Plant(
        ATTENTION_950,
        "a converted pair in the wrong order",
        r"v_cvt_pk_bf16_f32 (v\d+), (v\d+), (v\d+)",
        r"v_cvt_pk_bf16_f32 \1, \3, \2",
        NUMBERS,
        which=-1,
    ),
    Plant(ATTENTION_950, "a part of p v left out", r"v_mfma_f32_32x32x16_bf16 .*", NOTHING, NUMBERS, which=-1),
    Plant(
        ATTENTION_950,
        "a matrix instruction before its values have come",
        r"s_waitcnt lgkmcnt\(4\)",
        NOTHING,
        WAIT,
        which=-1,
    ),
    Plant(ATTENTION_950, "a value tile read before it is written", r"s_barrier", NOTHING, RACE, which=-3),
]
