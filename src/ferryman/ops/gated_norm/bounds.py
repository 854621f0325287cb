"""Error terms of `gated_rms_norm` and its backward (docs/parity.md), in units of u = 2^-24. Arguments are float64.

The activation a is off by c = 2 |z| sigmoid(-z) + 8 (`silu_mul`), its product with x or with a gradient included; an
exponential that flushes to zero takes FLUSH |z| of it away.

**Before the norm** u = x a carries c into the mean square: its root moves by the mean of n^2 c, n the normalised value.
So ``n`` is off by c + mean(n^2 c) + 3 sqrt(K) + 8 for K columns a group (`rms_norm`). **After it** the errors of norm
and activation add.

**Backward.** D = r (s - n mean(s n)), s = grad w (times a, of a gate that follows). To the terms of
`rms_norm_backward` come those of u and of s: each is carried linearly. a' = sigma (1 + z (1 - sigma)) may cancel, so
its terms count apart, as in `silu_mul_backward`; the slope of a sigmoid does not.

Each rounding that ``cast_before_weight`` asks for is one unit of the storage dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
FLUSH = 2.0**-126
ETA = 2.0**-149  # float32 underflows gradually: two roundings of a subnormal result, half a unit each


def _groups(x: Tensor, size: int | None) -> Tensor:
    return x.unsqueeze(-2) if size is None or not x.shape[-1] else x.unflatten(-1, (-1, size))


def _mean(x: Tensor, size: int | None) -> Tensor:
    """The mean over each group, at every column of it."""
    grouped = _groups(x, size)
    return grouped.mean(-1, keepdim=True).expand(grouped.shape).flatten(-2)


def _beside(x: Tensor, size: int | None) -> Tensor:
    """`_mean` of an error. Beside an infinity, which sets r and what is finite to 0, there is no error; the infinity's
    own value is NaN, and so are a group of a NaN and the mean over its terms: no bound judges those."""
    return _mean(x, size).nan_to_num(0.0, 0.0, 0.0)


def _columns(x: Tensor, size: int | None) -> int:
    return x.shape[-1] if size is None else size


def _gate(z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(magnitudes of activation and slope, relative error of the one, error of the other, what a flush takes)."""
    s, size = torch.sigmoid(z), z.abs()
    rest = torch.sigmoid(-z)
    error = 2 * size * rest + 8
    if activation == "silu":
        slope = (s * (1 + z * rest)).abs()
        return size * s, slope, error, s * (1 + size * rest) * (error + 2 * size * s), FLUSH * (1 + size)
    return s, s * rest, error, s * rest * (2 * size + 16), torch.full_like(z, FLUSH)


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, gate, weight, eps, size, first, cast, activation = args
    a, _, error, _, flush = _gate(gate, activation)
    y = outputs[0].abs()
    scale = torch.ones_like(x) if weight is None else weight.abs().expand(x.shape)
    relative = 3 * math.sqrt(_columns(x, size)) + 8 + error
    rounded = float(cast) * ((weight is not None) + first)
    if first:
        n = x * torch.rsqrt(_mean(x.square(), size) + eps)
        absolute = flush * (n * scale).abs() + ETA * (1 + scale) * (1 + a) + ETA * (1 + (n * scale).abs())
        half = 0.5 * cast * a * (1 + scale * (weight is not None))
        return (
            {"accumulate": y * (relative + 1), "storage": y * rounded, "absolute": absolute, "storage_flush": half},
        )
    u = x.abs() * a
    r = torch.rsqrt(_mean(u.square(), size) + eps)
    n, lost = u * r, flush * x.abs() + ETA * (1 + x.abs())
    shift, more = (_beside(m, size) for m in (n * r * lost, n.square() * error))
    absolute = scale * (r * lost + n * shift) + ETA * (1 + scale)
    moved = relative + more
    half = 0.5 * cast * scale * (weight is not None)
    return ({"accumulate": y * moved, "storage": y * rounded, "absolute": absolute, "storage_flush": half},)


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    g, x, gate, weight, eps, size, first, activation = args
    a, slope, error, bent, flush = _gate(gate, activation)
    g, x, z = g.abs(), x.abs(), gate.abs()
    scale = torch.ones_like(x) if weight is None else weight.abs().expand(x.shape)
    root = 6 * math.sqrt(_columns(x, size))
    relative = 0.5 * root + 8
    none = torch.zeros_like(x)
    # what is normalised, what comes from above, their relative errors, and what a flush takes of them
    u, came = (x, g * a) if first else (x * a, g)
    of_u, of_g = (none, error) if first else (error, none)
    lost_u = none if first else flush * x + ETA * (1 + x)
    lost_g = flush * g + ETA * (1 + g) if first else none
    r = torch.rsqrt(_mean(u.square(), size) + eps)
    n, s = u * r, came * scale
    shift, moved = (_beside(m, size) for m in (n * r * lost_u, n.square() * of_u))
    inner = _mean(s * n, size)
    near = s * (relative + moved + of_g) + n * inner * (root + 3 * relative + of_u + 2 * moved)
    d_error = r * (near + n * _mean(s * n * (of_u + moved + of_g), size))
    lost_n, lost_s = r * lost_u + n * shift + ETA, scale * lost_g + ETA
    d_lost = r * (lost_s + lost_n * inner + n * _mean(lost_s * n + s * lost_n, size) + shift * (s + n * inner))
    d_lost = d_lost + ETA * (1 + r * (2 + n + inner))
    d = r * (s + n * inner)  # its terms, which may cancel
    above = g
    if first:
        before, before_error, before_lost = g * scale * n, g * scale * n * (relative + 3), g * scale * lost_n
        for_x: Terms = {"accumulate": d_error, "absolute": d_lost}
    else:
        before, before_error, before_lost, above = d * x, x * (d_error + d), x * d_lost, g + d
        absolute = a * d_lost + flush * d + ETA * (1 + d)
        for_x = {"accumulate": a * d_error + outputs[0].abs() * (error + 1), "absolute": absolute}
    tiny = ETA * (1 + above) * (1 + x + n) * (1 + scale) * (1 + z)
    for_gate: Terms = {
        "accumulate": slope * before_error + before * (bent + 2 * slope),
        "absolute": slope * before_lost + flush * (1 + z) * before + tiny,
    }
    if weight is None:
        return for_x, for_gate, {"accumulate": x.new_empty(0)}
    flat = (math.prod(x.shape[:-1]), x.shape[-1])
    many = 6 * math.sqrt(max(flat[0], 1))
    total = (came * n * (many + relative + of_u + moved + of_g)).reshape(flat).sum(0)
    lost = (came * lost_n + lost_g * n + ETA * (1 + came)).reshape(flat).sum(0)
    return for_x, for_gate, {"accumulate": total, "absolute": lost}
