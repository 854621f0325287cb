"""Routing in Triton: a program for each token, whose experts stay in registers; k times the best of the rest.

Numbers are compared as integers that rise with them, NaN above all, so that a choice is the same on every device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, narrow, sigmoid, widen

_NEVER: tl.constexpr = tl.constexpr(-2147483648)
_NAN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _key(x):
    """An integer that rises with x; of either zero the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, tl.where(bits < 0, bits ^ _NAN, bits))


@triton.jit
def _number(key):
    """What `_key` came from."""
    return tl.where(key < 0, key ^ _NAN, key).to(tl.float32, bitcast=True)


@triton.jit
def _first(key, index, BLOCK: tl.constexpr):
    """(the largest key, the lowest index that has it)."""
    best = tl.max(key, 0)
    return best, tl.min(tl.where(key == best, index, BLOCK), 0)


@triton.jit
def route_token(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    experts,
    k,
    n_group,
    topk_group,
    scale,
    row_stride,
    col_stride,
    bias_stride,
    SOFT: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < experts
    x = widen(tl.load(logits_ptr + token * row_stride + index * col_stride, mask=inside, other=0.0))
    raw = tl.where(inside, _key(x), _NEVER)
    if SOFT:
        e = tl.where(inside, exp(x - _number(tl.max(raw, 0))), 0.0)
        score = e / tl.sum(e, 0)
    else:
        score, _ = sigmoid(x)
    key = raw
    number = score
    if bias_ptr is not None:
        number = score + widen(tl.load(bias_ptr + index * bias_stride, mask=inside, other=0.0))
        key = tl.where(inside, _key(number), _NEVER)
    if GROUPS:
        size = experts // n_group
        at = tl.arange(0, BLOCK_G)
        best_of = tl.full([BLOCK_G], _NEVER, tl.int32)
        for group in range(n_group):
            if SOFT:
                own = tl.max(tl.where(index // size == group, key, _NEVER), 0)
            else:
                member = tl.where(inside & (index // size == group), _key(number), _NEVER)
                best, where = _first(member, index, BLOCK)
                second = tl.max(tl.where(index == where, _NEVER, member), 0)
                own = _key(_number(best) + _number(second))
            best_of = tl.where(at == group, own, best_of)
        picked = tl.zeros([BLOCK], tl.int32)
        for _ in range(topk_group):
            _best, where = _first(best_of, at, BLOCK_G)
            picked = tl.where(index // size == where, 1, picked)
            best_of = tl.where(at == where, _NEVER, best_of)
        key = tl.where(picked == 1, key, _NEVER)
    rank = tl.full([BLOCK], -1, tl.int32)
    for place in range(k):
        _most, where = _first(key, index, BLOCK)
        rank = tl.where(index == where, place, rank)
        key = tl.where(index == where, _NEVER, key)
    there = rank >= 0
    if RENORMALISE:
        if SOFT:
            chosen = tl.where(there, raw, _NEVER)
            score = tl.where(there, exp(x - _number(tl.max(chosen, 0))), 0.0)
            score = score / tl.sum(score, 0)
        else:
            score = score / (tl.sum(tl.where(there, score, 0.0), 0) + 1e-20)
    tl.store(weights_ptr + token * k + rank, score * scale, mask=there)
    tl.store(ids_ptr + token * k + rank, index.to(ids_ptr.dtype.element_ty), mask=there)


@triton.jit
def route_gradient(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    out_ptr,
    experts,
    k,
    scale,
    grad_row,
    grad_col,
    row_stride,
    col_stride,
    ids_row,
    ids_col,
    SOFT: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < experts
    x = widen(tl.load(logits_ptr + token * row_stride + index * col_stride, mask=inside, other=0.0))
    above = tl.zeros([BLOCK], tl.float32)
    named = tl.zeros([BLOCK], tl.int32)
    for slot in range(k):
        expert = tl.load(ids_ptr + token * ids_row + slot * ids_col)
        grad = widen(tl.load(grad_ptr + token * grad_row + slot * grad_col)) * scale
        above = tl.where(index == expert, above + grad, above)
        named = tl.where(index == expert, 1, named)
    there = inside & (named == 1)
    if SOFT:
        counted = inside
        if RENORMALISE:
            counted = there
        top = _number(tl.max(tl.where(counted, _key(x), _NEVER), 0))
        e = tl.where(counted, exp(x - top), 0.0)
        share = e / tl.sum(e, 0)
        mean = tl.sum(tl.where(there, share * above, 0.0), 0)
        moved = tl.where(counted, share * (above - mean), 0.0)
    else:
        score, rest = sigmoid(x)
        if RENORMALISE:
            divisor = tl.sum(tl.where(there, score, 0.0), 0) + 1e-20
            mean = tl.sum(tl.where(there, score * above, 0.0), 0) / divisor
            above = (above - mean) / divisor
        moved = tl.where(there, score * rest * above, 0.0)
    tl.store(out_ptr + token * experts + index, narrow(moved, out_ptr.dtype.element_ty), mask=inside)


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
    target: Target,
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, k, dtype=ids_dtype, device=logits.device)
    if tokens:
        launch(
            route_token,
            (tokens,),
            logits,
            bias,
            weights,
            ids,
            experts,
            k,
            n_group,
            topk_group,
            float(scale),
            *logits.stride(),
            0 if bias is None else bias.stride(0),
            scoring == "softmax",
            renormalise,
            n_group > 1,
            triton.next_power_of_2(n_group),
            triton.next_power_of_2(experts),
            device=logits.device,
            num_warps=_warps(experts, target),
        )
    return weights, ids


def gate_topk_backward(
    grad: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalise: bool, scale: float, target: Target
) -> Tensor:
    tokens, experts = logits.shape
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if tokens:
        launch(
            route_gradient,
            (tokens,),
            grad,
            logits,
            topk_ids,
            grad_logits,
            experts,
            topk_ids.shape[1],
            float(scale),
            *grad.stride(),
            *logits.stride(),
            *topk_ids.stride(),
            scoring == "softmax",
            renormalise,
            triton.next_power_of_2(experts),
            device=logits.device,
            num_warps=_warps(experts, target),
        )
    return grad_logits


def _warps(experts: int, target: Target) -> int:
    """About eight experts a lane."""
    lanes = experts // (8 * target.wave)
    return 4 if lanes >= 4 else 2 if lanes >= 2 else 1


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, and what no model has."""
    kind = getattr(torch, dtype)

    def call(experts: int, k: int, scoring: str, biased: bool, groups: int, kept: int, again: bool) -> None:
        logits = torch.empty(4096, experts, dtype=kind, device="meta")
        bias = torch.empty(experts, dtype=torch.float32, device="meta") if biased else None
        for ids_dtype in (torch.int64, torch.int32):
            weights, ids = gate_topk(logits, k, scoring, bias, groups, kept, again, 1.0, ids_dtype, target)
            gate_topk_backward(weights, logits, ids, scoring, again, 1.0, target)

    models = [
        (8, 2, "softmax", False, 1, 1, True),
        (128, 8, "softmax", False, 1, 1, True),
        (64, 8, "softmax", False, 1, 1, False),
        (256, 8, "sigmoid", True, 8, 4, True),
        (128, 8, "sigmoid", True, 1, 1, True),
        (67, 5, "sigmoid", False, 1, 1, False),
        (160, 6, "softmax", False, 8, 3, False),
        (1021, 3, "softmax", True, 1, 1, True),
    ]
    return recorded(lambda m=m: call(*m) for m in models)  # type: ignore[misc]
