"""`scaled_dot_product_attention`, where the op means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.attention.arguments import MAX_HEAD_DIM
from ferryman.ops.attention.definition import attention as op_attention
from ferryman.ops.recognition import Served

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def expressible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Four dimensions, one floating dtype of at most 32 bits, keys of at most 256 and no narrower than values, heads
    that divide; a mask that needs no gradient, which PyTorch's fused kernels give and of ours the composed one only."""
    return (
        query.dtype in _DTYPES
        and (mask is None or (not mask.requires_grad and mask.dim() <= 4))
        and query.dim() == 4
        and _fit(query, key, value, False, False)
    )


def _fit(query: Tensor, key: Tensor, value: Tensor, square: bool, one: bool) -> bool:
    """Whether sizes and dtypes are the op's, of queries with four dimensions. square: as many keys as queries are
    required; one: as many heads of keys as of queries, or one.

    A shape takes as long to read as thirty steps of Python: each is read once, the values' last.
    """
    batch, heads, queries, width = query.shape
    dtype = query.dtype
    if width > MAX_HEAD_DIM or key.dim() != 4 or dtype is not key.dtype:
        return False
    batch_k, heads_k, keys, width_k = key.shape
    if width != width_k or batch != batch_k or (square and queries != keys) or heads_k == 0 or heads % heads_k:
        return False
    if (one and heads_k != 1 and heads_k != heads) or value.dim() != 4 or dtype is not value.dtype:
        return False
    batch_v, heads_v, values, width_v = value.shape
    return batch_v == batch and heads_v == heads_k and values == keys and 0 < width_v <= width


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's causality is aligned top-left, the op's bottom-right: they agree where there are as many keys."""
    if (
        dropout_p == 0.0
        and query.dtype in _DTYPES
        and (attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() <= 4))
        and query.dim() == 4
        and _fit(query, key, value, is_causal, not enable_gqa)  # without it one head is broadcast, too
    ):
        out: Tensor = op_attention(query, key, value, causal=is_causal, scale=scale, mask=attn_mask)
        return out
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def functions() -> Mapping[Any, Served]:
    served = Served("attention", scaled_dot_product_attention, fixed=("attn_mask", 3))
    return {functional.scaled_dot_product_attention: served}
