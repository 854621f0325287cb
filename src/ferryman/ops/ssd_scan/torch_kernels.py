"""`ssd_scan` in chunks through PyTorch: products within a chunk and with its state, and one step for each chunk."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target

CHUNK = 64


def _chunks(x: Tensor, count: int, chunk: int) -> Tensor:
    """(B, L, ...) in float32 as (B, count, chunk, ...), zeros behind."""
    gap = count * chunk - x.shape[1]
    whole = functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, gap))
    return whole.reshape(x.shape[0], count, chunk, *x.shape[2:])


def _steps(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:
    """(the steps, their slopes): by what a change of dt changes them."""
    z = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step, slope = z, torch.ones_like(z)
    if softplus:
        step, slope = torch.clamp(z, min=0) + torch.log1p(torch.exp(-z.abs())), torch.sigmoid(z)
    if low is not None or high is not None:
        limited = step.clamp(low, high)
        step, slope = limited, slope.masked_fill_(limited != step, 0.0)
    return step, slope


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
    if initial_state is None:
        state = torch.zeros(batch, heads, dim, width, dtype=torch.float32, device=x.device)
    else:
        state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        # without P there is no state; without L it stays
        return torch.empty(x.shape, dtype=torch.float32 if y_float32 else x.dtype, device=x.device), state
    step, _ = _steps(dt, dt_bias, dt_softplus, dt_min, dt_max)
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    # a token past the end has step 0: it leaves the state as it is
    step = _chunks(step, count, chunk)
    into, out = _chunks(b, count, chunk), _chunks(c, count, chunk)
    total = torch.cumsum(step * a.float(), 2).movedim(3, 2)  # (B, chunks, H, Q)
    moved = _chunks(x, count, chunk) * step[..., None]
    apart = total[..., :, None] - total[..., None, :]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    weight = torch.exp(apart.masked_fill_(later, -math.inf))
    scores = torch.einsum("bktgn,bksgn->bkgts", out, into)
    weight = weight.unflatten(2, (groups, heads // groups)) * scores[:, :, :, None]
    y = torch.einsum("bkhts,bkshp->bkthp", weight.flatten(2, 3), moved)
    ends = torch.exp(total[..., -1:] - total).movedim(2, 3)[..., None]  # (B, chunks, Q, H, 1)
    grouped = (moved * ends).unflatten(3, (groups, heads // groups))
    brought = torch.einsum("bksghp,bksgn->bkghpn", grouped, into).flatten(2, 3)
    decay = torch.exp(total[..., -1])[..., None, None]
    states = torch.empty_like(brought)
    for i in range(count):
        states[:, i] = state
        state = torch.addcmul(brought[:, i], decay[:, i], state)
    states = states.unflatten(2, (groups, heads // groups))
    early = torch.einsum("bktgn,bkghpn->bktghp", out, states).flatten(3, 4)
    y = torch.addcmul(y, early, torch.exp(total).movedim(2, 3)[..., None])
    y = y.flatten(1, 2)[:, :length]
    if d is not None:
        y = torch.addcmul(y, x.float(), d.float()[:, None])
    return (y if y_float32 else y.to(x.dtype)).contiguous(), state.contiguous()


def ssd_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
    target: Target,
) -> tuple[Tensor, ...]:
    """The states that chunks begin with and the gradients of those that they end with, then each chunk alone.

    The gradient of an exponent is a sum over pairs of tokens about it: of cumulative sums, without differences.
    """
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    shared = heads // groups
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    state = torch.zeros(batch, heads, dim, width, **kind) if initial_state is None else initial_state.float()
    late = torch.zeros(batch, heads, dim, width, **kind) if grad_final_state is None else grad_final_state.float()
    own = (dt, a, b, c, d, dt_bias, initial_state)
    if x.numel() == 0:
        zeros = (
            torch.zeros(0 if t is None else t.shape, dtype=x.dtype if t is None else t.dtype, device=x.device)
            for t in own[:-1]
        )
        kept = x.new_empty(0) if initial_state is None else late.to(initial_state.dtype, copy=True)
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device), *zeros, kept.contiguous()
    step, slope = _steps(dt, dt_bias, dt_softplus, dt_min, dt_max)
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    by_group = (groups, shared)
    step = _chunks(step, count, chunk).unflatten(3, by_group)  # (B, chunks, Q, G, R)
    into, out = _chunks(b, count, chunk), _chunks(c, count, chunk)  # (B, chunks, Q, G, N)
    here = _chunks(x, count, chunk).unflatten(3, by_group)  # (B, chunks, Q, G, R, P)
    g = _chunks(grad_y, count, chunk).unflatten(3, by_group)
    rate = a.float().unflatten(0, by_group)
    total = torch.cumsum(step * rate, 2)
    end = total[:, :, -1:]
    early, to_end = torch.exp(total), torch.exp(end - total)
    decay = torch.exp(end[:, :, 0]).flatten(2)[..., None, None]
    brought = torch.einsum("bksgrp,bksgn->bkgrpn", here * (to_end * step)[..., None], into).flatten(2, 3)
    asked = torch.einsum("bktgrp,bktgn->bkgrpn", g * early[..., None], out).flatten(2, 3)
    states, wanted = torch.empty_like(brought), torch.empty_like(asked)
    for i in range(count):
        states[:, i] = state
        state = torch.addcmul(brought[:, i], decay[:, i], state)
    for i in reversed(range(count)):
        wanted[:, i] = late
        late = torch.addcmul(asked[:, i], decay[:, i], late)
    whole = (decay * states * wanted).sum((-2, -1)).unflatten(2, by_group)  # what each exponent of the chunk scales
    states, wanted = states.unflatten(2, by_group), wanted.unflatten(2, by_group)
    total, times = total.movedim(2, -1), step.movedim(2, -1)[..., None, :]  # (B, chunks, G, R, Q)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    weight = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill_(later, -math.inf))
    scores = torch.einsum("bktgn,bksgn->bkgts", out, into)[:, :, :, None]
    cross = torch.einsum("bktgrp,bksgrp->bkgrts", g, here)
    pairs = weight * scores * cross
    weight = weight * times
    grad_x = torch.einsum("bkgrts,bktgrp->bksgrp", weight * scores, g)
    read = torch.einsum("bksgn,bkgrpn->bksgrp", into, wanted)
    grad_x = torch.addcmul(grad_x, (step * to_end)[..., None], read)
    if d is not None:
        grad_x = torch.addcmul(grad_x, d.float().unflatten(0, by_group)[..., None], g)
    weight = (weight * cross).sum(3)
    of_b = torch.einsum("bksgrp,bkgrpn->bksgrn", here * to_end[..., None], wanted)
    of_c = torch.einsum("bktgrp,bkgrpn->bktgrn", g * early[..., None], states)
    grad_b = torch.einsum("bkgts,bktgn->bksgn", weight, out) + (of_b * step[..., None]).sum(4)
    grad_c = torch.einsum("bkgts,bksgn->bktgn", weight, into) + of_c.sum(4)
    of_b, of_c = (of_b * into[:, :, :, :, None]).sum(-1), (of_c * out[:, :, :, :, None]).sum(-1)
    # of an exponent: all pairs with the earlier token before it, and the later one not
    before = functional.pad((pairs * times).cumsum(-1)[..., :-1], (1, 0))
    exponent = before.masked_fill_(later, 0.0).sum(-2).movedim(-1, 2)
    exponent = exponent + of_c.flip(2).cumsum(2).flip(2) + whole[:, :, None]
    exponent = exponent + functional.pad((of_b * step).cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    of_step = exponent * rate + pairs.sum(-2).movedim(-1, 2) + of_b
    grad_dt = of_step.flatten(1, 2)[:, :length].flatten(2) * slope
    gradients = (
        grad_dt,
        (exponent * step).sum((0, 1, 2)).flatten(),
        grad_b.flatten(1, 2)[:, :length],
        grad_c.flatten(1, 2)[:, :length],
        None if d is None else (x.float() * grad_y.float()).sum((0, 1, 3)),
        grad_dt.sum((0, 1)),
        late,
    )
    grad_x = grad_x.flatten(1, 2)[:, :length].flatten(2, 3)
    return (
        grad_x.to(x.dtype).contiguous(),
        *(
            x.new_empty(0) if t is None or gradient is None else gradient.to(t.dtype).contiguous()
            for t, gradient in zip(own, gradients, strict=True)
        ),
    )
