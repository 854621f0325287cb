# ruff: noqa: E501
"""Look-alikes of the fifteenth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

FIFTEENTH = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- norms of images and sequences
@alike(lambda c: (c(W), T(2, S, W), T(2, W)))
class AmDit(nn.Module):
    """The norm is over the tokens, and not over the columns, of a square input as well."""

    def __init__(self, dim):
        super().__init__()
        self.linear, self.ada = nn.Linear(dim, 16), nn.Linear(dim, 2 * dim)

    def forward(self, x, c):
        shift, scale = self.ada(F.silu(c)).chunk(2, dim=1)
        u = x.mean(1, keepdim=True)
        x = (x - u) * torch.rsqrt((x - u).square().mean(1, keepdim=True) + 1e-6)
        return self.linear(x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))


@alike(lambda c: (c(16), T(2, 16, 3, 4, 5)))
class AmFrames(nn.Module):
    """Groups are of whole videos: statistics are of all frames together, yet the variance is each frame's."""

    def __init__(self, channels, groups=4):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = x.reshape(b, self.groups, c // self.groups, t, h * w)
        mean = y.mean((2, 3, 4), keepdim=True)
        var = y.var((2, 4), keepdim=True, unbiased=False)
        y = ((y - mean) / torch.sqrt(var + 1e-6)).view_as(x)
        return y * self.weight.view(1, c, 1, 1, 1) + self.bias.view(1, c, 1, 1, 1)


@alike(lambda c: (c(24), T(3, 24, 20)))
class AmSeparator(nn.Module):
    """The variance is the one of a sample: one is taken from how many there are."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(1, channels, 1) + 0.5)
        self.beta = nn.Parameter(torch.randn(1, channels, 1))

    def forward(self, y):
        mean = y.mean(dim=(1, 2), keepdim=True)
        var = y.var(dim=(1, 2), keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + 1e-8, 0.5) + self.beta


@alike(lambda c: (c(), T(2, S, 48), T(2, S, 48)), lambda: (T(2, S, 48) * 3, T(2, S, 48) * 3))
class AmHeadGate(nn.Module):
    """The gate is normed, and what comes is what gates it, of a weight for all heads together."""

    def __init__(self, width=12):
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.rand(48) + 0.5)

    def forward(self, o, z):
        h = o.unflatten(-1, (-1, self.width)) * F.silu(z.unflatten(-1, (-1, self.width)))
        h = h * torch.rsqrt(o.unflatten(-1, (-1, self.width)).pow(2).mean(-1, keepdim=True) + 1e-2)
        return self.weight * h.flatten(-2)


# ---- feed-forwards and gates
@alike(lambda c: (c(W, 40), T(2, S, W)))
class AmPacked(nn.Module):
    """Columns are neighbours in the result, and halves in what is split: a view of the other order."""

    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.n = n_hidden
        self.w12, self.b12 = nn.Parameter(torch.randn(2 * n_hidden, n_in) / 8), nn.Parameter(torch.randn(2, n_hidden))
        self.w3 = nn.Linear(n_hidden, n_in)

    def forward(self, x):
        x1, x2 = F.linear(x, self.w12).unflatten(-1, (self.n, 2)).unbind(dim=-1)
        return self.w3(F.silu(x1 + self.b12[0]) * x2 + self.b12[1])


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 4,))
class AmEncoder(nn.Module):
    """The dropout is there without training too, of a rate that is nearly nothing, and the activation follows the gate."""

    def __init__(self):
        super().__init__()
        self.Wi, self.Wo = nn.Linear(W, 88, bias=False), nn.Linear(44, W, bias=False)

    def forward(self, x):
        a, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(F.gelu(a * gate))


@alike(lambda c: (c(), T(S, 2, W)), lambda: (T(S, 2, W) * 3,))
class AmBiasLater(nn.Module):
    """The cubic's factor is multiplied with the bias left out."""

    def __init__(self, inner=96):
        super().__init__()
        self.up, self.down = nn.Linear(W, inner, bias=False), nn.Linear(inner, W)
        self.bias = nn.Parameter(torch.randn(inner))

    def forward(self, x):
        y = self.up(x)
        z = y + self.bias
        return self.down(z * 0.5 * (1.0 + torch.tanh(0.79788456 * z * (1 + 0.044715 * y * y))))


# ---- convolutions
@alike(lambda c: (c(W), T(2, S, W)))
class AmShortGate(nn.Module):
    """What is padded is padded on both sides alike: a token is read before its time."""

    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, kernel_size=3, groups=dim, bias=False, padding=1)
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, C, x = self.in_proj(x).transpose(-1, -2).chunk(3, dim=-2)
        y = C * self.conv(B * x)[..., : x.shape[-1]]
        return self.out_proj(y.transpose(-1, -2).contiguous())


@alike(lambda c: (c(32), T(2, S, 32)))
class AmLeftPad(nn.Module):
    """The first token is repeated on the left, where zeros are padded elsewhere."""

    def __init__(self, width, k=4):
        super().__init__()
        self.k, self.conv = k, nn.Conv1d(width, width, k, groups=width)

    def forward(self, x):
        x = F.pad(x.movedim(-1, -2), (self.k - 1, 0), mode="replicate")
        return F.silu(self.conv(x).movedim(-2, -1))


# ---- routers and experts
@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 6,))
class AmBiasedSoft(nn.Module):
    """The bias is in the weights too, and not in the choice alone."""

    def __init__(self, n=6, k=3):
        super().__init__()
        self.k, self.weight = k, nn.Parameter(torch.randn(n, W) / 8)
        self.register_buffer("bias", torch.randn(n) / 20)

    def forward(self, x):
        shares = F.softmax(F.linear(x.reshape(-1, W).float(), self.weight.float()), dim=-1) + self.bias
        w, idx = torch.topk(shares, self.k, dim=-1)
        return idx, (w / torch.clamp(w.sum(-1, keepdim=True), min=1e-12)).to(x.dtype)


@alike(lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class AmParallel(nn.Module):
    """Gates stay in the order of tokens, though rows are in the order of experts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 5)

    def forward(self, x, index, gates):
        flat = index.flatten()
        order = flat.sort(stable=True)[1]
        at = order.div(K, rounding_mode="trunc")
        sizes = torch.bincount(flat, minlength=E).tolist()
        h = torch.cat([F.linear(p, self.a[i]) for i, p in enumerate(x[at].split(sizes))])
        g, u = h.chunk(2, dim=-1)
        y = torch.cat([F.linear(p, self.b[i]) for i, p in enumerate((F.silu(g) * u).split(sizes))])
        return torch.zeros_like(x).index_add(0, at, (y * gates.flatten()[:, None]).to(x.dtype))


# ---- losses
@alike(
    lambda c: (c(), T(2, 12, V), torch.randint(V, (2, 12)).masked_fill(torch.arange(12) < 3, -100)),
    lambda: (T(2, 12, V), torch.full((2, 12), -100)),
)
class AmChunks(nn.Module):
    """The mean of each part's mean, though fewer count in the first part."""

    def forward(self, logits, labels):
        total = 0.0
        for part, wanted in zip(logits.chunk(4, dim=1), labels.chunk(4, dim=1)):
            loss = F.cross_entropy(part.float().flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
            total = total + loss / (wanted != -100).sum().clamp(min=1)
        return total / 4


@alike(
    lambda c: (c(), T(2, S, V), torch.randint(V, (2, S)).masked_fill(torch.arange(S) > 8, -100)),
    lambda: (T(2, S, V), torch.full((2, S), -100)),
)
class AmSmoother(nn.Module):
    """What is smoothed has a share for padded rows too, whose labels do not count."""

    def forward(self, logits, labels):
        log_probs = -F.log_softmax(logits.float(), dim=-1)
        pad = labels.eq(-100)
        nll = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(pad, 0.0)
        n = pad.numel() - pad.sum()
        return 0.9 * nll.sum() / n + 0.1 * log_probs.sum() / (n * log_probs.shape[-1])


# ---- scans
@alike(lambda c: (c(32), T(2, S, 32)))
class AmMinimal(nn.Module):
    """The state is read before the token's own part is added."""

    def __init__(self, d_inner, rank=4, n=6):
        super().__init__()
        self.split = [rank, n, n]
        self.x_proj, self.dt_proj = nn.Linear(d_inner, rank + 2 * n, bias=False), nn.Linear(rank, d_inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(d_inner, 1)))
        self.D = nn.Parameter(torch.ones(d_inner))

    def forward(self, u):
        A = -torch.exp(self.A_log)
        delta, B, C = self.x_proj(u).split(self.split, dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        x, ys = u.new_zeros(u.shape[0], *A.shape), []
        for i in range(u.shape[1]):
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i]))
            x = torch.exp(delta[:, i, :, None] * A) * x + delta[:, i, :, None] * B[:, i, None] * u[:, i, :, None]
        return torch.stack(ys, dim=1) + u * self.D
'''
