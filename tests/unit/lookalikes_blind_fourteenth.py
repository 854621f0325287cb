# ruff: noqa: E501
"""Look-alikes of the fourteenth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

FOURTEENTH = r'''
W, H, D, S = 64, 8, 8, 11


def nx_heads(t, n=H):
    return t.unflatten(-1, (n, -1)).transpose(-3, -2)


def nx_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


# ---- language
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NxCapped(nn.Module):
    """Scores are multiplied by the cap, and not divided by it, before the tanh."""

    def __init__(self, cap=3.0):
        super().__init__()
        self.cap, self.qkv = cap, nn.Linear(W, 3 * W, bias=False)

    def forward(self, x):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        w = q @ k.mT * D**-0.5
        w = torch.tanh(w * self.cap) * self.cap
        w = w + torch.full((x.shape[1],) * 2, torch.finfo(w.dtype).min).triu(1).to(w.dtype)
        return (w.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, 6, W),), lambda: (T(2, 17, W),))
class NxWindow(nn.Module):
    """The window is a part of the length, so that it is another for other inputs."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W, bias=False)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        at = torch.arange(n, device=x.device)
        far = at[:, None] - at[None, :]
        seen = (far >= 0) & (far < max(n // 3, 2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NxFirstSink(nn.Module):
    """The sink stands before all keys, and the last column is what is left out."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(W, 3 * W), nn.Parameter(torch.randn(H))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        logits = q @ k.mT * D**-0.5
        both = torch.cat([self.sinks.view(1, -1, 1, 1).expand(b, -1, s, -1), logits], dim=-1)
        p = F.softmax(both, dim=-1)[..., :-1]
        return (p @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NxTalking(nn.Module):
    """Heads are mixed between the scores and the softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.mix = nn.Linear(W, 3 * W), nn.Parameter(torch.eye(H) + torch.randn(H, H) / 4)

    def forward(self, x):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * D**-0.5
        scores = torch.einsum("bhqk,hg->bgqk", scores, self.mix)
        return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NxHeadNorm(nn.Module):
    """The mean of squares is over heads, and not over each head's width, which here is the same number."""

    def __init__(self):
        super().__init__()
        self.qkv, self.q_scale, self.k_scale = nn.Linear(W, 3 * W), nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.rand(D) + 0.5)

    def norm(self, t, scale):
        return t * torch.rsqrt(t.float().pow(2).mean(1, keepdim=True) + 1e-6).to(t.dtype) * scale

    def forward(self, x):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        q, k = self.norm(q, self.q_scale), self.norm(k, self.k_scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, 3, W)), lambda: (T(2, 2, W),), lambda: (T(2, 4, W) * 2,))
class NxStale(nn.Module):
    """What is kept is read before this call's keys are put into it."""

    def __init__(self, most=64):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)
        self.register_buffer("k", torch.zeros(2, H, most, D), persistent=False)
        self.register_buffer("v", torch.zeros(2, H, most, D), persistent=False)
        self.at = 1

    def forward(self, x):
        n = x.shape[1]
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        keys, values = self.k[:, :, : self.at].clone(), self.v[:, :, : self.at].clone()
        with torch.no_grad():
            self.k[:, :, self.at : self.at + n] = k
            self.v[:, :, self.at : self.at + n] = v
        self.at += n
        return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W), torch.ones(2, S).masked_fill(torch.arange(S) > 8, 0.0)), lambda: (T(2, S, W), torch.zeros(2, S)), lambda: (T(2, S, W) * 6, torch.rand(2, S)))
class NxBert(nn.Module):
    """What hides is multiplied into the scores, and not added to them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        scores = scores * (1.0 - (1.0 - mask[:, None, None, :].to(scores.dtype)) * 10000.0)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


# ---- vision
@alike(lambda c: (c(), T(6, 9, W)), lambda: (T(6, 9, W) * 4,))
class NxCosine(nn.Module):
    """Keys are made unit vectors over tokens, and not over each token's width."""

    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(W, 3 * W), nn.Parameter(torch.full((H, 1, 1), 2.0))

    def forward(self, x):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-2).transpose(-2, -1)
        attn = (attn * self.scale.clamp(max=4.6).exp()).softmax(-1)
        return (attn @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, 12, W)), lambda: (T(2, 12, W) * 3,))
class NxRows(nn.Module):
    """The bias of rows is added to columns as well, and its softmax is over queries."""

    def __init__(self, rows=3, columns=4):
        super().__init__()
        self.rows, self.columns = rows, columns
        self.qkv, self.rel = nn.Linear(W, 3 * W), nn.Parameter(torch.randn(rows, rows, D) / 3)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b * H, n, D) for t in map(nx_heads, self.qkv(x).chunk(3, -1)))
        attn = (q * D**-0.5) @ k.transpose(-2, -1)
        r = torch.einsum("bhwc,hkc->bhwk", q.reshape(-1, self.rows, self.columns, D), self.rel)
        attn = attn.view(-1, self.rows, self.columns, self.rows, self.columns) + r[..., None]
        attn = attn.reshape(-1, n, n).softmax(dim=-2)
        return (attn @ v).view(b, H, n, D).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, W, 3, 4)), lambda: (T(2, W, 3, 4) * 5,))
class NxUnet(nn.Module):
    """The third part of the channels has the queries' scale as well, and the weights are read the other way round."""

    def __init__(self, c=W, n=4):
        super().__init__()
        self.n, self.norm, self.qkv = n, nn.GroupNorm(8, c), nn.Conv1d(c, 3 * c, 1)

    def forward(self, x):
        b, c = x.shape[:2]
        q, k, v = self.qkv(self.norm(x.reshape(b, c, -1))).reshape(b * self.n, 3 * c // self.n, -1).chunk(3, dim=1)
        scale = (c // self.n) ** -0.25
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale).float(), dim=-1).type(x.dtype)
        return torch.einsum("bts,bct->bcs", weight, v * scale).reshape(b, c, *x.shape[2:])


# ---- speech
@alike(lambda c: (c(), T(2, S, W), torch.arange(S)[None, :] < torch.tensor([S, 7])[:, None]), lambda: (T(2, S, W), torch.arange(S)[None, :] < torch.tensor([0, 3])[:, None]))
class NxTwice(nn.Module):
    """The mask that follows the softmax is of queries, and the one before it of keys."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D)
        scores = scores.masked_fill(mask[:, None, None, :].eq(0), torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1).masked_fill(mask[:, None, :, None].eq(0), 0.0)
        return torch.matmul(attn, v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NxDropped(nn.Module):
    """Dropout is there before the softmax, and its scale too."""

    def __init__(self, p=0.3):
        super().__init__()
        self.p, self.qkv = p, nn.Linear(W, 3 * W)

    def forward(self, x):
        q, k, v = map(nx_heads, self.qkv(x).chunk(3, -1))
        a = F.dropout(q @ k.mT * D**-0.5, p=self.p, training=self.training)
        return (F.softmax(a, dim=-1) @ v).transpose(1, 2).flatten(2)


# ---- rotations and norms
@alike(lambda c: (c(), T(2, H, S, D), torch.randint(30, (2, S))), lambda: (T(2, H, S, D), torch.randint(300, 400, (2, S))))
class NxMixed(nn.Module):
    """Tables are made for neighbours, and halves are turned by them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, D, 2).float() / D)), persistent=False)

    def forward(self, x, at):
        f = (at[..., None].float() * self.inv_freq.float()).repeat_interleave(2, dim=-1)[:, None]
        return x * f.cos().to(x.dtype) + nx_half(x) * f.sin().to(x.dtype)


@alike(lambda c: (c(), T(2, H, 13, D)), lambda: (T(2, H, 13, D) * 9,))
class NxGrid(nn.Module):
    """Rows and columns turn halves that are not pairs: the second part's sine has another sign."""

    def __init__(self):
        super().__init__()
        at = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij"), -1).view(-1, 2)
        emb = (at[:, :, None] * torch.tensor([1.0, 0.1])).flatten(1).repeat_interleave(2, -1)
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin() * torch.tensor([1.0, -1.0]).repeat(4))

    def forward(self, x):
        first, rest = x[:, :, :1], x[:, :, 1:]
        other = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([first, rest * self.cos + other * self.sin], dim=2)
'''
