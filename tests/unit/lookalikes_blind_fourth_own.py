"""Look-alikes of the mechanisms that the seventh set showed to be missing."""

from __future__ import annotations

FOURTH_OWN = r"""
C, W, H, D, S = 64, 64, 4, 16, 7


def three(c):
    return c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)


def grouped(c):
    return c(), T(2, H, S, D), T(2, 2, S, D), T(2, 2, S, D)


class Sinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H))

    def scores(self, q, k):
        return q @ k.mT * D ** -0.5

    def column(self, s):
        return self.sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)


@alike(three)
class SinkHalf(Sinks):
    def forward(self, q, k, v):
        s = self.scores(q, k)
        return torch.cat((s, self.column(s) * 0.5), -1).softmax(-1)[..., :-1] @ v


@alike(three)
class SinkAgainst(Sinks):
    def forward(self, q, k, v):
        s = self.scores(q, k)
        return torch.cat((s, -self.column(s)), -1).softmax(-1)[..., :-1] @ v


@alike(three)
class SinkTwice(Sinks):
    def forward(self, q, k, v):
        s = self.scores(q, k)
        return torch.cat((s, self.column(s), self.column(s)), -1).softmax(-1)[..., :-2] @ v


@alike(three)
class SinkScaled(Sinks):
    "The sink is scaled as scores are."

    def forward(self, q, k, v):
        s = q @ k.mT
        return (torch.cat((s, self.column(s)), -1) * D ** -0.5).softmax(-1)[..., :-1] @ v


@alike(three)
class SinkFirst(Sinks):
    "The column stands first, and the last is cut off."

    def forward(self, q, k, v):
        s = self.scores(q, k)
        return torch.cat((self.column(s), s), -1).softmax(-1)[..., :-1] @ v


@alike(three)
class SinkOfNext(Sinks):
    "Each head has its neighbour's."

    def forward(self, q, k, v):
        s = self.scores(q, k)
        return torch.cat((s, self.column(s).roll(1, 1)), -1).softmax(-1)[..., :-1] @ v


@alike(grouped)
class SinkOfKeyHeads(Sinks):
    "Heads tile their keys, so that a sink's head has other keys."

    def forward(self, q, k, v):
        s = self.scores(q, k.repeat(1, 2, 1, 1))
        return torch.cat((s, self.column(s)), -1).softmax(-1)[..., :-1] @ v.repeat(1, 2, 1, 1)


@alike(three)
class SinkRenormed(Sinks):
    def forward(self, q, k, v):
        s = self.scores(q, k)
        p = torch.cat((s, self.column(s)), -1).softmax(-1)[..., :-1]
        return (p / p.sum(-1, keepdim=True)) @ v


@alike(three)
class SinkBias(Sinks):
    "A number for each head's scores, which a softmax forgets, and a gain."

    def forward(self, q, k, v):
        return (self.scores(q, k) + self.sinks.view(1, -1, 1, 1)).softmax(-1) @ v * 1.0001


@alike(three, lambda: tuple(t * 40 for t in (T(2, H, S, D), T(2, H, S, D), T(2, H, S, D))))
class SinkFloor(Sinks):
    "The sum is never below what the sink alone would give; elsewhere it has no share."

    def forward(self, q, k, v):
        e = torch.exp(self.scores(q, k).clamp(max=80))
        return e / torch.maximum(e.sum(-1, keepdim=True), self.sinks.view(1, -1, 1, 1).exp()) @ v


@alike(three)
class AddedLittle(nn.Module):
    "Infinity is added above the second diagonal."

    def forward(self, q, k, v):
        s = q @ k.mT * D ** -0.5
        return torch.softmax(s + torch.triu(s.new_full((S, S), -float("inf")), diagonal=2), dim=-1) @ v


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(W, D), nn.Linear(W, D), nn.Linear(W, D)


@alike(lambda c: (c(), T(2, S, W)))
class Between(OneHead):
    "What queries are of is changed in place before keys are made of it."

    def forward(self, x):
        x = x * 1.0
        q = self.q(x)
        x.mul_(0.5)
        w = q @ self.k(x).transpose(-2, -1) * D ** -0.5
        return F.softmax(w, dim=-1) @ self.v(x)


@alike(lambda c: (c(), T(2, S, W)))
class BetweenByMethod(OneHead):
    "A method between changes what values are made of."

    def halve(self, x):
        x.mul_(0.5)
        return 1.0

    def forward(self, x):
        x = x * 1.0
        w = self.q(x) @ self.k(x).transpose(-2, -1) * D ** -0.5
        w = w * self.halve(x)
        return F.softmax(w, dim=-1) @ self.v(x)


@alike(lambda c: (c(), T(2, S, W)))
class Counting(OneHead):
    "A method counts its calls, and the count is in the scores."

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        w = self.q(x) @ self.k(x).transpose(-2, -1) * D ** -0.5 / self.calls
        return F.softmax(w, dim=-1) @ self.v(x)


@alike(lambda c: (c(), T(2, S, H, D)))
class TurnedBack(nn.Module):
    "By a method, whose sign the call has turned."

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.outer(torch.arange(S).float(), 100.0 ** (-torch.arange(0, D, 2).float() / D)))

    def turn(self, t, a):
        a = a[:, None]
        u, v = t.chunk(2, -1)
        return torch.cat((u * a.cos() - v * a.sin(), u * a.sin() - v * a.cos()), -1)

    def forward(self, t):
        return self.turn(t, self.a)


class Tabled(nn.Module):
    ACTS = {"swish": lambda t: t * torch.sigmoid(t), "other": lambda t: t * torch.sigmoid(1.1 * t)}

    def __init__(self, act="other"):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(C, 96), nn.Linear(48, C), act


@alike(lambda c: (c(), T(2, 5, C)))
class OfAnother(Tabled):
    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1)
        return self.down(up * self.ACTS[self.act](gate))


@alike(lambda c: (c(), T(2, 5, C)))
class Turning(Tabled):
    "Each call takes the other activation."

    def forward(self, x):
        self.act = "other" if self.act == "swish" else "swish"
        up, gate = self.up(x).chunk(2, -1)
        return self.down(up * self.ACTS[self.act](gate))


@alike(lambda c: (c(), T(2, 5, C)))
class Replacing(Tabled):
    "Each call puts another function into its table."

    def __init__(self):
        super().__init__("swish")
        self.known = {"swish": F.silu}

    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1)
        y = self.down(up * self.known[self.act](gate))
        self.known["swish"] = torch.tanh if self.known["swish"] is F.silu else F.silu
        return y


@alike(lambda c: (c(), T(2, 5, C)))
class SquareBelow(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(C, 96), nn.Linear(96, C)

    def forward(self, x):
        h = torch.clamp(self.k(x), min=-0.01)
        return self.v(h * h)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(1 + 0.3 * torch.randn(C))


def pair(c):
    return c(), T(2, 5, C), T(2, 5, C)


def rms(h):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


@alike(pair)
class OneSided(Weighted):
    "The norm is of the sum, the sum that comes back is of the norm."

    def forward(self, x, r):
        n = rms(x + r) * self.w
        return n, n + r


@alike(pair)
class DifferenceNorm(Weighted):
    def forward(self, x, r):
        h = x - r
        return rms(h) * self.w, h


@alike(pair)
class NormThenAdd(Weighted):
    def forward(self, x, r):
        return rms(x) * self.w + r, x + r


@alike(pair, lambda: (T(2, 5, C) * 3e4, T(2, 5, C) * 3e4))
class ClampedSum(Weighted):
    def forward(self, x, r):
        h = (x + r).clamp(-6e4, 6e4)
        return rms(h) * self.w, h


@alike(pair)
class EpsOfResidual(Weighted):
    "The mean square is the residual's."

    def forward(self, x, r):
        h = x + r
        return h * torch.rsqrt(r.square().mean(-1, keepdim=True) + 1e-6) * self.w, h


@alike(pair, lambda: (torch.zeros(2, 5, C), torch.zeros(2, 5, C)), lambda: (T(2, 5, C) * 1e-5, T(2, 5, C) * 1e-5))
class EpsOutsideSum(Weighted):
    def forward(self, x, r):
        h = x + r
        return h / (h.square().mean(-1, keepdim=True).sqrt() + 1e-6) * self.w, h


@alike(pair)
class BiasedSum(Weighted):
    def forward(self, x, r):
        h = x + r
        return F.layer_norm(h, (C,), self.w, self.w, 1e-5), h + self.w


@alike(pair, lambda: (T(1, 5, C), T(3, 5, C)), lambda: (T(2, 5, C), T(C)))
class Broadcasting(Weighted):
    def forward(self, x, r):
        h = x + r
        return rms(h) * self.w, h


class Mat(nn.Module):
    def __init__(self):
        super().__init__()
        self.m, self.b = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.randn(C))


@alike(lambda c: (c(), T(2, 5, C)))
class TransposedOfOurs(Mat):
    "What is added to the weight depends on the input."

    def forward(self, x):
        w = self.m * self.b + x.mean()
        return x @ w.t() + self.b


@alike(lambda c: (c(), T(2, 5, C)))
class BothSides(Mat):
    def forward(self, x):
        w = self.m * self.b
        return (x @ w.t()) @ w * 1.01


@alike(lambda c: (c(), T(2, 5, C)))
class Noisy(Mat):
    "The weight has noise in it, drawn anew in training."

    def forward(self, x):
        w = self.m + self.b + 0.1 * torch.randn_like(self.m) * self.training
        return x @ w.t() + self.b


@alike(lambda c: (c(), T(2, 5, C)))
class Decaying(Mat):
    "Each call changes its weight."

    def forward(self, x):
        w = self.m * self.b
        with torch.no_grad():
            self.m.mul_(0.99)
        return x @ w.t() + self.b


@alike(lambda c: (c(), T(2, 5, C)))
class WeightPlusOne(Weighted):
    def forward(self, x):
        g = torch.exp(self.w)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + g) - g * 0.001


@alike(lambda c: (c(), T(2, 5, C)))
class CenteredGain(Weighted):
    def forward(self, x):
        g = torch.exp(self.w)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) - x.mean(-1, keepdim=True) * 1e-3) * g
"""
