"""Mamba2's scan as sums over pairs of tokens; no state is carried."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    y_float32: bool = False,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``y_float32``: y is no narrower than float64 anyway."""
    shared = x.shape[2] // b.shape[2]
    step = dt if bias is None else dt + bias
    step = functional.softplus(step, threshold=700) if softplus else step
    if dt_min is not None:
        step = torch.where(step < dt_min, dt_min, step)
    if dt_max is not None:
        step = torch.where(step > dt_max, dt_max, step)
    total = (step * a).cumsum(1)  # (B, L, H)
    b, c = (m.repeat_interleave(shared, 2) for m in (b, c))
    final = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]) if state is None else state
    first, rows = final, []
    for t in range(x.shape[1]):
        seen = slice(t + 1)
        apart = (total[:, t : t + 1] - total[:, seen]).exp() * step[:, seen]
        final = total[:, t].exp()[..., None, None] * first
        final = final + torch.einsum("bsh,bshn,bshp->bhpn", apart, b[:, seen], x[:, seen])
        rows.append(torch.einsum("bhpn,bhn->bhp", final, c[:, t]))
    y = torch.stack(rows, 1) if rows else torch.zeros_like(x)
    return (y if d is None else y + d[:, None] * x), final


SOURCES = {"ssd_scan": Source(ssd_scan)}
