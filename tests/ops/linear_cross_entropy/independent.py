"""PyTorch's own loss of whole logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tests.independent import Source
from tests.ops.softmax.independent import cross_entropy


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    loss, lse = cross_entropy(functional.linear(x, weight, bias), target, ignore_index, smoothing)
    if z_loss:
        loss = loss + z_loss * lse[target != ignore_index].square().mean()
    return loss, lse


SOURCES = {"linear_cross_entropy": Source(linear_cross_entropy)}
