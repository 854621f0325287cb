"""What PyTorch users write for each op, for eager PyTorch and for torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ferryman.porting.bench.peers import NotServed


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool) -> Tensor:
    if cast_before_weight:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        return y if weight is None else y * weight
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, cast_before_weight), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    # in float32, as models do: the loss of a bfloat16 cross_entropy is rounded to bfloat16
    return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, label_smoothing=label_smoothing)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved or cos.shape[-1] != q.shape[-1]:
        raise NotServed("no interleaved or partial rotation")
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    return turned(q), turned(k)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
) -> Tensor:
    """SDPA: the last query sees all keys in ours, the first query one key in SDPA, so only two cases are the same."""
    if window is not None or softcap > 0:
        raise NotServed("no window, no softcap")
    if causal and q.shape[2] not in (1, k.shape[2]):
        raise NotServed("SDPA aligns a causal mask to the first key")
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


FORWARD = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        add_layer_norm,
        silu_mul,
        gelu_mul,
        softmax,
        cross_entropy,
        rope,
        linear,
        attention,
    )
}
