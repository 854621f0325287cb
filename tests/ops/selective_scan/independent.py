"""A selective scan as sums over pairs of tokens; no state is carried."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    step = dt if bias is None else dt + bias
    step = functional.softplus(step, threshold=700) if softplus else step
    total = (step[..., None] * a).cumsum(1)  # (B, L, D, N)
    final = x.new_zeros(x.shape[0], x.shape[2], b.shape[2]) if state is None else state
    first, rows = final, []
    for t in range(x.shape[1]):
        seen = slice(t + 1)
        apart = (total[:, t : t + 1] - total[:, seen]).exp()
        final = total[:, t].exp() * first + torch.einsum("bsdn,bsn,bsd->bdn", apart, b[:, seen], (step * x)[:, seen])
        rows.append(torch.einsum("bdn,bn->bd", final, c[:, t]))
    y = torch.stack(rows, 1) if rows else torch.zeros_like(x)
    y = y if d is None else y + d * x
    return (y if z is None else y * z * torch.sigmoid(z)), final


SOURCES = {"selective_scan": Source(selective_scan)}
