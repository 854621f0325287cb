"""Triton's tiles of norms, by each target's own limits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ferryman.backends import triton_rows
from ferryman.ops.norm import triton_kernels as norm
from tests.unit.test_triton_compile import TARGETS

ITEMS = ((2, 1), (2, 2), (4, 2))  # bytes of an element, arrays that a program holds


def test_short_rows_of_norms_take_two_warps_on_nvidia() -> None:
    short = [(width, itemsize, 1 << 16, 0, arrays) for width in (128, 200, 512) for itemsize, arrays in ITEMS]
    short += [(1024, 2, 1 << 16, 0, arrays) for arrays in (1, 2)]
    # long rows, few rows, rows far apart
    others = [(2048, 2, 1 << 16, 0, 1), (128, 2, 16, 0, 1), (128, 2, 1 << 20, 1 << 27, 1)]
    chosen = {arch: [norm.tile_of(TARGETS[arch], *call) for call in [*short, *others]] for arch in ("sm_90", "gfx942")}
    for call, (rows, block, warps, _) in zip(short, chosen["sm_90"], strict=False):
        assert warps == 2 and rows * block == (1024 if call[1] == 2 else 512), call
    plain = {arch: [triton_rows.row_tile(TARGETS[arch], *call) for call in [*short, *others]] for arch in chosen}
    assert chosen["gfx942"] == plain["gfx942"] and chosen["sm_90"][-3:] == plain["sm_90"][-3:]
