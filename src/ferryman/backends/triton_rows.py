"""How Triton's row-wise kernels lay rows out over programs: strides and tiles. Host side, without triton."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ferryman.backends.base import Target


def collapse_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """``x`` as rows of its last dimension: (tensor, number of rows, elements from one row to the next).

    The tensor is ``x`` itself where one stride describes all its rows and the last dimension is dense; else a copy.
    """
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if x.is_contiguous():
        return x, rows, width
    stride: int | None = None
    if x.stride(-1) == 1 or width <= 1:
        expected = 0
        for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
            if size == 1:
                continue
            if stride is None:
                stride, expected = step, step
            elif step != expected:
                break
            expected *= size
        else:
            return x, rows, width if stride is None else stride
    return x.contiguous(), rows, width


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """What `collapse_rows` says of ``x``'s rows, without a copy: their number, and elements from one to the next."""
    without_data = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return collapse_rows(without_data)[1:]


def lanes(target: Target) -> int:
    """Lanes of a warp, for sizing tiles; a CPU target, which is interpreted, is given a warp's worth too."""
    return max(target.wave, 32)


class RowTile(NamedTuple):
    """How a program covers whole rows: ``rows`` x ``block`` elements on ``warps``; ``fits`` if registers hold them."""

    rows: int
    block: int
    warps: int
    fits: bool


def row_tile(target: Target, width: int, itemsize: int, rows: int, stride: int = 0, arrays: int = 1) -> RowTile:
    """Tile for a kernel that holds ``arrays`` rows of ``width`` elements of ``itemsize`` bytes in registers at a time.

    A thread takes 64 bytes of input in all (four 16-byte loads in flight); at least 4 warps, filled with several rows
    where rows are short. One row a program where there are few rows (decoding), or where rows lie so far apart that
    32-bit offsets in a tile would overflow.
    """
    block = 1 << max(width - 1, 0).bit_length()
    per_thread = 64 // itemsize // arrays
    wave = lanes(target)
    most = target.max_threads // wave // arrays
    warps = min(max(4, block // (wave * per_thread)), most)
    # measured with ptxas: with 64 bytes of each array a thread, float32 copies included, these limits leave no spills
    fits = block * itemsize <= 64 * wave * most
    together = min(max(1, warps * wave * per_thread // block), 64)
    decoding = target.vendor != "cpu" and rows < 4 * target.units * together  # interpreted, programs are what costs
    if decoding or together * stride >= 2**31:
        together = 1
        warps = min(warps, max(1, block * itemsize // (16 * wave)))  # fewer warps, rather than loads under 16 bytes
    return RowTile(together, block, warps, fits)


_CONFIGURATION = re.compile(r"rows_(\d{1,2})_warps_(\d{1,2})")
_BESIDE = 1.05  # of a tile's time: nothing is known of the tiles beside a plan, which was measured, but that it leads


def configured(tile: RowTile, target: Target) -> RowTile:
    """The tile, or the one that the target's configuration names."""
    named = _CONFIGURATION.fullmatch(target.configuration)
    return tile if named is None else tile._replace(rows=int(named[1]), warps=int(named[2]))


def tiles_beside(tile: RowTile, target: Target, stride: int) -> dict[str, float]:
    """A plan's tile, and those of half and twice its rows or warps, by name: what a tuner tries, and how they rank."""
    rows, warps, wave = tile.rows, tile.warps, lanes(target)
    near = ((2 * rows, warps), (rows, 2 * warps), (rows, warps // 2), (rows // 2, warps))
    able = [
        (r, w)
        for r, w in near
        if 1 <= r <= 64 and 1 <= w <= target.max_threads // wave and w * wave <= r * tile.block and r * stride < 2**31
    ]
    return {f"rows_{r}_warps_{w}": 1.0 if (r, w) == (rows, warps) else _BESIDE for r, w in ((rows, warps), *able)}


LONG_BLOCK = 8192  # elements of a row read at a time where the row does not fit


def long_warps(target: Target) -> int:
    return min(LONG_BLOCK // (lanes(target) * 16), target.max_threads // lanes(target))
