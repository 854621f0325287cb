"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import BF16, BOUNDS, F16, NOTHING, NUMBERS, RACE, WAIT, Plant, Subject

LINEAR = Subject("linear", "triton", F16, "ragged")
LINEAR_BF16 = Subject("linear", "triton", BF16, "tile_edge")

PLANTS = [
    Plant(
        LINEAR,
        "the rows of A and the columns of B exchanged",
        r"v_mfma_f32_16x16x16_f16 (v\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\]), (v\[\d+:\d+\])",
        r"v_mfma_f32_16x16x16_f16 \1, \3, \2, \4",
        NUMBERS,
    ),
    Plant(LINEAR, "a part of the depth left out", r"v_mfma_f32_16x16x16_f16 .*", NOTHING, NUMBERS, which=2),
    Plant(
        LINEAR,
        "an accumulator that begins anew",
        r"v_mfma_f32_16x16x16_f16 (\S+) (\S+) (\S+) v\[2:5\]",
        r"v_mfma_f32_16x16x16_f16 \1 \2 \3 0",
        NUMBERS,
    ),
    Plant(
        LINEAR,
        "results in the wrong rows",
        r"v_mfma_f32_16x16x16_f16 v\[2:5\], (\S+) (\S+) v\[2:5\]",
        r"v_mfma_f32_16x16x16_f16 v[6:9], \1 \2 v[2:5]",
        NUMBERS,
        which=1,
    ),
    Plant(LINEAR, "bf16 arithmetic on f16", r"v_mfma_f32_16x16x16_f16 (.*)", r"v_mfma_f32_16x16x16_bf16 \1", NUMBERS),
    Plant(LINEAR, "an LDS write at the wrong row", r"(ds_write_b16 \S+ \S+) offset:1024", r"\1 offset:1040", NUMBERS),
    Plant(
        LINEAR,
        "an LDS read in the wrong stride",
        r"ds_read2st64_b64 (\S+) (\S+) offset1:4",
        r"ds_read2st64_b64 \1 \2 offset1:5",
        NUMBERS,
    ),
    Plant(LINEAR, "a barrier before the tile is read left out", r"s_barrier", NOTHING, RACE, which=1),
    Plant(LINEAR, "a barrier before the tile is written again left out", r"s_barrier", NOTHING, RACE, which=0),
    Plant(LINEAR, "no wait for a tile's load", r"s_waitcnt vmcnt\(11\)", NOTHING, WAIT),
    Plant(LINEAR, "a matrix instruction before its LDS read has come", r"s_waitcnt lgkmcnt\(1\)", NOTHING, WAIT),
    Plant(LINEAR, "one loop too few", r"s_cmp_lt_i32 (s\d+), 1", r"s_cmp_lt_i32 \1, 1000", NUMBERS),
    Plant(
        LINEAR,
        "the bias of the next column",
        r"(buffer_load_ushort \S+ \S+ \S+) 0 offen",
        r"\1 0 offen offset:2",
        NUMBERS,
        after="v_mfma",
    ),
    Plant(
        LINEAR_BF16,
        "bf16 truncated, not rounded",
        r"v_add3_u32 (v\d+), (v\d+), (v\d+), s\d+",
        r"v_mov_b32_e32 \1, \2",
        NUMBERS,
    ),
    Plant(
        LINEAR_BF16,
        "the wrong half of the rounded result",
        r"(v_cndmask_b32_sdwa .*) src1_sel:WORD_1",
        r"\1 src1_sel:WORD_0",
        NUMBERS,
    ),
    Plant(LINEAR_BF16, "a row too many", r"v_cmp_gt_i32_e64 (s\[\d+:\d+\], s8, v1)", r"v_cmp_ge_i32_e64 \1", BOUNDS),
]
