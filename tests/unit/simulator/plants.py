"""The errors that are planted. Each line: the kernel, what is wrong, the edit, and what must find it."""

from __future__ import annotations

import torch

from tests.unit.simulator.planted import Plant, Subject

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NUMBERS, RACE, WAIT, BOUNDS, UNSET = "numbers", ("race",), ("missing-wait",), ("out-of-bounds",), ("uninitialised",)

SOFTMAX, SOFTMAX_HIP = Subject("softmax", "triton", F32, "wide"), Subject("softmax", "hip", BF16, "wide")
RMS, RMS_HIP = Subject("rms_norm", "triton", BF16, "wide"), Subject("rms_norm", "hip", F16, "wide")
LAYER, LAYER_HIP = Subject("layer_norm", "triton", F16, "wide"), Subject("layer_norm", "hip", F32, "wide")
SILU, SILU_HIP = Subject("silu_mul", "triton", BF16, "prime"), Subject("silu_mul", "hip", BF16, "prime")
ROPE, LOSS = Subject("rope", "triton", F32, "d64"), Subject("cross_entropy", "triton", BF16, "wide")
LINEAR, LINEAR_BF16 = Subject("linear", "triton", F16, "ragged"), Subject("linear", "triton", BF16, "tile_edge")
ATTENTION, BACKWARD = (
    Subject("attention", "triton", BF16, "causal"),
    Subject("attention_backward", "triton", F16, "causal"),
)

SUBJECTS = (
    SOFTMAX, SOFTMAX_HIP, RMS, RMS_HIP, LAYER, LAYER_HIP, SILU, SILU_HIP, ROPE, LOSS, LINEAR, LINEAR_BF16, ATTENTION,
        BACKWARD,
)  # fmt: skip

NOTHING = "s_nop 0"
SUM = r"v_add_f32_dpp"  # the first line of a sum over a wave
STEP = r"(v_add_f32_dpp v\d+, v\d+, v\d+) row_shr:{} (.*)"
MASKED = r"s_cbranch_scc0 \.LBB0_2"  # in attention, the end of the loop over whole tiles

PLANTS = [
    # -- softmax: DPP reductions, LDS between the waves
    Plant(SOFTMAX, "a step of the sum left out", STEP.format(4), NOTHING, NUMBERS),
    Plant(SOFTMAX, "a step of the sum taken twice", STEP.format(2), r"\1 row_shr:1 \2", NUMBERS),
    Plant(SOFTMAX, "lane 15 of each row for lane 31", r"(v_add_f32_dpp \S+ \S+ \S+) row_bcast:31 (.*)",
        r"\1 row_bcast:15 \2", NUMBERS),
    Plant(SOFTMAX, "rows left out by the row mask", r"(v_mov_b32_dpp \S+ \S+) row_bcast:15 row_mask:0xa (.*)",
        r"\1 row_bcast:15 row_mask:0x2 \2", NUMBERS, after=SUM),
    Plant(SOFTMAX, "a quad permutation that moves nothing", r"(v_mov_b32_dpp \S+ \S+) quad_perm:\[1,0,3,2\] (.*)",
        r"\1 quad_perm:[0,1,2,3] \2", NUMBERS, after=SUM),
    Plant(SOFTMAX, "the wrong bank mask", r"(v_mov_b32_dpp \S+ \S+) row_shl:4 row_mask:0xf bank_mask:0x5",
        r"\1 row_shl:4 row_mask:0xf bank_mask:0xa", NUMBERS, after=SUM),
    Plant(SOFTMAX, "the wrong lane read", r"v_readlane_b32 (s\d+), (v\d+), 63", r"v_readlane_b32 \1, \2, 62", NUMBERS,
        which=1),
    Plant(SOFTMAX, "a barrier left out", r"s_barrier", NOTHING, RACE, which=-2),
    Plant(SOFTMAX, "the first barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(SOFTMAX, "no wait for an LDS read", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, which=-1),
    Plant(SOFTMAX, "no wait for a load", r"s_waitcnt vmcnt\(15\)", NOTHING, WAIT),
    Plant(SOFTMAX, "a wait that leaves one load too many", r"s_waitcnt vmcnt\(0\)", "s_waitcnt vmcnt(1)", WAIT),
    Plant(SOFTMAX, "an LDS write one word on", r"(ds_write_b32 \S+ \S+)", r"\1 offset:4", NUMBERS, after=SUM),
    Plant(SOFTMAX, "an LDS read one word on", r"(ds_read_b32 \S+ \S+)", r"\1 offset:4", BOUNDS + UNSET, after=SUM),
    Plant(SOFTMAX, "half of the waves' sums read", r"v_cmp_gt_u32_e64 (s\[\d+:\d+\]), 8, v0",
        r"v_cmp_gt_u32_e64 \1, 4, v0", NUMBERS),
    Plant(SOFTMAX, "a column too many", r"v_cmp_gt_i32_e64 (s\[\d+:\d+\], s8, v\d+)", r"v_cmp_ge_i32_e64 \1", BOUNDS,
        which=8),
    Plant(SOFTMAX, "a column too few", r"v_cmp_gt_i32_e64 (s\[\d+:\d+\]), s8, v8", r"v_cmp_gt_i32_e64 \1, s6, v8",
        NUMBERS),
    Plant(SOFTMAX, "masked columns as zero, not as -inf", r"v_mov_b32_e32 (v\d+), 0xff800000", r"v_mov_b32_e32 \1, 0",
        NUMBERS),
    Plant(SOFTMAX, "a load one element on", r"(buffer_load_dword \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:4",
        NUMBERS),
    Plant(SOFTMAX, "a store one element on", r"(buffer_store_dword \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:4",
        NUMBERS),
    Plant(SOFTMAX, "a term added twice", r"v_add_f32_e32 (v\d+), v24, \1", r"v_fma_f32 \1, v24, 2.0, \1", NUMBERS),
    Plant(SOFTMAX, "the wrong constant for log2 e", r"v_mul_f32_e32 (v\d+), 0x3fb8aa3b, (v\d+)",
        r"v_mul_f32_e32 \1, 0x3fb80000, \2", NUMBERS),
    Plant(SOFTMAX_HIP, "a shuffle's address that is off by a lane", r"(ds_bpermute_b32 \S+ \S+ \S+)", r"\1 offset:4",
        NUMBERS, which=6),
    Plant(SOFTMAX_HIP, "no wait for a shuffle", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, after="ds_bpermute"),
    Plant(SOFTMAX_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(SOFTMAX_HIP, "no wait for the loads", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT),
    Plant(SOFTMAX_HIP, "a load at the wrong offset", r"(global_load_ushort \S+ \S+ off) offset:640", r"\1 offset:642",
        NUMBERS),
    Plant(SOFTMAX_HIP, "EXEC not restored after a load", r"s_or_b64 exec, exec, s\[36:37\]", NOTHING, NUMBERS),
    # -- norms
    Plant(RMS, "a step of the sum left out", STEP.format(1), NOTHING, NUMBERS),
    Plant(RMS, "a sum that begins with the wrong lanes", STEP.format(8), r"\1 row_shl:8 \2", NUMBERS),
    Plant(RMS, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(RMS, "the last barrier left out", r"s_barrier", NOTHING, RACE, which=1),
    Plant(RMS, "no wait for a weight", r"s_waitcnt vmcnt\(17\)", NOTHING, WAIT),
    Plant(RMS, "a constant for the reciprocal square root", r"v_rsq_f32_e32 (v\d+), (v\d+)", r"v_mov_b32_e32 \1, 4.0",
        NUMBERS),
    Plant(RMS, "the count of columns off by one", r"v_cvt_f32_i32_e32 (v\d+), s11", r"v_cvt_f32_i32_e32 \1, s10",
        NUMBERS),
    Plant(RMS_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(RMS_HIP, "a shuffle's result used at once", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, after="ds_bpermute",
        which=2),
    Plant(RMS_HIP, "a sum that a lane adds to itself", r"ds_bpermute_b32 (v\d+), v\d+, (v\d+)", r"v_mov_b32_e32 \1, \2",
        NUMBERS, which=3),
    Plant(LAYER, "a step of the mean left out", STEP.format(8), NOTHING, NUMBERS),
    Plant(LAYER, "a step of the variance left out", STEP.format(4), NOTHING, NUMBERS, which=1),
    Plant(LAYER, "a barrier left out", r"s_barrier", NOTHING, RACE, which=2),
    Plant(LAYER, "results rounded toward zero", r"v_cvt_f16_f32_e32 (v\d+), (v\d+)", r"v_cvt_pkrtz_f16_f32 \1, \2, 0",
        NUMBERS, count=8),
    Plant(LAYER_HIP, "an LDS write one word on", r"(ds_write_b32 \S+ \S+)", r"\1 offset:4", UNSET),
    Plant(LAYER_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(LAYER_HIP, "no wait for the loads", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT),
    # -- elementwise
    Plant(SILU, "no wait for the gate", r"s_waitcnt vmcnt\(11\)", NOTHING, WAIT),
    Plant(SILU, "an element too many", r"v_cmp_gt_i64_e(\d+) (vcc|s\[\d+:\d+\]), (s\[\d+:\d+\], v\[\d+:\d+\])",
        r"v_cmp_ge_i64_e\1 \2, \3", BOUNDS, count=8),
    Plant(SILU, "one plus left out of the sigmoid",
        r"v_pk_add_f32 (v\[\d+:\d+\]), (v\[\d+:\d+\]), 1.0 op_sel_hi:\[1,0\]",
        r"v_pk_add_f32 \1, \2, 0 op_sel_hi:[1,0]", NUMBERS),
    Plant(SILU, "rounding to bf16 left out", r"v_add3_u32 (v\d+), (v\d+), (v\d+), s\d+", r"v_mov_b32_e32 \1, \2",
        NUMBERS, count=4),
    Plant(SILU_HIP, "a wide load eight bytes on", r"(global_load_dwordx4 \S+ \S+ off)", r"\1 offset:8", NUMBERS),
    Plant(SILU_HIP, "no wait for the wide loads", r"s_waitcnt vmcnt\(1\)", NOTHING, WAIT, after="global_load_dwordx4"),
    Plant(ROPE, "a sign of the rotation", r"(v_pk_fma_f32 .*) neg_lo:\[0,0,1\] neg_hi:\[0,0,1\]", r"\1", NUMBERS),
    Plant(ROPE, "the upper halves twice", r"v_pk_mul_f32 (v\[0:1\], v\[\d+:\d+\], v\[\d+:\d+\])",
        r"v_pk_mul_f32 \1 op_sel:[1,1]", NUMBERS),
    Plant(ROPE, "no wait for the cosines", r"s_waitcnt vmcnt\(1\)", NOTHING, WAIT),
    Plant(ROPE, "a store into the other half", r"(buffer_store_dwordx2 \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:8",
        NUMBERS),
    Plant(LOSS, "a step of the maximum left out", r"(v_mov_b32_dpp \S+ \S+) quad_perm:\[2,3,0,1\] (.*)",
        r"\1 quad_perm:[0,1,2,3] \2", NUMBERS, kernel="^_loss", which=-1),
    Plant(LOSS, "rows of other lanes in the mean", STEP.format(2), r"\1 row_shl:2 \2", NUMBERS, kernel="_mean"),
    Plant(LOSS, "a barrier left out of the mean", r"s_barrier", NOTHING, RACE, kernel="_mean"),
    # -- matrices
    Plant(LINEAR, "the rows of A and the columns of B exchanged",
        r"v_mfma_f32_16x16x16_f16 (v\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\])",
        r"v_mfma_f32_16x16x16_f16 \1, \3, \2, \4", NUMBERS),
    Plant(LINEAR, "a part of the depth left out", r"v_mfma_f32_16x16x16_f16 .*", NOTHING, NUMBERS, which=2),
    Plant(LINEAR, "an accumulator that begins anew", r"v_mfma_f32_16x16x16_f16 (\S+) (\S+) (\S+) v\[2:5\]",
        r"v_mfma_f32_16x16x16_f16 \1 \2 \3 0", NUMBERS),
    Plant(LINEAR, "results in the wrong rows", r"v_mfma_f32_16x16x16_f16 v\[2:5\], (\S+) (\S+) v\[2:5\]",
        r"v_mfma_f32_16x16x16_f16 v[6:9], \1 \2 v[2:5]", NUMBERS, which=1),
    Plant(LINEAR, "bf16 arithmetic on f16", r"v_mfma_f32_16x16x16_f16 (.*)", r"v_mfma_f32_16x16x16_bf16 \1", NUMBERS),
    Plant(LINEAR, "an LDS write at the wrong row", r"(ds_write_b16 \S+ \S+) offset:1024", r"\1 offset:1040", NUMBERS),
    Plant(LINEAR, "an LDS read in the wrong stride", r"ds_read2st64_b64 (\S+) (\S+) offset1:4",
        r"ds_read2st64_b64 \1 \2 offset1:5", NUMBERS),
    Plant(LINEAR, "a barrier before the tile is read left out", r"s_barrier", NOTHING, RACE, which=1),
    Plant(LINEAR, "a barrier before the tile is written again left out", r"s_barrier", NOTHING, RACE, which=0),
    Plant(LINEAR, "no wait for a tile's load", r"s_waitcnt vmcnt\(11\)", NOTHING, WAIT),
    Plant(LINEAR, "a matrix instruction before its LDS read has come", r"s_waitcnt lgkmcnt\(1\)", NOTHING, WAIT),
    Plant(LINEAR, "one loop too few", r"s_cmp_lt_i32 (s\d+), 1", r"s_cmp_lt_i32 \1, 1000", NUMBERS),
    Plant(LINEAR, "the bias of the next column", r"(buffer_load_ushort \S+ \S+ \S+) 0 offen", r"\1 0 offen offset:2",
        NUMBERS, after="v_mfma"),
    Plant(LINEAR_BF16, "bf16 truncated, not rounded", r"v_add3_u32 (v\d+), (v\d+), (v\d+), s\d+",
        r"v_mov_b32_e32 \1, \2", NUMBERS),
    Plant(LINEAR_BF16, "the wrong half of the rounded result", r"(v_cndmask_b32_sdwa .*) src1_sel:WORD_1",
        r"\1 src1_sel:WORD_0", NUMBERS),
    Plant(LINEAR_BF16, "a row too many", r"v_cmp_gt_i32_e64 (s\[\d+:\d+\], s8, v1)", r"v_cmp_ge_i32_e64 \1", BOUNDS),
    # -- attention: the second loop is the one for tiles that the mask cuts
    Plant(ATTENTION, "a part of q k left out", r"v_mfma_f32_32x32x8_bf16 a\[0:15\], .*", NOTHING, NUMBERS, after=MASKED,
        which=3),
    Plant(ATTENTION, "rows and columns of q k exchanged",
        r"v_mfma_f32_32x32x8_bf16 (a\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), 0",
        r"v_mfma_f32_32x32x8_bf16 \1, \3, \2, 0", NUMBERS, after=MASKED),
    Plant(ATTENTION, "a part of p v left out", r"v_mfma_f32_32x32x8_bf16 .*", NOTHING, NUMBERS, which=-1),
    Plant(ATTENTION, "p v into the other accumulator", r"v_mfma_f32_32x32x8_bf16 a\[16:31\], (.*), a\[16:31\]",
        r"v_mfma_f32_32x32x8_bf16 a[0:15], \1, a[16:31]", NUMBERS, which=-1),
    Plant(ATTENTION, "halves of v exchanged", r"v_perm_b32 (v\d+), (v\d+), (v\d+), (s\d+)",
        r"v_perm_b32 \1, \3, \2, \4", NUMBERS, after=MASKED),
    Plant(ATTENTION, "a row's sum of its own lanes only", r"ds_bpermute_b32 (v\d+), v\d+, (v\d+)",
        r"v_mov_b32_e32 \1, 0", NUMBERS, which=-1),
    Plant(ATTENTION, "no wait for a shuffle", r"s_waitcnt lgkmcnt\(0\)", NOTHING, WAIT, which=-1),
    Plant(ATTENTION, "an LDS write that another key's row takes", r"(ds_write_b32 \S+ \S+) offset:256",
        r"\1 offset:384", NUMBERS, after=MASKED),
    Plant(ATTENTION, "a key tile read before it is written", r"s_barrier", NOTHING, RACE, after=MASKED, which=1),
    Plant(ATTENTION, "a value tile read before it is written", r"s_barrier", NOTHING, RACE, which=-1),
    Plant(ATTENTION, "no wait for the keys", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT, after=MASKED),
    Plant(ATTENTION, "no wait for the queries", r"s_waitcnt vmcnt\(2\)", NOTHING, WAIT),
    Plant(ATTENTION, "the diagonal hidden", r"v_cmp_le_i32_e64 (s\[\d+:\d+\], v\d+, v\d+)", r"v_cmp_lt_i32_e64 \1",
        NUMBERS, after=MASKED, count=32),
    Plant(BACKWARD, "a product left out of dq", r"v_mfma_f32_(\S+) .*", NOTHING, NUMBERS, kernel="dq", which=-1),
    Plant(BACKWARD, "a product left out of dk or dv", r"v_mfma_f32_(\S+) .*", NOTHING, NUMBERS, kernel="dkv"),
    Plant(BACKWARD, "operands of a product exchanged",
        r"v_mfma_f32_32x32x8_f16 (a\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), (a\[\d+:\d+\])",
        r"v_mfma_f32_32x32x8_f16 \1, \3, \2, \4", NUMBERS, kernel="dkv", which=4),
    Plant(BACKWARD, "a barrier left out", r"s_barrier", NOTHING, RACE, kernel="dq", which=-1),
    Plant(BACKWARD, "another barrier left out", r"s_barrier", NOTHING, RACE, kernel="dkv", which=-2),
    Plant(BACKWARD, "no wait for a tile", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT, kernel="dq", which=-1),
    Plant(BACKWARD, "an LDS write at the wrong row", r"(ds_write_b16 \S+ \S+) offset:1024", r"\1 offset:1152", NUMBERS,
        kernel="dkv"),
]  # fmt: skip
