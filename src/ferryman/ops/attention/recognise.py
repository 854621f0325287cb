"""`scaled_dot_product_attention`, where the op means the same, and masks that say causal, or a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.attention.arguments import MAX_HEAD_DIM
from ferryman.ops.attention.definition import attention as op_attention
from ferryman.ops.attention.scores import visible
from ferryman.ops.attention.written_out import layers
from ferryman.ops.recognition import Block, Folding, Graph, Layer, Served, Traced

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


_native = torch._native_multi_head_attention


def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Of one tensor without a mask, and no weights wanted."""
    if (
        query is key
        and key is value
        and mask is None
        and not need_weights
        and not query.is_nested
        and query.dim() == 3
        and query.dtype in _DTYPES
        and query.shape[-1] == embed_dim == qkv_weight.shape[1]
        and embed_dim // num_head <= MAX_HEAD_DIM
        and query.numel() > 0
    ):
        packed = functional.linear(query, qkv_weight, qkv_bias).unflatten(-1, (3, num_head, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = op_attention(*packed.unbind(0))
        return functional.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), None
    given = (query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias)
    result: tuple[Tensor, Tensor | None] = _native(*given, mask, need_weights, average_attn_weights, mask_type)
    return result


def blocks(block: Block) -> Iterator[Layer]:
    """Written out, as products with a softmax between them."""
    yield from layers(block)


def functions() -> Mapping[Any, Served]:
    served = Served("attention", scaled_dot_product_attention, fixed=("attn_mask", 3))
    return {functional.scaled_dot_product_attention: served, _native: Served("attention", native_attention)}


def followed() -> Iterator[Any]:
    """PyTorch's attention of many heads, in Python: it ends in calls that are served."""
    yield functional.multi_head_attention_forward
    yield functional._in_projection_packed  # type: ignore[attr-defined]


# In graphs ---------------------------------------------------------------------------------------------------


def _traced(
    graph: Graph,
    query: Any,
    key: Any,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]] | None:
    if not isinstance(value, fx.Node) or dropout_p != 0.0 or not isinstance(is_causal, bool):
        return None
    if is_causal and not graph.same_size(graph.example(query).shape[2], graph.example(key).shape[2]):
        return None  # PyTorch aligns to the first key, the op to the last
    between: list[fx.Node] = []
    if not enable_gqa:
        keys, values = _repeated(graph, key), _repeated(graph, value)
        if keys is not None and values is not None:
            key, value, between = keys[0], values[0], [*keys[1], *values[1]]
    number = graph.number(scale) if scale is not None else None
    if scale is not None and number is None:
        return None
    return ((query, key, value, is_causal, number, None, 0.0, attn_mask, None, None, None, 0.0, None), tuple(between))


def _repeated(graph: Graph, node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Keys of fewer heads, and the nodes that repeat them for each query head of a group."""
    between: list[fx.Node] = []
    while isinstance(node, fx.Node) and graph.name(node) in ("reshape", "expand", "contiguous"):
        between.insert(0, node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or (not between and graph.name(node) != "repeat_interleave"):
        return None
    source = node.args[0] if node.args else None
    before, after = graph.example(source), graph.example(between[-1] if between else node)
    if not isinstance(source, fx.Node) or not isinstance(before, Tensor) or before.dim() != 4 or after.dim() != 4:
        return None
    whole = graph.name(node) in ("getitem", "unsqueeze", "repeat_interleave") and before.shape[0] == after.shape[0]
    if not whole or before.shape[3] != after.shape[3] or any(len(n.users) > 1 for n in (node, *between)):
        return None
    return source, [node, *between]


def traced() -> Mapping[str, Traced]:
    return {"scaled_dot_product_attention": Traced("attention", _traced)}


def _readings(options: Mapping[str, Any], numbers: Set[int]) -> Iterator[tuple[dict[str, Any], str]]:
    if options["causal"] is not False or options["window"] is not None:
        return
    yield {"causal": True}, "causal"
    yield {"causal": False}, "everything"
    for window in sorted({n + more for n in numbers if n > 1 for more in (0, 1, -1)}):
        yield {"causal": True, "window": window}, f"causal within {window}"


def _says(mask: Tensor, sizes: tuple[int, ...], reading: Mapping[str, Any]) -> bool:
    queries, keys = sizes
    if tuple(mask.shape[-2:]) != (queries, keys):
        return False
    seen = visible(queries, keys, reading["causal"], reading.get("window"), mask.device)
    wanted = torch.ones((queries, keys), dtype=torch.bool, device=mask.device) if seen is None else seen
    if mask.dtype == torch.bool:
        return bool((mask == wanted).all())
    return bool((torch.where(wanted, mask == 0, mask <= torch.finfo(mask.dtype).min / 2)).all())


def _plain(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """PyTorch's function has no window."""
    return None if options["window"] is not None else {"attn_mask": None, "is_causal": bool(options["causal"])}


def foldings() -> Iterator[Folding]:
    yield Folding("attention", "mask", (("q", 2), ("k", 2)), _readings, _says, _plain)
