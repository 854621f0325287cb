# ruff: noqa: E501
"""Look-alikes of what the twelfth set brought: functions written out, flags that are left out, locals that may be None,
rows without places, tables of one batch."""

from __future__ import annotations

TWELFTH_OWN = r'''
W, H, D, S = 64, 8, 8, 11
SEEN = []


def heads(t):
    return t.unflatten(-1, (H, D)).transpose(1, 2)


def noted(module, q, k, v, scale=D**-0.5):
    w = (q @ k.mT * scale).softmax(-1)
    return w @ v, module.note(w)


@alike(lambda c: (c(), T(2, S, W)))
class NbNoted(nn.Module):
    """What is not read of a function's results has an effect, which shows in the next result."""

    def __init__(self):
        super().__init__()
        self.qkv, self.calls = nn.Linear(W, 3 * W), 0

    def note(self, w):
        self.calls += 1
        return w.mean()

    def forward(self, x):
        out, _ = noted(self, *(heads(t) for t in self.qkv(x).chunk(3, -1)))
        return out.transpose(1, 2).flatten(2) * (1 + self.calls % 2)


def changing(module, query, key, value):
    query = query * module.boost
    w = (query @ key.mT * D**-0.5).softmax(-1)
    return w @ value, w, query


@alike(lambda c: (c(), T(2, S, W)))
class NbChanged(nn.Module):
    """A function puts another value in its parameter; the caller reads its own local of the same name after it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.boost = nn.Linear(W, 3 * W), 1.5

    def forward(self, x):
        query, key, value = (heads(t) for t in self.qkv(x).chunk(3, -1))
        out, w, _ = changing(self, query, key, value)
        return (out + query).transpose(1, 2).flatten(2)


def swapped(module, v, q, k):
    w = (q @ k.mT * D**-0.5).softmax(-1)
    return w @ v, w


@alike(lambda c: (c(), T(2, S, W)))
class NbSwapped(nn.Module):
    """Names of a function's parameters are those of other locals of the caller's."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        out, _ = swapped(self, q, k, v)
        return out.transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(3, S, W),), lambda: (T(2, S, W),))
class NbFlag(nn.Module):
    """A flag that most calls leave out changes what is computed in those that do not."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def attend(self, x, sharp=False, raw=None):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * D**-0.5
        scores = scores * 2 if sharp else scores
        if raw:
            scores = scores.relu()
        w = scores.softmax(-1)
        return (w @ v, w) if sharp else (w @ v,)

    def forward(self, x):
        if x.shape[0] > 2:
            return sum(t.sum() for t in self.attend(x, True))
        return self.attend(x)[0].flatten(1), self.attend(x, raw=1)[0], self.attend(x, sharp=x.shape[0])[0]


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(1, S, W),), lambda: (T(2, S, W),))
class NbAgain(nn.Module):
    """Whether a mask is None is asked again after one has been made, and made again."""

    def __init__(self):
        super().__init__()
        self.qkv, self.calls = nn.Linear(W, 3 * W), 0

    def made(self, n):
        self.calls += 1
        return None if self.calls % 2 else torch.ones(n, n, dtype=torch.bool).tril()

    def attend(self, q, k, v, mask=None):
        scores = q @ k.mT * D**-0.5
        if mask is None:
            mask = self.made(scores.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        more = self.made(scores.shape[-1])
        if more is None:
            scores = scores * 0.5
        if mask is None:
            scores = scores + 1
        w = scores.softmax(-1)
        return w @ v

    def forward(self, x):
        return self.attend(*(heads(t) for t in self.qkv(x).chunk(3, -1))).transpose(1, 2).flatten(2)


def drawn(module, q, k, v, p=0.0):
    w = F.dropout((q @ k.mT * D**-0.5).softmax(-1), p, training=True)
    return w @ v, w


@alike(lambda c: (c(), T(2, S, W)))
class NbDrawn(nn.Module):
    """What is dropped is dropped outside of training, where a number is larger."""

    def __init__(self):
        super().__init__()
        self.qkv, self.p = nn.Linear(W, 3 * W), 0.0

    def forward(self, x):
        p = self.p if self.training else 0.3
        torch.manual_seed(1)
        out, _ = drawn(self, *(heads(t) for t in self.qkv(x).chunk(3, -1)), p=p)
        return out.transpose(1, 2).flatten(2)


def writing(module, q, k, v):
    w = (q @ k.mT * module.scale).softmax(-1)
    module.scale = module.scale * 1.5
    return w @ v * module.scale, w


@alike(lambda c: (c(), T(2, S, W)))
class NbWriting(nn.Module):
    """A function puts another number in the module that it is given, and reads it again."""

    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(W, 3 * W), 0.2

    def forward(self, x):
        out, _ = writing(self, *(heads(t) for t in self.qkv(x).chunk(3, -1)))
        return out.transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(6, 16)), lambda: (T(4, 16, 3),), lambda: (T(1, 16),), lambda: (T(2, 16) * 1e-3,))
class NbRows(nn.Module):
    """A group norm of rows whose groups are far apart, and of what has places is not."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))

    def forward(self, x):
        if x.dim() == 3:
            return F.group_norm(x, 4, self.weight, self.bias, 1e-5)
        g = x.view(-1, 4, 4).transpose(1, 2)
        g = (g - g.mean(-1, keepdim=True)) * torch.rsqrt(g.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return g.transpose(1, 2).reshape(x.shape) * self.weight + self.bias


@alike(lambda c: (c(), T(H, H, H, D), T(H, H, D // 2)), lambda: (T(2, H, S, D), T(1, S, D // 2)), lambda: (T(2, S, S, D), T(S, S, D // 2)), lambda: (T(1, H, S, D), T(1, S, D // 2)))
class NbHeadTables(nn.Module):
    """Tables of three dimensions, of which the first is heads, and no batch."""

    def forward(self, x, angles):
        cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return x * cos + turned * sin


def table():
    f = torch.outer(torch.arange(32).float(), 1.0 / (100 ** (torch.arange(0, D, 2).float() / D)))
    return torch.stack([f.cos(), f.sin()], -1)


def turned(x, t, one=0, other=1):
    p = x.reshape(*x.shape[:-1], -1, 2)
    t = t.view(1, x.shape[1], 1, -1, 2)
    pair = p[..., 0] * t[..., one] - p[..., 1] * t[..., other], p[..., 1] * t[..., one] + p[..., 0] * t[..., other]
    return torch.stack(pair, -1).flatten(3)


@alike(lambda c: (c(), T(2, S, H, D), T(2, S, H, D)))
class NbSineFirst(nn.Module):
    """The table's second numbers are taken for cosines, of queries alone."""

    def __init__(self):
        super().__init__()
        self.table = table()

    def forward(self, q, k):
        t = self.table[: q.shape[1]].to(q.dtype)
        return turned(q, t, 1, 0), turned(k, t)


@alike(lambda c: (c(), T(2, S, H, D)))
class NbLearntTable(nn.Module):
    """The table learns."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(table()[:S])

    def forward(self, x):
        return turned(x, self.table)


@alike(lambda c: (c(), T(2, S, H, D)), lambda: (T(2, S, H, D) * 30,))
class NbApart(nn.Module):
    """The pairs of the table are halves of what is turned, and neighbours in the result."""

    def __init__(self):
        super().__init__()
        self.table = table()

    def forward(self, x):
        t = self.table[: x.shape[1]].view(1, x.shape[1], 1, -1, 2).to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.stack((a * t[..., 0] - b * t[..., 1], b * t[..., 0] + a * t[..., 1]), -1).flatten(3)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)


@alike(lambda c: (c(), T(2, S, W)))
class NbAliased(Scores):
    """Another local has the scores that are written over."""

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        kept = s
        s.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
        return torch.softmax(s, dim=-1).matmul(v), kept


@alike(lambda c: (c(), T(2, S, W)))
class NbViewed(Scores):
    """A view of the scores is there before they are written over."""

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        turned = s.transpose(2, 3)
        s.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
        return torch.softmax(s, dim=-1).matmul(v), turned.clamp(min=-5)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class NbBySelf(Scores):
    """What is hidden follows from the scores, after some were hidden."""

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        s.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
        s.masked_fill_(s > s.mean(-1, keepdim=True), -1e9)
        return torch.softmax(s, dim=-1).matmul(v)


@alike(lambda c: (c(), T(2, H, S, S), T(2, H, S, D)))
class NbGivenScores(nn.Module):
    """Scores that are given are written over, which who gave them sees."""

    def forward(self, s, v):
        other = s.mul(1.0) if s.requires_grad else s
        other.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)
        return torch.softmax(other, dim=-1).matmul(v), s.clamp(min=-3)


@alike(lambda c: (c(), T(2, S, W)))
class NbAfter(Scores):
    """The shares are written over, and not the scores."""

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        p = torch.softmax(s, dim=-1) + 0.1
        p.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), 0.0)
        return p.matmul(v)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 3,))
class NbBetween(Scores):
    """Scores are read once more between two writes."""

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        s = torch.matmul(q, k.transpose(2, 3))
        s *= D**-0.5
        top = s.amax(-1, keepdim=True)
        s += torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return torch.softmax(s, dim=-1).matmul(v) * top


# ---- what binds a local, or asks that it is there
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(W, 3 * W), 0.3

    def split(self, x):
        return (heads(t) for t in self.qkv(x).chunk(3, -1))

    def scored(self, q, k, v, mask=None):
        s = (q @ k.mT) * self.scale
        if mask is not None:
            s = s + mask
        w = s.softmax(-1)
        return (w @ v).transpose(1, 2).flatten(2), w


@alike(lambda c: (c(), T(2, S, W)))
class NbImported(Attends):
    """An import puts something in a local that was None."""

    def forward(self, x, mask=None):
        fast = None
        try:
            import math as fast
        except ImportError:
            pass
        q, k, v = self.split(x)
        s = (q @ k.mT) * self.scale
        if fast is not None:
            s = s * fast.sqrt(2.0)
        if mask is not None:
            s = s + mask
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


@alike(lambda c: (c(), T(2, S, W)))
class NbDeleted(Attends):
    """What is not read of a call's results is deleted."""

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        out, w = self.scored(q, k, v, mask)
        del w
        return out


@alike(lambda c: (c(), T(2, S, W)))
class NbAdded(Attends):
    """What is not read of a call's results is added to."""

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        out, w = self.scored(q, k, v, mask)
        w = w.detach()
        w += 1
        return out


def strict(module, q, k, v, mask=None):
    if mask is None:
        raise ValueError("a mask is needed")
    w = ((q @ k.mT) * module.scale + mask).softmax(-1)
    return (w @ v).transpose(1, 2).flatten(2), w


@alike(lambda c: (c(), T(2, S, W)))
class NbStrict(Attends):
    """A function raises for the call that is made of it, which the caller knows of."""

    def forward(self, x):
        q, k, v = self.split(x)
        try:
            out, w = strict(self, q, k, v)
        except ValueError:
            out, w = strict(self, q, k, v, torch.zeros(()))
        return out


# ---- tables of one place, and results in the order of what is turned
def rotated(q, k, cos, sin):
    half = q.shape[-1] // 2
    a, b = (torch.cat((-t[..., half:], t[..., :half]), -1) for t in (q, k))
    return q * cos + a * sin, k * cos + b * sin


@alike(lambda c: (c(), T(2, S, W)))
class NbOnePlace(Attends):
    """A table of one place is broadcast over tokens."""

    def forward(self, x):
        q, k, v = self.split(x)
        angles = torch.linspace(0, 1, D, device=x.device)[None, None]
        q, k = rotated(q, k, angles.cos(), angles.sin())
        return q @ k.mT


def paired(x, table):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    t = table.view(1, pairs.size(1), 1, pairs.size(3), 2)
    one = pairs[..., 0] * t[..., 0] - pairs[..., 1] * t[..., 1]
    two = pairs[..., 1] * t[..., 0] + pairs[..., 0] * t[..., 1]
    return torch.stack([one, two], -1).flatten(3).type_as(x)


@alike(lambda c: (c(), T(2, S, W)))
class NbView(Attends):
    """Pairs that are turned are contiguous, so that a view joins their heads."""

    def forward(self, x):
        q = self.qkv(x).chunk(3, -1)[0].unflatten(-1, (H, D))
        angles = torch.linspace(0, 1, S * D // 2, device=x.device).view(S, D // 2)
        with torch.no_grad():
            table = torch.stack([angles.cos(), angles.sin()], -1)
        return paired(q, table[: x.shape[1]]).view(x.shape[0], x.shape[1], -1)
'''
