# ruff: noqa: E501
"""A sixth set of right modules, written before any of them was tried: attention written out."""

from __future__ import annotations

THIRD = r"""
W, H, D, S = 64, 4, 16, 7


def table(n, d, base=10000.0):
    inv = 1.0 / (base ** (torch.arange(0, d, 2).float() / d))
    f = torch.outer(torch.arange(n).float(), inv)
    return torch.cat((f, f), -1)


# ---- attention
@case("attention", lambda c: (c(types.SimpleNamespace(n_embd=W, n_head=H, block_size=32, attn_pdrop=0.1, resid_pdrop=0.1)), T(2, S, W)))
class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.attn_pdrop), nn.Dropout(config.resid_pdrop)
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size)).view(1, 1, config.block_size, config.block_size))
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T_, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T_, :T_] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T_, C)
        return self.resid_dropout(self.c_proj(y))


@case("attention", lambda c: (c(), T(2, S, W)))
class NeoXSelf(nn.Module):
    def __init__(self, hidden=W, heads=H, longest=32, pct=0.25):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.rotary_ndims = int(self.size * pct)
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm_factor = self.size**-0.5
        emb = table(longest, self.rotary_ndims)
        self.register_buffer("cos", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin", emb.sin()[None, None], persistent=False)
        self.register_buffer("causal", torch.tril(torch.ones(longest, longest, dtype=torch.bool)).view(1, 1, longest, longest), persistent=False)

    def _turn(self, x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def forward(self, hidden):
        b, s, _ = hidden.shape
        qkv = self.query_key_value(hidden).view(b, s, self.heads, 3 * self.size)
        query = qkv[..., : self.size].permute(0, 2, 1, 3)
        key = qkv[..., self.size : 2 * self.size].permute(0, 2, 1, 3)
        value = qkv[..., 2 * self.size :].permute(0, 2, 1, 3)
        r = self.rotary_ndims
        cos, sin = self.cos[:, :, :s], self.sin[:, :, :s]
        q_rot, q_pass, k_rot, k_pass = query[..., :r], query[..., r:], key[..., :r], key[..., r:]
        query = torch.cat((q_rot * cos + self._turn(q_rot) * sin, q_pass), dim=-1)
        key = torch.cat((k_rot * cos + self._turn(k_rot) * sin, k_pass), dim=-1)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.norm_factor
        least = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.causal[:, :, :s, :s], scores, least)
        probs = nn.functional.softmax(scores, dim=-1).to(value.dtype)
        out = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous().view(b, s, -1)
        return self.dense(out)


def repeat_kv(hidden_states, n_rep):
    batch, kv, slen, d = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, kv, n_rep, slen, d)
    return hidden_states.reshape(batch, kv * n_rep, slen, d)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


@case("attention", lambda c: (c(), T(2, S, W), table(S, D).cos()[None], table(S, D).sin()[None], torch.full((S, S), float("-inf")).triu(1)[None, None]))
class EagerLlama(nn.Module):
    def __init__(self, hidden=W, heads=H, kv=2):
        super().__init__()
        self.head_dim, self.groups, self.scaling = hidden // heads, heads // kv, (hidden // heads) ** -0.5
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, hidden_states, cos, sin, attention_mask=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        w = torch.matmul(q, k.transpose(2, 3)) * self.scaling
        if attention_mask is not None:
            w = w + attention_mask[:, :, :, : k.shape[-2]]
        w = nn.functional.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
        w = nn.functional.dropout(w, p=0.0, training=self.training)
        out = torch.matmul(w, v).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous())


@case("attention", lambda c: (c(), T(2, S, W), T(2, 9, W), torch.tensor([[True] * 9, [True] * 6 + [False] * 3])))
class CrossEinsum(nn.Module):
    def __init__(self, dim=W, heads=H):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x, context, mask=None):
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None, :], -torch.finfo(dots.dtype).max)
        attn = dots.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


@case("attention", lambda c: (c(), T(2, S, W), T(2 * H, 1, S)))
class BloomScores(nn.Module):
    def __init__(self, hidden=W, heads=H):
        super().__init__()
        self.heads, self.d = heads, hidden // heads
        self.inv, self.beta = 1.0 / math.sqrt(self.d), 1.0
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x, alibi):
        b, s, n = x.shape
        fused = self.query_key_value(x).view(b, s, self.heads, 3, self.d)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * self.heads, s, self.d)
        k = k.permute(0, 2, 3, 1).reshape(b * self.heads, self.d, s)
        v = v.transpose(1, 2).reshape(b * self.heads, s, self.d)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=self.beta, alpha=self.inv)
        probs = F.softmax(scores.view(b, self.heads, s, s), dim=-1, dtype=torch.float32).to(q.dtype)
        context = torch.bmm(probs.view(b * self.heads, s, s), v)
        context = context.view(b, self.heads, s, self.d).permute(0, 2, 1, 3).reshape(b, s, n)
        return self.dense(context)


@case("attention", lambda c: (c(), T(S, 2, W), torch.tensor([[False] * S, [False] * 5 + [True] * 2])))
class TimeFirst(nn.Module):
    def __init__(self, n=W, heads=H):
        super().__init__()
        self.heads, self.d, self.scaling = heads, n // heads, (n // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(n, n) for _ in range(4))

    def forward(self, query, key_padding_mask=None):
        t, b, n = query.size()
        q = self.q(query) * self.scaling
        k, v = self.k(query), self.v(query)
        q, k, v = (m.contiguous().view(-1, b * self.heads, self.d).transpose(0, 1) for m in (q, k, v))
        w = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            w = w.view(b, self.heads, t, t).masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf")).view(b * self.heads, t, t)
        p = F.softmax(w, dim=-1)
        a = torch.bmm(p, v).transpose(0, 1).contiguous().view(t, b, n)
        return self.out(a)


@case("attention", lambda c: (c(32), T(2, 32, 4, 5)))
class AttnBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(8, ch, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(ch, ch, 1) for _ in range(4))

    def forward(self, x):
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2)
        v = v.reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)
        return x + self.proj_out(h_)


@case("attention", lambda c: (c(W), T(2, W, 3, 4)))
class ImageHeads(nn.Module):
    def __init__(self, dim, heads=H, dim_head=D):
        super().__init__()
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_qkv, self.to_out = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False), nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.to_qkv(x).chunk(3, dim=1))
        q = q * self.scale
        sim = torch.einsum("b h d i, b h d j -> b h i j", q, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(2, 3).reshape(b, -1, h, w))


@case("attention", lambda c: (c(H), T(2, H * 3 * D, S)))
class LegacyQkv(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.n_heads = n_heads

    def forward(self, qkv):
        bs, width, length = qkv.shape
        assert width % (3 * self.n_heads) == 0
        ch = width // (3 * self.n_heads)
        q, k, v = qkv.reshape(bs * self.n_heads, ch * 3, length).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        return torch.einsum("bts,bcs->bct", weight, v).reshape(bs, -1, length)


@case("attention", lambda c: (c(W), T(2, S, W)))
class Vision(nn.Module):
    def __init__(self, dim, num_heads=H, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(attn_drop), nn.Linear(dim, dim), nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


@case("attention", lambda c: (c(W), T(6, 9, W)))
class Windows(nn.Module):
    def __init__(self, dim, size=3, heads=H):
        super().__init__()
        self.size, self.heads, self.scale = size, heads, (dim // heads) ** -0.5
        self.bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads) * 0.2)
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        rel = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + size - 1
        self.register_buffer("index", rel[..., 0] * (2 * size - 1) + rel[..., 1])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.bias_table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        attn = attn.softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


@case("attention", lambda c: (c(W), T(2, S, W), T(2, 5, 40)))
class ToBatch(nn.Module):
    def __init__(self, dim, ctx=40, heads=H, d=D):
        super().__init__()
        self.scale, self.heads = d**-0.5, heads
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, heads * d, bias=False), nn.Linear(ctx, heads * d, bias=False), nn.Linear(ctx, heads * d, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(heads * d, dim), nn.Dropout(0.0)])

    def reshape_heads_to_batch_dim(self, t):
        b, s, n = t.shape
        return t.reshape(b, s, self.heads, n // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, s, n // self.heads)

    def reshape_batch_dim_to_heads(self, t):
        b, s, n = t.shape
        return t.reshape(b // self.heads, self.heads, s, n).permute(0, 2, 1, 3).reshape(b // self.heads, s, n * self.heads)

    def forward(self, x, context):
        q = self.reshape_heads_to_batch_dim(self.to_q(x))
        k = self.reshape_heads_to_batch_dim(self.to_k(context))
        v = self.reshape_heads_to_batch_dim(self.to_v(context))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = self.reshape_batch_dim_to_heads(torch.einsum("b i j, b j d -> b i d", attn, v))
        return self.to_out[1](self.to_out[0](out))


@case("attention", lambda c: (c(), T(2, S, W), T(1, H, S, S)))
class NoScale(nn.Module):
    def __init__(self, n=W, heads=H):
        super().__init__()
        self.n_heads, self.d = heads, n // heads
        self.q, self.k, self.v, self.o = (nn.Linear(n, n, bias=False) for _ in range(4))

    def forward(self, hidden, position_bias):
        b, s = hidden.shape[:2]
        shape = lambda t: t.view(b, -1, self.n_heads, self.d).transpose(1, 2)
        q, k, v = shape(self.q(hidden)), shape(self.k(hidden)), shape(self.v(hidden))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += position_bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = F.dropout(weights, p=0.1, training=self.training)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, self.n_heads * self.d)
        return self.o(out)


@case("attention", lambda c: (c(), T(2, S, W)))
class OneKeyHead(nn.Module):
    def __init__(self, dim=W, heads=H, d=D):
        super().__init__()
        self.heads, self.scale = heads, d**-0.5
        self.to_q, self.to_kv, self.out = nn.Linear(dim, heads * d, bias=False), nn.Linear(dim, 2 * d, bias=False), nn.Linear(heads * d, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.to_q(x).view(b, n, self.heads, -1).transpose(1, 2) * self.scale
        k, v = self.to_kv(x).chunk(2, dim=-1)
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
        causal = torch.ones((n, n), dtype=torch.bool, device=x.device).triu(1)
        sim = sim.masked_fill(causal, -torch.finfo(sim.dtype).max)
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(-1), v)
        return self.out(out.transpose(1, 2).reshape(b, n, -1))
"""
