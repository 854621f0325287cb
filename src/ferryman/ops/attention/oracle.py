"""What attention computes, forward and backward, and with the roundings that a kernel may make."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.ops.attention.arguments import NO_DROPOUT, by_rows, like_gradients, stored_by_rows
from ferryman.ops.attention.scores import grouped, kept, probabilities, scores, sink_share, with_sink
from ferryman.ops.primitive import wide


def has_bias_gradient(mask: Tensor | None, need_mask: bool) -> bool:
    """Whether a backward gives the mask's gradient: it was asked for, and the mask is of floats."""
    return need_mask and mask is not None and mask.dtype != torch.bool


def _logsumexp(s: Tensor) -> Tensor:
    """Of a row that sees nothing -inf, as PyTorch's, whose gradient there is NaN; here it is 0."""
    blind = torch.isneginf(s).all(-1)
    return torch.logsumexp(s.masked_fill(blind.unsqueeze(-1), 0.0), -1).masked_fill(blind, -math.inf)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    roundings: frozenset[str] = frozenset(),
) -> tuple[Tensor, Tensor]:
    s, _ = scores(q, k, causal, scale, window, softcap, mask, key_range, chunk)
    alone = _logsumexp(s) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    lse = alone if "o" in roundings else with_sink(alone, sinks)
    values, factor = wide(grouped(v, q.shape[1])), kept(q, k, dropout_p, dropout_seed)
    if "p" in roundings:
        # Kernels round exp(s - running maximum) and divide by the unrounded sum at the end.
        m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
        p = torch.where(torch.isneginf(m), 0.0, torch.exp(s - m))
        p = wide(p.to(q.dtype))
        weighted = (p if factor is None else p * factor) @ values
        out = weighted * torch.exp(m.squeeze(-1) - lse).nan_to_num(nan=0.0).unsqueeze(-1)
    else:
        p = probabilities(s, lse)
        out = (p if factor is None else p * factor) @ values
    if "o" in roundings and sinks is not None:
        lse = with_sink(alone, sinks)
        out = wide(out.to(q.dtype)) * (1 - sink_share(lse, sinks)).unsqueeze(-1)
    return by_rows(out.to(q.dtype)), lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
    need_mask: bool = False,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    roundings: frozenset[str] = frozenset(),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, _, head_dim = q.shape
    group = k.shape[1]
    s, t = scores(q, k, causal, scale, window, softcap, mask, key_range, chunk)
    p = probabilities(s, lse.to(s.dtype))
    g = wide(grad_out)

    def rounded(x: Tensor, name: str) -> Tensor:
        return wide(x.to(q.dtype)) if name in roundings else x

    def per_key_head(x: Tensor) -> Tensor:
        return x.reshape(batch, group, heads // group, *x.shape[2:]).sum(2)

    factor, dp = kept(q, k, dropout_p, dropout_seed), g @ wide(grouped(v, heads)).transpose(-1, -2)
    shares = rounded(p, "p")
    if factor is not None:
        dp, shares = dp * factor, shares * factor
    grad_v = per_key_head(shares.transpose(-1, -2) @ g)
    delta = (g * wide(out)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    ds = rounded(p, "p_in_ds") * (dp - delta.unsqueeze(-1))
    grad_mask = q.new_empty(0)
    if mask is not None and has_bias_gradient(mask, need_mask):
        grad_mask = ds.sum_to_size(mask.shape).to(mask.dtype)
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        grad_sinks = -(sink_share(lse.to(s.dtype), sinks) * delta).sum((0, 2)).to(sinks.dtype)
    if softcap:
        ds = ds * (1 - t * t)
    ds = rounded(ds, "ds") * (head_dim**-0.5 if scale is None else scale)
    grad_q = ds @ wide(grouped(k, heads))
    grad_k = per_key_head(ds.transpose(-1, -2) @ wide(q))
    ordered = stored_by_rows(q, k, v)
    return (
        like_gradients(grad_q.to(q.dtype), ordered),
        like_gradients(grad_k.to(k.dtype), ordered),
        like_gradients(grad_v.to(v.dtype), ordered),
        grad_sinks,
        grad_mask,
    )
