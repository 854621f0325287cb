"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import case


def _norm(rows: int, width: int) -> Case:
    return case("x", rows, width, x=TensorSpec((rows, width)), weight=TensorSpec((width,), fill="weight"))


def _sum(rows: int, width: int) -> Case:
    x = TensorSpec((rows, width))
    return case("x", rows, width, x=x, residual=x, weight=TensorSpec((width,), fill="weight"))


TILES = {
    "rms_norm": tuple(_norm(*s) for s in ((8192, 257), (2048, 1024), (300, 16384))),
    "add_rms_norm": (_sum(1031, 1024),),
}
