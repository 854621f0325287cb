"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import TensorSpec
from tests.stand_in_cases import case

_GAPS = TensorSpec((61, 257), layout="rows")
TILES = {"bias_act": (case("x", 61, 257, x=_GAPS, bias=None, activation="silu", alpha=None),)}
