"""Look-alikes of a head and its loss in one."""

from __future__ import annotations

JOINED = r"""
K, V = 48, 90


def deep(c):
    return c(), T(2, 6, K), torch.randint(0, V, (2, 6))


def padded(c):
    y = torch.randint(0, V, (2, 6))
    y[0, 2], y[1, 4:], y[1, 0] = -100, -100, 7
    return c(), T(2, 6, K), y


class Lm(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.pad, self.lm_head = 7, nn.Linear(K, V, bias=bias)


def loss(z, y, **more):
    return F.cross_entropy(z.view(-1, V), y.view(-1), **more)


@alike(padded)
class AlsoReturned(Lm):
    def forward(self, x, y):
        z = self.lm_head(x)
        return F.cross_entropy(z.view(-1, V), y.view(-1)), z


@alike(padded)
class Scaled(Lm):
    def forward(self, x, y):
        return F.cross_entropy((self.lm_head(x) * 0.5).view(-1, V), y.view(-1))


@alike(padded)
class ScaledByWidth(Lm):
    def forward(self, x, y):
        z = self.lm_head(x) * x.shape[-1] ** -0.5
        return F.cross_entropy(z.view(-1, V), y.view(-1))


@alike(padded)
class Capped(Lm):
    def forward(self, x, y):
        return F.cross_entropy(torch.tanh(self.lm_head(x) / 2).mul(2).view(-1, V), y.view(-1))


@alike(padded)
class Summed(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1), reduction="sum")


@alike(padded)
class EachRow(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1), reduction="none").mean()


@alike(padded)
class Smoothed(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1), label_smoothing=0.1)


@alike(padded)
class Weighted(Lm):
    def __init__(self):
        super().__init__()
        self.register_buffer("shares", torch.rand(V) + 0.5)

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1), weight=self.shares)


@alike(deep)
class LeavesOutAClass(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1), ignore_index=89)


@alike(padded)
class LeavesOutByPlace(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1).clamp_min(0), None, None, self.pad)


@alike(padded)
class Hooked(Lm):
    def __init__(self):
        super().__init__()
        self.lm_head.register_forward_hook(lambda m, a, out: out * 2)

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1))


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@alike(padded)
class OtherLinear(Lm):
    def __init__(self):
        super().__init__()
        self.lm_head = Odd(K, V, bias=False)

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1))


@alike(padded)
class OneForward(Lm):
    "Its child's forward is another, on the instance."

    def __init__(self):
        super().__init__()
        plain = self.lm_head.forward
        self.lm_head.forward = lambda x: plain(x) + 1 * torch.arange(V)

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1))


@alike(padded)
class ChangedBetween(Lm):
    def forward(self, x, y):
        z = self.lm_head(x)
        with torch.no_grad():
            x.mul_(0.5)
        return F.cross_entropy(z.view(-1, V), y.view(-1))


@alike(padded)
class TiedAndChanged(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.times = nn.Embedding(V, K), 0

    def forward(self, x, y):
        z = x @ self.wte.weight.detach().t()
        self.wte.weight.data.mul_(0.5)
        out = F.cross_entropy(z.view(-1, V), y.view(-1))
        self.wte.weight.data.mul_(2.0)
        return out


@alike(padded)
class MaskedLabels(Lm):
    def forward(self, x, y):
        y = torch.where(y == self.pad, -100, y)
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.view(-1))


@alike(padded)
class ShiftedByTwo(Lm):
    def forward(self, x, y):
        z = self.lm_head(x)[:, :-2]
        return F.cross_entropy(z.flatten(0, 1), y[:, 2:].flatten())


@alike(padded)
class ShiftedBack(Lm):
    def forward(self, x, y):
        z = self.lm_head(x)[:, 1:]
        return F.cross_entropy(z.flatten(0, 1), y[:, :-1].flatten())


@alike(padded)
class AddedLater(Lm):
    "A second term of the logits."

    def forward(self, x, y):
        z = self.lm_head(x).view(-1, V)
        return F.cross_entropy(z, y.view(-1)) + 1e-2 * z.logsumexp(-1).pow(2).mean()


@alike(deep)
class LabelsAreShares(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, V), F.one_hot(y, V).float().view(-1, V) * 0.9)


@alike(padded)
class Twice(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(self.lm_head(x)[..., :K]).view(-1, V), y.view(-1))


@alike(padded)
class OneBiasOfAll(Lm):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.rand(V))

    def forward(self, x, y):
        return F.cross_entropy((self.lm_head(x) - self.more).view(-1, V), y.view(-1))


@alike(padded)
class Part(Lm):
    "Some of the classes alone."

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x)[..., : V - 5].flatten(0, 1), y.flatten().clamp_max(V - 6))


@alike(lambda c: (c(), T(2, V, K), torch.randint(0, V, (2, V))))
class OtherAxis(Lm):
    "Tokens as classes: as many."

    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x), y)


@alike(padded)
class Dropped(Lm):
    def forward(self, x, y):
        torch.manual_seed(1)
        z = F.dropout(self.lm_head(x), 0.5, self.training)
        return F.cross_entropy(z.view(-1, V), y.view(-1))
"""
