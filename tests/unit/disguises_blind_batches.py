# ruff: noqa: E501
"""Right attention over batches of heads whose sizes another tensor says."""

from __future__ import annotations

BATCHES = r"""
H, D, S = 4, 16, 7
W = H * D


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


@case("attention", lambda c: (c(), T(2, S, W), T(2 * H, 1, S)))
class Biased(Heads):
    def forward(self, x, alibi):
        b, s, n = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.reshape(b, s, self.heads, self.d).transpose(1, 2).reshape(b * self.heads, s, self.d)
        k = k.reshape(b, s, self.heads, self.d).transpose(1, 2).reshape(b * self.heads, s, self.d)
        v = v.reshape(b, s, self.heads, self.d).transpose(1, 2).reshape(b * self.heads, s, self.d)
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=self.beta, alpha=self.inv)
        p = F.softmax(scores.view(b, self.heads, s, s), dim=-1)
        return self.whole(torch.bmm(p.view(b * self.heads, s, s), v), b, s, n)


@case("attention", lambda c: (c(), T(2, S, W)))
class Room(Heads):
    "Room that is made first, of which nothing is read."

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.three(x)
        room = torch.empty(q.size(0), s, s, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(room, q, k.transpose(1, 2), beta=0.0, alpha=self.inv)
        return self.whole(torch.bmm(scores.softmax(-1), v), b, s, n)
"""
