"""Triton's tiles of products, by each target's own limits."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

from ferryman.backends.base import Target
from ferryman.ops.matmul import triton_kernels as linear
from tests.unit.test_triton_compile import TARGETS


def tiles(target: Target) -> list[tuple[str, int, int]]:
    rows = []
    for itemsize, precision in ((2, "ieee"), (4, "ieee")):
        for m in (1, 60, 8192):
            for n in (64, 4096, 14336, 128256):
                for _ in range(2):  # as found first, and as kept
                    tile = linear._tile(target, itemsize, precision, m, n)
                    shared = linear._shared_bytes(tile, target.vendor, itemsize)
                    rows.append((repr(tile), shared, tile.warps * target.wave))
    return rows


def test_linear_chooses_no_tile_that_cannot_run() -> None:
    """By each target's own limits, and by those of a device that has less than its family."""
    less = [
        dataclasses.replace(TARGETS["sm_90"], shared_memory=100_000),
        dataclasses.replace(TARGETS["sm_80"], shared_memory=50_000),
        dataclasses.replace(TARGETS["gfx942"], shared_memory=32_768, max_threads=256),
        dataclasses.replace(TARGETS["gfx950"], shared_memory=49_152),
    ]
    tables = [tiles(target) for target in [*TARGETS.values(), *less]]
    assert len(tables) == 13
    for target, rows in zip([*TARGETS.values(), *less], tables, strict=True):
        assert len(rows) == 2 * 3 * 4 * 2
        for chosen, shared, threads in rows:
            assert shared <= target.shared_memory and threads <= target.max_threads, (target, chosen)
    # the families' own tables lose nothing on a whole card, and the large tiles on a part of one
    most = {name: max(shared for _, shared, _ in rows) for name, rows in zip(TARGETS, tables, strict=False)}
    assert most["sm_90"] > 163_840 and most["gfx942"] > 32_768 and most["gfx950"] > 49_152, most
