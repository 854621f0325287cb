"""`gated_delta_rule` in chunks through PyTorch: one triangular system and five products for each chunk.

Within a chunk the corrections d solve (I + T) d = beta (v - exp(c) k S). T[i, j] = beta_i exp(c_i - c_j) k_i k_j stands
below the diagonal, c are the sums of g. Substitution gives them with the errors of the recurrence; an inverse would
not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target

CHUNK = 64


def _chunks(x: Tensor, count: int, chunk: int) -> Tensor:
    """(B, L, H, ...) in float32 as (count, B, H, chunk, ...), zeros behind."""
    gap = count * chunk - x.shape[1]
    whole = functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, gap))
    return whole.unflatten(1, (count, chunk)).movedim(1, 0).movedim(2, 3).contiguous()


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    if initial_state is None:
        state = torch.zeros(batch, heads, width, dim, dtype=torch.float32, device=v.device)
    else:
        state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if v.numel() == 0 or width == 0:
        return torch.zeros(v.shape, dtype=v.dtype, device=v.device), state
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    queries, keys = _chunks(q, count, chunk), _chunks(k, count, chunk)
    if qk_l2norm:
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * (width**-0.5 if scale is None else scale)
    if heads != shared:
        queries, keys = (x.repeat_interleave(heads // shared, 2) for x in (queries, keys))
    values, rates = _chunks(v, count, chunk), _chunks(beta, count, chunk)[..., None]
    # a token past the end has beta and g 0: it leaves the state as it is
    total = torch.zeros_like(rates) if g is None else _chunks(g, count, chunk).cumsum(-1)[..., None]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    weight = torch.exp((total - total.mT).masked_fill_(later, -math.inf))
    system = rates * (keys @ keys.mT) * weight
    seen = (queries @ keys.mT) * weight
    since, until = torch.exp(total), torch.exp(total[..., -1:, :] - total)
    y = torch.empty_like(values)
    for i in range(count):
        wanted = rates[i] * (values[i] - since[i] * (keys[i] @ state))
        d = torch.linalg.solve_triangular(system[i], wanted, upper=False, unitriangular=True)
        y[i] = since[i] * (queries[i] @ state) + seen[i] @ d
        state = since[i][..., -1:, :] * state + (until[i] * keys[i]).mT @ d
    y = y.movedim(3, 2).movedim(0, 1).flatten(1, 2)[:, :length]
    return y.to(v.dtype).contiguous(), state.contiguous()
