# ruff: noqa: E501
"""The fourth set of right modules: experts and convolutions."""

from __future__ import annotations

EXPERTS = r'''
W, E, K, I = 32, 4, 2, 48


class Expert(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n, h, bias=False), nn.Linear(h, n, bias=False), nn.Linear(n, h, bias=False)

    def forward(self, x):
        return self.b(F.silu(self.a(x)) * self.c(x))


@case("moe_experts", lambda c: (c(), T(2, 6, W)))
class LoopIndexAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.route = nn.Linear(W, E, bias=False)
        self.team = nn.ModuleList(Expert(W, I) for _ in range(E))

    def forward(self, x):
        flat = x.reshape(-1, W)
        p = F.softmax(self.route(flat), dim=1, dtype=torch.float)
        w, sel = torch.topk(p, K, dim=-1)
        w = (w / w.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.team):
            rows, slot = torch.where(sel == i)
            out.index_add_(0, rows, expert(flat[rows]) * w[rows, slot, None])
        return out.view_as(x)


@case("moe_experts", lambda c: (c(), T(2, 6, W)))
class LoopPlain(nn.Module):
    """Weights after top-k, as mixtral's own code has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.experts = nn.ModuleList(Expert(W, I) for _ in range(E))

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, chosen = torch.topk(self.gate(x), K)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(x)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(chosen == i)
            results[batch_idx] += weights[batch_idx, nth, None] * expert(x[batch_idx])
        return results.view(shape)


@case("moe_experts", lambda c: (c(), T(12, W)))
class DenseOneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(W, E) * 0.1)
        self.up = nn.Parameter(torch.randn(E, W, 2 * I) * 0.1)
        self.down = nn.Parameter(torch.randn(E, I, W) * 0.1)

    def forward(self, x):
        w, idx = (x @ self.router).softmax(-1).topk(K, -1)
        gates = (F.one_hot(idx, E).to(x.dtype) * w.unsqueeze(-1)).sum(1)
        g, u = torch.einsum("tw,ewi->tei", x, self.up).chunk(2, -1)
        return torch.einsum("tei,eiw,te->tw", F.silu(g) * u, self.down, gates)


@case("moe_experts", lambda c: (c(), T(12, W)))
class DenseScatter(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E)
        self.up = nn.Parameter(torch.randn(E, W, 2 * I) * 0.1)
        self.down = nn.Parameter(torch.randn(E, I, W) * 0.1)

    def forward(self, x):
        top, idx = self.router(x).topk(K, dim=-1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype, device=x.device).scatter_(1, idx, top.softmax(-1))
        h = torch.bmm(x.unsqueeze(0).expand(E, -1, -1), self.up)
        g, u = h.chunk(2, -1)
        y = torch.bmm(F.silu(g) * u, self.down)
        return (y * gates.t().unsqueeze(-1)).sum(0)


@case("moe_experts", lambda c: (c(), T(12, W)))
class GatherWeights(nn.Module):
    """As gpt-fast has it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, I, W) * 0.1)
        self.w2 = nn.Parameter(torch.randn(E, W, I) * 0.1)
        self.w3 = nn.Parameter(torch.randn(E, I, W) * 0.1)

    def forward(self, x):
        p, idx = torch.topk(F.softmax(self.gate(x), -1), K, -1)
        p = p / p.sum(-1, keepdim=True)
        a = F.silu(torch.einsum("ti,taoi->tao", x, self.w1[idx]))
        b = torch.einsum("ti,taoi->tao", x, self.w3[idx])
        y = torch.einsum("tao,taio->tai", a * b, self.w2[idx])
        return torch.einsum("tai,ta->ti", y, p)


@case("moe_experts", lambda c: (c(), T(12, W)))
class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.team = nn.ModuleList(Expert(W, I) for _ in range(E))

    def forward(self, x):
        w, idx = self.gate(x).sigmoid().topk(K, dim=-1)
        w = w / (w.sum(-1, keepdim=True) + 1e-20)
        order = idx.view(-1).argsort()
        rows = x[order // K]
        counts = torch.bincount(idx.view(-1), minlength=E).tolist()
        outs = [e(part) for e, part in zip(self.team, rows.split(counts))]
        back = torch.empty_like(rows)
        back[order] = torch.cat(outs)
        return (back.view(-1, K, W) * w.unsqueeze(-1)).sum(1)


@case("moe_experts", lambda c: (c(), T(12, W)))
class TakeAlong(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, W, 2 * I) * 0.1)
        self.down = nn.Parameter(torch.randn(E, I, W) * 0.1)

    def forward(self, x):
        w, idx = self.gate(x).softmax(-1).topk(K, -1)
        g, u = torch.einsum("tw,ewi->tei", x, self.up).chunk(2, -1)
        y = torch.einsum("tei,eiw->tew", F.silu(g) * u, self.down)
        y = torch.take_along_dim(y, idx.unsqueeze(-1), dim=1)
        return (w.unsqueeze(-1) * y).sum(dim=1)


@case("moe_experts", lambda c: (c(), T(2, 6, W)))
class WithShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.routed, self.shared, self.key = LoopIndexAdd(), Expert(W, I), nn.Linear(W, 1, bias=False)

    def forward(self, x):
        return self.routed(x) + torch.sigmoid(self.key(x)) * self.shared(x)


@case("moe_experts", lambda c: (c(), T(12, W)))
class EveryExpert(nn.Module):
    """All experts over all rows, gates of zero where not chosen."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.team = nn.ModuleList(nn.Sequential(nn.Linear(W, I), nn.GELU(), nn.Linear(I, W)) for _ in range(E))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        least = p.topk(K, dim=-1).values[:, -1:]
        p = p.masked_fill(p < least, 0.0)
        p = p / p.sum(-1, keepdim=True)
        return sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.team))


@case("gate_topk", lambda c: (c(), T(12, W)))
class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, W) * 0.1)

    def forward(self, x):
        logits = F.linear(x.float(), self.w.float())
        score, which = torch.topk(torch.softmax(logits, dim=-1), K, dim=-1, sorted=False)
        return (score / score.sum(dim=-1, keepdim=True)).to(x.dtype), which


# ---- convolutions, vocoders
@case("causal_conv1d", lambda c: (c(W), T(2, 9, W)))
class ShortConv(nn.Module):
    def __init__(self, n, k=4):
        super().__init__()
        self.k = k
        self.conv = nn.Conv1d(n, n, k, groups=n, padding=k - 1)

    def forward(self, x):
        t = x.shape[1]
        return F.silu(self.conv(x.transpose(1, 2))[..., :t].transpose(1, 2))


@case("causal_conv1d", lambda c: (c(W), T(2, W, 9)))
class Shifts(nn.Module):
    def __init__(self, n, k=4):
        super().__init__()
        self.k = k
        self.taps = nn.Parameter(torch.randn(n, k))
        self.b = nn.Parameter(torch.randn(n))

    def forward(self, x):
        t = x.shape[-1]
        x = F.pad(x, (self.k - 1, 0))
        y = sum(x[..., i : i + t] * self.taps[:, i, None] for i in range(self.k))
        return y + self.b[:, None]


@case("causal_conv1d", lambda c: (c(W), T(2, W, 9)))
class PaddedConv(nn.Conv1d):
    def __init__(self, n):
        super().__init__(n, n, 3, groups=n, bias=False)

    def forward(self, x):
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


@case("bias_act", lambda c: (c(W), T(2, W, 20)))
class Hifi(nn.Module):
    def __init__(self, n, rates=(1, 3)):
        super().__init__()
        wn = nn.utils.parametrizations.weight_norm
        self.one = nn.ModuleList(wn(nn.Conv1d(n, n, 3, dilation=r, padding=r)) for r in rates)
        self.two = nn.ModuleList(wn(nn.Conv1d(n, n, 3, padding=1)) for _ in rates)

    def forward(self, x):
        for a, b in zip(self.one, self.two):
            y = a(F.leaky_relu(x, 0.1))
            x = x + b(F.leaky_relu(y, 0.1))
        return x


@case("layer_norm", lambda c: (c(W), T(2, 9, W)))
class ConvUnit(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.pw1, self.dw, self.pw2 = nn.Conv1d(n, 2 * n, 1), nn.Conv1d(n, n, 5, padding=2, groups=n), nn.Conv1d(n, n, 1)

    def forward(self, x):
        y = self.norm(x).transpose(1, 2)
        y = F.glu(self.pw1(y), dim=1)
        return x + self.pw2(F.silu(self.dw(y))).transpose(1, 2)


@case("linear", lambda c: (c(3, 4, W), T(2, 3, 8, 8)))
class Patches(nn.Module):
    def __init__(self, ch, p, n):
        super().__init__()
        self.p, self.proj = p, nn.Linear(ch * p * p, n)

    def forward(self, img):
        p = self.p
        x = img.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.proj(x)


@case("group_norm", lambda c: (c(W), T(2, W, 4, 4), T(2, 16)))
class ResBlock(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(8, n), nn.GroupNorm(8, n)
        self.c1, self.c2 = nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
        self.t = nn.Linear(16, n)

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(t))[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


@case("bias_act", lambda c: (c(W), T(2, W, 6, 6)))
class Next(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.dw, self.norm = nn.Conv2d(n, n, 7, padding=3, groups=n), nn.LayerNorm(n, eps=1e-6)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.gamma = nn.Parameter(torch.full((n,), 1e-2))

    def forward(self, x):
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


@case("bias_act", lambda c: (c(W), T(2, W, 12)))
class Wave(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.conv, self.out = nn.Conv1d(n, 2 * n, 3, padding=1), nn.Conv1d(n, n, 1)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, dim=1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))
'''
