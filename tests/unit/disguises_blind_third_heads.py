# ruff: noqa: E501
"""The sixth set of right modules: attention written out, and rotary embeddings."""

from __future__ import annotations

THIRD_HEADS = r"""
W, H, D, S = 64, 4, 16, 7


def table(n, d, base=10000.0):
    inv = 1.0 / (base ** (torch.arange(0, d, 2).float() / d))
    f = torch.outer(torch.arange(n).float(), inv)
    return torch.cat((f, f), -1)


# ---- attention
@case("attention", lambda c: (c(), T(2, S, W), torch.polar(torch.ones(S, D // 2), table(S, D)[:, : D // 2])))
class ComplexLlama(nn.Module):
    def __init__(self, dim=W, heads=H, kv=2):
        super().__init__()
        self.heads, self.kv, self.d = heads, kv, dim // heads
        self.wq, self.wk, self.wv, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, kv * self.d, bias=False), nn.Linear(dim, kv * self.d, bias=False), nn.Linear(dim, dim, bias=False)

    @staticmethod
    def turn(x, cis):
        x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x_ * cis[None, :, None, :]).flatten(3).type_as(x)

    def forward(self, x, freqs_cis):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.heads, self.d)
        xk = self.wk(x).view(bsz, seqlen, self.kv, self.d)
        xv = self.wv(x).view(bsz, seqlen, self.kv, self.d)
        xq, xk = self.turn(xq, freqs_cis), self.turn(xk, freqs_cis)
        r = self.heads // self.kv
        keys = xk[:, :, :, None, :].expand(bsz, seqlen, self.kv, r, self.d).reshape(bsz, seqlen, self.heads, self.d)
        values = torch.repeat_interleave(xv, r, dim=2)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.d)
        mask = torch.full((seqlen, seqlen), float("-inf"), device=x.device)
        mask = torch.triu(mask, diagonal=1).type_as(x)
        scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


@case("attention", lambda c: (c(), T(2, S, H, D), T(2, 9, 2, D), T(2, 9, 2, D)))
class GroupedEinsum(nn.Module):
    def forward(self, q, k, v):
        b, s, h, d = q.shape
        q = q.reshape(b, s, k.shape[2], -1, d)
        logits = torch.einsum("bsgrd,btgd->bgrst", q, k) / d**0.5
        p = torch.softmax(logits, -1)
        return torch.einsum("bgrst,btgd->bsgrd", p, v).reshape(b, s, h, d)


@case("attention", lambda c: (c(), T(2, S, W), torch.tensor([[1] * S, [1] * 5 + [0] * 2])))
class BertSelf(nn.Module):
    def __init__(self, hidden=W, heads=H):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, hidden // heads
        self.all_head_size = hidden
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size))
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden, attention_mask):
        extended = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        q, k, v = self.transpose_for_scores(self.query(hidden)), self.transpose_for_scores(self.key(hidden)), self.transpose_for_scores(self.value(hidden))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        scores = scores + extended
        probs = self.dropout(nn.Softmax(dim=-1)(scores))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(context.size()[:-2] + (self.all_head_size,))


@case("attention", lambda c: (c(), T(2, 1, W), T(2, H, 6, D), T(2, H, 6, D)))
class OneStep(nn.Module):
    def __init__(self, n=W, heads=H):
        super().__init__()
        self.h, self.qkv, self.o = heads, nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x, past_k, past_v):
        b, t, n = x.shape
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(x).split(n, -1))
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        a = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        return self.o((a @ v).transpose(1, 2).reshape(b, t, n)), (k, v)


@case("attention", lambda c: (c(), T(2, S, W)))
class NearOnly(nn.Module):
    def __init__(self, n=W, heads=H, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.wqkv, self.wo = nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.wqkv(x).view(b, s, 3, self.heads, n // self.heads).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        i = torch.arange(s, device=x.device)
        gap = i[:, None] - i[None, :]
        keep = (gap >= 0) & (gap < self.window)
        a = (q @ k.mT) * (n // self.heads) ** -0.5
        a = a.masked_fill(~keep, float("-inf")).softmax(dim=-1)
        return self.wo((a @ v).transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, 9, W)))
class Latents(nn.Module):
    def __init__(self, n=W, heads=H, queries=3):
        super().__init__()
        self.latents, self.heads = nn.Parameter(torch.randn(queries, n)), heads
        self.kv, self.norm = nn.Linear(n, 2 * n), nn.LayerNorm(n)

    def forward(self, x):
        b, t, n = x.shape
        q = self.latents[None].expand(b, -1, -1).reshape(b, -1, self.heads, n // self.heads).transpose(1, 2)
        k, v = self.kv(self.norm(x)).reshape(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = torch.softmax(q.matmul(k.transpose(-2, -1)) / (n // self.heads) ** 0.5, -1)
        return p.matmul(v).transpose(1, 2).reshape(b, -1, n)


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class HandSoftmax(nn.Module):
    def forward(self, q, k, v):
        s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        s = s - s.max(dim=-1, keepdim=True).values
        e = s.exp()
        return torch.matmul(e / e.sum(dim=-1, keepdim=True), v)


@case("attention", lambda c: (c(), T(2, S, W)))
class FusedWeights(nn.Module):
    '''The weights of all three in one parameter, as torch has them.'''

    def __init__(self, n=W, heads=H):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = nn.Parameter(torch.randn(3 * n, n) / 8), nn.Parameter(torch.zeros(3 * n))
        self.out_proj, self.heads = nn.Linear(n, n), heads

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q = q.view(b, s, self.heads, -1).transpose(1, 2)
        k = k.view(b, s, self.heads, -1).permute(0, 2, 3, 1)
        v = v.view(b, s, self.heads, -1).transpose(1, 2)
        mask = torch.tril(torch.ones(s, s, device=x.device))
        w = q @ k / math.sqrt(v.size(-1))
        w = w.masked_fill(mask == 0, -1e30)
        return self.out_proj((torch.softmax(w, -1) @ v).transpose(1, 2).contiguous().view(b, s, n))


# ---- rope
@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, H, D)))
class EveryTwo(nn.Module):
    '''GPT-J: neighbours are pairs, the first eight numbers only.'''

    def __init__(self, dim=8, longest=32):
        super().__init__()
        self.dim = dim
        f = torch.outer(torch.arange(longest).float(), 1.0 / (10000 ** (torch.arange(0, dim, 2) / dim)))
        self.register_buffer("embed_positions", torch.cat((f.sin(), f.cos()), dim=1), persistent=False)

    def forward(self, query, key):
        s = query.shape[1]
        sin, cos = torch.split(self.embed_positions[:s], self.dim // 2, dim=-1)
        sin, cos = (torch.repeat_interleave(t[None, :, None, :], 2, 3) for t in (sin, cos))

        def every_two(x):
            y = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1)
            return y.flatten(-2)

        def apply(x):
            rot, rest = x[..., : self.dim], x[..., self.dim :]
            return torch.cat([rot * cos + every_two(rot) * sin, rest], dim=-1)

        return apply(query), apply(key)


@case("rope", lambda c: (c(D), T(2, H, S, D)))
class CachedAngles(nn.Module):
    def __init__(self, d, base=10000):
        super().__init__()
        self.d, self.base, self.cos_cached, self.sin_cached = d, base, None, None
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, d, 2).float() / d)))

    def forward(self, x):
        t = torch.arange(x.shape[-2], device=x.device, dtype=self.inv_freq.dtype)
        emb = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((emb, emb), dim=-1).to(x.device)
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return x * emb.cos()[None, None] + torch.cat((-x2, x1), dim=-1) * emb.sin()[None, None]


@case("rope", lambda c: (c(), T(2, S, H, D), table(S, D)[:, : D // 2].cos(), table(S, D)[:, : D // 2].sin()))
class TwoHalves(nn.Module):
    def forward(self, x, cos, sin):
        assert x.ndim == 4
        d = x.shape[3] // 2
        x1, x2 = x[..., :d], x[..., d:]
        y1 = x1 * cos[None, :, None] - x2 * sin[None, :, None]
        y2 = x1 * sin[None, :, None] + x2 * cos[None, :, None]
        return torch.cat([y1, y2], 3).to(x.dtype)


@case("rope", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), table(S, 8)))
class FirstDims(nn.Module):
    '''Lucidrains: what is longer than the angles passes.'''

    def forward(self, q, k, freqs):
        def turn(t):
            n = freqs.shape[-1]
            left, right = t[..., :n], t[..., n:]
            a, b = left.reshape(*left.shape[:-1], 2, n // 2).unbind(dim=-2)
            return torch.cat((left * freqs.cos() + torch.cat((-b, a), dim=-1) * freqs.sin(), right), dim=-1)

        return turn(q), turn(k)


@case("rope", lambda c: (c(), T(2, S, H, D)))
class FastCache(nn.Module):
    '''gpt-fast: a table of pairs.'''

    def __init__(self, n=32, d=D):
        super().__init__()
        f = table(n, d)[:, : d // 2]
        self.register_buffer("freqs_cis", torch.stack([f.cos(), f.sin()], dim=-1))

    def forward(self, x):
        cis = self.freqs_cis[: x.size(1)]
        xs = x.float().reshape(*x.shape[:-1], -1, 2)
        cis = cis.view(1, xs.size(1), 1, xs.size(3), 2)
        out = torch.stack([xs[..., 0] * cis[..., 0] - xs[..., 1] * cis[..., 1], xs[..., 1] * cis[..., 0] + xs[..., 0] * cis[..., 1]], -1)
        return out.flatten(3).type_as(x)
"""
