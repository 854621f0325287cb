"""The fourth set of right modules: rotary embeddings."""

from __future__ import annotations

ROPE = r"""
W, H, D, S = 64, 4, 16, 7


def angles(t, d, base=10000.0):
    inv = base ** (-torch.arange(0, d, 2).float() / d)
    return torch.outer(torch.arange(t).float(), inv)


def waves(t, d):
    a = angles(t, d)
    return torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()


# ---- rotary
@case("rope", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), *waves(S, D)))
class TurnBoth(nn.Module):
    @staticmethod
    def flip(v):
        half = v.shape[-1] // 2
        return torch.cat((v[..., half:].neg(), v[..., :half]), -1)

    def forward(self, q, k, c, s):
        return torch.addcmul(q * c, self.flip(q), s), torch.addcmul(k * c, self.flip(k), s)


@case("rope", lambda c: (c(D), T(2, S, H, D)))
class ComplexTurn(nn.Module):
    def __init__(self, d, longest=32):
        super().__init__()
        a = angles(longest, d)
        self.register_buffer("cis", torch.polar(torch.ones_like(a), a), persistent=False)

    def forward(self, x):
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        z = z * self.cis[None, : x.shape[1], None]
        return torch.view_as_real(z).flatten(3).type_as(x)


@case("rope", lambda c: (c(D), T(2, S, H, D)))
class EvenOdd(nn.Module):
    def __init__(self, d, longest=32):
        super().__init__()
        self.register_buffer("cos", angles(longest, d).cos())
        self.register_buffer("sin", angles(longest, d).sin())

    def forward(self, x):
        t = x.size(1)
        c, s = self.cos[:t].view(1, t, 1, -1), self.sin[:t].view(1, t, 1, -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)


@case("rope", lambda c: (c(), T(2, H, S, 2 * D), *waves(S, D)))
class SomeOfIt(nn.Module):
    def forward(self, x, cos, sin):
        n = cos.shape[-1]
        turned, kept = x[..., :n], x[..., n:]
        a, b = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-b, a], -1) * sin
        return torch.cat([turned, kept], dim=-1)


@case("rope", lambda c: (c(D), T(2, S, H, D), torch.randint(0, 30, (2, S))))
class ByPosition(nn.Module):
    def __init__(self, d, longest=32):
        super().__init__()
        a = angles(longest, d)
        self.register_buffer("table", torch.cat([a.cos(), a.sin()], -1), persistent=False)

    def forward(self, x, where):
        cos, sin = self.table[where].unsqueeze(2).chunk(2, dim=-1)
        l, r = torch.chunk(x, 2, dim=-1)
        return torch.cat((l * cos - r * sin, r * cos + l * sin), dim=-1)


@case("rope", lambda c: (c(), T(2, H, S, D), angles(S, D).cos(), angles(S, D).sin()))
class InPlaceTurn(nn.Module):
    def forward(self, x, cos, sin):
        n = x.shape[-1] // 2
        out = torch.empty_like(x)
        out[..., :n] = x[..., :n] * cos - x[..., n:] * sin
        out[..., n:] = x[..., n:] * cos + x[..., :n] * sin
        return out


@case("rope", lambda c: (c(), T(2, H, S, D), *waves(S, D)))
class RollTurn(nn.Module):
    def forward(self, x, cos, sin):
        n = x.shape[-1] // 2
        sign = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        sign[:n] = -1
        return x * cos + torch.roll(x, n, dims=-1) * (sin * sign)


@case("rope", lambda c: (c(), T(2, H, S, D), *waves(S, D)))
class StackTurn(nn.Module):
    def turn(self, x):
        a, b = x.unflatten(-1, (2, -1)).unbind(-2)
        return torch.stack((-b, a), dim=-2).flatten(-2)

    def forward(self, x, cos, sin):
        wide = x.float()
        return (wide * cos + self.turn(wide) * sin).to(x.dtype)


def matrices(t, d):
    a = angles(t, d)
    m = torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()], -1)
    return m.unflatten(-1, (2, 2))[None, None]


@case("rope", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), matrices(S, D)))
class MatrixTurn(nn.Module):
    def forward(self, xq, xk, pe):
        q = xq.float().reshape(*xq.shape[:-1], -1, 1, 2)
        k = xk.float().reshape(*xk.shape[:-1], -1, 1, 2)
        q = pe[..., 0] * q[..., 0] + pe[..., 1] * q[..., 1]
        k = pe[..., 0] * k[..., 0] + pe[..., 1] * k[..., 1]
        return q.reshape(*xq.shape).type_as(xq), k.reshape(*xk.shape).type_as(xk)


@case("rope", lambda c: (c(D), T(2, H, S, D)))
class GrowingTable(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        self.known = 0
        self.cos = self.sin = None

    def _grow(self, t, like):
        if self.cos is None or t > self.known:
            self.known = t
            c, s = waves(t, self.d)
            self.cos, self.sin = c.to(like), s.to(like)

    def forward(self, x):
        t = x.shape[-2]
        self._grow(t, x)
        a, b = x.split(self.d // 2, dim=-1)
        return x * self.cos[:t] + torch.cat((-b, a), -1) * self.sin[:t]


@case("rope", lambda c: (c((2, 3, 3)), T(2, H, S, D), T(3, 2, S, D), T(3, 2, S, D)))
class Sections(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = list(parts) * 2

    def forward(self, q, cos, sin):
        cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(self.parts, dim=-1))], dim=-1).unsqueeze(1)
        sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(self.parts, dim=-1))], dim=-1).unsqueeze(1)
        half = q.shape[-1] // 2
        return q * cos + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * sin
"""
