"""`gated_delta_rule_backward` in Triton: two walks over chunks of 16 tokens, then each chunk alone.

The walks (`walk_kernels`) keep the state that each chunk begins with, the gradient of that which it ends with, and both
of its corrections. Then a program of `_chunk` takes one chunk of a head, and `_finish` adds what heads share, and
applies what normalisation does. States lie in memory in float32, as in the forward kernel, products
are those of it. No atomics: each sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import exp, inverse_root, narrow, widen
from ferryman.ops.gated_delta_rule.chunk_kernels import _factors, _products, _sums, _tile
from ferryman.ops.gated_delta_rule.triton_kernels import _power
from ferryman.ops.gated_delta_rule.walk_kernels import _forward, _reverse

CHUNK = 16


@triton.jit(do_not_specialize=["length", "chunks"])
def _chunk(
    dy_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    held_ptr,
    late_ptr,
    wrong_ptr,
    asked_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
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
    """dq, dk: (batch, length, heads, width) in float32, of rows as they are multiplied."""
    program = tl.program_id(0)
    head = program % heads
    which = (program // heads) % chunks
    sample = (program // (heads * chunks)).to(tl.int64)
    at = which.to(tl.int64) * CHUNK
    c = tl.arange(0, CHUNK)
    live = c < length - at
    dy_ptr += sample * y_b + head * y_h + at * y_l
    q_ptr += sample * q_b + (head // shared) * q_h + at * q_l
    k_ptr += sample * k_b + (head // shared) * k_h + at * k_l
    row = (sample * length + at) * heads + head
    wrong_ptr += row * dim
    asked_ptr += row * dim
    state = ((sample * chunks + which) * heads + head) * width * dim
    held_ptr += state
    late_ptr += state
    beta = widen(tl.load(beta_ptr + sample * t_b + head * t_h + (at + c) * t_l, mask=live, other=0.0))
    total = _sums(None if g_ptr is None else g_ptr + sample * g_b + head * g_h + at * g_l, g_l, c, live)
    end = tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0)
    since, until = exp(total), exp(end - total)
    seen = c[:, None] >= c[None, :]
    before = c[:, None] > c[None, :]
    decay = tl.where(seen, exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    of_met = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_beta = tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, dim, BLOCK_V, num_stages=1):
        v = first + tl.arange(0, BLOCK_V)
        wrong = _tile(wrong_ptr, c, v, heads * dim, 1, live, dim)
        asked = _tile(asked_ptr, c, v, heads * dim, 1, live, dim)
        dy = _tile(dy_ptr, c, v, y_l, y_v, live, dim)
        of_beta += tl.sum(wrong * asked, 1)
        d = tl.trans(beta[:, None] * wrong)
        of_met = tl.dot(-beta[:, None] * asked, d, of_met, input_precision=PRECISION)
        of_seen = tl.dot(dy, d, of_seen, input_precision=PRECISION)
    tl.store(dbeta_ptr + row + c * heads, narrow(of_beta, dbeta_ptr.dtype.element_ty), mask=live)
    scores, weight, _, _, k_size, q_size = _products(
        k_ptr, k_l, k_k, q_ptr, q_l, q_k, None, c, live, c, width, dim, BLOCK_K, PRECISION
    )
    k_factor = _factors(k_size, 1.0, NORM)
    q_factor = _factors(q_size, scale, NORM)
    of_met = tl.where(before, of_met * decay, 0.0)
    of_seen = of_seen * decay
    pairs = (k_factor[:, None] * of_met * scores + q_factor[:, None] * of_seen * weight) * k_factor[None, :]
    # of an exponent: all pairs with the earlier token before it, and the later one not
    pairs = tl.where(before, pairs, 0.0)
    reached = tl.dot(pairs, tl.where(c[:, None] < c[None, :], 1.0, 0.0), input_precision=PRECISION)
    exponent = tl.sum(tl.where(seen, reached, 0.0), 0)
    of_met += tl.trans(of_met)
    early = tl.zeros([CHUNK], tl.float32)
    sent = tl.zeros([CHUNK], tl.float32)
    whole = 0.0
    for first in tl.range(0, width, BLOCK_K, num_stages=1):
        n = first + tl.arange(0, BLOCK_K)
        from_y = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        from_x = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        brought = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for column in tl.range(0, dim, BLOCK_V, num_stages=1):
            v = column + tl.arange(0, BLOCK_V)
            start_state = _tile(held_ptr, n, v, dim, 1, n < width, dim)
            late = _tile(late_ptr, n, v, dim, 1, n < width, dim)
            whole += tl.sum(tl.sum(start_state * late, 1), 0)
            start_state, late = tl.trans(start_state), tl.trans(late)
            dy = _tile(dy_ptr, c, v, y_l, y_v, live, dim)
            from_y = tl.dot(dy, start_state, from_y, input_precision=PRECISION)
            x = beta[:, None] * _tile(asked_ptr, c, v, heads * dim, 1, live, dim)
            from_x = tl.dot(x, start_state, from_x, input_precision=PRECISION)
            d = beta[:, None] * _tile(wrong_ptr, c, v, heads * dim, 1, live, dim)
            brought = tl.dot(d, late, brought, input_precision=PRECISION)
        k = _tile(k_ptr, c, n, k_l, k_k, live, width) * k_factor[:, None]
        q = _tile(q_ptr, c, n, q_l, q_k, live, width) * q_factor[:, None]
        from_y *= since[:, None]
        from_x *= since[:, None]
        brought *= until[:, None]
        early += tl.sum(from_y * q, 1) - tl.sum(from_x * k, 1)
        sent += tl.sum(brought * k, 1)
        dq = tl.dot(of_seen, k, from_y, input_precision=PRECISION)
        dk = tl.dot(of_met, k, brought - from_x, input_precision=PRECISION)
        dk = tl.dot(tl.trans(of_seen), q, dk, input_precision=PRECISION)
        out = row * width + c[:, None] * (heads * width) + n[None, :]
        tl.store(dq_ptr + out, dq, mask=live[:, None] & (n < width)[None, :])
        tl.store(dk_ptr + out, dk, mask=live[:, None] & (n < width)[None, :])
    if dg_ptr is not None:
        exponent += tl.sum(tl.where(seen, early[:, None], 0.0), 0)
        exponent += tl.sum(tl.where(c[:, None] < c[None, :], sent[:, None], 0.0), 0)
        exponent += exp(end) * whole
        tl.store(dg_ptr + row + c * heads, narrow(exponent, dg_ptr.dtype.element_ty), mask=live)


@triton.jit
def _finish(
    part_ptr,
    x_ptr,
    out_ptr,
    scale,
    length,
    groups,
    shared,
    width,
    x_b,
    x_l,
    x_h,
    x_k,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out: (batch, length, groups, width), the sum of ``part`` over a group's heads, through the normalisation of x."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    token = program // groups
    x_ptr += (token // length) * x_b + (token % length) * x_l + group * x_h
    part_ptr += program * shared * width
    size = tl.zeros([BLOCK], tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    if NORM:
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            x = widen(tl.load(x_ptr + n * x_k, mask=n < width, other=0.0))
            total = tl.zeros([BLOCK], tl.float32)
            for r in range(shared):
                total += tl.load(part_ptr + r * width + n, mask=n < width, other=0.0)
            size += x * x
            along += x * total
    factor = scale
    lean = 0.0
    if NORM:
        root = inverse_root(tl.sum(size, 0) + 1e-6)
        factor = root * scale
        lean = tl.sum(along, 0) * root * root
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for r in range(shared):
            total += tl.load(part_ptr + r * width + n, mask=n < width, other=0.0)
        if NORM:
            total -= widen(tl.load(x_ptr + n * x_k, mask=n < width, other=0.0)) * lean
        tl.store(out_ptr + program * width + n, narrow(total * factor, out_ptr.dtype.element_ty), mask=n < width)


def begun(*own: Tensor | None) -> list[Tensor]:
    """Each gradient's memory; none for an argument that is absent."""
    like = next(t for t in own if t is not None)
    return [like.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in own]


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
    grads = begun(q, k, v, g, beta, initial_state)
    if batch * length * heads * width * dim == 0:
        for t in grads:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            grads[5].copy_(grad_final_state)
        return tuple(grads)
    nvidia = target.vendor == "nvidia"
    chunks, repeated = triton.cdiv(length, CHUNK), heads // shared
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    states, late = (torch.empty(batch, chunks, heads, width, dim, **kind) for _ in range(2))
    wrong, asked = (torch.empty(batch, length, heads, dim, **kind) for _ in range(2))
    # with 32 keys `_reverse` spills on sm_90 and gfx1100, with 4 warps on sm_89; `_chunk` with 4 warps on sm_90
    block_k, block_v = _power(width, 32), _power(dim, 32)
    options = (qk_l2norm, "tf32x3" if nvidia else "ieee", CHUNK)
    factor = float(width**-0.5 if scale is None else scale)
    sizes = (heads, repeated, width, dim)
    grid = (batch * heads * triton.cdiv(dim, block_v),)
    launch(
        _forward,
        grid,
        k,
        v,
        g,
        beta,
        initial_state,
        states,
        wrong,
        length,
        *sizes,
        *k.stride(),
        *v.stride(),
        *strides(g, 3),
        *beta.stride(),
        *strides(initial_state, 4),
        *options,
        block_k,
        block_v,
        device=v.device,
        num_warps=4,
    )
    launch(
        _reverse,
        grid,
        grad_y,
        grad_final_state,
        q,
        k,
        g,
        beta,
        late,
        asked,
        grads[2],
        None if initial_state is None else grads[5],
        factor,
        length,
        *sizes,
        *grad_y.stride(),
        *strides(grad_final_state, 4),
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        *options,
        16 if target.wave == 32 else block_k,
        block_v,
        device=v.device,
        num_warps=8 if target.wave == 32 else 4,
    )
    gradients(
        grad_y,
        q,
        k,
        g,
        beta,
        (states, late, wrong, asked),
        grads,
        factor,
        qk_l2norm,
        CHUNK,
        8 if nvidia else 4 if target.wave == 32 else 1,
        target,
    )
    return tuple(grads)


def gradients(
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    walked: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: Sequence[Tensor],
    factor: float,
    norm: bool,
    chunk: int,
    warps: int,
    target: Target,
) -> None:
    """Those of q, k, g and beta, into ``grads``, which is in this order, v's third. ``walked``: the states that chunks
    begin with, the gradients of those they end with, u, and the gradients of corrections."""
    batch, length, shared, width = q.shape
    heads, dim = grad_y.shape[2:]
    chunks, repeated = triton.cdiv(length, chunk), heads // shared
    parts = [torch.empty(batch, length, heads, width, dtype=torch.float32, device=q.device) for _ in range(2)]
    launch(
        _chunk,
        (batch * chunks * heads,),
        grad_y,
        q,
        k,
        g,
        beta,
        *walked,
        *parts,
        None if g is None else grads[3],
        grads[4],
        factor,
        length,
        chunks,
        heads,
        repeated,
        width,
        dim,
        *grad_y.stride(),
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        norm,
        "tf32x3" if target.vendor == "nvidia" else "ieee",
        chunk,
        16,
        16,
        device=q.device,
        num_warps=warps,
    )
    block = _power(width, 256)
    for part, x, out, times in ((parts[0], q, grads[0], factor), (parts[1], k, grads[1], 1.0)):
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
            norm,
            block,
            device=q.device,
            num_warps=1,
        )


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Qwen3-Next's heads, wider keys and small odd ones; with a decay, a state and normalisation, and without."""
    kind = getattr(torch, dtype)

    def calls(length: int, shared: int, heads: int, width: int, dim: int, gate: bool, state: bool, norm: bool) -> None:
        q = torch.empty(2, length, shared, width, dtype=kind, device="meta")
        v = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        beta = torch.empty(2, length, heads, dtype=kind, device="meta")
        g = torch.empty(2, length, heads, dtype=torch.float32, device="meta") if gate else None
        kept = torch.empty(2, heads, width, dim, dtype=torch.float32, device="meta") if state else None
        gated_delta_rule_backward(v, kept, q, q, v, g, beta, kept, None, norm, target)

    shapes: tuple[tuple[Any, ...], ...] = (
        (2048, 16, 32, 128, 128, True, False, True),
        (2048, 16, 32, 128, 128, True, True, True),
        (2048, 16, 16, 256, 256, False, True, False),
        (37, 3, 3, 11, 13, True, True, True),
    )
    kernels = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    # scalar registers lie in lanes of vector registers, none in memory
    allowed = {"_reverse": 0 if target.wave == 32 else 24}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in kernels]
