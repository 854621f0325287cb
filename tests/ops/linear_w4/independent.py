"""Python integers, one weight after the other, then PyTorch's linear."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def linear_w4(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> Tensor:
    rows = []
    for line, factors in zip(weight.tolist(), scales.tolist(), strict=True):
        values = [nibble for byte in line for nibble in (byte % 16, byte // 16)]
        rows.append([(value - 8) * factors[i // group] for i, value in enumerate(values)])
    matrix = torch.tensor(rows, dtype=torch.float64).reshape(weight.shape[0], x.shape[-1])
    return functional.linear(x, matrix, bias)


SOURCES = {"linear_w4": Source(linear_w4)}
