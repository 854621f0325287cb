"""Scaled dot-product attention: the ops. What they compute is in oracle.py, what they take in arguments.py, and their
error terms in bounds.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.attention import bounds, oracle
from ferryman.ops.attention.arguments import NO_DROPOUT, check, check_backward, stored_by_rows
from ferryman.ops.primitive import STORAGE_DTYPES, Cost, Gradient, Limits, Rounding, first_of, primitive, public

ROUNDED_P = Rounding("p", "the probabilities are rounded to the storage dtype before P @ V (and P^T @ dO)")
ROUNDED_O = Rounding("o", "the output is rounded to the storage dtype before the sink's share is taken from it")
ROUNDED_DS = Rounding("ds", "the scores' gradient is rounded to the storage dtype before dS @ K and dS^T @ Q")
ROUNDED_P_IN_DS = Rounding("p_in_ds", "the probabilities are rounded to the storage dtype before dS is made of them")
_DTYPES = {
    "mask": (torch.bool, *STORAGE_DTYPES),
    "sinks": STORAGE_DTYPES,
    "key_range": (torch.int32,),
    "dropout_seed": (torch.int64,),
}


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
    return functools.partial(oracle.forward, roundings=roundings)


@primitive(
    name="attention",
    outputs=("out", "lse"),
    check=lambda q, k, v, causal, *options: check("attention", q, k, v, *options),
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
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` with every argument positional, returning (out, lse)."""
    return oracle.forward(
        q, k, v, causal, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed
    )


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
    dropout_p: float = NO_DROPOUT,
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
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, ...]:
    ordered = stored_by_rows(q, k, v)

    def gradient(x: Tensor) -> Tensor:
        batch, heads, rows, dim = x.shape
        return x.new_empty((batch, rows, heads, dim)).transpose(1, 2) if ordered else x.new_empty(x.shape)

    return (
        *map(gradient, (q, k, v)),
        q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
        q.new_empty(0) if mask is None or not oracle.has_bias_gradient(mask, need_mask) else mask.new_empty(mask.shape),
    )


@primitive(
    outputs=("grad_q", "grad_k", "grad_v", "grad_sinks", "grad_mask"),
    check=check_backward,
    meta=_meta_backward,
    cost=lambda grad_out, grad_lse, q, k, v, out, lse, causal, scale, window, softcap, mask, *options: _cost(
        q, k, v, causal, window, options[2] if len(options) > 2 else None, (3, 2), 4
    ),
    limits=Limits(
        bound=bounds.attention_backward,
        roundings=(ROUNDED_P, ROUNDED_DS, ROUNDED_P_IN_DS),
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
        rounded=lambda roundings: functools.partial(oracle.backward, roundings=roundings),
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
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention` for q, k, v, sinks and a float mask, from its saved output and log-sum-exp; the last two
    are empty without sinks, and without ``need_mask``. Those of q, k and v are stored as (batch, S, heads, D) where all
    three are, and else contiguous. Source: arXiv:2307.08691."""
    return oracle.backward(
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
