"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from ferryman.ops.primitive import Case, TensorSpec
from tests.stand_in_cases import case


def _rope(batch: int, heads: int, k_heads: int, tokens: int, dim: int) -> Case:
    angles = TensorSpec((1, tokens, dim), fill="unit")
    return case(
        "q",
        batch,
        heads,
        tokens,
        dim,
        q=TensorSpec((batch, heads, tokens, dim), layout="heads"),
        k=TensorSpec((batch, k_heads, tokens, dim), layout="heads"),
        cos=angles,
        sin=angles,
        interleaved=False,
    )


TILES = {"rope": (_rope(32, 32, 8, 1, 128),)}
