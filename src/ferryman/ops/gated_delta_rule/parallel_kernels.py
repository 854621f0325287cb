"""`gated_delta_rule` in three passes, of which one alone goes from chunk to chunk.

A chunk's corrections u = v - S^T k solve (I + M diag(beta)) u = v - exp(c) k S: M[i, j] = exp(c_i - c_j) k_i k_j stands
below the diagonal, c are the sums of g. The inverse follows from keys, decays and rates alone.

1. `table_kernels`, all chunks at once: the inverse, and the factors of rows.
2. `turned_walk_kernels._forth`, a program for a head and a block of its values' columns: u = inverse (v - exp(c) k S),
   then the next chunk's S. It keeps S, which each span begins with, and u.
3. `_outputs`, all spans and blocks of columns at once: y = exp(c) q S + weight (beta u).

The right side is made before the inverse is applied, so that what cancels between v and k S cancels there, as in
substitution; tables inverse k and inverse v would cancel after it, and are 16 K bytes of a token more. A chunk has 32
tokens (with 64 a walk spills), a span 64. Products are of bfloat16 pieces on NVIDIA's matrix units
(`chunk_kernels._product`), so that 16-bit q and k cost nothing to cut.

Limit, for a token of a head with K = V = 128 in bfloat16 on an H100, C = 32: 2 C (K + 2 C) operations for the inverse,
4 K V by three products and 2 C V by six for the walk; with spans of 2 C, 2 K V by three, 4 C K by one and 4 C V by six
for the outputs: 0.47 MFLOP, 0.5 ns at the peak. Memory, kept states 8 K V / 64 and u 8 V bytes written and read with
the rest: 4.9 KB, 1.5 ns. 2,048 tokens of 32 heads: 95 us. The walk is L / 32 steps of three products, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _kept, _product, _totals
from ferryman.ops.gated_delta_rule.table_kernels import PART, Tables, chunk_of
from ferryman.ops.gated_delta_rule.triton_kernels import _power
from ferryman.ops.gated_delta_rule.turned_walk_kernels import walked_forth

SPAN = 64  # tokens from one state that is kept to the next


@triton.jit(do_not_specialize=["length", "spans"])
def _outputs(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    before_ptr,
    wrong_ptr,
    y_ptr,
    scale,
    length,
    spans,
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
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Turned, (columns, tokens), as the states lie: they and u are the left operands, which stay in registers."""
    across = tl.cdiv(dim, BLOCK_V)
    column = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(0) // across).to(tl.int64)
    first = place % spans * SPAN
    head = place // spans % heads
    sample = place // (spans * heads)
    c = tl.arange(0, SPAN)
    live = c < length - first
    q_ptr += sample * q_b + (head // shared) * q_h + first * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + first * k_l
    before_ptr += ((sample * spans + place % spans) * heads + head) * width * dim
    weight = tl.zeros([SPAN, SPAN], tl.float32)
    y = tl.zeros([BLOCK_V, SPAN], tl.float32)
    q_size = tl.zeros([SPAN], tl.float32)
    k_size = tl.zeros([SPAN], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        q = _kept(q_ptr + c[:, None] * q_l + n[None, :] * q_k, there, PIECES)
        k = _kept(k_ptr + c[:, None] * k_l + n[None, :] * k_k, there, PIECES)
        inside = (column < dim)[:, None] & (n < width)[None, :]
        before = tl.load(before_ptr + column[:, None] * width + n[None, :], mask=inside, other=0.0)
        weight = _product(k, tl.trans(q), weight, PIECES)
        y = _product(before, tl.trans(q), y, PIECES)
        q, k = q.to(tl.float32), k.to(tl.float32)
        q_size += tl.sum(q * q, 1)
        k_size += tl.sum(k * k, 1)
    q_factor, k_factor = _factors(q_size, scale, NORM), _factors(k_size, 1.0, NORM)
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    seen = c[:, None] <= c[None, :]
    decay = exp(tl.where(seen, total[None, :] - total[:, None], 0.0)) * k_factor[:, None]
    weight = tl.where(seen, q_factor[None, :] * weight * decay, 0.0)
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    row = (sample * length + first) * heads + head
    out = row * dim + c[None, :] * (heads * dim) + column[:, None]
    shape = (column < dim)[:, None] & live[None, :]
    d = beta[None, :] * tl.load(wrong_ptr + out, mask=shape, other=0.0)
    y = _product(d, weight, y * (exp(total) * q_factor)[None, :], PIECES)
    tl.store(y_ptr + out, narrow(y, y_ptr.dtype.element_ty), mask=shape)


@dataclass(frozen=True)
class Tiles:
    """Of `_outputs`: a block's columns of values, its keys at a time, and warps. With more it spills."""

    values: int
    keys: int
    warps: int


def tiles_of(target: Target, kind: torch.dtype) -> Tiles:
    if chunk_of(target) == PART:
        return Tiles(16, 32, 8)  # no matrix units for float32: lanes hold the operands
    if target.vendor == "amd":
        return Tiles(64, 32, 8)
    if "wgmma" in target.features:
        return Tiles(64, 64 if kind == torch.bfloat16 else 32, 4)
    return Tiles(32, 32, 4)


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
    tables = Tables(None, k, g, beta, factor, qk_l2norm, target)
    before, wrong = walked_forth(tables, k, v, initial_state, final, SPAN, target)
    tiles, spans = tiles_of(target, q.dtype), triton.cdiv(length, SPAN)
    block_v = _power(dim, tiles.values)
    launch(
        _outputs,
        (batch * heads * spans * triton.cdiv(dim, block_v),),
        q,
        k,
        g,
        beta,
        before,
        wrong,
        y,
        factor,
        length,
        spans,
        heads,
        heads // shared,
        width,
        dim,
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        qk_l2norm,
        target.vendor == "nvidia",
        SPAN,
        _power(width, tiles.keys),
        block_v,
        device=v.device,
        num_warps=tiles.warps,
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
