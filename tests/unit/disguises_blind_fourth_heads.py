# ruff: noqa: E501
"""The seventh set of right modules: rotary embeddings and attention of more strangers."""

from __future__ import annotations

FOURTH_HEADS = r"""
W, H, D, S = 64, 4, 16, 7


def angles(n=S, d=D, base=10000.0):
    return torch.outer(torch.arange(n).float(), base ** (-torch.arange(0, d, 2).float() / d))


def doubled(n=S, d=D):
    a = angles(n, d)
    return torch.cat((a, a), -1)


@case("rope", lambda c: (c(), T(2, S, H, D)))
class JSinCos(nn.Module):
    def __init__(self, rotary=8):
        super().__init__()
        self.rotary = rotary
        self.register_buffer("sincos", torch.cat((torch.sin(angles(32, rotary)), torch.cos(angles(32, rotary))), -1))

    def every_two(self, x):
        y = torch.empty_like(x)
        y[..., 0::2] = -x[..., 1::2]
        y[..., 1::2] = x[..., 0::2]
        return y

    def forward(self, q):
        sin, cos = self.sincos[: q.shape[1]].split(self.rotary // 2, dim=-1)
        sin, cos = (torch.repeat_interleave(t[None, :, None, :], 2, 3) for t in (sin, cos))
        rot, rest = q[..., : self.rotary], q[..., self.rotary :]
        return torch.cat([rot * cos + self.every_two(rot) * sin, rest], dim=-1)


@case("rope", lambda c: (c(), T(2, S, H, D), torch.arange(S).expand(2, S)))
class Timescale(nn.Module):
    def __init__(self, max_wavelength=10_000):
        super().__init__()
        self.max_wavelength = max_wavelength

    def forward(self, inputs, positions):
        head_dim = inputs.shape[-1]
        fraction = 2 * torch.arange(0, head_dim // 2, device=inputs.device) / head_dim
        timescale = self.max_wavelength ** fraction
        sinusoid = positions[..., None] / timescale[None, None, :]
        sinusoid = sinusoid[..., None, :]
        sin, cos = torch.sin(sinusoid), torch.cos(sinusoid)
        first, second = torch.split(inputs, head_dim // 2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(inputs.dtype)


@case("rope", lambda c: (c([2, 3, 3]), T(2, H, S, D), torch.cos(torch.stack([doubled()] * 3) * torch.tensor([1.0, 2, 3])[:, None, None])[:, None].expand(3, 2, S, D), torch.sin(torch.stack([doubled()] * 3) * torch.tensor([1.0, 2, 3])[:, None, None])[:, None].expand(3, 2, S, D)))
class ThreeAxes(nn.Module):
    def __init__(self, section):
        super().__init__()
        self.section = section

    def pick(self, t):
        return torch.cat([m[i % 3] for i, m in enumerate(t.split(self.section * 2, dim=-1))], dim=-1).unsqueeze(1)

    def forward(self, q, cos, sin):
        half = q.shape[-1] // 2
        turned = torch.cat((q[..., half:].neg(), q[..., :half]), dim=-1)
        return q * self.pick(cos) + turned * self.pick(sin)


@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, 2, D)))
class Polar(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs_cis", torch.polar(torch.ones(32, D // 2), angles(32)), persistent=False)

    def forward(self, xq, xk):
        f = self.freqs_cis[: xq.shape[1]].view(1, xq.shape[1], 1, D // 2)
        out = []
        for t in (xq, xk):
            z = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
            out.append(torch.view_as_real(z * f).flatten(3).type_as(t))
        return tuple(out)


@case("rope", lambda c: (c(), T(2, 12, H, D)))
class Axial(nn.Module):
    "Image patches: the front half of a head turns by the row, the other half by the column."

    def __init__(self, rows=3, cols=4):
        super().__init__()
        y, x = torch.meshgrid(torch.arange(rows).float(), torch.arange(cols).float(), indexing="ij")
        inv = 100.0 ** (-torch.arange(0, D // 2, 2).float() / (D // 2))
        self.register_buffer("rows", y.reshape(-1, 1) * inv)
        self.register_buffer("cols", x.reshape(-1, 1) * inv)

    def rot(self, t, a):
        a = a[:, None]
        u, v = t.chunk(2, -1)
        return torch.cat((u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()), -1)

    def forward(self, t):
        front, back = t.chunk(2, -1)
        return torch.cat((self.rot(front, self.rows), self.rot(back, self.cols)), -1)


@case("rope", lambda c: (c(), T(2, H, S, D)))
class Mscaled(nn.Module):
    def __init__(self, mscale=1.2):
        super().__init__()
        self.register_buffer("c", doubled(32).cos() * mscale)
        self.register_buffer("s", doubled(32).sin() * mscale)

    def forward(self, k):
        n = k.shape[2]
        left, right = k[..., : D // 2], k[..., D // 2 :]
        out = torch.empty_like(k)
        out[..., : D // 2] = left * self.c[:n, : D // 2] - right * self.s[:n, : D // 2]
        out[..., D // 2 :] = right * self.c[:n, D // 2 :] + left * self.s[:n, D // 2 :]
        return out


@case("attention", lambda c: (c(), T(2, S, W)))
class SinkHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.sinks = nn.Linear(W, 3 * W), nn.Linear(W, W), nn.Parameter(torch.linspace(-1, 1, H))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, H, D).unbind(2)
        qk = torch.einsum("bqhd,bkhd->bhqk", q, k) * D ** -0.5
        qk = qk + torch.triu(qk.new_full((n, n), -float("inf")), diagonal=1)
        qk = torch.cat([qk, self.sinks.view(1, H, 1, 1).expand(b, H, n, 1)], dim=-1)
        w = torch.softmax(qk, dim=-1)[..., :-1]
        return self.out(torch.einsum("bhqk,bkhd->bqhd", w, v).reshape(b, n, W))


@case("attention", lambda c: (c(), T(2, S, W)))
class BucketBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.table = nn.Embedding(9, H)

    def bias(self, n):
        p = torch.arange(n)
        return self.table((p[None, :] - p[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x):
        def heads(t):
            return t.view(x.size(0), -1, H, D).transpose(1, 2)

        scores = torch.matmul(heads(self.q(x)), heads(self.k(x)).transpose(3, 2))
        scores += self.bias(x.size(1))
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(torch.matmul(weights, heads(self.v(x))).transpose(1, 2).contiguous().view(x.size(0), -1, W))


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (i + 1) / H) for i in range(H)]).view(H, 1, 1), persistent=False)

    def forward(self, q, k, v):
        n = q.size(-2)
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        logits = q @ k.mT / math.sqrt(q.size(-1)) + self.slopes * distance
        logits = logits.masked_fill(distance > 0, torch.finfo(logits.dtype).min)
        return logits.softmax(-1) @ v


@case("attention", lambda c: (c(), T(2, S, W)))
class LowRank(nn.Module):
    "Keys are 24 wide, values are 16 wide."

    def __init__(self):
        super().__init__()
        self.wq, self.kv_a, self.kv_b, self.wo = nn.Linear(W, H * 24), nn.Linear(W, 32 + 8), nn.Linear(32, H * (16 + 16)), nn.Linear(H * 16, W)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, H, 24)
        c, k_pe = self.kv_a(x).split([32, 8], -1)
        k_nope, v = self.kv_b(c).view(b, n, H, 32).split([16, 16], -1)
        k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, H, -1)], -1)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(o.transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, 5, W), T(2, 9, W), torch.tensor([[True] * 9, [True] * 6 + [False] * 3])))
class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(W, W, bias=False), nn.Linear(W, 2 * W, bias=False), nn.Sequential(nn.Linear(W, W), nn.Dropout(0.1))

    def forward(self, x, context, keep):
        q = self.to_q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.to_kv(context).chunk(2, dim=-1))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q * D ** -0.5, k)
        sim = sim.masked_fill(~keep[:, None, None, :], -torch.finfo(sim.dtype).max)
        att = sim.softmax(dim=-1)
        return self.to_out(torch.einsum("b h i j, b h j d -> b h i d", att, v).transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(3), T(2, H, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class Sliding(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, q, k, v):
        n = q.shape[2]
        full = torch.ones(n, n, dtype=torch.bool)
        seen = torch.tril(full) & torch.triu(full, diagonal=1 - self.window)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@case("attention", lambda c: (c(), T(2, S, H, D), T(2, S, H, D), T(2, S, H, D)))
class InChunks(nn.Module):
    size = 4

    def forward(self, q, k, v):
        i = torch.arange(q.shape[1])
        same = (i[:, None] // self.size) == (i[None, :] // self.size)
        allowed = same & (i[:, None] >= i[None, :])
        score = torch.einsum("bihd,bjhd->bhij", q, k).div(math.sqrt(D))
        score = torch.where(allowed, score, float("-inf"))
        return torch.einsum("bhij,bjhd->bihd", score.softmax(3), v)


@case("attention", lambda c: (c(), T(2, S, W)))
class OneKeyValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(W, W + 2 * D, bias=False)

    def forward(self, x):
        q, k, v = self.w(x).split((W, D, D), dim=2)
        q = q.reshape(*q.shape[:2], H, D)
        a = torch.einsum("bqhd,bkd->bhqk", q, k) / D ** 0.5
        a = torch.exp(a - a.amax(-1, keepdim=True))
        a = a / a.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bkd->bqhd", a, v).flatten(-2)


@case("attention", lambda c: (c(), T(2, S, W)))
class HeadList(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleDict({n: nn.Linear(W, D, bias=False) for n in "qkv"}) for _ in range(H))
        self.proj = nn.Linear(W, W)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)))

    def one(self, h, x):
        n = x.shape[1]
        wei = h["q"](x) @ h["k"](x).transpose(-2, -1) * D ** -0.5
        wei = wei.masked_fill(self.tril[:n, :n] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ h["v"](x)

    def forward(self, x):
        return self.proj(torch.cat([self.one(h, x) for h in self.heads], dim=-1))


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class SoftCapped(nn.Module):
    def __init__(self, cap=20.0):
        super().__init__()
        self.cap = cap

    def forward(self, q, k, v):
        s = torch.matmul(q * (1 / math.sqrt(D)), k.transpose(-1, -2))
        s = torch.tanh(s / self.cap) * self.cap
        mask = torch.ones_like(s[0, 0], dtype=torch.bool).triu(1)
        p = torch.softmax(s.masked_fill(mask, -2.3819763e38), -1)
        return torch.matmul(p, v)


@case("attention", lambda c: (c(4, 2), T(2, 8, 8, 32)))
class ShiftedWindows(nn.Module):
    def __init__(self, win, heads):
        super().__init__()
        self.win, self.heads, self.qkv = win, heads, nn.Linear(32, 96)
        self.rel = nn.Parameter(0.1 * torch.randn((2 * win - 1) ** 2, heads))
        g = torch.stack(torch.meshgrid(torch.arange(win), torch.arange(win), indexing="ij")).flatten(1)
        r = g[:, :, None] - g[:, None, :] + win - 1
        self.register_buffer("index", r[0] * (2 * win - 1) + r[1])

    def forward(self, img):
        b, hh, ww, c = img.shape
        m = self.win
        x = img.view(b, hh // m, m, ww // m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, m * m, c)
        q, k, v = self.qkv(x).reshape(-1, m * m, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.rel[self.index.view(-1)].view(m * m, m * m, -1).permute(2, 0, 1)
        a = ((q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(dim=-1)
        y = (a @ v).transpose(1, 2).reshape(-1, m * m, c)
        return y.view(b, hh // m, ww // m, m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(b, hh, ww, c)


@case("attention", lambda c: (c(), T(2, 1, W), T(2, 6, H, D), T(2, 6, H, D)))
class OneMore(nn.Module):
    "A step of generation: the past's keys and values are given, the new ones are returned."

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(W, 3 * W)

    def forward(self, x, past_k, past_v):
        q, k, v = (t.view(x.shape[0], x.shape[1], H, D) for t in self.c_attn(x).split(W, -1))
        k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.2)
        return y.transpose(1, 2).reshape(x.shape), k, v
"""
