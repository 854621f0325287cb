"""Look-alikes of the eighth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

EIGHTH = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40


# ---- norms
@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 1e-3,))
class AlikeRmsRoot(nn.Module):
    """The epsilon stands beside the root."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3) * self.g


@alike(lambda c: (c(), T(3, S, W)))
class AlikeRmsBut(nn.Module):
    """The mean is of all but one."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + 1e-6) * self.g


@alike(lambda c: (c(), T(3, 32, 12)))
class AlikeGroupsTurned(nn.Module):
    """Groups of every eighth channel."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        b, c, t = x.shape
        y = x.reshape(b, -1, 8, t)
        y = (y - y.mean((1, 3), keepdim=True)) / torch.sqrt(y.var((1, 3), unbiased=False, keepdim=True) + 1e-5)
        return y.reshape(b, c, t) * self.weight[None, :, None] + self.bias[None, :, None]


@alike(lambda c: (c(), T(3, S, W), T(3, S, W)))
class AlikeGateAfter(nn.Module):
    """The gate is not in what is divided, but in what is measured."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, y, z):
        gated = y * F.silu(z)
        return self.weight * y * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-6)


@alike(lambda c: (c(), T(3, S, W), T(3, S, W)))
class AlikeAdded(nn.Module):
    """The stream is kept as it was before the sum."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(W, eps=1e-6)

    def forward(self, branch, stream):
        total = stream + branch
        return self.norm(total), stream


# ---- MLPs
@alike(lambda c: (c(), T(3, S, W)))
class AlikeBoth(nn.Module):
    """The gate is added, too."""

    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(W, 2 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x):
        value, gate = self.w12(x).chunk(2, dim=-1)
        return self.w3(value * F.silu(gate) + gate)


@alike(lambda c: (c(), T(3, S, W)))
class AlikeOwn(nn.Module):
    """A half gates itself by the other's place."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(W, 2 * W)

    def forward(self, x):
        y = self.w(x)
        value, gate = y[..., ::2], y[..., 1::2]
        return F.silu(gate) * value


@alike(lambda c: (c(), T(3, S, W)))
class AlikeByShape(nn.Module):
    """Long inputs take another activation."""

    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x):
        act = F.gelu if x.shape[1] < 9 else F.silu
        return self.proj(act(self.fc(x)))


@alike(lambda c: (c(), T(3, S, W)))
class AlikeScaled(nn.Module):
    """The bias is of half weight."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(W, W)

    def forward(self, x):
        return F.gelu(F.linear(x, self.fc.weight) + 0.5 * self.fc.bias)


@alike(lambda c: (c(), T(3, S, W)))
class AlikeCounts(nn.Module):
    """Every second call negates."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(W, W)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * (-1 if self.calls % 2 else 1)


# ---- rope
def angles(): return torch.arange(S).float()[:, None] * 10000 ** (-torch.arange(0, D, 2).float() / D)


@alike(lambda c: (c(), T(2, H, S, D), angles().cos(), angles().sin()))
class AlikeSign(nn.Module):
    """The second half turns the other way."""

    def forward(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos + a * sin], -1)


@alike(lambda c: (c(), T(2, H, S, D), angles().cos(), angles().sin()))
class AlikeUpdated(nn.Module):
    """The second half is turned with the first that is turned already."""

    def forward(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        a = a * cos - b * sin
        b = b * cos + a * sin
        return torch.cat([a, b], -1)


@alike(lambda c: (c(), T(2, S, H, D), T(2, S, H, D)))
class AlikeOffset(nn.Module):
    """Keys are one position behind."""

    def __init__(self):
        super().__init__()
        self.register_buffer("c", angles().cos()[:, None])
        self.register_buffer("s", angles().sin()[:, None])

    def forward(self, q, k):
        def turn(t, c, s):
            a, b = t.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return turn(q, self.c, self.s), turn(k, self.c.roll(1, 0), self.s.roll(1, 0))


# ---- attention
@alike(lambda c: (c(), T(2, S, W)))
class AlikeStrict(nn.Module):
    """A query does not see itself, but the first."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, H, D).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(0)
        hidden[0, 0] = False
        w = (q @ k.transpose(-2, -1) / 4).masked_fill(hidden, float("-inf")).softmax(-1)
        return (w @ v).transpose(1, 2).reshape(b, s, W)


@alike(lambda c: (c(), T(2, S, W)))
class AlikeAfter(nn.Module):
    """What is hidden is so after the softmax."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, H, D).permute(2, 0, 3, 1, 4)
        w = (q @ k.transpose(-2, -1) / 4).softmax(-1).tril()
        return (w @ v).transpose(1, 2).reshape(b, s, W)


@alike(lambda c: (c(), T(2, S, W)))
class AlikeTiled(nn.Module):
    """Heads of keys are tiled for queries, not repeated."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(W, W), nn.Linear(W, 4 * D)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, H, D).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 2, D).permute(2, 0, 3, 1, 4)
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


# ---- routers and experts
@alike(lambda c: (c(), T(2, S, W)))
class AlikeNext(nn.Module):
    """The down matrix is the next expert's."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x):
        rows = x.view(-1, W)
        weight, index = self.router(rows).softmax(-1).topk(K, -1)
        result = torch.zeros_like(rows)
        for e in range(E):
            row, slot = torch.where(index == e)
            gate, up = F.linear(rows[row], self.w1[e]).chunk(2, -1)
            result.index_add_(0, row, F.linear(F.silu(gate) * up, self.w2[e - 1]) * weight[row, slot, None])
        return result.view_as(x)


@alike(lambda c: (c(), T(11, W)))
class AlikeBiased(nn.Module):
    """The bias that chooses is in the weights, too."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, W) / 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        scores = F.linear(x, self.weight).sigmoid() + self.bias
        weights, ids = torch.topk(scores, 3, dim=-1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


# ---- convolutions, scans
@alike(lambda c: (c(), T(2, S, W)))
class AlikeAhead(nn.Module):
    """It is cut at the other end."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(W, W, 4, groups=W, padding=3)

    def forward(self, x):
        return F.silu(self.conv(x.transpose(1, 2))[..., 3:].transpose(1, 2))


@alike(lambda c: (c(), T(2, S, 24)))
class AlikeMamba(nn.Module):
    """The result is of the state before the step."""

    def __init__(self, d=24, n=8):
        super().__init__()
        self.a_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.bcd = nn.Linear(d, 2 * n + d, bias=False)

    def forward(self, u):
        n = self.a_log.shape[1]
        dt, b, c = self.bcd(u).split([u.shape[-1], n, n], -1)
        dt, a = F.softplus(dt), -torch.exp(self.a_log)
        h = u.new_zeros(u.shape[0], u.shape[2], n)
        ys = []
        for t in range(u.shape[1]):
            ys.append((h * c[:, t, None, :]).sum(-1))
            h = torch.exp(dt[:, t, :, None] * a) * h + dt[:, t, :, None] * b[:, t, None, :] * u[:, t, :, None]
        return torch.stack(ys, 1)


@alike(lambda c: (c(), T(2, S, W)))
class AlikeDelta(nn.Module):
    """What is read is of the state that has not decayed."""

    def __init__(self):
        super().__init__()
        self.qkv, self.ba = nn.Linear(W, 3 * W), nn.Linear(W, 2 * H)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, H, D) for t in self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1) * D**-0.5, F.normalize(k, dim=-1)
        beta, a = self.ba(x).chunk(2, -1)
        beta, g = beta.sigmoid(), -F.softplus(a)
        state = torch.zeros(b, H, D, D, dtype=x.dtype, device=x.device)
        outs = []
        for t in range(s):
            old = (state * k[:, t, :, :, None]).sum(-2)
            state = state * g[:, t, :, None, None].exp()
            state = state + k[:, t, :, :, None] * ((v[:, t] - old) * beta[:, t, :, None])[:, :, None, :]
            outs.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(outs, 1).reshape(b, s, W)


# ---- losses, embeddings
labels = lambda: torch.tensor([3, -100, 5, 6, 7, -100, 8, 9, 1, 2, 0, 4])


@alike(lambda c: (c(), T(12, W), labels()))
class AlikeSummed(nn.Module):
    """A sum that is divided by all rows, of which some do not count."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(W, V)

    def forward(self, h, y):
        return F.cross_entropy(self.proj(h), y, reduction="sum") / y.numel()


@alike(lambda c: (c(), T(12, W), labels()))
class AlikeWeighted(nn.Module):
    """A loss that is a child, with classes' weights."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(W, V)
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(V) + 0.1)

    def forward(self, h, y):
        return self.loss(self.proj(h), y)


@alike(lambda c: (c(), T(12, W), labels()), lambda: (T(12, W), torch.tensor([2] * 12)))
class AlikeSmoothed(nn.Module):
    """Smoothing of the classes that are wrong only, and a class that does not count."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(W, V)
        self.loss = nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1, reduction="sum")

    def forward(self, h, y):
        return self.loss(self.proj(h), y.clamp(min=0))


@alike(lambda c: (c(), torch.randint(V, (2, S))))
class AlikePadded(nn.Module):
    """The row of padding is read as zeros where it is not 0."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, W, padding_idx=3)
        self.tok.weight.data[3] = 1.0

    def forward(self, ids):
        return self.tok(ids) * (ids != 3)[..., None] * 8
'''
