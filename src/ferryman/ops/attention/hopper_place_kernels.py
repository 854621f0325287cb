"""What a program of attention's forward on Hopper does next, in Gluon: its tile of queries, and the blocks of keys that
they see.

Tiles of keys begin with the first key that a sequence has or its mask leaves, where a copy by TMA may begin as well; of
a float mask only at 16-byte steps of a row. A bool mask of keys is read in blocks at an end, and in all blocks of a
sequence that has holes. A window and chunks end the blocks early; those that they cut are masked. Of any other bool
mask, kernels before list the blocks that a tile of queries sees, and say in bits which pairs see each other.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferryman.ops.attention.key_mask_kernels import FACTS
from ferryman.ops.attention.pair_mask_kernels import ROWS

BLOCK_M = gl.constexpr(128)  # 64 rows for each of the workers
STAGES = gl.constexpr(2)  # tiles of K, and of V, in their rings
# key ranges, as they are given and by `keys_of_mask`; blocks by `tiles_of_mask`; 0: neither
_GIVEN, _OF_MASK, _LISTED = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@triton.constexpr_function
def _rings(HEAD_DIM, HAS_BIAS):
    """How many tiles of Q, and of a mask, a consumer has."""
    return 1 if HEAD_DIM > 128 or (HAS_BIAS and HEAD_DIM > 64) else 2


@triton.constexpr_function
def _block_n(HEAD_DIM):
    """Keys of a block."""
    return 64 if HEAD_DIM > 128 else 128


@triton.constexpr_function
def _bits(BLOCK_N):
    """Words of a listed block's bits."""
    return BLOCK_N // 32 * ROWS.value


@gluon.jit
def _first_of_span(position, window, chunk, shifted, least):
    """The first key that the window and the chunk (0: none) leave to a query, at least ``least``. Positions are counted
    from a key that is ``shifted`` behind the one that chunks are counted from. Integers or tensors."""
    of_chunk = (position + shifted) // gl.maximum(chunk, 1) * chunk - gl.where(chunk > 0, shifted, 0)
    of_window = gl.where(window > 0, position - window + 1, 0)
    return gl.maximum(gl.maximum(of_chunk, of_window), least)


@gluon.jit
def _place(
    index,
    num_tiles,
    batch_heads,
    heads_together,
    num_heads,
    num_queries,
    num_keys,
    key_range,
    window,
    chunk,
    mask_batch,
    mask_step,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
):
    """(first query row, head of the batch; of blocks of keys the first that some row sees, the first that all see, the
    end of those, and of those that some row sees; the key that blocks and positions are counted from; how many keys
    there are from it on; query 0's position; and `_first_of_span`'s ``shifted`` and ``least``). Of listed blocks the
    whole ones count as seen by all, and the table stands for the key."""
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.minimum(heads_together, batch_heads - head_first)
    within = index % group_size
    tile = within // count
    head = head_first + within % count
    origin = 0
    shifted = 0
    least = 0
    end = num_keys
    if RANGE == _GIVEN:
        of_batch = key_range + head // num_heads * 2
        origin = gl.minimum(gl.maximum(gl.load(of_batch), 0), num_keys)
        end = gl.minimum(gl.maximum(gl.load(of_batch + 1), 0), num_keys)
        if HAS_BIAS:  # whose tiles are copied from 16-byte steps of a row only
            least = origin % 8
            origin -= least
            shifted = -least
        num_keys = gl.maximum(end - origin, 0)
    if RANGE == _OF_MASK:
        of_batch = key_range + head // num_heads * FACTS
        origin = gl.load(of_batch)
        num_keys = gl.load(of_batch + 1) - origin
        end = gl.load(of_batch + 2)
        shifted = origin - gl.load(of_batch + 4)
    shift = end - num_queries - origin
    blocks = gl.cdiv(num_keys, BLOCK_N)
    full = num_keys // BLOCK_N
    if RANGE == _LISTED:
        tile = num_tiles - 1 - tile  # longest first, as most masks have it
        origin = head // num_heads * mask_batch + head % num_heads * mask_step + tile
        full = gl.load(key_range + 2 * origin + 1)
        blocks = gl.load(key_range + 2 * origin) + full
    if RANGE > 0:
        blocks = gl.maximum(blocks, 1)
    if CAUSAL:
        tile = num_tiles - 1 - tile  # longest first
        last = gl.minimum(tile * BLOCK_M + BLOCK_M, num_queries)
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(last + shift, 1), BLOCK_N))
        full = gl.minimum(full, gl.maximum(tile * BLOCK_M + shift + 1, 0) // BLOCK_N)
    low = 0
    full_low = 0
    if HAS_SPAN:
        last = gl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
        low = _first_of_span(tile * BLOCK_M + shift, window, chunk, shifted, least) // BLOCK_N
        low = gl.minimum(low, blocks - 1)
        full_low = gl.cdiv(_first_of_span(last + shift, window, chunk, shifted, least), BLOCK_N)
    if RANGE == _OF_MASK:
        full = gl.where(gl.load(of_batch + 3) != 0, full, 0)  # a block may have holes
    return tile * BLOCK_M, head, low, full_low, full, blocks, origin, num_keys, shift, shifted, least


@gluon.jit
def _block(lists, index, full, num_keys, BLOCK_N: gl.constexpr):
    """The number of a tile's block by its index: those that are seen whole come first. Of a tile that sees nothing,
    whose list is empty, any block."""
    blocks = gl.cdiv(num_keys, BLOCK_N)
    number = gl.load(lists + gl.where(index < full, blocks + index, index - full))
    return gl.minimum(gl.maximum(number, 0), blocks - 1)
