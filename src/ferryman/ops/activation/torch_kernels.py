"""Gated activations through PyTorch: two kernels, with the activation rounded between them (declared)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target


def silu_mul(gate: Tensor, up: Tensor, target: Target) -> Tensor:
    return functional.silu(gate.contiguous()).mul_(up)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    d = grad.float()
    grad_gate = torch.ops.aten.silu_backward(d * up.float(), gate.float()).to(gate.dtype)
    return grad_gate.contiguous(), (d * functional.silu(gate.float())).to(gate.dtype).contiguous()


def _gelu(gate: Tensor, approximate: str) -> Tensor:
    """On CPUs with AVX-512, PyTorch's erf-gelu is off by 6 float32 units and gives NaN at +inf; its erf is right."""
    if gate.is_cpu and approximate == "none":
        g = gate.float()
        return (g * torch.special.ndtr(g)).to(gate.dtype)
    return functional.gelu(gate, approximate=approximate)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str, target: Target) -> Tensor:
    return _gelu(gate.contiguous(), approximate).mul_(up)


def gelu_mul_backward(
    grad: Tensor, gate: Tensor, up: Tensor, approximate: str, target: Target
) -> tuple[Tensor, Tensor]:
    d, g = grad.float(), gate.float()
    if gate.is_cpu and approximate == "none":  # PyTorch's is off by 4.8 units near 0, for the same reason
        density = torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
        slope = d * up.float() * (torch.special.ndtr(g) + g * density)
    else:
        slope = torch.ops.aten.gelu_backward(d * up.float(), g, approximate=approximate)
    grad_gate = slope.to(gate.dtype)
    grad_up = (d * _gelu(gate.float(), approximate)).to(gate.dtype)
    return grad_gate.contiguous(), grad_up.contiguous()
