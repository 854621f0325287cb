"""`ssd_scan` in chunks through PyTorch: products within a chunk and with its state, and one step for each chunk."""

from __future__ import annotations

import math

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
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        step = torch.clamp(step, min=0) + torch.log1p(torch.exp(-step.abs()))
    if dt_min is not None or dt_max is not None:
        step = step.clamp(dt_min, dt_max)
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
    made = torch.einsum("bksghp,bksgn->bkghpn", grouped, into).flatten(2, 3)
    decay = torch.exp(total[..., -1])[..., None, None]
    held = torch.empty_like(made)
    for i in range(count):
        held[:, i] = state
        state = torch.addcmul(made[:, i], decay[:, i], state)
    held = held.unflatten(2, (groups, heads // groups))
    early = torch.einsum("bktgn,bkghpn->bktghp", out, held).flatten(3, 4)
    y = torch.addcmul(y, early, torch.exp(total).movedim(2, 3)[..., None])
    y = y.flatten(1, 2)[:, :length]
    if d is not None:
        y = torch.addcmul(y, x.float(), d.float()[:, None])
    return (y if y_float32 else y.to(x.dtype)).contiguous(), state.contiguous()
