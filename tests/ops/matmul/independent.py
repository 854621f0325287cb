"""A product of matrices as a sum of products."""

from __future__ import annotations

from torch import Tensor

from tests.independent import Source


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (x.unsqueeze(-2) * weight).sum(-1)
    return y if bias is None else y + bias


SOURCES = {"linear": Source(linear)}
