"""Gated activations by the logarithm of the sigmoid and the complementary error function."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def sigmoid(z: Tensor) -> Tensor:
    return torch.exp(functional.logsigmoid(z))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate * sigmoid(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """(1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    if approximate == "tanh":
        return gate * sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate * gate * gate)) * up
    return gate * torch.special.erfc(-gate / math.sqrt(2)) / 2 * up


SOURCES = {"silu_mul": Source(silu_mul), "gelu_mul": Source(gelu_mul)}
