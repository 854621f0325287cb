"""How a row of N elements is laid over threads: the launcher's side of `rows.cuh`."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, grid_of

# Shared memory that a LONG row leaves to the reduction's partials and to the driver (1 KiB a block on NVIDIA).
_RESERVED_SHARED = 2048
_SMALL_BLOCK = 256
_LARGE_BLOCK = 512
# Words of its rows that one thread keeps, beside what it computes with.
MAX_WORDS = 64
# Up to this many words a thread, four blocks or more share an SM and hide each other's reductions: one pass of
# blocks over the rows. Beyond, as many blocks as fit stay, and load their next row while they write this one.
_PERSISTENT_ABOVE_WORDS = 16


class Whole(NamedTuple):
    """A row over 2 to ``cluster`` blocks of up to ``threads``, ``packs`` of 16 bytes a thread and tensor; as many
    blocks as give an SM ``resident`` threads. L2 fetches ``ahead`` times `_AHEAD`."""

    threads: int
    packs: int
    cluster: int = 8
    resident: int = 1024
    ahead: int = 1


class Demand(NamedTuple):
    """What an op takes on an architecture. ``tensors``: inputs that a thread keeps at once (2 where it adds two).
    ``long_words``: words of its row that a thread keeps where a block has more than 256 threads, or the row does not
    fit. ``lone``: elements that it keeps of a row that is read one by one. ``largest``: threads of a block before each
    keeps more than 16 words. ``fitting``: threads that should fit an SM while each keeps up to 16 words, up to 32, and
    more: the launch bound, so 64 registers a thread at 1024, 80 at 768, 128 at 512, 255 at 256. ``weights``: bytes of
    weights and biases a column. The rest is for many rows of more than 16 KiB on devices with clusters. ``alone``: up
    to how many packs a block has a row alone; ``whole``: then the forms of `whole.cuh`, the first that holds a row;
    ``turns``: rows that a block takes."""

    tensors: int = 1
    long_words: int = MAX_WORDS
    lone: int = 16
    largest: int = _SMALL_BLOCK
    fitting: tuple[int, int, int] = (1024, 768, 512)
    weights: int = 0
    alone: int = 0
    whole: tuple[Whole, ...] = ()
    turns: int = 1


def fitting(itemsize: int, wide: bool = False, heavy: bool = False) -> tuple[int, int, int]:
    """`Demand.fitting` of a wave of 32 with which no kernel spills registers (sm_80, sm_90): 16 bits are widened to
    compute with. wide: weights of more bytes than the row's elements. heavy: the op keeps more beside the row."""
    half = itemsize == 2
    return 768 if wide else 1024, 512 if half else 768, 256 if half or heavy else 512


def widest(itemsize: int) -> tuple[Whole, ...]:
    """The forms of `whole.cuh` for the longest rows, measured on an H200 at 8192 to 131072 columns of bfloat16."""
    resident = 1024 if itemsize == 2 else 512
    return Whole(256, 8, resident=resident), Whole(512, 8, resident=resident)


class RowPlan(NamedTuple):
    """``arguments``: V, LANES, ROWS, PACKS, FIT of a `RowLayout`, the blocks of the launch bound, CLUSTER. ``slots``:
    packs that a thread keeps in shared memory, or rows ahead that L2 fetches."""

    arguments: tuple[int, int, int, int, str, int, int]
    threads: int
    rows_per_block: int
    slots: int
    shared: int
    resident: int  # most groups of rows to launch blocks for; 0: all

    @property
    def cluster(self) -> int:
        return self.arguments[-1]

    @property
    def on_hopper(self) -> bool:
        """Whether the kernel uses clusters."""
        return self.cluster > 1

    def blocks(self, rows: int) -> int:
        groups = -(-rows // self.rows_per_block)
        groups = min(groups, self.resident) if self.resident else groups
        return grid_of(groups, self.threads * self.cluster) * self.cluster

    def rows_of(self, blocks: int) -> int:
        """Rows that ``blocks`` have places for."""
        return blocks // self.cluster * self.rows_per_block


def _up(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


_MOST_THREADS = 1024
_MOST_SPREAD = 8 * _MOST_THREADS
_LEAST_SPREAD = 64
SPREADS = tuple(1 << bit for bit in range(_LEAST_SPREAD.bit_length() - 1, _MOST_SPREAD.bit_length()))
# Rows ahead that L2 fetches, in bytes an SM: of 16, 32 and 64 KiB the best at nearly every width of every op (H200).
_AHEAD = 32 * 1024
# What the driver, its barriers and the partials take of the shared memory for a block, at most.
_WHOLE_RESERVED = 9472


def threads_a_row(rows: int, units: int) -> int:
    """Threads that each of ``rows`` can have with all of them resident at once, 1024 an SM or CU: one of `SPREADS`,
    or 0 where that is less than all of them."""
    share = min(units * _MOST_THREADS // rows, _MOST_SPREAD)
    return 1 << (share.bit_length() - 1) if share >= _LEAST_SPREAD else 0


class _Row(NamedTuple):
    """What all plans start from. ``packs``: of a row. ``few``: packs that keep a thread within 64 registers."""

    n: int
    itemsize: int
    vector: bool
    need: Demand

    @property
    def width(self) -> int:
        return VECTOR_BYTES // self.itemsize if self.vector else 1

    @property
    def words(self) -> int:
        return max(1, self.width * self.itemsize // 4)

    @property
    def packs(self) -> int:
        return -(-self.n // self.width)

    @property
    def few(self) -> int:
        return (16 if self.vector else self.need.lone) // self.words // self.need.tensors


@functools.lru_cache(maxsize=4096)
def row_plan(
    n: int,
    itemsize: int,
    vector: bool,
    wave: int,
    units: int,
    shared_memory: int,
    need: Demand,
    spread: int = 0,
    clusters: bool = False,
) -> RowPlan:
    """The layout of rows of ``n`` elements. ``spread``: `threads_a_row` of their number. ``clusters``: whether the
    device has thread block clusters and bulk copies."""
    row = _Row(n, itemsize, vector, need)
    plan = None
    if spread:
        plan = _few_rows(row, wave, spread, clusters)
    if plan is None and clusters and vector:
        plan = _wide_rows(row, units, shared_memory)
    return plan or _many_rows(row, wave, units, shared_memory)


def _in_registers(row: _Row, lanes: int, packs: int, bound: int, cluster: int = 1) -> RowPlan:
    """A block, or a cluster of them, for every row."""
    fit = "EXACT" if lanes * packs * row.width * cluster == row.n else "RAGGED"
    return RowPlan((row.width, lanes, 1, packs, fit, bound, cluster), lanes, 1, 0, 0, 0)


def _few_rows(row: _Row, wave: int, spread: int, clusters: bool) -> RowPlan | None:
    """One row a block, and as few packs a thread as its share of threads allows: such a call is bound by the latency of
    one row, not by the loads in flight. Rows beyond one pack for each of 1024 threads take 8 blocks where these all
    find room (beyond two packs, even where SMs must share). None where a row is too short or too long."""
    if clusters and row.vector and (row.packs > 2048 or (row.packs > 1024 and spread == _MOST_SPREAD)):
        columns = _up(-(-row.packs // 8), 8)
        forms = [(_up(-(-columns // packs), wave), packs) for packs in (1, 2, 4)]
        lanes, packs = next((form for form in forms if form[0] <= _SMALL_BLOCK), forms[-1])
        if lanes <= _LARGE_BLOCK and lanes * 8 <= spread:
            return _in_registers(row, lanes, packs, 1, 8)
    for packs in (1, 2, 4):
        lanes = _up(-(-row.packs // packs), wave)
        if packs <= row.few and wave < lanes <= min(spread, _MOST_THREADS):
            return _in_registers(row, lanes, packs, max(1, row.need.fitting[0] // lanes))
    return None


def _wide_rows(row: _Row, units: int, shared_memory: int) -> RowPlan | None:
    """Many rows of more than 16 KiB on a device with clusters and bulk copies. None for shorter ones, and for those
    that do not fit."""
    need = row.need
    if row.packs <= 1024:
        return None
    if row.packs <= need.alone:
        lanes = _up(-(-row.packs // 4), 32)
        return _in_registers(row, lanes, 4, _MOST_THREADS // lanes)
    for form in need.whole:
        for cluster in (2, 4, 8):  # one block has no room for a row of so many packs
            columns = _up(-(-row.packs // cluster), 8)
            lanes = _up(-(-columns // form.packs), 32)
            placed = columns * row.width * need.weights
            room = (shared_memory + 1024) // (placed + _WHOLE_RESERVED)  # an SM has 1 KiB more than a block may ask for
            if cluster <= form.cluster and lanes <= form.threads and room > 0:
                row_bytes = row.packs * VECTOR_BYTES * need.tensors
                arguments = (row.width, lanes, 1, form.packs, "WHOLE", min(form.resident // lanes, room), cluster)
                return RowPlan(
                    arguments, lanes, need.turns, max(1, form.ahead * units * _AHEAD // row_bytes), placed, 0
                )
    return None


def _many_rows(row: _Row, wave: int, units: int, shared_memory: int) -> RowPlan:
    """Rows of up to 128 packs: part of a wave each, no barrier. Then 4 packs a thread (2 for two tensors) and as many
    waves as that takes, up to 512 threads; then more packs a thread; then shared memory; what is left goes through L2.
    """
    n, _, vector, need = row
    tensors = need.tensors
    width, words, packs_in_row, few = row.width, row.words, row.packs, row.few
    most = (MAX_WORDS // words // tensors) if vector else few

    if packs_in_row <= few * wave:
        lanes = min(wave, _power_of_two(-(-packs_in_row // few)))
        # two loads in flight a thread rather than four, where the row is too short for all lanes
        lanes = max(lanes, min(wave, _power_of_two(-(-packs_in_row // 2))))
        rows_per_block = _SMALL_BLOCK // lanes
        packs = _power_of_two(-(-packs_in_row // lanes))
    else:
        rows_per_block = 1
        packs = few
        largest = need.largest if tensors == 1 and vector else _LARGE_BLOCK
        while packs < most and packs_in_row > packs * largest:
            packs *= 2
        if packs_in_row > packs * largest:
            largest = _LARGE_BLOCK
        lanes = min(largest, _up(-(-packs_in_row // packs), wave))
    # at 512 threads a wave of 64 has 256 registers a thread, one of 32 has 128
    if packs_in_row > lanes * packs or (lanes > _SMALL_BLOCK and wave == 32):
        packs = min(packs, max(1, need.long_words // words // tensors))
        lanes = min(largest, _up(-(-packs_in_row // packs), wave))
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
    weighed = kept if vector else 4 * kept  # a lone element has an address, a weight and a successor of its own
    tier = 2 if weighed > 32 else 1 if weighed > 16 or fit == "LONG" else 0  # a long row's other packs pass through too
    bound = max(1, need.fitting[tier] // threads)
    resident = 0
    if kept > _PERSISTENT_ABOVE_WORDS or fit == "LONG":
        fitting = min(bound, shared_memory // (shared + _RESERVED_SHARED)) if shared else bound
        resident = units * max(1, fitting)
    return RowPlan(
        (width, lanes, rows_per_block, packs, fit, bound, 1), threads, rows_per_block, slots, shared, resident
    )


def plan_for(n: int, itemsize: int, vector: bool, target: Target, need: Demand, spread: int = 0) -> RowPlan:
    return row_plan(
        n,
        itemsize,
        vector,
        target.wave,
        target.units,
        target.shared_memory,
        need,
        spread,
        "clusters" in target.features,
    )


# Widths of real models and around them, whether they can be read in 16-byte words, and the ragged ones.
_WIDTHS = tuple(
    (n, vector)
    for n in (8, 64, 128, 1000, 1024, 2048, 4096, 5120, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
    for vector in (True, False)
) + tuple((n, False) for n in (1, 7, 127, 1021, 4099, 8191, 50_257, 151_937))
# Part of a wave, a block, the scalar path, and a row that does not fit.
_FEW_WIDTHS = ((1000, True), (8192, True), (1021, False), (262_144, True))


def representative_plans(itemsize: int, target: Target, need: Demand, *, few: bool = False) -> list[RowPlan]:
    """The different plans that `_WIDTHS` lead to, or one of each kind."""
    plans: dict[tuple[int, int, int, int, str, int, int], RowPlan] = {}
    for (n, vector), spread in itertools.product(
        _FEW_WIDTHS if few else _WIDTHS, (0, _MOST_SPREAD) if few else (0, *SPREADS)
    ):
        plan = plan_for(n, itemsize, vector, target, need, spread)
        plans.setdefault(plan.arguments, plan)
    return list(plans.values())
