"""`ssd_scan` of few tokens in Triton: a program keeps some rows of a head's state in registers, token after token.

Limit: the state is read and written once, in float32. 64 samples of Mamba2 2.7B, 80 heads of 64 x 128, are 336 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import exp, narrow, widen
from ferryman.ops.ssd_scan.triton_kernels import _steps

STATE = 2048  # numbers of the state in a program


@triton.jit(do_not_specialize=["length"])
def _recurrent(
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
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    across = tl.cdiv(dim, BLOCK_P)
    program = tl.program_id(0)
    head = (program // across) % heads
    sample = (program // (across * heads)).to(tl.int64)
    p = (program % across) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    inside = (p < dim)[:, None] & (n < width)[None, :]
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if state_ptr is not None:
        at = state_ptr + sample * s_b + head * s_h + p[:, None] * s_p + n[None, :] * s_n
        state = widen(tl.load(at, mask=inside, other=0.0))
    rate = widen(tl.load(a_ptr + head))
    x_ptr += sample * x_b + head * x_h
    dt_ptr += sample * t_b + head * t_h
    b_ptr += sample * b_b + (head // shared) * b_g
    c_ptr += sample * c_b + (head // shared) * c_g
    y_ptr += (sample * length * heads + head) * dim
    one = tl.arange(0, 1)
    for t in tl.range(0, length, num_stages=1):
        token = tl.full([], 1, tl.int64) * t
        step, _ = _steps(dt_ptr + token * t_l, bias_ptr, low, high, t_l, head, one, one == 0, SOFTPLUS)
        x = widen(tl.load(x_ptr + token * x_l + p * x_p, mask=p < dim, other=0.0))
        b = widen(tl.load(b_ptr + token * b_l + n * b_n, mask=n < width, other=0.0))
        c = widen(tl.load(c_ptr + token * c_l + n * c_n, mask=n < width, other=0.0))
        state = state * exp(step * rate)[:, None] + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1)
        if d_ptr is not None:
            y += widen(tl.load(d_ptr + head)) * x
        tl.store(y_ptr + token * heads * dim + p, narrow(y, y_ptr.dtype.element_ty), mask=p < dim)
    final_ptr += (sample * heads + head) * dim * width
    tl.store(final_ptr + p[:, None] * width + n[None, :], state, mask=inside)


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
    block_n = max(16, triton.next_power_of_2(width))
    block_p = min(triton.next_power_of_2(dim), STATE // block_n)
    launch(
        _recurrent,
        (batch * heads * triton.cdiv(dim, block_p),),
        x,
        dt,
        a.contiguous(),
        b,
        c,
        *(None if t is None else t.contiguous() for t in (d, dt_bias)),
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
        *strides(initial_state, 4),
        dt_softplus,
        block_p,
        block_n,
        device=x.device,
        num_warps=4 if block_p * block_n > 512 else 1,
    )
    return y, final


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba2's heads, a wider state and small odd ones."""
    kind = getattr(torch, dtype)

    def calls(heads: int, dim: int, groups: int, width: int, state: bool, wide: bool, low: float | None) -> None:
        x = torch.empty(2, 1, heads, dim, dtype=kind, device="meta")
        b = torch.empty(2, 1, groups, width, dtype=kind, device="meta")
        own = torch.empty(heads, dtype=torch.float32, device="meta")
        kept = torch.empty(2, heads, dim, width, dtype=torch.float32, device="meta") if state else None
        dt = torch.empty(2, 1, heads, dtype=kind, device="meta")
        ssd_scan(x, dt, own, b, b, own, own, kept, True, wide, low, None, target)

    shapes = (
        (80, 64, 1, 128, True, False, None),
        (48, 64, 1, 256, True, True, None),
        (3, 13, 3, 11, False, False, 0.1),
    )
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
