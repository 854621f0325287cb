"""`attention`'s output under torch.compile: an ATen call for each of PyTorch's kernels, which Inductor knows.

A decoder layer of 512 tokens is bound by the host on an H200: the opaque op costs 63 us of it, this call 16. A form
returns None for a call that is not its own, or for which only the whole op will do. Dynamo reads these functions, and
evaluates no clauses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.attention.arguments import OF_HOPPER, hiding
from ferryman.ops.attention.torch_kernels import (
    _as_wide,
    _cut,
    _grouped,
    _model_layout,
    _takes_cudnn,
    _window_sides,
    _words_of,
)

aten = torch.ops.aten
_offset_fits: list[int] = []


def _note_offset(context: Any) -> None:
    x = context.get_local("x").as_fake()
    _offset_fits.append(int(x.storage_offset() * x.element_size() % 16 == 0))


def _noted_offset() -> int:
    return _offset_fits.pop()


_noted_offset._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _vectorised_when_traced(x: Tensor) -> bool:
    """`_vectorised` where there is no address: strides say it, and the offset, which Dynamo gives its own code only."""
    from torch._dynamo.comptime import comptime

    words, (batch, head, row, _) = 16 // x.element_size(), x.stride()
    comptime(_note_offset)
    return _noted_offset() == 1 and batch % words == 0 and head % words == 0 and row % words == 0


_LEAST, _MOST, _STEP = OF_HOPPER[0], OF_HOPPER[-1], OF_HOPPER.step  # numbers, which Dynamo reads
_MUCH = 1 << 33  # products; computed: `triton.hopper` then saves the device more than the op costs the host


def _hoppers_when_traced(q: Tensor, k: Tensor, causal: bool, window: int | None, mask: Tensor | None) -> bool:
    """Whether a bool mask, or a causal window, is a matter of the op's own kernel for Hopper."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    hiding = causal if mask is None else mask.dtype == torch.bool
    if not hiding or (mask is None and window is None) or queries < 128:
        return False
    if dim % _STEP or not _LEAST <= dim <= _MOST:
        return False
    return bool(batch * heads * queries * (keys if window is None else min(keys, window)) * dim >= _MUCH)


def _one_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
) -> bool:
    """Whether a call is what one of PyTorch's kernels computes, by what all of them ask."""
    some = q.shape[2] != 0 and k.shape[2] != 0 and q.shape[0] * q.shape[1] != 0
    plain = sinks is None and key_range is None and chunk is None and not dropout_p and not softcap
    return some and plain and v.shape[3] <= q.shape[3] and q.stride(3) == k.stride(3) == v.stride(3) == 1


def _saved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    learns = mask is not None and mask.requires_grad
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or learns)


def _readable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a GPU's fused kernels read these as they are."""
    kind = q.is_cuda and q.dtype != torch.float32 and q.shape[3] % 8 == 0
    return kind and _vectorised_when_traced(q) and _vectorised_when_traced(k) and _vectorised_when_traced(v)


def _factor(q: Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def of_cudnn(
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
    dropout_p: float,
    dropout_seed: Tensor | None,
    features: str,
) -> Tensor | None:
    """cuDNN's, of a device where it leads and of what its kernel is quicker at than `triton.hopper`."""
    (heads, sq, head_dim), width = q.shape[1:], v.shape[3]
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    if not _one_call(q, k, v, softcap, sinks, key_range, chunk, dropout_p) or not _takes_cudnn(q, features.split()):
        return None
    saved, causal = _saved(q, k, v, mask), causal and sq != 1
    if window is not None or (causal and (mask is not None or sq != k.shape[2])):
        return None
    if not saved and width == head_dim and _hoppers_when_traced(q, k, causal, window, mask):
        return None
    v = _as_wide(v, _words_of(width))
    if not _readable(q, k, v):
        return None
    bias = None
    if mask is not None:
        # the backward of a row that sees nothing is the op's own; cuDNN reads rows of 16 bytes, in q's dtype
        if saved or k.shape[2] * q.element_size() % 16 or mask.dtype not in (torch.bool, q.dtype):
            return None
        hidden = torch.where(mask, 0.0, -math.inf).to(q.dtype) if mask.dtype == torch.bool else mask
        bias = hidden.expand(q.shape[0], heads, sq, k.shape[2])
    factor = _factor(q, scale)
    got = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, saved, 0.0, causal, False, scale=factor)
    out = _model_layout(_cut(got[0], width))
    if mask is None:
        return out
    seen = (mask if mask.dtype == torch.bool else mask != -math.inf).any(-1, keepdim=True)
    return torch.where(seen, out, 0.0)


def of_flash(
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
    dropout_p: float,
    dropout_seed: Tensor | None,
    features: str,
) -> Tensor | None:
    """FlashAttention-2's. Where cuDNN leads, of windows, which it skips outside of: each query sees a key there."""
    (sq, head_dim), width = q.shape[2:], v.shape[3]
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    if not _one_call(q, k, v, softcap, sinks, key_range, chunk, dropout_p) or mask is not None:
        return None
    factor, causal = _factor(q, scale), causal and sq != 1
    if causal and sq != k.shape[2]:
        return None
    if not _takes_cudnn(q, features.split()):
        v = _as_wide(v, head_dim)
        if window is not None or not _readable(q, k, v):
            return None
        got = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=factor)
        return _model_layout(_cut(got[0], width))
    if window is None or sq != k.shape[2] or width != head_dim or not _readable(q, k, v):
        return None
    if not _saved(q, k, v, mask) and _hoppers_when_traced(q, k, causal, window, mask):
        return None
    left, right = _window_sides(window, causal)
    got = aten._flash_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        None,
        sq,
        sq,
        0.0,
        causal,
        False,
        scale=factor,
        window_size_left=left,
        window_size_right=right,
    )
    return got[0].transpose(1, 2)


def of_cpu(
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
    dropout_p: float,
    dropout_seed: Tensor | None,
    features: str,
) -> Tensor | None:
    """The CPU's, of float32."""
    (heads, sq, head_dim), width = q.shape[1:], v.shape[3]
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    if not _one_call(q, k, v, softcap, sinks, key_range, chunk, dropout_p) or mask is not None or window is not None:
        return None
    causal = causal and sq != 1
    if not q.is_cpu or q.dtype != torch.float32 or (causal and sq != k.shape[2]):
        return None
    keys, values = _grouped(k, heads), _grouped(_as_wide(v, head_dim), heads)
    got = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal, scale=_factor(q, scale))
    return _model_layout(_cut(got[0], width))
