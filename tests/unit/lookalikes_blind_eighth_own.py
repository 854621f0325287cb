# ruff: noqa: E501
"""Look-alikes of loops over tokens, each with one fault, and of what else the eighth set showed."""

from __future__ import annotations

EIGHTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40
keys = lambda *s: F.normalize(T(*s), dim=-1)
delta = lambda c: (c(), T(2, S, H, D), keys(2, S, H, D), T(2, S, H, 8), -T(2, S, H).abs(), torch.rand(2, S, H))
long = lambda: (T(1, 70, 2, 8), keys(1, 70, 2, 8), T(1, 70, 2, 8), -T(1, 70, 2).abs() / 9, torch.rand(1, 70, 2))


class Rule(nn.Module):
    def begin(self, k, v): return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    def step(self, s, k, v, g, b):
        s = s * g.exp()[..., None, None]
        return s + k[..., None] * ((v - (s * k[..., None]).sum(-2)) * b[..., None])[..., None, :]


@alike(delta)
class ButFirstToken(Rule):
    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            if t > 0:
                s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta, long)
class ForgetsAt64(Rule):
    """The state is zeros again from the 64th token on."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None] * (0.0 if t == 64 else 1.0)
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta, long)
class DetachedState(Rule):
    """Its gradient ends at some tokens."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s.detach() if t % 5 == 4 else s
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta)
class QueryBefore(Rule):
    """Each token but the first asks with the query before."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, max(t - 1, 0), ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta)
class OnesFirst(Rule):
    """The first state is no zeros."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_ones(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta, lambda: (T(2, S, H, D), keys(2, S, H, D), 1e3 * T(2, S, H, 8), -T(2, S, H).abs(), torch.rand(2, S, H)))
class BoundedState(Rule):
    """The state is bounded where no plain input gets."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            s = s.clamp(-500, 500)
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta)
class HalfState(Rule):
    """The state is kept in bfloat16."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s.bfloat16().to(k.dtype) * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta)
class OneMore(Rule):
    """A result is put into the list after the loop."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        ys.append(ys[-1] * 2)
        return torch.stack(ys, 1)


@alike(delta)
class StateToo(Rule):
    """The last state is part of the result."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1) + s.sum() + old(t)


def old(t): return float(t)


@alike(delta)
class ChangedBetween(Rule):
    """Values are zeros when the results are joined, which were computed of others."""

    def forward(self, q, k, v, g, b):
        q = q.clone()
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        q.zero_()
        return torch.stack(ys, 1), q


@alike(delta)
class NamedAnew(Rule):
    """A name has another value when the results are joined."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        q, v = q * 2, v.flip(1)
        return torch.stack(ys, 1) + q.mean() + v.mean()


@alike(delta, lambda: (T(2, S, H, D), keys(2, S + 3, H, D), T(2, S + 3, H, 8), -T(2, S + 3, H).abs(), torch.rand(2, S + 3, H)))
class FewQueries(Rule):
    """There may be more keys than queries, of which the last say nothing."""

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta, lambda: (T(2, S, H, D), keys(2, S, 1, D), T(2, S, H, 8), -T(2, S, H).abs(), torch.rand(2, S, 1)))
class OneHeadsKeys(Rule):
    """Keys of one head are every head's, and so is a rate of one."""

    def forward(self, q, k, v, g, b):
        s, ys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(ys, 1)


@alike(delta, lambda: (T(0, S, H, D), T(0, S, H, D), T(0, S, H, 8), T(0, S, H), T(0, S, H)), lambda: (T(2, 0, H, D), T(2, 0, H, D), T(2, 0, H, 8), T(2, 0, H), T(2, 0, H)))
class SwitchedLater(Rule):
    """A setting of the module changes with its calls."""

    def __init__(self):
        super().__init__()
        self.power = 1.0

    def forward(self, q, k, v, g, b):
        s, ys = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t].exp()[..., None, None]
            s = s + k[:, t, ..., None] * ((v[:, t] - (s * k[:, t, ..., None]).sum(-2)) * b[:, t, :, None])[..., None, :]
            ys.append((s * q[:, t, ..., None]).sum(-2) * self.power)
        self.power = self.power * 0.5
        return torch.stack(ys, 1)


scan = lambda c: (c(), T(2, S, 24), F.softplus(T(2, S, 24)), T(2, S, 8), T(2, S, 8))


class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(24, 8))


@alike(scan)
class Backwards(Rates):
    """From the last token to the first."""

    def forward(self, u, dt, b, c):
        a, h, ys = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), []
        for t in range(u.shape[1] - 1, -1, -1):
            h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return torch.stack(ys, 1)


@alike(scan)
class NearlyAll(Rates):
    """The last token is left out."""

    def forward(self, u, dt, b, c):
        a, h, y = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), torch.zeros_like(u)
        for t in range(u.shape[1] - 1):
            h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            y[:, t] = (h * c[:, t, None]).sum(-1)
        return y


@alike(scan)
class BilinearSteps(Rates):
    """The decay is a quotient, and near the exponential of small steps alone."""

    def forward(self, u, dt, b, c):
        a, h, ys = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), []
        for t in range(u.shape[1]):
            s = dt[:, t, :, None] * a * 1e-3
            h = (1 + s / 2) / (1 - s / 2) * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return torch.stack(ys, 1)


@alike(scan, lambda: (T(2, S, 24), F.softplus(T(2, S, 24)), T(2, S, 8), T(2, S, 8)))
class DropsSome(Rates):
    """Numbers are drawn in the loop where it trains."""

    def forward(self, u, dt, b, c):
        a, h, ys = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), []
        for t in range(u.shape[1]):
            h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append(F.dropout((h * c[:, t, None]).sum(-1), 0.5, self.training))
        return torch.stack(ys, 1)


@alike(scan)
class TwoStates(Rates):
    """A second state keeps the largest."""

    def forward(self, u, dt, b, c):
        a, h, top, ys = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), u.new_zeros(u.shape[0], 24), []
        for t in range(u.shape[1]):
            h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            top = torch.maximum(top, (h * c[:, t, None]).sum(-1))
            ys.append(top)
        return torch.stack(ys, 1)


@alike(scan)
class WritesGiven(Rates):
    """It writes over what it is given."""

    def forward(self, u, dt, b, c):
        a, h, ys = -self.A_log.exp(), u.new_zeros(u.shape[0], 24, 8), []
        for t in range(u.shape[1]):
            row = u[:, t]
            if not torch.is_grad_enabled():
                row.mul_(0.5)
            h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * row)[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return torch.stack(ys, 1)
'''
