"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from tests.stand_in_cases import named

_LAYERS = (  # few, some and many rows for each expert
    *("300 E8 k2 H128 I64", "100 E8 k2 H256 I64", "1100 E128 k8 H128 I64", "400 E128 k8 H128 I64"),
    *("2200 E256 k8 H128 I64", "32 E256 k8 H128 I64", "800 E256 k8 H128 I64"),
)
TILES = {
    "grouped_linear": named("grouped_linear", "64 E256 128x64"),
    "moe_experts": named("moe_experts", *_LAYERS),
}
