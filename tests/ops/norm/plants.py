"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import BF16, F16, F32, NOTHING, NUMBERS, RACE, STEP, UNSET, WAIT, Plant, Subject

RMS = Subject("rms_norm", "triton", BF16, "wide")
RMS_HIP = Subject("rms_norm", "hip", F16, "wide")
LAYER = Subject("layer_norm", "triton", F16, "wide")
LAYER_HIP = Subject("layer_norm", "hip", F32, "wide")

PLANTS = [
    Plant(RMS, "a step of the sum left out", STEP.format(1), NOTHING, NUMBERS),
    Plant(RMS, "a sum that begins with the wrong lanes", STEP.format(8), r"\1 row_shl:8 \2", NUMBERS),
    Plant(RMS, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(RMS, "the last barrier left out", r"s_barrier", NOTHING, RACE, which=1),
    Plant(RMS, "no wait for a weight", r"s_waitcnt vmcnt\(17\)", NOTHING, WAIT),
    Plant(
        RMS,
        "a constant for the reciprocal square root",
        r"v_rsq_f32_e32 (v\d+), (v\d+)",
        r"v_mov_b32_e32 \1, 4.0",
        NUMBERS,
    ),
    Plant(
        RMS, "the count of columns off by one", r"v_cvt_f32_i32_e32 (v\d+), s11", r"v_cvt_f32_i32_e32 \1, s10", NUMBERS
    ),
    Plant(RMS_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(
        RMS_HIP,
        "a shuffle's result used at once",
        r"s_waitcnt lgkmcnt\(0\)",
        NOTHING,
        WAIT,
        after="ds_bpermute",
        which=2,
    ),
    Plant(
        RMS_HIP,
        "a sum that a lane adds to itself",
        r"ds_bpermute_b32 (v\d+), v\d+, (v\d+)",
        r"v_mov_b32_e32 \1, \2",
        NUMBERS,
        which=3,
    ),
    Plant(LAYER, "a step of the mean left out", STEP.format(8), NOTHING, NUMBERS),
    Plant(LAYER, "a step of the variance left out", STEP.format(4), NOTHING, NUMBERS, which=1),
    Plant(LAYER, "a barrier left out", r"s_barrier", NOTHING, RACE, which=2),
    Plant(
        LAYER,
        "results rounded toward zero",
        r"v_cvt_f16_f32_e32 (v\d+), (v\d+)",
        r"v_cvt_pkrtz_f16_f32 \1, \2, 0",
        NUMBERS,
        count=8,
    ),
    Plant(LAYER_HIP, "an LDS write one word on", r"(ds_write_b32 \S+ \S+)", r"\1 offset:4", UNSET),
    Plant(LAYER_HIP, "a barrier left out", r"s_barrier", NOTHING, RACE),
    Plant(LAYER_HIP, "no wait for the loads", r"s_waitcnt vmcnt\(0\)", NOTHING, WAIT),
]
