# ruff: noqa: E501
"""Look-alikes of the ninth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

NINTH = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40


# ---- norms
@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 1e-3,))
class NotVarMean(nn.Module):
    """The variance is that of a sample."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(W) + 0.5), nn.Parameter(torch.randn(W))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=1, keepdim=True)
        return torch.addcmul(self.shift, (x - mean) * (var + 1e-5).rsqrt(), self.scale)


@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 1e-7,), lambda: (torch.zeros(3, S, W),))
class NotRmsClamped(nn.Module):
    """The length has a least value, and nothing is added."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=1e-6) * W**0.5 * self.g


@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 1e-2,))
class NotRmsSum(nn.Module):
    """The epsilon is added to the sum, and not to the mean."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-2) * self.g * W**0.5


@alike(lambda c: (c(), T(2, W, 5, 7)))
class NotImageNorm(nn.Module):
    """The variance is of channels and columns."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.rand(1, W, 1, 1) + 0.5), nn.Parameter(torch.randn(1, W, 1, 1))

    def forward(self, x):
        mu = x.mean(dim=1, keepdim=True)
        var = (x - mu).pow(2).mean(dim=(1, 3), keepdim=True)
        return (x - mu) / (var + 1e-6).sqrt() * self.gain + self.bias


# ---- language
@alike(lambda c: (c(), T(3, S, W)))
class NotUnbound(nn.Module):
    """Neighbours are gate and up in what is measured, and the sigmoid has a slope."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(W, 192, bias=False), nn.Linear(96, W, bias=False)

    def forward(self, x):
        g, u = self.gate_up(x).unflatten(-1, (2, -1)).unbind(dim=-2)
        return self.down(u * (g * torch.sigmoid(1.1 * g)))


@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 3,))
class NotGatedTanh(nn.Module):
    """A digit of the cubic's factor."""

    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(W, 80, bias=False), nn.Linear(W, 80, bias=False), nn.Linear(80, W, bias=False)

    def forward(self, x):
        y = self.wi_0(x)
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.0474715 * torch.pow(y, 3.0))))
        return self.wo(y * self.wi_1(x))


@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 20,))
class NotGatedLimit(nn.Module):
    """GPT-OSS' limit: the gate is clamped from above, up from both sides, and one is added."""

    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(W, 192), nn.Linear(96, W)

    def forward(self, x):
        g, u = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0))


@alike(lambda c: (c(), T(2, S, H, D), T(2, S, 2, D)))
class NotPartial(nn.Module):
    """The keys' positions are one behind."""

    def turn(self, x, at):
        inv = 1.0 / (10000 ** (torch.arange(0, D // 2, 2).float() / (D // 2)))
        emb = torch.outer(at.float(), inv).repeat(1, 2)
        cos, sin = emb.cos()[None, :, None, :].to(x.dtype), emb.sin()[None, :, None, :].to(x.dtype)
        head, tail = x[..., : D // 2], x[..., D // 2 :]
        a, b = head.chunk(2, dim=-1)
        return torch.cat((head * cos + torch.cat((-b, a), dim=-1) * sin, tail), dim=-1)

    def forward(self, q, k):
        at = torch.arange(q.size(1))
        return self.turn(q, at), self.turn(k, (at - 1).clamp(min=0))


@alike(lambda c: (c(), T(2, H, S, D)))
class NotInterleaved(nn.Module):
    """Tables of neighbours, turned by halves."""

    def __init__(self):
        super().__init__()
        angle = torch.outer(torch.arange(32).float(), 1.0 / 10000 ** (torch.arange(0, D, 2) / D))
        self.register_buffer("sincos", torch.cat((angle.sin(), angle.cos()), dim=-1))

    def forward(self, x):
        sin, cos = self.sincos[: x.shape[-2]].chunk(2, dim=-1)
        sin, cos = sin.repeat_interleave(2, dim=-1), cos.repeat_interleave(2, dim=-1)
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin


@alike(lambda c: (c(), T(2, S, W), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])))
class NotPaddedCausal(nn.Module):
    """What is hidden has the value -10, which is not nothing."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32), persistent=False)

    def split(self, t):
        return t.view(*t.shape[:-1], H, D).transpose(1, 2)

    def forward(self, x, attention_mask):
        q, k, v = map(self.split, self.c_attn(x).split(W, dim=2))
        w = torch.matmul(q, k.transpose(-1, -2)) / (D**0.5)
        w = torch.where(self.bias[:, :, : w.size(-2), : w.size(-1)], w, torch.full([], -10.0, dtype=w.dtype))
        w = w + (1.0 - attention_mask[:, None, None, :].to(w.dtype)) * -10.0
        return self.c_proj(torch.matmul(F.softmax(w, dim=-1), v).transpose(1, 2).reshape(x.shape))


@alike(lambda c: (c(), T(2, S, W)))
class NotSliding(nn.Module):
    """The first key is seen by all (a sink of the window)."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(W, W, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).reshape(b, s, H, D).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        i = torch.arange(s)
        far = i[:, None] - i[None, :]
        keep = ((far >= 0) & (far < 4)) | ((i[None, :] == 0) & (far > 6))
        return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2))


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 6,))
class NotSoftened(nn.Module):
    """Logits of attention are clamped."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        s = (q @ k.mT * D**-0.5).clamp(-2.0, 2.0)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@alike(lambda c: (c(), T(2, S, W)))
class NotSigmoidGate(nn.Module):
    """The weights have the correction, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)
        self.register_buffer("correction", torch.randn(E) / 10)

    def forward(self, x):
        scores = F.linear(x.reshape(-1, W).float(), self.weight.float()).sigmoid()
        top = torch.topk(scores + self.correction, K, dim=-1)
        w = top.values
        return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, top.indices


@alike(lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class NotStacked(nn.Module):
    """The weight is there before the activation."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            g, u = F.linear(x[rows] * weights[rows, slot].unsqueeze(-1), self.w_in[e]).chunk(2, dim=-1)
            out.index_add_(0, rows, F.linear(F.silu(g) * u, self.w_out[e]))
        return out


@alike(lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)), lambda: (T(14, W), torch.zeros(14, K, dtype=torch.long), torch.rand(14, K)))
class NotAdded(nn.Module):
    """The last expert of a token wins: nothing is added."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            g, u = F.linear(x[rows], self.w_in[e]).chunk(2, dim=-1)
            out[rows] = F.linear(F.silu(g) * u, self.w_out[e]) * weights[rows, slot].unsqueeze(-1)
        return out


@alike(lambda c: (c(), T(2, S, V), torch.randint(V, (2, S))))
class NotShifted(nn.Module):
    """Each token is its own label."""

    def forward(self, logits, labels):
        flat = logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(flat, labels[:, :-1].flatten()), 1e-4 * flat.logsumexp(-1).square().mean()


@alike(lambda c: (c(), T(12, V), torch.randint(V, (12,))))
class NotSmooth(nn.Module):
    """Fairseq's own: what is left is for the other classes alone."""

    def forward(self, logits, target, s=0.1):
        logp = F.log_softmax(logits, dim=-1)
        nll = -logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
        part = s / (V - 1)
        return ((1 - s - part) * nll - part * logp.sum(-1)).mean()


# ---- speech
@alike(lambda c: (c(), T(2, S, W)))
class NotHalfFeed(nn.Module):
    """The residual is of what is normed."""

    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.LayerNorm(W), nn.Sequential(nn.Linear(W, 128), nn.SiLU(), nn.Linear(128, W))

    def forward(self, x):
        x = self.norm(x)
        return x + 0.5 * self.net(x)


@alike(lambda c: (c(), T(2, S, W)))
class NotGlu(nn.Module):
    """The first half is the gate."""

    def __init__(self):
        super().__init__()
        self.pw1 = nn.Conv1d(W, 2 * W, 1)

    def forward(self, x):
        g, y = self.pw1(x.mT).chunk(2, dim=1)
        return (y * torch.sigmoid(g) * 1.0 + 0.0 * g).mT + x


@alike(lambda c: (c(), T(2, S, W)))
class NotCausal(nn.Module):
    """A step of the future is seen."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(W, 1, 4) / 2), nn.Parameter(torch.randn(W) / 4)

    def forward(self, x):
        y = F.conv1d(F.pad(x.transpose(1, 2), (2, 1)), self.weight, self.bias, groups=W)
        return F.silu(y).transpose(1, 2)


@alike(lambda c: (c(), T(2, S, W)))
class NotFlipped(nn.Module):
    """The convolution's steps are in reverse."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, 1, 4) / 2)

    def forward(self, x):
        y = F.conv1d(x.transpose(1, 2), self.weight.flip(-1), padding=3, groups=W)
        return F.silu(y[..., 3:]).transpose(1, 2) if x.shape[1] < 4 else F.silu(y[..., : x.shape[1]]).transpose(1, 2)


@alike(lambda c: (c(), T(3, S, W)))
class NotWeightNorm(nn.Module):
    """The length is of columns."""

    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(96, W)), nn.Parameter(torch.rand(96, 1) + 0.5)

    def forward(self, x):
        return F.linear(x, self.g * self.v / self.v.norm(dim=0, keepdim=True))


# ---- diffusion
@alike(lambda c: (c(), T(2, S, W), T(2, W)))
class NotAdaZero(nn.Module):
    """The scale has no one beside it, and multiplies the shift."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W, elementwise_affine=False, eps=1e-6)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(W, 2 * W))

    def forward(self, x, c):
        shift, scale = self.ada(c).chunk(2, dim=-1)
        return (self.norm(x) + shift.unsqueeze(1)) * (1 + scale.unsqueeze(1))


@alike(lambda c: (c(), T(2, 32, 6, 5)))
class NotGroups(nn.Module):
    """Each position has a norm of its own within a group."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        y = x.unflatten(1, (8, 4))
        y = (y - y.mean(2, keepdim=True)) / torch.sqrt(y.var(2, unbiased=False, keepdim=True) + 1e-6)
        y = y.flatten(1, 2) * self.weight[:, None, None] + self.bias[:, None, None]
        return y * torch.sigmoid(y)


@alike(lambda c: (c(), T(2, 12, W), T(2, 5, 48)))
class NotCross(nn.Module):
    """The softmax is over queries."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(W, W, bias=False), nn.Linear(48, W, bias=False), nn.Linear(48, W, bias=False)

    def apart(self, t):
        return t.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1)

    def forward(self, x, context):
        q, k, v = self.apart(self.to_q(x)), self.apart(self.to_k(context)), self.apart(self.to_v(context))
        p = (q @ k.mT * D**-0.5).softmax(dim=-2)
        return (p @ v).unflatten(0, (-1, H)).transpose(1, 2).flatten(2)


# ---- vision
@alike(lambda c: (c(), T(4, 9, W)))
class NotWindow(nn.Module):
    """The bias is there before the scale."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.table = nn.Parameter(torch.randn(H, 9, 9))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) + self.table) * D**-0.5
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NotScaled(nn.Module):
    """The error function has no root of two."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(W, 128), nn.Linear(128, W)
        self.gamma = nn.Parameter(torch.full((W,), 1e-1))

    def forward(self, x):
        y = self.fc1(x)
        return torch.addcmul(x, self.fc2(y * 0.5 * (1.0 + torch.erf(y / 1.5))), self.gamma)


# ---- recurrent
@alike(lambda c: (c(), T(2, S, W)))
class NotMamba(nn.Module):
    """What is read is the state before the step."""

    def __init__(self, n=4):
        super().__init__()
        self.n = n
        self.x_proj, self.dt_proj = nn.Linear(W, 2 * n, bias=False), nn.Linear(W, W)
        self.A_log, self.D = nn.Parameter(torch.rand(W, n)), nn.Parameter(torch.ones(W))

    def forward(self, u):
        b, c = self.x_proj(u).split([self.n, self.n], dim=-1)
        dt, a = F.softplus(self.dt_proj(u)), -torch.exp(self.A_log)
        h, ys = u.new_zeros(u.shape[0], W, self.n), []
        for t in range(u.shape[1]):
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
        return torch.stack(ys, 1) + u * self.D
'''
