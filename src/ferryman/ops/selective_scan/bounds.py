"""Error terms of `selective_scan` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

The step s of a token has the relative error v: 0 as it is given, else that of a bias and of softplus (`ssd_scan`).

**State.** The exponent e = s a is off by (v + 1) |e|, and a fast exp, or one of powers of 2 whose rate is scaled
before, adds 2 |e|; exp, the product with the state and the sum round 4 times. A scan of a block of tokens may multiply
decays with each other first: t tokens take no more than t products in any order, one rounding more for each. What a
token brings, s x b, is off by v and two products. With H the state's magnitude and E its error:
``E = exp(e) (E + ((v + 3) |e| + 5) H) + (v + 3) |s x b|``.

**Result.** y sums N products, 6 sqrt(N + 2) of their magnitudes (Higham & Mary 2019); d x adds two roundings. The gate
silu(z) is off by 2 |z| sigmoid(-z) + 8, as in `silu_mul`, and its product rounds once more. A decay below 2^-126 may
be lost.

**Gradients.** G_t, the gradient of the state after token t, follows the same recurrence from the end, with
``g_t = grad y_t silu(z_t)``: ``G_t = exp(e_{t+1}) G_{t+1} + g_t c_t``. Each gradient is a product of G with what stands
beside it, or of G and the state, whose errors add, and a sum over states, channels, or samples and tokens: 6 sqrt of
their number, of the magnitudes. silu' is off as in `causal_conv1d`, the step's slope as in `ssd_scan`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.ssd_scan.bounds import FLUSH, largest, reversed_walk, slope_error, step_error, steps

__all__ = ["backward", "forward", "reversed_walk", "steps"]

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
        error = decay * (error + ((off + 3) * exponent.abs() + 5) * size) + (off + 3) * come
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


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad_y, grad_final, x, dt, a, b, c, d, z, dt_bias, initial_state, softplus = args
    batch, length, channels = x.shape
    width = b.shape[2]
    step, relative = step_error(dt, dt_bias, softplus)
    g, off_g = grad_y.abs(), torch.zeros_like(x)
    if z is not None:
        g = (grad_y * functional.silu(z)).abs()
        off_g = 2 * z.abs() * torch.sigmoid(-z) + 9
    first = x.new_zeros((batch, channels, width)) if initial_state is None else initial_state.abs()

    def grown(t: int) -> tuple[Tensor, Tensor]:
        exponent = step[:, t, :, None] * a
        return torch.exp(exponent), (relative[:, t, :, None] + 3) * exponent.abs() + 5

    def advance(t: int, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        size, error = state
        decay, units = grown(t)
        come = (step[:, t] * x[:, t]).abs()[..., None] * b[:, t].abs()[:, None]
        error = decay * (error + units * size) + (relative[:, t, :, None] + 3) * come
        return decay * size + come, error

    gamma = torch.zeros_like(first) if grad_final is None else grad_final.abs()
    delta = torch.zeros_like(first)
    # (magnitude, error) of each
    of_x, of_step, of_out = (torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device) for _ in range(3))
    of_b, of_c = (torch.zeros(2, *b.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    of_a = torch.zeros(2, *a.shape, dtype=x.dtype, device=x.device)
    rows, across = 6 * math.sqrt(batch * length + 1), 6 * math.sqrt(width + 2)
    for t, (size, error), (after, moved) in reversed_walk(advance, (first, torch.zeros_like(first)), length):
        out, into = c[:, t].abs()[:, None], b[:, t].abs()[:, None]
        arrived = g[:, t, :, None]
        gamma = gamma + arrived * out
        delta = delta + (off_g[:, t, :, None] + 2) * arrived * out
        of_out[0, :, t], of_out[1, :, t] = (after * out).sum(-1), (moved * out).sum(-1)
        of_c[0, :, t] = (arrived * after).sum(1)
        of_c[1, :, t] = (arrived * (moved + off_g[:, t, :, None] * after)).sum(1)
        decay, units = grown(t)
        s = step[:, t].abs()
        exponent = decay * gamma * size
        e_error = decay * (delta * size + gamma * error + units * gamma * size) + 2 * exponent
        for i, (one, two) in enumerate(((gamma, exponent), (delta, e_error))):
            read = (one * into).sum(-1)
            of_x[i, :, t] = s * read
            of_b[i, :, t] = ((s * x[:, t].abs())[..., None] * one).sum(1)
            of_step[i, :, t] = x[:, t].abs() * read + (a.abs() * two).sum(-1)
        of_a[0] += (s[..., None] * exponent).sum(0)
        of_a[1] += (s[..., None] * (e_error + (relative[:, t, :, None] + 2 + rows) * exponent)).sum(0)
        gamma, delta = decay * gamma, decay * (delta + units * gamma)
    tiny = FLUSH * (1.0 + length) ** 2 * (1 + width) * (1 + channels)
    tiny *= largest(x, b, c, step, a, grad_y, grad_final, initial_state, z)
    skip = torch.zeros_like(x) if d is None else (d * x).abs().nan_to_num(0.0, 0.0, 0.0)
    skipped = torch.zeros_like(x) if d is None else (d.abs() * g).nan_to_num(0.0, 0.0, 0.0)
    out_x = of_x[1] + (relative + 3 + across) * of_x[0] + (off_g + 3) * skipped
    slope, slope_off = slope_error(dt if dt_bias is None else dt + dt_bias, step, relative, softplus, None, None)
    s_size, s_error = of_step[0], of_step[1] + (across + 5) * of_step[0]
    z_size, z_error = slope * s_size, slope * s_error + (slope_off + 2 * slope) * s_size
    over = 6 * math.sqrt(channels + 1)
    most = relative.amax(2, keepdim=True) if relative.numel() else of_b[0]

    def terms(accumulate: Tensor, size: Tensor, times: float = 1.0) -> Terms:
        return {"accumulate": accumulate, "absolute": torch.full_like(size, times * tiny) + FLUSH * size}

    nothing = {"accumulate": x.new_empty(0)}
    of_z = nothing
    if z is not None:
        sig, rest, far = torch.sigmoid(z), torch.sigmoid(-z), z.abs()
        bent = (sig * (1 + z * rest)).abs()
        units = 2 * far * rest + 8
        own = sig * (1 + far * rest) * (units + 2 * far * sig) + 2 * sig * (1 + far * rest)
        whole = of_out[0] + skip
        off = of_out[1] + across * of_out[0] + 2 * skip
        of_z = terms(grad_y.abs() * (bent * (off + 2 * whole) + own * whole), grad_y.abs() * whole)
    of_d = (x.abs() * g).sum((0, 1))
    d_error = (x.abs() * g * (off_g + 2 + rows)).sum((0, 1))
    count = batch * length
    return (
        terms(out_x, of_x[0]),
        terms(z_error, z_size),
        terms(of_a[1], of_a[0], count),
        terms(of_b[1] + (most + 3 + over) * of_b[0], of_b[0]),
        terms(of_c[1] + (over + 2) * of_c[0], of_c[0]),
        nothing if d is None else terms(d_error, of_d, count),
        of_z,
        nothing if dt_bias is None else terms((z_error + rows * z_size).sum((0, 1)), z_size.sum((0, 1)), count),
        nothing if initial_state is None else terms(delta + gamma, gamma),
    )
