"""Loops over experts and slots."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.independent import Source


def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat, slots = topk_ids.reshape(-1).tolist(), topk_ids.shape[1]
    source = [slot for expert in range(num_experts) for slot, own in enumerate(flat) if own == expert]
    rows = x.new_zeros(len(flat), x.shape[1])
    for row, slot in enumerate(source):
        rows[row] = x[slot // slots]
    counts = [sum(0 <= own <= expert for own in flat) for expert in range(num_experts)]
    missing = [-1] * (len(flat) - len(source))
    return rows, torch.tensor(counts, dtype=torch.int32), torch.tensor(source + missing, dtype=torch.int32)


def moe_combine(y: Tensor, source: Tensor, topk_weights: Tensor) -> Tensor:
    """A slot's row is the last one that names it."""
    tokens, slots = topk_weights.shape
    owner = {slot: row for row, slot in enumerate(source.tolist())}
    out = torch.zeros(tokens, y.shape[1], dtype=y.dtype)
    for slot in range(tokens * slots):
        if slot in owner:
            out[slot // slots] += topk_weights[slot // slots, slot % slots] * y[owner[slot]]
    return out


SOURCES = {"moe_permute": Source(moe_permute), "moe_combine": Source(moe_combine)}
