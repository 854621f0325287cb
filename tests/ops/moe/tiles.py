"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

import dataclasses

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import named


def _biased(case: Case) -> Case:
    """With a bias, whose gradient is summed by a kernel whose tiles follow the number of experts."""
    experts, outputs, width = case.args["gate_up"].shape
    bias = TensorSpec((experts, outputs + width))
    return dataclasses.replace(case, name=f"{case.name} biased", args={**case.args, "bias": bias})


_LAYERS = (  # few, some and many rows for each expert
    *("300 E8 k2 H128 I64", "100 E8 k2 H256 I64", "1100 E128 k8 H128 I64", "400 E128 k8 H128 I64"),
    *("2200 E256 k8 H128 I64", "32 E256 k8 H128 I64", "800 E256 k8 H128 I64"),
)
_BIASED = ("9 E8 k2 H32 I16", "9 E128 k8 H32 I16", "9 E256 k8 H32 I16")
TILES = {
    "grouped_linear": named("grouped_linear", "64 E256 128x64"),
    "moe_experts": (*named("moe_experts", *_LAYERS), *map(_biased, named("moe_experts", *_BIASED))),
}
