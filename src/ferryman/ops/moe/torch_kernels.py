"""Products by experts through PyTorch: one product for each expert, or torch._grouped_mm, which takes all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target
from ferryman.errors import Unsupported


def _wide(x: Tensor) -> Tensor:
    """bfloat16 on a CPU becomes float32: oneDNN multiplies by VDPBF16PS (AVX512_BF16), which reads subnormals as 0."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


def _spans(offsets: Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end) of experts with rows. It waits for the device."""
    start = 0
    for expert, end in enumerate(offsets.clamp(0, rows).tolist()):
        if end > start:
            yield expert, start, end
            start = end


def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    for expert, start, end in _spans(offsets, x.shape[0]):
        y[start:end] = functional.linear(_wide(x[start:end]), _wide(weight[expert]))
    return y


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    return _product(x, weight, offsets)


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    grad_x = _product(grad, weight.mT, offsets) if need_x else x.new_empty(0)
    if not need_weight:
        return grad_x, x.new_empty(0)
    grad_weight = torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    for expert, start, end in _spans(offsets, x.shape[0]):
        grad_weight[expert] = torch.mm(_wide(grad[start:end]).T, _wide(x[start:end]))
    return grad_x, grad_weight


def _at_once(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch._grouped_mm wants dense rows, and offsets that ascend inside x."""
    if not hasattr(torch, "_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no _grouped_mm; use the line 'torch' or 'triton'")
    made: Tensor = torch._grouped_mm(x.contiguous(), weight.contiguous().mT, offs=offsets)
    return made


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    rows = x.shape[0]
    if not x.numel() or not weight.numel():
        return x.new_zeros(rows, weight.shape[1])
    ends = offsets.clamp(0, rows).cummax(0).values.int()
    y = _at_once(x, weight, ends)
    # rows that are no expert's hold whatever lay in memory
    return y.masked_fill_((torch.arange(rows, device=x.device) >= ends[-1])[:, None], 0.0)


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "gelu":
        return gate * (0.5 * (1 + torch.erf(gate * math.sqrt(0.5))))
    return functional.gelu(gate, approximate="tanh")


def _layer(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    experts, width, inner = down.shape
    slots = topk_ids.shape[1]
    if not x.numel() or not topk_ids.numel():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    ids = topk_ids.reshape(-1).long()
    keys = torch.where((ids >= 0) & (ids < experts), ids, experts)
    keys, order = keys.sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=x.device), right=True, out_int32=True)
    h = product(x[order // slots], gate_up, ends)
    known = (keys < experts)[:, None]
    own = None if bias is None else bias[keys.clamp(max=experts - 1)]
    if own is not None:
        h = (h.float() + own[:, : 2 * inner].float()).to(x.dtype)
    gate, up = h.float().split(inner, -1)
    a = (_activated(gate, activation) * up).to(x.dtype)
    y = product(a, down, ends)
    if own is not None:
        y = (y.float() + own[:, 2 * inner :].float()).to(x.dtype)
    weighted = (y.float() * topk_weights.reshape(-1)[order].float()[:, None]).masked_fill(~known, 0.0)
    placed = torch.empty_like(weighted)
    placed[order] = weighted
    return placed.view(-1, slots, width).sum(1).to(x.dtype)


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    target: Target,
) -> Tensor:
    return _layer(x, gate_up, down, topk_ids, topk_weights, activation, bias, _product)


def moe_experts_grouped_mm(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    target: Target,
) -> Tensor:
    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(rows, weight, ends, target) if weight.numel() else _product(rows, weight, ends)

    return _layer(x, gate_up, down, topk_ids, topk_weights, activation, bias, product)
