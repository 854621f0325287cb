"""PyTorch's scaled_dot_product_attention, whose backend it chooses by itself.

What it has no argument for, a window or a diagonal of unequal lengths, is a mask that was made before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it

from ferryman.porting.bench.peers import NotServed

NAME = "sdpa"


def available() -> str | None:
    return None


def version() -> str:
    return str(torch.__version__)


def _visible(sq: int, sk: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    i = torch.arange(sq, device=device).unsqueeze(1) + (sk - sq)
    j = torch.arange(sk, device=device)
    seen = (j <= i) if causal else torch.ones(sq, sk, dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & (j > i - window)
        if not causal:
            seen = seen & (j < i + window)
    return seen


def _masking(q: Tensor, k: Tensor, causal: bool, window: int | None, mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """(is_causal, attn_mask) of SDPA."""
    sq, sk = q.shape[2], k.shape[2]
    causal = causal and sq > 1
    if window is None and mask is None and (not causal or sq == sk):
        return causal, None
    if not causal and window is None:
        return False, mask
    seen = _visible(sq, sk, causal, window, q.device)
    if mask is None:
        return False, seen
    return False, mask & seen if mask.dtype == torch.bool else mask.masked_fill(seen.logical_not(), -math.inf)


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, attn_mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
) -> Callable[[], Any]:
    if softcap:
        raise NotServed("no softcap")
    is_causal, attn_mask = _masking(q, k, causal, window, mask)
    return lambda: _call(q, k, v, scale, is_causal, attn_mask)


def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Callable[[], Any]:
    _, _, causal, scale, window, softcap, mask = rest  # out, lse
    if softcap:
        raise NotServed("no softcap")
    is_causal, attn_mask = _masking(q, k, causal, window, mask)
    with torch.enable_grad():
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _call(wanted[0], wanted[1], wanted[2], scale, is_causal, attn_mask)
    return lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True)


OPS = {"attention": _forward, "attention_backward": _backward}
