"""`ssd_scan` in Triton: a program takes a head of a sample and a block of its dimensions, chunk after chunk.

Its part of the state stays in registers. All products are of float32 operands, by tl.dot: as three of tf32 on the
matrix units of NVIDIA, as float32 on those of AMD. Nothing is rounded on the way to y. Programs are batch x heads x
blocks of dimensions: one short sequence leaves units of a large device idle.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, softplus, widen


@triton.jit(do_not_specialize=["length"])
def _scan(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    low,
    high,
    length,
    heads,
    shared,
    dim,
    width,
    x_b,
    x_l,
    x_h,
    x_p,
    t_b,
    t_l,
    t_h,
    b_b,
    b_l,
    b_g,
    b_n,
    c_b,
    c_l,
    c_g,
    c_n,
    s_b,
    s_h,
    s_p,
    s_n,
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    across = tl.cdiv(dim, BLOCK_P)
    program = tl.program_id(0)
    first = (program % across) * BLOCK_P
    head = (program // across) % heads
    sample = (program // (across * heads)).to(tl.int64)
    group = head // shared
    q = tl.arange(0, CHUNK)
    p = first + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    inside = (p < dim)[:, None] & (n < width)[None, :]
    rate = widen(tl.load(a_ptr + head))
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if state_ptr is not None:
        state_ptr += sample * s_b + head * s_h
        state = widen(tl.load(state_ptr + p[:, None] * s_p + n[None, :] * s_n, mask=inside, other=0.0))
    x_ptr += sample * x_b + head * x_h
    dt_ptr += sample * t_b + head * t_h
    b_ptr += sample * b_b + group * b_g
    c_ptr += sample * c_b + group * c_g
    y_ptr += (sample * length * heads + head) * dim
    for at in tl.range(0, length, CHUNK, num_stages=1):
        place = tl.full([], 1, tl.int64) * at
        live = q < length - at
        step = widen(tl.load(dt_ptr + place * t_l + q * t_l, mask=live, other=0.0))
        if bias_ptr is not None:
            step += widen(tl.load(bias_ptr + head))
        if SOFTPLUS:
            step = softplus(step)
        if low is not None:
            step = tl.where(step < low, low, step)
        if high is not None:
            step = tl.where(step > high, high, step)
        # a token past the end leaves the state as it is
        step = tl.where(live, step, 0.0)
        total = tl.cumsum(step * rate, 0)
        end = tl.sum(tl.where(q == CHUNK - 1, total, 0.0), 0)
        wide = live[:, None] & (n < width)[None, :]
        shape = live[:, None] & (p < dim)[None, :]
        x = widen(tl.load(x_ptr + place * x_l + q[:, None] * x_l + p[None, :] * x_p, mask=shape, other=0.0))
        b = widen(tl.load(b_ptr + place * b_l + q[:, None] * b_l + n[None, :] * b_n, mask=wide, other=0.0))
        c = widen(tl.load(c_ptr + place * c_l + q[:, None] * c_l + n[None, :] * c_n, mask=wide, other=0.0))
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        seen = q[:, None] >= q[None, :]
        decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        weight = tl.where(seen, decay * scores * step[None, :], 0.0)
        y = tl.dot(c, tl.trans(state), input_precision=PRECISION) * exp(total)[:, None]
        y = tl.dot(weight, x, y, input_precision=PRECISION)
        if d_ptr is not None:
            y += widen(tl.load(d_ptr + head)) * x
        out = y_ptr + place * (heads * dim) + q[:, None] * (heads * dim) + p[None, :]
        tl.store(out, narrow(y, y_ptr.dtype.element_ty), mask=shape)
        kept = x * (exp(end - total) * step)[:, None]
        state = tl.dot(tl.trans(kept), b, state * exp(end), input_precision=PRECISION)
    final_ptr += (sample * heads + head) * dim * width
    tl.store(final_ptr + p[:, None] * width + n[None, :], state, mask=inside)


def _power(n: int, most: int) -> int:
    return max(16, min(triton.next_power_of_2(n), most))


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    y_float32: bool,
    dt_min: float | None,
    dt_max: float | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32 if y_float32 else x.dtype, device=x.device)
    final = torch.empty(batch, heads, dim, width, dtype=torch.float32, device=x.device)
    if batch * heads * dim == 0:
        return y, final
    nvidia = target.vendor == "nvidia"
    block_n = _power(width, 256)
    block_p = _power(dim, 16 if nvidia and block_n > 128 else 32)
    # operands of three tf32 products take twice the registers: chunks of 32 spill 4.9 KB on sm_90
    chunk = 16 if nvidia or length <= 16 or block_n > 128 else 32
    own = [None if t is None else t.contiguous() for t in (d, dt_bias)]
    launch(
        _scan,
        (batch * heads * triton.cdiv(dim, block_p),),
        x,
        dt,
        a.contiguous(),
        b,
        c,
        *own,
        initial_state,
        y,
        final,
        dt_min,
        dt_max,
        length,
        heads,
        heads // groups,
        dim,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *((0, 0, 0, 0) if initial_state is None else initial_state.stride()),
        dt_softplus,
        "tf32x3" if nvidia else "ieee",
        chunk,
        block_p,
        block_n,
        device=x.device,
        num_warps=8 if nvidia else 4,
    )
    return y, final


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba2's heads, Falcon-H1's wider state and small odd ones; many tokens and one."""
    kind = getattr(torch, dtype)

    def calls(
        length: int, heads: int, dim: int, groups: int, width: int, state: bool, wide: bool, low: float | None
    ) -> None:
        x = torch.empty(2, length, heads, dim, dtype=kind, device="meta")
        b = torch.empty(2, length, groups, width, dtype=kind, device="meta")
        own = torch.empty(heads, dtype=torch.float32, device="meta")
        kept = torch.empty(2, heads, dim, width, dtype=torch.float32, device="meta") if state else None
        dt = torch.empty(2, length, heads, dtype=kind, device="meta")
        ssd_scan(x, dt, own, b, b, own, own, kept, True, wide, low, None, target)

    shapes: list[tuple[Any, ...]] = [(2048, 80, 64, 1, 128, False, False, None), (1, 80, 64, 1, 128, True, False, None)]
    shapes += [(2048, 48, 64, 1, 256, True, False, None), (37, 3, 13, 3, 11, True, False, 0.001)]
    if kind is not torch.float32:
        shapes += [(2048, 80, 64, 1, 128, False, True, None)]  # what models' own scans return
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
