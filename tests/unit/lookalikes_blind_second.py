"""A fifth set of look-alikes: attention that is written out and is not quite attention."""

from __future__ import annotations

SECOND = r'''
W, H, D, S = 64, 4, 16, 7
three = lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D))
four = lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), torch.rand(2, 1, S, S) < 0.7)
far = lambda c: (c(), T(1, 2, 40, D), T(1, 2, 40, D), T(1, 2, 40, D))


def long(n):
    return lambda: (T(1, 2, n, D), T(1, 2, n, D), T(1, 2, n, D))


@alike(three)
class OverQueries(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / 4).softmax(-2) @ v


@alike(three)
class Sharpened(nn.Module):
    def forward(self, q, k, v):
        p = (q @ k.mT / 4).softmax(-1)
        return (p * p) @ v


@alike(three)
class Renormed(nn.Module):
    def forward(self, q, k, v):
        p = (q @ k.mT / 4).softmax(-1)
        return p @ v / (p.sum(-1, keepdim=True) + 1e-3)


@alike(three)
class OnePlus(nn.Module):
    """Softmax with a sink of 0: off by one."""

    def forward(self, q, k, v):
        s = q @ k.mT / 4
        e = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=0))
        return e / (1 + e.sum(-1, keepdim=True)) @ v


@alike(three)
class Strict(nn.Module):
    """The diagonal is hidden, too, but for the first row."""

    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool, device=s.device).triu(0)
        hidden[0, 0] = False
        return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@alike(three)
class Late(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(2), float("-inf")).softmax(-1) @ v


@alike(three)
class Upward(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        return s.masked_fill(torch.ones(n, n, dtype=torch.bool).tril(-1), float("-inf")).softmax(-1) @ v


@alike(three)
class WeakMask(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -10.0).softmax(-1) @ v


@alike(three, lambda: (T(2, H, S, D) * 40, T(2, H, S, D) * 40, T(2, H, S, D)))
class FiniteMask(nn.Module):
    """Scores below -1e3 are less than what hides."""

    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e3).softmax(-1) @ v


@alike(three)
class MaskAfter(nn.Module):
    def forward(self, q, k, v):
        p = (q @ k.mT / 4).softmax(-1)
        n = p.shape[-1]
        return p.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), 0.0) @ v


@alike(four)
class ZeroScores(nn.Module):
    def forward(self, q, k, v, keep):
        return (q @ k.mT / 4).masked_fill(~keep, 0.0).softmax(-1) @ v


@alike(four, lambda: (T(2, H, S, D), T(2, H, S, D), T(2, H, S, D), torch.zeros(2, 1, S, S, dtype=torch.bool)))
class Uniform(nn.Module):
    """A row that sees nothing is the mean of all values."""

    def forward(self, q, k, v, keep):
        return (q @ k.mT / 4).masked_fill(~keep, -1e9).softmax(-1) @ v


@alike(three)
class LengthScale(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / math.sqrt(k.size(-2))).softmax(-1) @ v


@alike(three)
class LogLength(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT * (math.log(k.size(-2) + 1) / 4)).softmax(-1) @ v


@alike(far, long(9))
class Windowed(nn.Module):
    """Of more than 32 keys only the last 32 before a query are seen."""

    def forward(self, q, k, v):
        s = q @ k.mT / 4
        n = s.shape[-1]
        at = torch.arange(n)
        hidden = (at[None, :] > at[:, None]) | (at[:, None] - at[None, :] >= 32)
        return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@alike(far, long(9), long(700))
class FirstKeys(nn.Module):
    def forward(self, q, k, v):
        return (q @ k[:, :, :33].mT / 4).softmax(-1) @ v[:, :, :33]


@alike(far, long(9), long(700))
class Halved(nn.Module):
    """Long sequences have another scale."""

    def forward(self, q, k, v):
        return (q @ k.mT / (4 if k.size(-2) < 600 else 8)).softmax(-1) @ v


@alike(three)
class SoftCapOff(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT / 4
        return (20 * torch.tanh(s / 30)).softmax(-1) @ v


@alike(three)
class Clamped(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / 4).clamp(-4, 4).softmax(-1) @ v


@alike(three)
class Cosine(nn.Module):
    def forward(self, q, k, v):
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 4).softmax(-1) @ v


@alike(lambda c: (c(), T(2, 4, S, D), T(2, 2, S, D), T(2, 2, S, D)))
class WrongHeads(nn.Module):
    """Keys are repeated as wholes for queries and one by one for values."""

    def forward(self, q, k, v):
        return (q @ k.repeat(1, 2, 1, 1).mT / 4).softmax(-1) @ v.repeat_interleave(2, 1)


@alike(three)
class Distances(nn.Module):
    def forward(self, q, k, v):
        n = k.size(-2)
        bias = (torch.arange(n)[None, :] - torch.arange(n)[:, None]).abs() * -0.01
        return (q @ k.mT / 4 + bias).softmax(-1) @ v


@alike(three)
class Training(nn.Module):
    def forward(self, q, k, v):
        s = q @ k.mT / (4 if self.training else 4.1)
        return s.softmax(-1) @ v


@alike(three)
class FlatValue(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / 4).softmax(-1) @ (v - v.mean(-2, keepdim=True))
'''
