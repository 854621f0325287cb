"""The fourth set of right modules: attention, in functions and by hand."""

from __future__ import annotations

ATTENTION = r'''
W, H, D, S = 64, 4, 16, 7


def angles(t, d, base=10000.0):
    inv = base ** (-torch.arange(0, d, 2).float() / d)
    return torch.outer(torch.arange(t).float(), inv)


def waves(t, d):
    a = angles(t, d)
    return torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()


# ---- attention
@case("attention", lambda c: (c(W, H), T(2, S, W)))
class Nano(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(n, 3 * n), nn.Linear(n, n), heads
        self.fast = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (m.view(b, t, self.heads, c // self.heads).transpose(1, 2) for m in (q, k, v))
        if self.fast:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        else:
            raise NotImplementedError
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


@case("attention", lambda c: (c(W, H), T(2, S, W)))
class Tril(nn.Module):
    def __init__(self, n, heads, longest=16):
        super().__init__()
        self.h = heads
        self.k, self.q, self.v, self.proj = (nn.Linear(n, n) for _ in range(4))
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        B, T_, C = x.shape
        k = self.k(x).view(B, T_, self.h, -1).transpose(1, 2)
        q = self.q(x).view(B, T_, self.h, -1).transpose(1, 2)
        v = self.v(x).view(B, T_, self.h, -1).transpose(1, 2)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T_, :T_] == 0, float("-inf"))
        wei = self.drop(F.softmax(wei, dim=-1))
        return self.proj((wei @ v).transpose(1, 2).reshape(B, T_, C))


@case("attention", lambda c: (c(), T(2, S, H, D), T(2, 9, H, D), T(2, 9, H, D)))
class EinsumCross(nn.Module):
    def forward(self, q, k, v):
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v)


@case("attention", lambda c: (c(), T(8, S, D), T(8, S, D), T(8, S, D), T(8, 1, S)))
class BaddBmm(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta, self.inv_norm = 1.0, 1.0 / math.sqrt(D)

    def forward(self, q, k, v, alibi):
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=self.beta, alpha=self.inv_norm)
        return torch.bmm(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


@case("attention", lambda c: (c(W, H, 2), T(2, S, W)))
class Repeated(nn.Module):
    def __init__(self, n, h, kv):
        super().__init__()
        self.h, self.kv, self.d = h, kv, n // h
        self.wq, self.wk = nn.Linear(n, n, bias=False), nn.Linear(n, kv * self.d, bias=False)
        self.wv, self.wo = nn.Linear(n, kv * self.d, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.wk(x).view(b, t, self.kv, self.d).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        v = self.wv(x).view(b, t, self.kv, self.d).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
        mask = torch.full((t, t), float("-inf"), device=x.device).triu(1)
        s = torch.matmul(q, k.mT) / math.sqrt(self.d) + mask
        p = F.softmax(s.float(), -1).type_as(q)
        return self.wo(torch.matmul(p, v).transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, 4, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class Expanded(nn.Module):
    @staticmethod
    def widen(x, n):
        b, h, t, d = x.shape
        return x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)

    def forward(self, q, k, v):
        n = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, self.widen(k, n), self.widen(v, n), is_causal=True)


@case("softmax", lambda c: (c(), T(2, S, 4, D), T(2, S, 2, D), T(2, S, 2, D)))
class Grouped(nn.Module):
    def forward(self, q, k, v):
        b, t, h, d = q.shape
        q = q.reshape(b, t, k.shape[2], -1, d)
        s = torch.einsum("btkgd,bskd->bkgts", q * d**-0.5, k)
        keep = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        s = torch.where(keep, s, torch.finfo(s.dtype).min)
        return torch.einsum("bkgts,bskd->btkgd", torch.softmax(s, -1), v).reshape(b, t, h * d)


@case("softmax", lambda c: (c(H), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Sunk(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(h))

    def forward(self, q, k, v):
        s = (q @ k.transpose(2, 3)) * D**-0.5
        t = s.shape[-1]
        s = s + torch.triu(s.new_full((t, t), -torch.inf), 1)
        s = torch.cat([s, self.sink.view(1, -1, 1, 1).expand(s.shape[0], -1, t, 1)], -1)
        return s.softmax(-1)[..., :-1] @ v


@case("attention", lambda c: (c(3), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Window(nn.Module):
    def __init__(self, back):
        super().__init__()
        self.back = back

    def forward(self, q, k, v):
        i = torch.arange(q.shape[2], device=q.device)
        gap = i[:, None] - i[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < self.back))


def padding(b, t):
    m = torch.ones(b, t, dtype=torch.bool)
    m[0, -2:] = False
    return m


@case("attention", lambda c: (c(W, H), T(2, S, W), T(2, 9, W), padding(2, 9)))
class CrossPadded(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.h = h
        self.to_q, self.to_kv, self.to_out = nn.Linear(n, n), nn.Linear(n, 2 * n), nn.Linear(n, n)

    def forward(self, x, ctx, seen):
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        q, (k, v) = split(self.to_q(x)), map(split, self.to_kv(ctx).chunk(2, dim=-1))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5)
        sim = sim.masked_fill(~seen[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(W, H, batch_first=True), T(2, S, W)))
class Mha(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


@case("attention", lambda c: (c(H), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Relative(nn.Module):
    def __init__(self, h, reach=4):
        super().__init__()
        self.reach = reach
        self.bias = nn.Embedding(2 * reach + 1, h)

    def forward(self, q, k, v):
        i = torch.arange(q.shape[-2], device=q.device)
        gap = (i[None] - i[:, None]).clamp(-self.reach, self.reach) + self.reach
        s = q @ k.transpose(-1, -2) + self.bias(gap).permute(2, 0, 1).unsqueeze(0)
        return torch.softmax(s, dim=-1) @ v


@case("softmax", lambda c: (c(H), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Cosine(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((h, 1, 1), math.log(10.0)))

    def forward(self, q, k, v):
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        a = a * self.logit_scale.clamp(max=math.log(100.0)).exp()
        return a.softmax(-1) @ v


@case("softmax", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Capped(nn.Module):
    cap = 50.0

    def forward(self, q, k, v):
        s = torch.matmul(q, k.transpose(2, 3)) * 0.25
        s = self.cap * torch.tanh(s / self.cap)
        t = s.size(-1)
        s = s.masked_fill(torch.ones(t, t, device=s.device).triu(1).bool(), -1e9)
        return torch.matmul(F.softmax(s, dim=-1), v)


@case("attention", lambda c: (c(), T(2, S, 4, D), T(2, S, 2, D), T(2, S, 2, D)))
class Native(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(0, 2, 1, 3)


@case("attention", lambda c: (c(W, H), T(2, S, W)))
class OneKey(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.h, self.d = h, n // h
        self.fused = nn.Linear(n, n + 2 * self.d)
        self.out = nn.Linear(n, n)

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = self.fused(x).split((n, self.d, self.d), dim=-1)
        q = q.view(b, t, self.h, self.d).transpose(1, 2)
        s = q @ k.unsqueeze(1).transpose(-1, -2) / self.d**0.5
        return self.out((s.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2).reshape(b, t, n))


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class OwnSoftmax(nn.Module):
    @staticmethod
    def soft(x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    def forward(self, q, k, v):
        return self.soft(q @ k.transpose(-2, -1) * D**-0.5) @ v


@case("attention", lambda c: (c(), T(2, H, 1, D), T(2, H, 1, D), T(2, H, 1, D), T(2, H, S, D), T(2, H, S, D)))
class Decode(nn.Module):
    def forward(self, q, k, v, past_k, past_v):
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return F.scaled_dot_product_attention(q, k, v), k, v


@case("attention", lambda c: (c(W, H), T(2, S, W)))
class Latent(nn.Module):
    def __init__(self, n, h, rank=24, r=8):
        super().__init__()
        self.h, self.d, self.r, self.rank = h, n // h, r, rank
        self.q = nn.Linear(n, h * (self.d + r), bias=False)
        self.down = nn.Linear(n, rank + r, bias=False)
        self.norm = ZRms(rank)
        self.up = nn.Linear(rank, h * 2 * self.d, bias=False)
        self.out = nn.Linear(n, n, bias=False)

    def forward(self, x):
        b, t, n = x.shape
        q = self.q(x).view(b, t, self.h, -1).transpose(1, 2)
        c, kr = self.down(x).split([self.rank, self.r], -1)
        kn, v = self.up(self.norm(c)).view(b, t, self.h, -1).transpose(1, 2).split([self.d, self.d], -1)
        k = torch.cat([kn, kr[:, None].expand(-1, self.h, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, n))


class ZRms(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.w


@case("softmax", lambda c: (c(W, H, 2), T(2, 4, 4, W)))
class Tiles(nn.Module):
    def __init__(self, n, h, side):
        super().__init__()
        self.h, self.side = h, side
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.table = nn.Parameter(torch.randn(h, side * side, side * side))

    def forward(self, x):
        b, y, z, c = x.shape
        s = self.side
        x = x.view(b, y // s, s, z // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(x).reshape(-1, s * s, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        a = (q * (c // self.h) ** -0.5) @ k.transpose(-2, -1) + self.table
        x = self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, s * s, c))
        return x.view(b, y // s, z // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, y, z, c)


@case("attention", lambda c: (c(W, H, 3), T(2, S, W)))
class Pooled(nn.Module):
    def __init__(self, n, h, queries):
        super().__init__()
        self.h = h
        self.queries = nn.Parameter(torch.randn(queries, n))
        self.k, self.v = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x):
        b = x.shape[0]
        q = self.queries.expand(b, -1, -1).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


@case("softmax", lambda c: (c(32), T(2, 32, 4, 4)))
class Spatial(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.GroupNorm(8, n, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Conv2d(n, n, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        b, c, y, z = h.shape
        q = self.q(h).reshape(b, c, y * z).permute(0, 2, 1)
        k = self.k(h).reshape(b, c, y * z)
        w = torch.bmm(q, k) * int(c) ** (-0.5)
        w = F.softmax(w, dim=2).permute(0, 2, 1)
        h = torch.bmm(self.v(h).reshape(b, c, y * z), w).reshape(b, c, y, z)
        return x + self.o(h)


@case("attention", lambda c: (c(W, H), T(2, S, W)))
class Layer(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.one, self.two = ZRms(n), ZRms(n)
        self.mix, self.ff = Tril(n, h), nn.Sequential(nn.Linear(n, 2 * n), nn.SiLU(), nn.Linear(2 * n, n))

    def forward(self, x):
        x = x + self.mix(self.one(x))
        return x + self.ff(self.two(x))


@case("attention", lambda c: (c(W, H), T(2, S, W)))
class SideBySide(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.norm, self.h = nn.LayerNorm(n), h
        self.wide = nn.Linear(n, 3 * n + 4 * n, bias=False)
        self.back = nn.Linear(5 * n, n, bias=False)

    def forward(self, x):
        n = x.shape[-1]
        q, k, v, m = self.wide(self.norm(x)).split((n, n, n, 4 * n), -1)
        q, k, v = [t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in (q, k, v)]
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.back(torch.cat([a, F.gelu(m)], -1))


@case("rope", lambda c: (c(W, H), T(2, S, W)))
class FullDecoder(nn.Module):
    """Rope, q/k norms, grouped heads: all in one forward."""

    def __init__(self, n, h, kv=2):
        super().__init__()
        self.h, self.kv, self.d = h, kv, n // h
        self.qkv = nn.Linear(n, (h + 2 * kv) * self.d, bias=False)
        self.o = nn.Linear(n, n, bias=False)
        self.qn, self.kn = nn.RMSNorm(self.d, eps=1e-6), nn.RMSNorm(self.d, eps=1e-6)
        c, s = waves(32, self.d)
        self.register_buffer("c", c, persistent=False)
        self.register_buffer("s", s, persistent=False)

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = self.qkv(x).view(b, t, self.h + 2 * self.kv, self.d).split([self.h, self.kv, self.kv], 2)
        q, k = self.qn(q), self.kn(k)
        c, s = self.c[:t, None], self.s[:t, None]
        turn = lambda m: torch.cat([-m[..., self.d // 2 :], m[..., : self.d // 2]], -1)
        q, k = q * c + turn(q) * s, k * c + turn(k) * s
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, t, n))


@case("softmax", lambda c: (c(), T(2, H, S, S), padding(2, S)))
class MaskedSoft(nn.Module):
    def forward(self, s, keep):
        s = s.masked_fill(~keep[:, None, None], torch.finfo(s.dtype).min)
        return torch.exp(F.log_softmax(s, dim=-1))


@case("softmax", lambda c: (c(), T(2, H, S, S)))
class LseSoft(nn.Module):
    def forward(self, s):
        return (s - torch.logsumexp(s, dim=-1, keepdim=True)).exp()
'''
