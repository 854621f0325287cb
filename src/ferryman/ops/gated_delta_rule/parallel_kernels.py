"""`gated_delta_rule` in three passes, of which one alone goes from chunk to chunk.

A chunk's corrections u = v - S^T k solve (I + M diag(beta)) u = v - exp(c) k S: M[i, j] = exp(c_i - c_j) k_i k_j stands
below the diagonal, c are the sums of g. The inverse follows from keys, decays and rates alone.

1. `_inverse`, all chunks at once: c, the factors of normalised keys, and the inverse.
2. `_walk`, a program for a head and a block of its values' columns: u = inverse (v - exp(c) k S), then the next chunk's
   S. It keeps S, which each chunk begins with, and u.
3. `_outputs`, all chunks and blocks of columns at once: y = exp(c) q S + weight (beta u).

The right side is made before the inverse is applied, so that what cancels between v and k S cancels there, as in
substitution; tables inverse k and inverse v would cancel after it, and are 16 K bytes of a token more. A chunk has 32
tokens (`_inverse` and `_walk` spill with 64); `_outputs` takes 64, and a state is kept for those.

Limit, for a token of a head with K = V = 128 in bfloat16 on an H100, C = 32: 2 C (K + 2 C) operations for the inverse,
4 K V + 2 C V for the walk, 2 K V + 4 C (K + V) for the outputs are 0.15 MFLOP, or 0.45 as three tf32 products: 0.9 ns
at the peak. Memory, kept states 8 K V / 64 and u 8 V bytes written and read with the rest: 4.9 KB, 1.5 ns. 2,048 tokens
of 32 heads: 95 us. The walk is L / 32 steps of three products, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _place, _tile
from ferryman.ops.gated_delta_rule.triton_kernels import _power

KEPT = 64  # tokens from one state that is kept to the next
COLUMNS = 16  # of a state in a program of a walk: in registers; 32 spill on sm_90
PART = 16  # tokens whose corrections are found by substitution; the rest of an inverse is products


@triton.jit
def _raw(ptr, rows, columns, row, column, known, many, PRECISION: tl.constexpr):
    """As `_tile`, but 16-bit numbers stay so for NVIDIA's matrix units, whose products of them are exact."""
    there = known[:, None] & (columns < many)[None, :]
    x = tl.load(ptr + rows[:, None] * row + columns[None, :] * column, mask=there, other=0.0)
    if INTERPRETED or PRECISION == "ieee":
        x = widen(x)
    return x


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


@triton.jit(do_not_specialize=["length", "chunks"])
def _inverse(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    inverse_ptr,
    weight_ptr,
    total_ptr,
    factor_ptr,
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
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inverse: (batch, heads, chunks, CHUNK, CHUNK), of I + M diag(beta). total: (batch, heads, chunks, CHUNK), the
    sums of g. factor: as total, of a row of k.

    With q, for the backward, both turned: inverse of I + diag(beta) M; weight: as inverse, of a row of y by one of d.
    factor: of a row of q.
    """
    program = tl.program_id(0).to(tl.int64)
    which = program % chunks
    head = (program // chunks) % heads
    sample = program // (chunks * heads)
    first = which * CHUNK
    c = tl.arange(0, CHUNK)
    live = c < length - first
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    if q_ptr is not None:
        q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    size = tl.zeros([CHUNK], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        k = _raw(k_ptr, c, n, k_l, k_k, live, width, PRECISION)
        scores = tl.dot(k, tl.trans(k), scores, input_precision=PRECISION)
        size += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        if q_ptr is not None:
            q = _raw(q_ptr, c, n, q_l, q_k, live, width, PRECISION)
            weight = tl.dot(q, tl.trans(k), weight, input_precision=PRECISION)
            q_size += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
    factor = _factors(size, 1.0, NORM)
    # a token past the end has beta and g 0: it leaves the state as it is
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    seen = c[:, None] >= c[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * factor[None, :]
    table = program * CHUNK * CHUNK
    at = table + c[:, None] * CHUNK + c[None, :]
    if q_ptr is None:
        system = factor[:, None] * scores * decay * beta[None, :]
        tl.store(total_ptr + program * CHUNK + c, total)
        tl.store(factor_ptr + program * CHUNK + c, factor)
    else:
        system = (factor * beta)[:, None] * scores * decay
        q_factor = _factors(q_size, scale, NORM)
        at = table + c[None, :] * CHUNK + c[:, None]
        tl.store(weight_ptr + at, tl.where(seen, q_factor[:, None] * weight * decay, 0.0))
        tl.store(factor_ptr + program * CHUNK + c, q_factor)
    system = tl.where(c[:, None] > c[None, :], system, 0.0)
    tl.store(inverse_ptr + at, _inverted(system, CHUNK, PART, PRECISION))


@triton.jit(do_not_specialize=["length"])
def _walk(
    k_ptr,
    v_ptr,
    beta_ptr,
    state_ptr,
    inverse_ptr,
    total_ptr,
    factor_ptr,
    held_ptr,
    wrong_ptr,
    final_ptr,
    length,
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
    t_b,
    t_l,
    t_h,
    s_b,
    s_h,
    s_k,
    s_v,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """held, the state before every EACH chunks: (batch, states, heads, width, dim). wrong, u: (batch, length, heads,
    dim). final: (batch, heads, width, dim), or None. All in float32."""
    sample, head, column = _place(heads, dim, BLOCK_V)
    c = tl.arange(0, CHUNK)
    chunks = tl.cdiv(length, CHUNK)
    k_ptr += sample * k_b + (head // shared) * k_h
    v_ptr += sample * v_b + head * v_h
    beta_ptr += sample * t_b + head * t_h
    wrong_ptr += (sample * length * heads + head) * dim
    place = (sample * heads + head) * chunks
    held_ptr += (sample * tl.cdiv(chunks, EACH) * heads + head) * width * dim
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    # (parts, keys of a part, columns): each warp has its own keys
    key = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (key < width)[:, :, None] & (column < dim)[None, None, :]
    at = key[:, :, None] * dim + column[None, None, :]
    state = tl.zeros([PARTS, BLOCK_K, BLOCK_V], tl.float32)
    if state_ptr is not None:
        state = widen(tl.load(state_ptr + key[:, :, None] * s_k + column[None, None, :] * s_v, mask=inside, other=0.0))
    for i in tl.range(0, chunks, num_stages=1):
        first = tl.full([], CHUNK, tl.int64) * i
        live = c < length - first
        if i % EACH == 0:
            tl.store(held_ptr + tl.full([], width * dim, tl.int64) * (i // EACH) * heads + at, state, mask=inside)
        total = tl.load(total_ptr + (place + i) * CHUNK + c)
        end = tl.load(total_ptr + (place + i) * CHUNK + CHUNK - 1)
        factor = tl.load(factor_ptr + (place + i) * CHUNK + c)
        there = live[None, :, None] & (key < width)[:, None, :]
        at_k = k_ptr + first * k_l + c[None, :, None] * k_l + key[:, None, :] * k_k
        k = widen(tl.load(at_k, mask=there, other=0.0))
        known = tl.sum(tl.dot(k, state, input_precision=PRECISION), 0)
        wrong = _tile(v_ptr + first * v_l, c, column, v_l, v_v, live, dim) - (exp(total) * factor)[:, None] * known
        inverse = tl.load(inverse_ptr + (place + i) * CHUNK * CHUNK + c[:, None] * CHUNK + c[None, :])
        wrong = tl.dot(inverse, wrong, input_precision=PRECISION)
        out = wrong_ptr + (first + c)[:, None] * (heads * dim) + column[None, :]
        tl.store(out, wrong, mask=live[:, None] & (column < dim)[None, :])
        beta = widen(tl.load(beta_ptr + (first + c) * t_l, mask=live, other=0.0))
        came = (beta * exp(end - total) * factor)[:, None] * wrong
        came = tl.broadcast_to(came[None, :, :], [PARTS, CHUNK, BLOCK_V])
        state = tl.dot(tl.permute(k, (0, 2, 1)), came, state * exp(end), input_precision=PRECISION)
    if final_ptr is not None:
        tl.store(final_ptr + (sample * heads + head) * width * dim + at, state, mask=inside)


@triton.jit(do_not_specialize=["length", "chunks"])
def _outputs(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    held_ptr,
    wrong_ptr,
    y_ptr,
    scale,
    length,
    chunks,
    heads,
    shared,
    width,
    dim,
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
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    across = tl.cdiv(dim, BLOCK_V)
    column = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(0) // across).to(tl.int64)
    first = place % chunks * CHUNK
    head = place // chunks % heads
    sample = place // (chunks * heads)
    c = tl.arange(0, CHUNK)
    live = c < length - first
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    held_ptr += ((sample * chunks + place % chunks) * heads + head) * width * dim
    weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    y = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    k_size = tl.zeros([CHUNK], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        q = _raw(q_ptr, c, n, q_l, q_k, live, width, PRECISION)
        k = _raw(k_ptr, c, n, k_l, k_k, live, width, PRECISION)
        held = _tile(held_ptr, n, column, dim, 1, n < width, dim)
        weight = tl.dot(q, tl.trans(k), weight, input_precision=PRECISION)
        q, k = q.to(tl.float32), k.to(tl.float32)
        y = tl.dot(q, held, y, input_precision=PRECISION)
        q_size += tl.sum(q * q, 1)
        k_size += tl.sum(k * k, 1)
    q_factor, factor = _factors(q_size, scale, NORM), _factors(k_size, 1.0, NORM)
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    seen = c[:, None] >= c[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * factor[None, :]
    weight = tl.where(seen, q_factor[:, None] * weight * decay, 0.0)
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    row = (sample * length + first) * heads + head
    out = row * dim + c[:, None] * (heads * dim) + column[None, :]
    shape = live[:, None] & (column < dim)[None, :]
    d = beta[:, None] * tl.load(wrong_ptr + out, mask=shape, other=0.0)
    y = tl.dot(weight, d, y * (exp(total) * q_factor)[:, None], input_precision=PRECISION)
    tl.store(y_ptr + out, narrow(y, y_ptr.dtype.element_ty), mask=shape)


def chunk_of(target: Target) -> int:
    """Tokens. RDNA multiplies float32 without matrix units: a lane holds a tile's operands."""
    return 16 if target.vendor == "amd" and target.wave == 32 else 32


def precision_of(target: Target) -> str:
    return "tf32x3" if target.vendor == "nvidia" else "ieee"


class Chunks:
    """What `_inverse` makes of every chunk of every head."""

    def __init__(
        self,
        q: Tensor | None,
        k: Tensor,
        g: Tensor | None,
        beta: Tensor,
        scale: float,
        norm: bool,
        target: Target,
    ) -> None:
        (batch, length, shared, width), heads = k.shape, beta.shape[2]
        self.chunk = chunk_of(target)
        self.count = triton.cdiv(length, self.chunk)
        kind: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
        rows = (batch, heads, self.count, self.chunk)
        self.inverse, self.factor = torch.empty(*rows, self.chunk, **kind), torch.empty(rows, **kind)
        self.total = torch.empty(rows, **kind) if q is None else None
        self.weight = None if q is None else torch.empty_like(self.inverse)
        launch(
            _inverse,
            (batch * heads * self.count,),
            q,
            k,
            g,
            beta,
            self.inverse,
            self.weight,
            self.total,
            self.factor,
            scale,
            length,
            self.count,
            heads,
            heads // shared,
            width,
            *strides(q, 4),
            *k.stride(),
            *strides(g, 3),
            *beta.stride(),
            norm,
            precision_of(target),
            self.chunk,
            PART,
            _power(width, 32),
            device=k.device,
            num_warps=4,
        )


def walked(
    made: Chunks,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    final: Tensor | None,
    kept: int,
    target: Target,
) -> tuple[Tensor, Tensor]:
    """The state before every ``kept`` tokens, and each token's u; the last state goes to ``final``."""
    (batch, length, shared, width), (heads, dim) = k.shape, v.shape[2:]
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    held = torch.empty(batch, triton.cdiv(length, kept), heads, width, dim, **kind)
    wrong = torch.empty(batch, length, heads, dim, **kind)
    launch(
        _walk,
        (batch * heads * triton.cdiv(dim, COLUMNS),),
        k,
        v,
        beta,
        initial_state,
        made.inverse,
        made.total,
        made.factor,
        held,
        wrong,
        final,
        length,
        heads,
        heads // shared,
        width,
        dim,
        *k.stride(),
        *v.stride(),
        *beta.stride(),
        *strides(initial_state, 4),
        precision_of(target),
        made.chunk,
        kept // made.chunk,
        triton.next_power_of_2(triton.cdiv(width, 32)),
        _power(width, 32),
        COLUMNS,
        device=v.device,
        num_warps=4,
    )
    return held, wrong


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty(batch, heads, width, dim, dtype=torch.float32, device=v.device)
    if y.numel() * width == 0:
        return y.zero_(), final
    factor = float(width**-0.5 if scale is None else scale)
    made = Chunks(None, k, g, beta, factor, qk_l2norm, target)
    held, wrong = walked(made, k, v, beta, initial_state, final, KEPT, target)
    # with more columns `_outputs` spills: where lanes hold the operands of its products
    most = 16 if chunk_of(target) == PART else 64 if "wgmma" in target.features or target.vendor == "amd" else 32
    block_v = _power(dim, most)
    chunks = triton.cdiv(length, KEPT)
    launch(
        _outputs,
        (batch * heads * chunks * triton.cdiv(dim, block_v),),
        q,
        k,
        g,
        beta,
        held,
        wrong,
        y,
        factor,
        length,
        chunks,
        heads,
        heads // shared,
        width,
        dim,
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        qk_l2norm,
        precision_of(target),
        KEPT,
        _power(width, 32),
        block_v,
        device=v.device,
        num_warps=8,
    )
    return y, final


def called(run: Callable[..., Any], kind: torch.dtype) -> list[Specialisation]:
    """Qwen3-Next's heads, wider keys and small odd ones; with a decay, a state and normalisation, and without."""

    def call(length: int, shared: int, heads: int, width: int, dim: int, gate: bool, state: bool, norm: bool) -> None:
        q = torch.empty(2, length, shared, width, dtype=kind, device="meta")
        v = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        beta = torch.empty(2, length, heads, dtype=kind, device="meta")
        g = torch.empty(2, length, heads, dtype=torch.float32, device="meta") if gate else None
        kept = torch.empty(2, heads, width, dim, dtype=torch.float32, device="meta") if state else None
        run(q, q, v, g, beta, kept, None, norm)

    shapes: tuple[tuple[Any, ...], ...] = (
        (2048, 16, 32, 128, 128, True, False, True),
        (2048, 16, 32, 128, 128, True, True, True),
        (2048, 16, 16, 96, 192, False, True, False),
        (137, 3, 3, 11, 13, True, True, True),
    )
    return recorded(lambda s=s: call(*s) for s in shapes)  # type: ignore[misc]


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, kept: Any, scale: Any, norm: bool) -> None:
        gated_delta_rule(q, k, v, g, beta, kept, scale, norm, target)

    return called(run, getattr(torch, dtype))
