"""Products by experts through PyTorch: one product for each expert, or torch._grouped_mm, which takes all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target
from ferryman.errors import Unsupported
from ferryman.ops.moe_permute.torch_kernels import sorted_slots


def _wide(x: Tensor) -> Tensor:
    """bfloat16 on a CPU becomes float32: oneDNN multiplies by VDPBF16PS (AVX512_BF16), which reads subnormals as 0."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


def _spans(offsets: Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end) of experts with rows. It waits for the device, which a graph that is captured cannot."""
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("torch.loop reads offsets on the host, which CUDA graphs cannot capture; use 'triton'")
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


def _over_rows(grad: Tensor, x: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """(E, N, K): the product of grad's and x's rows, an expert's summed over its own."""
    grad_weight = torch.zeros(experts, grad.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    for expert, start, end in _spans(offsets, x.shape[0]):
        grad_weight[expert] = torch.mm(_wide(grad[start:end]).T, _wide(x[start:end]))
    return grad_weight


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    return _product(x, weight, offsets)


def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    grad_x = _product(grad, weight.mT, offsets) if need_x else x.new_empty(0)
    if not need_weight:
        return grad_x, x.new_empty(0)
    return grad_x, _over_rows(grad, x, offsets, len(weight))


def _at_once(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch._grouped_mm wants dense rows, and offsets that ascend inside x."""
    if not hasattr(torch, "_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no _grouped_mm; use the line 'torch' or 'triton'")
    dense_weight = _dense(weight.mT).mT if weight.mT.is_contiguous() else _dense(weight)
    y: Tensor = torch._grouped_mm(_dense(x), dense_weight.mT, offs=offsets)
    return y


def _dense(x: Tensor) -> Tensor:
    """Contiguous, with a contiguous tensor's strides too where a dimension is 1 and any would do: _grouped_mm looks."""
    return x.contiguous().view(-1).view(x.shape)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    rows = x.shape[0]
    if not x.numel() or not weight.numel():
        return x.new_zeros(rows, weight.shape[1])
    ends = offsets.clamp(0, rows).cummax(0).values.int()
    y = _at_once(x, weight, ends)
    # rows that are no expert's hold whatever lay in memory
    return y.masked_fill_((torch.arange(rows, device=x.device) >= ends[-1])[:, None], 0.0)


def _over_rows_at_once(grad: Tensor, x: Tensor, ends: Tensor, experts: int) -> Tensor:
    if not grad.numel() or not x.numel():
        return x.new_zeros(experts, grad.shape[1], x.shape[1])
    if not hasattr(torch, "_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no _grouped_mm; use the line 'torch' or 'triton'")
    grad_weight: Tensor = torch._grouped_mm(_dense(grad).T, _dense(x), offs=ends)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    # an expert without rows is a product of depth 0, whose result no version documents
    return grad_weight.masked_fill_((ends == starts)[:, None, None], 0.0)


def grouped_mm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    ends = offsets.clamp(0, x.shape[0]).cummax(0).values.int()
    grad_x = grouped_mm(grad, weight.mT, offsets, target) if need_x else x.new_empty(0)
    return grad_x, _over_rows_at_once(grad, x, ends, len(weight)) if need_weight else x.new_empty(0)


_CLAMPED = ("swiglu_oai", "swiglu_oai_interleaved")
_ALPHA, _LIMIT = 1.702, 7.0


def _halves(h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(gate, up), in float32."""
    if activation == "swiglu_oai_interleaved":
        return h[:, ::2].float(), h[:, 1::2].float()
    gate, up = h.float().split(h.shape[1] // 2, -1)
    return gate, up


def _factor(up: Tensor, activation: str) -> Tensor:
    """What the activated gate is multiplied by."""
    return up.clamp(-_LIMIT, _LIMIT) + 1 if activation in _CLAMPED else up


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation in _CLAMPED:
        cut = gate.clamp(max=_LIMIT)
        return cut * torch.sigmoid(_ALPHA * cut)
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
    keys, order, ends = sorted_slots(topk_ids, experts)
    h = product(x[order // slots], gate_up, ends)
    known = (keys < experts)[:, None]
    own = None if bias is None else bias[keys.clamp(max=experts - 1)]
    if own is not None:
        h = (h.float() + own[:, : 2 * inner].float()).to(x.dtype)
    gate, up = _halves(h, activation)
    a = (_activated(gate, activation) * _factor(up, activation)).to(x.dtype)
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


def _slope(gate: Tensor, activation: str) -> Tensor:
    """The activation's derivative. PyTorch's own of erf-gelu is off by 5 units near 0 on CPUs with AVX-512."""
    if activation in _CLAMPED:
        # past 1e4 the slope is what the limit makes 0, and below -1e4 it is 0, of -inf too
        steep = torch.ops.aten.silu_backward(torch.ones_like(gate), _ALPHA * gate.clamp(-1e4, 1e4))
        return steep.masked_fill_(gate > _LIMIT, 0.0)
    if activation == "gelu":
        density = torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
        return torch.special.ndtr(gate) + gate * density
    if activation == "silu":
        return torch.ops.aten.silu_backward(torch.ones_like(gate), gate)
    return torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate="tanh")


def _layer_gradients(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    needs: tuple[bool, ...],
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    over_rows: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> tuple[Tensor, ...]:
    """No shape follows from a value. What is summed over an expert's rows is an experts' product, too."""
    (experts, width, inner), slots = down.shape, topk_ids.shape[1]
    need_x, need_gate_up, need_down, need_weights, need_bias = needs
    like = (x, gate_up, down, topk_weights, x.new_empty(0) if bias is None else bias)
    if not x.numel() or not topk_ids.numel():
        return tuple(
            torch.zeros(t.shape if need else 0, dtype=t.dtype if need else x.dtype, device=x.device)
            for t, need in zip(like, needs, strict=True)
        )
    keys, order, ends = sorted_slots(topk_ids, experts)
    rows, above = x[order // slots], grad[order // slots]
    known = (keys < experts)[:, None]
    own = None if bias is None else bias[keys.clamp(max=experts - 1)].float()
    h = product(rows, gate_up, ends)
    if own is not None:
        h = (h.float() + own[:, : 2 * inner]).to(x.dtype)
    gate, raw = _halves(h, activation)
    up = _factor(raw, activation)
    u = product(above, down.mT, ends).float()
    share = topk_weights.reshape(-1)[order].float()[:, None].masked_fill(~known, 0.0)
    opened = _activated(gate, activation)
    to_x, to_gate_up, to_down, to_weights, to_bias = (x.new_empty(0) for _ in needs)
    if need_x or need_gate_up or need_bias:
        moved = share * u
        to_gate, to_up = moved * up * _slope(gate, activation), moved * opened
        if activation in _CLAMPED:
            to_up = to_up.mul_(~(raw.abs() > _LIMIT))  # 0 times what is not finite is NaN
        if activation == "swiglu_oai_interleaved":
            dh = torch.stack([to_gate, to_up], -1).flatten(1).to(x.dtype)
        else:
            dh = torch.cat([to_gate, to_up], -1).to(x.dtype)
        if need_x:
            by_expert = product(dh, gate_up.mT, ends)
            placed = torch.empty_like(by_expert)
            placed[order] = by_expert
            to_x = placed.view(-1, slots, width).sum(1, dtype=torch.float32).to(x.dtype)
        if need_gate_up:
            to_gate_up = over_rows(dh, rows, ends, experts)
        if need_bias and bias is not None:
            to_bias = torch.zeros(bias.shape, dtype=torch.float32, device=x.device)
            for expert, start, end in _spans(ends, len(order)):
                to_bias[expert, : 2 * inner] = dh[start:end].float().sum(0)
                to_bias[expert, 2 * inner :] = (share[start:end] * above[start:end].float()).sum(0)
            to_bias = to_bias.to(bias.dtype)
    if need_down:
        to_down = over_rows(above, (share * (opened * up)).to(x.dtype), ends, experts)
    if need_weights:
        sums = (opened * up * u).sum(-1)
        if own is not None:
            sums = sums + (above.float() * own[:, 2 * inner :]).sum(-1)
        placed = torch.empty_like(sums)
        placed[order] = sums.masked_fill(~known[:, 0], 0.0)
        to_weights = placed.view(topk_ids.shape).to(topk_weights.dtype)
    return to_x, to_gate_up, to_down, to_weights, to_bias


def moe_experts_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    need_x: bool,
    need_gate_up: bool,
    need_down: bool,
    need_topk_weights: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    needs = (need_x, need_gate_up, need_down, need_topk_weights, need_bias)
    return _layer_gradients(
        grad, x, gate_up, down, topk_ids, topk_weights, activation, bias, needs, _product, _over_rows
    )


def moe_experts_backward_grouped_mm(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    need_x: bool,
    need_gate_up: bool,
    need_down: bool,
    need_topk_weights: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    """Without a bias it waits for nothing, and a CUDA graph may capture it."""

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(rows, weight, ends, target) if weight.numel() else _product(rows, weight, ends)

    needs = (need_x, need_gate_up, need_down, need_topk_weights, need_bias)
    return _layer_gradients(
        grad, x, gate_up, down, topk_ids, topk_weights, activation, bias, needs, product, _over_rows_at_once
    )
