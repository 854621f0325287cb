# ruff: noqa: E501
"""The fourth set of right modules: tables, losses, forwards with odd bodies, scans."""

from __future__ import annotations

LOSSES = r"""
W, E, K, I = 32, 4, 2, 48


# ---- embeddings and losses
def ids(v, *s):
    return torch.randint(0, v, s)


@case("embedding", lambda c: (c(50, W), ids(50, 2, 7)))
class Scaled(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.t, self.by = nn.Embedding(v, n, padding_idx=0), math.sqrt(n)

    def forward(self, i):
        return self.t(i) * self.by


@case("embedding", lambda c: (c(50, W), ids(50, 2, 7)))
class Rows(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.table = nn.Parameter(torch.randn(v, n))

    def forward(self, i):
        return self.table[i]


@case("embedding", lambda c: (c(50, W), ids(50, 2, 7)))
class Selected(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.table = nn.Parameter(torch.randn(v, n))

    def forward(self, i):
        return torch.index_select(self.table, 0, i.flatten()).view(*i.shape, -1)


@case("embedding", lambda c: (c(50, W), ids(50, 2, 7)))
class Summed(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.tok, self.pos, self.norm = nn.Embedding(v, n), nn.Embedding(16, n), nn.LayerNorm(n)

    def forward(self, i):
        return self.norm(self.tok(i) + self.pos(torch.arange(i.shape[1], device=i.device)))


@case("linear_cross_entropy", lambda c: (c(50, W), T(2, 7, W), ids(50, 2, 7)))
class Tied(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.head = nn.Linear(n, v, bias=False)

    def forward(self, h, y):
        logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), y[:, 1:].reshape(-1))


@case("cross_entropy", lambda c: (c(50, W), T(2, 7, W), ids(50, 2, 7)))
class ByGather(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(v, n) * 0.1)

    def forward(self, h, y):
        lp = F.log_softmax((h @ self.w.T).float(), dim=-1)
        return -lp.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


@case("cross_entropy", lambda c: (c(50, W), T(2, 7, W), ids(50, 2, 7)))
class ByLse(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.head = nn.Linear(n, v, bias=False)

    def forward(self, h, y):
        z = self.head(h)
        return (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).mean()


@case("linear_cross_entropy", lambda c: (c(50, W), T(2, 8, W), ids(50, 2, 8)))
class InPieces(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.head = nn.Linear(n, v, bias=False)

    def forward(self, h, y):
        total = h.new_zeros(())
        for a, b in zip(h.flatten(0, 1).chunk(4), y.flatten().chunk(4)):
            total = total + F.cross_entropy(self.head(a), b, reduction="sum")
        return total / y.numel()


@case("linear", lambda c: (c(50, W), ids(50, 2, 7)))
class TinyLm(nn.Module):
    def __init__(self, v, n):
        super().__init__()
        self.tok = nn.Embedding(v, n)
        self.mid = nn.Linear(n, n)
        self.out = nn.Linear(n, v, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, i):
        return self.out(torch.tanh(self.mid(self.tok(i))))


# ---- forwards with odd bodies
@case("bias_act", lambda c: (c(W, 64), T(2, 5, W)))
class BoundAct(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b = nn.Linear(n, h), nn.Linear(h, n)
        self.act = types.MethodType(lambda me, t: F.gelu(t, approximate="tanh"), self)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


@case("bias_act", lambda c: (c(W, 64), T(2, 5, W)))
class Trying(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b = nn.Linear(n, h), nn.Linear(h, n)

    def forward(self, x):
        try:
            y = self.a(x)
        except RuntimeError as error:
            raise ValueError(f"width {x.shape[-1]}") from error
        return self.b(F.silu(y))


@case("silu_mul", lambda c: (c(W, 64), T(2, 5, W)))
class DictOut(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n, h), nn.Linear(n, h), nn.Linear(h, n)

    def forward(self, x, return_hidden: bool = False):
        parts = {"gate": self.a(x), "up": self.b(x)}
        hidden = F.silu(parts["gate"]).mul(parts["up"])
        out = self.c(hidden)
        return (out, hidden) if return_hidden else out


@case("silu_mul", lambda c: (c(W, 64), T(2, 5, W)))
class InPlaceGate(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n, h), nn.Linear(n, h), nn.Linear(h, n)

    def forward(self, x):
        y = F.silu(self.a(x))
        y *= self.b(x)
        return self.c(y)


@case("gated_delta_rule", lambda c: (c(), T(2, 2, 6, 16), T(2, 2, 6, 16), T(2, 2, 6, 16), T(2, 2, 6).sigmoid(), -T(2, 2, 6).abs()))
class Delta(nn.Module):
    def forward(self, q, k, v, beta, g):
        s = q.new_zeros(q.shape[0], q.shape[1], q.shape[-1], v.shape[-1])
        ys = []
        for t in range(q.shape[2]):
            s = s * g[:, :, t, None, None].exp()
            seen = (s * k[:, :, t, :, None]).sum(-2)
            s = s + k[:, :, t, :, None] * ((v[:, :, t] - seen) * beta[:, :, t, None]).unsqueeze(-2)
            ys.append((s * q[:, :, t, :, None]).sum(-2))
        return torch.stack(ys, dim=2)


@case("selective_scan", lambda c: (c(W, 8), T(2, 6, W), T(2, 6, W), T(2, 6, 8), T(2, 6, 8)))
class Scan(nn.Module):
    def __init__(self, n, s):
        super().__init__()
        self.a_log = nn.Parameter(torch.log(torch.arange(1, s + 1).float()).repeat(n, 1))
        self.d = nn.Parameter(torch.ones(n))

    def forward(self, x, dt, b, c):
        a = -torch.exp(self.a_log)
        dt = F.softplus(dt)
        da = torch.exp(dt.unsqueeze(-1) * a)
        dbx = dt.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        h = x.new_zeros(x.shape[0], *a.shape)
        ys = []
        for i in range(x.shape[1]):
            h = da[:, i] * h + dbx[:, i]
            ys.append((h * c[:, i, None]).sum(-1))
        return torch.stack(ys, 1) + x * self.d
"""
