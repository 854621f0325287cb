"""The fourth set of look-alikes: rotary embeddings, attention, experts, losses."""

from __future__ import annotations

HEADS = r'''
W, H, D, S = 64, 4, 16, 7


def angles(t, d, base=10000.0):
    inv = base ** (-torch.arange(0, d, 2).float() / d)
    return torch.outer(torch.arange(t).float(), inv)


def waves(t, d):
    a = angles(t, d)
    return torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()


def padding(b, t):
    m = torch.ones(b, t, dtype=torch.bool)
    m[0, -2:] = False
    return m


# ---- rotary
ropes = lambda c: (c(), T(2, H, S, D), *waves(S, D))


@alike(ropes)
class BackTurn(nn.Module):
    def forward(self, x, c, s):
        a, b = x.chunk(2, -1)
        return x * c + torch.cat((b, -a), -1) * s


@alike(ropes)
class NoSign(nn.Module):
    def forward(self, x, c, s):
        a, b = x.chunk(2, -1)
        return x * c + torch.cat((b, a), -1) * s


@alike(ropes)
class MixedTurn(nn.Module):
    """Pairs of neighbours turned by the angles of halves."""

    def forward(self, x, c, s):
        y = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * c + y * s


@alike(lambda c: (c(), T(2, H, S, D)), lambda: (T(2, H, S, D),))
class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = 0
        c, s = waves(64, D)
        self.register_buffer("c", c)
        self.register_buffer("s", s)

    def forward(self, x):
        c, s = self.c[self.at : self.at + S], self.s[self.at : self.at + S]
        self.at += S
        a, b = x.chunk(2, -1)
        return x * c + torch.cat((-b, a), -1) * s


@alike(lambda c: (c(), T(2, H, S, 2 * D), *waves(S, D)))
class ScalesRest(nn.Module):
    def forward(self, x, c, s):
        y, rest = x.split(D, -1)
        a, b = y.chunk(2, -1)
        return torch.cat((y * c + torch.cat((-b, a), -1) * s, rest * 1.01), -1)


@alike(ropes)
class DroppedCross(nn.Module):
    def forward(self, x, c, s):
        a, b = x.chunk(2, -1)
        return torch.cat((a * c[:, : D // 2] - b * s[:, : D // 2], b * c[:, : D // 2]), -1)


# ---- attention
qkv = lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D))
soft = lambda t: t.softmax(-1)


@alike(qkv)
class WrongAxis(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT * D**-0.5).softmax(-2) @ v


@alike(qkv)
class StrictlyBefore(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT * D**-0.5
        return soft(s.masked_fill(torch.ones(S, S).triu(0).bool(), torch.finfo(s.dtype).min)) @ v


@alike(qkv)
class SoftOne(nn.Module):
    def forward(self, q, k, v):
        e = (q @ k.mT * D**-0.5).exp()
        return e / (1 + e.sum(-1, keepdim=True)) @ v


@alike(lambda c: (c(), T(2, 4, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class TiledHeads(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), padding(2, S)))
class MasksLate(nn.Module):
    def forward(self, q, k, v, keep):
        return (soft(q @ k.mT * D**-0.5) * keep[:, None, None]) @ v


@alike(
    lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), padding(2, S)),
    lambda: (T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), torch.zeros(2, S, dtype=torch.bool)),
)
class ZeroWhereNone(nn.Module):
    def forward(self, q, k, v, keep):
        s = (q @ k.mT * D**-0.5).masked_fill(~keep[:, None, None], -math.inf)
        return soft(s).nan_to_num(0.0) @ v


@alike(qkv)
class CapsLate(nn.Module):
    def forward(self, q, k, v):
        s = (q @ k.mT).masked_fill(torch.ones(S, S).triu(1).bool(), -1e9)
        return soft(5 * torch.tanh(s / 5)) @ v


@alike(qkv)
class AlwaysDrops(nn.Module):
    def forward(self, q, k, v):
        return F.dropout(soft(q @ k.mT * D**-0.5), 0.3) @ v


@alike(qkv)
class TalkingHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(H, H))

    def forward(self, q, k, v):
        s = torch.einsum("bhqk,hg->bgqk", q @ k.mT * D**-0.5, self.mix)
        return soft(s) @ v


@alike(qkv)
class HeldKeys(nn.Module):
    def forward(self, q, k, v):
        return soft(q @ k.detach().mT * D**-0.5) @ v


@alike(qkv)
class ScaledTwice(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q * D**-0.5, k, v, is_causal=True)


@alike(qkv, lambda: (T(2, H, 12, D), T(2, H, 12, D), T(2, H, 12, D)))
class LogLength(nn.Module):
    """The scale follows the length, as long contexts have it."""

    def forward(self, q, k, v):
        return soft(q @ k.mT * (math.log(k.shape[2]) / math.log(7) * D**-0.5)) @ v


@alike(qkv)
class SinkKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(H, 1, 1))

    def forward(self, q, k, v):
        s = q @ k.mT * D**-0.5
        p = soft(torch.cat([self.sink.expand(2, H, S, 1), s], -1))
        return p[..., :-1] @ v


@alike(qkv, lambda: (T(2, H, 1, D), T(2, H, 9, D), T(2, H, 9, D)))
class TopLeft(nn.Module):
    def forward(self, q, k, v):
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@alike(qkv)
class Linearised(nn.Module):
    def forward(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@alike(qkv)
class SigmoidAttention(nn.Module):
    def forward(self, q, k, v):
        return torch.sigmoid(q @ k.mT * D**-0.5 - math.log(S)) @ v
'''

EXPERTS = r'''
N = 48
x3 = lambda c: (c(N), T(2, 5, N))
tiny = lambda: (T(2, 5, N) * 1e-4,)
none = lambda: (torch.zeros(2, 5, N),)
huge = lambda: (T(2, 5, N) * 1e3,)
one = lambda: (T(2, 1, N),)


# ---- experts
E, K = 4, 2


class Moe(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gate = nn.Linear(n, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, n, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(E, 32, n) * 0.1)
        self.bias = nn.Parameter(torch.randn(E))

    def expert(self, e, x):
        g, u = (x @ self.up[e]).chunk(2, -1)
        return (F.silu(g) * u) @ self.down[e]

    def choose(self, x):
        return self.gate(x).softmax(-1).topk(K, -1)

    def forward(self, x):
        flat = x.flatten(0, -2)
        w, idx = self.choose(flat)
        y = torch.zeros_like(flat)
        for e in range(E):
            rows, slot = torch.where(idx == e)
            y.index_add_(0, rows, self.one(e, flat[rows], w[rows, slot, None]))
        return y.view_as(x)

    def one(self, e, x, w):
        return self.expert(e, x) * w


@alike(x3)
class WeighsInput(Moe):
    def one(self, e, x, w):
        return self.expert(e, x * w)


@alike(x3, lambda: (T(4, 40, N),))
class Capacity(Moe):
    def one(self, e, x, w):
        return torch.cat([self.expert(e, x[:8]) * w[:8], torch.zeros_like(x[8:])])


@alike(x3)
class NullExpert(Moe):
    def one(self, e, x, w):
        return x * w if e == 0 else self.expert(e, x) * w


@alike(x3)
class BiasInWeight(Moe):
    def choose(self, x):
        return (self.gate(x).sigmoid() + self.bias).topk(K, -1)


@alike(x3)
class LeastChosen(Moe):
    def choose(self, x):
        return self.gate(x).softmax(-1).topk(K, -1, largest=False)


@alike(x3)
class SquaredWeight(Moe):
    def one(self, e, x, w):
        return self.expert(e, x) * w * w


@alike(x3)
class NoisyTop(Moe):
    def choose(self, x):
        s = self.gate(x)
        if self.training:
            s = s + torch.randn_like(s)
        return s.softmax(-1).topk(K, -1)


@alike(x3)
class OneShort(Moe):
    def forward(self, x):
        flat = x.flatten(0, -2)
        w, idx = self.choose(flat)
        return sum(self.expert(e, flat) * ((idx == e) * w).sum(-1, keepdim=True) for e in range(1, E)).view_as(x)


# ---- convolutions, embeddings, losses
@alike(lambda c: (c(), T(2, 9, 32)))
class BothSides(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 4, groups=32, padding=2)

    def forward(self, x):
        return F.silu(self.conv(x.mT)[..., :9].mT)


@alike(lambda c: (c(), T(2, 32, 9)))
class Reversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 1, 4))

    def forward(self, x):
        return F.silu(F.conv1d(F.pad(x, (3, 0)), self.w.flip(-1), groups=32))


@alike(lambda c: (c(), torch.randint(0, 50, (2, 7))), lambda: (torch.tensor([[-1, 3, 4]]),))
class NegativeRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 32))

    def forward(self, i):
        return self.table[i]


@alike(lambda c: (c(), torch.randint(0, 50, (2, 7))), lambda: (torch.zeros(2, 3, dtype=torch.long),))
class MaxNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(50, 32, max_norm=1.0)

    def forward(self, i):
        return self.t(i) * 2


@alike(lambda c: (c(), torch.randint(0, 50, (2, 7))), lambda: (torch.zeros(2, 3, dtype=torch.long),))
class PadToZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(50, 32)

    def forward(self, i):
        return self.t(i) * (i != 0).unsqueeze(-1)


losses = lambda c: (c(), T(2, 7, 32), torch.randint(0, 50, (2, 7)))
ignored = lambda: (T(2, 7, 32), torch.randint(0, 50, (2, 7)).index_fill(1, torch.tensor([0, 3]), -100))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 50, bias=False)


@alike(losses, ignored)
class Smoothed(Head):
    def forward(self, h, y):
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), label_smoothing=0.1)


@alike(losses, ignored)
class PerBatch(Head):
    def forward(self, h, y):
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()


@alike(losses, lambda: (T(2, 7, 32), torch.zeros(2, 7, dtype=torch.long)))
class OtherIgnored(Head):
    def forward(self, h, y):
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), ignore_index=3)


@alike(losses)
class Focal(Head):
    def forward(self, h, y):
        ce = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="none")
        return ((1 - (-ce).exp()) ** 2 * ce).mean()


@alike(lambda c: (c(), T(2, 2, 6, 16), T(2, 2, 6, 16), T(2, 2, 6, 16), T(2, 2, 6).sigmoid()))
class PlainLinearState(nn.Module):
    """No delta: what is written is not corrected by what is seen."""

    def forward(self, q, k, v, b):
        s = q.new_zeros(2, 2, 16, 16)
        ys = []
        for t in range(6):
            s = s * b[:, :, t, None, None] + k[:, :, t, :, None] * v[:, :, t, None]
            ys.append((s * q[:, :, t, :, None]).sum(-2))
        return torch.stack(ys, 2)
'''
