# ruff: noqa: E501
"""The ninth set: layers of language, speech, diffusion and vision, written without a look at the porting code."""

from __future__ import annotations

NINTH = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40


# ---- norms
@case("layer_norm", lambda c: (c(W, eps=1e-5), T(3, S, W)))
class NineVarMean(nn.Module):
    """Mean and variance in one call; weights in a dictionary; the epsilon by keyword only."""

    def __init__(self, width, *, eps):
        super().__init__()
        self.eps = eps
        self.w = nn.ParameterDict({"scale": nn.Parameter(torch.rand(width) + 0.5), "shift": nn.Parameter(torch.randn(width))})

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return torch.addcmul(self.w["shift"], (x - mean) * (var + self.eps).rsqrt(), self.w["scale"])


@case("rms_norm", lambda c: (c(W), T(3, S, W)))
class NineReciprocal(nn.Module):
    """A subclass that overrides a hook of its base; the root is divided into one."""

    class Base(nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), eps

        def statistic(self, x):
            raise NotImplementedError

        def forward(self, x):
            y = x.to(torch.float32)
            return (self.weight * (y * self.statistic(y)).to(x.dtype)).contiguous()

    class Kind(Base):
        def statistic(self, x):
            return 1.0 / torch.sqrt(torch.einsum("...d,...d->...", x, x).unsqueeze(-1) / x.shape[-1] + self.eps)

    def __init__(self, size):
        super().__init__()
        self.norm = self.Kind(size)

    def forward(self, x):
        return self.norm(x)


@case("layer_norm", lambda c: (c(W), T(2, W, 2, 2)))
class NineImageNorm(nn.Module):
    """A layer norm of channels of an image, by hand."""

    def __init__(self, c):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.rand(1, c, 1, 1) + 0.5), nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x):
        mu = x.mean(dim=1, keepdim=True)
        var = (x - mu).pow(2).mean(dim=1, keepdim=True)
        return (x - mu) / (var + 1e-6).sqrt() * self.gain + self.bias


# ---- language
@case("silu_mul", lambda c: (c(W, 96), T(3, S, W)))
class NineUnbound(nn.Module):
    """Gate and up of one matrix, unflattened into two."""

    def __init__(self, d, inner):
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 2 * inner, bias=False), nn.Linear(inner, d, bias=False)

    def forward(self, x):
        g, u = self.gate_up(x).unflatten(-1, (2, -1)).unbind(dim=-2)
        return self.down(u * (g * torch.sigmoid(g)))


def nine_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@case("gelu_mul", lambda c: (c(), T(3, S, W)))
class NineGatedTanh(nn.Module):
    """T5's gated layer, with a function of its own, a residual and a norm before."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(W, eps=1e-6)
        self.wi_0, self.wi_1, self.wo = nn.Linear(W, 80, bias=False), nn.Linear(W, 80, bias=False), nn.Linear(80, W, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        h = self.norm(x)
        h = nine_gelu(self.wi_0(h)) * self.wi_1(h)
        return x + self.dropout(self.wo(self.dropout(h)))


@case("rope", lambda c: (c(D), T(2, S, H, D), T(2, S, 2, D)))
class NinePartial(nn.Module):
    """Half of a head's width is turned; positions start anywhere; arguments by keyword only."""

    def __init__(self, dim):
        super().__init__()
        self.rot = dim // 2
        inv = 1.0 / (10000 ** (torch.arange(0, self.rot, 2).float() / self.rot))
        self.register_buffer("inv_freq", inv, persistent=False)

    def tables(self, length, *, offset=0):
        t = torch.arange(offset, offset + length, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[None, :, None, :], emb.sin()[None, :, None, :]

    def turn(self, x, cos, sin):
        head, tail = x[..., : self.rot], x[..., self.rot :]
        a, b = head.chunk(2, dim=-1)
        return torch.cat((head * cos + torch.cat((-b, a), dim=-1) * sin, tail), dim=-1)

    def forward(self, q, k):
        cos, sin = self.tables(q.size(1), offset=3)
        return self.turn(q, cos, sin), self.turn(k, cos, sin)


@case("rope", lambda c: (c(), T(2, H, S, D)))
class NineInterleaved(nn.Module):
    """Neighbours are turned, as GPT-J does."""

    def __init__(self):
        super().__init__()
        angle = torch.outer(torch.arange(32).float(), 1.0 / 10000 ** (torch.arange(0, D, 2) / D))
        self.register_buffer("sincos", torch.cat((angle.sin(), angle.cos()), dim=-1))

    def forward(self, x):
        sin, cos = self.sincos[: x.shape[-2]].chunk(2, dim=-1)
        sin, cos = sin.repeat_interleave(2, dim=-1), cos.repeat_interleave(2, dim=-1)
        swapped = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + swapped * sin


@case("attention", lambda c: (c(), T(2, S, W), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])))
class NinePaddedCausal(nn.Module):
    """GPT-2's: a triangle of its own beside a padding mask that is added."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32), persistent=False)

    def split(self, t):
        return t.view(*t.shape[:-1], H, D).transpose(1, 2)

    def forward(self, x, attention_mask):
        q, k, v = map(self.split, self.c_attn(x).split(W, dim=2))
        w = torch.matmul(q, k.transpose(-1, -2)) / (D**0.5)
        low = torch.finfo(w.dtype).min
        w = torch.where(self.bias[:, :, : w.size(-2), : w.size(-1)], w, torch.full([], low, dtype=w.dtype, device=w.device))
        w = w + (1.0 - attention_mask[:, None, None, :].to(w.dtype)) * low
        y = torch.matmul(F.softmax(w, dim=-1), v)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


@case("attention", lambda c: (c(), T(2, S, W)))
class NineSliding(nn.Module):
    """A window of four keys, with norms of queries and keys; weights are given, too."""

    def __init__(self, window=4):
        super().__init__()
        self.window = window
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.qn, self.kn = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).reshape(b, s, H, D) for p in (self.wq, self.wk, self.wv))
        q, k = self.qn(q), self.kn(k)
        i = torch.arange(s, device=x.device)
        far = i[:, None] - i[None, :]
        keep = (far >= 0) & (far < self.window)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=keep)
        return self.wo(out.transpose(1, 2).flatten(2))


@case("gate_topk", lambda c: (c(), T(2, S, W)))
class NineSigmoidGate(nn.Module):
    """Sigmoids that choose with a correction, weights of the chosen without it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)
        self.register_buffer("correction", torch.randn(E) / 10)

    def forward(self, x):
        scores = F.linear(x.reshape(-1, W).float(), self.weight.float()).sigmoid()
        chosen = torch.topk(scores + self.correction, K, dim=-1, sorted=False).indices
        w = scores.gather(1, chosen)
        return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, chosen


@case("moe_experts", lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class NineStacked(nn.Module):
    """Experts of stacked weights; each expert's tokens by where."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            g, u = F.linear(x[rows], self.w_in[e]).chunk(2, dim=-1)
            out.index_add_(0, rows, F.linear(F.silu(g) * u, self.w_out[e]) * weights[rows, slot].unsqueeze(-1))
        return out


@case("cross_entropy", lambda c: (c(), T(2, S, V), torch.randint(V, (2, S))))
class NineZLoss(nn.Module):
    """A loss and the square of its normaliser beside, as two results."""

    def forward(self, logits, labels, *, z=1e-4):
        flat = logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(flat, labels[:, 1:].flatten())
        return loss, z * flat.logsumexp(-1).square().mean()


@case("cross_entropy", lambda c: (c(), T(12, V), torch.randint(V, (12,))))
class NineSmooth(nn.Module):
    """Fairseq's smoothed loss, by hand, of log-probabilities."""

    def forward(self, logits, target, s=0.1):
        logp = F.log_softmax(logits, dim=-1)
        nll = -logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
        return ((1 - s) * nll - s * logp.mean(-1)).mean()


@case("embedding", lambda c: (c(), torch.randint(V, (2, S))))
class NineTied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, W, padding_idx=0)
        self.ln = nn.LayerNorm(W)

    def forward(self, ids):
        return F.linear(self.ln(self.wte(ids)), self.wte.weight)


# ---- speech
@case("bias_act", lambda c: (c(), T(2, S, W)))
class NineHalfFeed(nn.Module):
    """Conformer's half step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(W), nn.Linear(W, 128), nn.SiLU(), nn.Dropout(0.1), nn.Linear(128, W), nn.Dropout(0.1))

    def forward(self, x):
        return x + 0.5 * self.net(x)


@case("layer_norm", lambda c: (c(), T(2, S, W), torch.arange(S)[None] >= torch.tensor([[9], [6]])))
class NineConvModule(nn.Module):
    """Conformer's convolution: GLU, a depthwise convolution, a norm of channels; padding is zeroed."""

    def __init__(self, kernel=5):
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.pw1, self.pw2 = nn.Conv1d(W, 2 * W, 1), nn.Conv1d(W, W, 1)
        self.dw = nn.Conv1d(W, W, kernel, padding=kernel // 2, groups=W)
        self.bn = nn.BatchNorm1d(W)

    def forward(self, x, pad):
        y = self.norm(x).mT
        y = F.glu(self.pw1(y), dim=1).masked_fill(pad.unsqueeze(1), 0.0)
        y = F.silu(self.bn(self.dw(y)))
        return x + self.pw2(y).mT


@case("causal_conv1d", lambda c: (c(W), T(2, S, W)))
class NineShortConv(nn.Module):
    """A causal depthwise convolution of tokens, padded to the left, with an activation and a mask of none."""

    def __init__(self, d, width=4):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d, 1, width) / 2), nn.Parameter(torch.randn(d) / 4)

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        y = F.pad(x.transpose(1, 2), (self.weight.shape[-1] - 1, 0))
        y = F.conv1d(y, self.weight, self.bias, groups=y.shape[1])
        return F.silu(y).transpose(1, 2)


@case("linear", lambda c: (c(), T(3, S, W)))
class NineWeightNorm(nn.Module):
    """A matrix in a direction and a length."""

    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(96, W)), nn.Parameter(torch.rand(96, 1) + 0.5)
        self.bias = nn.Parameter(torch.randn(96))

    def forward(self, x):
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True), self.bias)


@case("bias_act", lambda c: (c(), T(2, W, S)))
class NineSqueeze(nn.Module):
    """A squeeze over time, and a gate of each channel."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(W, 16), nn.Linear(16, W)

    def forward(self, x):
        s = x.mean(dim=2)
        s = torch.sigmoid(self.fc2(F.relu(self.fc1(s))))
        return x * s[:, :, None]


# ---- diffusion
@case("layer_norm", lambda c: (c(), T(2, S, W), T(2, W)))
class NineAdaZero(nn.Module):
    """DiT's block of an MLP: shift, scale and a gate of the condition."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W, elementwise_affine=False, eps=1e-6)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(W, 3 * W))
        self.mlp = nn.Sequential(nn.Linear(W, 128), nn.GELU(approximate="tanh"), nn.Linear(128, W))

    @staticmethod
    def modulate(x, *, shift, scale):
        return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))

    def forward(self, x, c):
        shift, scale, gate = self.ada(c).chunk(3, dim=-1)
        return x + gate.unsqueeze(1) * self.mlp(self.modulate(self.norm(x), shift=shift, scale=scale))


@case("group_norm", lambda c: (c(), T(2, 32, 6, 5), T(2, W)))
class NineResnet(nn.Module):
    """A block of a U-net: a norm and a swish by hand, a convolution, the time's embedding."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, 32, eps=1e-6), nn.GroupNorm(8, 32, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.emb = nn.Linear(W, 32)

    def swish(self, x):
        return x * torch.sigmoid(x)

    def forward(self, x, temb):
        h = self.conv1(self.swish(self.norm1(x)))
        h = h + self.emb(self.swish(temb))[:, :, None, None]
        return x + self.conv2(self.swish(self.norm2(h)))


@case("bias_act", lambda c: (c(), torch.rand(5) * 1000))
class NineTime(nn.Module):
    """Sines and cosines of a step, and two layers."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(W, 128), nn.Linear(128, W)

    def forward(self, t):
        freq = torch.exp(-math.log(10000.0) * torch.arange(W // 2, device=t.device, dtype=torch.float32) / (W // 2))
        a = t[:, None].float() * freq[None]
        return self.lin2(F.silu(self.lin1(torch.cat([a.cos(), a.sin()], dim=-1))))


@case("attention", lambda c: (c(), T(2, 12, W), T(2, 5, 48)))
class NineCross(nn.Module):
    """Heads joined with the batch, and scores by baddbmm."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(W, W, bias=False), nn.Linear(48, W, bias=False), nn.Linear(48, W, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(W, W), nn.Dropout(0.0)])
        self.scale = D**-0.5

    def apart(self, t):
        b, s, _ = t.shape
        return t.reshape(b, s, H, D).permute(0, 2, 1, 3).reshape(b * H, s, D)

    def forward(self, x, context):
        q, k, v = self.apart(self.to_q(x)), self.apart(self.to_k(context)), self.apart(self.to_v(context))
        room = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        p = torch.baddbmm(room, q, k.transpose(-1, -2), beta=0, alpha=self.scale).softmax(dim=-1)
        y = torch.bmm(p, v).reshape(x.shape[0], H, -1, D).permute(0, 2, 1, 3).reshape(x.shape)
        for step in self.to_out:
            y = step(y)
        return y


# ---- vision
@case("add_layer_norm", lambda c: (c(), T(2, 3, 16, 16)))
class NinePatches(nn.Module):
    """Patches, a token of the class, positions, a norm."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, W, kernel_size=4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, W)), nn.Parameter(torch.randn(1, 17, W) / 10)
        self.pre = nn.LayerNorm(W, eps=1e-6)

    def forward(self, image):
        x = self.proj(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)
        return self.pre(x + self.pos)


@case("attention", lambda c: (c(), T(4, 9, W)))
class NineWindow(nn.Module):
    """Swin's: a table of relative positions as a bias of scores."""

    def __init__(self, side=3):
        super().__init__()
        self.qkv, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, H) / 2)
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        rel = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("index", rel[..., 0] * (2 * side - 1) + rel[..., 1])

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * (c // H) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        if mask is not None:
            attn = attn + mask
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


@case("bias_act", lambda c: (c(), T(2, S, W)))
class NineScaled(nn.Module):
    """A block's MLP with a scale of each channel, whose activation is by hand."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(W, 128), nn.Linear(128, W)
        self.gamma = nn.Parameter(torch.full((W,), 1e-1))

    def forward(self, x):
        y = self.fc1(self.norm(x))
        y = y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0)))
        return torch.addcmul(x, self.fc2(y), self.gamma)


# ---- recurrent
@case("selective_scan", lambda c: (c(), T(2, S, W)))
class NineMamba(nn.Module):
    """Mamba's scan as a function of its own, tokens first in the loop."""

    def __init__(self, n=4, rank=3):
        super().__init__()
        self.n, self.rank = n, rank
        self.x_proj, self.dt_proj = nn.Linear(W, rank + 2 * n, bias=False), nn.Linear(rank, W)
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(W, 1)), nn.Parameter(torch.ones(W))

    def forward(self, u):
        dt, b, c = self.x_proj(u).split([self.rank, self.n, self.n], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        a = -torch.exp(self.A_log)
        h = torch.zeros(u.shape[0], W, self.n, device=u.device, dtype=u.dtype)
        ys = []
        for t in range(u.shape[1]):
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(ys, 1) + u * self.D
'''
