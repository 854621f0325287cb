"""Error terms of `gated_delta_rule` (docs/parity.md), in units of u = 2^-24. Arguments are float64.

A column s of the state follows ``s = A s + beta v k`` with A = exp(g) (I - beta k k^T), whose norm is at most
a = exp(g) max(1, |1 - beta |k|^2|). Errors are bounded by norms of columns: absolute values would let I - beta k k^T
grow where it shrinks.

**Local errors.** With corrections d, a kernel holds the state as a sum of exp(..) k_j d_j and of what it began with.
The magnitudes ``m = exp(g) m + |k| |d|`` are not below that, however the tokens are cut into spans. A span of up to 64
tokens sums g: a weight is off as in `ssd_scan`, all of them by
``E = exp(g) (E + (l + 3) m) + (2 l_before + 4 + r) |k| |d|``,
l = (6 sqrt(n) + 1) |g|, n = 64 or all the tokens there are, r the relative error 3 sqrt(K) + 8 of a normalised key.
A correction d = beta (v - k s) sums K products with what n tokens and the state bring, by substitution, earlier
corrections first. It is off by ``beta (|k| E + (6 sqrt(K + n + 1) + 2 r + 6) |k| m + (2 + r) |v|) + 2 |d|``. The state
adds (l + 9) m, and its key's part.

**Carried on.** Whatever is wrong with a state goes through the A of later tokens: ``e = a e + local``. It reaches y as
scale |q| (e + E + (6 sqrt(K + n + 1) + 2 r + 6) m).

tf32 rounds both operands of up to two products, one after another: 4 |k| m and 4 m instead. A weight or product below
2^-126 may be lost.

**Gradients.** The state's gradient G follows the same recurrence from the end, ``G = A^T (G + scale q grad_y^T)``,
and A is symmetric. With x = beta G^T k, the gradient of v, a kernel holds it as a sum of exp(..) scale q_i grad_y_i and
exp(..) k_i x_i; gamma is its magnitude, E' its weights' error, which a token that is the earlier of a pair sees with
2 l_before gamma more, x is off as a correction is, and e' is carried on by a. Each gradient is a product of columns of
G, of the state before or after the token, of v - S^T k, of x or d. The errors of both add, times the norm of the other,
and sums over V, over pairs of a span's tokens and over K are off by 6 sqrt of their number each, of the magnitudes.
exp(g) <G - k x, S>, the gradient of g, may be summed over pairs of tokens, without differences of sums. An element
is bounded by its column's norm. Normalisation turns dk^ into (dk^ - k^ (k^ dk^)) / |k|: twice the error, and
2 r + 6 sqrt(K) + 12 of the magnitude.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.ops.ssd_scan.bounds import FLUSH, largest, reversed_walk

__all__ = ["backward", "forward", "reversed_walk"]
Terms = dict[str, Tensor]
SPAN = 64  # tokens over which a kernel may sum exponents


class State(NamedTuple):
    """The state, and of each column the magnitude and errors: by weights, carried on, of tf32, lost below 2^-126."""

    s: Tensor
    m: Tensor
    weights: Tensor
    error: Tensor
    coarse: Tensor
    lost: Tensor


class Token(NamedTuple):
    """What a token meets and makes, a column each, and sizes and factors, one for a head."""

    key: Tensor
    size: Tensor
    query: Tensor
    rate: Tensor
    decay: Tensor
    grown: Tensor  # the growth of the operator that errors go through
    own: Tensor  # units of its exponent
    before: Tensor  # units of the exponents of a span before it
    decayed: Tensor  # the state after its decay
    earlier: Tensor  # its magnitude
    carried: Tensor  # by what its weights are off
    wrong: Tensor  # v - S^T k
    d: Tensor


class Walk:
    """The recurrence and its errors, token by token."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor,
        initial_state: Tensor | None,
        scale: float | None,
        norm: bool,
    ) -> None:
        width, heads = q.shape[3], v.shape[2]
        self.repeated = heads // q.shape[2]
        self.factor = abs(max(width, 1) ** -0.5 if scale is None else scale)
        self.signed = max(width, 1) ** -0.5 if scale is None else scale
        self.roots = [torch.rsqrt(x.square().sum(-1) + 1e-6) if norm else None for x in (q, k)]
        if norm:
            q, k = (x * root[..., None] for x, root in zip((q, k), self.roots, strict=True) if root is not None)
        self.q, self.k = (x.repeat_interleave(self.repeated, 2) for x in (q, k))
        self.r = 3 * math.sqrt(width) + 8 if norm else 0.0
        self.span = min(SPAN, v.shape[1])
        self.root = 6 * math.sqrt(width + self.span + 1) + 2 * self.r + 6
        self.v, self.beta = v, beta
        self.g = torch.zeros_like(beta) if g is None else g
        self.exponent = (6 * math.sqrt(self.span) + 1) * self.g.abs()
        summed = torch.nn.functional.pad(self.exponent.cumsum(1), (0, 0, SPAN, 0))
        self.before = summed[:, SPAN:] - summed[:, : v.shape[1]]
        shape = (v.shape[0], heads, width, v.shape[3])
        s = v.new_zeros(shape) if initial_state is None else initial_state
        m = norm_of(s)
        zero = torch.zeros_like(m)
        self.first = State(s, m, zero, zero, zero, zero)

    def token(self, t: int, state: State) -> Token:
        key, rate = self.k[:, t], self.beta[:, t, :, None]
        size, query = key.norm(dim=-1, keepdim=True), self.factor * self.q[:, t].norm(dim=-1, keepdim=True)
        decay, own = torch.exp(self.g[:, t])[..., None], self.exponent[:, t, :, None]
        decayed = decay[..., None] * state.s
        wrong = self.v[:, t] - (decayed * key[..., None]).sum(-2)
        grown = decay * (1 - rate * size.square()).abs().clamp(min=1)
        carried = decay * (state.weights + (own + 3) * state.m)
        before = self.before[:, t, :, None]
        earlier = decay * state.m
        return Token(
            key, size, query, rate.abs(), decay, grown, own, before, decayed, earlier, carried, wrong, rate * wrong
        )

    def wrong_off(self, t: int, on: Token) -> Tensor:
        """By what v - S^T k is off, but for what the state carries on."""
        return on.size * on.carried + self.root * on.size * on.earlier + (2 + self.r) * self.v[:, t].abs()

    def advance(self, t: int, state: State) -> State:
        on = self.token(t, state)
        come = on.size * on.d.abs()
        local = on.rate * self.wrong_off(t, on) + 2 * on.d.abs()
        m = on.earlier + come
        enters = (2 * on.before + 4 + self.r) * come
        weights = on.carried + enters
        error = on.grown * state.error + on.size * local + (on.own + 9) * m + enters
        coarse = on.grown * state.coarse + on.size * on.rate * 4 * on.size * on.earlier + 4 * m
        each = FLUSH * (1 + on.key.shape[-1]) * (1 + m) * (1 + on.size).square() * (1 + on.rate)
        lost = on.grown * state.lost + each * (1 + self.v[:, t].abs())
        return State(on.decayed + on.key[..., None] * on.d[:, :, None], m, weights, error, coarse, lost)


def norm_of(s: Tensor) -> Tensor:
    """Of each column."""
    return s.norm(dim=-2) if s.shape[-2] else s.new_zeros((*s.shape[:-2], s.shape[-1]))


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    walk = Walk(*args)
    y, final = outputs
    state = walk.first
    terms = [torch.zeros_like(y) for _ in range(3)]
    tiny = FLUSH * (1 + args[0].shape[3])
    for t in range(y.shape[1]):
        state = walk.advance(t, state)
        query = walk.factor * walk.q[:, t].norm(dim=-1, keepdim=True)
        terms[0][:, t] = query * (state.error + state.weights + walk.root * state.m)
        terms[1][:, t] = query * (state.coarse + 4 * state.m)
        terms[2][:, t] = query * (state.lost + FLUSH * (1 + state.m)) + tiny
    wide = [x[:, :, None].expand(final.shape) for x in (state.error, state.coarse, state.lost)]
    return (
        {"accumulate": terms[0] + 2 * y.abs(), "absolute": terms[2], "tf32": terms[1], "tf32-rz": terms[1]},
        {"accumulate": wide[0], "absolute": wide[2], "tf32": wide[1], "tf32-rz": wide[1]},
    )


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad_y, grad_final, *own = args
    walk = Walk(*own)
    length, dim = grad_y.shape[1], grad_y.shape[3]
    width, groups = own[0].shape[3], own[0].shape[2]
    back = torch.zeros_like(walk.first.s) if grad_final is None else grad_final
    gamma = norm_of(back)
    weights, error, coarse = (torch.zeros_like(gamma) for _ in range(3))
    across = 6 * math.sqrt(dim * walk.repeated + walk.span + 1)
    inner = walk.root + across + 12
    pairs = inner + 12 * math.sqrt(walk.span + 1)
    # (errors, tf32's, magnitudes) of each gradient
    of_q, of_k, of_g, of_beta = (grad_y.new_zeros((3, *grad_y.shape[:3])) for _ in range(4))
    of_v = grad_y.new_zeros((2, *grad_y.shape))
    most, most_back = 1.0, 1.0
    for t, state, after in reversed_walk(walk.advance, walk.first, length):
        on = walk.token(t, state)
        given, d, wrong = grad_y[:, t].abs(), on.d.abs(), on.wrong.abs()
        held_off, held_coarse = on.decay * state.error + on.carried, on.decay * state.coarse + 4 * on.earlier
        wrong_off, wrong_coarse = on.size * on.decay * state.error + walk.wrong_off(t, on), on.size * held_coarse
        after_off = after.error + after.weights + walk.root * after.m
        terms = (after_off + across * after.m, after.coarse + 6 * after.m, after.m)
        for i, term in enumerate(terms):
            of_q[i, :, t] = walk.factor * (given * term).sum(-1)
        come = on.query * given
        back = back + walk.signed * walk.q[:, t, :, :, None] * grad_y[:, t, :, None]
        gamma = gamma + come
        weights, error = weights + (4 + walk.r) * come, error + (4 + walk.r) * come
        asked = (back * on.key[..., None]).sum(-2)
        x = (walk.beta[:, t, :, None] * asked)[:, :, None]
        asked, moved = asked.abs(), x.abs()[:, :, 0]
        off = weights + 2 * on.before * gamma
        asked_local = on.size * off + walk.root * on.size * gamma
        asked_off, asked_coarse = asked_local + on.size * error, on.size * (coarse + 4 * gamma)
        of_v[0, :, t] = on.rate * asked_off + 2 * moved
        of_v[1, :, t] = on.rate * asked_coarse
        size = (wrong + on.size * on.earlier) * on.size * gamma
        of_beta[0, :, t] = (wrong * asked_off + asked * wrong_off + (across + 4) * size).sum(-1)
        of_beta[1, :, t] = (wrong * asked_coarse + asked * wrong_coarse + 4 * size).sum(-1)
        size = gamma * d + on.earlier * moved
        of_k[0, :, t] = (
            d * (error + off)
            + gamma * (on.rate * wrong_off + 2 * d)
            + moved * held_off
            + on.earlier * of_v[0, :, t]
            + inner * size
        ).sum(-1)
        of_k[1, :, t] = (
            d * coarse + gamma * on.rate * wrong_coarse + moved * held_coarse + on.earlier * of_v[1, :, t] + 6 * size
        ).sum(-1)
        of_k[2, :, t] = size.sum(-1)
        rest, come = gamma + on.size * moved, on.size * moved
        of_g[0, :, t] = (
            rest * held_off + on.earlier * (error + off + on.size * of_v[0, :, t]) + pairs * rest * on.earlier
        ).sum(-1)
        of_g[1, :, t] = (rest * held_coarse + on.earlier * (coarse + on.size * of_v[1, :, t] + 6 * rest)).sum(-1)
        local = on.size * (on.rate * asked_local + 2 * moved) + (on.own + 9) * rest + (4 + walk.r) * come
        error = on.grown * error + on.decay * local
        coarse = on.grown * coarse + on.decay * (4 * on.size.square() * on.rate * gamma + 4 * rest)
        weights = on.decay * (weights + (4 + walk.r) * come + (on.own + 3) * rest)
        back = on.decay[..., None] * (back - on.key[..., None] * x)
        if rest.numel():
            most, most_back = max(most, float(after.m.amax())), max(most_back, float(rest.amax()))
        gamma = on.decay * rest
    roots = [root for root in walk.roots if root is not None]
    tiny = (
        FLUSH * (1.0 + length) ** 2 * (1 + width) * (1 + dim * walk.repeated) * (1 + most) ** 2 * (1 + most_back) ** 2
    )
    tiny *= (1 + walk.factor) * largest(walk.q, walk.k, walk.v, walk.beta, grad_y, *roots) ** 2

    def terms_of(accumulate: Tensor, rounded: Tensor) -> Terms:
        return {
            "accumulate": accumulate,
            "absolute": torch.full_like(accumulate, tiny),
            "tf32": rounded,
            "tf32-rz": rounded,
        }

    def shared(parts: Tensor, root: Tensor | None, like: Tensor) -> Terms:
        off, rounded, size = parts.unflatten(3, (groups, walk.repeated)).sum(4)
        if root is not None:
            off = root * (2 * off + (2 * walk.r + 6 * math.sqrt(width) + 12) * size)
            rounded = 2 * root * rounded
        off, rounded = (e[..., None].expand(like.shape) for e in (off, rounded))
        return terms_of(off + 2 * like.abs(), rounded)

    nothing = {"accumulate": grad_y.new_empty(0)}
    wide = [e[:, :, None].expand(back.shape) for e in (error + weights + walk.root * gamma, coarse + 4 * gamma)]
    return (
        shared(of_q, walk.roots[0], outputs[0]),
        shared(of_k, walk.roots[1], outputs[1]),
        terms_of(of_v[0], of_v[1]),
        nothing if own[3] is None else terms_of(of_g[0], of_g[1]),
        terms_of(of_beta[0], of_beta[1]),
        nothing if own[5] is None else terms_of(wide[0], wide[1]),
    )
