"""Experts row by row, and slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.independent import Source
from tests.ops.activation.independent import gelu_mul, sigmoid, silu_mul


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The first expert whose offset is larger than the row's number."""
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype)
    for row in range(x.shape[0]):
        owner = next((e for e, end in enumerate(offsets.tolist()) if end > row), None)
        if owner is not None:
            y[row] = (weight[owner] * x[row]).sum(-1)
    return y


def gated(h: Tensor, activation: str) -> Tensor:
    middle = len(h) // 2
    gate, up = (h[::2], h[1::2]) if activation == "swiglu_oai_interleaved" else (h[:middle], h[middle:])
    if activation == "silu":
        return silu_mul(gate, up)
    if activation.startswith("gelu"):
        return gelu_mul(gate, up, "tanh" if activation == "gelu_tanh" else "none")
    gate = torch.where(gate > 7.0, 7.0, gate)
    up = torch.where(up > 7.0, 7.0, torch.where(up < -7.0, -7.0, up))
    return (up + 1) * gate * sigmoid(1.702 * gate)


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
) -> Tensor:
    inner, out = down.shape[2], []
    for token, ids in enumerate(topk_ids.tolist()):
        total = x.new_zeros(x.shape[1])
        for slot, expert in enumerate(ids):
            if 0 <= expert < len(down):
                h = (gate_up[expert] * x[token]).sum(-1)
                h = h if bias is None else h + bias[expert, : 2 * inner]
                y = (down[expert] * gated(h, activation)).sum(-1)
                y = y if bias is None else y + bias[expert, 2 * inner :]
                total = total + topk_weights[token, slot] * y
        out.append(total)
    return torch.stack(out) if out else torch.zeros_like(x)


SOURCES = {"grouped_linear": Source(grouped_linear), "moe_experts": Source(moe_experts)}
