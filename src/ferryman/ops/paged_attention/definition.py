"""Attention of one query a sequence over a paged cache: meaning. Error terms stand in bounds.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.paged_attention import bounds
from ferryman.ops.primitive import Cost, Limits, Rounding, primitive, wide

MAX_HEAD_DIM = 256
ROUNDED_P = Rounding("p", "the probabilities are rounded to the storage dtype before P @ V")


def _forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None,
    round_p: bool = False,
) -> Tensor:
    heads, dim = q.shape[1:]
    k, v, seen = bounds.gathered(wide(k_cache), wide(v_cache), page_table, lengths)
    # k, v: (B, T, G, D) -> (B, H, T, D)
    k, v = (bounds.per_head(x, heads) for x in (k, v))
    factor = dim**-0.5 if scale is None else scale
    s = (wide(q).unsqueeze(2) @ k.transpose(-1, -2)) * factor
    s = s.masked_fill(~seen[:, None, None], -math.inf)
    top = torch.logsumexp(s, -1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == -math.inf, 0.0))
    if round_p:
        p = p.to(q.dtype).to(v.dtype)
    return (p @ v).squeeze(2).to(q.dtype)


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None
) -> None:
    op, floats = "paged_attention", {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    checks.one_device(op, **floats, page_table=page_table, lengths=lengths)
    checks.floating(op, **floats)
    checks.same_dtype(op, **floats)
    for name, x, dims in (("q", q, 3), ("k_cache", k_cache, 4), ("page_table", page_table, 2), ("lengths", lengths, 1)):
        if x.dim() != dims:
            raise ArgumentError(op, f"{name}.dim()", x.dim(), str(dims))
    checks.same_shape(op, k_cache=k_cache, v_cache=v_cache)
    for name, x in (("page_table", page_table), ("lengths", lengths)):
        if x.dtype != torch.int32:
            raise ArgumentError(op, f"{name}.dtype", x.dtype, "torch.int32")
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(op, f"{name}.shape[0]", x.shape[0], f"{q.shape[0]}, q's batch")
    heads, dim = q.shape[1:]
    groups = k_cache.shape[2]
    if k_cache.shape[3] != dim or not 1 <= dim <= MAX_HEAD_DIM:
        required = f"one head_dim of 1 to {MAX_HEAD_DIM}; q has {dim}"
        raise ArgumentError(op, "k_cache.shape[3]", k_cache.shape[3], required)
    if groups < 1 or heads % groups:
        raise ArgumentError(op, "k_cache.shape[2]", groups, f"a divisor of q's {heads} heads")
    if k_cache.shape[1] < 1:
        raise ArgumentError(op, "k_cache.shape[1]", k_cache.shape[1], "pages of 1 slot or more")
    if scale is not None and not math.isfinite(scale):
        raise ArgumentError(op, "scale", scale, "a finite number, or None")


def _cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None
) -> Cost:
    """Of sequences that fill their pages: how long they are is known on the device only."""
    _, size, groups, dim = k_cache.shape
    slots = page_table.numel() * size
    moved = (2 * q.numel() + 2 * slots * groups * dim) * q.element_size() + 4 * (page_table.numel() + lengths.numel())
    return Cost(4.0 * slots * q.shape[1] * dim, float(moved))


def _elsewhere(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None
) -> tuple[Tensor, ...] | None:
    """Replace, in place, every slot of the caches that no sequence sees: no result may change."""
    free = ~bounds.used(k_cache, page_table, lengths)
    if not bool(free.any()) or q.numel() == 0:
        return None
    k_cache[free], v_cache[free] = 7.0, -5.0
    return (torch.ones(q.shape, dtype=torch.bool, device=q.device),)


def _rounded(roundings: frozenset[str]) -> Callable[..., Any]:
    return functools.partial(_forward, round_p="p" in roundings)


@primitive(
    outputs=("out",),
    check=_check,
    meta=lambda q, *rest: q.new_empty(q.shape),
    cost=_cost,
    limits=Limits(
        bound=bounds.paged_attention,
        roundings=(ROUNDED_P,),
        rounded=_rounded,
        batch={"q": 2, "page_table": 1, "lengths": 0, "out": 2},
        reduction=lambda q, k_cache, v_cache, page_table, *rest: max(
            q.shape[2], page_table.shape[1] * k_cache.shape[1]
        ),
        unseen=_elsewhere,
    ),
    autocast=("low", "aten::scaled_dot_product_attention"),
    dtypes={"page_table": (torch.int32,), "lengths": (torch.int32,)},
)
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of one query a sequence, for decoding, over keys and values in pages.

    q: (batch, heads, head_dim). k_cache, v_cache: (pages, page_size, kv_heads, head_dim); kv_heads divides heads. All
    float32, float16 or bfloat16, one dtype. page_table: (batch, most_pages) int32: entry j holds the keys from
    j * page_size on. lengths: (batch,) int32, how many keys a sequence has; more than its table has room for are cut.
    Entries and slots beyond a length are never read: they may hold anything. Entries before it must be a page's number,
    which nothing checks: they are values on the device. scale: default head_dim**-0.5.
    Returns (batch, heads, head_dim) in q's dtype, contiguous; 0 where the length is 0 or less. float32 accumulation; an
    implementation may round P to the storage dtype. Not differentiable. Raises ArgumentError.
    Source: Kwon et al., arXiv:2309.06180.
    """
    return _forward(q, k_cache, v_cache, page_table, lengths, scale)
