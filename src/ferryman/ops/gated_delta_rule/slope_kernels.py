"""The gradients that no walk of `span_kernels` gives: `_slopes`, and through normalisation those of q and k: `_ends`.

A program of `_slopes` has a span, and the heads that share a query in turn. What pairs of tokens bring goes by memory
of its own, which the cache holds; a head adds its part of the gradients of q and k to those of the heads before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _kept, _product
from ferryman.ops.gated_delta_rule.span_kernels import BETA, K_FACTOR, Q_FACTOR, ROWS, TOTAL


@triton.jit
def _row(row_ptr, which, c, CHUNK: tl.constexpr):
    """A factor of the tokens c of a span: its chunks lie one after another."""
    return tl.load(row_ptr + (c // CHUNK * ROWS + which) * CHUNK + c % CHUNK)


@triton.jit
def _sums(row_ptr, c, CHUNK: tl.constexpr):
    """Of g up to each token of a span of two chunks at most."""
    total = _row(row_ptr, TOTAL, c, CHUNK)
    if c.shape[0] > CHUNK:
        total += tl.where(c >= CHUNK, tl.load(row_ptr + TOTAL * CHUNK + CHUNK - 1), 0.0)
    return total


@triton.jit
def _against(x_ptr, k_ptr, x_l, x_k, k_l, k_k, c, live, width, BLOCK_K: tl.constexpr):
    """x k^T of a span's rows."""
    total = tl.zeros([c.shape[0], c.shape[0]], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        x = _kept(x_ptr + c[:, None] * x_l + n[None, :] * x_k, there, True)
        k = _kept(k_ptr + c[:, None] * k_l + n[None, :] * k_k, there, True)
        total = _product(x, tl.trans(k), total, True)
    return total


@triton.jit
def _through(
    part_ptr,
    x_ptr,
    x_l,
    x_k,
    out_ptr,
    out_l,
    c,
    live,
    width,
    factor,
    NORM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of rows x from ``part``, that of rows factor x: what normalisation makes of it."""
    size = tl.zeros(c.shape, tl.float32)
    along = tl.zeros(c.shape, tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        x = widen(tl.load(x_ptr + c[:, None] * x_l + n[None, :] * x_k, mask=there, other=0.0))
        slope = tl.load(part_ptr + c[:, None] * KEYS + n[None, :])
        size += tl.sum(x * x, 1)
        along += tl.sum(x * slope, 1)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        slope = tl.load(part_ptr + c[:, None] * KEYS + n[None, :])
        if NORM:
            x = widen(tl.load(x_ptr + c[:, None] * x_l + n[None, :] * x_k, mask=there, other=0.0))
            slope -= x * (along / (size + 1e-6))[:, None]
        slope = narrow(slope * factor[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + c[:, None] * out_l + n[None, :], slope, mask=there)


@triton.jit
def _asked_of(y_ptr, y_l, y_v, u_ptr, a_ptr, c, live, dim, BLOCK_V: tl.constexpr):
    """What corrections ask of each other, what y asks of them, and the gradient of beta: a u^T, dy u^T, their rows."""
    SPAN: tl.constexpr = c.shape[0]
    met = tl.zeros([SPAN, SPAN], tl.float32)
    seen = tl.zeros([SPAN, SPAN], tl.float32)
    of_beta = tl.zeros([SPAN], tl.float32)
    for b in tl.range(0, dim, BLOCK_V, num_stages=1):
        v = b + tl.arange(0, BLOCK_V)
        dy = _kept(y_ptr + c[:, None] * y_l + v[None, :] * y_v, live[:, None] & (v < dim)[None, :], True)
        at = v[:, None] * SPAN + c[None, :]
        asked, wrong = tl.load(a_ptr + at), tl.load(u_ptr + at)
        of_beta += tl.sum(wrong * asked, 0)
        met = _product(tl.trans(asked), wrong, met, True)
        seen = _product(dy, wrong, seen, True)
    return met, seen, of_beta


@triton.jit
def _states_of(y_ptr, y_l, y_v, u_ptr, a_ptr, s_ptr, d_ptr, c, n, live, dim, KEYS: tl.constexpr, BLOCK_V: tl.constexpr):
    """dy S^T, a S^T, u D^T and the sum of S D: of a block of keys of the state before a span, S, and of the gradient of
    that after it, D."""
    SPAN: tl.constexpr = c.shape[0]
    BLOCK_K: tl.constexpr = n.shape[0]
    of_y = tl.zeros([SPAN, BLOCK_K], tl.float32)
    of_x = tl.zeros([SPAN, BLOCK_K], tl.float32)
    of_d = tl.zeros([SPAN, BLOCK_K], tl.float32)
    whole = tl.zeros([BLOCK_K], tl.float32)
    for b in tl.range(0, dim, BLOCK_V, num_stages=1):
        v = b + tl.arange(0, BLOCK_V)
        at = v[:, None] * SPAN + c[None, :]
        turned = v[:, None] * KEYS + n[None, :]
        dy = _kept(y_ptr + c[:, None] * y_l + v[None, :] * y_v, live[:, None] & (v < dim)[None, :], True)
        state = tl.load(s_ptr + turned)
        of_y = _product(dy, state, of_y, True)
        asked = tl.load(a_ptr + at)
        of_x = _product(tl.trans(asked), state, of_x, True)
        wrong = tl.load(u_ptr + at)
        late = tl.load(d_ptr + turned)
        of_d = _product(tl.trans(wrong), late, of_d, True)
        whole += tl.sum(state * late, 0)
    return of_y, of_x, of_d, tl.sum(whole, 0)


@triton.jit
def _by_pairs(
    dq,
    dk,
    met_ptr,
    seen_ptr,
    row,
    q_ptr,
    q_l,
    q_k,
    k_ptr,
    k_l,
    k_k,
    c,
    n,
    many,
    width,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dq and dk with what the pairs of a span's tokens bring."""
    SPAN: tl.constexpr = c.shape[0]
    for b in tl.range(0, SPAN, BLOCK_V, num_stages=1):
        j = b + tl.arange(0, BLOCK_V)
        inside = (j < many)[:, None] & (n < width)[None, :]
        k = _kept(k_ptr + j[:, None] * k_l + n[None, :] * k_k, inside, True)
        q = _kept(q_ptr + j[:, None] * q_l + n[None, :] * q_k, inside, True)
        k_factor, q_factor = _row(row, K_FACTOR, j, CHUNK), _row(row, Q_FACTOR, j, CHUNK)
        at = c[:, None] * SPAN + j[None, :]
        dq = _product(tl.load(seen_ptr + at) * k_factor[None, :], k, dq, True)
        dk = _product(tl.load(met_ptr + at) * k_factor[None, :], k, dk, True)
        seen = tl.load(seen_ptr + j[None, :] * SPAN + c[:, None])
        dk = _product(seen * q_factor[None, :], q, dk, True)
    return dq, dk


@triton.jit(do_not_specialize=["length", "spans"])
def _slopes(
    dy_ptr,
    q_ptr,
    k_ptr,
    row_ptr,
    before_ptr,
    late_ptr,
    wrong_ptr,
    asked_ptr,
    pair_ptr,
    part_ptr,
    dg_ptr,
    dbeta_ptr,
    length,
    spans,
    heads,
    shared,
    width,
    dim,
    y_b,
    y_l,
    y_h,
    y_v,
    q_b,
    q_l,
    q_h,
    q_k,
    k_b,
    k_l,
    k_h,
    k_k,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """pair: (batch, groups, spans, 2, SPAN, SPAN), of a head the gradients of k k^T, on both sides of its diagonal, and
    of q k^T. part: (batch, groups, spans, 2, SPAN, KEYS), sums of dq and dk over heads, of rows as they are multiplied.
    Both in float32. No dg: there is no g."""
    program = tl.program_id(0).to(tl.int64)
    span = program % spans
    groups = heads // shared
    group = program // spans % groups
    sample = program // (spans * groups)
    first = span * SPAN
    c = tl.arange(0, SPAN)
    live = c < length - first
    reached = c[:, None] >= c[None, :]
    q_ptr += sample * q_b + group * q_h + first * q_l
    k_ptr += sample * k_b + group * k_h + first * k_l
    met_ptr = pair_ptr + program * 2 * SPAN * SPAN
    seen_ptr = met_ptr + SPAN * SPAN
    of_q_ptr = part_ptr + program * 2 * SPAN * KEYS
    of_k_ptr = of_q_ptr + SPAN * KEYS
    dims = tl.cdiv(dim, COLUMNS) * COLUMNS
    for r in tl.range(0, shared, num_stages=1, disable_licm=True):
        head = group * shared + r
        place = (sample * heads + head) * spans + span
        y_ptr = dy_ptr + sample * y_b + first * y_l + head * y_h
        u_ptr, a_ptr = wrong_ptr + place * dims * SPAN, asked_ptr + place * dims * SPAN
        row = row_ptr + place * ROWS * SPAN
        token = (sample * length + first + c) * heads + head
        met, seen, of_beta = _asked_of(y_ptr, y_l, y_v, u_ptr, a_ptr, c, live, dim, BLOCK_V)
        tl.store(dbeta_ptr + token, narrow(of_beta, dbeta_ptr.dtype.element_ty), mask=live)
        beta, total = _row(row, BETA, c, CHUNK), _sums(row, c, CHUNK)
        k_factor, q_factor = _row(row, K_FACTOR, c, CHUNK), _row(row, Q_FACTOR, c, CHUNK)
        before = c[:, None] > c[None, :]
        decay = tl.where(reached, exp(tl.where(reached, total[:, None] - total[None, :], 0.0)), 0.0) * beta[None, :]
        met = tl.where(before, -beta[:, None] * met * decay, 0.0)
        seen *= decay
        at = c[:, None] * SPAN + c[None, :]
        tl.store(met_ptr + at, met, mask=reached)
        tl.store(met_ptr + c[None, :] * SPAN + c[:, None], met, mask=before)
        tl.store(seen_ptr + at, seen)
        tl.debug_barrier()
        exponent = tl.zeros([SPAN], tl.float32)
        if dg_ptr is not None:
            # of an exponent: all pairs with the earlier token before it, and the later one not
            met *= k_factor[:, None] * _against(k_ptr, k_ptr, k_l, k_k, k_l, k_k, c, live, width, BLOCK_K)
            seen *= q_factor[:, None] * _against(q_ptr, k_ptr, q_l, q_k, k_l, k_k, c, live, width, BLOCK_K)
            pairs = tl.where(before, (met + seen) * k_factor[None, :], 0.0)
            earlier = tl.where(c[:, None] < c[None, :], 1.0, 0.0)
            if not INTERPRETED:
                earlier = earlier.to(tl.bfloat16)
            pairs = _product(pairs, earlier, tl.zeros([SPAN, SPAN], tl.float32), True)
            exponent = tl.sum(tl.where(reached, pairs, 0.0), 0)
        early = tl.zeros([SPAN], tl.float32)
        sent = tl.zeros([SPAN], tl.float32)
        whole = 0.0
        for b in tl.range(0, width, BLOCK_K, num_stages=1, disable_licm=True):
            n = b + tl.arange(0, BLOCK_K)
            there = live[:, None] & (n < width)[None, :]
            s_ptr, d_ptr = before_ptr + place * dims * KEYS, late_ptr + place * dims * KEYS
            dq, dx, dk, both = _states_of(y_ptr, y_l, y_v, u_ptr, a_ptr, s_ptr, d_ptr, c, n, live, dim, KEYS, BLOCK_V)
            whole += both
            beta, total = _row(row, BETA, c, CHUNK), _sums(row, c, CHUNK)
            end = tl.sum(tl.where(c == SPAN - 1, total, 0.0), 0)
            q = widen(tl.load(q_ptr + c[:, None] * q_l + n[None, :] * q_k, mask=there, other=0.0))
            dq *= exp(total)[:, None]
            early += tl.sum(dq * (q * _row(row, Q_FACTOR, c, CHUNK)[:, None]), 1)
            k = widen(tl.load(k_ptr + c[:, None] * k_l + n[None, :] * k_k, mask=there, other=0.0))
            k *= _row(row, K_FACTOR, c, CHUNK)[:, None]
            dx *= (beta * exp(total))[:, None]
            dk *= (beta * exp(end - total))[:, None]
            early -= tl.sum(dx * k, 1)
            sent += tl.sum(dk * k, 1)
            dq, dk = _by_pairs(
                dq,
                dk - dx,
                met_ptr,
                seen_ptr,
                row,
                q_ptr,
                q_l,
                q_k,
                k_ptr,
                k_l,
                k_k,
                c,
                n,
                length - first,
                width,
                CHUNK,
                BLOCK_V,
            )
            cell = c[:, None] * KEYS + n[None, :]
            if r > 0:
                dq += tl.load(of_q_ptr + cell)
                dk += tl.load(of_k_ptr + cell)
            tl.store(of_q_ptr + cell, dq)
            tl.store(of_k_ptr + cell, dk)
        if dg_ptr is not None:
            fade = exp(tl.sum(tl.where(c == SPAN - 1, _sums(row, c, CHUNK), 0.0), 0))
            exponent += tl.sum(tl.where(reached, early[:, None], sent[:, None]), 0) + fade * whole
            tl.store(dg_ptr + token, narrow(exponent, dg_ptr.dtype.element_ty), mask=live)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["length", "spans"])
def _ends(
    part_ptr,
    q_ptr,
    k_ptr,
    row_ptr,
    dq_ptr,
    dk_ptr,
    length,
    spans,
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
    NORM: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dq or dk of a span, from `_slopes`' part."""
    which = tl.program_id(0) % 2
    program = (tl.program_id(0) // 2).to(tl.int64)
    span = program % spans
    groups = heads // shared
    group = program // spans % groups
    sample = program // (spans * groups)
    first = span * SPAN
    c = tl.arange(0, SPAN)
    live = c < length - first
    row_ptr += ((sample * heads + group * shared) * spans + span) * ROWS * SPAN
    part_ptr += (program * 2 + which) * SPAN * KEYS
    out = ((sample * length + first) * groups + group) * width
    if which == 0:
        x_ptr = q_ptr + sample * q_b + group * q_h + first * q_l
        factor = _row(row_ptr, Q_FACTOR, c, CHUNK)
        _through(part_ptr, x_ptr, q_l, q_k, dq_ptr + out, groups * width, c, live, width, factor, NORM, KEYS, BLOCK_K)
    else:
        x_ptr = k_ptr + sample * k_b + group * k_h + first * k_l
        factor = _row(row_ptr, K_FACTOR, c, CHUNK)
        _through(part_ptr, x_ptr, k_l, k_k, dk_ptr + out, groups * width, c, live, width, factor, NORM, KEYS, BLOCK_K)
