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


def bias_act(x: Tensor, bias: Tensor | None, activation: str, alpha: float | None) -> Tensor:
    return activated(x if bias is None else x + bias, activation, alpha)


def activated(z: Tensor, activation: str, alpha: float | None = None) -> Tensor:
    if activation == "quick_gelu":
        return z * torch.sigmoid(1.702 * z)
    if activation == "relu2":
        return F.relu(z).square()
    if activation == "leaky_relu":
        return F.leaky_relu(z, 0.01 if alpha is None else alpha)
    if activation == "softcap":
        assert alpha is not None  # such a call always gives it
        return alpha * torch.tanh(z / alpha)
    if activation == "elu":
        return F.elu(z, 1.0 if alpha is None else alpha)
    name, _, approximate = activation.partition("_")
    return F.gelu(z, approximate=approximate or "none") if name == "gelu" else getattr(F, name)(z)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    cast_before_weight: bool,
    activation: str,
) -> Tensor:
    opened = activated(gate.float(), activation)
    h = x.float() if norm_before_gate else x.float() * opened
    size = group_size or x.shape[-1]
    h = F.rms_norm(h.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2)
    h = h.to(x.dtype) if cast_before_weight else h
    h = h if weight is None else h * weight
    return (h * opened if norm_before_gate else h).to(x.dtype)


def embedding(ids: Tensor, weight: Tensor, scale: float | None) -> Tensor:
    rows = F.embedding(ids, weight)
    return rows if scale is None else rows * scale


def gate_topk(
    logits: Tensor,
    k: int,
    scoring: str,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    renormalise: bool,
    scale: float,
    ids_dtype: torch.dtype,
) -> tuple[Tensor, None]:
    """Of equal experts PyTorch's topk has any: their weights agree, and which they are is not judged."""
    alone = scoring == "sigmoid"  # each expert by itself
    scores = logits.float().sigmoid() if alone else logits.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    if n_group > 1:
        groups = choice.unflatten(-1, (n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1) if alone else groups.amax(-1)
        of = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(topk_group, dim=-1).indices, True)
        choice = groups.masked_fill(~of.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if alone else 0.0))
    return weights * scale, None


def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids, source = topk_ids.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device, dtype=ids.dtype), right=True)
    return x[source // topk_ids.shape[1]], ends.int(), source.int()


def moe_combine(y: Tensor, source: Tensor, topk_weights: Tensor) -> Tensor:
    if len(source) != topk_weights.numel():
        raise NotServed("a slot has no row, or a row no slot")
    place = torch.empty_like(source).scatter_(0, source.long(), torch.arange(len(source), device=y.device).int())
    rows = y[place].unflatten(0, topk_weights.shape)
    return (rows * topk_weights.unsqueeze(-1)).sum(1).to(y.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    width = weight.shape[1] - 1
    wide = F.pad(x, (width, 0)) if initial_state is None else torch.cat((initial_state, x), -1)
    y = F.conv1d(wide, weight.unsqueeze(1), bias, groups=len(weight))
    return F.silu(y) if activation == "silu" else y, wide[..., wide.shape[-1] - width :]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    if z_loss:
        raise NotServed("no z-loss")
    logits = F.linear(x.flatten(0, -2), weight, bias).float()
    return F.cross_entropy(logits, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing)


FORWARD = {
    f.__name__: f
    for f in (
        bias_act,
        gated_rms_norm,
        embedding,
        gate_topk,
        moe_permute,
        moe_combine,
        causal_conv1d,
        linear_cross_entropy,
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
