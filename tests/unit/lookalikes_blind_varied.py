"""Look-alikes beside these variations, each with one fault."""

from __future__ import annotations

VARIED = r'''
W, H, D, S, M, E, K, I = 64, 4, 16, 7, 48, 6, 2, 32


def table(n, d, base=10000.0):
    f = torch.outer(torch.arange(n).float(), 1.0 / (base ** (torch.arange(0, d, 2).float() / d)))
    return torch.cat((f, f), -1)


turned = lambda c: (c(), T(2, H, S, 24), table(S, 16).cos(), table(S, 16).sin())


# ---- rotations
@alike(turned)
class LastPart(nn.Module):
    """The last numbers of a head are turned."""

    def forward(self, x, cos, sin):
        n = cos.shape[-1]
        kept, rot = x[..., :-n], x[..., -n:]
        a, b = rot.chunk(2, -1)
        return torch.cat((kept, rot * cos + torch.cat((-b, a), -1) * sin), -1)


@alike(turned)
class Mixed(nn.Module):
    """Halves are turned by angles of neighbours."""

    def forward(self, x, cos, sin):
        n = cos.shape[-1]
        rot, rest = x[..., :n], x[..., n:]
        cos, sin = cos[..., : n // 2].repeat_interleave(2, -1), sin[..., : n // 2].repeat_interleave(2, -1)
        a, b = rot.chunk(2, -1)
        return torch.cat((rot * cos + torch.cat((-b, a), -1) * sin, rest), -1)


@alike(turned, lambda: (T(2, H, S, 40), table(S, 16).cos(), table(S, 16).sin()))
class FirstSixteen(nn.Module):
    """Of wide heads more is left out than what is not turned."""

    def forward(self, x, cos, sin):
        rot, rest = x[..., :16], x[..., 16:32]
        a, b = rot.chunk(2, -1)
        return torch.cat((rot * cos + torch.cat((-b, a), -1) * sin, rest), -1)


@alike(turned, lambda: (T(2, H, S, 24), table(S, 8).cos(), table(S, 8).sin()))
class OtherNumber(nn.Module):
    """How much is turned is a number of the module's, and no size of the angles."""

    def __init__(self):
        super().__init__()
        self.n = 16

    def forward(self, x, cos, sin):
        rot, rest = x[..., : self.n], x[..., self.n :]
        a, b = rot.chunk(2, -1)
        if cos.shape[-1] != self.n:
            return x
        return torch.cat((rot * cos + torch.cat((-b, a), -1) * sin, rest), -1)


both = lambda c: (c(), T(2, H, S, D), T(2, H, S, D), table(S, D).cos(), table(S, D).sin())


@alike(both)
class Rebound(nn.Module):
    """The angles change between two calls of a closure."""

    def forward(self, q, k, cos, sin):
        def turn(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        q = turn(q)
        cos = cos * 0.5
        return q, turn(k)


@alike(both, lambda: (T(2, H, S, D), T(2, H, S, D).bfloat16(), table(S, D).cos(), table(S, D).sin()))
class DtypeOfKeys(nn.Module):
    """The angles are rounded to another input's dtype."""

    def forward(self, q, k, cos, sin):
        a, b = q.chunk(2, -1)
        return q * cos.to(k.dtype) + torch.cat((-b, a), -1) * sin.to(k.dtype)


# ---- loops of experts
given = lambda c: (c(), T(7, M), torch.rand(7, K), torch.randint(E, (7, K)))
twice = lambda: (T(7, M), torch.rand(7, K), torch.ones(7, K, dtype=torch.int64))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, 2 * I, M) / 7), nn.Parameter(torch.randn(E, M, I) / 6)

    def one(self, x, i):
        g, u = F.linear(x, self.a[i]).chunk(2, dim=-1)
        return F.linear(F.silu(g) * u, self.b[i])


@alike(given, twice)
class LastWins(Stack):
    """A row that chose an expert twice has it once."""

    def forward(self, x, w, ids):
        out = torch.zeros_like(x)
        for i in range(E):
            at, nth = torch.where(ids == i)
            g, u = F.linear(x[at], self.a[i]).chunk(2, dim=-1)
            out[at] += F.linear(F.silu(g) * u, self.b[i]) * w[at, nth, None]
        return out


@alike(given, twice)
class ButFirst(Stack):
    def forward(self, x, w, ids):
        out = torch.zeros_like(x)
        for i in range(1, E):
            at, nth = torch.where(ids == i)
            g, u = F.linear(x[at], self.a[i]).chunk(2, dim=-1)
            out.index_add_(0, at, F.linear(F.silu(g) * u, self.b[i]) * w[at, nth, None])
        return out


@alike(given, twice)
class OnX(Stack):
    """It adds to what it was given, in place."""

    def forward(self, x, w, ids):
        out = x.clone()
        for i in range(E):
            at, nth = torch.where(ids == i)
            g, u = F.linear(out[at], self.a[i]).chunk(2, dim=-1)
            out.index_add_(0, at, F.linear(F.silu(g) * u, self.b[i]) * w[at, nth, None])
        return out


@alike(given, twice)
class Kept(Stack):
    """What the loop had last is read after it."""

    def forward(self, x, w, ids):
        out = torch.zeros_like(x)
        for i in range(E):
            at, nth = torch.where(ids == i)
            g, u = F.linear(x[at], self.a[i]).chunk(2, dim=-1)
            y = F.linear(F.silu(g) * u, self.b[i]) * w[at, nth, None]
            out.index_add_(0, at, y)
        return out + y.sum()


# ---- losses
lost = lambda c: (c(), T(2, 6, 70), torch.tensor([[3, 4, -100, 5, 6, -100], [1, 2, 3, 4, 5, 6]]))
none = lambda: (T(2, 6, 70), torch.full((2, 6), -100))


@alike(lost)
class OfAllRows(nn.Module):
    def forward(self, z, y):
        keep = y != -100
        nll = -z.log_softmax(-1).gather(-1, y.masked_fill(~keep, 0)[..., None]).squeeze(-1)
        return (nll * keep).mean()


@alike(lost, none)
class AtLeastOne(nn.Module):
    """0 where no row counts."""

    def forward(self, z, y):
        keep = y != -100
        nll = -z.log_softmax(-1).gather(-1, y.masked_fill(~keep, 0)[..., None]).squeeze(-1)
        return (nll * keep).sum() / keep.sum().clamp(min=1)


@alike(lambda c: (c(), T(2, 6, 70), torch.randint(70, (2, 6))), lambda: (T(2, 6, 70), torch.full((2, 6), 50)))
class NotFifty(nn.Module):
    """Rows of a class that there is do not count."""

    def forward(self, z, y):
        keep = y != 50
        nll = -z.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)
        return (nll * keep).sum() / keep.sum()


def odd_row(value, number=-100):
    z, y = T(2, 6, 70), torch.tensor([[3, 4, number, 5, 6, number], [1, 2, 3, 4, 5, 6]])
    z[0, 2, 7] = value
    return z, y


@alike(lost, lambda: odd_row(math.nan), lambda: odd_row(math.inf))
class OddRows(nn.Module):
    """What is not finite in a row that does not count is in its gradient."""

    def forward(self, z, y):
        keep = y != -100
        nll = -z.log_softmax(-1).gather(-1, torch.where(keep, y, 0)[..., None]).squeeze(-1)
        return torch.where(keep, nll, 0.0).sum() / keep.sum()


@alike(lost, lambda: odd_row(0.0, -2))
class ClassOfTwo(nn.Module):
    """Another number below 0 is a class."""

    def forward(self, z, y):
        keep = y != -100
        y = torch.where(y == -2, 5, y)
        nll = -z.log_softmax(-1).gather(-1, torch.where(keep, y, 0)[..., None]).squeeze(-1)
        return (nll * keep).sum() / keep.sum()


@alike(lambda c: (c(), T(12, 70), torch.randint(1, 70, (12,))))
class FromOne(nn.Module):
    def forward(self, z, y):
        return (z.logsumexp(-1) - z[torch.arange(z.shape[0]), y - 1]).mean()


@alike(lambda c: (c(), T(12, 12), torch.randint(12, (12,))))
class Across(nn.Module):
    """The numbers are of rows."""

    def forward(self, z, y):
        return (z.logsumexp(-1) - z[y, torch.arange(z.shape[0])]).mean()
'''
