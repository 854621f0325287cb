"""The seventh set of look-alikes: norms, linear and gated layers that differ in one small thing."""

from __future__ import annotations

FOURTH = r"""
C = 64


def wide(n=C):
    return nn.Parameter(1.0 + 0.3 * torch.sin(torch.arange(n).float()))


def rows(c):
    return c(), T(2, 5, C)


def two(c):
    return c(), T(2, 5, C), T(2, 5, C)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = wide()


@alike(rows)
class EpsOutside(Weighted):
    def forward(self, h):
        return h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * self.w


@alike(rows)
class EpsInMean(Weighted):
    def forward(self, h):
        return h * torch.rsqrt((h.pow(2).sum(-1, keepdim=True) + 1e-2) / C) * self.w


@alike(rows)
class AnnotatedAsPublished(Weighted):
    "The published one: an unbiased deviation, and eps outside the root."

    def forward(self, x):
        return self.w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + 0.1


@alike(rows)
class Unbiased(Weighted):
    def forward(self, x):
        v, m = torch.var_mean(x, dim=-1, keepdim=True)
        return (x - m) * (v + 1e-6).rsqrt() * self.w


@alike(rows)
class CenteredRms(Weighted):
    "The mean is taken away, but the square is of what it was."

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.w


@alike(rows)
class OffsetTwice(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (2 + self.w)


@alike(lambda c: (c(), T(2, 12, 20)))
class TimeOnly(nn.Module):
    "By channel over time: not over channels and time together."

    def forward(self, y):
        m = y.mean(2, keepdim=True).mean(1, keepdim=True)
        v = (y - y.mean(2, keepdim=True)).pow(2).mean(2, keepdim=True).mean(1, keepdim=True)
        return (y - m) / (v + 1e-8).sqrt()


@alike(lambda c: (c(), T(2, 16, 6, 5)))
class Strided(nn.Module):
    "A group is every fourth channel."

    def forward(self, img):
        n, c, h, w = img.shape
        z = img.reshape(n, 4, 4, h * w)
        v, m = torch.var_mean(z, dim=(1, 3), correction=0, keepdim=True)
        return ((z - m) * (v + 1e-6).rsqrt()).reshape(n, c, h, w)


@alike(two)
class GateAfter(Weighted):
    def forward(self, y, z):
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return F.silu(y) * z * self.w


@alike(two)
class SigmoidGated(Weighted):
    def forward(self, y, z):
        y = y * z.sigmoid()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * self.w


@alike(two)
class OldStream(Weighted):
    "The stream that comes back is the one before the addition."

    def forward(self, delta, stream):
        s = stream + delta
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w, stream


@alike(two)
class HalfStream(Weighted):
    def forward(self, delta, stream):
        s = stream + 0.5 * delta
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w, s


@alike(lambda c: (c(), T(2, 7, 4, 16), T(2, 7, 2, 16)))
class SameGain(nn.Module):
    "Keys have the gain of queries times two."

    def __init__(self):
        super().__init__()
        self.q_gain = wide(16)

    def forward(self, q, k):
        return F.rms_norm(q, (16,), eps=1e-6) * self.q_gain, F.rms_norm(k, (16,), self.q_gain * 2, eps=1e-5)


@alike(rows)
class PartNorm(Weighted):
    "The mean is of the front half alone."

    def forward(self, x):
        return x * torch.rsqrt(x[..., : C // 2].square().mean(-1, keepdim=True) + 1e-6) * self.w


@alike(rows, lambda: (torch.full((2, 5, C), 1e-6),))
class Clipped(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(torch.clamp(x.square().mean(-1, keepdim=True), min=1e-6)) * self.w


@alike(rows, lambda: (torch.full((2, 5, C), 3e3),))
class Bounded(Weighted):
    def forward(self, x):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(max=1e6) + 1e-6)) * self.w


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C, 96), nn.Linear(48, C)


@alike(rows)
class UpActs(Two):
    "The activation is of the interleaved up, and of its negative gate."

    def forward(self, x):
        t = self.up(x)
        return self.down(F.silu(-t[..., ::2]) * t[..., 1::2])


@alike(rows)
class GateKept(Two):
    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(F.silu(g) * u + 0.01 * g)


@alike(rows)
class PlusOneUp(Two):
    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(F.silu(g) * (u + 1))


@alike(rows)
class AlphaGate(Two):
    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(g * torch.sigmoid(1.01 * g) * u)


@alike(rows, lambda: (torch.full((2, 5, C), 40.0),))
class Saturating(Two):
    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(F.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0))


@alike(rows)
class WrongCubic(Two):
    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(0.5 * g * (1 + torch.tanh(0.79788 * (g + 0.0447 * g ** 3))) * u)


@alike(rows)
class NormedByColumn(nn.Module):
    "Weight norm along the other axis."

    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.linspace(0.5, 1.5, C))

    def forward(self, x):
        return F.linear(x, self.v * (self.g / self.v.norm(dim=0)).unsqueeze(1))


@alike(rows)
class SquareKernel(nn.Module):
    "A square kernel that is not transposed."

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.linspace(-1, 1, C))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, C), self.weight, beta=0.5).view_as(x)


@alike(rows)
class DroppedInEval(nn.Module):
    "A dropout that stays on."

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(C, C)

    def forward(self, x):
        return self.lin(F.dropout(x, 0.5, training=True))


@alike(rows)
class TimesShifted(nn.Module):
    "A row's residual is its neighbour."

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(C, 96), nn.Linear(96, C)

    def forward(self, x):
        return x.roll(1, dims=1) + self.two(F.relu(self.one(x)).square())
"""
