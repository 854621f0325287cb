"""Error terms of `selective_scan` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

The step s of a token has the relative error v: 0 as it is given, else that of a bias and of softplus (`ssd_scan`).

**State.** The exponent e = s a is off by (v + 1) |e|, and a fast exp adds |e|; exp, the product with the state and the
sum round 4 times. What a token brings, s x b, is off by v and two products. With H the state's magnitude and E its
error: ``E = exp(e) (E + ((v + 2) |e| + 4) H) + (v + 3) |s x b|``. Every implementation goes from token to token.

**Result.** y sums N products, 6 sqrt(N + 2) of their magnitudes (Higham & Mary 2019); d x adds two roundings. The gate
silu(z) is off by 2 |z| sigmoid(-z) + 8, as in `silu_mul`, and its product rounds once more. A decay below 2^-126 may
be lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.ssd_scan.bounds import FLUSH, step_error, steps

__all__ = ["forward", "steps"]

Terms = dict[str, Tensor]


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, dt, a, b, c, d, z, dt_bias, initial_state, softplus = args
    y, final = outputs
    width = b.shape[2]
    step, relative = step_error(dt, dt_bias, softplus)
    size = torch.zeros_like(final) if initial_state is None else initial_state.abs()
    error, lost = torch.zeros_like(final), torch.zeros_like(final)
    moved, reached, flushed = torch.zeros_like(y), torch.zeros_like(y), torch.zeros_like(y)
    for t in range(x.shape[1]):
        into, out = (m[:, t].abs()[:, None] for m in (b, c))
        off = relative[:, t, :, None]
        exponent = step[:, t, :, None] * a
        decay = torch.exp(exponent)
        come = (step[:, t] * x[:, t]).abs()[..., None] * into
        lost = decay * lost + FLUSH * (1 + size + come)
        error = decay * (error + ((off + 2) * exponent.abs() + 4) * size) + (off + 3) * come
        size = decay * size + come
        moved[:, t], reached[:, t], flushed[:, t] = ((e * out).sum(-1) for e in (error, size, lost))
    skip = torch.zeros_like(y) if d is None else (d * x).abs()
    summed = moved + 6 * math.sqrt(width + 2) * reached + 2 * skip
    tiny = FLUSH * (1 + width)
    if z is None:
        return {"accumulate": summed, "absolute": flushed + tiny}, {"accumulate": error, "absolute": lost + tiny}
    gate = functional.silu(z).abs()
    condition = 2 * z.abs() * torch.sigmoid(-z) + 8
    accumulate = gate * (summed + (condition + 1) * (reached + skip))
    absolute = gate * (flushed + tiny) + FLUSH * (1 + reached + skip)
    return {"accumulate": accumulate, "absolute": absolute}, {"accumulate": error, "absolute": lost + tiny}
