"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import TensorSpec
from tests.stand_in_cases import case

TILES = {
    "causal_conv1d": (  # runs of positions, 64 beside each other
        case(
            "x",
            *(2, 37, 80),
            x=TensorSpec((2, 37, 80)),
            weight=TensorSpec((37, 4)),
            bias=None,
            initial_state=None,
            activation="silu",
        ),
    )
}
