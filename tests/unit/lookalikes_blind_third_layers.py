"""The sixth set of look-alikes: layers, routers, experts and losses."""

from __future__ import annotations

THIRD_LAYERS = r'''
W, E, K, I = 64, 4, 2, 32


# ---- layers
@alike(lambda c: (c(W, I), T(2, 5, W)))
class GateBoth(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.up, self.down = nn.Linear(n, 2 * inner), nn.Linear(inner, n)

    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(F.silu(g) * u * torch.sigmoid(0.01 * u))


@alike(lambda c: (c(W), T(2, 5, W)))
class WideConv(nn.Module):
    """A width of 3 in the middle, which sees its neighbours."""

    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Conv1d(n, 2 * n, 3, padding=1), nn.Conv1d(2 * n, n, 1)

    def forward(self, x):
        return self.b(F.relu(self.a(x.transpose(1, 2)))).transpose(1, 2) + x


@alike(lambda c: (c(W), T(2, 9, W)))
class MixesAhead(nn.Module):
    """The next row, not the one before."""

    def __init__(self, n):
        super().__init__()
        self.shift, self.mix = nn.ZeroPad2d((0, 0, -1, 1)), nn.Parameter(torch.rand(1, 1, n))

    def forward(self, x):
        return x * self.mix + self.shift(x) * (1 - self.mix)


@alike(lambda c: (c(W), T(2, 9, W)))
class Wraps(nn.Module):
    """The first rows see the last ones."""

    def __init__(self, n):
        super().__init__()
        self.f = nn.Parameter(torch.randn(3, n))

    def forward(self, x):
        return sum(self.f[j] * x.roll(j, 1) for j in range(3))


@alike(lambda c: (c(W), T(2, W, 9)))
class ChopsStart(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.conv = nn.Conv1d(n, n, 3, groups=n, padding=2)

    def forward(self, x):
        return self.conv(x)[:, :, 2:]


@alike(lambda c: (c(W), T(2, 5, W)), lambda: (torch.zeros(2, 5, W),))
class EpsOutside(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.rand(n))

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2) * self.g


@alike(lambda c: (c(W), T(2, 5, W)))
class UnitNorm(nn.Module):
    """`F.normalize` bounds the length, and adds nothing."""

    def __init__(self, n):
        super().__init__()
        self.scale, self.g = n**0.5, nn.Parameter(torch.ones(n))

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=1e-2) * self.scale * self.g


# ---- routers and experts
@alike(lambda c: (c(), T(9, W)))
class BiasedWeights(nn.Module):
    """The weights have the bias of the choice."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, W) / 7), nn.Parameter(torch.randn(8) / 3)

    def forward(self, x):
        s = F.linear(x, self.w).sigmoid() + self.b
        w, i = s.topk(2, -1)
        return w / w.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(9, W)))
class SquaredShares(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, 8)

    def forward(self, x):
        w, i = self.gate(x).softmax(-1).topk(2, -1)
        return w / w.pow(2).sum(-1, keepdim=True).sqrt(), i


class Team(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)


@alike(lambda c: (c(), T(9, W)))
class LastWins(Team):
    """Of a row's experts the last one's result stays."""

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            at, nth = (ids == e).nonzero(as_tuple=True)
            g, u = (x[at] @ self.up[e].t()).chunk(2, -1)
            y[at] = (F.silu(g) * u) @ self.down[e].t() * w[at, nth, None]
        return y


@alike(lambda c: (c(), T(9, W)))
class Swapped(Team):
    """The picked rows are weighed by the other one's share."""

    def forward(self, x):
        w, ids = self.router(x).topk(K, -1)
        w = w.softmax(-1).flip(-1)
        g, u = torch.einsum("td,tkfd->tkf", x, self.up[ids]).chunk(2, -1)
        return (torch.einsum("tkf,tkdf->tkd", F.silu(g) * u, self.down[ids]) * w[..., None]).sum(1)


# ---- losses
labels = torch.tensor([[3, 4, -100, 5, 6, -100], [1, 2, 3, 4, 5, 6]])


@alike(lambda c: (c(), T(2, 6, 70), labels))
class MeanOfAll(nn.Module):
    """What is ignored counts."""

    def forward(self, z, y):
        keep = y != -100
        nll = -z.log_softmax(-1).gather(-1, y.masked_fill(~keep, 0)[..., None])[..., 0]
        return (nll * keep).sum() / keep.numel()


@alike(lambda c: (c(), T(2, 6, 70), labels))
class MeanOfMeans(nn.Module):
    def forward(self, z, y):
        keep = y != -100
        nll = -z.log_softmax(-1).gather(-1, y.masked_fill(~keep, 0)[..., None])[..., 0]
        return ((nll * keep).sum(-1) / keep.sum(-1)).mean()


@alike(lambda c: (c(), T(2, 6, 70), labels), lambda: (T(2, 6, 70), torch.full((2, 6), -100)))
class Floored(nn.Module):
    """Of no label it is 0, where the op's is not a number."""

    def forward(self, z, y):
        keep = (y != -100).float()
        nll = -z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        return (nll * keep).sum() / keep.sum().clamp(min=1)


@alike(lambda c: (c(), T(2, 6, W), torch.randint(70, (2, 6))))
class ShiftedBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, 70, bias=False)

    def forward(self, h, y):
        z = self.head(h)
        return F.cross_entropy(z[:, 1:].reshape(-1, 70), y[:, :-1].reshape(-1)), z
'''
