"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

from tests.stand_in_cases import named

# groups of 16 places, of a picture's; more samples than a program adds up at a time
TILES = {"group_norm": named("group_norm", "17x40x16 G4", "2x40x8x8 G2")}
