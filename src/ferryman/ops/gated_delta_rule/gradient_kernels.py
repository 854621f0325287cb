"""`gated_delta_rule_backward` in passes of which the two walks alone go from chunk to chunk.

1. `table_kernels`, `turned_walk_kernels`: tables of chunks, and both walks. They keep the states that spans of chunks
   begin with, the gradients of those they end with, u, and the gradients of corrections.
2. `_pairs`, all spans at once: what y and corrections ask of pairs of tokens, and the gradients of beta.
3. `_gradients`, all spans and blocks of keys at once: the gradients of q and k, of each head its own.
4. `_decays`, all spans at once: sums for the gradient of g. `_finish` adds what heads share, and applies what
   normalisation does.

Products are of bfloat16 pieces on NVIDIA's matrix units (`chunk_kernels._product`): float32's digits at a cost of three
products or six, and 16-bit operands of any order. No atomics: each sum has a fixed order.

Limit, for a token of a head with K = V = 128 in bfloat16 on an H100, spans of C = 64: 2 K V operations by three
products and 4 K V by six are 0.49 M of `_gradients`, 6 C K by three 0.15 M; `_pairs` 2 C V by nine and 4 C K 0.18 M:
0.82 ns at the peak. Memory: both states 16 K V / C bytes, u and what was asked 8 V written and twice 8 V read, parts of
dq and dk 16 K, tables 16 C and twice read: 12 KB, 3.6 ns. 2,048 tokens of 32 heads: 240 us, with the walks' inputs 290.
A walk is L / 32 steps of three products or five, one after another, which is not in this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, strides
from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, widen
from ferryman.ops.gated_delta_rule.backward_kernels import _finish, begun
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _kept, _product, _totals
from ferryman.ops.gated_delta_rule.parallel_kernels import called
from ferryman.ops.gated_delta_rule.triton_kernels import _power
from ferryman.ops.gated_delta_rule.turned_walk_kernels import Walked


@triton.jit(do_not_specialize=["length", "spans"])
def _pairs(
    dy_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    wrong_ptr,
    asked_ptr,
    met_ptr,
    seen_ptr,
    row_ptr,
    fade_ptr,
    dbeta_ptr,
    scale,
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
    g_b,
    g_l,
    g_h,
    t_b,
    t_l,
    t_h,
    NORM: tl.constexpr,
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """met, seen, the gradients of k k^T and q k^T with the decays: (batch, heads, spans, SPAN, SPAN); met has the same
    on both sides of its diagonal. row: (.., 5, SPAN), the decay since the span began and until it ends, the factors of
    rows of k and q, and what pairs bring to the gradient of g. fade: (batch, heads, spans), the whole decay."""
    program = tl.program_id(0).to(tl.int64)
    first = program % spans * SPAN
    head = program // spans % heads
    sample = program // (spans * heads)
    c = tl.arange(0, SPAN)
    live = c < length - first
    dy_ptr += sample * y_b + head * y_h + first * y_l
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    token = (sample * length + first) * heads + head
    wrong_ptr += token * dim
    asked_ptr += token * dim
    beta_ptr += sample * t_b + head * t_h + first * t_l
    beta = widen(tl.load(beta_ptr + c * t_l, mask=live, other=0.0))
    met = tl.zeros([SPAN, SPAN], tl.float32)
    seen = tl.zeros([SPAN, SPAN], tl.float32)
    of_beta = tl.zeros([SPAN], tl.float32)
    for b in tl.range(0, dim, BLOCK_V, num_stages=1):
        n = b + tl.arange(0, BLOCK_V)
        there = live[:, None] & (n < dim)[None, :]
        at = c[:, None] * (heads * dim) + n[None, :]
        wrong = tl.load(wrong_ptr + at, mask=there, other=0.0)
        asked = tl.load(asked_ptr + at, mask=there, other=0.0)
        dy = _kept(dy_ptr + c[:, None] * y_l + n[None, :] * y_v, there, PIECES)
        of_beta += tl.sum(wrong * asked, 1)
        wrong = tl.trans(wrong)
        met = _product(asked, wrong, met, PIECES)
        seen = _product(dy, wrong, seen, PIECES)
    tl.store(dbeta_ptr + token + c * heads, narrow(of_beta, dbeta_ptr.dtype.element_ty), mask=live)
    scores = tl.zeros([SPAN, SPAN], tl.float32)
    weight = tl.zeros([SPAN, SPAN], tl.float32)
    k_size = tl.zeros([SPAN], tl.float32)
    q_size = tl.zeros([SPAN], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        k = _kept(k_ptr + c[:, None] * k_l + n[None, :] * k_k, there, PIECES)
        q = _kept(q_ptr + c[:, None] * q_l + n[None, :] * q_k, there, PIECES)
        scores = _product(k, tl.trans(k), scores, PIECES)
        weight = _product(q, tl.trans(k), weight, PIECES)
        k, q = k.to(tl.float32), q.to(tl.float32)
        k_size += tl.sum(k * k, 1)
        q_size += tl.sum(q * q, 1)
    k_factor, q_factor = _factors(k_size, 1.0, NORM), _factors(q_size, scale, NORM)
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == SPAN - 1, total, 0.0), 0)
    before = c[:, None] > c[None, :]
    reached = c[:, None] >= c[None, :]
    decay = tl.where(reached, exp(tl.where(reached, total[:, None] - total[None, :], 0.0)), 0.0)
    decay *= beta[None, :]
    met = tl.where(before, -beta[:, None] * met * decay, 0.0)
    seen *= decay
    met_ptr += program * SPAN * SPAN
    seen_ptr += program * SPAN * SPAN
    at = c[:, None] * SPAN + c[None, :]
    tl.store(met_ptr + at, met, mask=reached)
    tl.store(met_ptr + c[None, :] * SPAN + c[:, None], met, mask=before)
    tl.store(seen_ptr + at, seen)
    row_ptr += program * 5 * SPAN + c
    tl.store(row_ptr, exp(total))
    tl.store(row_ptr + SPAN, exp(end - total))
    tl.store(row_ptr + 2 * SPAN, k_factor)
    tl.store(row_ptr + 3 * SPAN, q_factor)
    tl.store(fade_ptr + program, exp(end))
    if g_ptr is not None:
        # of an exponent: all pairs with the earlier token before it, and the later one not
        pairs = (k_factor[:, None] * met * scores + q_factor[:, None] * seen * weight) * k_factor[None, :]
        pairs = tl.where(before, pairs, 0.0)
        earlier = tl.where(c[:, None] < c[None, :], 1.0, 0.0)
        if PIECES and not INTERPRETED:
            earlier = earlier.to(tl.bfloat16)
        pairs = _product(pairs, earlier, tl.zeros([SPAN, SPAN], tl.float32), PIECES)
        tl.store(row_ptr + 4 * SPAN, tl.sum(tl.where(reached, pairs, 0.0), 0))


@triton.jit(do_not_specialize=["length", "spans"])
def _gradients(
    dy_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    before_ptr,
    late_ptr,
    wrong_ptr,
    asked_ptr,
    met_ptr,
    seen_ptr,
    row_ptr,
    dq_ptr,
    dk_ptr,
    sum_ptr,
    whole_ptr,
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
    t_b,
    t_l,
    t_h,
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dq, dk, of rows as they are multiplied: (batch, length, heads, width) in float32. sum: (batch, heads, spans,
    blocks of keys, 2, SPAN), what the state before the span and the gradient after it bring to the exponents of a token
    and of those before it, or after it. whole: (batch, heads, spans, blocks of keys), the product of both states."""
    blocks = tl.cdiv(width, BLOCK_K)
    block = tl.program_id(0) % blocks
    program = (tl.program_id(0) // blocks).to(tl.int64)
    span = program % spans
    head = program // spans % heads
    sample = program // (spans * heads)
    first = span * SPAN
    c = tl.arange(0, SPAN)
    live = c < length - first
    n = block * BLOCK_K + tl.arange(0, BLOCK_K)
    dy_ptr += sample * y_b + head * y_h + first * y_l
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    token = (sample * length + first) * heads + head
    wrong_ptr += token * dim
    asked_ptr += token * dim
    dq_ptr += token * width
    dk_ptr += token * width
    state = ((sample * spans + span) * heads + head) * width * dim
    before_ptr += state
    late_ptr += state
    met_ptr += program * SPAN * SPAN
    seen_ptr += program * SPAN * SPAN
    row_ptr += program * 5 * SPAN
    sum_ptr += (program * blocks + block) * 2 * SPAN
    beta_ptr += sample * t_b + head * t_h + first * t_l
    from_y = tl.zeros([SPAN, BLOCK_K], tl.float32)
    from_x = tl.zeros([SPAN, BLOCK_K], tl.float32)
    brought = tl.zeros([SPAN, BLOCK_K], tl.float32)
    whole = tl.zeros([BLOCK_K], tl.float32)
    for b in tl.range(0, dim, BLOCK_V, num_stages=1):
        v = b + tl.arange(0, BLOCK_V)
        there = live[:, None] & (v < dim)[None, :]
        at = c[:, None] * (heads * dim) + v[None, :]
        inside = (v < dim)[:, None] & (n < width)[None, :]
        turned = v[:, None] * width + n[None, :]
        dy = _kept(dy_ptr + c[:, None] * y_l + v[None, :] * y_v, there, PIECES)
        asked = tl.load(asked_ptr + at, mask=there, other=0.0)
        before = tl.load(before_ptr + turned, mask=inside, other=0.0)
        from_y = _product(dy, before, from_y, PIECES)
        from_x = _product(asked, before, from_x, PIECES)
        wrong = tl.load(wrong_ptr + at, mask=there, other=0.0)
        late = tl.load(late_ptr + turned, mask=inside, other=0.0)
        brought = _product(wrong, late, brought, PIECES)
        whole += tl.sum(before * late, 0)
    tl.store(whole_ptr + program * blocks + block, tl.sum(whole, 0))
    beta = widen(tl.load(beta_ptr + c * t_l, mask=live, other=0.0))
    since, until = tl.load(row_ptr + c), tl.load(row_ptr + SPAN + c)
    there = live[:, None] & (n < width)[None, :]
    q = widen(tl.load(q_ptr + c[:, None] * q_l + n[None, :] * q_k, mask=there, other=0.0))
    dq = from_y * since[:, None]
    early = tl.sum(dq * (q * tl.load(row_ptr + 3 * SPAN + c)[:, None]), 1)
    k = widen(tl.load(k_ptr + c[:, None] * k_l + n[None, :] * k_k, mask=there, other=0.0))
    k *= tl.load(row_ptr + 2 * SPAN + c)[:, None]
    from_x *= (beta * since)[:, None]
    brought *= (beta * until)[:, None]
    tl.store(sum_ptr + c, early - tl.sum(from_x * k, 1))
    tl.store(sum_ptr + SPAN + c, tl.sum(brought * k, 1))
    dk = brought - from_x
    for b in tl.range(0, SPAN, BLOCK_V, num_stages=1):
        j = b + tl.arange(0, BLOCK_V)
        inside = (j < length - first)[:, None] & (n < width)[None, :]
        some_k = _kept(k_ptr + j[:, None] * k_l + n[None, :] * k_k, inside, PIECES)
        some_q = _kept(q_ptr + j[:, None] * q_l + n[None, :] * q_k, inside, PIECES)
        k_factor, q_factor = tl.load(row_ptr + 2 * SPAN + j), tl.load(row_ptr + 3 * SPAN + j)
        at = c[:, None] * SPAN + j[None, :]
        dq = _product(tl.load(seen_ptr + at) * k_factor[None, :], some_k, dq, PIECES)
        dk = _product(tl.load(met_ptr + at) * k_factor[None, :], some_k, dk, PIECES)
        seen = tl.load(seen_ptr + j[None, :] * SPAN + c[:, None])
        dk = _product(seen * q_factor[None, :], some_q, dk, PIECES)
    out = c[:, None] * (heads * width) + n[None, :]
    tl.store(dq_ptr + out, dq, mask=there)
    tl.store(dk_ptr + out, dk, mask=there)


@triton.jit(do_not_specialize=["length", "spans"])
def _decays(
    row_ptr, sum_ptr, whole_ptr, fade_ptr, dg_ptr, length, spans, heads, SPAN: tl.constexpr, BLOCKS: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    first = program % spans * SPAN
    head = program // spans % heads
    sample = program // (spans * heads)
    c = tl.arange(0, SPAN)
    early = tl.zeros([SPAN], tl.float32)
    sent = tl.zeros([SPAN], tl.float32)
    whole = 0.0
    for block in tl.static_range(BLOCKS):
        part = program * BLOCKS + block
        early += tl.load(sum_ptr + part * 2 * SPAN + c)
        sent += tl.load(sum_ptr + part * 2 * SPAN + SPAN + c)
        whole += tl.load(whole_ptr + part)
    exponent = tl.load(row_ptr + program * 5 * SPAN + 4 * SPAN + c) + tl.load(fade_ptr + program) * whole
    exponent += tl.sum(tl.where(c[:, None] >= c[None, :], early[:, None], 0.0), 0)
    exponent += tl.sum(tl.where(c[:, None] < c[None, :], sent[:, None], 0.0), 0)
    at = ((sample * length + first) + c) * heads + head
    tl.store(dg_ptr + at, narrow(exponent, dg_ptr.dtype.element_ty), mask=c < length - first)


@dataclass(frozen=True)
class Tiles:
    """span: tokens of one. pairs, keys, values: of a block of `_pairs`, and of keys and values of `_gradients`."""

    span: int
    pairs: int
    keys: int
    values: int
    warps: int
    pair_warps: int


def tiles_of(target: Target, kind: torch.dtype) -> Tiles:
    if target.vendor == "amd" and target.wave == 32:
        return Tiles(16, 16, 16, 16, 4, 4)  # no matrix units for float32: a lane holds a tile's operands
    if target.vendor == "amd":
        return Tiles(64, 16, 64, 16, 4, 4)
    if "wgmma" in target.features:
        pairs, warps = (64, 4) if kind == torch.bfloat16 else (32, 8)  # other pieces spill in four warps
        return Tiles(64, pairs, 64, 32, 4, warps)
    # a warp holds its operands: with more it spills on sm_80 to sm_89, and sm_100 lacks tensor memory for pieces
    return Tiles(32, 16, 32, 16, 4, 4)


def gated_delta_rule_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    dq, dk, dv, dg, dbeta, ds = results = begun(q, k, v, g, beta, initial_state)
    if batch * length * heads * width * dim == 0:
        for t in results:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            ds.copy_(grad_final_state)
        return tuple(results)
    factor = float(width**-0.5 if scale is None else scale)
    tiles, pieces, repeated = tiles_of(target, q.dtype), target.vendor == "nvidia", heads // shared
    last = None if initial_state is None else ds
    walks = Walked(
        grad_y, grad_final_state, q, k, v, g, beta, initial_state, dv, last, factor, qk_l2norm, tiles.span, target
    )
    spans, keys = triton.cdiv(length, tiles.span), _power(width, tiles.keys)
    blocks, programs = triton.cdiv(width, keys), batch * heads * spans
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    met, seen = (torch.empty(programs, tiles.span, tiles.span, **kind) for _ in range(2))
    rows, fade = torch.empty(programs, 5, tiles.span, **kind), torch.empty(programs, **kind)
    sums, whole = torch.empty(programs, blocks, 2, tiles.span, **kind), torch.empty(programs, blocks, **kind)
    parts = [torch.empty(batch, length, heads, width, **kind) for _ in range(2)]
    sizes = (length, spans, heads, repeated, width, dim)
    launch(
        _pairs,
        (programs,),
        grad_y,
        q,
        k,
        g,
        beta,
        walks.wrong,
        walks.asked,
        met,
        seen,
        rows,
        fade,
        dbeta,
        factor,
        *sizes,
        *grad_y.stride(),
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        qk_l2norm,
        pieces,
        tiles.span,
        tiles.pairs,
        tiles.pairs,
        device=v.device,
        num_warps=tiles.pair_warps,
    )
    launch(
        _gradients,
        (programs * blocks,),
        grad_y,
        q,
        k,
        beta,
        walks.before,
        walks.late,
        walks.wrong,
        walks.asked,
        met,
        seen,
        rows,
        *parts,
        sums,
        whole,
        *sizes,
        *grad_y.stride(),
        *q.stride(),
        *k.stride(),
        *beta.stride(),
        pieces,
        tiles.span,
        keys,
        tiles.values,
        device=v.device,
        num_warps=tiles.warps,
    )
    if g is not None:
        options = (tiles.span, blocks)
        launch(
            _decays,
            (programs,),
            rows,
            sums,
            whole,
            fade,
            dg,
            length,
            spans,
            heads,
            *options,
            device=v.device,
            num_warps=4,
        )
    for part, x, out, times in ((parts[0], q, dq, factor), (parts[1], k, dk, 1.0)):
        launch(
            _finish,
            (batch * length * shared,),
            part,
            x,
            out,
            times,
            length,
            shared,
            repeated,
            width,
            *x.stride(),
            qk_l2norm,
            _power(width, 256),
            device=v.device,
            num_warps=1,
        )
    return tuple(results)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, kept: Any, scale: Any, norm: bool) -> None:
        gated_delta_rule_backward(v, kept, q, k, v, g, beta, kept, scale, norm, target)

    # of `_tables` and `_pairs` bytes of a thread: more warps take longer; of `_back` scalar registers, which lie
    # in lanes of vector registers
    allowed = {"_tables": 8 if target.arch in ("sm_100", "sm_120") else 0, "_back": 24 if target.wave == 64 else 0}
    if "wgmma" in target.features and dtype == "bfloat16":
        allowed["_pairs"] = 80
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in called(run, getattr(torch, dtype))]
