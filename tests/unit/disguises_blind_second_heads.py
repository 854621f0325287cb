# ruff: noqa: E501
"""The fifth set of right modules: attention, softmax, losses and experts."""

from __future__ import annotations

SECOND_HEADS = r"""
W, H, D, S = 64, 4, 16, 7


# ---- softmax
@case("softmax", lambda c: (c(), T(2, 3, W)))
class Stable(nn.Module):
    def forward(self, z):
        e = torch.exp(z - torch.amax(z, dim=-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


@case("softmax", lambda c: (c(), T(2, 3, W)))
class Temperature(nn.Module):
    def forward(self, z):
        return torch.softmax(z.float(), dim=2).to(z.dtype)


# ---- attention
class Projected(nn.Module):
    def __init__(self, n=W, h=H):
        super().__init__()
        self.h, self.d = h, n // h
        self.qkv, self.out = nn.Linear(n, 3 * n), nn.Linear(n, n)


@case("attention", lambda c: (c(), T(2, S, W)))
class ByEinsum(Projected):
    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.h, self.d).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.d)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, s, n))


@case("attention", lambda c: (c(), T(2, S, W)))
class ByBaddbmm(Projected):
    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.reshape(b, s, self.h, self.d).transpose(1, 2).reshape(b * self.h, s, self.d) for t in self.qkv(x).chunk(3, -1))
        scores = torch.baddbmm(torch.zeros(b * self.h, s, s, dtype=x.dtype), q, k.transpose(1, 2), beta=0, alpha=self.d**-0.5)
        y = torch.bmm(scores.softmax(dim=-1), v)
        return self.out(y.view(b, self.h, s, self.d).transpose(1, 2).reshape(b, s, n))


@case("attention", lambda c: (c(), T(2, S, W)))
class CausalBuffer(Projected):
    def __init__(self):
        super().__init__()
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32), persistent=False)

    def forward(self, x):
        b, s, n = x.size()
        q, k, v = self.qkv(x).split(n, dim=2)
        q, k, v = (t.view(b, s, self.h, n // self.h).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.tril[:, :, :s, :s] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, s, n))


@case("attention", lambda c: (c(), T(2, S, W)))
class CausalMade(Projected):
    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(diagonal=1)
        att = (q * self.d**-0.5) @ k.mT
        att = att.masked_fill(hidden, torch.finfo(att.dtype).min)
        return self.out((att.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, S, W)))
class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(W, W, bias=False), nn.Linear(W, 2 * 2 * D, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, H, D).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 2, D).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(H // 2, dim=1), v.repeat_interleave(H // 2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, W))


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), T(1, H, S, S)))
class Relative(nn.Module):
    def forward(self, q, k, v, bias):
        w = torch.matmul(q, k.transpose(2, 3)) + bias
        return torch.matmul(F.softmax(w.float(), -1).type_as(w), v)


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class Expanded(nn.Module):
    def forward(self, q, k, v):
        b, g, s, d = k.shape
        k = k[:, :, None].expand(b, g, q.size(1) // g, s, d).reshape(b, -1, s, d)
        v = v[:, :, None].expand(b, g, q.size(1) // g, s, d).reshape(b, -1, s, d)
        p = (q @ k.transpose(-1, -2) * d**-0.5).softmax(-1, dtype=torch.float32).to(q.dtype)
        return p @ v


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Capped(nn.Module):
    def forward(self, q, k, v):
        a = q @ k.mT * 0.25
        a = 30.0 * torch.tanh(a / 30.0)
        return a.softmax(-1) @ v


@case("attention", lambda c: (c(), T(2, S, W)))
class NormedHeads(Projected):
    def __init__(self):
        super().__init__()
        self.qn, self.kn = nn.RMSNorm(self.d, eps=1e-6), nn.RMSNorm(self.d, eps=1e-6)

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, self.h, self.d).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v)
        return self.out(y.transpose(1, 2).reshape(b, s, n))


# ---- losses
@case("cross_entropy", lambda c: (c(), T(5, W), torch.randint(0, W, (5,))))
class ByGather(nn.Module):
    def forward(self, z, y):
        lp = torch.log_softmax(z, dim=-1)
        return -lp.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


@case("cross_entropy", lambda c: (c(), T(2, 5, W), torch.randint(0, W, (2, 5))))
class Shifted(nn.Module):
    def forward(self, logits, labels):
        z = logits[:, :-1].contiguous().view(-1, logits.size(-1))
        return F.cross_entropy(z, labels[:, 1:].reshape(-1), ignore_index=-100)


@case("cross_entropy", lambda c: (c(), T(5, W), torch.randint(0, W, (5,))))
class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, z, y):
        return self.loss(z.float(), y)


@case("linear_cross_entropy", lambda c: (c(), T(5, W), torch.randint(0, 90, (5,))))
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(W, 90, bias=False)

    def forward(self, h, y):
        return F.cross_entropy(self.lm_head(h), y)


# ---- experts
@case("gate_topk", lambda c: (c(), T(6, 16)))
class Router(nn.Module):
    def forward(self, z):
        p = z.float().softmax(-1)
        w, i = p.topk(2, dim=-1)
        return (w / w.sum(-1, keepdim=True)).to(z.dtype), i


@case("gate_topk", lambda c: (c(), T(6, 16)))
class TopFirst(nn.Module):
    def forward(self, z):
        top, which = torch.topk(z, 2)
        return F.softmax(top, dim=-1, dtype=torch.float).type_as(z), which


@case("moe_experts", lambda c: (c(), T(6, W), torch.rand(6, 2), torch.stack([torch.randperm(4)[:2] for _ in range(6)])))
class Stacked(nn.Module):
    def __init__(self, e=4, inner=32):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(e, 2 * inner, W) / 7), nn.Parameter(torch.randn(e, W, inner) / 6)
        self.e = e

    def forward(self, x, w, ids):
        out = torch.zeros_like(x)
        for i in range(self.e):
            token, place = torch.where(ids == i)
            g, u = F.linear(x[token], self.gate_up[i]).chunk(2, -1)
            y = F.linear(F.silu(g) * u, self.down[i]) * w[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out
"""
