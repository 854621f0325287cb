"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import case


def _linear(rows: int, inputs: int, outputs: int) -> Case:
    return case(
        "x", rows, inputs, "weight", outputs, x=TensorSpec((rows, inputs)), weight=TensorSpec((outputs, inputs))
    )


TILES = {"linear": (_linear(16, 512, 8192),)}
