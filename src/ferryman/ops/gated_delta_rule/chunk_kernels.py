"""What kernels of `gated_delta_rule` do with a chunk of tokens, a block of a state's keys at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton_lang import INTERPRETED, inverse_root, widen


@triton.jit
def _place(heads, dim, BLOCK_V: tl.constexpr):
    """(sample, head, columns) of a program."""
    across = tl.cdiv(dim, BLOCK_V)
    program = tl.program_id(0)
    column = (program % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    return (program // (across * heads)).to(tl.int64), (program // across) % heads, column


@triton.jit
def _tile(ptr, rows, columns, row, column, known, many):
    """(rows, columns) in float32, zeros where there are none."""
    there = known[:, None] & (columns < many)[None, :]
    return widen(tl.load(ptr + rows[:, None] * row + columns[None, :] * column, mask=there, other=0.0))


@triton.jit
def _sums(g_ptr, g_l, c, live):
    """Sums of g up to each token of a chunk; without g zeros."""
    total = tl.zeros(c.shape, tl.float32)
    if g_ptr is not None:
        g = widen(tl.load(g_ptr + c * g_l, mask=live, other=0.0))
        total = tl.sum(tl.where(c[:, None] <= c[None, :], g[:, None], 0.0), 0)
    return total


@triton.jit
def _totals(g_ptr, g_l, c, live):
    """Sums of g up to each token; without g zeros."""
    total = tl.zeros(c.shape, tl.float32)
    if g_ptr is not None:
        total = tl.cumsum(widen(tl.load(g_ptr + c * g_l, mask=live, other=0.0)), 0)
    return total


@triton.jit
def _inverted(system, CHUNK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """Of I + system, which is below the diagonal: of its parts on the diagonal, D, by substitution. With the system
    beside them, R, N = D R has a power CHUNK / PART of 0, and the whole is (I - N + ..) D: two parts at most."""
    COUNT: tl.constexpr = CHUNK // PART
    own = tl.arange(0, COUNT)[:, None, None, None] == tl.arange(0, COUNT)[None, None, :, None]
    r = tl.arange(0, PART)
    parts = tl.sum(tl.where(own, tl.reshape(system, [COUNT, PART, COUNT, PART]), 0.0), 2)
    solved = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0) + tl.zeros([COUNT, PART, PART], tl.float32)
    for i in range(1, PART):
        row = tl.sum(tl.where(r[None, :, None] == i, parts, 0.0), 1)
        earlier = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(r[None, :, None] == i, solved - earlier[:, None, :], solved)
    spread = tl.where(own, solved[:, :, None, :], 0.0)
    inverse = tl.reshape(spread, [CHUNK, CHUNK])
    if COUNT == 2:
        c = tl.arange(0, CHUNK)
        apart = (c[:, None] // PART) != (c[None, :] // PART)
        rest = tl.dot(inverse, tl.where(apart, system, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(rest, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _factors(size, scale, NORM: tl.constexpr):
    """What multiplies a row with such a sum of squares."""
    factor = tl.zeros(size.shape, tl.float32) + scale
    if NORM:
        factor = inverse_root(size + 1e-6) * scale
    return factor


@triton.jit
def _begin(kept_ptr, state_ptr, s_k, s_v, column, width, dim, BLOCK_K: tl.constexpr):
    """Columns of a state, or zeros, to where a walk over chunks keeps it."""
    n = tl.arange(0, BLOCK_K)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        inside = (n < width - b)[:, None] & (column < dim)[None, :]
        state = tl.zeros([BLOCK_K, column.shape[0]], tl.float32)
        if state_ptr is not None:
            state = _tile(state_ptr, b + n, column, s_k, s_v, n < width - b, dim)
        tl.store(kept_ptr + (b + n)[:, None] * dim, state, mask=inside)
    tl.debug_barrier()


@triton.jit
def _products(
    k_ptr,
    k_l,
    k_k,
    q_ptr,
    q_l,
    q_k,
    kept_ptr,
    c,
    live,
    column,
    width,
    dim,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A chunk's k k^T, q k^T [later, earlier], k S, q S, and the sums of squares of k and q.

    No q: what has a factor q is zeros. ``kept`` is S, and ``column`` its columns; None: so is what has a factor S.
    """
    n = tl.arange(0, BLOCK_K)
    scores = tl.zeros([c.shape[0], c.shape[0]], tl.float32)
    weight = tl.zeros([c.shape[0], c.shape[0]], tl.float32)
    known = tl.zeros([c.shape[0], column.shape[0]], tl.float32)
    y = tl.zeros([c.shape[0], column.shape[0]], tl.float32)
    k_size = tl.zeros(c.shape, tl.float32)
    q_size = tl.zeros(c.shape, tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        k = _tile(k_ptr, c, b + n, k_l, k_k, live, width)
        if q_ptr is not None:
            q = _tile(q_ptr, c, b + n, q_l, q_k, live, width)
        if kept_ptr is not None:
            inside = (n < width - b)[:, None] & (column < dim)[None, :]
            state = tl.load(kept_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0)
        scores = tl.dot(k, tl.trans(k), scores, input_precision=PRECISION)
        k_size += tl.sum(k * k, 1)
        if q_ptr is not None:
            weight = tl.dot(q, tl.trans(k), weight, input_precision=PRECISION)
            q_size += tl.sum(q * q, 1)
        if kept_ptr is not None:
            known = tl.dot(k, state, known, input_precision=PRECISION)
            if q_ptr is not None:
                y = tl.dot(q, state, y, input_precision=PRECISION)
    return scores, weight, known, y, k_size, q_size


@triton.jit
def _solved(system, d, c, CHUNK: tl.constexpr):
    """x of x + system x = d, by substitution; ``system`` is below the diagonal."""
    for i in range(1, CHUNK):
        row = tl.sum(tl.where(c[:, None] == i, system, 0.0), 0)
        earlier = tl.sum(row[:, None] * d, 0)
        d = tl.where(c[:, None] == i, d - earlier[None, :], d)
    return d


@triton.jit
def _onward(
    kept_ptr,
    next_ptr,
    k_ptr,
    k_l,
    k_k,
    kept,
    fade,
    d,
    c,
    live,
    column,
    width,
    dim,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after a chunk of corrections d: what was kept fades, and each row of k came with a factor."""
    n = tl.arange(0, BLOCK_K)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        inside = (n < width - b)[:, None] & (column < dim)[None, :]
        k = _tile(k_ptr, c, b + n, k_l, k_k, live, width)
        state = tl.load(kept_ptr + (b + n)[:, None] * dim, mask=inside, other=0.0) * fade
        state = tl.dot(tl.trans(k * kept[:, None]), d, state, input_precision=PRECISION)
        tl.store(next_ptr + (b + n)[:, None] * dim, state, mask=inside)


@triton.jit
def _kept(ptr, there, PIECES: tl.constexpr):
    """Numbers in float32, but bfloat16 ones as they are where products are of pieces."""
    x = tl.load(ptr, mask=there, other=0.0)
    if INTERPRETED or not PIECES:
        x = widen(x)
    else:
        if x.dtype != tl.bfloat16:
            x = x.to(tl.float32)
    return x


@triton.jit
def _cut(x):
    """The first 8 bits of a float32's digits, as bfloat16, and the rest. Not rounded: a conversion to bfloat16 has a
    quarter of the rate of these on sm_90."""
    bits = x.to(tl.uint32, bitcast=True)
    first = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return first, x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _pieces(x):
    """float32, which has 24 bits, as a sum of three bfloat16 numbers."""
    high, rest = _cut(x)
    middle, rest = _cut(rest)
    low, rest = _cut(rest)
    return high, middle, low


@triton.jit
def _product(a, b, total, PIECES: tl.constexpr):
    """total + a b, as float32 has it. PIECES: of bfloat16 on matrix units, which is exact for what `_kept` left so: one
    product of two such operands, three of one of them, six of none (2^-21 of a product is left out)."""
    if INTERPRETED or not PIECES:
        total = tl.dot(a, b, total, input_precision="ieee")
    else:
        if a.dtype == tl.bfloat16:
            if b.dtype == tl.bfloat16:
                total = tl.dot(a, b, total)
            else:
                high, middle, low = _pieces(b)
                total = tl.dot(a, low, total)
                total = tl.dot(a, middle, total)
                total = tl.dot(a, high, total)
        else:
            a_high, a_middle, a_low = _pieces(a)
            if b.dtype == tl.bfloat16:
                total = tl.dot(a_low, b, total)
                total = tl.dot(a_middle, b, total)
                total = tl.dot(a_high, b, total)
            else:
                high, middle, low = _pieces(b)
                total = tl.dot(a_low, high, total)
                total = tl.dot(a_high, low, total)
                total = tl.dot(a_middle, middle, total)
                total = tl.dot(a_middle, high, total)
                total = tl.dot(a_high, middle, total)
                total = tl.dot(a_high, high, total)
    return total
