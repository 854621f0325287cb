"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import BF16, F32, NOTHING, NUMBERS, WAIT, Plant, Subject

ROPE_HIP = Subject("rope", "hip", BF16, "d64")
ROPE = Subject("rope", "triton", F32, "d64")

PLANTS = [
    Plant(ROPE, "a sign of the rotation", r"(v_pk_fma_f32 .*) neg_lo:\[0,0,1\] neg_hi:\[0,0,1\]", r"\1", NUMBERS),
    Plant(
        ROPE,
        "the upper halves twice",
        r"v_pk_mul_f32 (v\[0:1\], v\[\d+:\d+\], v\[\d+:\d+\])",
        r"v_pk_mul_f32 \1 op_sel:[1,1]",
        NUMBERS,
    ),
    Plant(ROPE, "no wait for the cosines", r"s_waitcnt vmcnt\(1\)", NOTHING, WAIT),
    Plant(
        ROPE,
        "a store into the other half",
        r"(buffer_store_dwordx2 \S+ \S+ \S+) 0 offen",
        r"\1 0 offen offset:8",
        NUMBERS,
    ),
    Plant(ROPE_HIP, "a wide load sixteen bytes on", r"(global_load_dwordx4 \S+ \S+ off)", r"\1 offset:16", NUMBERS),
    Plant(ROPE_HIP, "no wait for the wide loads", r"s_waitcnt vmcnt\(1\)", NOTHING, WAIT),
    Plant(
        ROPE_HIP, "a store at the wrong place", r"(global_store_dwordx4 \S+ \S+ off)", r"\1 offset:16", NUMBERS, count=4
    ),
]
