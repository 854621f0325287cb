# ruff: noqa: E501
"""Look-alikes of what was mended for the fourteenth set: settings that change, masks that lie otherwise, other casts."""

from __future__ import annotations

FOURTEENTH_OWN = r'''
W, H, D, S = 64, 8, 8, 11
ROW = torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))


def nw_heads(t, n=H):
    return t.unflatten(-1, (n, -1)).transpose(-3, -2)


class NwConfig:
    def __init__(self, softcap=3.0, scale=None):
        self.softcap, self.scale = softcap, scale


def nw_eager(module, query, key, value, mask, scaling=None, softcap=None):
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# ---- settings, and arguments that are put anew
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,), lambda: (T(2, S, W) * 4,))
class NwTurning(nn.Module):
    """Every other call has no cap: the setting changes before it is read."""

    def __init__(self):
        super().__init__()
        self.config, self.head_dim, self.qkv = NwConfig(), D, nn.Linear(W, 3 * W)

    def forward(self, x):
        self.config.softcap = None if self.config.softcap is not None else 3.0
        q, k, v = map(nw_heads, self.qkv(x).chunk(3, -1))
        out, _ = nw_eager(self, q, k, v, None, self.config.scale, self.config.softcap)
        return out.flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,), lambda: (T(2, S, W) * 4,))
class NwChild(nn.Module):
    """What projects the values takes the cap away, and the next call has one again."""

    class Projects(nn.Linear):
        def forward(self, x):
            self.__dict__["whose"].softcap = None
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.config, self.head_dim = NwConfig(), D
        self.q, self.k, self.v = nn.Linear(W, W), nn.Linear(W, W, bias=False), self.Projects(W, W)
        self.v.__dict__["whose"] = self.config

    def forward(self, x):
        self.config.softcap = 3.0
        q, k, v = nw_heads(self.q(x)), nw_heads(self.k(x)), nw_heads(self.v(x))
        out, _ = nw_eager(self, q, k, v, None, self.config.scale, self.config.softcap)
        return out.flatten(2)


@alike(lambda c: (c(), T(2, S, W), ROW), lambda: (T(2, S, W), ROW), lambda: (T(2, 6, W), ROW[:6, :6]))
class NwForgets(nn.Module):
    """The mask is dropped where there are few tokens, after it was asked for once."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask=None):
        q, k, v = map(nw_heads, self.qkv(x).chunk(3, -1))
        if mask is not None:
            q = q * 2.0
            mask = mask if x.shape[1] > 8 else None
        scores = q @ k.mT * D**-0.5
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W), ROW), lambda: (T(2, S, W), torch.zeros(S, S)), lambda: (T(2, 6, W), ROW[:6, :6]))
class NwAnew(nn.Module):
    """The mask is put anew by what it is of, and hides what it showed."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask=None):
        q, k, v = map(nw_heads, self.qkv(x).chunk(3, -1))
        mask = None if mask is not None and float(mask.nan_to_num(neginf=0).abs().sum()) == 0 and bool(mask.isfinite().all()) else mask
        scores = q @ k.mT * D**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e4)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


# ---- masks of rows and keys
@alike(lambda c: (c(), T(2, S, W), torch.randn(S, S)), lambda: (T(2, S, W), torch.randn(S, S).masked_fill(torch.rand(S, S) > 0.7, float("-inf"))))
class NwTurned(nn.Module):
    """The mask is read with its keys as rows."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (H, D)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bshd,bthd->bsht", q, k) * D**-0.5
        scores += mask.T.unsqueeze(1)
        return torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v).flatten(2)


@alike(lambda c: (c(), T(2, 8, W), torch.randn(8, 8)), lambda: (T(2, 8, W), torch.randn(1, 8)), lambda: (T(2, 8, W), torch.randn(8, 1) * 4))
class NwOfHeads(nn.Module):
    """The mask is of heads and keys, of which there are as many here as tokens."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (H, D)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bshd,bthd->bsht", q, k) * D**-0.5
        scores = scores + mask.unsqueeze(0)
        return torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v).flatten(2)


# ---- narrow values
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NwScaled(nn.Module):
    """The scale is of the values' width, which is less than the keys'."""

    def __init__(self, wide=4):
        super().__init__()
        self.wide, self.qk, self.v = wide, nn.Linear(W, 2 * W), nn.Linear(W, H * wide)

    def forward(self, x):
        q, k = map(nw_heads, self.qk(x).chunk(2, -1))
        v = nw_heads(self.v(x))
        p = (q @ k.mT / math.sqrt(v.shape[-1])).softmax(-1)
        return (p @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NwCut(nn.Module):
    """Queries and keys are cut to the values' width."""

    def __init__(self, wide=4):
        super().__init__()
        self.qk, self.v = nn.Linear(W, 2 * W), nn.Linear(W, H * wide)

    def forward(self, x):
        q, k = map(nw_heads, self.qk(x).chunk(2, -1))
        v = nw_heads(self.v(x))
        n = v.shape[-1]
        p = (q[..., :n] @ k[..., :n].mT * D**-0.5).softmax(-1)
        return (p @ v).transpose(1, 2).flatten(2)


# ---- casts, and numbers that follow a choice
@alike(lambda c: (c(), T(2, S, W), torch.zeros(S, dtype=torch.bfloat16)), lambda: (T(2, S, W), torch.zeros(S, dtype=torch.float64)), lambda: (T(2, S, W), torch.zeros(S)))
class NwCast(nn.Module):
    """Probabilities are cast as another argument is, whatever that has."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x, like):
        q, k, v = map(nw_heads, self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * D**-0.5
        p = scores.softmax(-1, dtype=torch.float32).type_as(like).type_as(v)
        return (p @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, 6, W),), lambda: (T(2, 17, W) * 2,))
class NwLonger(nn.Module):
    """How many rows the bias is cut by changes in the choice before it."""

    def __init__(self, most=32, clip=2.0):
        super().__init__()
        self.clip, self.qkv = clip, nn.Linear(W, 3 * W)
        self.register_buffer("bias", torch.randn(1, H, 1, most))

    def forward(self, x):
        b, s, _ = x.shape
        y = self.qkv(x)
        at = s
        if self.clip:
            y = y.clamp(-self.clip, self.clip)
            at = s + 1
        q, k, v = map(nw_heads, y.chunk(3, -1))
        scores = q.matmul(k.transpose(-1, -2)) * D**-0.5
        scores = scores + self.bias[:, :, :, self.bias.size(-1) - at : self.bias.size(-1) - 1]
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), torch.finfo(q.dtype).min)
        return (scores.softmax(-1).matmul(v)).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 5,), lambda: (T(2, S, W) * 1e-3,))
class NwLeast(nn.Module):
    """What hides is the least of the queries, and not of their dtype."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(W, 3 * W), nn.Parameter(torch.randn(1, H, 1, S), requires_grad=False)

    def forward(self, x):
        s = x.shape[1]
        q, k, v = map(nw_heads, self.qkv(x).chunk(3, -1))
        scores = q.matmul(k.transpose(-1, -2)) * D**-0.5 + self.bias
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float(q.detach().min()))
        return (scores.softmax(-1).matmul(v)).transpose(1, 2).flatten(2)


# ---- tables of the module's own
@alike(lambda c: (c(), T(2, H, S, D)), lambda: (T(2, H, S, D),), lambda: (T(2, H, S, D) * 3,))
class NwGrows(nn.Module):
    """The tables are changed between two uses of them, and once more for the next call."""

    def __init__(self):
        super().__init__()
        f = torch.outer(torch.arange(S).float(), 1 / 10 ** torch.arange(0, 1, 2 / D)).repeat_interleave(2, -1)
        self.register_buffer("cos", f.cos())
        self.register_buffer("sin", f.sin())

    def other(self, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)

    def forward(self, x):
        y = x * self.cos
        with torch.no_grad():
            self.sin.mul_(-1.0)
        y = y + self.other(x) * self.sin
        with torch.no_grad():
            self.cos.mul_(0.5)
        return y


@alike(lambda c: (c(), T(2, H, S, D)), lambda: (T(2, H, 4, D),), lambda: (T(2, H, 17, D),))
class NwRemade(nn.Module):
    """The tables are made anew for another length, in what the rotation calls."""

    def __init__(self):
        super().__init__()
        self.make(S)

    def make(self, n):
        f = torch.outer(torch.arange(n).float(), 1 / 10 ** torch.arange(0, 1, 2 / D)).repeat_interleave(2, -1)
        self.register_buffer("cos", f.cos())
        self.register_buffer("sin", f.sin() * n)

    def other(self, x):
        if self.cos.shape[0] != x.shape[-2]:
            self.make(x.shape[-2])
            self.to(x.dtype)
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)

    def forward(self, x):
        turned = self.other(x)
        return x * self.cos + turned * self.sin


@alike(lambda c: (c(), T(2, H, S, D)))
class NwLearns(nn.Module):
    """The tables learn."""

    def __init__(self):
        super().__init__()
        self.cos, self.sin = nn.Parameter(torch.randn(S, D)), nn.Parameter(torch.randn(S, D))

    def other(self, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)

    def forward(self, x):
        return x * self.cos + self.other(x) * self.sin


@alike(lambda c: (c(), T(2, 4, 4, D)), lambda: (T(2, 8, 4, D),), lambda: (T(2, 4, 1, D),))
class NwOfPlaces(nn.Module):
    """The tables are of heads, of which there are as many as places."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.randn(4, 1, D))
        self.register_buffer("sin", torch.randn(4, 1, D))

    def other(self, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)

    def forward(self, x):
        return x * self.cos + self.other(x) * self.sin
'''
