"""Attention's scores: which keys a query sees, what they are, what a sink takes of them, and which dropout leaves. The
meaning and its error terms are both made of these."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.ops.primitive import wide


def visible(sq: int, sk: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """(Sq, Sk), True where key j may be seen by query i; None when every key may. The last query sees the last key."""
    if not causal and window is None:
        return None
    i = torch.arange(sq, device=device).unsqueeze(1) + (sk - sq)
    j = torch.arange(sk, device=device).unsqueeze(0)
    seen = j <= i if causal else torch.ones(sq, sk, dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & (j > i - window)
        if not causal:
            seen = seen & (j < i + window)
    return seen


def ranges(key_range: Tensor, sk: int) -> tuple[Tensor, Tensor]:
    """(first, end), (B, 1, 1, 1) each, of a key range clamped to 0..Sk; empty where the end is not beyond the first."""
    clamped = key_range.long().clamp(0, sk)
    return clamped[:, 0, None, None, None], clamped[:, 1, None, None, None]


def visible_in(
    q: Tensor, k: Tensor, causal: bool, window: int | None, key_range: Tensor | None, chunk: int | None
) -> Tensor | None:
    """`visible` with a key range and chunks: (B or 1, 1, Sq, Sk), or (Sq, Sk); None when every key may be seen."""
    sq, sk = q.shape[2], k.shape[2]
    if key_range is None and chunk is None:
        return visible(sq, sk, causal, window, q.device)
    first: Tensor | int = 0
    end: Tensor | int = sk
    if key_range is not None:
        first, end = ranges(key_range, sk)
    position = torch.arange(sq, device=q.device).unsqueeze(1) + (end - sq)
    j = torch.arange(sk, device=q.device).unsqueeze(0)
    seen = (j >= first) & (j < end) & torch.ones_like(position, dtype=torch.bool)
    if causal:
        seen = seen & (j <= position)
    if window is not None:
        seen = seen & (j > position - window)
        if not causal:
            seen = seen & (j < position + window)
    if chunk is not None:
        own = torch.div(position - first, chunk, rounding_mode="floor")
        seen = seen & (torch.div(j - first, chunk, rounding_mode="floor") == own)
    return seen


def grouped(x: Tensor, heads: int) -> Tensor:
    """(B, Hk, S, D) -> (B, H, S, D), each key/value head serving heads/Hk query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(scores with -inf where hidden, tanh of the capped scores or an empty tensor), in the wide dtype."""
    s = (wide(q) @ wide(grouped(k, q.shape[1])).transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    t = s.new_empty(0)
    if softcap:
        t = torch.tanh(s / softcap)
        s = softcap * t
    seen = visible_in(q, k, causal, window, key_range, chunk)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + wide(mask)
    return s, t


def probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), and zeros for rows that see nothing."""
    return torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, torch.exp(s - lse.unsqueeze(-1)))


def with_sink(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sum-exp with a column of each head's own logit."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1).expand(lse.shape))


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """(B, H, Sq), the probability of the sink's column: exp(sink - lse), 0 where both are -inf and 1 where both inf."""
    sink = sinks.to(lse.dtype).unsqueeze(-1).expand(lse.shape)
    share = torch.exp(torch.where(sink == lse, 0.0, sink - lse))
    return torch.where(torch.isneginf(lse), 0.0, share)


def kept(q: Tensor, k: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """(B, H, Sq, Sk), in q's wide dtype: 1 / (1 - p) where a query keeps a key's probability, 0 where dropout takes it;
    None without dropout."""
    if not dropout_p or seed is None:
        return None
    heads, sq, sk = q.shape[1], q.shape[2], k.shape[2]
    key, query, head = (torch.arange(n, device=q.device) for n in (sk, sq, heads))
    low, high = (part.view(-1, 1, 1, 1) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    counter = (key // 4, query.view(-1, 1), head.view(-1, 1, 1), torch.zeros((), dtype=torch.int64, device=q.device))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (low, high))))
    word = words.gather(0, (key % 4).expand(words.shape[1:]).unsqueeze(0)).squeeze(0)
    return (word >= int(dropout_p * 2**32)).to(wide(q.new_empty(0)).dtype) / (1.0 - dropout_p)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al., SC 2011): four 32-bit words of a counter of four and a key of two, in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of a product of 32-bit words, by halves of the first, so that nothing overflows int64."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
