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

**Gradients.** G_t, the gradient of the state after token t, follows the same recurrence from the end:
``G_t = exp(e_{t+1}) G_{t+1} + grad y_t (outer) c_t``. With Gamma its magnitude, its error is
``D_t = exp(e_{t+1}) (D_{t+1} + (k_{t+1} + 3) Gamma_{t+1}) + 2 |grad y c|``, and 2 k_before Gamma_t where token t is the
earlier of a pair. Each gradient is a product of G with what stands beside it, or of G and the state, whose errors add:
``exp(e_t) <G_t, h_{t-1}>``, the gradient of e_t, is off by ``exp(e_t) (D H + Gamma E + (k_t + 3) Gamma H)``. An
implementation may sum it over pairs of tokens, in any order without differences of sums. Sums have at most L + N + P R
terms, R heads of a group: 6 sqrt of their number, of the magnitudes; those over samples and tokens as many more. The
step's slope, sigmoid(z), is off by 3 |z| sigmoid(-z) + 8 of itself. At a limit it leaps: where the step is as near to
one as its error, either side is right. Products of six factors may underflow: 2^-126 of what the other factors can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Terms = dict[str, Tensor]
SPAN = 256  # tokens over which a kernel may sum exponents
FLUSH = 2.0**-126
_ALL_KEPT = 2**20  # elements of all the states of a walk


def steps(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float | None = None, high: float | None = None
) -> Tensor:
    """dt + dt_bias, or softplus of it, within the limits: without a threshold, and without overflow."""
    z = dt if dt_bias is None else dt + dt_bias
    step = torch.logaddexp(z, torch.zeros_like(z)) if softplus else z
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


def reversed_walk(advance: Callable[[int, T], T], state: T, length: int) -> Iterator[tuple[int, T, T]]:
    """(t, the states before and after token t), the last token first. 2 sqrt(length) states are kept at a time, or all
    small ones, which are computed once instead of twice then."""
    parts = state if isinstance(state, tuple) else (state,)
    size = sum(m.numel() for m in parts if isinstance(m, Tensor))
    span = max(1, length if size * length <= _ALL_KEPT else math.isqrt(length))
    kept = [state][:length]
    for t in range((length - 1) // span * span):
        state = advance(t, state)
        if (t + 1) % span == 0:
            kept.append(state)
    for i in reversed(range(len(kept))):
        first = i * span
        states = [kept[i]]
        for t in range(first, min(first + span, length)):
            states.append(advance(t, states[-1]))
        while len(states) > 1:
            after = states.pop()
            yield first + len(states) - 1, states[-1], after


def slope_error(
    z: Tensor, step: Tensor, relative: Tensor, softplus: bool, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:
    """(the slope of the step at z, its error in units)."""
    slope = torch.sigmoid(z) if softplus else torch.ones_like(z)
    error = slope * (3 * z.abs() * torch.sigmoid(-z) + 8) if softplus else torch.zeros_like(z)
    if low is None and high is None:
        return slope, error
    limited = step.clamp(low, high)
    near = torch.zeros_like(z, dtype=torch.bool)
    for limit in (low, high):
        if limit is not None and math.isfinite(limit):
            near |= (step - limit).abs() <= 2.0**-23 * relative * step.abs()
    exact = relative == 0  # as it is given, it lies on one side
    whole = 2.0**24 * slope
    outside = limited != step
    return slope.masked_fill(outside, 0.0), torch.where(near & ~exact, whole, error.masked_fill(outside, 0.0))


def largest(*given: Tensor | None) -> float:
    """The product of 1 + the largest finite magnitude of each."""
    product = 1.0
    for t in given:
        if t is not None and t.numel():
            product *= 1 + float(t.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return product


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad_y, grad_final, x, dt, a, b, c, d, dt_bias, initial_state, softplus, low, high = args
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    shared = heads // groups
    step, relative = step_error(dt, dt_bias, softplus, low, high)
    exponent = step * a
    k = (97 + relative) * exponent.abs()
    summed = torch.nn.functional.pad(k.cumsum(1), (0, 0, SPAN, 0))
    before = summed[:, SPAN:] - summed[:, :length] if length else k
    g = grad_y.abs()
    first = x.new_zeros((batch, heads, dim, width)) if initial_state is None else initial_state.abs()

    def wide(m: Tensor, t: int) -> Tensor:
        return m[:, t].abs().repeat_interleave(shared, 1)[:, :, None]

    def advance(t: int, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        size, error = state
        decay = torch.exp(exponent[:, t])[..., None, None]
        come = (step[:, t, :, None] * x[:, t]).abs()[..., None] * wide(b, t)
        error = decay * (error + (k[:, t] + 3)[..., None, None] * size)
        return decay * size + come, error + (2 * before[:, t] + relative[:, t] + 4)[..., None, None] * come

    gamma = torch.zeros_like(first) if grad_final is None else grad_final.abs()
    delta = torch.zeros_like(first)
    # (magnitude, error) of each: of x, of the step itself, of the exponent, of b, of c
    of_x, of_step, of_exponent = (
        torch.zeros(2, *s, dtype=x.dtype, device=x.device) for s in (x.shape, *[dt.shape] * 2)
    )
    of_b, of_c = (torch.zeros(2, *b.shape, dtype=x.dtype, device=x.device) for _ in range(2))

    def grouped(m: Tensor) -> Tensor:
        return m.sum(2).unflatten(1, (groups, shared)).sum(2)

    for t, (size, error), (after, moved) in reversed_walk(advance, (first, torch.zeros_like(first)), length):
        arrived = g[:, t, :, :, None]
        gamma = gamma + arrived * wide(c, t)
        delta = delta + 2 * arrived * wide(c, t)
        off = delta + 2 * before[:, t, :, None, None] * gamma
        of_c[0, :, t], of_c[1, :, t] = grouped(arrived * after), grouped(arrived * moved)
        here, into = x[:, t].abs()[..., None], wide(b, t)
        times = step[:, t].abs()[..., None]
        for i, one in enumerate((gamma, off)):
            read = (one * into).sum(-1)
            of_x[i, :, t] = times * read
            of_step[i, :, t] = (read * x[:, t].abs()).sum(-1)
            of_b[i, :, t] = grouped(times[..., None] * here * one)
        decay, grown = torch.exp(exponent[:, t])[..., None, None], (k[:, t] + 3)[..., None, None]
        of_exponent[0, :, t] = (decay * gamma * size).sum((2, 3))
        of_exponent[1, :, t] = (decay * (off * size + gamma * error + grown * gamma * size)).sum((2, 3))
        gamma, delta = decay * gamma, decay * (delta + grown * gamma)
    root = 6 * math.sqrt(length + width + dim * shared + 1)
    rows = 6 * math.sqrt(batch * length + 1)
    count = (1.0 + length) ** 2 * (1 + width) * (1 + dim * shared)
    tiny = FLUSH * count * largest(x, b, c, step, a, grad_y, grad_final, initial_state)
    skip = torch.zeros_like(x) if d is None else (d[:, None] * grad_y).abs().nan_to_num(0.0, 0.0, 0.0)
    out_x = of_x[1] + (relative[..., None] + 4 + root) * of_x[0] + 3 * skip
    out_b = of_b[1] + root * of_b[0]
    per_head = relative.unflatten(2, (groups, shared)).amax(3)[..., None] if relative.numel() else of_b[0]
    out_b = out_b + (per_head + 4) * of_b[0]
    e_error = of_exponent[1] + root * of_exponent[0]
    rate = a.abs()
    s_size = rate * of_exponent[0] + of_step[0]
    s_error = rate * e_error + of_step[1] + (root + 4) * s_size
    z = dt if dt_bias is None else dt + dt_bias
    slope, slope_off = slope_error(z, steps(dt, dt_bias, softplus), relative, softplus, low, high)
    z_size, z_error = slope * s_size, slope * s_error + (slope_off + 2 * slope) * s_size
    each = step.abs() * (e_error + (relative + 2 + rows) * of_exponent[0])

    def terms(accumulate: Tensor, size: Tensor, times: float = 1.0) -> Terms:
        absolute = torch.full_like(size, times * tiny) + FLUSH * size
        return {"accumulate": accumulate, "absolute": absolute, "tf32": 6 * size, "tf32-rz": 6 * size}

    nothing = {"accumulate": x.new_empty(0)}
    of_d = (x * grad_y).abs().sum((0, 1, 3))
    terms_of = 6 * math.sqrt(batch * length * dim + 1) + 2
    return (
        terms(out_x, of_x[0]),
        terms(z_error, z_size),
        terms(each.sum((0, 1)), (step.abs() * of_exponent[0]).sum((0, 1)), batch * length),
        terms(out_b, of_b[0]),
        terms(of_c[1] + (root + 2) * of_c[0], of_c[0]),
        nothing if d is None else terms(terms_of * of_d, of_d, batch),
        nothing
        if dt_bias is None
        else terms((z_error + rows * z_size).sum((0, 1)), z_size.sum((0, 1)), batch * length),
        nothing if initial_state is None else terms(delta + root * gamma, gamma),
    )
