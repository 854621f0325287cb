"""Error terms of `bias_act` (docs/parity.md), in units of 2^-24.

z is the sum with the bias, whose one rounding moves it by |z| units. A result moves by |f'| times that, a gradient by
|f''| times that. Kinks of relu, leaky_relu and elu lie at 0, whose side a rounded sum keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLUSH = 2.0**-126  # an exp of a large negative argument may flush to zero
ETA = 2.0**-149  # float32 underflows gradually: half a unit a rounding
_FAR = 1e40  # stands for infinity where a term is zero times it; nothing in a storage dtype is larger
_QUICK = 1.702
_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_EDGE = 2.0**-20  # how far from a kink of hardswish a rounded sum may lie on its other side

Terms = dict[str, Tensor]


def _finite(x: Tensor) -> Tensor:
    return x.clamp(-_FAR, _FAR)


def _normal(z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(F, F', |argument of F's function|) where gelu is z F(z)."""
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z * 0.5**0.5)), torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), z.abs()
    argument = _ROOT * (z + _CUBIC * z**3)
    t = torch.tanh(argument)
    return 0.5 * (1 + t), 0.5 * (1 - t * t) * _ROOT * (1 + 3 * _CUBIC * z * z), argument.abs()


def _swish(z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """(a, sigmoid(a), units of error of the sigmoid, scale): exp's argument is rounded twice, a scaled one 4 times."""
    scale = _QUICK if activation == "quick_gelu" else 1.0
    a = scale * z
    roundings = 4 if activation == "quick_gelu" else 2
    return a, torch.sigmoid(a), roundings * a.abs() * torch.sigmoid(-a) + 8, scale


def forward(
    x: Tensor, bias: Tensor | None, activation: str, alpha: float, outputs: tuple[Tensor, ...]
) -> tuple[Terms, ...]:
    """The error terms of `bias_act`."""
    z = _finite(x if bias is None else x + bias)
    moved = torch.zeros_like(z) if bias is None else z.abs()
    y = outputs[0].abs()
    error, absolute = _value(z, moved, y, activation, abs(alpha))
    # the sum of two subnormal numbers is exact
    return ({"accumulate": error, "absolute": absolute},)


def _value(z: Tensor, moved: Tensor, y: Tensor, activation: str, alpha: float) -> tuple[Tensor, Tensor]:
    eta = torch.full_like(z, ETA)
    if activation in ("gelu", "gelu_tanh"):
        # 1 + tanh, or 1 + erf, cancels for negative z, so that F's error is absolute: 4 units, and its argument's 4
        factor, steep, argument = _normal(z, activation)
        error = z.abs() * (4 + 4 * argument * steep) + 8 * y
        return error + (factor + z * steep).abs() * moved, 2 * eta
    if activation in ("silu", "quick_gelu"):
        a, s, units, _ = _swish(z, activation)
        return y * units + (s * (1 + a * (1 - s))).abs() * moved, FLUSH * z.abs() + eta
    if activation == "relu":
        return torch.where(z > 0, moved, 0.0), eta
    if activation == "relu2":
        return torch.where(z > 0, 2 * z * moved + 2 * y, 0.0), eta
    if activation == "leaky_relu":  # alpha itself is rounded, and the product
        return torch.where(z > 0, moved, 2 * y + alpha * moved), eta * (1 + alpha)
    if activation == "elu":  # expm1 within 12 units
        return torch.where(z > 0, moved, 14 * y + alpha * torch.exp(z.clamp(max=0)) * moved), 2 * eta * (1 + alpha)
    if activation == "tanh":
        return 8 * y + (1 - torch.tanh(z).square()) * moved, eta
    if activation == "sigmoid":
        _, s, units, _ = _swish(z, activation)
        return y * units + s * (1 - s) * moved, eta + FLUSH
    if activation == "softcap":
        # z / alpha is off by 2 units of the last place and alpha's own rounding, tanh by 8; two products
        steep = 1 - torch.tanh(z / alpha).square()
        return 10 * y + steep * (5 * z.abs() + moved), 2 * eta * (1 + alpha)
    # hardswish: z + 3, a sixth, two products; the slope is 1.5 at most
    inside = z.abs() < 3 + _EDGE
    return torch.where(inside, 6 * y + 1.5 * moved, 2 * y + moved * (z > 0)), 2 * eta * (1 + z.abs())


def backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, alpha: float, outputs: tuple[Tensor, ...]
) -> tuple[Terms, ...]:
    """The error terms of `bias_act_backward`: a column's are those of its elements, and of their sum."""
    z = _finite(x if bias is None else x + bias)
    moved = torch.zeros_like(z) if bias is None else z.abs()
    d = _finite(grad.abs())
    g = _finite(outputs[0].abs())
    error, absolute = _gradient(d, z, moved, g, activation, abs(alpha))
    absolute = absolute + ETA * (1 + d)
    first = {"accumulate": error, "absolute": absolute}
    if bias is None:
        nothing = torch.zeros_like(outputs[1])
        return first, {"accumulate": nothing, "absolute": nothing}
    rows = math.prod(x.shape[:-1])
    e, a, total = (t.reshape(rows, x.shape[-1]).sum(0) for t in (error, absolute, g))
    return first, {"accumulate": e + 6 * math.sqrt(rows) * total, "absolute": a}


def _gradient(d: Tensor, z: Tensor, moved: Tensor, g: Tensor, activation: str, alpha: float) -> tuple[Tensor, Tensor]:
    size = z.abs()
    if activation in ("gelu", "gelu_tanh"):
        # F' = (1 - t^2) z'/2 cancels as tanh saturates: 3 units of z'/2; beyond |z'| = 10 it may be lost whole
        _, steep, argument = _normal(z, activation)
        bend = (z * steep).abs()
        factor = 4 + 4 * argument * steep + bend * (4 * argument * (1 + argument) + 12)
        if activation == "gelu_tanh":
            steepness = _ROOT * (1 + 3 * _CUBIC * z * z)
            factor = factor + size * torch.where(argument < 10, 3 * steepness, steep / 2.0**-24)
        # |f''| is at most 1.2, and nothing past 8
        return d * (factor + torch.where(size < 8, 1.2 * moved, 0.0)) + 2 * g, FLUSH * (1 + d * size)
    if activation in ("silu", "quick_gelu"):
        a, s, units, scale = _swish(z, activation)
        a, rest = a.abs(), 1 - s
        terms = s * (1 + a * rest) * (units + (4 if scale != 1 else 2) * a * s)
        bend = scale * s * rest * (2 + a)
        return d * (terms + bend * moved), FLUSH * (1 + a) * d + ETA * (1 + d) * (1 + a)
    nothing = torch.zeros_like(z)
    if activation == "relu":
        return nothing, nothing
    if activation == "relu2":
        return torch.where(z > 0, 2 * g + 2 * d * moved, 0.0), torch.where(z > 0, 2 * ETA * (1 + d), 0.0)
    if activation == "leaky_relu":
        return torch.where(z > 0, 0.0, 2 * g), nothing
    if activation == "elu":
        return torch.where(z > 0, 0.0, g * (2 * size + 8 + moved)), (FLUSH + ETA) * alpha * (1 + d)
    if activation == "tanh":  # 1 - t^2 cancels: t is off by 8 units
        t = torch.tanh(z).abs()
        return d * (17 * t * t + 2 * t * (1 - t * t) * moved) + 4 * g, nothing
    if activation == "softcap":
        t = torch.tanh(z / alpha).abs()
        return d * (17 * t * t + 2 * t * (1 - t * t) * (5 * size + moved) / alpha) + 4 * g, nothing
    if activation == "sigmoid":  # 1 - s cancels
        _, s, units, _ = _swish(z, activation)
        return d * s * (units + (1 - s) * moved) + 4 * g, FLUSH * d
    inside = size < 3 + _EDGE
    edge = (size - 3).abs() < _EDGE  # the slope leaps by a half
    error = torch.where(inside, d * (size + 2 + moved / 3) + 2 * g, 0.0)
    return error, torch.where(edge, 0.5 * d, 0.0) * (moved > 0)
