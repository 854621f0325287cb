"""Softmax and cross entropy in other orders, online, and by other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.selftest.alternatives.common import Rights
from ferryman.porting.selftest.alternatives.norms import array, chunked, strided, tensor, tree

RIGHT = Rights()


def _shifted(x: Tensor) -> Tensor:
    h = x.float()
    return h - h.amax(-1, keepdim=True) if h.numel() else h


@RIGHT.of("softmax")
def softmax_of_powers_of_two(x: Tensor) -> Tensor:
    """exp2, the sum in chunks of 16"""
    e = torch.exp2(_shifted(x) * 1.4426950408889634)
    return e / chunked(e, 16)


@RIGHT.of("softmax")
def softmax_by_a_tree(x: Tensor) -> Tensor:
    """the sum by a tree, its reciprocal multiplied"""
    e = torch.exp(_shifted(x))
    return e * (1 / tree(e))


@RIGHT.of("softmax")
def softmax_online(x: Tensor) -> Tensor:
    """a running maximum and sum over chunks of 32"""
    return torch.exp(x.float() - _finite(_online(x, 32)[0])) / _online(x, 32)[1] if x.numel() else x


@RIGHT.of("softmax")
def softmax_of_the_library(x: Tensor) -> Tensor:
    """exp(log_softmax) of PyTorch in float32"""
    return functional.log_softmax(x.float(), -1).exp()


@RIGHT.of("softmax")
def numpy_softmax(x: Tensor) -> Tensor:
    """NumPy, float64"""
    if x.numel() == 0:
        return x
    with np.errstate(all="ignore"):
        h = array(x)
        e = np.exp(h - h.max(-1, keepdims=True))
        return tensor(e / e.sum(-1, keepdims=True), x)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isneginf(), 0.0, top)


def _online(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(maximum, sum of exp(x - maximum)) as one pass over chunks finds them; -inf and 0 of nothing."""
    top = torch.full((*x.shape[:-1], 1), -math.inf, device=x.device)
    total = torch.zeros_like(top)
    for part in x.float().split(size, -1):
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = _finite(new)
        decay = torch.where(top.isneginf(), 0.0, torch.exp(_finite(top) - safe))  # 0 * inf would be NaN
        total = total * decay + torch.exp(part - safe).sum(-1, keepdim=True)
        top = new
    return top, total


@RIGHT.of("softmax_backward")
def softmax_gradient_in_chunks(grad: Tensor, y: Tensor) -> Tensor:
    """the inner product in chunks of 16"""
    g, p = grad.float(), y.float()
    return p * (g - chunked(g * p, 16))


@RIGHT.of("softmax_backward")
def softmax_gradient_by_a_tree(grad: Tensor, y: Tensor) -> Tensor:
    """the inner product by a tree"""
    g, p = grad.float(), y.float()
    return p * (g - tree(g * p))


@RIGHT.of("softmax_backward")
def softmax_gradient_by_lanes(grad: Tensor, y: Tensor) -> Tensor:
    """the inner product over 32 lanes"""
    g, p = grad.float(), y.float()
    return p * (g - strided(g * p))


@RIGHT.of("softmax_backward")
def softmax_gradient_expanded(grad: Tensor, y: Tensor) -> Tensor:
    """g y - y sum(g y)"""
    g, p = grad.float(), y.float()
    product = g * p
    return product - p * product.sum(-1, keepdim=True)


@RIGHT.of("softmax_backward")
def numpy_softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    """NumPy, float64"""
    with np.errstate(all="ignore"):
        g, p = array(grad), array(y)
        return tensor(p * (g - np.sum(g * p, -1, keepdims=True)), y)


# ------------------------------------------------------------------------------------------------------- cross entropy


def _loss(lse: Tensor, x: Tensor, labels: Tensor, ignore: int, smoothing: float, add: Any) -> Any:
    n = x.shape[-1]
    counted = labels != ignore
    picked = x.float().gather(-1, labels.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    row = lse - picked
    if smoothing:
        row = (1 - smoothing) * row + smoothing * (lse - add(x.float()).squeeze(-1) / n)
    row = torch.where(counted, row, 0.0).reshape(1, -1)
    return add(row).reshape(()) / counted.sum(), lse


def _bare(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    return (torch.where(top.isinf(), 0.0, top) + torch.log(total)).squeeze(-1)


@RIGHT.of("cross_entropy")
def loss_online(x: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Any:
    """one pass over chunks of 128 classes"""
    top, total = _online(x, 128)
    lse = _finite(top) + torch.log(total)
    lse = torch.where(top.isposinf(), top, lse)
    return _loss(lse.squeeze(-1), x, labels, ignore, smoothing, lambda t: chunked(t, 16))


@RIGHT.of("cross_entropy")
def loss_by_trees(x: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Any:
    """every sum by a tree"""
    top = x.float().amax(-1, keepdim=True)
    safe = torch.where(top.isinf(), 0.0, top)
    total = tree(torch.exp(x.float() - safe))
    return _loss((safe + torch.log(total)).squeeze(-1), x, labels, ignore, smoothing, tree)


@RIGHT.of("cross_entropy")
def loss_of_the_library(x: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Any:
    """torch.nn.functional.cross_entropy in float32"""
    flat = x.reshape(labels.numel(), x.shape[-1]).float()
    loss = functional.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore, label_smoothing=smoothing)
    return loss, torch.logsumexp(x.float(), -1)


@RIGHT.of("cross_entropy")
def loss_by_logaddexp(x: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Any:
    """the log-sum-exps of 16 groups of classes, merged by logaddexp"""
    parts = [torch.logsumexp(p, -1, keepdim=True) for p in x.float().split(max(1, -(-x.shape[-1] // 16)), -1)]
    while len(parts) > 1:
        parts = [torch.logaddexp(*pair) for pair in zip(parts[::2], parts[1::2], strict=False)] + (
            parts[-1:] if len(parts) % 2 else []
        )
    return _loss(parts[0].squeeze(-1), x, labels, ignore, smoothing, strided)


def _loss_gradient(grad: Tensor, p: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Tensor:
    n = p.shape[-1]
    counted = labels != ignore
    hot = functional.one_hot(labels.clamp(0, n - 1), n).to(p.dtype)
    d = p - (1 - smoothing) * hot - smoothing / n
    return torch.where(counted.unsqueeze(-1), d * (grad.to(p.dtype) / counted.sum()), 0.0)


@RIGHT.of("cross_entropy_backward")
def loss_gradient_of_one_hot(grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smooth: float) -> Any:
    """exp(x - lse) less a one-hot"""
    return _loss_gradient(grad, torch.exp(x.float() - lse.unsqueeze(-1)), labels, ignore, smooth)


@RIGHT.of("cross_entropy_backward")
def loss_gradient_by_exp2(grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smooth: float) -> Any:
    """exp2 of a scaled argument"""
    p = torch.exp2((x.float() - lse.unsqueeze(-1)) * 1.4426950408889634)
    return _loss_gradient(grad, p, labels, ignore, smooth)


@RIGHT.of("cross_entropy_backward")
def loss_gradient_of_a_wide_softmax(
    grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smooth: float
) -> Any:
    """the softmax in float64, the rest in float32"""
    p = torch.exp(x.double() - lse.double().unsqueeze(-1)).float()
    return _loss_gradient(grad, p, labels, ignore, smooth)


@RIGHT.of("cross_entropy_backward")
def loss_gradient_row_by_row(grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smooth: float) -> Any:
    """the label's column written after the rest"""
    n, counted = x.shape[-1], labels != ignore
    scale = torch.where(counted, grad / counted.sum(), 0.0).unsqueeze(-1)
    p = torch.exp(x.float() - lse.unsqueeze(-1))
    d = (p - smooth / n) * scale
    at = labels.clamp(0, n - 1).unsqueeze(-1)
    d = d.scatter(-1, at, (p.gather(-1, at) - (1 - smooth) - smooth / n) * scale)
    return d.masked_fill(~counted.unsqueeze(-1), 0.0)


# ---------------------------------------------------------------------------------- the gradient over the logits


def _over(forward: Callable[..., Any], gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A right forward and a right backward, one after the other, make a right `cross_entropy_inplace_grad`."""

    def both(x: Tensor, labels: Tensor, ignore: int, smoothing: float) -> Any:
        loss, lse = forward(x, labels, ignore, smoothing)
        return loss, lse, gradient(torch.ones(()).to(x.device), x, labels, lse, ignore, smoothing)

    both.__name__, both.__doc__ = f"{forward.__name__}_and_{gradient.__name__}", forward.__doc__
    return both


for _pair in (
    (loss_online, loss_gradient_of_one_hot), (loss_by_trees, loss_gradient_by_exp2),
    (loss_of_the_library, loss_gradient_of_a_wide_softmax), (loss_by_logaddexp, loss_gradient_row_by_row),
):  # fmt: skip
    RIGHT.of("cross_entropy_inplace_grad")(_over(*_pair))


@RIGHT.of("cross_entropy_inplace_grad_backward")
def scaled_in_float64(grad: Tensor, held: Tensor) -> Any:
    """the product in float64"""
    return held.double() * grad.double()


@RIGHT.of("cross_entropy_inplace_grad_backward")
def scaled_by_rows(grad: Tensor, held: Tensor) -> Any:
    """one row after another"""
    return torch.stack([row.float() * grad for row in held]) if len(held) else held.clone()


@RIGHT.of("cross_entropy_inplace_grad_backward")
def scaled_in_two_steps(grad: Tensor, held: Tensor) -> Any:
    """times the gradient's power of two, then times what is left of it: the first step is exact in float32"""
    fraction, exponent = torch.frexp(grad.double())
    return torch.ldexp(held.double(), exponent) * fraction
