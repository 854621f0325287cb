"""`gated_delta_rule` in Triton: a program takes a head of a sample and a block of its values' columns.

`triton.chunked` goes chunk after chunk. Its part of the state lies where the final one goes, and is read and written a
block of keys at a time: in registers, with operands of three tf32 products, it spilled on every NVIDIA device. Products
are of float32 operands, by tl.dot, as three of tf32 on the matrix units of NVIDIA and as float32 on those of AMD.
Corrections are found by substitution. Nothing is rounded on the way to y.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _begin, _factors, _onward, _place, _products, _solved, _tile


@triton.jit(do_not_specialize=["length"])
def _chunked(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    scale,
    length,
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
    v_b,
    v_l,
    v_h,
    v_v,
    g_b,
    g_l,
    g_h,
    t_b,
    t_l,
    t_h,
    s_b,
    s_h,
    s_k,
    s_v,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sample, head, column = _place(heads, dim, BLOCK_V)
    group = head // shared
    c = tl.arange(0, CHUNK)
    q_ptr += sample * q_b + group * q_h
    k_ptr += sample * k_b + group * k_h
    v_ptr += sample * v_b + head * v_h
    beta_ptr += sample * t_b + head * t_h
    if g_ptr is not None:
        g_ptr += sample * g_b + head * g_h
    y_ptr += (sample * length * heads + head) * dim
    final_ptr += (sample * heads + head) * width * dim + column[None, :]
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
    _begin(final_ptr, state_ptr, s_k, s_v, column, width, dim, BLOCK_K)
    for at in tl.range(0, length, CHUNK, num_stages=1):
        first = tl.full([], 1, tl.int64) * at
        live = c < length - at
        shape = live[:, None] & (column < dim)[None, :]
        k_at, q_at = k_ptr + first * k_l, q_ptr + first * q_l
        scores, weight, known, y, k_size, q_size = _products(
            k_at, k_l, k_k, q_at, q_l, q_k, final_ptr, c, live, column, width, dim, BLOCK_K, PRECISION
        )
        # what normalises a row is a factor of it
        k_factor = _factors(k_size, 1.0, NORM)
        q_factor = _factors(q_size, scale, NORM)
        v = _tile(v_ptr + first * v_l, c, column, v_l, v_v, live, dim)
        # a token past the end has beta and g 0: it leaves the state as it is
        beta = widen(tl.load(beta_ptr + first * t_l + c * t_l, mask=live, other=0.0))
        total = tl.zeros([CHUNK], tl.float32)
        if g_ptr is not None:
            total = tl.cumsum(widen(tl.load(g_ptr + first * g_l + c * g_l, mask=live, other=0.0)), 0)
        end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
        seen = c[:, None] >= c[None, :]
        decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
        system = tl.where(c[:, None] > c[None, :], (beta * k_factor)[:, None] * scores * decay, 0.0)
        since = exp(total)
        d = beta[:, None] * (v - (since * k_factor)[:, None] * known)
        d = _solved(system, d, c, CHUNK)
        weight = tl.where(seen, q_factor[:, None] * weight * decay, 0.0)
        y = tl.dot(weight, d, y * (since * q_factor)[:, None], input_precision=PRECISION)
        out = y_ptr + first * (heads * dim) + c[:, None] * (heads * dim) + column[None, :]
        tl.store(out, narrow(y, y_ptr.dtype.element_ty), mask=shape)
        kept = exp(end - total) * k_factor
        tl.debug_barrier()
        _onward(
            final_ptr, final_ptr, k_at, k_l, k_k, kept, exp(end), d, c, live, column, width, dim, BLOCK_K, PRECISION
        )
        tl.debug_barrier()


def _power(n: int, most: int, least: int = 16) -> int:
    return max(least, min(triton.next_power_of_2(n), most))


def _launch(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    options: tuple[Any, ...],
    block_v: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty(batch, heads, width, dim, dtype=torch.float32, device=v.device)
    if batch * heads * dim == 0:
        return y, final
    launch(
        kernel,
        (batch * heads * triton.cdiv(dim, block_v),),
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        y,
        final,
        float(max(width, 1) ** -0.5 if scale is None else scale),
        length,
        heads,
        heads // shared,
        width,
        dim,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *strides(g, 3),
        *beta.stride(),
        *strides(initial_state, 4),
        *options,
        block_v,
        device=v.device,
        num_warps=warps,
    )
    return y, final


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
    """Chunks of 16 tokens."""
    nvidia = target.vendor == "nvidia"
    options = (qk_l2norm, "tf32x3" if nvidia else "ieee", 16, _power(q.shape[3], 32))
    return _launch(_chunked, q, k, v, g, beta, initial_state, scale, options, _power(v.shape[3], 32), 4)


# What `ferryman compile` accepts of `_chunked`: bytes a thread on NVIDIA, registers on AMD. All others spill nothing.
_SPILLS = {
    ("sm_100", "float32"): 16,
    ("gfx90a", "bfloat16"): 7,
    ("gfx90a", "float16"): 1,
}


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Qwen3-Next's heads, wider keys and small odd ones; with a decay and without."""
    kind = getattr(torch, dtype)

    def calls(length: int, shared: int, heads: int, width: int, dim: int, gate: bool, state: bool, norm: bool) -> None:
        q = torch.empty(2, length, shared, width, dtype=kind, device="meta")
        v = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        beta = torch.empty(2, length, heads, dtype=kind, device="meta")
        g = torch.empty(2, length, heads, dtype=torch.float32, device="meta") if gate else None
        kept = torch.empty(2, heads, width, dim, dtype=torch.float32, device="meta") if state else None
        gated_delta_rule(q, q, v, g, beta, kept, None, norm, target)

    shapes: tuple[tuple[Any, ...], ...] = (
        (2048, 16, 32, 128, 128, True, False, True),
        (2048, 16, 32, 128, 128, True, True, True),
        (2048, 16, 16, 256, 256, False, True, False),
        (37, 3, 3, 11, 13, True, True, True),
    )
    kernels = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    few = _SPILLS.get((target.arch, dtype), 0)
    return [replace(one, spills_allowed=few) for one in kernels]
