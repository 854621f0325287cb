"""Errors that are planted in the assembly of these kernels: tests/unit/simulator/test_planted.py runs them."""

from __future__ import annotations

from tests.unit.simulator.planted import BF16, BOUNDS, NOTHING, NUMBERS, WAIT, Plant, Subject

SILU = Subject("silu_mul", "triton", BF16, "prime")
SILU_HIP = Subject("silu_mul", "hip.flat", BF16, "prime")

PLANTS = [
    Plant(SILU, "no wait for the gate", r"s_waitcnt vmcnt\(11\)", NOTHING, WAIT),
    Plant(
        SILU,
        "an element too many",
        r"v_cmp_gt_i64_e(\d+) (vcc|s\[\d+:\d+\]), (s\[\d+:\d+\], v\[\d+:\d+\])",
        r"v_cmp_ge_i64_e\1 \2, \3",
        BOUNDS,
        count=8,
    ),
    Plant(
        SILU,
        "one plus left out of the sigmoid",
        r"v_pk_add_f32 (v\[\d+:\d+\]), (v\[\d+:\d+\]), 1.0 op_sel_hi:\[1,0\]",
        r"v_pk_add_f32 \1, \2, 0 op_sel_hi:[1,0]",
        NUMBERS,
    ),
    Plant(
        SILU,
        "rounding to bf16 left out",
        r"v_add3_u32 (v\d+), (v\d+), (v\d+), s\d+",
        r"v_mov_b32_e32 \1, \2",
        NUMBERS,
        count=4,
    ),
    Plant(SILU_HIP, "a wide load eight bytes on", r"(global_load_dwordx2 \S+ \S+ off)", r"\1 offset:8", NUMBERS),
    Plant(SILU_HIP, "no wait for the wide loads", r"s_waitcnt vmcnt\(1\)", NOTHING, WAIT, after="global_load_dwordx2"),
]
