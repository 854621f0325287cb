"""`selective_scan` through PyTorch: decays of a span of tokens at once, the state token after token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target

SPAN_BYTES = 2**26  # of the decays that are made at once


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
    if initial_state is None:
        state = torch.zeros(batch, channels, width, dtype=torch.float32, device=x.device)
    else:
        state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y, state
    rate, skip, bias = a.float(), None if d is None else d.float(), None if dt_bias is None else dt_bias.float()
    span = max(1, min(length, SPAN_BYTES // max(4, 4 * batch * channels * width)))
    for first in range(0, length, span):
        part = slice(first, first + span)
        here, step = x[:, part].float(), dt[:, part].float()
        if bias is not None:
            step = step + bias
        if dt_softplus:
            step = torch.clamp(step, min=0) + torch.log1p(torch.exp(-step.abs()))
        decay = torch.exp(step[..., None] * rate)
        come = (step * here)[..., None] * b[:, part].float()[:, :, None]
        for t in range(here.shape[1]):
            state = torch.addcmul(come[:, t], decay[:, t], state, out=come[:, t])
        state = state.clone(memory_format=torch.contiguous_format)
        out = torch.matmul(come, c[:, part].float()[..., None]).squeeze(-1) if width else torch.zeros_like(here)
        if skip is not None:
            out = torch.addcmul(out, here, skip)
        if z is not None:
            out = out * functional.silu(z[:, part].float())
        y[:, part] = out
    return y, state
