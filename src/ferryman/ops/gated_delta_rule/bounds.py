"""Error terms of `gated_delta_rule` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

A column s of the state follows ``s = A s + beta v k`` with A = exp(g) (I - beta k k^T), whose norm is at most
a = exp(g) max(1, |1 - beta |k|^2|). Errors are bounded by norms of columns: absolute values would let I - beta k k^T
grow where it shrinks.

**Local errors.** With corrections d, a kernel holds the state as a sum of exp(..) k_j d_j and of what it began with.
The magnitudes ``m = exp(g) m + |k| |d|`` are not below that, however the tokens are cut into spans. A span of up to 64
tokens sums g: a weight is off as in `ssd_scan`, all of them by
``E = exp(g) (E + (l + 3) m) + (2 l_before + 4 + r) |k| |d|``,
l = 49 |g|, r the relative error 3 sqrt(K) + 8 of a normalised key, or 0. A correction d = beta (v - k s) sums K
products with what up to 64 tokens and the state bring, by substitution, earlier corrections first. It is off by
``beta (|k| E + (6 sqrt(K + 65) + 2 r + 6) |k| m + (2 + r) |v|) + 2 |d|``. The state adds (l + 9) m, and its key's part.

**Carried on.** Whatever is wrong with a state goes through the A of later tokens: ``e = a e + local``. It reaches y as
scale |q| (e + E + (6 sqrt(K + 65) + 2 r + 6) m).

tf32 rounds both operands of up to two products, one after another: 4 |k| m and 4 m instead. A weight or product below
2^-126 may be lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
SPAN = 64  # tokens over which a kernel may sum exponents
FLUSH = 2.0**-126


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    q, k, v, g, beta, initial_state, scale, norm = args
    y, final = outputs
    width, heads, length = q.shape[3], v.shape[2], v.shape[1]
    factor = abs(max(width, 1) ** -0.5 if scale is None else scale)
    if norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // q.shape[2], 2) for x in (q, k))
    r = 3 * math.sqrt(width) + 8 if norm else 0.0
    root = 6 * math.sqrt(width + SPAN + 1) + 2 * r + 6
    g = torch.zeros_like(beta) if g is None else g
    exponent = (6 * math.sqrt(SPAN) + 1) * g.abs()
    summed = torch.nn.functional.pad(exponent.cumsum(1), (0, 0, SPAN, 0))
    before = summed[:, SPAN:] - summed[:, :length]
    s = torch.zeros_like(final) if initial_state is None else initial_state
    m = s.norm(dim=-2) if width else s.new_zeros(y[:, :1].squeeze(1).shape if length else (*s.shape[:2], s.shape[3]))
    weights, error, coarse, lost = (torch.zeros_like(m) for _ in range(4))
    terms = [torch.zeros_like(y) for _ in range(3)]
    for t in range(length):
        key, value, rate = k[:, t], v[:, t], beta[:, t].abs()[..., None]
        size, query = key.norm(dim=-1, keepdim=True), factor * q[:, t].norm(dim=-1, keepdim=True)
        decay, own = torch.exp(g[:, t])[..., None], exponent[:, t, :, None]
        s = decay[..., None] * s
        d = beta[:, t, :, None] * (value - (s * key[..., None]).sum(-2))
        s = s + key[..., None] * d[:, :, None]
        a = decay * (1 - beta[:, t, :, None] * size.square()).abs().clamp(min=1)
        come, earlier = size * d.abs(), decay * m
        carried = decay * (weights + (own + 3) * m)
        local = rate * (size * carried + root * size * earlier + (2 + r) * value.abs()) + 2 * d.abs()
        m = earlier + come
        enters = (2 * before[:, t, :, None] + 4 + r) * come
        weights = carried + enters
        error = a * error + size * local + (own + 9) * m + enters
        coarse = a * coarse + size * rate * 4 * size * earlier + 4 * m
        lost = a * lost + FLUSH * (1 + width) * (1 + m) * (1 + size).square() * (1 + rate) * (1 + value.abs())
        terms[0][:, t] = query * (error + weights + root * m)
        terms[1][:, t] = query * (coarse + 4 * m)
        terms[2][:, t] = query * (lost + FLUSH * (1 + m)) + FLUSH * (1 + width)
    wide = [x[:, :, None].expand(final.shape) for x in (error, coarse, lost)]
    return (
        {"accumulate": terms[0] + 2 * y.abs(), "absolute": terms[2], "tf32": terms[1], "tf32-rz": terms[1]},
        {"accumulate": wide[0], "absolute": wide[2], "tf32": wide[1], "tf32-rz": wide[1]},
    )
