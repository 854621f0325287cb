"""Right modules of the mechanisms that the seventh set showed to be missing."""

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
        self.sinks, self.scaling = nn.Parameter(torch.linspace(-1, 1, H)), D ** -0.5

    def repeated(self, x):
        b, h, n, d = x.shape
        return x[:, :, None].expand(b, h, 2, n, d).reshape(b, h * 2, n, d)


@case("attention", lambda c: (*grouped(c), torch.full((S, S), -3e38).triu(1)[None, None]))
class SinkAndMask(Sinks):
    def forward(self, query, key, value, mask):
        key, value = self.repeated(key), self.repeated(value)
        w = torch.matmul(query, key.transpose(2, 3)) * self.scaling + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        both = torch.cat([w, sinks], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        p = F.softmax(both, dim=-1, dtype=both.dtype)
        return torch.matmul(p[..., :-1], value).transpose(1, 2).contiguous()


@case("attention", grouped)
class SinkCausal(Sinks):
    def forward(self, q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        s = q @ k.mT * self.scaling
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf"))
        s = torch.cat((s, self.sinks[None, :, None, None].expand(*s.shape[:-1], 1)), -1)
        return s.softmax(-1)[..., :-1] @ v


@case("attention", three)
class SinkInTheSum(Sinks):
    def forward(self, q, k, v):
        s, sink = q @ k.mT * self.scaling, self.sinks.view(-1, 1, 1)
        m = torch.maximum(s.amax(-1, keepdim=True), sink)
        e = torch.exp(s - m)
        return e / (e.sum(-1, keepdim=True) + torch.exp(sink - m)) @ v


@case("attention", three)
class AddedInfinity(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT * D ** -0.5
        s = s + torch.triu(s.new_full((q.shape[2], q.shape[2]), -float("inf")), diagonal=1)
        return torch.softmax(s, dim=-1) @ v


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(W, D), nn.Linear(W, D), nn.Linear(W, D)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)))


@case("attention", lambda c: (c(), T(2, S, W)))
class InOneLine(OneHead):
    def forward(self, x):
        w = self.q(x) @ self.k(x).transpose(-2, -1) * D ** -0.5
        w = w.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return F.softmax(w, dim=-1) @ self.v(x)


@case("attention", lambda c: (c(), T(2, S, W)))
class BiasByMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(W, W, bias=False) for _ in range(3))
        self.table = nn.Embedding(9, H)

    def bias(self, n):
        p = torch.arange(n)
        return self.table((p[None, :] - p[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x):
        n = x.size(0)
        scores = self.q(x).view(n, -1, H, D).transpose(1, 2) @ self.k(x).view(n, -1, H, D).transpose(1, 2).mT
        scores = scores + self.bias(x.size(1))
        return F.softmax(scores, dim=-1) @ self.v(x).view(n, -1, H, D).transpose(1, 2)


@case("rope", lambda c: (c(), T(2, S, H, D)))
class TurnedByMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.outer(torch.arange(S).float(), 100.0 ** (-torch.arange(0, D, 2).float() / D)))

    def turn(self, t, a):
        a = a[:, None]
        u, v = t.chunk(2, -1)
        return torch.cat((u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()), -1)

    def forward(self, t):
        return self.turn(t, self.a)


class Tabled(nn.Module):
    ACTS = {"swish": lambda t: t * torch.sigmoid(t), "relu": torch.relu}

    def __init__(self, act="swish"):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(C, 96), nn.Linear(48, C), act


@case("silu_mul", lambda c: (c(), T(2, 5, C)))
class OfATable(Tabled):
    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1)
        return self.down(up * self.ACTS[self.act](gate))


@case("silu_mul", lambda c: (c(), T(2, 5, C)))
class OfItsTable(Tabled):
    def __init__(self):
        super().__init__()
        self.known = {"swish": F.silu, "relu": torch.relu}

    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1)
        return self.down(up * self.known[self.act](gate))


@case("bias_act", lambda c: (c(), T(2, 5, C)))
class SquareOfLocal(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(C, 96), nn.Linear(96, C)

    def forward(self, x):
        h = torch.clamp(self.k(x), min=0)
        return self.v(h * h)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(1 + 0.3 * torch.randn(C))


def pair(c):
    return c(), T(2, 5, C), T(2, 5, C)


@case("add_rms_norm", pair)
class SumInFloat(Weighted):
    def forward(self, x, residual):
        h = x + residual
        f = h.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * self.w.float()).type_as(x), h


@case("add_rms_norm", pair)
class SumFirst(Weighted):
    def forward(self, x, residual):
        h = residual + x
        return h, F.rms_norm(h, (C,), self.w, 1e-5)


@case("add_layer_norm", pair)
class PostNormed(Weighted):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(0.3 * torch.randn(C))

    def forward(self, x, sub):
        h = x + sub
        d = h - h.mean(-1, keepdim=True)
        return d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5) * self.w + self.b


class Mat(nn.Module):
    def __init__(self):
        super().__init__()
        self.m, self.b = nn.Parameter(torch.randn(40, C)), nn.Parameter(torch.randn(40))
        self.one, self.two = nn.Linear(C, 24), nn.Linear(C, 16)


@case("linear", lambda c: (c(), T(2, 5, C)))
class LengthAndDirection(Mat):
    def forward(self, x):
        w = self.m / self.m.norm(dim=1, keepdim=True) * self.b.unsqueeze(1)
        return x @ w.t()


@case("linear", lambda c: (c(), T(2, 5, C)))
class JoinedWeights(Mat):
    def forward(self, x):
        return torch.matmul(x, torch.cat([self.one.weight, self.two.weight], 0).T)


@case("linear", lambda c: (c(), T(2, 5, C)))
class LowRankAdded(nn.Module):
    def __init__(self):
        super().__init__()
        self.m, self.a, self.b = (nn.Parameter(torch.randn(*s) / 8) for s in ((40, C), (4, C), (40, 4)))

    def forward(self, x):
        w = self.m + 2.0 * self.b @ self.a
        return torch.einsum("bsd,vd->bsv", x, w)


def scanned(c):
    return c(), T(2, 8, 7), F.softplus(T(2, 8, 7)), -torch.rand(8, 4) - 0.1, T(2, 4, 7), T(2, 4, 7)


def rows_scanned(c):
    return c(), T(2, 7, 8), T(2, 7, 8), -torch.rand(8, 4) - 0.1, T(2, 7, 4), T(2, 7, 4)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip, self.bias = nn.Parameter(torch.linspace(-1, 1, 8)), nn.Parameter(torch.linspace(-1, 1, 8))


def loop(u, dt, a, b, c, skip):
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        d = dt[:, :, t, None]
        state = torch.exp(d * a) * state + d * u[:, :, t, None] * b[:, None, :, t]
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@case("selective_scan", scanned)
class ByLoop(Skip):
    def forward(self, u, dt, a, b, c):
        return loop(u, dt, a, b, c, self.skip)


def with_options(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, last=False):
    kind, u, delta, B, C = u.dtype, u.float(), delta.float(), B.float(), C.float()
    if delta_bias is not None:
        delta = delta + delta_bias[..., None].float()
    if delta_softplus:
        delta = F.softplus(delta)
    x, ys = A.new_zeros((u.shape[0], A.shape[0], A.shape[1])), []
    decay, drive = torch.exp(torch.einsum("bdl,dn->bdln", delta, A)), torch.einsum("bdl,bnl,bdl->bdln", delta, B, u)
    for i in range(u.shape[2]):
        x = decay[:, :, i] * x + drive[:, :, i]
        ys.append(torch.einsum("bdn,bn->bd", x, C[:, :, i]))
    y = torch.stack(ys, dim=2)
    y = y if D is None else y + u * D[:, None]
    y = (y if z is None else y * F.silu(z)).to(kind)
    return (y, x) if last else y


@case("selective_scan", lambda c: (*scanned(c), T(2, 8, 7)))
class ByOptions(Skip):
    def forward(self, u, dt, a, b, c, z):
        return with_options(u, dt, a, b, c, D=self.skip, z=z, delta_bias=self.bias, delta_softplus=True)


@case("selective_scan", scanned)
class WithLast(Skip):
    def forward(self, u, dt, a, b, c):
        return with_options(u, dt, a, b, c, self.skip, last=True)


def minimal(u, delta, A, B, C, D):
    (b, l, d), n = u.shape, A.shape[1]
    decay = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
    drive = torch.einsum("bld,bln,bld->bldn", delta, B, u)
    x, ys = torch.zeros((b, d, n), device=decay.device), []
    for i in range(l):
        x = decay[:, i] * x + drive[:, i]
        ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
    return torch.stack(ys, dim=1) + u * D


@case("selective_scan", rows_scanned)
class Minimal(Skip):
    def forward(self, u, dt, a, b, c):
        return minimal(u, F.softplus(dt), a, b, c, self.skip)
"""
