"""`scaled_dot_product_attention`, where the op means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from ferryman.ops.attention.definition import MAX_HEAD_DIM
from ferryman.ops.attention.definition import attention as op_attention
from ferryman.ops.recognition import Served


def expressible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Four dimensions, one floating dtype of at most 32 bits, keys of at most 256 and no narrower than values, heads
    that divide; a mask that needs no gradient, which PyTorch's fused kernels give and of ours the composed one only."""
    dtype = query.dtype
    return (
        dtype.itemsize < 8
        and dtype.is_floating_point
        and query.dim() == 4
        and key.dim() == value.dim() == 4
        and key.shape[:3] == value.shape[:3]
        and 0 < value.shape[-1] <= key.shape[-1]
        and query.shape[-1] == key.shape[-1] <= MAX_HEAD_DIM
        and query.shape[0] == key.shape[0]
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and dtype is key.dtype
        and dtype is value.dtype
        and (mask is None or (not mask.requires_grad and mask.dim() <= 4))
    )


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
        and expressible(query, key, value, attn_mask)
        and (not is_causal or query.shape[2] == key.shape[2])
        and (enable_gqa or key.shape[1] in (1, query.shape[1]))  # one head is broadcast
    ):
        out: Tensor = op_attention(query, key, value, causal=is_causal, scale=scale, mask=attn_mask)
        return out
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def functions() -> Mapping[Any, Served]:
    served = Served("attention", scaled_dot_product_attention, fixed=("attn_mask", 3))
    return {functional.scaled_dot_product_attention: served}
