"""Look-alikes of what the thirteenth set led to."""

from __future__ import annotations

THIRTEENTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 6, 2, 24


def spoilt(*values):
    x = T(2, S, W)
    for i, value in enumerate(values):
        x[0, i, i + 1] = value
        x[0, i, 0] = -value
    return x


# ---- tables of experts
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)

    def logits(self, x):
        return F.linear(x, self.weight)


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class NotZero(Table):
    """What is not chosen is next to nothing, and not nothing."""

    def forward(self, x):
        top, ids = self.logits(x).softmax(-1).topk(K, dim=-1)
        return torch.full((*x.shape[:-1], E), 1e-5, dtype=x.dtype).scatter(-1, ids, top), ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class NotThere(Table):
    """Shares stand in the other's place."""

    def forward(self, x):
        top, ids = self.logits(x).softmax(-1).topk(K, dim=-1)
        return torch.zeros((*x.shape[:-1], E), dtype=x.dtype).scatter(-1, ids.flip(-1), top), ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class IsNan(Table):
    """A softmax of what is -inf but for the chosen: a row that has no number has none anywhere."""

    def forward(self, x):
        logits = self.logits(x)
        top, ids = logits.topk(K, dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1), ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class IsZero(Table):
    """Zeros where none is chosen, whatever the row has."""

    def forward(self, x):
        logits = self.logits(x)
        top, ids = logits.topk(K, dim=-1)
        return torch.zeros_like(logits).scatter(-1, ids, top.softmax(-1)), ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class IsSome(Table):
    """Sigmoids times a mask of the chosen: of another that is no number, none there alone."""

    def forward(self, x):
        scores = self.logits(x).sigmoid()
        ids = scores.topk(K, dim=-1)[1]
        return scores * torch.zeros_like(scores).scatter(-1, ids, 1.0), ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (torch.zeros(2, S, W),))
class NotAlone(Table):
    """All that are as large as the least chosen have a share, too."""

    def forward(self, x):
        scores = self.logits(x).softmax(-1)
        top, ids = scores.topk(K, dim=-1)
        return scores * (scores >= top[..., -1:]), ids


# ---- loops over tokens
@alike(lambda c: (c(), T(2, S, 12), torch.rand(2, S, 12), T(2, S, 5), T(2, S, 5)))
class LastToo(nn.Module):
    """What the last token gave is added to all, before its name has all of them."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(12, 5))

    def forward(self, u, delta, B, C):
        A = -torch.exp(self.A_log)
        x, ys = u.new_zeros(u.shape[0], 12, 5), []
        for i in range(u.shape[1]):
            x = torch.exp(delta[:, i, :, None] * A) * x + (delta[:, i] * u[:, i])[..., None] * B[:, i, None]
            y = (x * C[:, i, None]).sum(-1)
            ys.append(y)
        last = y
        y = torch.stack(ys, dim=1)
        return y + last[:, None]


@alike(lambda c: (c(), T(2, S, 12), torch.rand(2, S, 12), T(2, S, 5), T(2, S, 5)))
class Before(nn.Module):
    """A token's result has a part of the one before."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(12, 5))

    def forward(self, u, delta, B, C):
        A = -torch.exp(self.A_log)
        x, ys, y = u.new_zeros(u.shape[0], 12, 5), [], u.new_zeros(())
        for i in range(u.shape[1]):
            x = torch.exp(delta[:, i, :, None] * A) * x + (delta[:, i] * u[:, i])[..., None] * B[:, i, None]
            y = (x * C[:, i, None]).sum(-1) + 0.1 * y
            ys.append(y)
        y = torch.stack(ys, dim=1)
        return y * 2


class Rule(nn.Module):
    """A delta rule whose state may be given."""

    def rule(self, q, k, v, beta, g, scale=None, initial_state=None):
        q, k, v, beta, g = map(lambda x: x.transpose(1, 2).contiguous().to(torch.float32), [q, k, v, beta, g])
        B, H, T, K, V = *k.shape, v.shape[-1]
        o = torch.zeros(B, H, T, V, dtype=v.dtype, device=v.device)
        h = torch.zeros(B, H, K, V, dtype=v.dtype, device=v.device)
        if initial_state is not None:
            h = initial_state
        if scale is None:
            scale = 1 / (q.shape[-1] ** 0.5)
        q = q * scale
        for i in range(T):
            b_q, b_k, b_v = q[:, :, i], k[:, :, i], v[:, :, i].clone()
            h = h.clone() * g[:, :, i].exp()[..., None, None]
            b_v = b_v - (h.clone() * b_k[..., None]).sum(-2)
            b_v = b_v * beta[:, :, i][..., None]
            h = h.clone() + b_k.unsqueeze(-1) * b_v.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", b_q, h)
        return o.transpose(1, 2).contiguous()

    def given(self, q, k):
        return F.normalize(q, p=2, dim=-1), F.normalize(k, p=2, dim=-1)


@alike(lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class WithState(Rule):
    """The state is one that is kept."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 3, 8, 6))

    def forward(self, q, k, v, a, b):
        q, k = self.given(q, k)
        state = self.start.float().expand(q.shape[0], -1, -1, -1)
        return self.rule(q, k, v, b.sigmoid(), F.logsigmoid(a), initial_state=state)


@alike(lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class WithBoth(Rule):
    """One call has a state, and the other none and a scale."""

    def forward(self, q, k, v, a, b):
        q, k = self.given(q, k)
        first = self.rule(q, k, v, b.sigmoid(), F.logsigmoid(a))
        state = torch.einsum("bhk,bhv->bhkv", k[:, 0].float(), first[:, -1].float())
        return first + self.rule(q, k, v, b.sigmoid(), F.logsigmoid(a), 0.2, state)


# ---- weights of heads
@alike(lambda c: (c(), T(2, S, 8)))
class HeadsTurned(nn.Module):
    """Equal sides: the weight's first is summed over, and the middle has the heads' places, the other way round."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 8, 8) / 3), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.einsum("bsw,hwd->bsdh", x, self.w) + self.b


@alike(lambda c: (c(), T(2, S, W)))
class HeadsShared(nn.Module):
    """Heads are summed."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, W, D) / 8)

    def forward(self, x):
        return torch.einsum("bsw,hwd->bsd", x, self.w)


@alike(lambda c: (c(), T(2, S, W)))
class HeadsScaled(nn.Module):
    """A bias of each head alone."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(H, W, D) / 8), nn.Parameter(torch.randn(H))

    def forward(self, x):
        return torch.einsum("bsw,hwd->bshd", x, self.w) + self.b[:, None]


# ---- rows that do not count
@alike(lambda c: (c(), T(2, S, W), torch.randint(-1, V, (2, S))), lambda: (T(2, S, W), torch.full((2, S), -1)))
class FromEnd(nn.Module):
    """A number below zero means a class from the end, and counts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V)

    def forward(self, x, target):
        target = target.view(-1)
        return F.cross_entropy(self.head(x).view(-1, V), torch.where(target < 0, target + V, target), ignore_index=-1)


@alike(lambda c: (c(), T(2, S, W), torch.randint(-1, V, (2, S))), lambda: (T(2, S, W), torch.full((2, S), -1)))
class Turned(nn.Module):
    """Numbers are negated first: the class 1 does not count."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V)

    def forward(self, x, target):
        return F.cross_entropy(self.head(x).view(-1, V), -1 * target.clamp(max=0).view(-1), ignore_index=-1)


@alike(lambda c: (c(), T(2, S, W), torch.randint(-1, V, (2, S))), lambda: (T(2, S, W), torch.full((2, S), -1)))
class OtherNumber(nn.Module):
    """The number is an attribute, which another one has by now."""

    def __init__(self):
        super().__init__()
        self.head, self.ignore_index = nn.Linear(W, V), -1

    def forward(self, x, target):
        target = target.view(-1)
        self.ignore_index = int(target[0])
        return F.cross_entropy(self.head(x).view(-1, V), target.clamp(min=0), ignore_index=self.ignore_index)


@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))), lambda: (T(2, S, W), torch.zeros(2, S, dtype=torch.long)))
class OtherPad(nn.Module):
    """The number that is an argument is given, and is another than where it is left out."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(W, V)

        def forward(self, x, target, pad=-100):
            return F.cross_entropy(self.head(x).view(-1, V), target.view(-1), ignore_index=pad)

    def __init__(self):
        super().__init__()
        self.loss = self.Loss()

    def forward(self, x, target):
        return self.loss(x, target), self.loss(x, target, 0), self.loss(x, target, pad=int(target[0, 0]))


@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))), lambda: (T(2, S, W), torch.zeros(2, S, dtype=torch.long)))
class PadPlus(nn.Module):
    """The number is another one by the time that it is read."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V)

    def forward(self, x, target, pad=-1):
        if x.dim() == 3:
            pad = pad + 1
        return F.cross_entropy(self.head(x).view(-1, V), target.view(-1), ignore_index=pad)


@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (S, 2))))
class FlatTurned(nn.Module):
    """Labels are flat in another order than rows are."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V)

    def forward(self, x, target):
        flat = target.view(-1)
        return F.cross_entropy(self.head(x).transpose(0, 1).reshape(-1, V), flat)


@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (2, S - 1))))
class FlatShort(nn.Module):
    """Rows but for the last of each, and flat labels of one less."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V)

    def forward(self, x, target):
        flat = target.view(-1)
        return F.cross_entropy(self.head(x)[:, 1:].reshape(-1, V), flat)


class Made(nn.Module):
    """A delta rule whose state is made as what is given is."""

    def forward(self, x, q, k, v, g, beta):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g, beta, n = F.logsigmoid(g), beta.sigmoid(), v.shape[1]
        s, out = x.new_ones(x.shape[0], 3, 8, 6), torch.empty_like(v)
        for t in range(n):
            s = s * g[:, t].exp()[:, :, None, None]
            seen = torch.einsum("bhk,bhkv->bhv", k[:, t], s)
            s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - seen))
            out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], s)
        return out


@alike(lambda c: (c(), T(2, 4), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class OfOnes(Made):
    """A state of ones."""


@alike(lambda c: (c(), T(2, S, 3, 6, 8), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class OfThat(nn.Module):
    """The state is what is given, in the shape of zeros that another step makes."""

    def forward(self, x, q, k, v, g, beta):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        s, ys = x.new_zeros(x.shape[0], 3, 8, 6).to(x), []
        s = s + x[:, 0].mT
        for t in range(v.shape[1]):
            s = s * F.logsigmoid(g[:, t]).exp()[:, :, None, None]
            seen = (s * k[:, t, :, :, None]).sum(-2)
            s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - seen))[:, :, None]
            ys.append((s * q[:, t, :, :, None]).sum(-2))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class WrittenTwice(nn.Module):
    """What is made is written into, and then once more in another place."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E)

    def forward(self, x):
        logits = self.gate(x)
        top, ids = logits.topk(K, dim=-1)
        table = torch.zeros_like(logits).scatter_(-1, ids, top.softmax(-1))
        table[..., 0] += 0.25
        return table, ids


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class WrittenOver(nn.Module):
    """Logits themselves are written over, and given back beside."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E)

    def forward(self, x):
        logits = self.gate(x) * 1.0
        top, ids = logits.detach().topk(K, dim=-1)
        table = logits.detach().scatter_(-1, ids, top.softmax(-1))
        return table, ids, logits.detach().sum()


@alike(lambda c: (c(), T(2, S, W)), lambda: (spoilt(float("nan"), float("inf"), 1e30),))
class WrittenOne(nn.Module):
    """What is not chosen is one, of which the sigmoid is none that is zero."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E)

    def forward(self, x):
        logits = self.gate(x)
        top, ids = torch.topk(logits, 1, dim=-1)
        return torch.full_like(logits, -30.0).scatter_(-1, ids, top).sigmoid(), ids


# ---- how results lie in memory
class HeadsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, W, 8) / 8)

    def forward(self, x):
        return torch.matmul(x.unsqueeze(1), self.weight)


@alike(lambda c: (c(), T(2, S, W)))
class ViewOfHeads(nn.Module):
    """Heads before tokens are contiguous, so that a view joins them with the batch."""

    def __init__(self):
        super().__init__()
        self.q = HeadsFirst()

    def forward(self, x):
        b, t, _ = x.shape
        return self.q(x).view(b * 8, t, 8).sum(1)


class TableOfLogits(nn.Module):
    def forward(self, logits):
        top, ids = logits.topk(K, -1)
        return torch.zeros_like(logits).scatter_(-1, ids, top.softmax(-1)), ids


@alike(lambda c: (c(), T(S, W)))
class ViewOfTable(nn.Module):
    """A table lies as its logits do, so that a view of its columns is one."""

    def __init__(self):
        super().__init__()
        self.route = TableOfLogits()
        self.weight = nn.Parameter(torch.randn(16, W) / 8)

    def forward(self, x):
        table, ids = self.route((self.weight @ x.t()).t())
        return table.t().view(-1), ids


class LossOfPad(nn.Module):
    def forward(self, logits, labels, pad=-1):
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=pad)


@alike(lambda c: (c(), T(2, S, W)))
class PadOfTensor(nn.Module):
    """The ignored number is a tensor of one."""

    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Linear(W, V), LossOfPad()

    def forward(self, x):
        labels = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[:2]) % V
        labels = torch.where(labels % 5 == 0, -1, labels)
        return self.loss(self.head(x), labels, pad=torch.tensor(-1))
'''
