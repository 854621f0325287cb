"""Hugging Face diffusers: calls of its attention dispatcher, in what a ported model calls, go to `ops.attention` where
the dispatcher's choice is PyTorch's function.

Its attention processors are callables that a ported module's forward reaches by itself (`ferryman.porting.model`). Some
call PyTorch's function, which needs nothing here; the others this dispatcher. Tested with diffusers 0.42.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from ferryman.ops.attention.definition import attention_with_lse
from ferryman.ops.attention.recognise import scaled_dot_product_attention
from ferryman.ops.recognition import Served
from ferryman.porting.model import uses

_NATIVE = "native"
_SAME = 2.0**-40  # of sums of a few numbers about 1, in float64, in another order


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    """``dispatch_attention_fn``: (B, S, H, D) tensors, (B, S, H, D) out. Another backend, options of one, a context
    over several devices and a mask of two dimensions are the dispatcher's own."""
    plain = parallel_config is None and not attention_kwargs and (attn_mask is None or attn_mask.dim() == 4)
    if plain and _native(backend):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out.transpose(1, 2)
    output: Tensor = dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        attention_kwargs,
        backend=backend,
        parallel_config=parallel_config,
    )
    return output


def _native(backend: Any) -> bool:
    if backend is None:
        backend = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
    return str(getattr(backend, "value", backend)) == _NATIVE


def same() -> bool:
    """Whether the dispatcher's native backend means what the op means: shown in float64 on drawn tensors."""
    draw = torch.Generator().manual_seed(0)
    exact = attention_with_lse.primitive.body  # type: ignore[attr-defined]
    for causal, masked, heads in ((False, False, 4), (True, False, 4), (False, True, 4), (False, True, 2)):
        q, k, v = (torch.randn(2, 7, n, 5, generator=draw, dtype=torch.float64) for n in (4, heads, heads))
        mask = torch.rand(2, 1, 7, 7, generator=draw) < 0.7 if masked else None
        if mask is not None:
            mask[..., 0] = True
        with torch.no_grad():
            native = dispatch_attention_fn(
                q, k, v, mask, 0.0, causal, 0.37, heads != 4, backend=attention_dispatch.AttentionBackendName(_NATIVE)
            )
        given = (x.transpose(1, 2) for x in (q, k, v))
        wanted = exact(*given, causal, 0.37, None, 0.0, mask)[0].transpose(1, 2)
        if native.shape != wanted.shape or not torch.allclose(native, wanted, rtol=0.0, atol=_SAME):
            return False
    return True


if same():
    uses.more[dispatch_attention_fn] = Served("attention", attention)
