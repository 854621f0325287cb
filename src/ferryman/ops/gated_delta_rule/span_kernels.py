"""What a chunk of tokens needs of its keys, queries, decays and rates alone, and the two walks that use it.

`_systems`, all chunks at once: the inverses of I + M diag(beta) and of I + diag(beta) M (`table_kernels`), the
weights of y, and factors of rows. Tables are kept as the bfloat16 pieces that a walk multiplies with, so that a step
copies them to shared memory as they lie. `_forth` keeps the state that each span of chunks begins with, and u; `_back`
the gradient of the state that each span ends with, and that of a correction. A program of a walk has 64 columns of a
state, turned: (columns, keys). Then a state, u and what is asked are left operands of matrix units as they lie in
registers, and keys, queries and tables are right operands that both products of a step share. TWO: keys are more than a
block of them, and lie in two, whose pieces follow each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _kept, _pieces, _place, _product, _totals

# what multiplies a row: k of the state before; k of u, to the state after; q of dy, to the gradient before; k of the
# gradient after; k of what is asked, to the gradient before; beta; k; q. And the sums of g.
ROWS = tl.constexpr(9)
BETA, K_FACTOR, Q_FACTOR, TOTAL = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)


@triton.jit
def _keep(ptr, at, x):
    """A table: its three pieces, one after another."""
    size: tl.constexpr = x.shape[0] * x.shape[1]
    high, middle, low = _pieces(x)
    tl.store(ptr + at, high)
    tl.store(ptr + size + at, middle)
    tl.store(ptr + 2 * size + at, low)


@triton.jit
def _times(a, ptr, at, total):
    """total + a table, of what `_keep` left at ``ptr``: as `_product` has it."""
    size: tl.constexpr = at.shape[0] * at.shape[1]
    high, middle, low = tl.load(ptr + at), tl.load(ptr + size + at), tl.load(ptr + 2 * size + at)
    if INTERPRETED:
        total = tl.dot(a, widen(high) + (widen(middle) + widen(low)), total, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        total = tl.dot(a, low, total)
        total = tl.dot(a, middle, total)
        total = tl.dot(a, high, total)
    else:
        a_high, a_middle, a_low = _pieces(a)
        total = tl.dot(a_low, high, total)
        total = tl.dot(a_high, low, total)
        total = tl.dot(a_middle, middle, total)
        total = tl.dot(a_middle, high, total)
        total = tl.dot(a_high, middle, total)
        total = tl.dot(a_high, high, total)
    return total


@triton.jit
def _joined(inverse, system, c, SIZE: tl.constexpr):
    """Parts of SIZE of an inverse, D, and those beside them, two and two: D - D R D, R what stands beside them."""
    part, two = c // SIZE, c // (2 * SIZE)
    beside = (part[:, None] != part[None, :]) & (two[:, None] == two[None, :])
    zeros = tl.zeros(system.shape, tl.float32)
    rest = _product(inverse, tl.where(beside, system, 0.0), zeros, True)
    return inverse - _product(rest, inverse, zeros, True)


@triton.jit
def _inverse(system, c, PART: tl.constexpr):
    """Of I + system, which is below the diagonal: of PARTs on the diagonal by substitution, all at once; then joined.
    Four parts at most."""
    CHUNK: tl.constexpr = system.shape[0]
    COUNT: tl.constexpr = CHUNK // PART
    own = tl.arange(0, COUNT)[:, None, None, None] == tl.arange(0, COUNT)[None, None, :, None]
    r = tl.arange(0, PART)
    parts = tl.sum(tl.where(own, tl.reshape(system, [COUNT, PART, COUNT, PART]), 0.0), 2)
    solved = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0) + tl.zeros([COUNT, PART, PART], tl.float32)
    for i in range(1, PART):
        row = tl.sum(tl.where(r[None, :, None] == i, parts, 0.0), 1)
        earlier = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(r[None, :, None] == i, solved - earlier[:, None, :], solved)
    inverse = tl.reshape(tl.where(own, solved[:, :, None, :], 0.0), [CHUNK, CHUNK])
    if COUNT > 1:
        inverse = _joined(inverse, system, c, PART)
    if COUNT > 2:
        inverse = _joined(inverse, system, c, 2 * PART)
    return inverse


@triton.jit(do_not_specialize=["length", "chunks"])
def _systems(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    forth_ptr,
    back_ptr,
    weight_ptr,
    row_ptr,
    scale,
    length,
    chunks,
    heads,
    shared,
    width,
    q_b,
    q_l,
    q_h,
    q_k,
    k_b,
    k_l,
    k_h,
    k_k,
    g_b,
    g_l,
    g_h,
    t_b,
    t_l,
    t_h,
    NORM: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """forth, of I + M diag(beta), turned, back, of I + diag(beta) M, and weight, of a row of y by one of d: (batch,
    heads, chunks, 3, CHUNK, CHUNK). row: (batch, heads, chunks, ROWS, CHUNK)."""
    program = tl.program_id(0).to(tl.int64)
    first = program % chunks * CHUNK
    head = (program // chunks) % heads
    sample = program // (chunks * heads)
    c = tl.arange(0, CHUNK)
    live = c < length - first
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_size = tl.zeros([CHUNK], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        k = _rows(k_ptr, k_l, k_k, c, n, live, width)
        q = _rows(q_ptr, q_l, q_k, c, n, live, width)
        scores = _product(k, tl.trans(k), scores, True)
        weight = _product(q, tl.trans(k), weight, True)
        k, q = k.to(tl.float32), q.to(tl.float32)
        k_size += tl.sum(k * k, 1)
        q_size += tl.sum(q * q, 1)
    k_factor, q_factor = _factors(k_size, 1.0, NORM), _factors(q_size, scale, NORM)
    # a token past the end has beta and g 0: it leaves the state as it is
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
    since = exp(total)
    until = exp(end - total) * k_factor
    row_ptr += program * ROWS * CHUNK + c
    tl.store(row_ptr, since * k_factor)
    tl.store(row_ptr + CHUNK, beta * until)
    tl.store(row_ptr + 2 * CHUNK, since * q_factor)
    tl.store(row_ptr + 3 * CHUNK, until)
    tl.store(row_ptr + 4 * CHUNK, -beta * (since * k_factor))
    tl.store(row_ptr + 5 * CHUNK, beta)
    tl.store(row_ptr + 6 * CHUNK, k_factor)
    tl.store(row_ptr + 7 * CHUNK, q_factor)
    tl.store(row_ptr + TOTAL * CHUNK, total)
    seen = c[:, None] >= c[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
    table = program * 3 * CHUNK * CHUNK
    at = c[:, None] * CHUNK + c[None, :]
    _keep(weight_ptr + table, at, tl.where(seen, q_factor[:, None] * weight * decay, 0.0))
    system = tl.where(c[:, None] > c[None, :], k_factor[:, None] * scores * decay, 0.0)
    inverse = _inverse(system * beta[None, :], c, PART)
    _keep(forth_ptr + table, at, tl.trans(inverse))
    # (I + diag(beta) M)^-1 = I - diag(beta) (I + M diag(beta))^-1 M
    other = _product(inverse, system, tl.zeros([CHUNK, CHUNK], tl.float32), True)
    other = tl.where(c[:, None] == c[None, :], 1.0, 0.0) - beta[:, None] * other
    _keep(back_ptr + table, at, other)


@triton.jit
def _read(ptr, column_by, key_by, column, key, dim, width):
    """(columns, keys) of a state, in float32; zeros where there is none."""
    x = tl.zeros([column.shape[0], key.shape[0]], tl.float32)
    if ptr is not None:
        inside = (column < dim)[:, None] & (key < width)[None, :]
        x = widen(tl.load(ptr + column[:, None] * column_by + key[None, :] * key_by, mask=inside, other=0.0))
    return x


@triton.jit
def _write(ptr, column_by, key_by, x, column, key, dim, width):
    inside = (column < dim)[:, None] & (key < width)[None, :]
    x = narrow(x, ptr.dtype.element_ty)
    tl.store(ptr + column[:, None] * column_by + key[None, :] * key_by, x, mask=inside)


@triton.jit
def _rows(ptr, row, one, c, key, live, width):
    return _kept(ptr + c[:, None] * row + key[None, :] * one, live[:, None] & (key < width)[None, :], True)


@triton.jit(do_not_specialize=["length", "chunks"])
def _forth(
    k_ptr,
    v_ptr,
    state_ptr,
    forth_ptr,
    row_ptr,
    before_ptr,
    wrong_ptr,
    length,
    chunks,
    heads,
    shared,
    width,
    dim,
    k_b,
    k_l,
    k_h,
    k_k,
    v_b,
    v_l,
    v_h,
    v_v,
    s_b,
    s_h,
    s_k,
    s_v,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """before, the state before each span of EACH chunks: (batch, heads, spans, dims, KEYS). wrong, u: (batch, heads,
    spans, dims, tokens of a span). Both in float32; zeros past the width, the columns and the last token."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_K)
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    place = (sample * heads + head) * chunks
    KEYS: tl.constexpr = 2 * BLOCK_K if TWO else BLOCK_K
    dims = tl.cdiv(dim, BLOCK_V) * BLOCK_V
    known = column < dim
    cell = c[:, None] * CHUNK + c[None, :]
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    state = _read(state_ptr, s_v, s_k, column, n, dim, width)
    if TWO:
        other = _read(state_ptr, s_v, s_k, column, BLOCK_K + n, dim, width)
    for i in tl.range(0, chunks, num_stages=STAGES):
        first = tl.full([], CHUNK, tl.int64) * i
        live = c < length - first
        row = row_ptr + (place + i) * ROWS * CHUNK
        k = _rows(k_ptr + first * k_l, k_l, k_k, c, n, live, width)
        if TWO:
            other_k = _rows(k_ptr + first * k_l, k_l, k_k, c, BLOCK_K + n, live, width)
        v_at = v_ptr + first * v_l + c[None, :] * v_l + column[:, None] * v_v
        v = tl.load(v_at, mask=known[:, None] & live[None, :], other=0.0)
        out = before_ptr + (place + i) // EACH * (dims * KEYS) + column[:, None] * KEYS + n[None, :]
        if i % EACH == 0:
            tl.store(out, state)
            if TWO:
                tl.store(out + BLOCK_K, other)
        wrong = _product(state, tl.trans(k), tl.zeros([BLOCK_V, CHUNK], tl.float32), True)
        if TWO:
            wrong = _product(other, tl.trans(other_k), wrong, True)
        wrong = widen(v) - tl.load(row + c)[None, :] * wrong
        table = forth_ptr + (place + i) * 3 * CHUNK * CHUNK
        wrong = _times(wrong, table, cell, tl.zeros([BLOCK_V, CHUNK], tl.float32))
        out = wrong_ptr + (place + i) // EACH * (dims * EACH * CHUNK) + i % EACH * CHUNK
        tl.store(out + column[:, None] * (EACH * CHUNK) + c[None, :], wrong)
        came = tl.load(row + CHUNK + c)[None, :] * wrong
        fade = exp(tl.load(row + TOTAL * CHUNK + CHUNK - 1))
        state = _product(came, k, state * fade, True)
        if TWO:
            other = _product(came, other_k, other * fade, True)


@triton.jit(do_not_specialize=["length", "chunks"])
def _back(
    dy_ptr,
    df_ptr,
    q_ptr,
    k_ptr,
    back_ptr,
    weight_ptr,
    row_ptr,
    late_ptr,
    asked_ptr,
    dv_ptr,
    ds_ptr,
    length,
    chunks,
    heads,
    shared,
    width,
    dim,
    y_b,
    y_l,
    y_h,
    y_v,
    f_b,
    f_h,
    f_k,
    f_v,
    q_b,
    q_l,
    q_h,
    q_k,
    k_b,
    k_l,
    k_h,
    k_k,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """late, the gradient of the state after each span of EACH chunks: (batch, heads, spans, dims, KEYS). asked, that of
    a correction: (batch, heads, spans, dims, tokens of a span). Both in float32; zeros past the width, the columns and
    the last token."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_K)
    dy_ptr += sample * y_b + head * y_h
    q_ptr += sample * q_b + (head // shared) * q_h
    k_ptr += sample * k_b + (head // shared) * k_h
    dv_ptr += (sample * length * heads + head) * dim
    place = (sample * heads + head) * chunks
    KEYS: tl.constexpr = 2 * BLOCK_K if TWO else BLOCK_K
    dims = tl.cdiv(dim, BLOCK_V) * BLOCK_V
    known = column < dim
    cell = c[:, None] * CHUNK + c[None, :]
    if df_ptr is not None:
        df_ptr += sample * f_b + head * f_h
    late = _read(df_ptr, f_v, f_k, column, n, dim, width)
    if TWO:
        other = _read(df_ptr, f_v, f_k, column, BLOCK_K + n, dim, width)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        i = chunks - 1 - step
        first = tl.full([], CHUNK, tl.int64) * i
        live = c < length - first
        row = row_ptr + (place + i) * ROWS * CHUNK
        k = _rows(k_ptr + first * k_l, k_l, k_k, c, n, live, width)
        q = _rows(q_ptr + first * q_l, q_l, q_k, c, n, live, width)
        if TWO:
            other_k = _rows(k_ptr + first * k_l, k_l, k_k, c, BLOCK_K + n, live, width)
            other_q = _rows(q_ptr + first * q_l, q_l, q_k, c, BLOCK_K + n, live, width)
        shape = known[:, None] & live[None, :]
        dy = _kept(dy_ptr + first * y_l + c[None, :] * y_l + column[:, None] * y_v, shape, True)
        out = late_ptr + (place + i) // EACH * (dims * KEYS) + column[:, None] * KEYS + n[None, :]
        if i % EACH == EACH - 1:
            tl.store(out, late)
            if TWO:
                tl.store(out + BLOCK_K, other)
        table = (place + i) * 3 * CHUNK * CHUNK
        asked = _product(late, tl.trans(k), tl.zeros([BLOCK_V, CHUNK], tl.float32), True)
        if TWO:
            asked = _product(other, tl.trans(other_k), asked, True)
        asked *= tl.load(row + 3 * CHUNK + c)[None, :]
        asked = _times(dy, weight_ptr + table, cell, asked)
        fade = exp(tl.load(row + TOTAL * CHUNK + CHUNK - 1))
        came = tl.load(row + 2 * CHUNK + c)[None, :] * dy.to(tl.float32)
        late = _product(came, q, late * fade, True)
        if TWO:
            other = _product(came, other_q, other * fade, True)
        asked = _times(asked, back_ptr + table, cell, tl.zeros([BLOCK_V, CHUNK], tl.float32))
        out = asked_ptr + (place + i) // EACH * (dims * EACH * CHUNK) + i % EACH * CHUNK
        tl.store(out + column[:, None] * (EACH * CHUNK) + c[None, :], asked)
        out = dv_ptr + first * (heads * dim) + c[None, :] * (heads * dim) + column[:, None]
        x = tl.load(row + 5 * CHUNK + c)[None, :] * asked
        tl.store(out, narrow(x, dv_ptr.dtype.element_ty), mask=shape)
        came = tl.load(row + 4 * CHUNK + c)[None, :] * asked
        late = _product(came, k, late, True)
        if TWO:
            other = _product(came, other_k, other, True)
    if ds_ptr is not None:
        ds_ptr += (sample * heads + head) * width * dim
        _write(ds_ptr, 1, dim, late, column, n, dim, width)
        if TWO:
            _write(ds_ptr, 1, dim, other, column, BLOCK_K + n, dim, width)
