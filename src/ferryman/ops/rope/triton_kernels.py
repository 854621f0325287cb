"""Rotary embedding of q and k in Triton: one launch, one read and one write of both.

cos and sin are read once for a block of heads. A program takes several tokens where there are that many: then the
result, (B, H, S, D), is written in pieces of several D, where pieces of one D spread over every head reached 63% of a
copy's speed on an H200.
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
    x_ptr,
    out_ptr,
    lines,
    x_stride,
    out_stride,
    first_cos,
    second_cos,
    first_sin,
    second_sin,
    rotary,
    dim,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    LINES: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    OVER: tl.constexpr,
):
    """Pairs (a, b) of ``lines`` lines become (a cos_a - b sin_a, b cos_b + a sin_b); backward is its transpose."""
    line = tl.arange(0, LINES)[:, None]
    inside = line < lines
    if WIDE:  # LINES strides pass 2^31
        line = line.to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, :]
        mask = inside & (col < rotary)
        x = widen(tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0))
        a, b = tl.split(tl.reshape(x, [LINES, HALF, 2]))
    else:
        col = tl.arange(0, HALF)[None, :]
        half = rotary // 2
        mask = inside & (col < half)
        a = widen(tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0))
        b = widen(tl.load(x_ptr + half + (line * x_stride + col), mask=mask, other=0.0))
    if BACKWARD:
        first = a * first_cos + b * second_sin
        second = b * second_cos - a * first_sin
    else:
        first = a * first_cos - b * first_sin
        second = b * second_cos + a * second_sin
    first = narrow(first, dtype)
    second = narrow(second, dtype)
    if OVER:  # out is x: whichever threads load and store an element, all loads of the tile come first
        tl.debug_barrier()
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), [LINES, 2 * HALF])
        tl.store(out_ptr + (line * out_stride + col), both, mask=mask)
    else:
        tl.store(out_ptr + (line * out_stride + col), first, mask=mask)
        tl.store(out_ptr + half + (line * out_stride + col), second, mask=mask)
    if REST > 0:
        rest = rotary + tl.arange(0, REST)[None, :]
        mask = inside & (rest < dim)
        kept = tl.load(x_ptr + (line * x_stride + rest), mask=mask)
        tl.store(out_ptr + (line * out_stride + rest), kept, mask=mask)


@triton.jit
def _angles(ptr, lines, stride, rotary, INTERLEAVED: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr):
    """(first of each pair, second of each pair) of ``lines`` lines of cos or sin, in float32."""
    line = tl.arange(0, LINES)[:, None]
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, :]
        angles = widen(tl.load(ptr + (line * stride + col), mask=(line < lines) & (col < rotary), other=0.0))
        return tl.split(tl.reshape(angles, [LINES, HALF, 2]))
    col = tl.arange(0, HALF)[None, :]
    half = rotary // 2
    mask = (line < lines) & (col < half)
    first = widen(tl.load(ptr + (line * stride + col), mask=mask, other=0.0))
    return first, widen(tl.load(ptr + half + (line * stride + col), mask=mask, other=0.0))


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    out_head,
    q_heads,
    k_heads,
    tokens,
    rotary,
    dim,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    OVER: tl.constexpr,
):
    """A program rotates TOKENS tokens of HEADS heads of q or of k. BY_TOKEN, its lines are the tokens of one head at a
    time, so that a head's segment of the result is written in one piece; else they are the heads of one token. OVER,
    the result goes where the input was; no two programs share an element."""
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = tl.program_id(0) % blocks
    place = tl.program_id(0) // blocks
    across = tl.cdiv(tokens, TOKENS)
    batch = (place // across).to(tl.int64)
    token = (place % across).to(tl.int64) * TOKENS
    cos_ptr += batch * cos_batch + token * cos_token
    sin_ptr += batch * sin_batch + token * sin_token
    first_cos, second_cos = _angles(cos_ptr, tokens - token, cos_token, rotary, INTERLEAVED, TOKENS, HALF)
    first_sin, second_sin = _angles(sin_ptr, tokens - token, sin_token, rotary, INTERLEAVED, TOKENS, HALF)
    if block < q_blocks:
        head = block * HEADS
        q_ptr += batch * q_batch + token * q_token + head.to(tl.int64) * q_head
        q_out_token, q_out_head = dim, out_head
        if OVER:
            q_out_ptr, q_out_token, q_out_head = q_ptr, q_token, q_head
        else:
            q_out_ptr += (batch * q_heads + head) * out_head + token * dim
        if BY_TOKEN:
            for _ in range(tl.minimum(q_heads - head, HEADS)):
                _rotate(
                    q_ptr,
                    q_out_ptr,
                    tokens - token,
                    q_token,
                    q_out_token,
                    first_cos,
                    second_cos,
                    first_sin,
                    second_sin,
                    rotary,
                    dim,
                    INTERLEAVED,
                    BACKWARD,
                    TOKENS,
                    HALF,
                    REST,
                    WIDE,
                    OVER,
                )
                q_ptr += q_head
                q_out_ptr += q_out_head
        else:
            _rotate(
                q_ptr,
                q_out_ptr,
                q_heads - head,
                q_head,
                q_out_head,
                first_cos,
                second_cos,
                first_sin,
                second_sin,
                rotary,
                dim,
                INTERLEAVED,
                BACKWARD,
                HEADS,
                HALF,
                REST,
                WIDE,
                OVER,
            )
    else:
        head = (block - q_blocks) * HEADS
        k_ptr += batch * k_batch + token * k_token + head.to(tl.int64) * k_head
        k_out_token, k_out_head = dim, out_head
        if OVER:
            k_out_ptr, k_out_token, k_out_head = k_ptr, k_token, k_head
        else:
            k_out_ptr += (batch * k_heads + head) * out_head + token * dim
        if BY_TOKEN:
            for _ in range(tl.minimum(k_heads - head, HEADS)):
                _rotate(
                    k_ptr,
                    k_out_ptr,
                    tokens - token,
                    k_token,
                    k_out_token,
                    first_cos,
                    second_cos,
                    first_sin,
                    second_sin,
                    rotary,
                    dim,
                    INTERLEAVED,
                    BACKWARD,
                    TOKENS,
                    HALF,
                    REST,
                    WIDE,
                    OVER,
                )
                k_ptr += k_head
                k_out_ptr += k_out_head
        else:
            _rotate(
                k_ptr,
                k_out_ptr,
                k_heads - head,
                k_head,
                k_out_head,
                first_cos,
                second_cos,
                first_sin,
                second_sin,
                rotary,
                dim,
                INTERLEAVED,
                BACKWARD,
                HEADS,
                HALF,
                REST,
                WIDE,
                OVER,
            )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    backward: bool,
    target: Target,
    over: bool = False,
) -> tuple[Tensor, Tensor]:
    """``over``: the result is written over q and k, whose last dimension is dense."""
    q_out = q if over else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = k if over else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = _dense(q), _dense(k), _dense(cos), _dense(sin)
    batch, q_heads, tokens, dim = q.shape
    k_heads, rotary = k.shape[1], cos.shape[-1]
    half = triton.next_power_of_2(max(rotary // 2, 1))
    rest = triton.next_power_of_2(dim - rotary) if dim > rotary and not over else 0
    # 16 elements a thread, two 16-byte loads of a 16-bit input: 16 lines of 128 on 4 warps of 32 lanes
    lines = max(1, 64 * lanes(target) // (2 * half))
    by_token = tokens >= 8
    if by_token:  # 8 heads share a program's cos and sin
        lines = token_lines = min(lines, triton.next_power_of_2(tokens))
        heads = 8
    else:
        lines = heads = min(lines, triton.next_power_of_2(max(q_heads, k_heads)))
        token_lines = 1
    warps = min(4, max(1, lines * half // (8 * lanes(target))))
    out_head = tokens * dim
    wide = lines * max(*q.stride()[1:3], *k.stride()[1:3], out_head) >= 2**31
    shared = cos.shape[0] == 1
    args = (
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        0 if shared else cos.stride(0),
        cos.stride(1),
        0 if shared else sin.stride(0),
        sin.stride(1),
        out_head,
        q_heads,
        k_heads,
        tokens,
        rotary,
        dim,
        interleaved,
        backward,
        by_token,
        token_lines,
        heads,
        half,
        rest,
        wide,
        over,
    )
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    grid = (batch * triton.cdiv(tokens, token_lines) * blocks,)
    launch(_rope, grid, *args, device=q.device, num_warps=warps)
    return q_out, k_out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, interleaved, False, target)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    dense = _dense(q), _dense(k)
    _launch(*dense, cos, sin, interleaved, False, target, over=True)
    for given, turned in zip((q, k), dense, strict=True):
        if turned is not given:
            given.copy_(turned)
    return q, k


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
        for angles in dict.fromkeys((torch.float32, kind)):
            cos = torch.empty(1, tokens, rotary, dtype=angles, device="meta")
            rope(q, k, cos, cos, interleaved, target)
            rope_(q, k, cos, cos, interleaved, target)
            rope_backward(q.contiguous(), k.contiguous(), cos, cos, interleaved, target)

    shapes = [(2, 4096, 32, 8, 128, 128), (32, 1, 32, 8, 128, 128), (1, 2048, 16, 16, 64, 64)]
    shapes += [(2, 1021, 16, 16, 80, 32), (1, 3, 1, 1, 2, 2)]
    return recorded(lambda s=s, i=i: calls(s, i) for s in shapes for i in (False, True))  # type: ignore[misc]
