"""FlashAttention-4, which takes (batch, sequence, heads, head_dim): our layout, transposed, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from ferryman_peers import _common

NAME = "fa4"


def available() -> str | None:
    return _common.missing("flash_attn", "cutlass")


def version() -> str:
    return _common.version("flash-attn-4")


def _forward(q: Any, k: Any, v: Any, causal: bool, scale: Any, window: Any, softcap: float) -> Any:
    from flash_attn.cute.interface import flash_attn_func

    seen = (None, None) if window is None else (window - 1, 0 if causal else None)
    outputs = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=scale,
        causal=causal,
        window_size=seen,
        softcap=softcap,
    )
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    return out.transpose(1, 2)


def attention(q: Any, k: Any, v: Any, causal: bool, scale: Any, window: Any, softcap: float, mask: Any) -> _common.Call:
    _common.plain(mask=mask)
    return lambda: _forward(q, k, v, causal, scale, window, softcap)


def attention_backward(
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    causal: bool,
    scale: Any,
    window: Any,
    softcap: float,
    mask: Any,
) -> _common.Call:
    _common.plain(mask=mask, grad_lse=grad_lse)
    wanted = q, k, v = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        mine = _forward(q, k, v, causal, scale, window, softcap)
    return lambda: torch.autograd.grad(mine, wanted, grad_out, retain_graph=True)


OPS = {"attention": attention, "attention_backward": attention_backward}
