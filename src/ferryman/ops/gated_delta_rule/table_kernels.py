"""What a chunk of tokens needs of its keys, queries, decays and rates alone.

`_tables`, all chunks at once: the inverses of I + M diag(beta) and of I + diag(beta) M, the weights of y, and factors
of rows. M[i, j] = exp(c_i - c_j) k_i k_j stands below the diagonal, c are the sums of g.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import launch, strides
from ferryman.backends.triton_lang import exp, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _inverted, _kept, _product, _totals
from ferryman.ops.gated_delta_rule.triton_kernels import _power

PART = 16  # tokens whose corrections are found by substitution; the rest of an inverse is products


@triton.jit(do_not_specialize=["length", "chunks"])
def _tables(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    forth_ptr,
    back_ptr,
    weight_ptr,
    row_ptr,
    fade_ptr,
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
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """forth, of I + M diag(beta), turned, back, of I + diag(beta) M, and weight, of a row of y by one of d: (batch,
    heads, chunks, CHUNK, CHUNK). row: (.., 4, CHUNK), what multiplies a row of k before the chunk, of k after it, of q
    before it, and beta. fade: (batch, heads, chunks), what multiplies the state. Without q only what has none."""
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
    k_size = tl.zeros([CHUNK], tl.float32)
    q_size = tl.zeros([CHUNK], tl.float32)
    for b in tl.range(0, width, BLOCK_K, num_stages=1):
        n = b + tl.arange(0, BLOCK_K)
        there = live[:, None] & (n < width)[None, :]
        k = _kept(k_ptr + c[:, None] * k_l + n[None, :] * k_k, there, PIECES)
        scores = _product(k, tl.trans(k), scores, PIECES)
        if q_ptr is not None:
            q = _kept(q_ptr + c[:, None] * q_l + n[None, :] * q_k, there, PIECES)
            weight = _product(q, tl.trans(k), weight, PIECES)
            q = q.to(tl.float32)
            q_size += tl.sum(q * q, 1)
        k = k.to(tl.float32)
        k_size += tl.sum(k * k, 1)
    k_factor = _factors(k_size, 1.0, NORM)
    # a token past the end has beta and g 0: it leaves the state as it is
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (first + c) * t_l, mask=live, other=0.0))
    total = _totals(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + first * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
    since = exp(total)
    row_ptr += program * 4 * CHUNK + c
    tl.store(row_ptr, since * k_factor)
    tl.store(row_ptr + CHUNK, exp(end - total) * k_factor)
    tl.store(row_ptr + 3 * CHUNK, beta)
    tl.store(fade_ptr + program, exp(end))
    seen = c[:, None] >= c[None, :]
    later = c[:, None] > c[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
    table = program * CHUNK * CHUNK
    system = tl.where(later, k_factor[:, None] * scores * decay, 0.0)
    if q_ptr is not None:
        q_factor = _factors(q_size, scale, NORM)
        tl.store(row_ptr + 2 * CHUNK, since * q_factor)
        at = table + c[:, None] * CHUNK + c[None, :]
        tl.store(weight_ptr + at, tl.where(seen, q_factor[:, None] * weight * decay, 0.0))
        tl.store(back_ptr + at, _inverted(beta[:, None] * system, CHUNK, PART, PRECISION))
    at = table + c[None, :] * CHUNK + c[:, None]
    tl.store(forth_ptr + at, _inverted(system * beta[None, :], CHUNK, PART, PRECISION))


def chunk_of(target: Target) -> int:
    """Tokens. RDNA multiplies float32 without matrix units: a lane holds a tile's operands."""
    return 16 if target.vendor == "amd" and target.wave == 32 else 32


def precision_of(target: Target) -> str:
    return "tf32x3" if target.vendor == "nvidia" else "ieee"


def warps_of(queries: torch.dtype | None, target: Target) -> int:
    """Of `_tables`: the sums of a substitution wait for no other warp in one. Queries of other dtypes spill."""
    return 1 if target.vendor == "nvidia" and queries in (None, torch.bfloat16) else 4


class Tables:
    """What `_tables` makes of every chunk of every head; without q what has none."""

    def __init__(
        self,
        q: Tensor | None,
        k: Tensor,
        g: Tensor | None,
        beta: Tensor,
        factor: float,
        norm: bool,
        target: Target,
    ) -> None:
        (batch, length, shared, width), heads = k.shape, beta.shape[2]
        self.chunk = chunk_of(target)
        self.count = triton.cdiv(length, self.chunk)
        kind: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
        table = (batch, heads, self.count, self.chunk, self.chunk)
        self.forth = torch.empty(table, **kind)
        self.back, self.weight = (None if q is None else torch.empty(table, **kind) for _ in range(2))
        self.rows = torch.empty(batch, heads, self.count, 4, self.chunk, **kind)
        self.fade = torch.empty(batch, heads, self.count, **kind)
        launch(
            _tables,
            (batch * heads * self.count,),
            q,
            k,
            g,
            beta,
            self.forth,
            self.back,
            self.weight,
            self.rows,
            self.fade,
            factor,
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
            target.vendor == "nvidia",
            precision_of(target),
            self.chunk,
            PART,
            _power(width, 32),
            device=k.device,
            num_warps=warps_of(None if q is None else q.dtype, target),
        )
