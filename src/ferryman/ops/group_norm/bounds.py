"""How far results of group_norm and its gradients may be off, in units of float32's roundoff u."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_U = 2.0**-24
_LEAST = 2.0**-149
Terms = dict[str, Tensor]


class _Normalised:
    """A call's groups in float64, and how far a kernel's normalised values may be off.

    n values of a group are summed. The mean is off by e = 6 sqrt(n) u mean|x|, and a centred value by that and by
    2 u |x| (its own subtraction, or the sum x s + t with s, t made of mean and deviation). Where the deviation is about
    another mean, e away, the variance grows by e^2. Its squares are positive: their sum is off by 6 sqrt(n) u.
    Means of parts of a group are rounded, each by u mean|x|, and a square of their difference by twice that times the
    difference: of the variance at most 2 u mean|x| / d. A reciprocal deviation r = 1 / d is off by half of these, and
    by 8 roundings: (3 sqrt(n) + 8) u + u mean|x| r + (e r)^2 / 2.
    """

    def __init__(self, x: Tensor, num_groups: int, eps: float) -> None:
        samples, channels = x.shape[:2]
        self.shape = x.shape
        self.count = x[:1, : channels // num_groups].numel() if samples else 0
        rows = x.reshape(samples, num_groups, self.count)
        size = rows.abs().mean(-1, keepdim=True)
        centred = rows - rows.mean(-1, keepdim=True)
        self.r = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        self.value = centred * self.r
        root = max(self.count, 1) ** 0.5
        mean = 6 * root * size
        self.inverse = 3 * root + 8 + size * self.r + _U * (mean * self.r).square() / 2
        self.error = self.r * (mean + 2 * rows.abs()) + self.value.abs() * (self.inverse + 1)
        self.sums = 6 * root

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(self.value.shape)

    def whole(self, rows: Tensor) -> Tensor:
        return rows.expand(self.value.shape).reshape(self.shape)


def _channels(x: Tensor, weight: Tensor | None) -> Tensor:
    """A channel's number, for every element of x."""
    if weight is None:
        return torch.ones_like(x)
    return weight.reshape(-1, *(1,) * (x.dim() - 2)).expand(x.shape)


def _finite(terms: Terms) -> Terms:
    """Where a result is NaN or infinite no term counts."""
    return {name: term.nan_to_num(0.0, 0.0, 0.0) for name, term in terms.items()}


def forward(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """The normalised value's error by the weight, one product and one sum. A value below float32's normal numbers is
    off by half of the least, before r, the weight, and after them."""
    x, num_groups, weight, _, eps = args
    known = _Normalised(x, num_groups, eps)
    scale = _channels(x, weight).abs()
    product = scale * known.whole(known.value).abs()
    accumulate = scale * known.whole(known.error) + product + outputs[0].abs()
    return (_finite({"accumulate": accumulate, "absolute": _LEAST * (scale * (known.whole(known.r) + 1) + 1)}),)


def backward(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """With n the normalised value and c = grad w: grad_x = r (c - mean(c) - n mean(c n)). Each factor's error, times
    the others' magnitudes, and 6 sqrt(n) u of a mean's magnitudes; errors of n and of mean(c n) are multiplied, too. A
    channel's sums have 6 sqrt(k) u of their magnitudes, k values each, and what n is off by."""
    grad, x, num_groups, weight, bias, eps, need_weight, need_bias = args
    known = _Normalised(x, num_groups, eps)
    n, error, r = known.value, known.error, known.r
    c = known.rows(grad * _channels(x, weight))

    def mean(rows: Tensor) -> Tensor:
        return rows.mean(-1, keepdim=True)

    plain, both = mean(c.abs()), mean((c * n).abs())
    first = (known.sums + 2) * plain
    second = (known.sums + 3) * both + mean(c.abs() * error)
    inner = 3 * c.abs() + first + mean(c).abs() + 2 * (n * mean(c * n)).abs()
    inner = inner + error * mean(c * n).abs() + n.abs() * second + _U * error * second
    result = (c - mean(c) - n * mean(c * n)).abs()
    accumulate = r * (inner + result * (known.inverse + 2))
    low = 3 + n.abs() * (2 + mean(n.abs()) + (r + 1) * plain) + mean(c * n).abs() * (r + 1)
    terms = [{"accumulate": known.whole(accumulate), "absolute": _LEAST * known.whole(r * low + 1)}]

    others = [i for i in range(x.dim()) if i != 1]
    values = x.numel() // max(x.shape[1], 1)
    steps = 6 * max(values, 1) ** 0.5
    n, error, r = known.whole(n), known.whole(error), known.whole(r)
    for given, needed, factor, off, least in (
        (weight, need_weight, n, error + n.abs(), grad.abs() * (r + 1) + 1),
        (bias, need_bias, torch.ones_like(x), torch.zeros_like(x), torch.ones_like(x)),
    ):
        if given is None or not needed:
            terms.append({"accumulate": grad.new_zeros(0)})
            continue
        sums = (grad.abs() * off).sum(others) + steps * (grad * factor).abs().sum(others)
        terms.append({"accumulate": sums, "absolute": _LEAST * least.sum(others)})
    return tuple(_finite(term) for term in terms)
