"""What attention's tiles on Hopper share, in Gluon: barriers, and of the backward pass a producer's words to its
consumers, masks, and stores from a product's layout.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WORKERS = gl.constexpr(2)
FACTS = gl.constexpr(8)  # int32 for each tile in the ring
# What `_claim` says of a tile: the KV head of the batch, or -1 where all are done; its first key; how many turns there
# are, and how many of them, the first ones, need masks; the first query of turn 0, and what turn 0 adds to it
HEAD, FIRST, TURNS, MASKED, START, JUMP = map(gl.constexpr, range(6))


@gluon.jit
def _named_barrier(INSTRUCTION: gl.constexpr, barrier):
    """``bar.sync`` or ``bar.arrive`` of two warpgroups. Triton itself takes the first ids only."""
    asm: gl.constexpr = "{ bar." + INSTRUCTION + " $1, 256; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), ARRIVALS)
    return bars


@gluon.jit
def tell(ring, full, turn, facts):
    """The producer's: what the consumers need to know of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(len(facts)):
        ring.index((turn & 1) * FACTS + i).store(gl.full([1], facts[i], gl.int32, layout))
    mbarrier.arrive(full.index(turn & 1))


@gluon.jit
def fact(ring, turn, FACT: gl.constexpr):
    """The consumers'. A slot is told anew after everyone has released the tile of that turn. Facts are read where they
    are used: registers, all of which the loops need, are scarcer than loads."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.index((turn & 1) * FACTS + FACT).load(layout), 0)


@gluon.jit
def hidden(x):
    """The integer ``x``, of which LLVM then knows nothing: what is computed from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _rows_layout(head_dim):
    registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]][: 4 + head_dim // 64]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, head_dim])


@gluon.jit
def store_rows(x, to, head, first, num_rows, apart, HEAD_DIM: gl.constexpr):
    """64 rows from ``first`` on, where inside, of a head: ``num_rows`` rows of HEAD_DIM, that are ``apart`` rows apart.

    From the product's layout, in which two lanes then swap halves: 8 bytes for each, a sector for four. By way of
    shared memory 16 would be stored, whose addresses the compiler keeps in registers during the loops.
    """
    layout: gl.constexpr = _rows_layout(HEAD_DIM)
    x = gl.convert_layout(x, layout)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    to += ((head // apart).to(gl.int64) * num_rows * apart + head % apart) * HEAD_DIM
    places = (rows * (apart * HEAD_DIM))[:, None] + cols[None, :]
    gl.store(to + places, x, mask=(rows < num_rows)[:, None])


@gluon.jit
def row_of(turn, start, jump, BLOCK_M: gl.constexpr):
    """The first query of a turn: a ragged block is the first turn, the others follow in order."""
    row = start + turn * BLOCK_M
    if turn == 0:
        row += jump
    return row


@gluon.jit
def below(bounds, columns):
    """columns < bounds, (rows, columns), in a product's layout, where the columns of a thread differ by constants.

    With the thread's own part taken from the bound, each is compared with an immediate; compared as they are, LLVM
    keeps all of them in registers round the loops.
    """
    return (columns & ~6)[None, :] < bounds[:, None] - (columns & 6)[None, :]


@gluon.jit
def masks(first_key, row, num_queries, num_keys, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """(which pairs of 64 keys and the queries from ``row`` on are there, which of them see each other)."""
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, layout))
    inside = below(gl.where(keys < num_keys, num_queries - row, 0), columns)
    seen = inside
    if CAUSAL:
        seen = seen & (below(keys - (num_keys - num_queries) - row, columns) == 0)
    return inside, seen
