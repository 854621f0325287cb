"""Error terms of attention, derived in docs/parity.md. Arguments and outputs are float64.

A score is off by e = (6 sqrt(D) + 6)(|q| @ |k|) scale units of u; its probability by that, by exp's argument
(3 |s - lse|), and by the row's mean of both through the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.attention.scores import kept, scores, sink_share, with_sink

Terms = dict[str, Tensor]
_ADDED: list[Any] = [None, None, None, 0.0, None]  # what a call of before has: sinks, key range, chunk, dropout, seed


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _row_terms(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, their relative error in units of u, the scores' absolute error in units of u)."""
    heads, depth = q.shape[1], q.shape[-1]
    factor = abs(depth**-0.5 if scale is None else scale)
    s, _ = scores(q, k, causal, scale, window, softcap, mask, key_range, chunk)
    error = (6 * math.sqrt(depth) + 6) * (q.abs() @ _repeat(k, heads).abs().transpose(-1, -2)) * factor
    if softcap:
        error = torch.where(error.isinf(), 0.0, error)  # tanh of an infinite score is exactly 1
        error = error + 6 * softcap  # tanh by exp: absolute error of a few u, times the cap
    if mask is not None and mask.dtype != torch.bool:
        error = error + mask.abs().nan_to_num(posinf=0.0) + s.abs().nan_to_num(posinf=0.0)
    lse = with_sink(torch.logsumexp(s, -1), sinks).unsqueeze(-1)
    p = torch.where(torch.isneginf(lse), 0.0, torch.exp(s - lse))
    distance = torch.where(p > 0, error + 3 * (s - lse).abs(), 0.0)
    relative = distance + (p * distance).sum(-1, keepdim=True) + 6 * math.sqrt(s.shape[-1]) + 12
    if sinks is not None:
        # a column more: its own exp, and where a kernel scales at the end, the sum without it and its logarithm
        column = _sink_error(lse, sinks)
        relative = relative + 2 * column + 8 + 3 * torch.nan_to_num(_alone(s, lse).abs(), posinf=0.0, neginf=0.0)
        relative = torch.where(p > 0, relative, 0.0)
    return p, relative, torch.where(p > 0, error, 0.0)


def _alone(s: Tensor, lse: Tensor) -> Tensor:
    """The log-sum-exp without the sink's column."""
    return torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else torch.zeros_like(lse)


def _sink_error(lse: Tensor, sinks: Tensor) -> Tensor:
    """What the sink's probability is off by, relative to it, in units of u, times it. lse: (B, H, Sq, 1)."""
    sink = sinks[:, None, None].expand(lse.shape)
    away = torch.nan_to_num(sink - lse, nan=0.0, posinf=0.0, neginf=0.0)
    size = torch.nan_to_num(sink.abs(), posinf=0.0) + torch.nan_to_num(lse.abs(), posinf=0.0)
    return torch.exp(away.clamp(max=0.0)) * (3 * away.abs() + 3 * size + 4)


def attention(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    q, k, v, *options = args
    if q.numel() == 0 or k.shape[2] == 0:
        return {"accumulate": torch.zeros_like(outputs[0])}, {"accumulate": torch.zeros_like(outputs[1])}
    options += _ADDED[len(options) - 5 :]
    *options, dropout_p, seed = options
    p, relative, error = _row_terms(q, k, *options)
    sinks = options[5]
    values = _repeat(v, q.shape[1]).abs()
    keeps, least = kept(q, k, dropout_p, seed), 1.0 / (1.0 - dropout_p)
    shares, product = p, 0.0
    if keeps is not None:  # a rounded factor, and the product with it
        shares, product = p * keeps, 4.0
    weighted = shares @ values
    # exp of a far smaller score flushes to zero, as does its product in the storage dtype.
    tiny = values.amax(-2, keepdim=True) * 2.0**-120 * least
    lse_error = (p * (error + relative)).sum(-1) + 3 * torch.nan_to_num(outputs[1].abs(), posinf=0.0)
    stored: Terms = {}
    if sinks is not None:
        lse_error = lse_error + _sink_error(outputs[1].unsqueeze(-1), sinks).squeeze(-1)
        stored = {"o": outputs[0].abs(), "o_flush": torch.ones_like(weighted)}
    return (
        stored
        | {
            "accumulate": (shares * relative) @ values + (6 * math.sqrt(k.shape[2]) + 4 + product) * weighted,
            "p": weighted,
            "p_flush": least * values.sum(-2, keepdim=True).expand_as(weighted),
            "absolute": tiny.expand_as(weighted),
        },
        # log(sum(exp(s - max))) is NaN where logsumexp gives +Inf: float64 itself has both, and `out` is NaN either way
        {"accumulate": lse_error, "ambiguous": outputs[1].isnan() | outputs[1].isposinf()},
    )


def attention_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad_out, grad_lse, q, k, v, out, lse, causal, scale, window, softcap, mask, *more = args
    more += [*_ADDED[:3], False, *_ADDED[3:]][len(more) :]
    sinks, key_range, chunk, _, dropout_p, seed = more
    delta = (grad_out.abs() * out.abs()).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta + grad_lse.abs().unsqueeze(-1)
    if q.numel() == 0 or k.shape[2] == 0:  # without a key, the sink's gradient is the sum of the log-sum-exp's
        none = [{"accumulate": torch.zeros_like(t)} for t in outputs]
        if q.numel():
            idle = torch.zeros_like(lse)
            none[3] = _sinks_terms(lse, sinks, delta.squeeze(-1), idle, v.shape[3], outputs[3])
        return tuple(none)
    batch, heads, sq, depth = q.shape
    group, sk = k.shape[1], k.shape[2]
    factor = abs(depth**-0.5 if scale is None else scale)
    p, relative, _ = _row_terms(q, k, causal, scale, window, softcap, mask, sinks, key_range, chunk)
    relative = relative + torch.nan_to_num(lse.abs(), posinf=0.0).unsqueeze(-1)
    relative = torch.where(p > 0, relative, 0.0)  # a row of infinite scores has an infinite sum, and zeros beside NaN
    g, keys, values = grad_out.abs(), _repeat(k, heads).abs(), _repeat(v, heads).abs()

    def per_key_head(x: Tensor) -> Tensor:
        return x.reshape(batch, group, heads // group, *x.shape[2:]).sum(2)

    pull = g @ values.transpose(-1, -2)  # |dP|
    keeps, least = kept(q, k, dropout_p, seed), 1.0 / (1.0 - dropout_p)
    shares, product = p, 0.0
    if keeps is not None:  # a rounded factor, and the product with it
        pull, shares, product = pull * keeps, p * keeps, 4.0
    ds = p * (pull + delta)
    dots = 6 * math.sqrt(max(depth, v.shape[3])) + 8 + product
    # In float32 delta is the sum of P dP, whose terms may cancel in `out`.
    summed = (p * pull * (relative + dots + 6 * math.sqrt(sk))).sum(-1, keepdim=True)
    ds_error = ds * (relative + dots) + p * summed
    many = 6 * math.sqrt(sq * (heads // group)) + 4
    stored = p * delta  # `out` reaches the backward rounded to the storage dtype

    def along(x: Tensor) -> tuple[Tensor, Tensor]:
        return factor * (x @ keys), factor * per_key_head(x.transpose(-1, -2) @ q.abs())

    error_q, error_k = along(ds_error + ds * (6 * math.sqrt(sk) + many))
    ds_q, ds_k = along(ds)
    stored_q, stored_k = along(stored)
    p_v = per_key_head(shares.transpose(-1, -2) @ g)
    error_v = per_key_head((shares * (relative + many + product)).transpose(-1, -2) @ g)
    flush_v = least * per_key_head(g.sum(-2, keepdim=True).expand(-1, -1, sk, -1))
    flush_q, flush_k = along(torch.full_like(ds, least))
    # a probability below the least normal number may be 0
    lost_q, lost_k = along(pull + delta)
    flush, lost = 2.0**-120, 2.0**-126
    # split-k: the gradients of a group's query heads are rounded to storage before they are summed
    grouped = float(heads > group)
    return (
        {
            "accumulate": error_q,
            "ds": ds_q,
            "ds_flush": flush_q,
            "p_in_ds": ds_q,
            "p_in_ds_flush": lost_q,
            "storage": stored_q,
            "absolute": flush * flush_q + lost * lost_q,
        },
        {
            "accumulate": error_k,
            "split-k": grouped * ds_k,
            "ds": ds_k,
            "ds_flush": flush_k,
            "p_in_ds": ds_k,
            "p_in_ds_flush": lost_k,
            "storage": stored_k,
            "absolute": flush * flush_k + lost * lost_k,
        },
        {"accumulate": error_v, "split-k": grouped * p_v, "p": p_v, "p_flush": flush_v, "absolute": flush * flush_v},
        _sinks_terms(lse, sinks, delta.squeeze(-1), summed.squeeze(-1), v.shape[3], outputs[3]),
        _mask_terms(mask, ds_error, ds, stored, pull + delta, outputs[4]),
    )


def _sinks_terms(lse: Tensor, sinks: Tensor | None, delta: Tensor, summed: Tensor, depth: int, output: Tensor) -> Terms:
    """The sum over rows of the sink's probability times delta. ``summed``: the error of a delta that is a sum of P dP,
    instead of the saved output's, which is within "storage" of it."""
    if sinks is None or output.numel() == 0:
        return {"accumulate": torch.zeros_like(output)}
    share = sink_share(lse, sinks)
    each = share * delta
    off = _sink_error(lse.unsqueeze(-1), sinks).squeeze(-1) * delta
    rows = lse.shape[0] * lse.shape[2]
    error = off + each * (6 * math.sqrt(depth) + 6 * math.sqrt(rows) + 12) + share * summed
    return {
        "accumulate": error.sum((0, 2)),
        "storage": each.sum((0, 2)),
        "absolute": (2.0**-120) * delta.sum((0, 2)),
    }


def _mask_terms(mask: Tensor | None, error: Tensor, ds: Tensor, stored: Tensor, lost: Tensor, output: Tensor) -> Terms:
    """The sum of dS over what the mask's dimensions are broadcast to. lost: what multiplies a probability in dS."""
    if mask is None or output.numel() == 0:
        return {"accumulate": torch.zeros_like(output)}
    many = 6 * math.sqrt(ds.numel() / output.numel()) + 4
    return {
        "accumulate": (error + ds * many).sum_to_size(mask.shape),
        "ds": ds.sum_to_size(mask.shape),
        "ds_flush": torch.ones_like(ds).sum_to_size(mask.shape),
        "p_in_ds": ds.sum_to_size(mask.shape),
        "p_in_ds_flush": lost.sum_to_size(mask.shape),
        "storage": stored.sum_to_size(mask.shape),
        "absolute": (2.0**-120 * torch.ones_like(ds) + 2.0**-126 * lost).sum_to_size(mask.shape),
    }
