# ruff: noqa: E501
"""The eleventh set: modules of many kinds of repositories, written without a look at the porting code."""

from __future__ import annotations

ELEVENTH = r'''
import collections, dataclasses, functools
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- norms
@dataclasses.dataclass
class Settings:
    width: int = W
    eps: float = 1e-6
    heads: int = H
    kv_heads: int = 2
    theta: float = 10000.0


@case("rms_norm", lambda c: (c(Settings()), T(2, S, W)))
class ElOffset(nn.Module):
    """An offset of one; steps by out= free methods, of a settings object."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.randn(cfg.width) / 10)

    def forward(self, x):
        kind = x.dtype
        h = x.float()
        root = h.square().mean(dim=-1, keepdim=True).add(self.cfg.eps).sqrt()
        return torch.div(h, root).mul(self.weight.float().add(1.0)).to(kind)


@case("rms_norm", lambda c: (c(), T(2, S, W)))
class ElHeadNorms(nn.Module):
    """Queries and keys are normed without a weight, then scores are shown."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(W, W, bias=False), nn.Linear(W, 2 * D, bias=False)

    @staticmethod
    def norm(t):
        return F.rms_norm(t, t.shape[-1:], eps=1e-5)

    def forward(self, x):
        q, k = self.norm(self.q(x).unflatten(-1, (H, D))), self.norm(self.k(x).unflatten(-1, (2, D)))
        return torch.einsum("bqgrd,bkgd->bgrqk", q.unflatten(2, (2, H // 2)), k)


@case("gated_rms_norm", lambda c: (c(W, 4), T(2, S, W), T(2, S, W)))
class ElGroupGate(nn.Module):
    """The gate is there before the norm, whose groups are of neighbouring columns."""

    def __init__(self, width, groups):
        super().__init__()
        self.groups, self.variance_epsilon = groups, 1e-5
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden, gate):
        kind = hidden.dtype
        hidden = hidden.to(torch.float32) * F.silu(gate.to(torch.float32))
        *front, last = hidden.shape
        parts = hidden.view(*front, self.groups, last // self.groups)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * parts.view(*front, last).to(kind)


@case("layer_norm", lambda c: (c(32), T(2, 32, 6, 5)))
class ElNext(nn.Module):
    """ConvNeXt's block: channels last for the norm and two layers, a scale of each channel, and drop path."""

    def __init__(self, dim, rate=0.0):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.3 * torch.ones(dim), requires_grad=True)
        self.rate = rate

    def drop_path(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)

    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


@case("add_rms_norm", lambda c: (c(), T(2, S, W), T(2, S, W)))
class ElCarried(nn.Module):
    """What serving engines do: the residual goes along, and is given back beside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(W) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x, residual=None):
        orig = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x.to(orig)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        x = x.to(orig) * self.weight
        return x if residual is None else (x, residual)


# ---- layers
@case("linear", lambda c: (c(W, 80), T(2, S, W)))
class ElAdapted(nn.Module):
    """A frozen matrix and two thin ones beside it."""

    def __init__(self, n_in, n_out, r=4, alpha=16):
        super().__init__()
        self.base = nn.Linear(n_in, n_out)
        self.base.weight.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(r, n_in) / 8), nn.Parameter(torch.randn(n_out, r) / 8)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class Turned(nn.Module):
    """GPT-2's layer: the weight lies the other way round."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 8), nn.Parameter(torch.randn(nf) / 8)

    def forward(self, x):
        out = x.size()[:-1] + (self.nf,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(out)


@case("bias_act", lambda c: (c(), T(2, S, W)))
class ElTurnedMlp(nn.Module):
    """GPT-2's two layers, with a tanh of its own, of torch functions with tensors of one number."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = Turned(128, W), Turned(W, 128)
        self.register_buffer("root", torch.sqrt(torch.tensor(2.0 / math.pi)), persistent=False)

    def act(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


@case("silu_mul", lambda c: (c(), T(2, S, W)))
class ElSliced(nn.Module):
    """DINOv2's: one matrix, of which rows are read apart."""

    def __init__(self, inner=96):
        super().__init__()
        self.inner = inner
        self.w12, self.w3 = nn.Linear(W, 2 * inner), nn.Linear(inner, W)

    def forward(self, x):
        w, b = self.w12.weight, self.w12.bias
        x1 = F.linear(x, w[: self.inner], b[: self.inner])
        x2 = F.linear(x, w[self.inner :], b[self.inner :])
        return self.w3(F.silu(x1) * x2)


class ElGeglu(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.proj = nn.Linear(a, b * 2)

    def gelu(self, gate):
        return F.gelu(gate) if gate.device.type != "mps" else F.gelu(gate.float()).to(gate.dtype)

    def forward(self, hidden):
        hidden, gate = self.proj(hidden).chunk(2, dim=-1)
        return hidden * self.gelu(gate)


@case("gelu_mul", lambda c: (c(), T(2, S, W)))
class ElDiffuser(nn.Module):
    """Diffusion's feed-forward: a list of steps; the second half is the gate."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([])
        self.net.append(ElGeglu(W, 96))
        self.net.append(nn.Dropout(0.0))
        self.net.append(nn.Linear(96, W))

    def forward(self, x, *args, **kwargs):
        for module in self.net:
            x = module(x)
        return x


@case("bias_act", lambda c: (c(), T(2, S, W)))
class ElSquared(nn.Module):
    """A speed run's: the square of what is above zero; matrices are cast each time, and there is no bias."""

    def __init__(self):
        super().__init__()
        self.c_fc = nn.Parameter(torch.randn(4 * W, W) / 8)
        self.c_proj = nn.Parameter(torch.randn(4 * W, W) / 16)

    def forward(self, x):
        x = F.linear(x, self.c_fc.type_as(x))
        x = F.relu(x).square()
        return F.linear(x, self.c_proj.T.type_as(x))


@case("bias_act", lambda c: (c(), T(S, 2, W)))
class ElClip(nn.Module):
    """CLIP's: steps with names, an activation class of its own; length first."""

    class Quick(nn.Module):
        def forward(self, x: torch.Tensor):
            return x * torch.sigmoid(1.702 * x)

    def __init__(self, d_model=W):
        super().__init__()
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(collections.OrderedDict([
            ("c_fc", nn.Linear(d_model, d_model * 4)), ("gelu", self.Quick()), ("c_proj", nn.Linear(d_model * 4, d_model))]))

    def forward(self, x):
        return x + self.mlp(self.ln_2(x))


# ---- rotations
@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, 2, D)))
class ElComplex(nn.Module):
    """Llama's own: complex numbers of neighbours."""

    def __init__(self, theta=500.0, end=40):
        super().__init__()
        freqs = 1.0 / (theta ** (torch.arange(0, D, 2)[: D // 2].float() / D))
        freqs = torch.outer(torch.arange(end), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(freqs), freqs)

    def reshape_for_broadcast(self, freqs, x):
        shape = [d if i == 1 or i == x.ndim - 1 else 1 for i, d in enumerate(x.shape)]
        return freqs.view(*shape)

    def forward(self, xq, xk, start_pos: int = 2):
        freqs = self.freqs_cis[start_pos : start_pos + xq.shape[1]]
        xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
        xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
        freqs = self.reshape_for_broadcast(freqs, xq_)
        xq_out, xk_out = torch.view_as_real(xq_ * freqs).flatten(3), torch.view_as_real(xk_ * freqs).flatten(3)
        return xq_out.type_as(xq), xk_out.type_as(xk)


def el_rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@case("rope", lambda c: (c((1, 2, 1)), T(2, H, S, D), T(2, 2, S, D), torch.randint(30, (3, 2, S))))
class ElSections(nn.Module):
    """Three kinds of positions, each for a section of the frequencies (Qwen2-VL's)."""

    def __init__(self, section):
        super().__init__()
        self.section = list(section)
        self.register_buffer("inv_freq", 1.0 / (1000.0 ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D)), persistent=False)

    @torch.no_grad()
    def tables(self, x, position_ids):
        inv = self.inv_freq[None, None, :, None].float().expand(3, position_ids.shape[1], -1, 1)
        at = position_ids[:, :, None, :].float()
        freqs = (inv @ at).transpose(2, 3)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def forward(self, q, k, position_ids):
        cos, sin = self.tables(q, position_ids)
        twice = self.section * 2
        cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(twice, dim=-1))], dim=-1).unsqueeze(1)
        sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(twice, dim=-1))], dim=-1).unsqueeze(1)
        return (q * cos) + (el_rotate_half(q) * sin), (k * cos) + (el_rotate_half(k) * sin)


@case("rope", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), torch.randint(30, (2, S))))
class ElNeox(nn.Module):
    """A part of each head; tables of all positions are kept, and rows of them are taken."""

    def __init__(self, pct=0.5, most=32):
        super().__init__()
        self.ndims = int(D * pct)
        inv = 1.0 / (10000 ** (torch.arange(0, self.ndims, 2).float() / self.ndims))
        emb = torch.outer(torch.arange(most).float(), inv).tile(2)
        self.register_buffer("cos_cached", emb.cos(), persistent=False)
        self.register_buffer("sin_cached", emb.sin(), persistent=False)

    def one(self, t, cos, sin):
        rot, rest = torch.split(t, [self.ndims, t.size(-1) - self.ndims], dim=-1)
        return torch.cat([rot * cos + el_rotate_half(rot) * sin, rest], dim=-1)

    def forward(self, query, key, position_ids):
        cos, sin = self.cos_cached[position_ids].unsqueeze(1), self.sin_cached[position_ids].unsqueeze(1)
        return tuple(self.one(t, cos, sin) for t in (query, key))


@case("rope", lambda c: (c(), T(2, S, H, D)))
class ElOtherWay(nn.Module):
    """A speed run's: it turns the other way, which a sine of another sign does."""

    def __init__(self, base=1024.0):
        super().__init__()
        self.inv_freq = (1 / base) ** (torch.arange(0, D, 2) / D)
        self.seq_len_cached = None

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
        freqs = torch.outer(t, self.inv_freq)
        cos, sin = freqs.cos()[None, :, None, :], freqs.sin()[None, :, None, :]
        d = x.shape[3] // 2
        x1, x2 = x[..., :d], x[..., d:]
        y1 = x1 * cos + x2 * sin
        y2 = x1 * (-sin) + x2 * cos
        return torch.cat([y1, y2], 3).type_as(x)


# ---- attention
@case("attention", lambda c: (c(Settings()), T(2, S, W)))
class ElGrouped(nn.Module):
    """Keys and values are expanded to all heads; scores by einsum; a triangle with -inf."""

    def __init__(self, cfg):
        super().__init__()
        self.n, self.kv = cfg.heads, cfg.kv_heads
        self.wqkv = nn.Linear(cfg.width, (self.n + 2 * self.kv) * D, bias=False)
        self.wo = nn.Linear(cfg.width, cfg.width, bias=False)

    def repeat_kv(self, t):
        b, s, g, d = t.shape
        return t[:, :, :, None, :].expand(b, s, g, self.n // self.kv, d).reshape(b, s, self.n, d)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.wqkv(x).view(b, s, -1, D).split([self.n, self.kv, self.kv], dim=2)
        k, v = self.repeat_kv(k), self.repeat_kv(v)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        scores = scores + torch.full((s, s), float("-inf"), device=x.device).triu(1)
        probs = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, s, -1))


@case("attention", lambda c: (c(), T(2, S, W), torch.tensor([S, 6])))
class ElLengths(nn.Module):
    """An encoder of speech: a mask of lengths, and torch's own attention with a dropout of the training only."""

    def __init__(self, p=0.0):
        super().__init__()
        self.in_proj, self.out_proj, self.p = nn.Linear(W, 3 * W), nn.Linear(W, W), p

    def forward(self, x, lengths):
        b, s, c = x.size()
        keep = torch.arange(s, device=x.device)[None, :] < lengths[:, None]
        q, k, v = self.in_proj(x).view(b, s, 3, H, D).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :], dropout_p=self.p if self.training else 0.0)
        return self.out_proj(y.permute(0, 2, 1, 3).contiguous().view(b, s, c))


@case("attention", lambda c: (c(), T(2, S, W)))
class ElSinks(nn.Module):
    """A logit more of each head, which takes a share and has no value."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(W, n) for n in (W, 2 * D, 2 * D, W))
        self.sinks = nn.Parameter(torch.randn(H))

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, H, D).transpose(1, 2)
        k = self.k_proj(x).view(b, s, 2, D).transpose(1, 2).repeat_interleave(H // 2, dim=1)
        v = self.v_proj(x).view(b, s, 2, D).transpose(1, 2).repeat_interleave(H // 2, dim=1)
        logits = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(diagonal=1)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        both = torch.cat([logits, self.sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        p = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
        return self.o_proj(torch.matmul(p, v).transpose(1, 2).contiguous().reshape(b, s, -1))


@case("attention", lambda c: (c(), T(2, S, W)))
class ElBuckets(nn.Module):
    """T5's: a bias of distances in buckets, and no scale."""

    def __init__(self, buckets=8, furthest=16):
        super().__init__()
        self.buckets, self.furthest = buckets, furthest
        self.q, self.k, self.v, self.o = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(buckets, H)

    def bucket(self, rel):
        half = self.buckets // 2
        out = (rel > 0).long() * half
        rel = rel.abs()
        exact = half // 2
        far = exact + (torch.log(rel.float() / exact) / math.log(self.furthest / exact) * (half - exact)).long()
        far = torch.min(far, torch.full_like(far, half - 1))
        return out + torch.where(rel < exact, rel, far)

    def bias(self, s, device):
        at = torch.arange(s, dtype=torch.long, device=device)
        values = self.relative_attention_bias(self.bucket((at[None, :] - at[:, None]).clamp_min(-15)))
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, x):
        b, s = x.shape[:2]
        q, k, v = (f(x).view(b, -1, H, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.bias(s, x.device)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, W))


@case("attention", lambda c: (c(), T(2, S, W)))
class ElCapped(nn.Module):
    """Scores are capped; a window of a few keys; the scale is a setting of its own."""

    def __init__(self, cap=3.0, window=5):
        super().__init__()
        self.cap, self.window, self.scaling = cap, window, 24.0**-0.5
        self.qkv, self.o = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, H, D).transpose(1, 2) for t in self.qkv(x).tensor_split(3, dim=-1))
        a = torch.matmul(q * self.scaling, k.transpose(-1, -2))
        a = torch.tanh(a / self.cap) * self.cap
        ones = torch.ones(s, s, dtype=torch.bool, device=x.device)
        seen = torch.tril(ones) & torch.triu(ones, diagonal=1 - self.window)
        a = a.masked_fill(~seen, float("-inf"))
        return self.o(torch.matmul(a.softmax(-1), v).transpose(1, 2).flatten(-2))


@case("attention", lambda c: (c(), T(2, 13, 40)))
class ElLatents(nn.Module):
    """A perceiver's: learned queries look at all that is given, with norms of both."""

    def __init__(self, n=6):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(n, W))
        self.norm_q, self.norm_c = nn.LayerNorm(W), nn.LayerNorm(40)
        self.to_q, self.to_kv, self.to_out = nn.Linear(W, W, bias=False), nn.Linear(40, 2 * W, bias=False), nn.Linear(W, W)

    def forward(self, data):
        b = data.shape[0]
        x = self.latents.unsqueeze(0).repeat(b, 1, 1)
        q, c = self.to_q(self.norm_q(x)), self.norm_c(data)
        k, v = self.to_kv(c).chunk(2, dim=-1)
        q, k, v = map(lambda t: t.reshape(b, t.shape[1], H, D).permute(0, 2, 1, 3), (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return x + self.to_out(out.permute(0, 2, 1, 3).reshape(b, x.shape[1], -1))


# ---- experts
@case("gate_topk", lambda c: (c(), T(2, S, W)))
class ElGroups(nn.Module):
    """DeepSeek's router: groups of experts are chosen first."""

    def __init__(self, n=8, groups=4, best=2):
        super().__init__()
        self.n, self.groups, self.best, self.factor = n, groups, best, 1.5
        self.weight = nn.Parameter(torch.randn(n, W) / 8)
        self.register_buffer("e_score_correction_bias", torch.randn(n) / 10)

    def forward(self, hidden):
        hidden = hidden.view(-1, hidden.shape[-1])
        scores = F.linear(hidden.type(torch.float32), self.weight.type(torch.float32)).sigmoid()
        choice = scores.view(-1, self.n) + self.e_score_correction_bias.unsqueeze(0)
        group = choice.view(-1, self.groups, self.n // self.groups).topk(2, dim=-1)[0].sum(dim=-1)
        idx = torch.topk(group, k=self.best, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(group).scatter_(1, idx, 1)
        mask = mask.unsqueeze(-1).expand(-1, self.groups, self.n // self.groups).reshape(-1, self.n)
        choice = choice.masked_fill(~mask.bool(), float("-inf"))
        chosen = torch.topk(choice, k=K, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * self.factor


@case("moe_experts", lambda c: (c(), T(15, W), torch.randint(E, (15, K)), torch.rand(15, K)))
class ElOneHot(nn.Module):
    """A mask of which expert has which token, and only experts with tokens are run (transformers' way)."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, W) / 8)
        self.down_proj = nn.Parameter(torch.randn(E, W, I) / 6)
        self.act_fn = nn.SiLU()

    def forward(self, hidden, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = F.one_hot(top_k_index, num_classes=E).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit:
            expert_idx = expert_idx[0]
            pos, tok = torch.where(mask[expert_idx])
            gate, up = F.linear(hidden[tok], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert_idx])
            final.index_add_(0, tok, (y * top_k_weights[tok, pos, None]).to(final.dtype))
        return final


@case("moe_experts", lambda c: (c(), T(15, W), torch.randint(E, (15, K)), torch.rand(15, K)))
class ElOss(nn.Module):
    """Neighbouring columns are gate and up, both cut, each expert with biases."""

    def __init__(self, alpha=1.702, limit=7.0):
        super().__init__()
        self.alpha, self.limit = alpha, limit
        self.gate_up_proj, self.gate_up_proj_bias = nn.Parameter(torch.randn(E, W, 2 * I) / 8), nn.Parameter(torch.randn(E, 2 * I) / 8)
        self.down_proj, self.down_proj_bias = nn.Parameter(torch.randn(E, I, W) / 6), nn.Parameter(torch.randn(E, W) / 6)

    def forward(self, hidden, indices, weights):
        out = torch.zeros_like(hidden)
        for e in range(E):
            tok, slot = torch.nonzero(indices == e, as_tuple=True)
            gate_up = hidden[tok] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            gate, up = gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
            glu = gate * torch.sigmoid(gate * self.alpha)
            y = ((up + 1) * glu) @ self.down_proj[e] + self.down_proj_bias[e]
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


# ---- convolutions and images
@case("causal_conv1d", lambda c: (c(), T(2, S, W)))
class ElMixer(nn.Module):
    """The start of a state-space mixer: too much is padded, and what is beyond is cut off."""

    def __init__(self, width=4):
        super().__init__()
        self.in_proj = nn.Linear(W, 2 * W, bias=False)
        self.conv1d = nn.Conv1d(W, W, bias=True, kernel_size=width, groups=W, padding=width - 1)
        self.act, self.out_proj = nn.SiLU(), nn.Linear(W, W, bias=False)

    def forward(self, hidden):
        seqlen = hidden.shape[1]
        x, z = self.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        x = self.act(self.conv1d(x)[..., :seqlen])
        return self.out_proj((x * self.act(z)).transpose(1, 2))


@case("group_norm", lambda c: (c(), T(2, 16, 5, 6)))
class ElVae(nn.Module):
    """An autoencoder's attention of places, with a norm of groups by hand."""

    def __init__(self, c=16, groups=4):
        super().__init__()
        self.groups, self.c = groups, c
        self.weight, self.bias = nn.Parameter(torch.rand(c) + 0.5), nn.Parameter(torch.randn(c))
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def norm(self, x):
        b, c, h, w = x.shape
        g = x.reshape(b, self.groups, -1)
        g = (g - g.mean(-1, keepdim=True)) / torch.sqrt(g.var(-1, keepdim=True, unbiased=False) + 1e-6)
        return g.view(b, c, h, w) * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)

    def forward(self, x):
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        w_ = torch.bmm(q.reshape(b, c, h * w).permute(0, 2, 1), k.reshape(b, c, h * w)) * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2).permute(0, 2, 1)
        h_ = torch.bmm(v.reshape(b, c, h * w), w_).reshape(b, c, h, w)
        return x + self.proj_out(h_)


# ---- embeddings, losses, softmax
@case("embedding", lambda c: (c(), torch.randint(V, (2, S))))
class ElGemma(nn.Module):
    """A subclass of torch's embedding with a scale that is a buffer."""

    class Scaled(nn.Embedding):
        def __init__(self, n, d, pad, scale):
            super().__init__(n, d, pad)
            self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

        def forward(self, input_ids):
            return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)

    def __init__(self):
        super().__init__()
        self.tokens = self.Scaled(V, W, 0, W**0.5)

    def forward(self, ids):
        return self.tokens(ids)


@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S)).masked_fill(torch.arange(S) < 3, -100)))
class ElHeadLoss(nn.Module):
    """A head and the loss of the next tokens; labels are padded, and prompts do not count."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(W, V, bias=False)

    def forward(self, hidden, labels, ignore_index=-100):
        logits = self.lm_head(hidden).float()
        labels = F.pad(labels, (0, 1), value=ignore_index)
        shift = labels[..., 1:].contiguous().view(-1).to(logits.device)
        return F.cross_entropy(logits.view(-1, V), shift, ignore_index=ignore_index, reduction="mean")


@case("cross_entropy", lambda c: (c(), T(2, S, V), torch.randint(V, (2, S)).masked_fill(torch.arange(S) > 7, 0)))
class ElPadded(nn.Module):
    """A loss by hand: the log of a sum, minus the label's logit, chosen rows only."""

    def __init__(self, pad_idx=0):
        super().__init__()
        self.pad_idx = pad_idx

    def forward(self, logits, target):
        nll = torch.logsumexp(logits, dim=-1) - torch.gather(logits, -1, target[..., None])[..., 0]
        return nll[target.ne(self.pad_idx)].mean()


@case("softmax", lambda c: (c(), T(3, 20, W)))
class ElPooling(nn.Module):
    """Attentive pooling of statistics, with a softmax over time by hand."""

    def __init__(self):
        super().__init__()
        self.linear1, self.linear2 = nn.Conv1d(W, 16, 1), nn.Conv1d(16, W, 1)

    def forward(self, x):
        x = x.transpose(1, 2)
        alpha = self.linear2(torch.tanh(self.linear1(x)))
        alpha = torch.exp(alpha - alpha.max(dim=2, keepdim=True)[0])
        alpha = alpha / alpha.sum(dim=2, keepdim=True)
        mean = torch.sum(alpha * x, dim=2)
        return torch.cat([mean, torch.sqrt((torch.sum(alpha * x**2, dim=2) - mean**2).clamp(min=1e-3))], dim=1)


# ---- recurrent
@case("gated_delta_rule", lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class ElDelta(nn.Module):
    """A gated delta rule, token after token, of keys of length one."""

    @staticmethod
    def l2norm(x, dim=-1, eps=1e-6):
        return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)

    def forward(self, query, key, value, g, beta):
        g, beta = -F.softplus(g), torch.sigmoid(beta)
        query, key = self.l2norm(query), self.l2norm(key)
        query, key, value, beta, g = [t.transpose(1, 2).contiguous().to(torch.float32) for t in (query, key, value, beta, g)]
        b, h, s, dk = key.shape
        query = query * (1 / dk**0.5)
        out = torch.zeros(b, h, s, value.shape[-1]).to(value)
        state = torch.zeros(b, h, dk, value.shape[-1]).to(value)
        for i in range(s):
            state = state * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
            memory = (state * key[:, :, i].unsqueeze(-1)).sum(dim=-2)
            delta = (value[:, :, i] - memory) * beta[:, :, i].unsqueeze(-1)
            state = state + key[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
            out[:, :, i] = (state * query[:, :, i].unsqueeze(-1)).sum(dim=-2)
        return out.transpose(1, 2).contiguous()


@case("ssd_scan", lambda c: (c(), T(2, S, 4, 6), T(2, S, 4), T(2, S, 1, 5), T(2, S, 1, 5)))
class ElHeads(nn.Module):
    """Mamba2's recurrence by einsum, head by head, with a list of results."""

    def __init__(self, h=4):
        super().__init__()
        self.A_log, self.D, self.dt_bias = nn.Parameter(torch.rand(h)), nn.Parameter(torch.rand(h)), nn.Parameter(torch.randn(h))

    def forward(self, x, dt, B, C):
        dt = F.softplus(dt + self.dt_bias)
        A = -torch.exp(self.A_log.float())
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1])
        ys = []
        for t in range(x.size(1)):
            dA = torch.exp(dt[:, t] * A)
            dBx = torch.einsum("bh,bn,bhp->bhpn", dt[:, t], B[:, t, 0], x[:, t])
            state = state * dA[:, :, None, None] + dBx
            ys.append(torch.einsum("bhpn,bn->bhp", state, C[:, t, 0]) + self.D[:, None] * x[:, t])
        return torch.stack(ys, dim=1)
'''
