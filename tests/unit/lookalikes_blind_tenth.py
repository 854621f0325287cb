# ruff: noqa: E501
"""Look-alikes of the tenth set: what is hidden means otherwise, or the steps are in an order that matters."""

from __future__ import annotations

TENTH = r'''
W, H, D, S = 64, 4, 16, 9
PAD = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
NONE = torch.tensor([[1] * 9, [0] * 9])


class Heads(nn.Module):
    """Queries, keys and values of one matrix."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("slopes", torch.tensor([2.0 ** -(i + 1) for i in range(H)]).view(H, 1, 1))

    def split(self, x):
        return (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))

    def join(self, p, v):
        return self.out((p @ v).transpose(1, 2).flatten(2))


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W), NONE))
class NotAfter(Heads):
    """The padding is hidden after the softmax: what is left has no sum of one."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
        p = s.softmax(-1).masked_fill(mask[:, None, None, :] == 0, 0.0)
        return self.join(p, v)


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W), NONE))
class NotOne(Heads):
    """What is hidden is -1, which weighs much."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1.0)
        s = s.masked_fill(mask[:, None, None, :] == 0, -1.0)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W)))
class NotScaledBias(Heads):
    """The slopes are added before the scale, the triangle after it."""

    def forward(self, x):
        q, k, v = self.split(x)
        n = x.shape[1]
        far = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        s = (q @ k.mT + self.slopes * far) * D**-0.5
        s = s.masked_fill(far > 0, torch.finfo(s.dtype).min)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W), 1 - PAD))
class NotInverted(Heads):
    """The padding mask hides what it names."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
        s = s.masked_fill(mask[:, None, None, :] != 0, -1e9)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W) * 60, PAD), lambda: (T(2, S, W), NONE))
class NotAlways(Heads):
    """The padding is hidden only where a score is large."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
        if s.amax() > 50:
            s = s.masked_fill(mask[:, None, None, :] == 0, -1e9)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 30,))
class NotFillAdd(Heads):
    """A fill of -100 comes first, and the slopes of what is hidden bring it back."""

    def forward(self, x):
        q, k, v = self.split(x)
        n = x.shape[1]
        far = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(far > 0, -100.0) + 40.0 * self.slopes * far.abs()
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W) * 8, PAD))
class NotLarge(Heads):
    """Scores that are large are hidden as well: what is hidden follows from them."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(s > 3.0, float("-inf"))
        s = s.masked_fill(mask[:, None, None, :] == 0, -1e9)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, S, W), PAD), lambda: (T(2, S, W), NONE))
class NotQueries(Heads):
    """The padding hides rows of queries, and no keys."""

    def forward(self, x, mask):
        q, k, v = self.split(x)
        s = q @ k.mT * D**-0.5
        s = torch.where(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), s, -1e9)
        s = torch.where(mask[:, None, :, None] == 0, -1e9, s)
        return self.join(s.softmax(-1), v)


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), PAD), lambda: (*(T(2, H, S, D) for _ in range(3)), NONE))
class NotTwice(nn.Module):
    """Two softmaxes: the second is of what the first leaves with padding."""

    def forward(self, q, k, v, mask):
        s = (q @ k.mT * D**-0.5).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e9)
        s = s.softmax(-1).masked_fill(mask[:, None, None, :] == 0, -1e9)
        return s.softmax(-1) @ v


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), PAD), lambda: (*(T(2, H, S, D) for _ in range(3)), NONE))
class NotProduct(nn.Module):
    """The mask multiplies scores: what is hidden has a score of nought."""

    def forward(self, q, k, v, mask):
        s = q @ k.mT * D**-0.5
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf"))
        s = s * mask[:, None, None, :].to(s.dtype)
        return s.nan_to_num(nan=-1e9).softmax(-1) @ v


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), PAD), lambda: (*(T(2, H, S, D) for _ in range(3)), NONE))
class NotUnhidden(nn.Module):
    """What is hidden first is seen again: the second step writes over the first."""

    def forward(self, q, k, v, mask):
        n = q.shape[2]
        s = q @ k.mT * D**-0.5
        t = s.masked_fill(mask[:, None, None, :] == 0, -1e9)
        s = torch.where(torch.eye(n, dtype=torch.bool), s, t)
        return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e9).softmax(-1) @ v


@alike(lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), PAD), lambda: (*(T(2, H, S, D) for _ in range(3)), NONE))
class NotZeroRows(nn.Module):
    """A row that sees nothing gives nought: the infinities' NaN is written over."""

    def forward(self, q, k, v, mask):
        n = q.shape[2]
        s = q @ k.mT * D**-0.5 + 0.1 * torch.arange(n).to(q.dtype)
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        s = s.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return torch.nan_to_num(s.softmax(-1), 0.0) @ v
'''
