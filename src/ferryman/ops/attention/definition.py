"""Scaled dot-product attention: meaning. Error terms stand in bounds.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.attention import bounds
from ferryman.ops.attention.scores import grouped, kept, probabilities, scores, sink_share, with_sink
from ferryman.ops.primitive import STORAGE_DTYPES, Cost, Gradient, Limits, Rounding, first_of, primitive, public, wide

MAX_HEAD_DIM = 256
ROUNDED_P = Rounding("p", "the probabilities are rounded to the storage dtype before P @ V (and P^T @ dO)")
ROUNDED_O = Rounding("o", "the output is rounded to the storage dtype before the sink's share is taken from it")
_NO_DROPOUT = 0.0  # one object, by which dispatch knows a call that leaves it out
_DTYPES = {
    "mask": (torch.bool, *STORAGE_DTYPES),
    "sinks": STORAGE_DTYPES,
    "key_range": (torch.int32,),
    "dropout_seed": (torch.int64,),
}
ROUNDED_DS = Rounding("ds", "the scores' gradient is rounded to the storage dtype before dS @ K and dS^T @ Q")


def has_bias_gradient(mask: Tensor | None, need_mask: bool) -> bool:
    """Whether a backward gives the mask's gradient: it was asked for, and the mask is of floats."""
    return need_mask and mask is not None and mask.dtype != torch.bool


def _model_layout(out: Tensor) -> Tensor:
    """(B, H, S, D) laid out as (B, S, H, D), which is how a model reads it back."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(
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
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    roundings: frozenset[str] = frozenset(),
) -> tuple[Tensor, Tensor]:
    s, _ = scores(q, k, causal, scale, window, softcap, mask, key_range, chunk)
    alone = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
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
    return _model_layout(out.to(q.dtype)), lse


def _backward(
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
    dropout_p: float = _NO_DROPOUT,
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
    ds = p * (dp - delta.unsqueeze(-1))
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
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, grad_mask


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    **others: Tensor | None,
) -> None:
    given: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    tensors = {"mask": mask, "sinks": sinks, "key_range": key_range, "dropout_seed": dropout_seed}
    checks.one_device(op, **given, **tensors, **others)
    checks.floating(op, **given)
    checks.same_dtype(op, **given)
    for name, x in given.items():
        if x is not None and x.dim() != 4:
            raise ArgumentError(op, f"{name}.shape", tuple(x.shape), "(batch, heads, seq, head_dim)")
    batch, heads, sq, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ArgumentError(op, "q.shape[-1]", head_dim, f"a head_dim from 1 to {MAX_HEAD_DIM}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ArgumentError(op, "k.shape", tuple(k.shape), f"({batch}, heads, seq, {head_dim})")
    checks.shaped(op, "v", v, *k.shape[:3], v.shape[3])
    if not 1 <= v.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(op, "v.shape[-1]", v.shape[3], f"a value width from 1 to {MAX_HEAD_DIM}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ArgumentError(op, "k.shape[1]", k.shape[1], f"a divisor of q's {heads} heads")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ArgumentError(op, "scale", scale, "a finite number or None")
    if window is not None and window < 1:
        raise ArgumentError(op, "window", window, "None or an integer >= 1 (keys seen, self included)")
    checks.non_negative(op, softcap=softcap)
    checks.floating(op, sinks=sinks)
    checks.shaped(op, "sinks", sinks, heads)
    if key_range is not None and key_range.dtype != torch.int32:
        raise ArgumentError(op, "key_range.dtype", key_range.dtype, "torch.int32")
    checks.shaped(op, "key_range", key_range, batch, 2)
    if chunk is not None and chunk < 1:
        raise ArgumentError(op, "chunk", chunk, "None or an integer >= 1 (positions of a chunk)")
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(op, "dropout_p", dropout_p, "at least 0 and less than 1")
    if dropout_p and dropout_seed is None:
        raise ArgumentError(op, "dropout_seed", None, f"an int64 tensor ({batch},), with dropout_p={dropout_p}")
    if dropout_seed is not None and dropout_seed.dtype != torch.int64:
        raise ArgumentError(op, "dropout_seed.dtype", dropout_seed.dtype, "torch.int64")
    checks.shaped(op, "dropout_seed", dropout_seed, batch)
    if mask is not None:
        if mask.dtype != torch.bool:
            checks.floating(op, mask=mask)
        full = (batch, heads, sq, k.shape[2])
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(reversed(mask.shape), reversed(full), strict=False)):
            raise ArgumentError(op, "mask.shape", tuple(mask.shape), f"broadcastable to {full}")


def _meta(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, seq, _ = q.shape
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, seq, heads, v.shape[3])).transpose(1, 2), q.new_empty((batch, heads, seq), dtype=lse)


def _work(q: Tensor, k: Tensor, causal: bool, window: int | None, chunk: int | None) -> float:
    """Score entries that must be computed. What a key range hides is known to the device only, and counts."""
    batch, heads, sq, _ = q.shape
    sk = k.shape[2]
    per_query = float(sk)
    if causal:
        per_query = max(sk - (sq - 1) / 2, 0.0) if sq <= sk else (sk + 1) * sk / 2 / max(sq, 1)
    if window is not None:
        per_query = min(per_query, float(window if causal else 2 * window - 1))
    if chunk is not None:
        per_query = min(per_query, (chunk + 1) / 2 if causal and sq > 1 else float(chunk))
    return batch * heads * sq * per_query


def _cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    chunk: int | None,
    products: tuple[int, int],
    tensors: int,
) -> Cost:
    """``products``: of the keys' width, of the values'. ``tensors``: how often (q or out, k or v) are moved, by two."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    moved = tensors // 2 * (q.numel() + k.numel() + v.numel() + rows * v.shape[3]) * q.element_size()
    widths = products[0] * q.shape[-1] + products[1] * v.shape[-1]
    return Cost(2.0 * widths * _work(q, k, causal, window, chunk), float(moved))


def _future(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    *dropout: Any,
) -> tuple[Tensor, ...] | None:
    """Replace the later half of the keys and values, which the earlier queries of causal attention do not see."""
    sq, sk = q.shape[2], k.shape[2]
    first = sk // 2  # the first key that is replaced
    blind = torch.arange(sq, device=q.device) + (sk - sq) < first
    if not causal or sk < 2 or not bool(blind.any()) or q.numel() == 0 or key_range is not None:
        return None  # a range ends earlier, and its queries stand earlier then: they see fewer still
    for x in (k, v):
        x[:, :, first:] = 1 - 2 * x[:, :, first:]  # finite: NaN times a probability of 0 is NaN by right
    kept = blind.expand(q.shape[:3])
    return kept.unsqueeze(-1).expand(*q.shape[:3], v.shape[3]), kept


def _with_roundings(roundings: frozenset[str]) -> Callable[..., Any]:
    return functools.partial(_forward, roundings=roundings)


@primitive(
    name="attention",
    outputs=("out", "lse"),
    check=lambda q, k, v, causal, *options: _check("attention", q, k, v, *options),
    meta=lambda q, k, v, *options: _meta(q, v),
    cost=lambda q, k, v, causal, scale, window, softcap, mask, *options: _cost(
        q, k, v, causal, window, options[2] if len(options) > 2 else None, (1, 1), 2
    ),
    limits=Limits(
        bound=bounds.attention,
        roundings=(ROUNDED_P, ROUNDED_O),
        rounded=_with_roundings,
        batch={"q": 3, "k": 3, "v": 3, "mask": 3, "key_range": 1, "dropout_seed": 0, "out": 3, "lse": 2},
        unseen=_future,
        reduction=lambda q, k, *rest: max(k.shape[2], q.shape[3]),
    ),
    dtypes=_DTYPES,
    gradient=Gradient(backward="attention_backward", grads=("q", "k", "v", "sinks", "mask")),
    autocast=("low", "aten::scaled_dot_product_attention"),
    added=("sinks", "key_range", "chunk", "dropout_p", "dropout_seed"),
)
def attention_with_lse(
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
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` with every argument positional, returning (out, lse)."""
    return _forward(q, k, v, causal, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed)


_attention_alone = first_of(attention_with_lse)


@public(attention_with_lse)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> Any:
    """Scaled dot-product attention.

    q: (batch, heads, Sq, head_dim). k: (batch, kv_heads, Sk, head_dim), v: (batch, kv_heads, Sk, value_dim); kv_heads
    divides heads (grouped-query). float32, float16 or bfloat16, one dtype; any strides; head_dim and value_dim 1 to
    256, alike or not. scale: default head_dim**-0.5.
    causal is aligned bottom-right: query i sees keys j <= i + Sk - Sq, so decoding with Sq = 1 sees every key. window:
    how many keys a query sees, itself included (both sides when not causal). softcap > 0: scores become
    softcap * tanh(scores / softcap). mask: broadcastable to (batch, heads, Sq, Sk); bool is True = attend, float is
    added after the softcap (a position bias), and has a gradient.
    sinks: (heads,), any of the float dtypes: one logit more in each row's softmax, neither scaled nor capped, that has
    no value; -inf is none, +inf takes all (out 0). The log-sum-exp counts it; it has a gradient.
    key_range: int32 (batch, 2), the first key of each sequence and the end of its keys, on the device: keys outside are
    not seen, and the diagonal, the window and the chunks are those of a sequence that ends there (query i stands at
    position i + end - Sq). Both are clamped to 0..Sk; where the end is not beyond the first nothing is seen.
    chunk: a query sees keys of its own chunk of so many positions only, counted from the first key (Llama 4).
    dropout_p, below 1: so often a probability counts as 0 where values are weighted, and the others 1 / (1 - dropout_p)
    times; the log-sum-exp counts all. dropout_seed: int64 (batch,), on the device, one for each sequence. A sequence's
    query i of head h drops key j where word j % 4 of Philox-4x32-10, with the counter (j // 4, i, h, 0) and the two
    halves of its seed as key, low one first, is less than floor(dropout_p * 2^32): the same on every device, in every
    implementation and in the backward, and alone as in any batch. Draw seeds where randomness is to be had:
    torch.randint(2**63 - 1, (batch,), device=q.device). Sinks are not dropped.
    Returns out (batch, heads, Sq, value_dim) in q's dtype, as a view of (batch, Sq, heads, value_dim) storage; with
    return_lse also the natural-log float32 (batch, heads, Sq) log-sum-exp. A row that sees no key gives 0 and -inf, or
    its sink.
    float32 accumulation; an implementation may round P to the storage dtype. Raises ArgumentError.
    Source: Vaswani et al., arXiv:1706.03762; softcap: Gemma 2, arXiv:2408.00118; sinks: gpt-oss, arXiv:2508.10925;
    Philox: Salmon et al., SC 2011.
    """
    form = attention_with_lse if return_lse else _attention_alone
    return form(q, k, v, causal, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed)


def _check_backward(
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
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> None:
    op = "attention_backward"
    saved = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
    _check(op, q, k, v, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed, **saved)
    for name, x in (("grad_out", grad_out), ("out", out)):
        checks.shaped(op, name, x, *q.shape[:3], v.shape[3])
    for name, rows in (("grad_lse", grad_lse), ("lse", lse)):
        checks.shaped(op, name, rows, *q.shape[:3])


def _meta_backward(
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
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
        q.new_empty(0) if mask is None or not has_bias_gradient(mask, need_mask) else mask.new_empty(mask.shape),
    )


@primitive(
    outputs=("grad_q", "grad_k", "grad_v", "grad_sinks", "grad_mask"),
    check=_check_backward,
    meta=_meta_backward,
    cost=lambda grad_out, grad_lse, q, k, v, out, lse, causal, scale, window, softcap, mask, *options: _cost(
        q, k, v, causal, window, options[2] if len(options) > 2 else None, (3, 2), 4
    ),
    limits=Limits(
        bound=bounds.attention_backward,
        roundings=(ROUNDED_P, ROUNDED_DS),
        batch={
            "grad_out": 3,
            "grad_lse": 2,
            "q": 3,
            "k": 3,
            "v": 3,
            "out": 3,
            "lse": 2,
            "mask": 3,
            "key_range": 1,
            "dropout_seed": 0,
            "grad_q": 3,
            "grad_k": 3,
            "grad_v": 3,
        },
        reduction=lambda grad_out, grad_lse, q, k, *rest: max(k.shape[2], q.shape[2] * (q.shape[1] // k.shape[1])),
        rounded=lambda roundings: functools.partial(_backward, roundings=roundings),
    ),
    dtypes=_DTYPES,
    added=("sinks", "key_range", "chunk", "need_mask", "dropout_p", "dropout_seed"),
)
def attention_backward(
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
    dropout_p: float = _NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention` for q, k, v, sinks and a float mask, from its saved output and log-sum-exp; the last two
    are empty without sinks, and without ``need_mask``. Source: arXiv:2307.08691."""
    return _backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        causal,
        scale,
        window,
        softcap,
        mask,
        sinks,
        key_range,
        chunk,
        need_mask,
        dropout_p,
        dropout_seed,
    )
