"""Routing token after token, by Python's sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.independent import Source
from tests.ops.activation.independent import sigmoid
from tests.ops.softmax.independent import softmax


def best(values: list[float], allowed: list[int]) -> list[int]:
    """The largest first, of equal ones the lowest index, NaN before all."""
    return sorted(allowed, key=lambda i: (0 if math.isnan(values[i]) else 1, -values[i], i))


def of_group(values: list[float], summed: int) -> float:
    return sum(values[i] for i in best(values, list(range(len(values))))[:summed])


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
) -> tuple[Tensor, Tensor]:
    scores = softmax(logits) if scoring == "softmax" else sigmoid(logits)
    with_bias = scores if bias is None else scores + bias
    compared = (logits if bias is None else with_bias).tolist()
    of_groups = compared if scoring == "softmax" else with_bias.tolist()
    size, ids = logits.shape[1] // n_group, []
    for own, grouped in zip(compared, of_groups, strict=True):
        sums = [of_group(grouped[g * size :][:size], 1 if scoring == "softmax" else 2) for g in range(n_group)]
        groups = best(sums, list(range(n_group)))[:topk_group]
        ids.append(best(own, [e for e in range(len(own)) if e // size in groups])[:k])
    chosen = torch.tensor(ids, dtype=torch.int64).reshape(len(logits), k)
    weights = scores.gather(1, chosen)
    if renormalise and scoring == "softmax":
        weights = softmax(logits.gather(1, chosen))
    elif renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen.to(ids_dtype)


SOURCES = {"gate_topk": Source(gate_topk)}
