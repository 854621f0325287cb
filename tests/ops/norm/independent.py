"""PyTorch's own norms."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Tensor:
    """``cast`` rounds to the dtype of x: nothing in float64."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool) -> tuple[Tensor, Tensor]:
    s = x + residual
    return rms_norm(s, weight, eps, cast), s


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return layer_norm(s, weight, bias, eps), s


SOURCES = {
    "rms_norm": Source(rms_norm),
    "add_rms_norm": Source(add_rms_norm),
    "layer_norm": Source(layer_norm),
    "add_layer_norm": Source(add_layer_norm),
}
