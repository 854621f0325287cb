# ruff: noqa: E501
"""Look-alikes that are near what the ninth set showed; and calls of right modules with numbers that a chunk spoils."""

from __future__ import annotations

NINTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40
keys = lambda *s: F.normalize(T(*s), dim=-1)
def changed(x, at, value):
    x = x.clone()
    x[at] = value
    return x
def delta(s=S, g=None, k=1.0, v=1.0):
    return T(2, s, H, D), keys(2, s, H, D) * k, T(2, s, H, 8) * v, -T(2, s, H).abs() if g is None else g, torch.rand(2, s, H)


@alike(lambda c: (c(), *delta()), lambda: delta(90), lambda: delta(90, g=changed(-torch.rand(2, 90, H), (0, 40, 1), -1e9)),
       lambda: delta(90, g=changed(-torch.rand(2, 90, H), (0, 40, 1), float("-inf"))), lambda: delta(90, g=-60.0 * torch.rand(2, 90, H)),
       lambda: delta(20, g=torch.rand(2, 20, H)), lambda: delta(30, k=1.6), lambda: delta(90, v=1e8),
       lambda: (*delta(40)[:2], changed(T(2, 40, H, 8), (0, 30, 1, 2), float("nan")), *delta(40)[3:]),
       lambda: (changed(T(2, 40, H, D), (1, 20, 0, 0), float("inf")), *delta(40)[1:]))
class RightDelta(nn.Module):
    """What it gives where a token is not finite, or forgets all, is what the loop gives."""

    def forward(self, q, k, v, g, beta):
        state, ys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = state + k[:, t, :, :, None] * ((v[:, t] - seen) * beta[:, t, :, None])[:, :, None]
            ys.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), *delta()))
class DecayLater(nn.Module):
    """The state forgets after it was read."""

    def forward(self, q, k, v, g, beta):
        state, ys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = state * g[:, t, :, None, None].exp()
            state = state + k[:, t, :, :, None] * ((v[:, t] - seen) * beta[:, t, :, None])[:, :, None]
            ys.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), *delta()))
class RateOfSeen(nn.Module):
    """The rate is of what was seen alone."""

    def forward(self, q, k, v, g, beta):
        state, ys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = state + k[:, t, :, :, None] * (v[:, t] - seen * beta[:, t, :, None])[:, :, None]
            ys.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), *delta()), lambda: delta(40, v=300.0))
class BoundState(nn.Module):
    """A state that has a most."""

    def forward(self, q, k, v, g, beta):
        state, ys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = (state + k[:, t, :, :, None] * ((v[:, t] - seen) * beta[:, t, :, None])[:, :, None]).clamp(-200.0, 200.0)
            ys.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(ys, 1)


def scan(s=S, dt=None):
    return T(2, s, H, 8), torch.rand(2, s, H) if dt is None else dt, -torch.rand(H), T(2, s, H, 6), T(2, s, H, 6)


@alike(lambda c: (c(), *scan()), lambda: scan(300), lambda: scan(300, changed(torch.rand(2, 300, H), (0, 40, 1), 1e9)),
       lambda: scan(300, 40.0 * torch.rand(2, 300, H)), lambda: scan(30, -torch.rand(2, 30, H)),
       lambda: (changed(T(2, 40, H, 8), (0, 30, 1, 2), float("nan")), *scan(40)[1:]),
       lambda: (*scan(40)[:3], changed(T(2, 40, H, 6), (0, 20, 1, 2), float("inf")), scan(40)[4]))
class RightScan(nn.Module):
    def forward(self, x, dt, a, b, c):
        state, ys = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3]), []
        for t in range(x.shape[1]):
            state = state * (dt[:, t] * a).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            ys.append((state * c[:, t, :, None]).sum(-1))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), *scan()))
class StepOfOne(nn.Module):
    """The step does not weigh what is put in."""

    def forward(self, x, dt, a, b, c):
        state, ys = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3]), []
        for t in range(x.shape[1]):
            state = state * (dt[:, t] * a).exp()[..., None, None] + x[:, t, ..., None] * b[:, t, :, None]
            ys.append((state * c[:, t, :, None]).sum(-1))
        return torch.stack(ys, 1)


@alike(lambda c: (c(), torch.randint(20, (2, 6))), lambda: (torch.tensor([[20, -21, 45, -1, -60, 19]]),))
class RightRows(nn.Module):
    """Numbers of no row come round; the other look-alikes clamp or fold them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 32))

    def forward(self, ids):
        return torch.take_along_dim(self.table, ids.reshape(-1, 1).expand(-1, 32), 0).view(*ids.shape, 32)


@alike(lambda c: (c(), torch.randint(20, (2, 6))), lambda: (torch.tensor([[20, -21, 45, -1, -60, 19]]),))
class ClampedRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 32))

    def forward(self, ids):
        return torch.take_along_dim(self.table, ids.clamp(-1, 19).reshape(-1, 1).expand(-1, 32), 0).view(*ids.shape, 32)


@alike(lambda c: (c(), torch.randint(20, (2, 6))), lambda: (torch.tensor([[20, -21, 45, -1, -60, 19]]),))
class TruncatedRows(nn.Module):
    """The remainder has the sign of the number, and what is below zero is turned over."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 32))

    def forward(self, ids):
        return self.table[torch.fmod(ids, 20).abs()]


@alike(lambda c: (c(), T(7, 30), torch.randint(30, (7,))), lambda: (T(3, 30), torch.tensor([30, -31, 75])))
class ClampedClasses(nn.Module):
    def forward(self, logits, y):
        return -torch.take_along_dim(logits.log_softmax(-1), y.clamp(max=29)[:, None], 1).mean()


@alike(lambda c: (c(), T(3, S, W)), lambda: (torch.zeros(3, S, W),))
class KinkOfOne(nn.Module):
    """A rectifier whose slope at zero is one; gradients are the spelling's own."""

    def forward(self, x):
        return x.clamp(min=0.0) * 1.0


@alike(lambda c: (c(), T(3, S, W)), lambda: (T(3, S, W) * 100,))
class AlmostQuick(nn.Module):
    """Quick gelu with a bound on the exponent, whose gradient is finite."""

    def forward(self, x):
        return x / (1 + torch.exp((-1.702 * x).clamp(max=4.0)))


@alike(lambda c: (c(), T(2, S, W)))
class OtherWidth(nn.Module):
    """A router of half the width, twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)

    def forward(self, x):
        x = x.reshape(-1, W)
        p = (torch.cat([x[:, : W // 2], x[:, : W // 2]], -1) @ self.weight.t()).softmax(dim=-1)
        w, ids = p.topk(K, dim=-1)
        return w / w.sum(dim=-1, keepdim=True), ids


def chosen(ids):
    return T(*ids.shape[:1], W), ids, torch.rand(ids.shape)


@alike(lambda c: (c(), *chosen(torch.randint(E, (14, K)))), lambda: chosen(torch.randint(-20, 20, (14, K))))
class ExpertsByRemainder(nn.Module):
    """Numbers of experts come round by a number of the file."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, ids, weights):
        ids = ids % E
        g, u = torch.einsum("tkow,tw->tko", self.w_in[ids], x).chunk(2, -1)
        return (torch.einsum("tkwi,tki->tkw", self.w_out[ids], F.silu(g) * u) * weights[..., None]).sum(1)
'''
