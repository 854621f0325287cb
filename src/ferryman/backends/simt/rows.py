"""How a row of N elements is laid over threads: the launcher's side of `rows.cuh`."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, grid_of

# Shared memory that a LONG row leaves to the reduction's partials and to the driver (1 KiB a block on NVIDIA).
_RESERVED_SHARED = 2048
_SMALL_BLOCK = 256
_LARGE_BLOCK = 512
# Words of its rows that one thread keeps: beyond these fewer than two blocks of 256 fit an SM's registers.
_MAX_WORDS = 64
# Up to this many words a thread, four blocks or more share an SM and hide each other's reductions: one pass of
# blocks over the rows. Beyond, as many blocks as fit stay, and load their next row while they write this one.
_PERSISTENT_ABOVE_WORDS = 16
# Bytes of registers that a thread may spill on NVIDIA: the launch bound of `rows.cuh` takes them for one more block on
# an SM, and they stay in the first cache. 204 is the worst (rms_norm in float16 on sm_80, a row that does not fit).
SPILLS_ALLOWED = 204


class RowPlan(NamedTuple):
    """``arguments``: V, LANES, ROWS, PACKS, FIT of a `RowLayout`. ``slots``: packs a thread keeps in shared memory."""

    arguments: tuple[int, int, int, int, str]
    threads: int
    rows_per_block: int
    slots: int
    shared: int
    resident: int  # most blocks to launch; 0: one for every group of rows

    def blocks(self, rows: int) -> int:
        groups = -(-rows // self.rows_per_block)
        return grid_of(min(groups, self.resident) if self.resident else groups, self.threads)


def _up(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def row_plan(
    n: int, itemsize: int, vector: bool, tensors: int, wave: int, units: int, shared_memory: int,
    long_words: int = _MAX_WORDS,
) -> RowPlan:  # fmt: skip
    """The layout of rows of ``n`` elements. ``tensors``: inputs that a thread keeps at once (2 for add_rms_norm);
    ``long_words``: of a row that does not fit on chip, words that a thread keeps in registers.

    Rows of up to 128 packs: part of a wave each, no barrier. Then 4 packs a thread (2 for two tensors) and as many
    waves as that takes, up to 512 threads; then more packs a thread; then shared memory; what is left goes through L2.
    """
    width = VECTOR_BYTES // itemsize if vector else 1
    words = max(1, width * itemsize // 4)
    packs_in_row = -(-n // width)
    few = 16 // words // tensors  # packs that keep a thread within 64 registers
    most = (_MAX_WORDS // words // tensors) if vector else few

    if packs_in_row <= few * wave:
        lanes = min(wave, _power_of_two(-(-packs_in_row // few)))
        # two loads in flight a thread rather than four, where the row is too short for all lanes
        lanes = max(lanes, min(wave, _power_of_two(-(-packs_in_row // 2))))
        rows_per_block = _SMALL_BLOCK // lanes
        packs = _power_of_two(-(-packs_in_row // lanes))
    else:
        rows_per_block = 1
        packs = few
        largest = _SMALL_BLOCK if tensors == 1 and vector else _LARGE_BLOCK
        while packs < most and packs_in_row > packs * largest:
            packs *= 2
        if packs_in_row > packs * largest:
            largest = _LARGE_BLOCK
        lanes = min(largest, _up(-(-packs_in_row // packs), wave))
    if packs_in_row > lanes * packs:
        packs = min(packs, max(1, long_words // words // tensors))
    capacity = lanes * packs
    slots = 0
    if packs_in_row > capacity:
        fit = "LONG"
        if tensors == 1:
            room = max(0, shared_memory - _RESERVED_SHARED) // (lanes * words * 4)
            slots = min(-(-(packs_in_row - capacity) // lanes), room)
    else:
        fit = "EXACT" if capacity * width == n else "RAGGED"
    kept = packs * words * tensors
    threads = lanes * rows_per_block
    shared = slots * lanes * words * 4
    resident = 0
    if kept > _PERSISTENT_ABOVE_WORDS or fit == "LONG":
        weighed = kept if vector else 4 * kept  # as `resident_blocks` in rows.cuh
        fitting = (1024 if weighed <= 16 else 768 if weighed <= 32 else 512) // threads
        if shared:
            fitting = min(fitting, shared_memory // (shared + _RESERVED_SHARED))
        resident = units * max(1, fitting)
    return RowPlan((width, lanes, rows_per_block, packs, fit), threads, rows_per_block, slots, shared, resident)


def plan_for(
    n: int, itemsize: int, vector: bool, target: Target, tensors: int = 1, long_words: int = _MAX_WORDS
) -> RowPlan:
    return row_plan(n, itemsize, vector, tensors, target.wave, target.units, target.shared_memory, long_words)


# Widths of real models and around them, whether they can be read in 16-byte words, and the ragged ones.
_WIDTHS = tuple(
    (n, vector)
    for n in (8, 64, 128, 1000, 1024, 2048, 4096, 5120, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
    for vector in (True, False)
) + tuple((n, False) for n in (1, 7, 127, 1021, 4099, 8191, 50_257, 151_937))
# Part of a wave, a block, the scalar path, and a row that does not fit.
_FEW_WIDTHS = ((1000, True), (8192, True), (1021, False), (262_144, True))


def representative_plans(
    itemsize: int, target: Target, tensors: int = 1, *, few: bool = False, long_words: int = _MAX_WORDS
) -> list[RowPlan]:
    """The different plans that `_WIDTHS` lead to, or one of each kind."""
    found: dict[tuple[int, int, int, int, str], RowPlan] = {}
    for n, vector in _FEW_WIDTHS if few else _WIDTHS:
        plan = plan_for(n, itemsize, vector, target, tensors, long_words)
        found.setdefault(plan.arguments, plan)
    return list(found.values())
