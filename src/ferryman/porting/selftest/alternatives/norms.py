"""Norms with other orders of summation, other formulas, and in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.selftest.alternatives.common import Rights

RIGHT = Rights()


def array(x: Tensor) -> Any:
    """A NumPy array of float64, whatever the device and dtype."""
    return x.detach().cpu().double().numpy()


def tensor(x: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(x, order="C")).to(like.device)


def chunked(x: Tensor, size: int) -> Tensor:
    """Sums over the last dimension: ``size`` neighbours first, then chunk after chunk."""
    total = torch.zeros(*x.shape[:-1], 1, device=x.device)
    for part in x.split(size, -1):
        total = total + part.sum(-1, keepdim=True)
    return total


def tree(x: Tensor) -> Tensor:
    """Sums over the last dimension: the second half is added to the first until one is left."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x[..., half:]
        x = torch.cat((x[..., : rest.shape[-1]] + rest, x[..., rest.shape[-1] : half]), -1)
    return x if x.shape[-1] else torch.zeros(*x.shape[:-1], 1, device=x.device)


def strided(x: Tensor, lanes: int = 32) -> Tensor:
    """Sums over the last dimension as a wave does: lane i takes every 32nd, then the lanes meet."""
    padded = functional.pad(x, (0, -x.shape[-1] % lanes))
    return tree(padded.unflatten(-1, (-1, lanes)).sum(-2)) if x.shape[-1] else chunked(x, lanes)


def _weighted(h: Tensor, weight: Tensor | None, like: Tensor, cast: bool) -> Tensor:
    if weight is None:
        return h
    return (h.to(like.dtype).float() if cast else h) * weight.float()


def _rms(x: Tensor, weight: Tensor | None, eps: float, cast: bool, total: Tensor) -> Tensor:
    scale = torch.rsqrt(total / max(x.shape[-1], 1) + eps)
    return _weighted(x.float() * scale, weight, x, cast)


@RIGHT.of("rms_norm")
def squares_in_chunks_of_16(x: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Tensor:
    """the squares in chunks of 16"""
    return _rms(x, weight, eps, cast, chunked(x.float().square(), 16))


@RIGHT.of("rms_norm")
def squares_by_a_tree(x: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Tensor:
    """the squares by a tree"""
    return _rms(x, weight, eps, cast, tree(x.float().square()))


@RIGHT.of("rms_norm")
def squares_by_lanes(x: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Tensor:
    """the squares over 32 lanes, 1 / sqrt, the weight scaled first"""
    root = 1 / torch.sqrt(strided(x.float().square()) / max(x.shape[-1], 1) + eps)
    if weight is None or cast:
        return _weighted(x.float() * root, weight, x, cast)
    return x.float() * (weight.float() * root)


@RIGHT.of("rms_norm")
def numpy_rms(x: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Tensor:
    """NumPy, float64"""
    h = array(x)
    y = h / np.sqrt(np.mean(h * h, -1, keepdims=True) + eps)
    return tensor(y if weight is None else y * array(weight), x)


def _added(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(x.dtype)


@RIGHT.of("add_rms_norm")
def sum_then_chunks_of_8(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Any:
    """the squares of the rounded sum in chunks of 8"""
    s = _added(x, residual)
    return _rms(s, weight, eps, cast, chunked(s.float().square(), 8)), s


@RIGHT.of("add_rms_norm")
def sum_then_tree(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Any:
    """the squares of the rounded sum by a tree"""
    s = _added(x, residual)
    return _rms(s, weight, eps, cast, tree(s.float().square())), s


@RIGHT.of("add_rms_norm")
def sum_then_library(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Any:
    """PyTorch's rms_norm in float32"""
    s = x + residual
    h = functional.rms_norm(s.float(), s.shape[-1:], None, eps) if s.numel() else s.float()
    return _weighted(h, weight, x, cast), s


@RIGHT.of("add_rms_norm")
def numpy_add_rms(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool) -> Any:
    """NumPy, float64, of the rounded sum"""
    s = _added(x, residual)
    return numpy_rms(s, weight, eps, cast), s


def _rms_gradient(g: Tensor, x: Tensor, weight: Tensor | None, eps: float, add: Any) -> tuple[Tensor, Tensor]:
    n = max(x.shape[-1], 1)
    h, d = x.float(), g.float()
    r = torch.rsqrt(add(h.square()) / n + eps)
    hat = h * r
    s = d if weight is None else d * weight.float()
    gx = r * (s - hat * (add(s * hat) / n))
    if weight is None:
        return gx, x.new_empty(0)
    products = (d * hat).reshape(-1, x.shape[-1]) if x.numel() else d.new_zeros(0, x.shape[-1])
    return gx, add(products.T)[:, 0]


def _add_gradient(gy: Tensor, gr: Tensor, s: Tensor, weight: Tensor | None, eps: float, add: Any) -> Any:
    gx, gw = _rms_gradient(gy, s, weight, eps, add)
    return gx + gr.float(), gw


for _name, _add in (("chunks_of_16", lambda x: chunked(x, 16)), ("by_a_tree", tree), ("by_lanes", strided)):

    def _gradient(g: Tensor, x: Tensor, weight: Tensor | None, eps: float, add: Any = _add) -> Any:
        return _rms_gradient(g, x, weight, eps, add)

    def _added_gradient(gy: Tensor, gr: Tensor, s: Tensor, w: Tensor | None, eps: float, add: Any = _add) -> Any:
        return _add_gradient(gy, gr, s, w, eps, add)

    _gradient.__name__ = _added_gradient.__name__ = _name
    _gradient.__doc__ = _added_gradient.__doc__ = f"every sum {_name.replace('_', ' ')}"
    RIGHT.of("rms_norm_backward")(_gradient)
    RIGHT.of("add_rms_norm_backward")(_added_gradient)


@RIGHT.of("rms_norm_backward")
def rms_by_autograd(g: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Any:
    """autograd of the composed forward in float64 (in float32 the root's own gradient, r^3, underflows for large x)"""
    h = x.double().detach().requires_grad_(True)
    w = None if weight is None else weight.double().detach().requires_grad_(True)
    with torch.enable_grad():
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        y = y if w is None else y * w
    if w is None:
        return torch.autograd.grad(y, h, g.double())[0], x.new_empty(0)
    return torch.autograd.grad(y, (h, w), g.double())


# ---------------------------------------------------------------------------------------------------------- layer norm


def _layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, add: Any) -> Tensor:
    n, h = max(x.shape[-1], 1), x.float()
    d = h - add(h) / n
    y = d * torch.rsqrt(add(d.square()) / n + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


@RIGHT.of("layer_norm")
def layer_in_chunks_of_16(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """both sums in chunks of 16"""
    return _layer(x, weight, bias, eps, lambda t: chunked(t, 16))


@RIGHT.of("layer_norm")
def layer_by_a_tree(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """both sums by a tree"""
    return _layer(x, weight, bias, eps, tree)


@RIGHT.of("layer_norm")
def layer_by_var_mean(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch.var_mean in float32 (Welford)"""
    if x.numel() == 0:
        return x
    variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    y = (x.float() - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


@RIGHT.of("layer_norm")
def numpy_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """NumPy, float64"""
    h = array(x)
    y = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + eps)
    y = y if weight is None else y * array(weight)
    return tensor(y if bias is None else y + array(bias), x)


def _layer_gradient(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, add: Any) -> Any:
    n, h, d = max(x.shape[-1], 1), x.float(), g.float()
    c = h - add(h) / n
    r = torch.rsqrt(add(c.square()) / n + eps)
    hat = c * r
    s = d if w is None else d * w.float()
    gx = r * (s - add(s) / n - hat * (add(s * hat) / n))

    def over_rows(t: Tensor) -> Tensor:
        return add((t.reshape(-1, x.shape[-1]) if x.numel() else t.new_zeros(0, x.shape[-1])).T)[:, 0]

    nothing = x.new_empty(0)
    return gx, nothing if w is None else over_rows(d * hat), nothing if b is None else over_rows(d)


@RIGHT.of("layer_norm_backward")
def layer_gradient_in_chunks(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Any:
    """every sum in chunks of 16"""
    return _layer_gradient(g, x, w, b, eps, lambda t: chunked(t, 16))


@RIGHT.of("layer_norm_backward")
def layer_gradient_by_a_tree(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Any:
    """every sum by a tree"""
    return _layer_gradient(g, x, w, b, eps, tree)


@RIGHT.of("layer_norm_backward")
def layer_gradient_by_lanes(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Any:
    """every sum over 32 lanes"""
    return _layer_gradient(g, x, w, b, eps, strided)


@RIGHT.of("layer_norm_backward")
def layer_by_autograd(g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Any:
    """autograd of the composed forward in float64"""
    leaves = [None if t is None else t.double().detach().requires_grad_(True) for t in (x, w, b)]
    h, weight, bias = leaves
    assert h is not None
    with torch.enable_grad():
        d = h - h.mean(-1, keepdim=True)
        y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], g.double()))
    return tuple(x.new_empty(0) if t is None else next(found) for t in leaves)
