"""`bias_act` through PyTorch: its own functional on x, or on a float32 sum with the bias."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target

_SLOPES = {"leaky_relu": 0.01, "elu": 1.0}


def _gelu(z: Tensor) -> Tensor:
    """On CPUs with AVX-512, PyTorch's erf-gelu is off by 6 float32 units and gives NaN at +inf; its erf is right."""
    return z * torch.special.ndtr(z) if z.is_cpu else functional.gelu(z)


def _activated(z: Tensor, activation: str, alpha: float) -> Tensor:
    """PyTorch's functional computes 16-bit values in float32 and rounds once; two kernels would round twice."""
    if activation == "gelu":
        return _gelu(z)
    if activation == "gelu_tanh":
        return functional.gelu(z, approximate="tanh")
    if activation == "quick_gelu":
        return z * torch.sigmoid(1.702 * z)
    if activation == "relu2":
        return functional.relu(z).square()
    if activation == "leaky_relu":
        return functional.leaky_relu(z, alpha)
    if activation == "elu":
        return functional.elu(z, alpha)
    if activation == "softcap":
        return alpha * torch.tanh(z / alpha)
    if activation == "hardswish":
        return z * (functional.relu6(z + 3) * (1 / 6))  # functional.hardswish multiplies first, and overflows
    y: Tensor = getattr(torch, activation)(z) if activation != "silu" else functional.silu(z)
    return y


# of several kernels: 16 bits would round between them
_SEVERAL = ("quick_gelu", "hardswish", "softcap")


def _one_pass(z: Tensor, activation: str) -> bool:
    return activation not in _SEVERAL and not (activation == "gelu" and z.is_cpu)


def _alpha(activation: str, alpha: float | None) -> float:
    return _SLOPES.get(activation, 0.0) if alpha is None else alpha


def bias_act(x: Tensor, bias: Tensor | None, activation: str, alpha: float | None, target: Target) -> Tensor:
    x = x.contiguous()
    if bias is not None:
        z = x.float() + bias
    else:
        z = x if _one_pass(x, activation) else x.float()
    return _activated(z, activation, _alpha(activation, alpha)).to(x.dtype).contiguous()


_ONE_KERNEL: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": torch.relu,
}


def bias_act_with_gradient(
    x: Tensor, bias: Tensor | None, activation: str, alpha: float | None, target: Target
) -> Tensor:
    """`bias_act` without a bias on an accelerator, as autograd knows it: one kernel of PyTorch's."""
    kernel, x = _ONE_KERNEL.get(activation), x.contiguous()
    return _activated(x, activation, _alpha(activation, alpha)) if kernel is None else kernel(x)


def _gelu_gradient(d: Tensor, z: Tensor) -> Tensor:
    if not z.is_cpu:
        return torch.ops.aten.gelu_backward(d, z)
    density = torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))  # PyTorch's is off near 0, for the same reason
    return d * (torch.special.ndtr(z) + z * density)


def _gradient(d: Tensor, z: Tensor, activation: str, alpha: float) -> Tensor:
    aten = torch.ops.aten
    if activation == "gelu":
        return _gelu_gradient(d, z)
    if activation == "gelu_tanh":
        return aten.gelu_backward(d, z, approximate="tanh")
    if activation == "quick_gelu":
        s = torch.sigmoid(1.702 * z)
        return d * (s * (1 + 1.702 * z * (1 - s)))
    if activation == "silu":
        return aten.silu_backward(d, z)
    if activation == "relu":
        return aten.threshold_backward(d, z, 0)
    if activation == "relu2":
        return aten.threshold_backward(2 * z * d, z, 0)
    if activation == "leaky_relu":
        return aten.leaky_relu_backward(d, z, alpha, False)
    if activation == "elu":
        # at NaN, aten's elu_backward and hardswish_backward depend on whether a vector holds it
        return torch.where(z > 0, d, d * (alpha * torch.exp(z.clamp(max=0.0))))
    if activation == "tanh":
        return aten.tanh_backward(d, torch.tanh(z))
    if activation == "softcap":
        return aten.tanh_backward(d, torch.tanh(z / alpha))
    if activation == "sigmoid":
        return aten.sigmoid_backward(d, torch.sigmoid(z))
    return torch.where(z <= -3, 0.0, torch.where(z >= 3, d, d * (z * (1 / 3) + 0.5)))


def bias_act_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, alpha: float | None, target: Target
) -> tuple[Tensor, Tensor]:
    z = x.contiguous().float()
    if bias is not None:
        z = z + bias
    g = _gradient(grad.float(), z, activation, _alpha(activation, alpha))
    grad_x = g.to(x.dtype).contiguous()
    if bias is None:
        return grad_x, x.new_empty(0)
    return grad_x, g.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0).to(bias.dtype)
