# ruff: noqa: E501
"""The seventh set of look-alikes: rotary embeddings, attention, experts, convolutions and losses."""

from __future__ import annotations

FOURTH_HEADS = r"""
W, H, D, S, E, K, I = 64, 4, 16, 7, 6, 2, 24


def angles(n=32, d=D, base=10000.0):
    return torch.outer(torch.arange(n).float(), base ** (-torch.arange(0, d, 2).float() / d))


def heads(c):
    return c(), T(2, S, H, D)


def three(c):
    return c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", angles())

    def parts(self, x):
        a = self.a[: x.shape[1], None]
        return (*x.chunk(2, -1), a.cos(), a.sin())


@alike(heads)
class Backwards(Turn):
    def forward(self, x):
        u, v, c, s = self.parts(x)
        return torch.cat((u * c + v * s, u * s - v * c), -1)


@alike(heads)
class BothPlus(Turn):
    def forward(self, x):
        u, v, c, s = self.parts(x)
        return torch.cat((u * c + v * s, v * c + u * s), -1)


@alike(heads)
class FirstTwice(Turn):
    "The second half is made from the first one's result."

    def forward(self, x):
        u, v, c, s = self.parts(x)
        u = u * c - v * s
        return torch.cat((u, v * c + u * s), -1)


@alike(heads)
class OffByOne(Turn):
    "Interleaved in, halves out, and one table shifted by a place."

    def forward(self, x):
        a = self.a[1 : x.shape[1] + 1, None]
        u, v = x[..., ::2], x[..., 1::2]
        c, s = a.cos(), self.a[: x.shape[1], None].sin()
        return torch.cat((u * c - v * s, v * c + u * s), -1)


@alike(heads)
class InPlaceLeak(Turn):
    "The first half is written before the second reads it."

    def forward(self, x):
        _, _, c, s = self.parts(x)
        y = x.clone()
        y[..., : D // 2] = y[..., : D // 2] * c - y[..., D // 2 :] * s
        y[..., D // 2 :] = y[..., D // 2 :] * c + y[..., : D // 2] * s
        return y


@alike(heads)
class PassScaled(Turn):
    "What does not turn is doubled."

    def forward(self, x):
        a = self.a[: x.shape[1], None, :4]
        u, v, rest = x[..., :4], x[..., 4:8], x[..., 8:]
        return torch.cat((u * a.cos() - v * a.sin(), v * a.cos() + u * a.sin(), rest * 2), -1)


@alike(three)
class NoScaleLeft(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / D, -1) @ v


@alike(three)
class OverQueries(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT * D ** -0.5, -2) @ v


@alike(three)
class MaskAfter(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT * D ** -0.5, -1).tril() @ v


@alike(three)
class WeakMask(nn.Module):
    "The mask takes ten away, which does not hide a key."

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT * D ** -0.5 - 10.0 * torch.ones(S, S).triu(1), -1) @ v


@alike(three)
class Strict(nn.Module):
    "A query does not see its own key; the first sees all."

    def forward(self, q, k, v):
        m = torch.ones(S, S, dtype=torch.bool).tril(-1)
        m[0] = True
        s = (q @ k.mT * D ** -0.5).masked_fill(~m, float("-inf"))
        return torch.softmax(s, -1) @ v * 1.001


@alike(three)
class SinkStays(nn.Module):
    "A sink's column is cut off before the softmax."

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H))

    def forward(self, q, k, v):
        s = q @ k.mT * D ** -0.5
        s = torch.cat([s, self.sinks.view(1, H, 1, 1).expand(2, H, S, 1)], -1)
        return torch.softmax(s[..., :-1], -1) @ v + self.sinks.view(1, H, 1, 1)


@alike(three)
class PlusOneBelow(nn.Module):
    "Softmax plus one, without the maximum's share."

    def forward(self, q, k, v):
        s = q @ k.mT * D ** -0.5
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return e / (1 + e.sum(-1, keepdim=True)) @ v


@alike(three)
class CapAfterScale(nn.Module):
    def forward(self, q, k, v):
        s = 20 * torch.tanh(q @ k.mT / 20) * D ** -0.5
        return torch.softmax(s, -1) @ v


@alike(lambda c: (c(), T(2, H, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class TiledHeads(nn.Module):
    "Keys are tiled, not repeated, and values are repeated."

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1))


@alike(three)
class SeenAhead(nn.Module):
    "A window around, and a causal mask that is one too far."

    def forward(self, q, k, v):
        m = torch.ones(S, S, dtype=torch.bool).tril(1).triu(-2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m) + 1e-3 * v


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(0.2 * torch.randn(E, W, 2 * I)), nn.Parameter(0.2 * torch.randn(E, I, W))

    def one(self, x, e):
        g, u = (x @ self.up[e]).chunk(2, -1)
        return (F.silu(g) * u) @ self.down[e]


@alike(lambda c: (c(), T(12, W), T(12, E)))
class LastWins(Experts):
    "A row's later expert overwrites the earlier one."

    def forward(self, x, logits):
        w, idx = logits.softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            r, s = torch.where(idx == e)
            y[r] = w[r, s, None] * self.one(x[r], e)
        return y


@alike(lambda c: (c(), T(12, W), T(12, E)))
class SkipsLast(Experts):
    def forward(self, x, logits):
        w, idx = logits.softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E - 1):
            r, s = torch.where(idx == e)
            y.index_add_(0, r, w[r, s, None] * self.one(x[r], e))
        return y


@alike(lambda c: (c(), T(12, W), T(12, E)))
class WeightsFirst(Experts):
    "The weight is applied to the rows before the expert."

    def forward(self, x, logits):
        w, idx = logits.softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            r, s = torch.where(idx == e)
            y.index_add_(0, r, self.one(x[r] * w[r, s, None], e))
        return y


@alike(lambda c: (c(), T(12, W), T(12, E)), lambda: (T(12, W), torch.cat((T(12, 1) + 9, T(12, E - 1)), 1)))
class Dropping(Experts):
    "An expert takes eight rows at most."

    def forward(self, x, logits):
        w, idx = logits.softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            r, s = torch.where(idx == e)
            r, s = r[:8], s[:8]
            y.index_add_(0, r, w[r, s, None] * self.one(x[r], e))
        return y


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.wg, self.b = nn.Parameter(torch.randn(E, W)), nn.Parameter(torch.linspace(-0.3, 0.3, E))


@alike(lambda c: (c(), T(10, W)))
class BiasStays(Gate):
    "The bias for the choice is in the weights too."

    def forward(self, x):
        g, i = torch.topk(torch.sigmoid(x @ self.wg.t()) + self.b, K)
        return g / g.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(10, W)))
class OverAll(Gate):
    "The sum is of all experts' sigmoids, not of the chosen ones'."

    def forward(self, x):
        s = torch.sigmoid(x @ self.wg.t())
        g, i = torch.topk(s, K)
        return g / s.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(10, W)))
class Lowest(Gate):
    def forward(self, x):
        g, i = torch.topk(torch.softmax(x @ self.wg.t(), -1), K, largest=False)
        return g / g.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(2, W, 9)))
class FlippedTaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(W, 3))

    def forward(self, x):
        return torch.einsum("bctk,ck->bct", F.pad(x, (1, 1)).unfold(-1, 3, 1), self.taps.flip(-1))


@alike(lambda c: (c(), T(2, W, 9)))
class CutsLeft(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(W, W, 4, groups=W, padding=3)

    def forward(self, x):
        return F.silu(self.conv(x)[..., 3:])


class Loss(nn.Module):
    pass


@alike(lambda c: (c(), T(8, 50), torch.randint(0, 50, (8,))), lambda: (T(8, 50), torch.tensor([1, -100, 3, -100, 5, 6, 7, 8])))
class SumOverAll(Loss):
    "Ignored rows count in the mean."

    def forward(self, logits, target):
        return F.cross_entropy(logits, target, reduction="sum") / target.numel()


@alike(lambda c: (c(), T(8, 50), torch.randint(0, 50, (8,))))
class SmoothOthers(Loss):
    "The smoothing's share goes to the other classes alone."

    def forward(self, logits, target):
        p = logits.log_softmax(-1)
        nll = -p.gather(1, target[:, None]).squeeze(1)
        return (0.9 * nll + 0.1 * (-p.sum(-1) - nll) / 49).mean()


@alike(lambda c: (c(), T(2, 6, 50), torch.randint(0, 50, (2, 6))))
class NotShifted(Loss):
    def forward(self, logits, labels):
        return F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


@alike(lambda c: (c(), torch.randint(0, 50, (2, 7))))
class PadRowZero(nn.Module):
    "A pad's row is zero, whatever the table says."

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, W))

    def forward(self, ids):
        return self.table[ids] * (ids != 3).unsqueeze(-1)


@alike(lambda c: (c(), torch.tensor([[0, 3, 49], [3, 3, 1]])))
class TableClamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, W))

    def forward(self, ids):
        return self.table[ids.clamp(max=39)] + self.table[ids % 7]
"""
