"""Rotary embedding of q and k in Triton: one launch, one read and one write of both.

A program rotates a block of heads of one token, so cos and sin are read once for all of them; a fused projection's
(B, S, H, D) storage is read in order. The result is (B, H, S, D), in segments of D elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import narrow, widen
from ferryman.backends.triton_rows import lanes


@triton.jit
def _rotate(
    x_ptr, out_ptr, head, heads, head_stride, out_stride, first_cos, second_cos, first_sin, second_sin, rotary, dim,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Pairs (a, b) of a block of heads become (a cos_a - b sin_a, b cos_b + a sin_b); backward is its transpose."""
    x_ptr += head.to(tl.int64) * head_stride
    out_ptr += head.to(tl.int64) * out_stride
    line = tl.arange(0, HEADS)[:, None]
    row = line
    if WIDE:  # a head's stride times HEADS passes 2^31
        row = line.to(tl.int64)
    inside = line < heads - head
    dtype = out_ptr.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, :]
        mask = inside & (col < rotary)
        x = widen(tl.load(x_ptr + (row * head_stride + col), mask=mask, other=0.0))
        a, b = tl.split(tl.reshape(x, [HEADS, HALF, 2]))
    else:
        col = tl.arange(0, HALF)[None, :]
        half = rotary // 2
        mask = inside & (col < half)
        a = widen(tl.load(x_ptr + (row * head_stride + col), mask=mask, other=0.0))
        b = widen(tl.load(x_ptr + half + (row * head_stride + col), mask=mask, other=0.0))
    if BACKWARD:
        first = a * first_cos + b * second_sin
        second = b * second_cos - a * first_sin
    else:
        first = a * first_cos - b * first_sin
        second = b * second_cos + a * second_sin
    first = narrow(first, dtype)
    second = narrow(second, dtype)
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), [HEADS, 2 * HALF])
        tl.store(out_ptr + (row * out_stride + col), both, mask=mask)
    else:
        tl.store(out_ptr + (row * out_stride + col), first, mask=mask)
        tl.store(out_ptr + half + (row * out_stride + col), second, mask=mask)
    if REST > 0:
        rest = rotary + tl.arange(0, REST)[None, :]
        mask = inside & (rest < dim)
        kept = tl.load(x_ptr + (row * head_stride + rest), mask=mask)
        tl.store(out_ptr + (row * out_stride + rest), kept, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_batch, q_head, q_token, k_batch, k_head, k_token,
    cos_batch, cos_token, sin_batch, sin_token, out_head, q_heads, k_heads, tokens, rotary, dim,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = tl.program_id(0) % blocks
    place = tl.program_id(0) // blocks
    batch = (place // tokens).to(tl.int64)
    token = (place % tokens).to(tl.int64)
    cos_ptr += batch * cos_batch + token * cos_token
    sin_ptr += batch * sin_batch + token * sin_token
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)
        mask = col < rotary
        cos = widen(tl.load(cos_ptr + col, mask=mask, other=0.0))
        sin = widen(tl.load(sin_ptr + col, mask=mask, other=0.0))
        first_cos, second_cos = tl.split(tl.reshape(cos, [HALF, 2]))
        first_sin, second_sin = tl.split(tl.reshape(sin, [HALF, 2]))
    else:
        col = tl.arange(0, HALF)
        half = rotary // 2
        mask = col < half
        first_cos = widen(tl.load(cos_ptr + col, mask=mask, other=0.0))
        second_cos = widen(tl.load(cos_ptr + half + col, mask=mask, other=0.0))
        first_sin = widen(tl.load(sin_ptr + col, mask=mask, other=0.0))
        second_sin = widen(tl.load(sin_ptr + half + col, mask=mask, other=0.0))
    first_cos, second_cos = first_cos[None, :], second_cos[None, :]
    first_sin, second_sin = first_sin[None, :], second_sin[None, :]
    if block < q_blocks:
        _rotate(
            q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * q_heads * out_head + token * dim,
            block * HEADS, q_heads, q_head, out_head, first_cos, second_cos, first_sin, second_sin, rotary, dim,
            INTERLEAVED, BACKWARD, HEADS, HALF, REST, WIDE,
        )  # fmt: skip
    else:
        _rotate(
            k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * k_heads * out_head + token * dim,
            (block - q_blocks) * HEADS, k_heads, k_head, out_head, first_cos, second_cos, first_sin, second_sin,
            rotary, dim, INTERLEAVED, BACKWARD, HEADS, HALF, REST, WIDE,
        )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool, target: Target
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = _dense(q), _dense(k), _dense(cos), _dense(sin)
    batch, q_heads, tokens, dim = q.shape
    k_heads, rotary = k.shape[1], cos.shape[-1]
    half = triton.next_power_of_2(max(rotary // 2, 1))
    rest = triton.next_power_of_2(dim - rotary) if dim > rotary else 0
    # 16 elements a thread, two 16-byte loads of a 16-bit input: 16 heads of 128 on 4 warps of 32 lanes
    heads = max(1, min(64 * lanes(target) // (2 * half), triton.next_power_of_2(max(q_heads, k_heads))))
    warps = min(4, max(1, heads * half // (8 * lanes(target))))
    out_head = tokens * dim
    wide = heads * max(q.stride(1), k.stride(1), out_head) >= 2**31
    shared = cos.shape[0] == 1
    args = (
        q, k, cos, sin, q_out, k_out, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        0 if shared else cos.stride(0), cos.stride(1), 0 if shared else sin.stride(0), sin.stride(1), out_head,
        q_heads, k_heads, tokens, rotary, dim, interleaved, backward, heads, half, rest, wide,
    )  # fmt: skip
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    launch(_rope, (batch * tokens * blocks,), *args, device=q.device, num_warps=warps)
    return q_out, k_out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, interleaved, False, target)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target
) -> tuple[Tensor, Tensor]:
    return _launch(grad_q, grad_k, cos, sin, interleaved, True, target)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Llama and Qwen (full rotation, grouped heads), partial rotation, head_dim 80, one token, both layouts."""
    kind = getattr(torch, dtype)

    def calls(shape: tuple[int, ...], interleaved: bool) -> None:
        batch, tokens, heads, k_heads, dim, rotary = shape
        q = torch.empty(batch, tokens, heads, dim, dtype=kind, device="meta").transpose(1, 2)
        k = torch.empty(batch, tokens, k_heads, dim, dtype=kind, device="meta").transpose(1, 2)
        for angles in {torch.float32, kind}:
            cos = torch.empty(1, tokens, rotary, dtype=angles, device="meta")
            rope(q, k, cos, cos, interleaved, target)
            rope_backward(q.contiguous(), k.contiguous(), cos, cos, interleaved, target)

    shapes = [(2, 4096, 32, 8, 128, 128), (32, 1, 32, 8, 128, 128), (1, 2048, 16, 16, 64, 64)]
    shapes += [(2, 1021, 16, 16, 80, 32), (1, 3, 1, 1, 2, 2)]
    return recorded(lambda s=s, i=i: calls(s, i) for s in shapes for i in (False, True))  # type: ignore[misc]
