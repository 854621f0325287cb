"""What the Triton kernels of attention share, on either pass: which tile a program serves, loads, what it may see.

An invisible key has weight exactly 0; a NaN or Inf in *V* at an invisible key still reaches the rows of its tile, as
0 * NaN does in the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _wide(x):
    """As int64: tile bases may lie beyond 2^31 elements. Takes a constexpr, a tensor, or the interpreter's int."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def _place(head_id, row, num_rows, apart):
    """Where a row of a head stands among all of them: heads one after the other, or, ``apart`` heads, row by row."""
    return (_wide(head_id // apart) * num_rows + row) * apart + head_id % apart


@triton.jit
def _tile_and_head(num_tiles, num_heads, heads_together, NUM_XCD: tl.constexpr):
    """Which tile and head this program serves: tile-major within as many heads as have K and V in L2 together.

    Programs go round-robin over the XCDs of an MI300, each with its own L2, so there the ids are first regrouped.
    """
    pid = tl.program_id(0)
    if NUM_XCD > 1:
        total = num_tiles * num_heads
        xcd = pid % NUM_XCD
        pid = xcd * (total // NUM_XCD) + tl.minimum(xcd, total % NUM_XCD) + pid // NUM_XCD
    group_size = heads_together * num_tiles
    first = (pid // group_size) * heads_together
    count = tl.minimum(heads_together, num_heads - first)
    within = pid % group_size
    return within // count, first + within % count


@triton.jit
def _in_units(first, second, third, UNIT: tl.constexpr):
    """Three strides that UNIT divides, so that the compiler knows it: of a number that 16 does not divide it assumes 1,
    and reads rows of 40 or 72 columns an element at a time."""
    if UNIT > 1:
        first = first // UNIT * UNIT
        second = second // UNIT * UNIT
        third = third // UNIT * UNIT
    return first, second, third


@triton.jit
def _load_rows(base, stride, rows, limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """A (rows, BLOCK_D) tile; zero beyond HEAD_DIM and, where CHECK, from row ``limit`` on."""
    cols = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride + cols[None, :]
    if CHECK:
        if HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=(rows[:, None] < limit) & (cols[None, :] < HEAD_DIM), other=0.0)
        else:
            tile = tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    else:
        if HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _saturation(x):
    """(tanh x, 1 - tanh^2 x). The series below 1/4 is good to 1e-8; the exponential form cancels there.

    Approximate division, unlike triton_lang.tanh: its error, times the cap, is below that of the scores' own sum.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    tanh = tl.where(size < 0.25, x * series, tl.where(x < 0, -large, large))
    return tanh, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _visible(position, key, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """``position`` is the key index that the query row is aligned with, i + Sk - Sq. One of both always applies."""
    if CAUSAL:
        seen = key <= position
        if HAS_WINDOW:
            seen = seen & (key > position - window)
    else:
        seen = (key > position - window) & (key < position + window)
    return seen


# FOLD. A mask over the elements of a tile is 64 bits in a pair of scalar registers for each of them on CDNA, which has
# 102: two comparisons and their conjunction for every element spilled 20 to 150. There the bounds are folded first,
# once for a row, and every element is compared once. On NVIDIA the plain form keeps fewer registers alive (D128 dK/dV
# causal: 112 bytes of spills against 176).


@triton.jit
def _within(x, begin, end):
    """begin <= x < end, where begin <= end, in one comparison."""
    return (x - begin).to(tl.uint32, bitcast=True) < (end - begin).to(tl.uint32, bitcast=True)


@triton.jit
def _sequence(key_range, batch, num_keys, BOUNDED: tl.constexpr):
    """[begin, end) of a sequence's keys, clamped to those that there are; all of them without a range."""
    begin = 0
    end = num_keys
    if BOUNDED and key_range is not None:
        begin = tl.minimum(tl.maximum(tl.load(key_range + 2 * batch), 0), num_keys)
        end = tl.minimum(tl.maximum(tl.load(key_range + 2 * batch + 1), 0), num_keys)
    return begin, end


@triton.jit
def _own_keys(position, begin, end, chunk):
    """[first, past) of the keys that a query at ``position`` may see by its sequence and its chunk; chunk 0: no chunks.

    Integers or tensors. A query before its sequence is in no chunk that has keys.
    """
    size = tl.maximum(chunk, 1)
    first = begin + tl.maximum(position - begin, 0) // size * size
    past = tl.minimum(tl.where(position < begin, begin, first + size), end)
    return tl.where(chunk > 0, first, begin), tl.where(chunk > 0, past, end)


@triton.jit
def _own_queries(key, begin, end, chunk, shift, num_queries):
    """[first, past) of the queries that may see ``key`` by its sequence and its chunk; ``shift`` is a query's position
    less its index."""
    size = tl.maximum(chunk, 1)
    start = begin + tl.maximum(key - begin, 0) // size * size - shift
    first = tl.where(chunk > 0, tl.maximum(start, 0), 0)
    past = tl.where(chunk > 0, tl.minimum(start + size, num_queries), num_queries)
    seen = (key >= begin) & (key < end)
    return tl.where(seen, first, 0), tl.where(seen, tl.maximum(past, first), 0)


@triton.jit
def _hide_keys(
    scores,
    position,
    key,
    num_keys,
    window,
    first,
    past,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    FOLD: tl.constexpr,
):
    """-inf where ``key``, a row of the tile's keys, is past the end or invisible to a query row at ``position``.

    BOUNDED: its sequence and chunk have the keys [first, past) for that row.
    """
    if FOLD and (CAUSAL or HAS_WINDOW or BOUNDED):
        end = num_keys
        if CAUSAL:
            end = tl.minimum(position + 1, end)
        elif HAS_WINDOW:
            end = tl.minimum(position + window, end)
        if BOUNDED:
            end = tl.minimum(end, past)
            begin = first
            if HAS_WINDOW:
                begin = tl.maximum(position - window + 1, begin)
            scores = tl.where(_within(key, begin, tl.maximum(end, begin)), scores, float("-inf"))
        elif HAS_WINDOW:
            begin = tl.maximum(position - window + 1, 0)
            scores = tl.where(_within(key, begin, tl.maximum(end, begin)), scores, float("-inf"))
        else:
            scores = tl.where(key < end, scores, float("-inf"))
    else:
        if BOUNDED:
            scores = tl.where((key >= first) & (key < past), scores, float("-inf"))
        else:
            scores = tl.where(key < num_keys, scores, float("-inf"))
        if CAUSAL or HAS_WINDOW:
            scores = tl.where(_visible(position, key, window, CAUSAL, HAS_WINDOW), scores, float("-inf"))
    return scores


@triton.jit
def _hide_queries(
    scores,
    query,
    query_inside,
    key,
    num_queries,
    num_keys,
    window,
    first,
    past,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    FOLD: tl.constexpr,
):
    """-inf where ``query``, a row of the tile's queries, is past the end or does not see ``key``, a column.

    BOUNDED: the queries [first, past) are in the key's sequence and chunk.
    """
    if FOLD and (CAUSAL or HAS_WINDOW or BOUNDED):
        row = key + (num_queries - num_keys)  # that the key is aligned with
        begin = tl.zeros_like(row)
        if CAUSAL:
            begin = row
        elif HAS_WINDOW:
            begin = row - window + 1
        begin = tl.maximum(begin, 0)
        end = num_queries
        if HAS_WINDOW:
            end = tl.minimum(row + window, num_queries)
        if BOUNDED:
            begin = tl.maximum(begin, first)
            end = tl.minimum(end, past)
        scores = tl.where(_within(query, begin, tl.maximum(end, begin)), scores, float("-inf"))
    else:
        if BOUNDED:
            scores = tl.where((query >= first) & (query < past), scores, float("-inf"))
        else:
            scores = tl.where(query_inside, scores, float("-inf"))
        if CAUSAL or HAS_WINDOW:
            seen = _visible(query + (num_keys - num_queries), key, window, CAUSAL, HAS_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _mask_index(index, limit, FOLD: tl.constexpr):
    """Rows (for dK/dV keys) past the end, which are not stored: with FOLD they read the last one's mask."""
    if FOLD:
        index = tl.minimum(index, limit - 1)
    return index


@triton.jit
def _add_mask(scores, pointers, kept_inside, tile_inside, MASK: tl.constexpr, FOLD: tl.constexpr, EDGE: tl.constexpr):
    """Scores are in base 2. A bool mask arrives as int8. ``kept_inside`` is of the dimension that stays put."""
    if FOLD:
        if EDGE:
            values = tl.load(pointers, mask=tile_inside, other=0)
        else:
            values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=kept_inside & tile_inside, other=0)
    if MASK == 1:
        scores = tl.where(values != 0, scores, float("-inf"))
    else:
        scores += values.to(tl.float32) * LOG2E
    return scores


@triton.jit
def _kept(seed, query, head, start, drop_below, KEYS: tl.constexpr, BY_KEY: tl.constexpr):
    """1 for each pair of a query and one of KEYS keys from ``start`` on that dropout keeps, else 0: (queries, keys), or
    with BY_KEY (keys, queries). ``query``: (queries, 1) or (1, queries); ``head``: that or a number. KEYS is a multiple
    of 4, ``start`` of KEYS."""
    groups = start // 4 + tl.arange(0, KEYS // 4)
    zero = tl.full((), 0, tl.int32)
    least = (zero + drop_below).to(tl.uint32, bitcast=True)
    a, b, c, d = tl.philox(seed, groups[:, None] if BY_KEY else groups[None, :], query, zero + head, zero)
    even = tl.join((a >= least).to(tl.int8), (c >= least).to(tl.int8))
    kept = tl.join(even, tl.join((b >= least).to(tl.int8), (d >= least).to(tl.int8)))
    if BY_KEY:
        kept = tl.reshape(tl.permute(kept, (0, 2, 3, 1)), (KEYS, kept.shape[1]))
    else:
        kept = tl.reshape(kept, (kept.shape[0], KEYS))
    return kept.to(tl.float32)


@triton.jit
def _key_ranges(
    first,
    last,
    num_queries,
    begin,
    num_keys,
    window,
    chunk,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """[lo, hi) holds every key that a row in first..last sees, [full_lo, full_hi) whole blocks that all of them see.

    BOUNDED: the keys are [begin, num_keys), maybe in chunks.
    """
    shift = num_keys - num_queries
    lo = 0
    hi = num_keys
    full_lo = 0
    full_hi = num_keys
    if CAUSAL:
        hi = tl.minimum(num_keys, last + shift + 1)
        full_hi = tl.minimum(num_keys, first + shift + 1)
    elif HAS_WINDOW:
        hi = tl.minimum(num_keys, last + shift + window)
        full_hi = tl.minimum(num_keys, first + shift + window)
    if HAS_WINDOW:
        lo = tl.maximum(0, first + shift - window + 1) // BLOCK_N * BLOCK_N
        full_lo = (tl.maximum(0, last + shift - window + 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if BOUNDED:
        low, past = _own_keys(first + shift, begin, num_keys, chunk)
        high, past_last = _own_keys(last + shift, begin, num_keys, chunk)
        lo = tl.maximum(lo, low // BLOCK_N * BLOCK_N)
        full_lo = tl.maximum(full_lo, (high + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        hi = tl.minimum(hi, past_last)
        full_hi = tl.minimum(full_hi, past)
    full_hi = tl.maximum(full_hi, 0) // BLOCK_N * BLOCK_N
    return lo, hi, full_lo, full_hi
