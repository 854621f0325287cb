"""Gated activations and rotary embedding by other formulas, and in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.selftest.alternatives.common import Rights
from ferryman.porting.selftest.alternatives.norms import array, tensor

RIGHT = Rights()
_ROOT = math.sqrt(2 / math.pi)


# ---------------------------------------------------------------------------------------------------------------- silu


@RIGHT.of("silu_mul")
def silu_by_exp(gate: Tensor, up: Tensor) -> Tensor:
    """g / (1 + exp(-g)); -inf is NaN, as -inf * 0 is"""
    g = gate.float()
    return g * (1 / (1 + torch.exp(-g))) * up.float()


@RIGHT.of("silu_mul")
def silu_by_powers_of_two(gate: Tensor, up: Tensor) -> Tensor:
    """exp2 of a scaled argument, always of the smaller side"""
    g = gate.float()
    e = torch.exp2(-g.abs() * 1.4426950408889634)
    return g * (torch.where(g < 0, e, 1.0) / (1 + e)) * up.float()


@RIGHT.of("silu_mul", roundings=("activation",))
def silu_rounded_as_declared(gate: Tensor, up: Tensor) -> Tensor:
    """the activation rounded, and declared"""
    g = gate.float()
    return (g * torch.sigmoid(g)).to(gate.dtype).float() * up.float()


@RIGHT.of("silu_mul")
def numpy_silu(gate: Tensor, up: Tensor) -> Tensor:
    """NumPy, float64"""
    with np.errstate(all="ignore"):
        g = array(gate)
        return tensor(g * (1 / (1 + np.exp(-g))) * array(up), gate)


def _silu_gradient(grad: Tensor, gate: Tensor, up: Tensor, s: Tensor, rest: Tensor) -> Any:
    d, g, u = grad.float(), gate.float(), up.float()
    return d * u * (s * (1 + g * rest)), d * (g * s)


@RIGHT.of("silu_mul_backward")
def silu_gradient_by_exp2(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    """both sides of the sigmoid from one exp2"""
    g = gate.float()
    e = torch.exp2(-g.abs() * 1.4426950408889634)
    small, large = e / (1 + e), 1 / (1 + e)
    return _silu_gradient(grad, gate, up, torch.where(g < 0, small, large), torch.where(g < 0, large, small))


@RIGHT.of("silu_mul_backward")
def silu_gradient_by_two_sigmoids(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    """sigmoid(g) and sigmoid(-g)"""
    g = gate.float()
    return _silu_gradient(grad, gate, up, torch.sigmoid(g), torch.sigmoid(-g))


@RIGHT.of("silu_mul_backward")
def silu_gradient_expanded(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    """s + g s (1 - s)"""
    d, g, u = grad.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    return d * u * (s + g * (s * torch.sigmoid(-g))), d * (g * s)


@RIGHT.of("silu_mul_backward")
def numpy_silu_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    """NumPy, float64"""
    with np.errstate(all="ignore"):
        d, g, u = array(grad), array(gate), array(up)
        s = 1 / (1 + np.exp(-g))
        return tensor(d * u * s * (1 + g * (1 - s)), gate), tensor(d * g * s, gate)


# ---------------------------------------------------------------------------------------------------------------- gelu


def _gelu_factor(g: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(F, F') without cancellation in either tail."""
    if approximate == "none":
        return 0.5 * torch.special.erfc(-g * 0.5**0.5), torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    z = 2 * _ROOT * (g + 0.044715 * g * g * g)
    s = torch.sigmoid(z)
    return s, s * torch.sigmoid(-z) * (2 * _ROOT * (1 + 3 * 0.044715 * g * g))


@RIGHT.of("gelu_mul")
def gelu_by_the_other_functions(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """sigmoid(2 z) for (1 + tanh z) / 2, erfc for 1 + erf"""
    g = gate.float()
    return g * _gelu_factor(g, approximate)[0] * up.float()


@RIGHT.of("gelu_mul", roundings=("activation",))
def gelu_of_the_library(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """torch.nn.functional.gelu for tanh, the normal distribution for erf; the activation rounded, and declared"""
    g = gate.float()
    y = functional.gelu(g, approximate="tanh") if approximate == "tanh" else g * torch.special.ndtr(g)
    return y.to(gate.dtype).float() * up.float()


@RIGHT.of("gelu_mul")
def gelu_as_written(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """the formula in float32"""
    g = gate.float()
    if approximate == "none":
        return 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * up.float()
    return 0.5 * g * (1 + torch.tanh(_ROOT * (g + 0.044715 * g**3))) * up.float()


@RIGHT.of("gelu_mul")
def gelu_up_first(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """float64 factors, float32 products in another order"""
    g, u = gate.float(), up.float()
    return u * (g * _gelu_factor(gate.double(), approximate)[0].float())


@RIGHT.of("gelu_mul_backward")
def gelu_gradient_by_the_other_functions(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> Any:
    """sigmoid(2 z) for (1 + tanh z) / 2, erfc for 1 + erf"""
    d, g, u = grad.float(), gate.float(), up.float()
    f, slope = _gelu_factor(g, approximate)
    return d * u * (f + g * slope), d * (g * f)


@RIGHT.of("gelu_mul_backward")
def gelu_gradient_in_another_order(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> Any:
    """(f + g f') first, then the gradient, then up"""
    d, g, u = grad.float(), gate.float(), up.float()
    f, slope = _gelu_factor(g, approximate)
    return (f + slope * g) * d * u, f * d * g


@RIGHT.of("gelu_mul_backward")
def gelu_gradient_as_written(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> Any:
    """the formula in float32"""
    d, g, u = grad.float(), gate.float(), up.float()
    if approximate == "none":
        f = 0.5 * (1 + torch.erf(g / math.sqrt(2)))
        slope = torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
    else:
        t = torch.tanh(_ROOT * (g + 0.044715 * g**3))
        f, slope = 0.5 * (1 + t), 0.5 * (1 - t * t) * _ROOT * (1 + 3 * 0.044715 * g * g)
    return d * u * (f + g * slope), d * (g * f)


@RIGHT.of("gelu_mul_backward")
def gelu_gradient_with_wide_factors(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> Any:
    """the factors in float64, the products in float32"""
    d, g, u = grad.float(), gate.float(), up.float()
    f, slope = _gelu_factor(gate.double(), approximate)
    return d * u * (f + gate.double() * slope).float(), d * (g * f.float())


# ---------------------------------------------------------------------------------------------------------------- rope


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _joined(a: Tensor, b: Tensor, rest: Tensor, interleaved: bool) -> Tensor:
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned, rest.to(turned.dtype)), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, how: str) -> Tensor:
    width = cos.shape[-1]
    kind = torch.float64 if how == "wide" else torch.float32
    (a, b), (ca, cb), (sa, sb) = (
        _pairs(t, interleaved) for t in (x[..., :width].to(kind), cos.unsqueeze(1).to(kind), sin.unsqueeze(1).to(kind))
    )
    if back:
        sa, sb = -sb, -sa
    if how == "fused":
        first, second = torch.addcmul(a * ca, b, sa, value=-1), torch.addcmul(b * cb, a, sb)
    elif how == "rotated":
        first, second = a * ca + (-b) * sa, b * cb + a * sb
    elif how == "matrix":
        table = torch.stack((torch.stack((ca, -sa), -1), torch.stack((sb, cb), -1)), -2)
        both = (table * torch.stack((a, b), -1).unsqueeze(-2)).sum(-1)
        first, second = both[..., 0], both[..., 1]
    else:
        first, second = a * ca - b * sa, a * sb + b * cb
    return _joined(first, second, x[..., width:], interleaved)


for _how, _note in (
    ("fused", "multiply-adds"), ("rotated", "x cos + rotate_half(x) sin in float32, as model code writes it"),
    ("matrix", "2 x 2 rotation matrices"), ("wide", "float64 tables and products"),
):  # fmt: skip

    def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, how: str = _how) -> Any:
        return tuple(_turned(x, cos, sin, interleaved, False, how) for x in (q, k))

    def _back(gq: Tensor, gk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, how: str = _how) -> Any:
        return tuple(_turned(x, cos, sin, interleaved, True, how) for x in (gq, gk))

    _rope.__name__ = _back.__name__ = f"turned_{_how}"
    _rope.__doc__ = _back.__doc__ = _note
    RIGHT.of("rope")(_rope)
    RIGHT.of("rope_")(_rope)
    RIGHT.of("rope_backward")(_back)
