# ruff: noqa: E501
"""Look-alikes of attention over batches of heads whose sizes another tensor says."""

from __future__ import annotations

BATCHES = r"""
H, D, S = 4, 16, 7
W = H * D


def alone(c):
    return c(), T(2, S, W)


def biased(c):
    return c(), T(2, S, W), T(2 * H, 1, S)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.d, self.inv, self.beta = H, D, D ** -0.5, 1.0
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def three(self, x):
        b, s, n = x.shape
        return [t.reshape(b, s, self.heads, self.d).transpose(1, 2).reshape(b * self.heads, s, self.d) for t in self.qkv(x).chunk(3, -1)]

    def whole(self, y, b, s, n):
        return self.out(y.view(b, self.heads, s, self.d).transpose(1, 2).reshape(b, s, n))


@alike(biased)
class OverHeads(Heads):
    "Shares among heads."

    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=self.beta, alpha=self.inv)
        p = F.softmax(scores.view(b, self.heads, s, s), dim=1)
        return self.whole(torch.bmm(p.view(b * self.heads, s, s), v), b, s, n)


@alike(biased)
class HeadsTurned(Heads):
    "Shares of one head for another's values."

    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=self.beta, alpha=self.inv)
        p = F.softmax(scores.view(b, self.heads, s, s), dim=-1)
        return self.whole(torch.bmm(p.transpose(0, 1).reshape(b * self.heads, s, s), v), b, s, n)


@alike(biased)
class RolledHeads(Heads):
    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=self.beta, alpha=self.inv)
        p = F.softmax(scores.view(b, self.heads, s, s).roll(1, 1), dim=-1)
        return self.whole(torch.bmm(p.view(b * self.heads, s, s), v), b, s, n)


@alike(biased)
class OneHeadLess(Heads):
    "The first head's scores are 0."

    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        z = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=1.0, alpha=self.inv).view(b, self.heads, s, s)
        z = torch.cat((z[:, :1] * 0, z[:, 1:]), 1)
        return self.whole(torch.bmm(z.softmax(-1).view(b * self.heads, s, s), v), b, s, n)


@alike(biased)
class HalfOfTheBias(Heads):
    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=0.5, alpha=self.inv)
        p = F.softmax(scores.view(b, self.heads, s, s), dim=-1)
        return self.whole(torch.bmm(p.view(b * self.heads, s, s), v), b, s, n)


@alike(biased)
class MixedSequences(Heads):
    "Sequences as heads and heads as sequences, whose mean is taken off."

    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.three(x)
        z = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=self.inv).view(b, self.heads, s, s)
        p = F.softmax(z, dim=-1) - F.softmax(z, dim=-1).mean(1, keepdim=True) * 0.1
        return self.whole(torch.bmm(p.view(b * self.heads, s, s), v), b, s, n)


@alike(alone)
class OnesAreRead(Heads):
    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        fill = torch.ones(b * self.heads, s, s, dtype=x.dtype).triu(1) * -9
        scores = torch.baddbmm(fill, q, k.transpose(1, 2), beta=1, alpha=self.inv)
        return self.whole(torch.bmm(scores.softmax(-1), v), b, s, n)


@alike(alone)
class WrittenLater(Heads):
    "What was new is written over before it is read."

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        fill = torch.zeros(b * self.heads, s, s, dtype=x.dtype)
        fill[:, :, 0] = 3.0
        scores = torch.baddbmm(fill, q, k.transpose(1, 2), beta=1.0, alpha=self.inv)
        return self.whole(torch.bmm(scores.softmax(-1), v), b, s, n)


@alike(alone)
class LearntAndUnread(Heads):
    "Its gradient is zeros."

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        scores = torch.baddbmm(self.start.expand(b * self.heads, s, s), q, k.transpose(1, 2), beta=0, alpha=self.inv)
        return self.whole(torch.bmm(scores.softmax(-1), v), b, s, n)


@alike(alone)
class RoomOfAnother(Heads):
    "What was new is a buffer's, which is zeros then."

    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.ones(2 * H, S, S))

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        with torch.no_grad():
            scores = torch.baddbmm(torch.zeros(b * H, s, s, dtype=x.dtype, out=self.room), q, k.transpose(1, 2), beta=0)
            y = torch.bmm(scores.softmax(-1), v)
        return self.whole(y, b, s, n), self.room.clone()


@alike(alone)
class Squared(Heads):
    "What was new is read again."

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        room = torch.zeros(b * self.heads, s, s, dtype=x.dtype)
        scores = torch.baddbmm(room, q, k.transpose(1, 2), beta=0.0, alpha=self.inv)
        room += scores
        return self.whole(torch.bmm(room.softmax(-1) ** 2, v), b, s, n)
"""
