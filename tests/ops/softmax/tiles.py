"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import case

_SHORT = 2**17  # rows of 128: a block of four warps takes several


def _rows(rows: int, width: int) -> Case:
    return case("x", rows, width, x=TensorSpec((rows, width)))


def _loss(rows: int, width: int) -> Case:
    target = TensorSpec((rows,), dtype="int64", high=width)
    return case("logits", rows, width, logits=TensorSpec((rows, width)), target=target)


TILES = {
    "softmax": tuple(_rows(*s) for s in ((_SHORT, 128), (1031, 1000), (300, 32000))),
    "cross_entropy": tuple(_loss(*s) for s in ((_SHORT, 128), (1031, 1000), (1031, 1031))),
}
