"""The fourth set of right modules: linear layers, gated layers, activations."""

from __future__ import annotations

LAYERS = r'''
W = 48


# ---- linears
@case("linear", lambda c: (c(W, 2 * W), T(2, 5, W)))
class Kernel(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(i, o) * 0.1)
        self.offset = nn.Parameter(torch.randn(o))

    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.offset


@case("linear", lambda c: (c(W, 2 * W), T(2, 5, W)))
class Flat(nn.Module):
    def __init__(self, nx, nf):
        super().__init__()
        self.nf = nf
        self.w = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.b = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        out = torch.addmm(self.b, x.reshape(-1, x.size(-1)), self.w)
        return out.reshape(*x.shape[:-1], self.nf)


@case("linear", lambda c: (c(W, 4, 16), T(2, 5, W)))
class HeadedProjection(nn.Module):
    def __init__(self, n, h, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, h, d) * 0.1)

    def forward(self, x):
        return torch.einsum("btn,nhd->bthd", x, self.w)


@case("linear", lambda c: (c(4, 16, W), T(2, 5, 4, 16)))
class HeadedOut(nn.Module):
    def __init__(self, h, d, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(h, d, n) * 0.1)

    def forward(self, y):
        return torch.tensordot(y, self.w, dims=2)


@case("linear", lambda c: (c(W, W), T(2, 5, W)))
class Adapted(nn.Module):
    def __init__(self, i, o, rank=4):
        super().__init__()
        self.base = nn.Linear(i, o)
        self.down = nn.Parameter(torch.randn(rank, i) * 0.1)
        self.up = nn.Parameter(torch.randn(o, rank) * 0.1)
        self.gain = 2.0

    def forward(self, x):
        return self.base(x) + (x @ self.down.T) @ self.up.T * self.gain


@case("linear", lambda c: (c(W), T(2, 5, W)))
class ThreeInOne(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.q = nn.Parameter(torch.randn(n, n) * 0.1)
        self.k = nn.Parameter(torch.randn(n // 2, n) * 0.1)
        self.v = nn.Parameter(torch.randn(n // 2, n) * 0.1)

    def forward(self, x):
        y = F.linear(x, torch.cat([self.q, self.k, self.v], dim=0))
        return y.split([self.q.shape[0], self.k.shape[0], self.v.shape[0]], dim=-1)


@case("linear", lambda c: (c(W, 32), T(2, 5, W)))
class NormedWeight(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.direction = nn.Parameter(torch.randn(o, i))
        self.length = nn.Parameter(torch.rand(o, 1) + 0.5)

    def forward(self, x):
        w = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return F.linear(x, w)


@case("linear", lambda c: (c(), T(2, 5, W)))
class Parametrised(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(W, 32))

    def forward(self, x):
        return self.inner(x)


@case("linear", lambda c: (c(W, 32), T(2, W, 6)))
class PointConv(nn.Module):
    """On channels first: what speech code has."""

    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, x):
        return self.lin(x.transpose(1, 2)).transpose(1, 2)


# ---- MLPs
@case("silu_mul", lambda c: (c(W, 96), T(2, 5, W)))
class ThreeMats(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.w1, self.w3 = nn.Linear(n, h, bias=False), nn.Linear(n, h, bias=False)
        self.w2 = nn.Linear(h, n, bias=False)

    def forward(self, x):
        return self.w2(self.w3(x) * F.silu(self.w1(x)))


@case("silu_mul", lambda c: (c(W, 96), T(2, 5, W)))
class Packed(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.inp = nn.Parameter(torch.randn(n, 2 * h) * 0.1)
        self.out = nn.Parameter(torch.randn(h, n) * 0.1)

    def forward(self, x):
        up, gate = (x @ self.inp).tensor_split(2, dim=-1)
        return (up * (gate * gate.sigmoid())) @ self.out


@case("silu_mul", lambda c: (c(W, 96), T(2, 5, W)))
class Zipped(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.fc = nn.Linear(n, 2 * h)
        self.proj = nn.Linear(h, n)

    def forward(self, x):
        y = self.fc(x)
        gate, up = y[..., ::2], y[..., 1::2]
        return self.proj(F.silu(gate) * up)


@case("silu_mul", lambda c: (c(W, 64), T(2, 5, W)))
class Zipped2(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.fc = nn.Linear(n, 2 * h, bias=False)
        self.proj = nn.Linear(h, n, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).unflatten(-1, (2, -1)).unbind(-2)
        return self.proj(gate / (1 + torch.exp(-gate)) * up)


@case("gelu_mul", lambda c: (c(W, 96), T(2, 5, W)))
class TanhGate(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n, h), nn.Linear(n, h), nn.Linear(h, n)

    def forward(self, x):
        g = self.a(x)
        g = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        return self.c(g * self.b(x))


@case("gelu_mul", lambda c: (c(W, 96), T(2, 5, W)))
class Geglu(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(n, 2 * h), nn.Dropout(0.0), nn.Linear(h, n)])

    def forward(self, x):
        enter, drop, leave = self.net
        a, b = enter(x).chunk(2, dim=-1)
        return leave(drop(a * F.gelu(b)))


@case("bias_act", lambda c: (c(W, 96), T(2, 5, W)))
class Reglu(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.g, self.u, self.d = (nn.Linear(*s, bias=False) for s in ((n, h), (n, h), (h, n)))

    def forward(self, x):
        return self.d(self.g(x).clamp_min(0) * self.u(x))


@case("bias_act", lambda c: (c(W, 96), T(2, 5, W)))
class NewGelu(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(n, h), nn.Linear(h, n)

    def forward(self, x):
        x = self.c_fc(x)
        x = 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))
        return self.c_proj(x)


@case("bias_act", lambda c: (c(W, 96), T(2, 5, W)))
class Squared(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.key = nn.Linear(n, h, bias=False)
        self.value = nn.Linear(h, n, bias=False)

    def forward(self, x):
        return self.value(torch.relu(self.key(x)) ** 2)


@case("bias_act", lambda c: (c(W, 96), T(2, 5, W)))
class Quick(nn.Sequential):
    class Act(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    def __init__(self, n, h):
        super().__init__(nn.Linear(n, h), self.Act(), nn.Linear(h, n))


ACTS = {"mish": F.mish, "silu": F.silu, "erf": lambda t: t * 0.5 * (1 + torch.erf(t / math.sqrt(2)))}


@case("bias_act", lambda c: (c(W, 96, "erf"), T(2, 5, W)))
class ByTable(nn.Module):
    def __init__(self, n, h, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(n, h), nn.Linear(h, n), act

    def forward(self, x):
        return self.second(ACTS[self.act](self.first(x)))


@case("linear", lambda c: (c(W, 96, "mish"), T(2, 5, W)))
class ByName(nn.Module):
    def __init__(self, n, h, act):
        super().__init__()
        self.first, self.second = nn.Linear(n, h), nn.Linear(h, n)
        self.fn = getattr(F, act)

    def forward(self, x):
        return self.second(self.fn(self.first(x)))


@case("bias_act", lambda c: (c([W, 96, 96, W]), T(6, W)))
class Tower(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.ws = nn.ParameterList(torch.randn(o, i) * 0.1 for i, o in zip(widths, widths[1:]))
        self.bs = nn.ParameterList(torch.randn(o) for o in widths[1:])

    def forward(self, x):
        for i, (w, b) in enumerate(zip(self.ws, self.bs)):
            x = x @ w.t() + b
            if i + 1 < len(self.ws):
                x = F.leaky_relu(x, 0.1)
        return x


@case("bias_act", lambda c: (c(W, 64), T(2, 5, W)))
class Clamped(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.up, self.down = nn.Linear(n, 2 * h), nn.Linear(h, n)

    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return self.down(g * torch.sigmoid(1.702 * g) * (u + 1))


@case("silu_mul", lambda c: (c(W, 64), T(2, 5, W)))
class Checkpointed(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(n, h), nn.Linear(n, h), nn.Linear(h, n)
        self.save_memory = True

    def _inner(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        if self.save_memory and self.training:
            return torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=False)
        return self._inner(x)


@case("bias_act", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class Gate(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Linear(n, n)
        self.o = nn.Linear(n, n)

    def forward(self, x, y):
        return self.o(torch.sigmoid(self.g(x)) * y)


@case("linear", lambda c: (c(W, 64), T(2, 5, W)))
class PlainGlu(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.a, self.b = nn.Linear(n, 2 * h), nn.Linear(h, n)

    def forward(self, x):
        return self.b(F.glu(self.a(x), dim=-1))


@case("linear", lambda c: (c(W, 64), T(2, 6, W)))
class Chunked(nn.Module):
    """A chunk of the rows at a time, for memory."""

    def __init__(self, n, h, rows=4):
        super().__init__()
        self.rows = rows
        self.body = nn.Sequential(nn.Linear(n, h), nn.GELU(approximate="tanh"), nn.Linear(h, n))

    def forward(self, x):
        return torch.cat([self.body(part) for part in x.split(self.rows, dim=1)], dim=1)
'''
