"""Softmax from its formula; losses by PyTorch's functional, gradients by autograd of it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from tests.independent import Source


def softmax(x: Tensor) -> Tensor:
    if not x.numel():
        return x.clone()
    weight = torch.exp(x - x.detach().amax(-1, keepdim=True))
    return weight / weight.sum(-1, keepdim=True)


def log_sum_exp(x: Tensor) -> Tensor:
    return functools.reduce(torch.logaddexp, x.unbind(-1))


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """PyTorch's functional is NaN for a row that holds +inf; its log-sum-exp, and so its loss, is infinite."""
    rows, flat = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    counted = flat != ignore_index
    inside = counted & (flat >= 0) & (flat < logits.shape[-1])
    if bool((rows == torch.inf).any()):
        above = log_sum_exp(rows[inside]) - rows[inside][torch.arange(int(inside.sum())), flat[inside]]
        if smoothing:
            above = (1 - smoothing) * above + smoothing * (log_sum_exp(rows[inside]) - rows[inside].mean(-1))
        total = above.sum()
    else:
        total = functional.cross_entropy(rows[inside], flat[inside], reduction="sum", label_smoothing=smoothing)
    loss = total / counted.sum() if bool((inside == counted).all()) else total * torch.nan
    return loss, log_sum_exp(logits)


def cross_entropy_inplace_grad(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(leaf, target, ignore_index, smoothing)[0], leaf)
    return (*cross_entropy(logits, target, ignore_index, smoothing), slope)


SOURCES = {
    "softmax": Source(softmax),
    "cross_entropy": Source(cross_entropy),
    "cross_entropy_inplace_grad": Source(
        cross_entropy_inplace_grad,
        lambda logits, *rest: not bool(logits.isfinite().all()),
        "autograd makes a whole row NaN where one of its logits is infinite",
    ),
}
