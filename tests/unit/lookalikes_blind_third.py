# ruff: noqa: E501
"""A sixth set of look-alikes, written before any of them was tried: right modules with one fault."""

from __future__ import annotations

THIRD = r'''
W, H, D, S, E, K, I = 64, 4, 16, 7, 4, 2, 32


def table(n, d, base=10000.0):
    f = torch.outer(torch.arange(n).float(), 1.0 / (base ** (torch.arange(0, d, 2).float() / d)))
    return torch.cat((f, f), -1)


grouped = lambda c: (c(), T(2, H, S, D), T(2, 2, S, D), T(2, 2, S, D))
whole = lambda c: (c(), T(2, S, W))


# ---- key heads
@alike(grouped)
class Tiled(nn.Module):
    """Key heads follow each other; the op's are repeated."""

    def forward(self, q, k, v):
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat(1, r, 1, 1), v.repeat(1, r, 1, 1)
        return (q @ k.mT / 4).softmax(-1) @ v


@alike(grouped)
class TiledValues(nn.Module):
    def forward(self, q, k, v):
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat(1, r, 1, 1)
        return (q @ k.mT / 4).softmax(-1) @ v


@alike(grouped)
class ExpandFirst(nn.Module):
    def forward(self, q, k, v):
        b, g, s, d = k.shape
        r = q.shape[1] // g
        k = k[:, None].expand(b, r, g, s, d).reshape(b, r * g, s, d)
        v = v[:, :, None].expand(b, g, r, s, d).reshape(b, r * g, s, d)
        return (q @ k.mT / 4).softmax(-1) @ v


@alike(grouped)
class GroupsLast(nn.Module):
    """Queries' heads are split the other way."""

    def forward(self, q, k, v):
        b, h, s, d = q.shape
        q = q.view(b, -1, k.shape[1], s, d)
        p = torch.einsum("brgsd,bgtd->brgst", q, k).div(4).softmax(-1)
        return torch.einsum("brgst,bgtd->brgsd", p, v).reshape(b, h, s, d)


# ---- packed weights
class Qkv(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)), persistent=False)


@alike(whole)
class HeadsAside(Qkv):
    """Heads of queries and keys are the fast axis, of values the slow one."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.qkv(x).split(n, -1)
        q, k = (t.view(b, s, D, H).permute(0, 3, 1, 2) for t in (q, k))
        v = v.view(b, s, H, D).transpose(1, 2)
        p = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(b, s, n))


@alike(whole)
class NoTranspose(Qkv):
    """The heads are laid in a row without the transposition."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        p = (q @ k.mT / math.sqrt(D)).masked_fill(self.tril[:s, :s] == 0, float("-inf")).softmax(-1)
        return self.out((p @ v).reshape(b, s, n))


@alike(whole)
class OfTheWidth(Qkv):
    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        p = (q @ k.mT / math.sqrt(n)).masked_fill(self.tril[:s, :s] == 0, float("-inf")).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(b, s, n))


@alike(lambda c: (c(), T(2, 9, W)), lambda: (T(1, 20, W),))
class ShortBuffer(Qkv):
    """Past the sixteenth row all is seen."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        w = q @ k.mT / math.sqrt(D)
        m = F.pad(self.tril[:16, :16], (0, max(s - 16, 0), 0, max(s - 16, 0)), value=1.0)[:s, :s]
        return self.out((w.masked_fill(m == 0, float("-inf")).softmax(-1) @ v).transpose(1, 2).reshape(b, s, n))


@alike(whole)
class AllHeads(Qkv):
    """The softmax goes over the heads of a score."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        return self.out(((q @ k.mT / 4).softmax(1) @ v).transpose(1, 2).reshape(b, s, n))


@alike(whole)
class BatchMixed(Qkv):
    """(S, B*H): rows of different samples meet."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.reshape(s, b * H, D).transpose(0, 1) for t in self.qkv(x).split(n, -1))
        p = torch.bmm(q, k.transpose(1, 2)).div(4).softmax(-1)
        return self.out(torch.bmm(p, v).transpose(0, 1).reshape(b, s, n))


@alike(lambda c: (c(), T(2, 8, W)), lambda: (T(2, 8, W) * 30,))
class LowFloor(Qkv):
    """What is hidden has -100, which large scores are below."""

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        w = torch.where(self.tril[:s, :s] == 0, torch.tensor(-100.0), q @ k.mT / 4)
        return self.out((w.softmax(-1) @ v).transpose(1, 2).reshape(b, s, n))


@alike(lambda c: (c(), T(2, S, W), torch.tensor([[1.0] * S, [1.0] * 5 + [0.0] * 2])), lambda: (T(2, S, W) * 60, torch.tensor([[1.0] * S, [1.0] * 5 + [0.0] * 2])))
class TenThousand(Qkv):
    def forward(self, x, mask):
        b, s, n = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).split(n, -1))
        w = q @ k.mT / 4 + (1.0 - mask[:, None, None, :]) * -1e2
        return self.out((w.softmax(-1) @ v).transpose(1, 2).reshape(b, s, n))


@alike(lambda c: (c(), T(1, H * 3 * D, S)))
class QkvScaled(nn.Module):
    """Only the queries are scaled by the fourth root."""

    def forward(self, qkv):
        b, w, n = qkv.shape
        q, k, v = qkv.reshape(b * H, 3 * D, n).split(D, dim=1)
        p = torch.einsum("bct,bcs->bts", q * D**-0.25, k).softmax(-1)
        return torch.einsum("bts,bcs->bct", p, v).reshape(b, -1, n)


@alike(lambda c: (c(32), T(2, 32, 4, 4)))
class BlockOther(nn.Module):
    """The shares are not transposed: columns weigh the values."""

    def __init__(self, ch):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(ch, ch, 1) for _ in range(3))

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.q(x).flatten(2).transpose(1, 2), self.k(x).flatten(2), self.v(x).flatten(2)
        p = (torch.bmm(q, k) * c**-0.5).softmax(2)
        return x + torch.bmm(v, p).view(b, c, h, w)


@alike(lambda c: (c(), T(S, 2, W), torch.tensor([[False] * S, [False] * 5 + [True] * 2])))
class WrongOrder(nn.Module):
    """The padding of (B, H) is laid over (H, B)."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(W, W, bias=False) for _ in range(3))

    def forward(self, x, pad):
        t, b, n = x.shape
        q, k, v = (m(x).view(t, b * H, D).transpose(0, 1) for m in (self.q, self.k, self.v))
        w = torch.bmm(q, k.mT).div(4).masked_fill(pad.repeat(H, 1)[:, None], float("-inf"))
        return torch.bmm(w.softmax(-1), v).transpose(0, 1).reshape(t, b, n)


# ---- part rotary
turned = lambda c: (c(), T(2, H, S, D), table(S, 8).cos(), table(S, 8).sin())


@alike(turned)
class LastDims(nn.Module):
    """What is turned goes behind what passes."""

    def forward(self, x, c, s):
        r, p = x[..., :8], x[..., 8:]
        a, b = r.chunk(2, -1)
        return torch.cat((p, r * c + torch.cat((-b, a), -1) * s), -1)


@alike(turned)
class RestScaled(nn.Module):
    def forward(self, x, c, s):
        r, p = x[..., :8], x[..., 8:]
        a, b = r.chunk(2, -1)
        return torch.cat((r * c + torch.cat((-b, a), -1) * s, p * 1.01), -1)


@alike(turned)
class HalvesOfAll(nn.Module):
    """Partners lie half a head away, and only eight are turned."""

    def forward(self, x, c, s):
        a, b = x.chunk(2, -1)
        y = torch.cat((-b, a), -1)
        return torch.cat((x[..., :8] * c + y[..., :8] * s, x[..., 8:]), -1)


@alike(lambda c: (c(), T(2, H, S, D), table(S, D)), lambda: (T(2, H, S, D), torch.rand(S, D) * 6))
class FreqsMixed(nn.Module):
    """The angles' halves differ, and one of them is used for both."""

    def forward(self, x, f):
        a, b = x.chunk(2, -1)
        c, s = f.cos(), f.sin()
        return torch.cat((a * c[..., : D // 2] - b * s[..., D // 2 :], a * s[..., : D // 2] + b * c[..., : D // 2]), -1)
'''
