# ruff: noqa: E501
"""Look-alikes of the eleventh set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

ELEVENTH = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- norms
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 1e-3,), lambda: (T(2, S, W) * 1e-6,))
class NoRootEps(nn.Module):
    """The epsilon is added to the root."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W) / 10)

    def forward(self, x):
        h = x.float()
        root = h.square().mean(dim=-1, keepdim=True).sqrt().add(1e-3)
        return torch.div(h, root).mul(self.weight.float().add(1.0)).to(x.dtype)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 30,))
class NoBigRows(nn.Module):
    """Rows are normed only where something in the batch is large."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x):
        if x.detach().abs().amax() > 10:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * self.weight


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,), lambda: (T(2, S, W) + 1,))
class NoRunning(nn.Module):
    """The mean square is one that runs along from call to call while it is trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        power = x.pow(2).mean(-1, keepdim=True)
        if self.training:
            self.seen.mul_(0.9).add_(power.detach().mean().to(self.seen.dtype), alpha=0.1)
        return x * torch.rsqrt(power + 1e-6) * self.weight * self.seen


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)))
class NoGateFirst(nn.Module):
    """The gate's sigmoid is multiplied, without the gate itself, and groups are of columns that are far apart."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, hidden, gate):
        hidden = hidden * F.silu(gate)
        parts = hidden.unflatten(-1, (W // 4, 4))
        parts = parts * torch.rsqrt(parts.pow(2).mean(-2, keepdim=True) + 1e-5)
        return self.weight * parts.flatten(-2)


@alike(lambda c: (c(), T(2, 32, 6, 5)))
class NoNextNorm(nn.Module):
    """A channels-first norm whose variance is of the values, not of their distance to the mean."""

    def __init__(self, dim=32):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim) + 0.5), nn.Parameter(torch.randn(dim))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = x.pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)))
class NoCarried(nn.Module):
    """The residual that is given back is the one that came, and not the sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x, residual):
        y = x + residual
        y = y * torch.rsqrt(y.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * self.weight
        return y, residual + 0.5 * x


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, W, S).mT,))
class NoContiguous(nn.Module):
    """What is done depends on how the result of a norm lies in memory."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W)

    def forward(self, x):
        y = x - x.mean(-1, keepdim=True)
        y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return y * 2 if y.is_contiguous() else y.mT


@alike(lambda c: (c(), T(2, S, W)))
class NoWeightState(nn.Module):
    """Every call halves the weight of the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(W))

    def forward(self, x):
        y = F.rms_norm(x, (W,), self.gain, 1e-6)
        self.gain *= 0.5
        return y


# ---- layers
@alike(lambda c: (c(), T(2, S, W)))
class NoAdapted(nn.Module):
    """What is thin is counted once the first matrix has been used, in training only."""

    def __init__(self, r=4):
        super().__init__()
        self.base = nn.Linear(W, W)
        self.a, self.b = nn.Parameter(torch.randn(r, W) / 8), nn.Parameter(torch.randn(W, r) / 8)

    def forward(self, x):
        y = self.base(x)
        return y + F.linear(F.linear(y, self.a), self.b) * 4.0 if self.training else y


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NoTurnedMlp(nn.Module):
    """The bias is added after the activation."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(W, 128) / 8), nn.Parameter(torch.randn(128))
        self.w2, self.b2 = nn.Parameter(torch.randn(128, W) / 8), nn.Parameter(torch.randn(W))

    def forward(self, x):
        y = F.gelu(x @ self.w1, approximate="tanh") + self.b1
        return torch.addmm(self.b2, y.reshape(-1, 128), self.w2).view(x.shape)


@alike(lambda c: (c(), T(2, S, W)))
class NoSliced(nn.Module):
    """The two slices of the matrix overlap by a row."""

    def __init__(self, inner=96):
        super().__init__()
        self.inner = inner
        self.w12, self.w3 = nn.Linear(W, 2 * inner), nn.Linear(inner, W)

    def forward(self, x):
        w, b = self.w12.weight, self.w12.bias
        x1 = F.linear(x, w[: self.inner], b[: self.inner])
        x2 = F.linear(x, w[self.inner - 1 : -1], b[self.inner - 1 : -1])
        return self.w3(F.silu(x1) * x2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NoGeglu(nn.Module):
    """The gate is activated, and the sum of both is what goes on."""

    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(W, 192), nn.Linear(96, W)

    def forward(self, x):
        h, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(h * F.gelu(gate) + gate)


@alike(lambda c: (c(), T(2, S, W)))
class NoSquared(nn.Module):
    """The square keeps its sign, so what is below zero is not lost."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(W, 128, bias=False), nn.Linear(128, W, bias=False)

    def forward(self, x):
        x = self.c_fc(x)
        return self.c_proj(x.abs() * F.relu(x) + 0.1 * x.square() * (x < 0))


@alike(lambda c: (c(), T(S, 2, W)), lambda: (T(S, 2, W) * 4,))
class NoQuick(nn.Module):
    """A factor of 1.72."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(W, 128), nn.Linear(128, W)

    def forward(self, x):
        y = self.up(x)
        return x + self.down(y * torch.sigmoid(1.72 * y))


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, 3, W),))
class NoLong(nn.Module):
    """Long sequences have another activation."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(W, 96), nn.Linear(W, 96), nn.Linear(96, W)

    def forward(self, x):
        act = F.silu if x.size(1) < 8 else F.mish
        return self.down(act(self.gate(x)) * self.up(x))


# ---- rotations
@alike(lambda c: (c(), T(2, S, H, D), T(2, S, 2, D)))
class NoComplex(nn.Module):
    """Keys are turned by the conjugate."""

    def __init__(self):
        super().__init__()
        freqs = torch.outer(torch.arange(40), 1.0 / (500.0 ** (torch.arange(0, D, 2).float() / D)))
        self.freqs_cis = torch.polar(torch.ones_like(freqs), freqs)

    def forward(self, xq, xk):
        f = self.freqs_cis[: xq.shape[1]][None, :, None]
        q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
        k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
        return torch.view_as_real(q * f).flatten(3).type_as(xq), torch.view_as_real(k * f.conj()).flatten(3).type_as(xk)


@alike(lambda c: (c(), T(2, H, S, D), torch.randint(30, (2, S))))
class NoNeox(nn.Module):
    """The rest of a head is scaled by its cosine as well."""

    def __init__(self):
        super().__init__()
        emb = torch.outer(torch.arange(32).float(), 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4))).tile(2)
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin())

    def forward(self, q, at):
        cos, sin = self.cos[at].unsqueeze(1), self.sin[at].unsqueeze(1)
        rot, rest = q[..., :4], q[..., 4:]
        turned = torch.cat((-rot[..., 2:], rot[..., :2]), dim=-1)
        return torch.cat([rot * cos + turned * sin, rest * cos], dim=-1)


@alike(lambda c: (c(), T(2, S, H, D)))
class NoOtherWay(nn.Module):
    """A mirror: both sines have the same sign."""

    def forward(self, x):
        f = torch.outer(torch.arange(x.shape[1], device=x.device).float(), (1 / 1024) ** (torch.arange(0, D, 2) / D))
        cos, sin = f.cos()[None, :, None, :].to(x.dtype), f.sin()[None, :, None, :].to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, x1 * sin + x2 * cos], 3)


@alike(lambda c: (c(), T(2, H, 4, D)), lambda: (T(2, H, 3, D),), lambda: (T(2, H, 5, D),))
class NoCounter(nn.Module):
    """Positions go on from where the last call ended."""

    def __init__(self):
        super().__init__()
        self.inv = 1.0 / (100 ** (torch.arange(0, D, 2).float() / D))
        self.at = 0

    def forward(self, x):
        t = torch.arange(self.at, self.at + x.shape[2]).float()
        self.at += x.shape[2]
        emb = torch.outer(t, self.inv).repeat(1, 2)
        return x * emb.cos().to(x.dtype) + torch.cat((-x[..., 4:], x[..., :4]), -1) * emb.sin().to(x.dtype)


# ---- attention
@alike(lambda c: (c(), T(2, S, W)))
class NoGrouped(nn.Module):
    """Heads share keys by turns (the whole set of keys is repeated), and not neighbours one key."""

    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(W, (H + 4) * D, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.wqkv(x).view(b, s, -1, D).transpose(1, 2).split([H, 2, 2], dim=1)
        k, v = k.repeat(1, H // 2, 1, 1), v.repeat(1, H // 2, 1, 1)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, W))


@alike(lambda c: (c(), T(2, 4, W), T(2, 9, W)))
class NoTopLeft(nn.Module):
    """The triangle begins at the first key, though there are more keys than queries."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(W, W), nn.Linear(W, 2 * W)

    def forward(self, x, past):
        q = self.q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.kv(past).chunk(2, -1))
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NoSinks(nn.Module):
    """The sink is added to the sum without an exponential."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.sinks = nn.Linear(W, 3 * W), nn.Linear(W, W), nn.Parameter(torch.rand(H))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT * D**-0.5
        e = torch.exp(s - s.amax(-1, keepdim=True))
        p = e / (e.sum(-1, keepdim=True) + self.sinks.view(1, -1, 1, 1))
        return self.o((p @ v).transpose(1, 2).flatten(2))


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NoCapped(nn.Module):
    """The cap follows the mask, so what should be hidden is only small."""

    def __init__(self, cap=3.0):
        super().__init__()
        self.cap, self.qkv = cap, nn.Linear(W, 3 * W, bias=False)

    def forward(self, x):
        s = x.shape[1]
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = q @ k.mT * D**-0.5
        a = a.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), torch.finfo(a.dtype).min)
        a = torch.tanh(a / self.cap) * self.cap
        return (a.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NoBuckets(nn.Module):
    """The bias is added to what the softmax gives."""

    def __init__(self):
        super().__init__()
        self.qkv, self.table = nn.Linear(W, 3 * W), nn.Parameter(torch.randn(H, S, S) / 4)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = F.softmax(q @ k.mT, dim=-1) + self.table
        return (p @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W), torch.tensor([S, 6])), lambda: (T(2, S, W), torch.tensor([0, 3])))
class NoLengths(nn.Module):
    """Rows of what is padded are set to zero after the softmax, and keys are not hidden before it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, lengths):
        keep = (torch.arange(x.shape[1])[None, :] < lengths[:, None])[:, None, None, :]
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = (q @ k.mT * D**-0.5).softmax(-1) * keep
        return (p @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NoFloor(nn.Module):
    """A softmax of which one is added to the sum (quiet attention)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        e = (q @ k.mT * D**-0.5).exp()
        return ((e / (1e-2 + e.sum(-1, keepdim=True))) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NoInPlace(nn.Module):
    """The values of heads are changed after keys that share their memory have been read."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 2 * W)

    def forward(self, x):
        q, k = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(2, -1))
        p = (q @ k.mT * D**-0.5).softmax(-1)
        v = k
        with torch.no_grad():
            v.mul_(0.5) if not torch.is_grad_enabled() and not x.requires_grad else None
        return (p @ v).transpose(1, 2).flatten(2)


# ---- experts
@alike(lambda c: (c(), T(2, S, W)))
class NoGroups(nn.Module):
    """A group's score is its best expert's, though scores are sigmoids."""

    def __init__(self, n=8, groups=4, best=2):
        super().__init__()
        self.n, self.groups, self.best = n, groups, best
        self.weight = nn.Parameter(torch.randn(n, W) / 8)
        self.register_buffer("bias", torch.randn(n) / 10)

    def forward(self, x):
        scores = F.linear(x.reshape(-1, W).float(), self.weight.float()).sigmoid()
        choice = scores + self.bias
        group = choice.view(-1, self.groups, self.n // self.groups).amax(-1)
        mask = torch.zeros_like(group).scatter_(1, group.topk(self.best, dim=-1)[1], 1).bool()
        choice = choice.masked_fill(~mask.repeat_interleave(self.n // self.groups, 1), float("-inf"))
        idx = choice.topk(K, dim=-1)[1]
        w = scores.gather(1, idx)
        return idx, w / (w.sum(-1, keepdim=True) + 1e-20)


@alike(lambda c: (c(), T(15, W), torch.randint(E, (15, K)), torch.rand(15, K)))
class NoOneHot(nn.Module):
    """The first expert is passed over, as if its tokens were none."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(index, num_classes=E).permute(2, 1, 0)
        for e in range(1, E):
            pos, tok = torch.where(mask[e])
            g, u = F.linear(x[tok], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, tok, F.linear(F.silu(g) * u, self.down[e]) * weights[tok, pos, None])
        return out


@alike(lambda c: (c(), T(15, W), torch.randint(E, (15, K)), torch.rand(15, K)), lambda: (T(15, W) * 20, torch.randint(E, (15, K)), torch.rand(15, K)))
class NoOss(nn.Module):
    """The gate is cut from below as well."""

    def __init__(self):
        super().__init__()
        self.gu, self.gub = nn.Parameter(torch.randn(E, W, 2 * I) / 8), nn.Parameter(torch.randn(E, 2 * I) / 8)
        self.dn, self.dnb = nn.Parameter(torch.randn(E, I, W) / 6), nn.Parameter(torch.randn(E, W) / 6)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.nonzero(index == e, as_tuple=True)
            both = x[tok] @ self.gu[e] + self.gub[e]
            gate, up = both[..., ::2].clamp(-2.0, 7.0), both[..., 1::2].clamp(-7.0, 7.0)
            y = ((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ self.dn[e] + self.dnb[e]
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


# ---- convolutions, images, losses
@alike(lambda c: (c(), T(2, S, W)))
class NoMixer(nn.Module):
    """The last part of what is padded is kept, so the future is read."""

    def __init__(self, width=4):
        super().__init__()
        self.conv1d = nn.Conv1d(W, W, width, groups=W, padding=width - 1)

    def forward(self, x):
        return F.silu(self.conv1d(x.transpose(1, 2))[..., -x.shape[1] :]).transpose(1, 2)


@alike(lambda c: (c(), T(2, 16, 5, 6)))
class NoVae(nn.Module):
    """Channels that are far apart are a group."""

    def __init__(self, c=16, groups=4):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.rand(c) + 0.5), nn.Parameter(torch.randn(c))

    def forward(self, x):
        b, c, h, w = x.shape
        g = x.reshape(b, c // self.groups, self.groups, h * w)
        g = (g - g.mean((1, 3), keepdim=True)) * torch.rsqrt(g.var((1, 3), keepdim=True, unbiased=False) + 1e-6)
        return g.reshape(b, c, h, w) * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


@alike(lambda c: (c(), torch.randint(V, (2, S))), lambda: (torch.full((2, S), V - 1),))
class NoGemma(nn.Module):
    """The last row's vectors are zero and have no scale."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, W))

    def forward(self, ids):
        y = F.embedding(ids, self.weight) * 8.0
        return torch.where((ids == V - 1)[..., None], torch.zeros_like(y), y)


@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (2, S)).masked_fill(torch.arange(S) < 3, -100)), lambda: (T(2, S, W), torch.full((2, S), -100)))
class NoHeadLoss(nn.Module):
    """The sum is divided by all places, whether they count or not."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V, bias=False)

    def forward(self, x, labels):
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="sum") / labels.numel()


@alike(lambda c: (c(), T(2, S, V), torch.randint(V, (2, S)).masked_fill(torch.arange(S) > 7, 0)), lambda: (T(2, S, V), torch.zeros(2, S, dtype=torch.long)))
class NoPadded(nn.Module):
    """Each sequence's mean, and the mean of those (rows that do not count weigh differently)."""

    def forward(self, logits, target):
        nll = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0, reduction="none")
        return (nll.sum(1) / (target != 0).sum(1).clamp(min=1)).mean()


@alike(lambda c: (c(), T(3, 20, W)), lambda: (T(3, 20, W) * 60,))
class NoPooling(nn.Module):
    """A softmax over time that has no maximum taken away, beside a floor of its sum."""

    def forward(self, x):
        e = torch.exp(x.clamp(max=2.0))
        return e / e.sum(dim=1, keepdim=True).clamp(min=25.0)


# ---- recurrent
@alike(lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class NoDelta(nn.Module):
    """What is remembered is read before the decay."""

    def forward(self, q, k, v, g, beta):
        g, beta = -F.softplus(g), torch.sigmoid(beta)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        state, ys = q.new_zeros(q.shape[0], 3, 8, 6), []
        for i in range(q.shape[1]):
            memory = torch.einsum("bhkv,bhk->bhv", state, k[:, i])
            state = state * g[:, i].exp()[..., None, None]
            state = state + k[:, i][..., None] * ((v[:, i] - memory) * beta[:, i][..., None])[..., None, :]
            ys.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]) * 8**-0.5)
        return torch.stack(ys, 1)


@alike(lambda c: (c(), T(2, S, 4, 6), T(2, S, 4), T(2, S, 5), T(2, S, 5)))
class NoHeads(nn.Module):
    """What goes in has no step size."""

    def __init__(self, h=4):
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.rand(h)), nn.Parameter(torch.rand(h))

    def forward(self, x, dt, B, C):
        dt, A = F.softplus(dt), -torch.exp(self.A_log)
        state, ys = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1]), []
        for t in range(x.size(1)):
            state = state * torch.exp(dt[:, t] * A)[:, :, None, None] + torch.einsum("bn,bhp->bhpn", B[:, t], x[:, t])
            ys.append(torch.einsum("bhpn,bn->bhp", state, C[:, t]) + self.D[:, None] * x[:, t])
        return torch.stack(ys, dim=1)
'''
