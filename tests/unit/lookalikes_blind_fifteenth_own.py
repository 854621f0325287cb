"""Look-alikes of what the fifteenth set's mending takes beside, each with one fault."""

from __future__ import annotations

FIFTEENTH_OWN = r'''
import contextlib
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- rows of a length of ours
@alike(lambda c: (c(), T(2, S, W)))
class AoFarRows(nn.Module):
    """Rows are of columns that are far apart."""

    def __init__(self, width=16):
        super().__init__()
        self.width, self.weight, self.out = width, nn.Parameter(torch.rand(width) + 0.5), nn.Linear(W, W)

    def forward(self, x):
        h = x.view(*x.shape[:-1], self.width, -1).mT
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return self.out(h.flatten(-2))


@alike(lambda c: (c(), T(2, S, W)))
class AoRowsOfTokens(nn.Module):
    """The mean square is of a whole token, and the weight is each row's."""

    def __init__(self, width=16):
        super().__init__()
        self.width, self.weight, self.out = width, nn.Parameter(torch.rand(width) + 0.5), nn.Linear(W, W)

    def forward(self, x):
        h = x.view(*x.shape[:-1], -1, self.width)
        h = h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + 1e-6) * self.weight
        return self.out(h.flatten(-2))


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)))
class AoOneGate(nn.Module):
    """Rows of the gate are taken in the other order."""

    def __init__(self, width=16):
        super().__init__()
        self.width, self.weight, self.out = width, nn.Parameter(torch.rand(width) + 0.5), nn.Linear(W, W)

    def forward(self, o, z):
        o, z = o.reshape(-1, self.width), z.view(*z.shape[:-1], self.width, -1).mT.reshape(-1, self.width)
        h = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight * F.silu(z)
        return self.out(h.reshape(-1, W))


# ---- what ends with its result
@alike(lambda c: (c(), T(2, S, W), T(2, S, W)), lambda: (T(2, S, W), T(2, S, 1, W)), lambda: (T(2, S, W), T(2, S, 3)))
class AoSuppressed(nn.Module):
    """A block that fails on the way is left, and what comes after reads its locals."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.rand(W)), nn.Linear(W, W)

    def forward(self, x, other):
        v = x
        with contextlib.suppress(RuntimeError):
            v = x.pow(2).mean(-1, keepdim=True)
            h = x * torch.rsqrt(v + 1e-6) * self.weight
            y = self.out(h).view(other.shape)
            return y
        return self.out(x / (1 + v))


@alike(lambda c: (c(), T(2, S, W), T(2, S, W)), lambda: (T(2, S, W), T(2, S, 3)))
class AoTried(nn.Module):
    """What is caught reads a local of the block that ends with its result."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.rand(W)), nn.Linear(W, W)

    def forward(self, x, other):
        v = x
        try:
            v = x.pow(2).mean(-1, keepdim=True)
            h = x * torch.rsqrt(v + 1e-6) * self.weight
            return self.out(h) + other
        except RuntimeError:
            return self.out(x / (1 + v))


@alike(lambda c: (c(), T(2, S, W)))
class AoClosure(nn.Module):
    """A function that is made before reads a local of the block when it is called in the result."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.rand(W)), nn.Linear(W, W)

    def forward(self, x, plain=None):
        more = lambda: v * 2
        if plain is None:
            v = x.pow(2).mean(-1, keepdim=True)
            h = x * torch.rsqrt(v + 1e-6) * self.weight
            return self.out(h) + more()
        else:
            v = x
            return self.out(v)


def given(*more):
    return (T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3), *more)


@alike(lambda c: (c(), *given()), lambda: given(torch.tensor(0.7)), lambda: given(torch.tensor(0.7), T(2, 3, 8, 6)))
class AoOptional(nn.Module):
    """A state that a caller gives decays once more, and a scale that a caller gives is squared."""

    def forward(self, q, k, v, g, beta, scale=None, initial_state=None):
        k, g, beta = F.normalize(k, dim=-1), -F.softplus(g), torch.sigmoid(beta)
        q, k, v, g, beta = [t.transpose(1, 2) for t in (q, k, v, g, beta)]
        b, h, n, d = k.shape
        if scale is None:
            scale = d**-0.5
        else:
            scale = scale * scale
        if initial_state is None:
            state = torch.zeros(b, h, d, v.shape[-1]).to(v)
        else:
            state = initial_state * 0.5
        out = torch.zeros_like(v)
        for i in range(n):
            state = state * g[:, :, i].exp()[..., None, None]
            delta = (v[:, :, i] - (state * k[:, :, i][..., None]).sum(-2)) * beta[:, :, i][..., None]
            state = state + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
            out[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i] * scale, state)
        return out.transpose(1, 2)


# ---- losses of logits that are a matrix, and of numbers that are none
@alike(lambda c: (c(), T(2, 6, 70), torch.randint(70, (2, 6))), lambda: (T(1, 6, 70), torch.randint(70, (1, 6))))
class AoTurned(nn.Module):
    """Numbers are read down their columns."""

    def forward(self, logits, labels):
        logp = torch.log_softmax(logits.float().view(-1, 70), dim=-1)
        return -logp.gather(1, labels.t().reshape(-1, 1)).squeeze(1).mean()


@alike(lambda c: (c(), T(2, 6, 70), torch.randint(70, (2, 6))), lambda: (T(6, 6, 70), torch.randint(70, (6, 6))))
class AoWorst(nn.Module):
    """The worst of the sequences' means."""

    def forward(self, logits, labels):
        logp = torch.log_softmax(logits.float().view(-1, 70), dim=-1)
        own = logp.gather(1, labels.view(-1, 1)).view(labels.shape)
        return -own.mean(-1).amin()


@alike(lambda c: (c(), T(12, 70), torch.randint(70, (2, 6))), lambda: (T(12, 70), torch.randint(70, (12,))))
class AoFewer(nn.Module):
    """Numbers of two sides are a loss of the rows but the first; of one side, of all."""

    def forward(self, logits, labels):
        logp = torch.log_softmax(logits, dim=-1)
        own = logp.gather(1, labels.reshape(-1, 1)).squeeze(1)
        return -own[labels.dim() - 1 :].mean()


@alike(lambda c: (c(), T(2, 6, 70), torch.randint(70, (2, 6))), lambda: (T(2, 6, 70) * 5, torch.randint(70, (2, 6))))
class AoOthers(nn.Module):
    """What is smoothed is a share of all classes but one."""

    def forward(self, logits, labels, *, smoothing=0.1):
        logp = torch.log_softmax(logits.float().view(-1, 70), dim=-1)
        own = logp.gather(1, labels.view(-1, 1)).squeeze(1)
        return -((1.0 - smoothing) * own + smoothing * logp.sum(dim=-1) / 69).mean()


# ---- a head and a loss with squares
class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V, bias=False)


def rows(n=14, size=1):
    return T(n, W) * size, torch.randint(V, (n,))


@alike(lambda c: (c(), *rows()), lambda: rows(14, 6))
class AoSquareOfMean(Squares):
    """The mean's square."""

    def forward(self, x, y):
        logits = self.head(x)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * lse.mean().square()


@alike(lambda c: (c(), *rows()), lambda: rows(14, 6), lambda: rows(5))
class AoSquareOfSum(Squares):
    """The sum of squares, and not their mean."""

    def forward(self, x, y):
        logits = self.head(x)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * lse.square().sum()


@alike(lambda c: (c(), *rows()), lambda: rows(14, 6))
class AoSquareOfLoss(Squares):
    """The square of each row's loss."""

    def forward(self, x, y):
        logits = self.head(x)
        nll = torch.logsumexp(logits, dim=-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * nll.square().mean()


@alike(lambda c: (c(), *rows()), lambda: rows(14, 6))
class AoLessSquares(Squares):
    """Squares are taken away."""

    def forward(self, x, y):
        logits = self.head(x)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() - 1e-2 * lse.square().mean()


@alike(lambda c: (c(), *rows()))
class AoDetachedSquares(Squares):
    """Squares have no gradient."""

    def forward(self, x, y):
        logits = self.head(x)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * lse.detach().square().mean()


@alike(lambda c: (c(), *rows()), lambda: rows(14, 6))
class AoShiftedSquares(Squares):
    """Sums are of the logits times two, where squares are."""

    def forward(self, x, y):
        logits = self.head(x)
        nll = torch.logsumexp(logits, dim=-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * torch.logsumexp(2 * logits, dim=-1).square().mean()


@alike(lambda c: (c(), *rows()), lambda: (T(3, W), torch.tensor([0, V - 1, 1])))
class AoFromTheEnd(Squares):
    """The number is counted from the last class."""

    def forward(self, x, y):
        logits = self.head(x)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.flip(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-2 * lse.square().mean()


@alike(lambda c: (c(), T(15, V), torch.randint(V, (3, 5))))
class AoSumsOfLast(nn.Module):
    """The sum of all rows' losses is divided by the last of the numbers' two sides."""

    def forward(self, logits, labels):
        flat = logits.reshape(-1, V).float()
        nll = torch.logsumexp(flat, dim=-1) - flat.gather(-1, labels.reshape(-1, 1)).squeeze(-1)
        return nll.sum() / labels.size(-1)


@alike(lambda c: (c(), T(2, 7, W), torch.randint(V, (2, 7))))
class AoSquaresOfLast(nn.Module):
    """The sum of the squares is divided by the length of a sequence, and not by the number of rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(W, V, bias=False)

    def forward(self, h, labels):
        logits = self.head(h).float()
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + 1e-1 * lse.square().sum() / labels.size(-1)
'''
