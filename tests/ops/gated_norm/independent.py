"""A gated RMS norm, group after group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.independent import Source


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    size: int | None,
    first: bool,
    cast: bool = False,
    activation: str = "silu",
    scale: Callable[[Tensor, float], Tensor] = lambda h, eps: h / (h.pow(2).mean(-1, keepdim=True) + eps).sqrt(),
) -> Tensor:
    """``cast`` rounds to the dtype of x: nothing in float64."""
    a = gate * torch.sigmoid(gate) if activation == "silu" else torch.sigmoid(gate)
    h = x if first else x * a
    y = torch.cat([scale(part, eps) for part in h.split(size or max(h.shape[-1], 1), -1)], -1)
    y = y if weight is None else y * weight
    return y * a if first else y


SOURCES = {"gated_rms_norm": Source(gated_rms_norm)}
