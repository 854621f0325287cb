# ruff: noqa: E501
"""Look-alikes of the twelfth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

TWELFTH = r'''
W, H, D, S = 64, 8, 8, 11


# ---- norms
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) + 3,))
class NaMeanless(nn.Module):
    """The mean is taken away only after the root mean square has been read."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(W) + 0.5), 1e-6

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        x = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps).to(x.dtype)
        return self.weight * x


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 1e-3,))
class NaOuterEps(nn.Module):
    """A layer norm of a deviation with one less in its divisor, and an epsilon beside the root."""

    def __init__(self):
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.rand(W) + 0.5), nn.Parameter(torch.randn(W)), 1e-3

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


@alike(lambda c: (c(), T(2, S, W), T(2, W)))
class NaModulated(nn.Module):
    """What is normed is scaled without the one."""

    def __init__(self):
        super().__init__()
        self.norm, self.made = nn.LayerNorm(W, elementwise_affine=False), nn.Sequential(nn.SiLU(), nn.Linear(W, 2 * W))

    def forward(self, x, c):
        shift, scale = self.made(c).chunk(2, dim=1)
        return self.norm(x) * scale.unsqueeze(1) + shift.unsqueeze(1)


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)))
class NaGate(nn.Module):
    """The gate's SiLU is inside the mean of the norm of the gate, and what is scaled has none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x, gate):
        kind = x.dtype
        h, g = x.float(), F.silu(gate.float())
        h = h * torch.rsqrt((h * g).pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(kind)


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)))
class NaResidual(nn.Module):
    """The residual that is given back is what came, and not the sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)

    def forward(self, x, residual):
        h = (x + residual).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return h.to(x.dtype) * self.weight, residual


# ---- rotations
@alike(lambda c: (c(), T(2, S, H, D)))
class NaHalves(nn.Module):
    """Halves turn, with the tables of neighbours."""

    def __init__(self):
        super().__init__()
        f = torch.outer(torch.arange(32).float(), 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D)))
        self.register_buffer("cos", f.cos().repeat_interleave(2, -1), persistent=False)
        self.register_buffer("sin", f.sin().repeat_interleave(2, -1), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return x * self.cos[None, :n, None].to(x.dtype) + turned * self.sin[None, :n, None].to(x.dtype)


@alike(lambda c: (c(), T(2, S, H, D)))
class NaStacked(nn.Module):
    """Both terms of the second have the sine's sign of the first."""

    def __init__(self):
        super().__init__()
        f = torch.outer(torch.arange(32).float(), 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D)))
        self.register_buffer("table", torch.stack([f.cos(), f.sin()], -1), persistent=False)

    def forward(self, x):
        p = x.float().reshape(*x.shape[:-1], -1, 2)
        t = self.table[: x.shape[1]].view(1, x.shape[1], 1, -1, 2)
        out = torch.stack([p[..., 0] * t[..., 0] - p[..., 1] * t[..., 1], p[..., 1] * t[..., 0] - p[..., 0] * t[..., 1]], -1)
        return out.flatten(3).type_as(x)


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D)), lambda: (T(2, H, S, D), T(2, H, 4, D)))
class NaFromTheEnd(nn.Module):
    """Positions of either are counted from the longest's end."""

    def __init__(self):
        super().__init__()
        emb = torch.outer(torch.arange(32).float(), 1.0 / (100 ** (torch.arange(0, D, 2).float() / D))).repeat(1, 2)
        self.register_buffer("emb", emb, persistent=False)

    def turn(self, x, emb):
        emb = emb[-x.shape[2] :]
        return x * emb.cos().to(x.dtype) + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * emb.sin().to(x.dtype)

    def forward(self, q, k):
        emb = self.emb[: max(q.shape[2], k.shape[2])]
        return self.turn(q, emb), self.turn(k, emb)


# ---- attention
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NaWindow(nn.Module):
    """The window's far side is one further than a slice of the same number has it, and later keys are seen by one."""

    def __init__(self, window=3):
        super().__init__()
        self.window, self.qkv = window, nn.Linear(W, 3 * W)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT * D**-0.5
        at = torch.arange(n, device=x.device)
        gap = at[:, None] - at[None, :]
        s = s.masked_fill((gap < -1) | (gap > self.window), float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 5,))
class NaSinkFirst(nn.Module):
    """The sink's column is cut from the scores' front, though it was put behind."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(W, 3 * W), nn.Parameter(torch.randn(H))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT
        s *= D**-0.5
        s = torch.cat([s, self.sinks.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
        return (s.softmax(-1)[..., 1:] @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 6,))
class NaLateScale(nn.Module):
    """Scores are capped before they are scaled."""

    def __init__(self, cap=3.0):
        super().__init__()
        self.cap, self.qkv = cap, nn.Linear(W, 3 * W)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = torch.tanh((q @ k.mT) / self.cap) * self.cap * D**-0.5
        s = s + torch.full((n, n), float("-inf"), dtype=s.dtype).triu(1)
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NaOverHeads(nn.Module):
    """A softmax over heads of each pair, because heads were not put before tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, H, D).unbind(2)
        s = q @ k.transpose(-2, -1) * D**-0.5
        return self.o((s.softmax(-1) @ v).reshape(b, n, W))


@alike(lambda c: (c(), T(2, S, W), torch.ones(2, S).masked_fill(torch.arange(S) > 8, 0)))
class NaSoftMask(nn.Module):
    """What is hidden is only ten less, so it is seen a little."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT / math.sqrt(D) + (1.0 - mask[:, None, None, :].to(q.dtype)) * -10.0
        return (F.softmax(s, dim=-1) @ v).permute(0, 2, 1, 3).reshape(x.shape)


@alike(lambda c: (c(), T(2, 3, W), T(2, H, 6, D), T(2, H, 6, D)))
class NaPast(nn.Module):
    """The triangle's first rows are taken, though what is new is behind what was."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(W, 3 * W)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, past_key, past_value):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        k, v = torch.cat([past_key, k], -2), torch.cat([past_value, v], -2)
        att = q @ k.mT * D**-0.5
        att = att.masked_fill(self.bias[:, :, : q.size(-2), : k.size(-2)] == 0, float("-inf"))
        return (att.softmax(-1) @ v).transpose(1, 2).flatten(2), (k, v)
'''
