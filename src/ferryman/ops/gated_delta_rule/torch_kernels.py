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
    # what was cut of one sequence is contiguous, with another stride
    return y.to(v.dtype).contiguous().view(v.shape), state.contiguous()


def gated_delta_rule_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    """Chunk after chunk for the states and the corrections u = v - S^T k; back for the state's gradient and that of u,
    by the same triangular system, transposed; then all chunks at once.

    The gradient of an exponent is a sum over pairs of tokens about it: of cumulative sums, without differences.
    """
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    own = (q, k, v, g, beta, initial_state)
    state = torch.zeros(batch, heads, width, dim, dtype=torch.float32, device=v.device)
    late = state if grad_final_state is None else grad_final_state.float()
    state = state if initial_state is None else initial_state.float()
    if v.numel() == 0 or width == 0:
        grads = [
            torch.zeros(0 if t is None else t.shape, dtype=(v if t is None else t).dtype, device=v.device) for t in own
        ]
        if initial_state is not None:
            grads[5] = late.to(initial_state.dtype, copy=True).contiguous()
        return tuple(grads)
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    whole = [_chunks(x, count, chunk) for x in (q, k)]  # (chunks, B, G, Q, K)
    roots = [torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if qk_l2norm else None for x in whole]
    whole = [x if root is None else x * root for x, root in zip(whole, roots, strict=True)]
    repeated = heads // shared
    factor = width**-0.5 if scale is None else scale
    queries, keys = (x if repeated == 1 else x.repeat_interleave(repeated, 2) for x in whole)
    queries = queries * factor
    values, rates, given = (
        _chunks(v, count, chunk),
        _chunks(beta, count, chunk)[..., None],
        _chunks(grad_y, count, chunk),
    )
    total = torch.zeros_like(rates) if g is None else _chunks(g, count, chunk).cumsum(-1)[..., None]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    weight = torch.exp((total - total.mT).masked_fill_(later, -math.inf))
    met = (keys @ keys.mT) * weight
    seen = (queries @ keys.mT) * weight
    since, until = torch.exp(total), torch.exp(total[..., -1:, :] - total)
    whole_decay = since[..., -1:, :]
    states, wanted = (torch.empty(count, *state.shape, dtype=torch.float32, device=v.device) for _ in range(2))
    wrong, moved = torch.empty_like(values), torch.empty_like(values)
    for i in range(count):
        states[i] = state
        u = values[i] - since[i] * (keys[i] @ state)
        wrong[i] = torch.linalg.solve_triangular(met[i] * rates[i].mT, u, upper=False, unitriangular=True)
        state = whole_decay[i] * state + (until[i] * keys[i]).mT @ (rates[i] * wrong[i])
    for i in reversed(range(count)):
        wanted[i] = late
        u = seen[i].mT @ given[i] + (until[i] * keys[i]) @ late
        moved[i] = torch.linalg.solve_triangular(met[i].mT * rates[i].mT, u, upper=True, unitriangular=True)
        late = (
            whole_decay[i] * late
            + (since[i] * queries[i]).mT @ given[i]
            - (since[i] * keys[i]).mT @ (rates[i] * moved[i])
        )
    d, x = rates * wrong, rates * moved
    of_beta = (wrong * moved).sum(-1)
    of_met, of_seen = -(x @ d.mT), given @ d.mT
    pairs = (met * of_met).masked_fill_(~later.mT, 0.0) + (seen * of_seen).masked_fill_(~later.mT, 0.0)
    of_met, of_seen = (of_met * weight).masked_fill_(~later.mT, 0.0), of_seen * weight
    early_q, early_k, brought = since * (given @ states.mT), since * (x @ states.mT), until * (d @ wanted.mT)
    of_q = of_seen @ keys + early_q
    of_k = (of_met + of_met.mT) @ keys + of_seen.mT @ queries - early_k + brought
    # of an exponent: all pairs with the earlier token before it, and the later one not
    before = functional.pad(pairs.cumsum(-1)[..., :-1], (1, 0)).masked_fill_(later, 0.0).sum(-2)
    after = (early_q * queries).sum(-1) - (early_k * keys).sum(-1)
    sent = functional.pad((brought * keys).sum(-1).cumsum(-1)[..., :-1], (1, 0))
    of_g = (
        before
        + after.flip(-1).cumsum(-1).flip(-1)
        + sent
        + whole_decay[..., 0] * (states * wanted).sum((-2, -1))[..., None]
    )
    to_q_and_k = []
    for x, one, root, times in zip((of_q, of_k), whole, roots, (factor, 1.0), strict=True):
        slope = times * x.unflatten(2, (shared, repeated)).sum(3)
        to_q_and_k.append(slope if root is None else root * (slope - one * (one * slope).sum(-1, keepdim=True)))
    slopes = (*to_q_and_k, rates * moved, None if g is None else of_g[..., None], of_beta[..., None])
    grads = []
    for t, slope in zip(own, slopes, strict=False):
        if t is None or slope is None:
            grads.append(v.new_empty(0))
            continue
        slope = slope.movedim(3, 2).movedim(0, 1).flatten(1, 2)[:, :length].reshape(t.shape)
        grads.append(slope.to(t.dtype).contiguous())
    kept = v.new_empty(0) if initial_state is None else late.to(initial_state.dtype, copy=True).contiguous()
    return (*grads, kept)
