"""`selective_scan` in Triton: a program takes a block of a sample's channels, token after token.

Its part of the state stays in registers, and later tokens are on their way while one is computed. Programs are batch x
blocks of channels: a short batch of a narrow model leaves units of a large device idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, sigmoid, softplus, widen


@triton.jit(do_not_specialize=["length"])
def _scan(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    final_ptr,
    length,
    channels,
    width,
    x_b,
    x_l,
    x_d,
    t_b,
    t_l,
    t_d,
    b_b,
    b_l,
    b_n,
    c_b,
    c_l,
    c_n,
    z_b,
    z_l,
    z_d,
    s_b,
    s_d,
    s_n,
    SOFTPLUS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    across = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    sample = (program // across).to(tl.int64)
    i = (program % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    live, kept = i < channels, n < width
    inside = live[:, None] & kept[None, :]
    rate = widen(tl.load(a_ptr + i[:, None] * width + n[None, :], mask=inside, other=0.0))
    state = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if state_ptr is not None:
        at = state_ptr + sample * s_b + i.to(tl.int64)[:, None] * s_d + n[None, :] * s_n
        state = widen(tl.load(at, mask=inside, other=0.0))
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + i, mask=live, other=0.0))
    if d_ptr is not None:
        skip = widen(tl.load(d_ptr + i, mask=live, other=0.0))
    wide = i.to(tl.int64)
    x_ptr += sample * x_b + wide * x_d
    dt_ptr += sample * t_b + wide * t_d
    b_ptr += sample * b_b + n * b_n
    c_ptr += sample * c_b + n * c_n
    if z_ptr is not None:
        z_ptr += sample * z_b + wide * z_d
    y_ptr += sample * length * channels + wide
    for t in tl.range(0, length, num_stages=STAGES):
        place = tl.full([], 1, tl.int64) * t
        x = widen(tl.load(x_ptr + place * x_l, mask=live, other=0.0))
        step = widen(tl.load(dt_ptr + place * t_l, mask=live, other=0.0)) + bias
        b = widen(tl.load(b_ptr + place * b_l, mask=kept, other=0.0))
        c = widen(tl.load(c_ptr + place * c_l, mask=kept, other=0.0))
        if SOFTPLUS:
            step = softplus(step)
        state = exp(step[:, None] * rate) * state + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1)
        if d_ptr is not None:
            y += skip * x
        if z_ptr is not None:
            z = widen(tl.load(z_ptr + place * z_l, mask=live, other=0.0))
            gate, _ = sigmoid(z)
            y *= z * gate
        tl.store(y_ptr + place * channels, narrow(y, y_ptr.dtype.element_ty), mask=live)
    final_ptr += sample * channels * width
    tl.store(final_ptr + wide[:, None] * width + n[None, :], state, mask=inside)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, channels = x.shape
    width = b.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(batch, channels, width, dtype=torch.float32, device=x.device)
    if batch * channels == 0:
        return y, final
    block_n = max(1, triton.next_power_of_2(width))
    # a warp, and 16 numbers of the state for each of its threads
    block_d = min(triton.next_power_of_2(channels), max(16, 512 // block_n))
    own = [None if t is None else t.contiguous() for t in (d, dt_bias)]
    launch(
        _scan,
        (batch * triton.cdiv(channels, block_d),),
        x,
        dt,
        a.contiguous(),
        b,
        c,
        own[0],
        z,
        own[1],
        initial_state,
        y,
        final,
        length,
        channels,
        width,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        *c.stride(),
        *((0, 0, 0) if z is None else z.stride()),
        *((0, 0, 0) if initial_state is None else initial_state.stride()),
        dt_softplus,
        block_d,
        block_n,
        4,
        device=x.device,
        num_warps=max(1, min(8, block_d * block_n // 512)),
    )
    return y, final


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba's and Jamba's channels, and small odd ones; many tokens and one."""
    kind = getattr(torch, dtype)

    def calls(length: int, channels: int, width: int, state: bool, gate: bool) -> None:
        x = torch.empty(2, length, channels, dtype=kind, device="meta")
        b = torch.empty(2, length, width, dtype=kind, device="meta")
        a = torch.empty(channels, width, dtype=torch.float32, device="meta")
        own = torch.empty(channels, dtype=torch.float32, device="meta")
        kept = torch.empty(2, channels, width, dtype=torch.float32, device="meta") if state else None
        selective_scan(x, x, a, b, b, own, x if gate else None, own, kept, True, target)

    shapes = [(2048, 8192, 16, False, True), (1, 8192, 16, True, True), (37, 13, 11, True, False)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
