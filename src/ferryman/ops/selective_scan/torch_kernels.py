"""`selective_scan` through PyTorch: decays of a span of tokens at once, the state token after token."""

from __future__ import annotations

from typing import Any

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


def selective_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
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
) -> tuple[Tensor, ...]:
    """The states that spans begin with; then span after span, the last one first, its states and their gradients."""
    batch, length, channels = x.shape
    width = b.shape[2]
    own = (x, dt, a, b, c, d, z, dt_bias, initial_state)
    grads = [
        torch.zeros(0 if t is None else t.shape, dtype=(x if t is None else t).dtype, device=x.device) for t in own
    ]
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    shape = (batch, channels, width)
    state = torch.zeros(shape, **kind) if initial_state is None else initial_state.float()
    back = torch.zeros(shape, **kind) if grad_final_state is None else grad_final_state.float()
    rate, of_a = a.float(), torch.zeros(channels, width, **kind)
    of_d, of_bias = torch.zeros(channels, **kind), torch.zeros(channels, **kind)
    span = max(1, min(length, SPAN_BYTES // max(4, 4 * batch * channels * width)))

    def taken(first: int) -> tuple[slice, Tensor, Tensor, Tensor, Tensor, Tensor]:
        part = slice(first, first + span)
        here, turned = x[:, part].float(), dt[:, part].float()
        if dt_bias is not None:
            turned = turned + dt_bias.float()
        step = torch.clamp(turned, min=0) + torch.log1p(torch.exp(-turned.abs())) if dt_softplus else turned
        decay = torch.exp(step[..., None] * rate)
        return part, here, turned, step, decay, (step * here)[..., None] * b[:, part].float()[:, :, None]

    spans = range(0, length, span) if x.numel() else ()
    kept = []
    for first in spans:
        kept.append(state)
        *_, decay, come = taken(first)
        for t in range(come.shape[1]):
            state = torch.addcmul(come[:, t], decay[:, t], state)
    for first in reversed(spans):
        part, here, turned, step, decay, states = taken(first)
        state = kept[first // span]
        before = torch.empty_like(states)
        for t in range(here.shape[1]):
            before[:, t] = state
            state = torch.addcmul(states[:, t], decay[:, t], state, out=states[:, t])
        out, into, g = c[:, part].float(), b[:, part].float(), grad_y[:, part].float()
        if z is not None:
            gate, s = z[:, part].float(), torch.sigmoid(z[:, part].float())
            read = (states * out[:, :, None]).sum(-1)
            if d is not None:
                read = torch.addcmul(read, here, d.float())
            grads[6][:, part] = g * read * (s * (1 + gate * (1 - s)))
            g = g * (gate * s)
        grads[4][:, part] = (g[..., None] * states).sum(2)
        whole = g[..., None] * out[:, :, None]
        for t in reversed(range(here.shape[1])):
            whole[:, t] += back
            back = decay[:, t] * whole[:, t]
        read = (whole * into[:, :, None]).sum(-1)
        grads[3][:, part] = ((step * here)[..., None] * whole).sum(2)
        grads[0][:, part] = step * read if d is None else torch.addcmul(step * read, g, d.float())
        exponent = decay * whole * before
        of_step = torch.addcmul((exponent * rate).sum(-1), read, here)
        if dt_softplus:
            of_step = of_step * torch.sigmoid(turned)
        grads[1][:, part] = of_step
        of_a += (exponent * step[..., None]).sum((0, 1))
        of_d += (here * g).sum((0, 1))
        of_bias += of_step.sum((0, 1))
    for place, value in ((2, of_a), (5, of_d), (7, of_bias), (8, back)):
        if own[place] is not None:
            grads[place].copy_(value)
    return tuple(grads)
