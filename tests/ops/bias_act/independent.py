"""Activations by other functionals of PyTorch, and by formulas that do not cancel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source
from tests.ops.activation.independent import gelu_mul, sigmoid


def tanh(z: Tensor) -> Tensor:
    above, below = torch.expm1(-2 * z.clamp(min=0)), torch.expm1(2 * z.clamp(max=0))
    return torch.where(z > 0, -above / (2 + above), below / (2 + below))


def threshold(z: Tensor) -> Tensor:
    return functional.threshold(z, 0.0, 0.0)


def given(alpha: float | None, otherwise: float) -> float:
    return otherwise if alpha is None else alpha


ACTIVATIONS: dict[str, Callable[[Tensor, float | None], Tensor]] = {
    "gelu": lambda z, alpha: gelu_mul(z, torch.ones_like(z), "none"),
    "gelu_tanh": lambda z, alpha: gelu_mul(z, torch.ones_like(z), "tanh"),
    "quick_gelu": lambda z, alpha: z * sigmoid(1.702 * z),
    "silu": lambda z, alpha: z * sigmoid(z),
    "relu": lambda z, alpha: threshold(z),
    "relu2": lambda z, alpha: threshold(z) * threshold(z),
    "leaky_relu": lambda z, alpha: functional.leaky_relu(z, given(alpha, 0.01)),
    "elu": lambda z, alpha: functional.elu(z, given(alpha, 1.0)),
    "tanh": lambda z, alpha: tanh(z),
    "sigmoid": lambda z, alpha: sigmoid(z),
    "hardswish": lambda z, alpha: z * functional.relu6(z + 3) / 6,
    "softcap": lambda z, alpha: given(alpha, 30.0) * tanh(z / given(alpha, 30.0)),
}


def bias_act(x: Tensor, bias: Tensor | None, activation: str, alpha: float | None) -> Tensor:
    return ACTIVATIONS[activation](x if bias is None else x + bias, alpha)


SOURCES = {"bias_act": Source(bias_act)}
