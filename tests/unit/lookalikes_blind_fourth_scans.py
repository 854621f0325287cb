"""Look-alikes of scans: functions that modules call, each with one thing in its loop changed."""

from __future__ import annotations

FOURTH_SCANS = r"""
def scanned(c):
    return c(), T(2, 8, 7), F.softplus(T(2, 8, 7)), -torch.rand(8, 4) - 0.1, T(2, 4, 7), T(2, 4, 7)


def longer(n):
    return lambda: (T(2, 8, n), F.softplus(T(2, 8, n)), -torch.rand(8, 4) - 0.1, T(2, 4, n), T(2, 4, n))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip = nn.Parameter(torch.linspace(-1, 1, 8))


def step(state, d, a, x, b):
    return torch.exp(d * a) * state + d * x * b


def outputfirst(u, dt, a, b, c, skip):
    "The output is of the state before the token."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        ys.append((state * c[:, None, :, t]).sum(-1))
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned)
class OutputFirst(Skip):
    def forward(self, u, dt, a, b, c):
        return outputfirst(u, dt, a, b, c, self.skip)


def noskip(u, dt, a, b, c, skip):
    "What is skipped is left out."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + 0.0 * u * skip[:, None]


@alike(scanned)
class NoSkip(Skip):
    def forward(self, u, dt, a, b, c):
        return noskip(u, dt, a, b, c, self.skip)


def euler(u, dt, a, b, c, skip):
    "A linear step in the place of an exponential."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        d = dt[:, :, t, None]
        state = (1 + d * a) * state + d * u[:, :, t, None] * b[:, None, :, t]
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned)
class Euler(Skip):
    def forward(self, u, dt, a, b, c):
        return euler(u, dt, a, b, c, self.skip)


def exact(u, dt, a, b, c, skip):
    "A held input, exactly: the drive is of (exp - 1) / a."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        e = torch.exp(dt[:, :, t, None] * a)
        state = e * state + (e - 1) / a * u[:, :, t, None] * b[:, None, :, t]
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned)
class Exact(Skip):
    def forward(self, u, dt, a, b, c):
        return exact(u, dt, a, b, c, self.skip)


def fromones(u, dt, a, b, c, skip):
    "The state begins with ones."
    state, ys = u.new_ones(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned)
class FromOnes(Skip):
    def forward(self, u, dt, a, b, c):
        return fromones(u, dt, a, b, c, self.skip)


def from_the_end(u, dt, a, b, c, skip):
    "From the last token to the first."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in reversed(range(u.shape[-1])):
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys[::-1], -1) + u * skip[:, None]


@alike(scanned)
class FromTheEnd(Skip):
    def forward(self, u, dt, a, b, c):
        return from_the_end(u, dt, a, b, c, self.skip)


def undriven(u, dt, a, b, c, skip):
    "The drive has no step."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        state = torch.exp(dt[:, :, t, None] * a) * state + u[:, :, t, None] * b[:, None, :, t]
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned)
class Undriven(Skip):
    def forward(self, u, dt, a, b, c):
        return undriven(u, dt, a, b, c, self.skip)


def forgetting(u, dt, a, b, c, skip):
    "Every twelfth token the state is forgotten."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        if t % 12 == 11:
            state = torch.zeros_like(state)
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned, longer(13), longer(50))
class Forgetting(Skip):
    def forward(self, u, dt, a, b, c):
        return forgetting(u, dt, a, b, c, self.skip)


def shortonly(u, dt, a, b, c, skip):
    "Tokens after the fortieth are of no state."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(min(u.shape[-1], 40)):
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t])
        ys.append((state * c[:, None, :, t]).sum(-1))
    y = torch.stack(ys, -1)
    return F.pad(y, (0, u.shape[-1] - y.shape[-1])) + u * skip[:, None]


@alike(scanned, longer(13), longer(50))
class ShortOnly(Skip):
    def forward(self, u, dt, a, b, c):
        return shortonly(u, dt, a, b, c, self.skip)


def clampedstate(u, dt, a, b, c, skip):
    "The state is bounded."
    state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
    for t in range(u.shape[-1]):
        state = step(state, dt[:, :, t, None], a, u[:, :, t, None], b[:, None, :, t]).clamp(-1e3, 1e3)
        ys.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(ys, -1) + u * skip[:, None]


@alike(scanned, lambda: tuple(t * 60 for t in longer(7)()[:1]) + longer(7)()[1:])
class ClampedState(Skip):
    def forward(self, u, dt, a, b, c):
        return clampedstate(u, dt, a, b, c, self.skip)
"""
