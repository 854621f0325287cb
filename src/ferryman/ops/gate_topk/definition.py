"""Routing tokens to experts: meaning and costs. Error terms stand in bounds.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.gate_topk import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide

SCORINGS = ("softmax", "sigmoid")
IDS = (torch.int64, torch.int32)


def _check_rows(op: str, logits: Tensor, scoring: str) -> None:
    checks.floating(op, logits=logits)
    if logits.dim() != 2:
        raise ArgumentError(op, "logits.dim()", logits.dim(), "2: tokens and experts")
    if logits.shape[1] < 1:
        raise ArgumentError(op, "logits.shape[1]", logits.shape[1], "at least one expert")
    if scoring not in SCORINGS:
        raise ArgumentError(op, "scoring", repr(scoring), ", ".join(map(repr, SCORINGS)))


def _check(
    logits: Tensor,
    k: int,
    scoring: str,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    renormalise: bool,
    scale: float,
    ids_dtype: torch.dtype,
) -> None:
    op = "gate_topk"
    checks.one_device(op, logits=logits, bias=bias)
    _check_rows(op, logits, scoring)
    checks.floating(op, bias=bias)
    experts = logits.shape[1]
    checks.shaped(op, "bias", bias, experts)
    if n_group < 1 or experts % n_group:
        raise ArgumentError(op, "n_group", n_group, f"a divisor of {experts}, the experts")
    if n_group > 1 and scoring == "sigmoid" and experts // n_group < 2:
        raise ArgumentError(op, "n_group", n_group, f"groups of two or more of {experts} experts")
    if not 1 <= topk_group <= n_group:
        raise ArgumentError(op, "topk_group", topk_group, f"1 to {n_group}, the groups")
    if not 1 <= k <= experts // n_group * topk_group:
        raise ArgumentError(op, "k", k, f"1 to {experts // n_group * topk_group}, the experts that may be chosen")
    if ids_dtype not in IDS:
        raise ArgumentError(op, "ids_dtype", ids_dtype, "torch.int64 or torch.int32")


def _scores_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _meta(logits: Tensor, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=_scores_dtype(logits)), logits.new_empty(shape, dtype=rest[-1])


def _cost(logits: Tensor, k: int, *rest: Any) -> Cost:
    """An exponential, a sum and k comparisons an expert."""
    written = logits.shape[0] * k * (4 + rest[-1].itemsize)
    return Cost(float(logits.numel() * (4 + k)), float(logits.numel() * logits.element_size() + written))


@primitive(
    outputs=("topk_weights", "topk_ids"),
    check=_check,
    meta=_meta,
    cost=_cost,
    limits=Limits(
        bound=bounds.forward,
        batch={"logits": 1, "topk_weights": 1, "topk_ids": 1},
        reduction=lambda logits, *rest: logits.shape[1],
    ),
    gradient=Gradient(backward="gate_topk_backward", grads=("logits",), nondifferentiable=("topk_ids",)),
)
def gate_topk(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    ids_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """A token's k experts, the best first, and their weights: ``softmax(logits)`` or ``sigmoid(logits)``, times scale.

    logits: (T, E), float32, float16 or bfloat16, any strides. bias: (E,) of any of these, or None. It is added to the
    score for the choice alone; weights are without it, and it has no gradient. Of equal experts the lowest index wins.
    Without a bias experts are compared by logits, which no rounding moves; NaN is more than any number.
    n_group: E in so many groups of neighbours, of which the best topk_group may be chosen from. A group's score is its
    best expert's with softmax, the sum of its two best ones' with sigmoid, the bias in it.
    renormalise: divided by the sum of the chosen ones' (by sigmoid: and 1e-20). ids_dtype: int64 or int32.
    Returns topk_weights (T, k) in float32 and topk_ids (T, k), contiguous. Float32 arithmetic. Where a score with a
    bias, or a sum of two, is another one's within its rounding, either choice is right. Whatever logits hold, a
    token's ids are k experts. topk_ids have no gradient.
    Raises ArgumentError. Source: arXiv:2401.04088 (Mixtral), arXiv:2412.19437 (DeepSeek-V3).
    """
    x = wide(logits)
    added = None if bias is None else bias.to(x.dtype)
    ids = bounds.chosen(x, k, scoring, added, n_group, topk_group)
    return bounds.shares(x, ids, scoring, renormalise) * scale, ids.to(ids_dtype)


def _check_backward(
    grad: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalise: bool, scale: float
) -> None:
    op = "gate_topk_backward"
    checks.one_device(op, grad=grad, logits=logits, topk_ids=topk_ids)
    _check_rows(op, logits, scoring)
    checks.floating(op, grad=grad)
    if topk_ids.dtype not in IDS:
        raise ArgumentError(op, "topk_ids.dtype", topk_ids.dtype, "torch.int64 or torch.int32")
    if topk_ids.dim() != 2 or len(topk_ids) != len(logits):
        raise ArgumentError(op, "topk_ids.shape", tuple(topk_ids.shape), f"({len(logits)}, k)")
    checks.shaped(op, "grad", grad, *topk_ids.shape)


@primitive(
    outputs=("grad_logits",),
    check=_check_backward,
    meta=lambda grad, logits, *rest: logits.new_empty(logits.shape),
    cost=lambda grad, logits, *rest: Cost(
        8.0 * logits.numel(), float(2 * logits.numel() * logits.element_size() + grad.numel() * 12)
    ),
    limits=Limits(
        bound=bounds.backward,
        batch={"grad": 1, "logits": 1, "topk_ids": 1, "grad_logits": 1},
        reduction=lambda grad, logits, *rest: logits.shape[1],
    ),
    dtypes={"topk_ids": IDS},
)
def gate_topk_backward(
    grad: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalise: bool, scale: float
) -> Tensor:
    """Gradient of `gate_topk`'s weights for the logits; the choice itself has none. An expert that is renormalised
    away, or whose score is a sigmoid, has gradient 0 where it was not chosen. ids that are no expert's count nothing,
    an expert that is named twice takes the sum of its gradients. Float32 arithmetic, one rounding."""
    moved, _ = bounds.gradient(wide(grad).to(wide(logits).dtype), wide(logits), topk_ids, scoring, renormalise, scale)
    return moved.to(logits.dtype)
