"""A fourth set of look-alikes, each with inputs that show its one difference: norms and layers."""

from __future__ import annotations

LAYERS = r"""
N = 48
x3 = lambda c: (c(N), T(2, 5, N))
tiny = lambda: (T(2, 5, N) * 1e-4,)
none = lambda: (torch.zeros(2, 5, N),)
huge = lambda: (T(2, 5, N) * 1e3,)
one = lambda: (T(2, 1, N),)


class Scaled(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.rand(n) + 0.5)
        self.b = nn.Parameter(torch.randn(n))


@alike(x3, tiny, none)
class EpsOutside(Scaled):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * self.g


@alike(x3, tiny, none)
class Annotated(Scaled):
    def forward(self, x):
        return self.g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


@alike(x3, tiny, none)
class Normalised(Scaled):
    def forward(self, x):
        return F.normalize(x, dim=-1) * self.g.numel() ** 0.5 * self.g


@alike(lambda c: (c(N), T(2, N, N)))
class OtherAxis(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6) * self.g


@alike(x3)
class HalfMean(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x[..., : N // 2].pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


@alike(x3)
class Detached(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).detach() * self.g


@alike(x3, tiny, none)
class MinClamp(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1e-6)) * self.g


@alike(x3)
class L1Norm(Scaled):
    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + 1e-6) * self.g


@alike(x3, one)
class SkipsOne(Scaled):
    def forward(self, x):
        if x.shape[1] == 1:
            return x * self.g
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


@alike(x3, huge)
class Rescues(Scaled):
    def forward(self, x):
        if x.abs().max() > 100:
            x = x / 100
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0) * self.g


@alike(x3, tiny)
class EpsOfType(Scaled):
    def forward(self, x):
        return F.layer_norm(x, (N,), self.g, self.b, torch.finfo(x.dtype).eps * 100)


@alike(lambda c: (c(), T(2, N, 4, 4)))
class UnbiasedGroups(nn.Module):
    def forward(self, x):
        y = x.view(2, 4, -1)
        return ((y - y.mean(-1, True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()).view_as(x)


@alike(lambda c: (c(N), T(2, 5, N), T(2, 5, N)))
class KeepsOld(Scaled):
    def forward(self, x, stream):
        y = x + stream
        return y * torch.rsqrt(y.pow(2).mean(-1, True) + 1e-6) * self.g, stream


@alike(lambda c: (c(N), T(2, 5, N), T(2, 5, N)))
class GatesHalf(Scaled):
    def forward(self, x, z):
        y = x * F.silu(z)
        return y * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6) * self.g


class Mlp(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n, 64), nn.Linear(n, 64), nn.Linear(64, n)
        self.calls = 0


@alike(x3, huge)
class ClampsBoth(Mlp):
    def forward(self, x):
        return self.c(F.silu(self.a(x).clamp(-7, 7)) * self.b(x))


@alike(x3)
class Mistyped(Mlp):
    def forward(self, x):
        x = self.a(x)
        return self.c(0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.04715 * x**3))))


@alike(x3)
class SumGate(Mlp):
    def forward(self, x):
        return self.c(F.silu(self.a(x)) + self.b(x))


@alike(x3)
class SignedSquare(Mlp):
    def forward(self, x):
        y = self.a(x)
        return self.c(y * y.abs())


@alike(x3)
class Counts(Mlp):
    def forward(self, x):
        self.calls += 1
        return self.c(F.silu(self.a(x)) * self.b(x)) * (1 + self.calls)


@alike(x3)
class Rounded(Mlp):
    def forward(self, x):
        y = self.a(x)
        y = y + (torch.round(y * 16) / 16 - y).detach()
        return self.c(F.silu(y) * self.b(x))


@alike(x3)
class FakeQuant(Mlp):
    def forward(self, x):
        w = self.a.weight
        s = w.abs().amax(1, keepdim=True) / 7
        return F.linear(x, (w / s).round() * s, self.a.bias)


@alike(x3, lambda: (T(5, N),))
class NoBiasFlat(Mlp):
    def forward(self, x):
        return F.linear(x, self.a.weight, self.a.bias if x.dim() == 3 else None)


@alike(x3)
class TanhGlu(Mlp):
    def forward(self, x):
        return self.c(torch.tanh(self.a(x)) * self.b(x).relu())


@alike(x3)
class SiluOfBoth(Mlp):
    def forward(self, x):
        return self.c(F.silu(self.a(x) * self.b(x)))


@alike(x3)
class Hooked(Mlp):
    def __init__(self, n):
        super().__init__(n)
        self.a.register_forward_hook(lambda m, i, o: o * 2)

    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))


@alike(x3)
class Patched(Mlp):
    def __init__(self, n):
        super().__init__(n)
        old = self.a.forward
        self.a.forward = lambda x: old(x).roll(1, -1)

    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))


@alike(x3)
class Masked(nn.Linear):
    def __init__(self, n):
        super().__init__(n, n)
        self.register_buffer("mask", torch.rand(n, n) > 0.5)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


@alike(x3)
class PrunedIn(Mlp):
    def __init__(self, n):
        super().__init__(n)
        nn.utils.prune.l1_unstructured(self.a, "weight", 0.5)

    def forward(self, x):
        return self.c(F.gelu(self.a(x)))


@alike(x3)
class Spectral(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(n, n))

    def forward(self, x):
        return F.gelu(self.a(x))


@alike(x3)
class MeanShift(nn.Linear):
    def __init__(self, n):
        super().__init__(n, n)

    def forward(self, x):
        return super().forward(x) - self.weight.mean()
"""
