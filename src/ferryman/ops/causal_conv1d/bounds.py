"""Error terms of `causal_conv1d` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

**The sum.** z has n = W + 1 terms with the bias: W products, each rounded once, and n - 1 sums. Whatever their order,
no term passes through more than n roundings, so |dz| <= n u S with S the sum of the terms' magnitudes, which is proven;
from n = 36 on, 6 sqrt(n) u S is less (Higham & Mary 2019, six deviations). Fused products have fewer roundings.

**silu.** y = z s(z). exp's argument is rounded twice, which moves s by 2 |z| s(-z) of itself, and 8 roundings remain:
(2 |z| s(-z) + 8) u |y|. The error of z reaches y through a slope on the way from z to z + dz. |silu''| <= 1/2, and
|silu'| <= 1.1, so the slope is at most min(1.1, |silu'(z)| + |dz| / 2).

**Gradients.** g = grad silu'(z). s (1 + z (1 - s)) cancels, so its terms count separately: the sigmoid's error in both
factors. The error of z moves silu' by at most |dz| min(1/2, |silu''(z)| + M |dz|), and by 1.2 at most, since silu' lies
between -0.1 and 1.1. M = 0.31 is above max |silu'''| = 0.3082, which the tests measure. A gradient of x
sums W products with g, and a gradient of the final state; one of a weight sums B L products, a bias's as many of g: the
terms' own errors, and those of a sum as above.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
UNIT = 2.0**-24
FLUSH = 2.0**-126  # an exp of a large negative argument may flush to zero
ETA = 2.0**-149  # float32 underflows gradually: half a unit a rounding
SLOPE, BEND, THIRD = 1.1, 0.5, 0.31  # no less than max |silu'|, |silu''|, |silu'''|
SPAN = 1.2  # between the least and the largest slope of silu
_FAR = 1e40  # stands for infinity where a term is zero times it; nothing in a storage dtype is larger


def _finite(x: Tensor) -> Tensor:
    return x.clamp(-_FAR, _FAR)


def _units(terms: int) -> float:
    """Units by which a sum of so many rounded products may be off, of the sum of their magnitudes."""
    return min(float(terms), 6 * math.sqrt(terms))


def whole(x: Tensor, width: int, initial_state: Tensor | None) -> Tensor:
    """What stands before x, and x."""
    before = (*x.shape[:2], width - 1)
    return _finite(torch.cat((x.new_zeros(before) if initial_state is None else initial_state, x), -1))


def correlated(padded: Tensor, weight: Tensor, length: int) -> Tensor:
    """For each t, the sum over k of ``weight[k] padded[t + k]``."""
    total = padded.new_zeros((*padded.shape[:2], length))
    for k in range(weight.shape[1]):
        total += weight[:, k, None] * padded[..., k : k + length]
    return total


def spread(g: Tensor, weight: Tensor) -> Tensor:
    """The other way: for each position of what stands before x and of x, the sum over k of ``weight[k] g[p - k]``."""
    length, width = g.shape[2], weight.shape[1]
    total = g.new_zeros((*g.shape[:2], length + width - 1))
    for k in range(width):
        total[..., k : k + length] += weight[:, k, None] * g
    return total


def _summed(padded: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """(z, its error in units)."""
    weight = _finite(weight)
    column = padded.new_zeros(weight.shape[0], 1) if bias is None else _finite(bias)[:, None]
    z = _finite(correlated(padded, weight, length) + column)
    size = correlated(padded.abs(), weight.abs(), length) + column.abs()
    return z, _units(weight.shape[1] + 1) * size


def _bend(z: Tensor) -> Tensor:
    """|silu''(z)|, at most: s'(z) (2 + |z|)."""
    return torch.sigmoid(z) * torch.sigmoid(-z) * (2 + z.abs())


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, weight, bias, initial_state, activation = args
    y, state = outputs
    length, width = x.shape[2], weight.shape[1]
    copied = {"accumulate": torch.zeros_like(state)}
    z, moved = _summed(whole(x, width, initial_state), weight, bias, length)
    absolute = torch.full_like(z, (width + 1) * ETA)
    if activation is None:
        return {"accumulate": moved, "absolute": absolute}, copied
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)
    slope = ((s * (1 + z * rest)).abs() + BEND * UNIT * moved).clamp(max=SLOPE)
    own = (2 * z.abs() * rest + 8) * _finite(y).abs()
    return {"accumulate": own + slope * moved, "absolute": SLOPE * absolute + FLUSH * z.abs() + ETA}, copied


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad_y, grad_final_state, x, weight, bias, initial_state, activation = args
    batch, _, length = x.shape
    width = weight.shape[1]
    padded = whole(x, width, initial_state)
    d = _finite(grad_y)
    g, error, absolute = d.abs(), torch.zeros_like(d), torch.zeros_like(d)
    if activation is not None:
        z, moved = _summed(padded, weight, bias, length)
        a, s, rest = z.abs(), torch.sigmoid(z), torch.sigmoid(-z)
        g = (d * (s * (1 + z * rest))).abs()
        units = 2 * a * rest + 8
        own = s * (1 + a * rest) * (units + 2 * a * s) + 2 * s * (1 + a * rest)
        leaning = (_bend(z) + THIRD * UNIT * moved).clamp(max=BEND) * moved
        error = d.abs() * (own + leaning.clamp(max=SPAN / UNIT))
        absolute = (FLUSH + ETA * (width + 2)) * (1 + a) * (1 + d.abs())
    taps, size = _finite(weight).abs(), padded.abs()
    last = d.new_zeros((*x.shape[:2], width - 1)) if grad_final_state is None else _finite(grad_final_state).abs()
    into = spread(g, taps)
    into[..., length:] += last
    back = spread(error, taps) + _units(width + 1) * into
    flush = spread(absolute, taps) + ETA * (width + 1)
    count = max(batch * length, 1)
    n = _units(count)

    def over(e: Tensor, k: int) -> Tensor:
        return (e * size[..., k : k + length]).sum((0, 2))

    own_weight = torch.stack([over(error, k) + (n + 1) * over(g, k) for k in range(width)], -1)
    flush_weight = torch.stack([over(absolute, k) + count * ETA for k in range(width)], -1)
    of_bias = {"accumulate": (error + n * g).sum((0, 2)), "absolute": absolute.sum((0, 2)) + count * ETA}
    before = {"accumulate": back[..., : width - 1], "absolute": flush[..., : width - 1]}
    nothing = {"accumulate": x.new_empty(0)}
    return (
        {"accumulate": back[..., width - 1 :], "absolute": flush[..., width - 1 :]},
        {"accumulate": own_weight, "absolute": flush_weight},
        nothing if bias is None else of_bias,
        nothing if initial_state is None else before,
    )
