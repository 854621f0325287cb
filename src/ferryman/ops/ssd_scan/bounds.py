"""Error terms of `ssd_scan` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

Token s reaches token t by the weight exp(sum of e_r, s < r <= t), e_r = s_r a, times s_s (b_s . c_t) x_s.

**Exponents.** e_r is off by (v_r + 1) |e_r|, v_r the relative error of the step s_r: 0 as it is given; with a bias the
sum's rounding, times softplus' condition z sigmoid(z) / softplus(z), and 6 for its exp, logarithm and sum. A kernel may
subtract cumulative sums over a span of up to 256 tokens: each is off by 6 sqrt(256) of the sum of |e_r| in the span
(Higham & Mary 2019), so the weight's exponent is off by k_r = (97 + v_r) |e_r| for each token between, and by twice as
much for those of the span before s, at most 255, which both sums hold. Exp and the product with its result take 3
units a token: a sequential kernel rounds so often, a chunked one less.

**Sums.** With H the state's magnitude, its error E by the weights above follows the same recurrence:
``E = exp(e) (E + (k + 3) H) + (2 k_before + v + 4) |s x b|``. A state sums L + 1 terms, y sums N of them, together
6 sqrt(L + N + 1) of the magnitudes. d x adds two roundings.

tf32 rounds both operands of up to three products one after another: 6 of the magnitudes. A weight below 2^-126 may be
lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
SPAN = 256  # tokens over which a kernel may sum exponents
FLUSH = 2.0**-126


def steps(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float | None = None, high: float | None = None
) -> Tensor:
    """dt + dt_bias, or softplus of it, within the limits: without a threshold, and without overflow."""
    z = dt if dt_bias is None else dt + dt_bias
    step = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())) if softplus else z
    return step if low is None and high is None else step.clamp(low, high)


def step_error(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float | None = None, high: float | None = None
) -> tuple[Tensor, Tensor]:
    """(steps, the relative error of each)."""
    z = dt if dt_bias is None else dt + dt_bias
    step = steps(dt, dt_bias, softplus)
    error = torch.zeros_like(z) if dt_bias is None else torch.ones_like(z)
    if softplus:
        error = error * z.abs() * torch.sigmoid(z) / step.clamp(min=1e-300) + 6
    if low is None and high is None:
        return step, error
    # beyond a limit the step is the limit, rounded once, unless an error brings it back inside
    limited = step.clamp(low, high)
    beyond = (step - limited).abs() > 2.0**-23 * error * step.abs()
    return limited, error.masked_fill(beyond, 0.0) + 1


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, dt, a, b, c, d, dt_bias, initial_state, softplus, _, low, high = args
    y, final = outputs
    length, heads = x.shape[1:3]
    width = b.shape[3]
    shared = heads // b.shape[2]
    step, relative = step_error(dt, dt_bias, softplus, low, high)
    exponent = step * a
    k = (97 + relative) * exponent.abs()
    summed = torch.nn.functional.pad(k.cumsum(1), (0, 0, SPAN, 0))
    # of the tokens of a span that begins as early as it may, up to this one
    before = summed[:, SPAN:] - summed[:, :length] if length else k
    size = torch.zeros_like(final) if initial_state is None else initial_state.abs()
    error, lost = torch.zeros_like(final), torch.zeros_like(final)
    moved, reached, flushed = torch.zeros_like(y), torch.zeros_like(y), torch.zeros_like(y)
    for t in range(length):
        into, out = (m[:, t].abs().repeat_interleave(shared, 1)[:, :, None] for m in (b, c))
        decay = torch.exp(exponent[:, t])[..., None, None]
        come = (step[:, t, :, None] * x[:, t]).abs()[..., None] * into
        grown = (k[:, t] + 3)[..., None, None]
        lost = decay * lost + FLUSH * (1 + size + come)
        error = decay * (error + grown * size) + (2 * before[:, t] + relative[:, t] + 4)[..., None, None] * come
        size = decay * size + come
        moved[:, t], reached[:, t], flushed[:, t] = ((e * out).sum(-1) for e in (error, size, lost))
    skip = torch.zeros_like(y) if d is None else (d[:, None] * x).abs().nan_to_num(0.0, 0.0, 0.0)
    root = 6 * math.sqrt(length + width + 1)
    tiny = FLUSH * (1 + width)
    return (
        {
            "accumulate": moved + root * reached + 2 * skip + y.abs().nan_to_num(0.0, 0.0, 0.0),
            "absolute": flushed + tiny,
            "tf32": 6 * reached,
            "tf32-rz": 6 * reached,
        },
        {"accumulate": error + root * size, "absolute": lost + tiny, "tf32": 6 * size, "tf32-rz": 6 * size},
    )
