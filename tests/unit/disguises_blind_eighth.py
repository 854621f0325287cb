# ruff: noqa: E501
"""The eighth set: layers, heads, routers, scans and losses, written without a look at the porting code."""

from __future__ import annotations

EIGHTH = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40


# ---- norms
@case("rms_norm", lambda c: (c(W), T(3, S, W)))
class EightRms(nn.Module):
    """The mean of squares by a vector norm."""

    def __init__(self, size):
        super().__init__()
        self.size, self.eps = size, 1e-5
        self.g = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, hidden):
        ms = hidden.float().square().sum(-1, keepdim=True) / self.size
        return (hidden.float() * torch.rsqrt(ms + self.eps)).type_as(hidden) * self.g


@case("layer_norm", lambda c: (c(W), T(3, W, S)))
class EightChannelsFirst(nn.Module):
    """A layer norm over the second dimension."""

    def __init__(self, channels):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        x = x.permute(0, 2, 1)
        x = F.layer_norm(x, self.gamma.shape, self.gamma, self.beta, 1e-5)
        return x.permute(0, 2, 1)


@case("layer_norm", lambda c: (c(W), T(3, S, W), T(3, 2 * W)))
class EightModulated(nn.Module):
    """A norm without weights, then a shift and a scale of the condition."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x, cond):
        shift, scale = cond.chunk(2, dim=1)
        return self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@case("group_norm", lambda c: (c(32), T(2, 32, 12)))
class EightGroups(nn.Module):
    """Group norm of a sequence by a view."""

    def __init__(self, ch, groups=8):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.rand(ch)), nn.Parameter(torch.randn(ch))

    def forward(self, x):
        b, c, t = x.shape
        y = x.reshape(b, self.groups, -1)
        mean = y.mean(-1, keepdim=True)
        var = y.var(-1, unbiased=False, keepdim=True)
        y = ((y - mean) / torch.sqrt(var + 1e-5)).view(b, c, t)
        return y * self.weight[None, :, None] + self.bias[None, :, None]


@case("gated_rms_norm", lambda c: (c(W), T(3, S, W), T(3, S, W)))
class EightGatedNorm(nn.Module):
    """Mamba2's: the gate is first."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, y, z):
        dtype = y.dtype
        y = y.float() * F.silu(z.float())
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(dtype)


@case("add_rms_norm", lambda c: (c(W), T(3, S, W), T(3, S, W)))
class EightAdded(nn.Module):
    """A residual stream and its norm."""

    def __init__(self, n):
        super().__init__()
        self.norm = nn.RMSNorm(n, eps=1e-6)

    def forward(self, branch, stream):
        stream = stream + branch
        return self.norm(stream), stream


# ---- MLPs
@case("silu_mul", lambda c: (c(W), T(3, S, W)))
class EightSwiglu(nn.Module):
    """One matrix for both; the second half is the gate."""

    def __init__(self, dim, ffn=2 * W):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * ffn, bias=False)
        self.w3 = nn.Linear(ffn, dim, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        value, gate = self.w12(x).tensor_split(2, dim=-1)
        return self.drop(self.w3(value * F.silu(gate)))


@case("gelu_mul", lambda c: (c(W), T(3, S, W)))
class EightGeglu(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(d, 96), nn.Linear(d, 96), nn.Linear(96, d)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        h = self.act(self.gate(x)).mul_(self.up(x))
        return self.down(h)


@case("bias_act", lambda c: (c(W), T(3, S, W)))
class EightSquared(nn.Module):
    """The activation is chosen by a table of functions."""

    ACTS = {"gelu": F.gelu, "silu": F.silu}

    def __init__(self, d, act="gelu"):
        super().__init__()
        self.fc = nn.Linear(d, 4 * d)
        self.proj = nn.Linear(4 * d, d)
        self.act = act

    def forward(self, x):
        return self.proj(self.ACTS[self.act](self.fc(x)))


@case("linear", lambda c: (c(W, 3), T(3, S, W)))
class EightLora(nn.Module):
    """A frozen matrix and a low-rank one beside it."""

    def __init__(self, d, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / 8, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, d) / 8), nn.Parameter(torch.randn(d, rank) / 2)
        self.scaling = 16 / rank

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b) * self.scaling


# ---- rope
@case("rope", lambda c: (c(D), T(2, S, H, D), T(2, S, H, D)))
class EightRotary(nn.Module):
    """A cache of tables by length, in a dictionary of its own."""

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.tables = {}

    def _table(self, n, device):
        if n not in self.tables:
            freq = self.base ** (-torch.arange(0, self.dim, 2, device=device).float() / self.dim)
            angle = torch.arange(n, device=device).float()[:, None] * freq
            self.tables[n] = angle.cos()[:, None], angle.sin()[:, None]
        return self.tables[n]

    def _turn(self, t, cos, sin):
        x, y = t.float().chunk(2, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(t.dtype)

    def forward(self, q, k):
        cos, sin = self._table(q.shape[1], q.device)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)


@case("rope", lambda c: (c(), T(2, H, S, D), torch.rand(S, D // 2) * 6))
class EightComplex(nn.Module):
    """Llama's own: numbers of the complex plane."""

    def forward(self, x, angle):
        turn = torch.polar(torch.ones_like(angle), angle)
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * turn).flatten(-2).type_as(x)


# ---- attention
@case("attention", lambda c: (c(), T(2, S, W)))
class EightGrouped(nn.Module):
    """Keys and values of two heads, repeated; scores by einsum."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(W, W), nn.Linear(W, 2 * 2 * D), nn.Linear(W, W)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, H, D)
        k, v = self.kv(x).view(b, s, 2, 2, D).unbind(2)
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, s, W))


@case("attention", lambda c: (c(), T(2, S, W), T(2, 5, W)))
class EightCross(nn.Module):
    """Attention to another sequence, by PyTorch's function, with a norm of queries and keys."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(W, W, bias=False) for _ in range(3))
        self.norm_q, self.norm_k = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, context):
        split = lambda t: t.unflatten(-1, (H, D)).transpose(1, 2)
        q, k, v = split(self.to_q(x)), split(self.to_k(context)), split(self.to_v(context))
        out = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        return out.transpose(1, 2).flatten(2)


@case("attention", lambda c: (c(), T(2, S, W)))
class EightAlibi(nn.Module):
    """Slopes of heads by distance, in one mask with what is hidden."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1).float())

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, H, D).permute(2, 0, 3, 1, 4)
        at = torch.arange(s, device=x.device)
        bias = (at[None] - at[:, None]).float() * self.slopes[:, None, None]
        bias = bias.masked_fill(at[None] > at[:, None], float("-inf"))
        w = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D) + bias, dim=-1)
        return (w @ v).transpose(1, 2).reshape(b, s, W)


# ---- routers and experts
@case("moe_experts", lambda c: (c(), T(2, S, W)))
class EightExperts(nn.Module):
    """A router and experts whose weights are stacked."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, W) / 8)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x):
        rows = x.view(-1, W)
        logits = F.linear(rows.float(), self.router.float())
        weight, index = torch.topk(torch.softmax(logits, -1), K, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(rows)
        for e in range(E):
            row, slot = torch.where(index == e)
            if row.numel() == 0:
                continue
            gate, up = F.linear(rows[row], self.w1[e]).chunk(2, -1)
            result.index_add_(0, row, F.linear(F.silu(gate) * up, self.w2[e]) * weight[row, slot].unsqueeze(-1))
        return result.view_as(x)


@case("gate_topk", lambda c: (c(), T(11, W)))
class EightGate(nn.Module):
    """Sigmoid scores, a bias that only chooses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, W) / 8)
        self.register_buffer("e_score_correction_bias", torch.randn(8) / 10)

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        _, ids = torch.topk(scores + self.e_score_correction_bias, 3, dim=-1)
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


# ---- convolutions, scans
@case("causal_conv1d", lambda c: (c(W), T(2, S, W)))
class EightConv(nn.Module):
    """A causal convolution of each channel, cut to its length."""

    def __init__(self, d, width=4):
        super().__init__()
        self.conv = nn.Conv1d(d, d, width, groups=d, padding=width - 1, bias=True)

    def forward(self, x):
        n = x.shape[1]
        return F.silu(self.conv(x.transpose(1, 2))[..., :n].transpose(1, 2))


@case("selective_scan", lambda c: (c(), T(2, S, 24)))
class EightMamba(nn.Module):
    """S6 as a loop over time."""

    def __init__(self, d=24, n=8):
        super().__init__()
        self.a_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.skip = nn.Parameter(torch.ones(d))
        self.bcd, self.dt = nn.Linear(d, 2 * n + 3, bias=False), nn.Linear(3, d)

    def forward(self, u):
        n = self.a_log.shape[1]
        dt, b, c = self.bcd(u).split([3, n, n], -1)
        dt = F.softplus(self.dt(dt))
        a = -torch.exp(self.a_log)
        h = u.new_zeros(u.shape[0], u.shape[2], n)
        ys = []
        for t in range(u.shape[1]):
            h = torch.exp(dt[:, t, :, None] * a) * h + dt[:, t, :, None] * b[:, t, None, :] * u[:, t, :, None]
            ys.append((h * c[:, t, None, :]).sum(-1))
        return torch.stack(ys, 1) + u * self.skip


@case("gated_delta_rule", lambda c: (c(), T(2, S, W)))
class EightDelta(nn.Module):
    """A linear attention with the delta rule, as a loop over time in its forward."""

    def __init__(self):
        super().__init__()
        self.qkv, self.ba, self.o = nn.Linear(W, 3 * W), nn.Linear(W, 2 * H), nn.Linear(W, W)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, H, D) for t in self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1) * D**-0.5, F.normalize(k, dim=-1)
        beta, a = self.ba(x).chunk(2, -1)
        beta, g = beta.sigmoid(), -F.softplus(a)
        state = torch.zeros(b, H, D, D, dtype=x.dtype, device=x.device)
        outs = []
        for t in range(s):
            state = state * g[:, t, :, None, None].exp()
            old = (state * k[:, t, :, :, None]).sum(-2)
            new = (v[:, t] - old) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * new[:, :, None, :]
            outs.append((state * q[:, t, :, :, None]).sum(-2))
        return self.o(torch.stack(outs, 1).reshape(b, s, W))


@case("ssd_scan", lambda c: (c(), T(2, S, W)))
class EightSsd(nn.Module):
    """Mamba2's scan in a method of its own, by steps."""

    def __init__(self, n=8):
        super().__init__()
        self.n = n
        self.inp = nn.Linear(W, W + 2 * n + H)
        self.A_log, self.D, self.dt_bias = nn.Parameter(torch.rand(H)), nn.Parameter(torch.ones(H)), nn.Parameter(torch.rand(H))

    def _scan(self, x, dt, b, c):
        decay = torch.exp(-self.A_log.exp() * dt)
        state, ys = x.new_zeros(x.shape[0], H, D, self.n), []
        for i in range(x.shape[1]):
            fresh = torch.einsum("bh,bhp,bn->bhpn", dt[:, i], x[:, i], b[:, i])
            state = state * decay[:, i, :, None, None] + fresh
            ys.append(torch.einsum("bhpn,bn->bhp", state, c[:, i]))
        return torch.stack(ys, dim=1)

    def forward(self, u):
        x, b, c, dt = self.inp(u).split([W, self.n, self.n, H], dim=-1)
        x = x.unflatten(-1, (H, D))
        y = self._scan(x, F.softplus(dt + self.dt_bias), b, c) + self.D[:, None] * x
        return y.flatten(-2)


# ---- losses, embeddings
@case("cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))))
class EightHead(nn.Module):
    """A head and a loss of the next token; the loss is a child."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(W, V, bias=False)
        self.criterion = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, hidden, labels):
        logits = self.lm_head(hidden)[:, :-1]
        return self.criterion(logits.reshape(-1, V).float(), labels[:, 1:].reshape(-1))


@case("linear_cross_entropy", lambda c: (c(), T(12, W), torch.randint(V, (12,))))
class EightSummed(nn.Module):
    """Summed, smoothed, and divided by the number of rows."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(W, V)

    def forward(self, h, y):
        return F.cross_entropy(self.proj(h), y, reduction="sum", label_smoothing=0.1) / y.numel()


@case("embedding", lambda c: (c(), torch.randint(V, (2, S))))
class EightTokens(nn.Module):
    """Tokens scaled by the root of the width, beside positions."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, W), nn.Embedding(32, W)

    def forward(self, ids):
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.tok(ids) * W**0.5 + self.pos(at)
'''
