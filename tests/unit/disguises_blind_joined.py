"""Right modules of a head and its loss in one."""

from __future__ import annotations

JOINED = r"""
K, V = 48, 90


class Config:
    vocab_size, hidden_size, pad = V, K, 7


def case_of(make):
    return case("linear_cross_entropy", make)


def flat(c):
    return c(), T(5, K), torch.randint(0, V, (5,))


def deep(c):
    return c(), T(2, 6, K), torch.randint(0, V, (2, 6))


def padded(c):
    y = torch.randint(0, V, (2, 6))
    y[0, 2], y[1, 4:], y[1, 0] = -100, -100, 7
    return c(), T(2, 6, K), y


class Lm(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.config = Config()
        self.norm, self.lm_head = nn.LayerNorm(K), nn.Linear(K, V, bias=bias)


@case_of(padded)
class ShiftedInside(Lm):
    def forward(self, hidden, labels):
        logits = self.lm_head(hidden).float()
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(shift_logits.view(-1, self.config.vocab_size), shift_labels.view(-1))


@case_of(padded)
class NormedAndFlat(Lm):
    def forward(self, hidden, labels):
        logits = self.lm_head(self.norm(hidden))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return loss


@case_of(deep)
class WithBias(Lm):
    def __init__(self):
        super().__init__(True)

    def forward(self, x, y):
        b, t, n = x.shape
        z = self.lm_head(x).reshape(b * t, V)
        return F.cross_entropy(z, y.reshape(b * t))


@case_of(padded)
class PadIsAClass(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten().clamp_min(0), ignore_index=self.config.pad)


@case_of(lambda c: (c(), T(2, 6, K), torch.randint(-1, 5, (2, 6))))
class MinusOne(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x).transpose(1, 2), y, ignore_index=-1)


@case_of(deep)
class ByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(T(V, K) * 0.1)

    def forward(self, x, y):
        scores = F.linear(x, self.table)
        scores = scores.to(torch.float32)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), y.view(-1))


@case_of(flat)
class OtherSide(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(T(K, V) * 0.1)

    def forward(self, x, y):
        return F.nll_loss(F.log_softmax(x @ self.out, dim=-1), y)


@case_of(padded)
class WithMore(Lm):
    "The loss beside what is no logits."

    def forward(self, x, y):
        x = self.norm(x)
        loss = F.cross_entropy(self.lm_head(x).float().view(-1, V), y.view(-1))
        return loss, x


@case_of(lambda c: (c(), T(2, 6, K), torch.randint(0, V, (2, 5))))
class OthersBefore(Lm):
    def forward(self, x, y):
        return F.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), y.flatten())


@case_of(padded)
class Method(Lm):
    def loss_of(self, x, y):
        return F.cross_entropy(self.lm_head(x).view(-1, self.config.vocab_size).float(), y.view(-1))

    def forward(self, x, y):
        return self.loss_of(self.norm(x), y) * 0.5
"""
