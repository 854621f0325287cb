# ruff: noqa: E501
"""The fourteenth set: attention, rotations and their norms, written without a look at the porting code."""

from __future__ import annotations

FOURTEENTH = r'''
import dataclasses, functools
from typing import Optional, Tuple
W, H, D, S = 64, 8, 8, 11


@dataclasses.dataclass
class XiConfig:
    hidden_size: int = W
    num_attention_heads: int = H
    num_key_value_heads: int = 2
    head_dim: int = D
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    query_pre_attn_scalar: float = 24.0
    attn_logit_softcapping: Optional[float] = 5.0
    sliding_window: int = 4
    attention_dropout: float = 0.0
    max_position_embeddings: int = 64


# ---- language
class XiOffsetNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(dim) / 10)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class XiTables(nn.Module):
    def __init__(self, dim, theta, scaling=1.0):
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scaling = scaling

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        at = position_ids[:, None, :].float()
        with torch.autocast(device_type=x.device.type, enabled=False):
            freqs = (inv.float() @ at.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos() * self.scaling, emb.sin() * self.scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def xi_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def xi_turn(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (xi_half(q) * sin), (k * cos) + (xi_half(k) * sin)


def xi_repeat(hidden, n_rep):
    batch, heads, slen, head_dim = hidden.shape
    if n_rep == 1:
        return hidden
    return hidden[:, :, None, :, :].expand(batch, heads, n_rep, slen, head_dim).reshape(batch, heads * n_rep, slen, head_dim)


def xi_eager(module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None):
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    key, value = xi_repeat(key, module.groups), xi_repeat(value, module.groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        weights = weights / softcap
        weights = torch.tanh(weights)
        weights = weights * softcap
    if mask is not None:
        weights = weights + mask[:, :, :, : key.shape[-2]]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


@case("attention", lambda c: (c(XiConfig()), T(2, S, W)))
class XiCapped(nn.Module):
    """A Gemma: norms of queries and keys, tables by a module, a cap, a float mask of a window; grouped heads."""

    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.query_pre_attn_scalar**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = XiOffsetNorm(D, config.rms_norm_eps), XiOffsetNorm(D, config.rms_norm_eps)
        self.rotary = XiTables(D, config.rope_theta)

    def window(self, x):
        n = x.shape[1]
        least = torch.finfo(x.dtype).min
        at = torch.arange(n, device=x.device)
        mask = torch.full((n, n), least, dtype=x.dtype, device=x.device)
        mask *= (at > at.reshape(-1, 1)) | (at <= at.reshape(-1, 1) - self.config.sliding_window)
        return mask[None, None, :, :].expand(x.shape[0], 1, -1, -1)

    def forward(self, hidden_states, position_ids=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        q = self.q_norm(self.q_proj(hidden_states).view(shape).transpose(1, 2))
        k = self.k_norm(self.k_proj(hidden_states).view(shape).transpose(1, 2))
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = xi_turn(q, k, *self.rotary(hidden_states, position_ids))
        out, _ = xi_eager(self, q, k, v, self.window(hidden_states), self.config.attention_dropout, self.scaling, self.config.attn_logit_softcapping)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))


@case("attention", lambda c: (c(XiConfig()), T(2, S, W)))
class XiGated(nn.Module):
    """A newer Qwen: the output has a gate, which is the other half of each head's queries; SDPA with its own groups."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, self.n, self.kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, self.n * D * 2, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.kv * D, bias=False)
        self.o_proj = nn.Linear(self.n * D, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(self, hidden_states):
        b, s, _ = hidden_states.shape
        query, gate = torch.chunk(self.q_proj(hidden_states).view(b, s, -1, self.head_dim * 2), 2, dim=-1)
        gate = gate.reshape(b, s, -1)
        query = self.q_norm(query).transpose(1, 2)
        key, value = self.kv_proj(hidden_states).view(b, s, 2, self.kv, self.head_dim).unbind(dim=2)
        key, value = self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=s > 1, enable_gqa=True)
        out = out.transpose(1, 2).reshape(b, s, -1).contiguous()
        return self.o_proj(out * torch.sigmoid(gate))


@case("attention", lambda c: (c(XiConfig()), T(2, S, W)))
class XiLatent(nn.Module):
    """DeepSeek's: keys of two parts, of which one is rotated and shared by all heads; values have another width."""

    def __init__(self, config, rank=16, nope=8, rope=4, wide=6):
        super().__init__()
        self.n, self.rank, self.nope, self.rope, self.wide = config.num_attention_heads, rank, nope, rope, wide
        self.softmax_scale = (nope + rope) ** -0.5
        self.wq = nn.Linear(config.hidden_size, self.n * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(config.hidden_size, rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(rank, eps=1e-6)
        self.wkv_b = nn.Linear(rank, self.n * (nope + wide), bias=False)
        self.wo = nn.Linear(self.n * wide, config.hidden_size, bias=False)
        freqs = 1.0 / (config.rope_theta ** (torch.arange(0, rope, 2, dtype=torch.float32) / rope))
        freqs = torch.outer(torch.arange(config.max_position_embeddings), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def turn(self, x, freqs_cis):
        dtype = x.dtype
        x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        y = torch.view_as_real(x * freqs_cis.view(1, x.size(1), 1, x.size(-1))).flatten(3)
        return y.to(dtype)

    def forward(self, x, start_pos: int = 0, mask: Optional[torch.Tensor] = None):
        bsz, seqlen, _ = x.size()
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        if mask is None and seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=x.device).triu_(1)
        q = self.wq(x).view(bsz, seqlen, self.n, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = self.turn(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [self.rank, self.rope], dim=-1)
        k_pe = self.turn(k_pe.unsqueeze(2), freqs_cis)
        q = torch.cat([q_nope, q_pe], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, self.n, self.nope + self.wide)
        k_nope, v = torch.split(kv, [self.nope, self.wide], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


@case("attention", lambda c: (c(), T(2, S, W)))
class XiSlopes(nn.Module):
    """MPT's: slopes of heads in a bias that is built once and cut from the right; queries are clipped; a triangle."""

    def __init__(self, n_heads=H, most=32, clip_qkv=2.0):
        super().__init__()
        self.n_heads, self.clip_qkv, self.softmax_scale = n_heads, clip_qkv, 1 / math.sqrt(W / n_heads)
        self.Wqkv, self.out_proj = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)
        m = torch.arange(1, n_heads + 1, dtype=torch.float32).mul(8 / n_heads)
        slopes = (1.0 / torch.pow(2, m)).view(1, n_heads, 1, 1)
        self.register_buffer("attn_bias", torch.arange(1 - most, 1, dtype=torch.float32).view(1, 1, 1, most) * slopes, persistent=False)

    def forward(self, x):
        b, s, _ = x.shape
        qkv = self.Wqkv(x)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = qkv.chunk(3, dim=2)
        q = query.view(b, -1, self.n_heads, D).permute(0, 2, 1, 3)
        k = key.view(b, -1, self.n_heads, D).permute(0, 2, 3, 1)
        v = value.view(b, -1, self.n_heads, D).permute(0, 2, 1, 3)
        attn_weight = q.matmul(k) * self.softmax_scale
        attn_bias = self.attn_bias
        _s_k = max(0, attn_bias.size(-1) - s)
        attn_weight = attn_weight + attn_bias[:, :, :, _s_k:]
        causal_mask = attn_weight.new_ones(s, s, dtype=torch.float32).tril()
        causal_mask = causal_mask.to(torch.bool)
        causal_mask = ~causal_mask
        attn_weight = attn_weight.masked_fill(causal_mask.view(1, 1, s, s), torch.finfo(q.dtype).min)
        attn_weight = torch.softmax(attn_weight, dim=-1)
        out = attn_weight.to(v.dtype).matmul(v)
        return self.out_proj(out.permute(0, 2, 1, 3).flatten(2))


class XiCache(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def forward(self, input_pos, k, v):
        b = k.size(0)
        k = self.k[:b].index_copy_(2, input_pos, k)
        v = self.v[:b].index_copy_(2, input_pos, v)
        return k, v


@case("attention", lambda c: (c(), T(2, S, W), torch.arange(S)))
class XiStatic(nn.Module):
    """LitGPT's: a cache of fixed length, written at places; rows of a triangle that is kept are the mask."""

    def __init__(self, n_query_groups=4, most=16):
        super().__init__()
        self.g = n_query_groups
        self.attn, self.proj = nn.Linear(W, (H + 2 * n_query_groups) * D), nn.Linear(W, W)
        self.kv_cache = XiCache((2, n_query_groups, most, D))
        self.register_buffer("mask_cache", torch.ones((most, most), dtype=torch.bool).tril_().unsqueeze(0).unsqueeze(0), persistent=False)

    def forward(self, x, input_pos):
        B, N, C = x.size()
        q_per_kv = H // self.g
        qkv = self.attn(x).view(B, N, self.g, q_per_kv + 2, D).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        q = q.reshape(B, -1, N, D)
        k, v = k.reshape(B, -1, N, D), v.reshape(B, -1, N, D)
        k, v = self.kv_cache(input_pos, k.detach(), v.detach())
        mask = self.mask_cache.index_select(2, input_pos)
        k, v = k.repeat_interleave(q_per_kv, dim=1), v.repeat_interleave(q_per_kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=1.0 / math.sqrt(D), is_causal=mask is None)
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


@case("attention", lambda c: (c(), T(2, S, W), torch.ones(2, S).masked_fill(torch.arange(S) > 8, 0.0)))
class XiBert(nn.Module):
    """BERT's: scores are divided, the mask is one minus, times a great number; a head mask that may be there."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = H, D
        self.query, self.key, self.value = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.dropout, self.dense, self.LayerNorm = nn.Dropout(0.1), nn.Linear(W, W), nn.LayerNorm(W, eps=1e-12)

    def transpose_for_scores(self, x):
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(new_x_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions: bool = False):
        mixed_query_layer = self.query(hidden_states)
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        query_layer = self.transpose_for_scores(mixed_query_layer)
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            extended = attention_mask[:, None, None, :].to(dtype=hidden_states.dtype)
            attention_scores = attention_scores + (1.0 - extended) * -10000.0
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        attention_probs = self.dropout(attention_probs)
        if head_mask is not None:
            attention_probs = attention_probs * head_mask
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(context_layer.size()[:-2] + (W,))
        outputs = self.LayerNorm(self.dense(context_layer) + hidden_states)
        return (outputs, attention_probs) if output_attentions else outputs


@case("attention", lambda c: (c(), T(2, S, W)))
class XiFewKeys(nn.Module):
    """Groups without copies: queries have five dimensions; a triangle by where; the softmax is in float32."""

    def __init__(self, groups=2):
        super().__init__()
        self.groups, self.per = groups, H // groups
        self.to_q, self.to_kv, self.to_out = nn.Linear(W, W), nn.Linear(W, 2 * groups * D), nn.Linear(W, W)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.to_q(x).reshape(b, n, self.groups, self.per, D)
        k, v = self.to_kv(x).reshape(b, n, 2, self.groups, D).unbind(2)
        sim = torch.einsum("bigpd,bjgd->bgpij", q * D**-0.5, k)
        seen = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        sim = torch.where(seen, sim, torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        out = torch.einsum("bgpij,bjgd->bigpd", attn, v)
        return self.to_out(out.reshape(b, n, -1))


@case("attention", lambda c: (c(), T(2, S, W), torch.arange(S) < torch.tensor([[S], [7]])))
class XiMemory(nn.Module):
    """Learned keys and values stand before all others, so the caller's mask is padded with what is seen."""

    def __init__(self, heads=H, num_mem_kv=3, dim_head=D):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.mem_k, self.mem_v = nn.Parameter(torch.randn(heads, num_mem_kv, dim_head)), nn.Parameter(torch.randn(heads, num_mem_kv, dim_head))
        self.to_q, self.to_k, self.to_v = (nn.Linear(W, heads * dim_head, bias=False) for _ in range(3))
        self.to_out = nn.Linear(heads * dim_head, W, bias=False)

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        mem_k, mem_v = self.mem_k.expand(b, -1, -1, -1), self.mem_v.expand(b, -1, -1, -1)
        k, v = torch.cat((mem_k, k), dim=-2), torch.cat((mem_v, v), dim=-2)
        if mask is not None:
            mask = F.pad(mask, (self.mem_k.shape[-2], 0), value=True)
            mask = mask[:, None, None, :]
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


# ---- vision
def xi_rel(q_size, k_size, rel_pos):
    q_coords, k_coords = torch.arange(q_size)[:, None], torch.arange(k_size)[None, :]
    return rel_pos[((q_coords - k_coords) + (k_size - 1)).long()]


@case("attention", lambda c: (c(), T(2, 3, 4, W)))
class XiImage(nn.Module):
    """SAM's: a picture of rows and columns; a bias of each, which queries make, is added to scores of five dimensions."""

    def __init__(self, num_heads=H, size=(3, 4)):
        super().__init__()
        self.num_heads, self.scale = num_heads, D**-0.5
        self.qkv, self.proj = nn.Linear(W, W * 3), nn.Linear(W, W)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * size[0] - 1, D) / 4)
        self.rel_pos_w = nn.Parameter(torch.randn(2 * size[1] - 1, D) / 4)

    def add(self, attn, q, rows, columns):
        Rh, Rw = xi_rel(rows, rows, self.rel_pos_h), xi_rel(columns, columns, self.rel_pos_w)
        B, _, dim = q.shape
        r_q = q.reshape(B, rows, columns, dim)
        rel_h, rel_w = torch.einsum("bhwc,hkc->bhwk", r_q, Rh), torch.einsum("bhwc,wkc->bhwk", r_q, Rw)
        attn = attn.view(B, rows, columns, rows, columns) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]
        return attn.view(B, rows * columns, rows * columns)

    def forward(self, x):
        B, rows, columns, _ = x.shape
        qkv = self.qkv(x).reshape(B, rows * columns, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * self.num_heads, rows * columns, -1).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.add(attn, q, rows, columns)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).view(B, self.num_heads, rows, columns, -1).permute(0, 2, 3, 1, 4).reshape(B, rows, columns, -1)
        return self.proj(x)


@case("attention", lambda c: (c(), T(6, 9, W), torch.where(torch.rand(3, 9, 9) > 0.3, 0.0, -100.0)))
class XiCosine(nn.Module):
    """Swin's second: unit vectors, a temperature of each head that is clamped, a bias from a small network, a mask of windows."""

    def __init__(self, num_heads=H, window=3):
        super().__init__()
        self.num_heads, self.n = num_heads, window * window
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((num_heads, 1, 1))))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 32), nn.ReLU(inplace=True), nn.Linear(32, num_heads, bias=False))
        near = torch.arange(-(window - 1), window, dtype=torch.float32)
        table = torch.stack(torch.meshgrid([near, near], indexing="ij")).permute(1, 2, 0).contiguous().unsqueeze(0)
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / math.log2(8)
        self.register_buffer("relative_coords_table", table, persistent=False)
        at = torch.stack(torch.meshgrid([torch.arange(window), torch.arange(window)], indexing="ij")).flatten(1)
        far = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", far[..., 0] * (2 * window - 1) + far[..., 1], persistent=False)
        self.qkv, self.q_bias, self.v_bias = nn.Linear(W, W * 3, bias=False), nn.Parameter(torch.randn(W)), nn.Parameter(torch.randn(W))
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.0), nn.Linear(W, W), nn.Dropout(0.0)

    def forward(self, x, mask: Optional[torch.Tensor] = None):
        B_, N, C = x.shape
        qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=qkv_bias)
        q, k, v = qkv.reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        attn = attn * logit_scale
        bias_table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = bias_table[self.relative_position_index.view(-1)].view(self.n, self.n, -1).permute(2, 0, 1).contiguous()
        attn = attn + (16 * torch.sigmoid(bias)).unsqueeze(0)
        if mask is not None:
            num_win = mask.shape[0]
            attn = attn.view(-1, num_win, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj_drop(self.proj(x))


@case("attention", lambda c: (c(), T(2, S, W), T(2, 5, W)))
class XiJoint(nn.Module):
    """Two streams of a diffusion model: projections and norms of their own, one attention, rotations of pairs by matrices."""

    def __init__(self):
        super().__init__()
        self.img_qkv, self.txt_qkv = nn.Linear(W, 3 * W, bias=True), nn.Linear(W, 3 * W, bias=True)
        self.img_proj, self.txt_proj = nn.Linear(W, W), nn.Linear(W, W)
        for name in ("img_q", "img_k", "txt_q", "txt_k"):
            self.register_parameter(name, nn.Parameter(torch.rand(D) + 0.5))

    @staticmethod
    def norm(x, scale):
        rrms = torch.rsqrt(torch.mean(x.float() ** 2, dim=-1, keepdim=True) + 1e-6)
        return (x.float() * rrms).to(dtype=x.dtype) * scale

    @staticmethod
    def rope(pos, dim, theta=10000):
        scale = torch.arange(0, dim, 2, dtype=torch.float64, device=pos.device) / dim
        omega = 1.0 / (theta**scale)
        out = torch.einsum("...n,d->...nd", pos, omega)
        out = torch.stack([torch.cos(out), -torch.sin(out), torch.sin(out), torch.cos(out)], dim=-1)
        return out.view(*out.shape[:-1], 2, 2).float()

    @staticmethod
    def turn(xq, xk, freqs_cis):
        xq_ = xq.float().reshape(*xq.shape[:-1], -1, 1, 2)
        xk_ = xk.float().reshape(*xk.shape[:-1], -1, 1, 2)
        xq_out = freqs_cis[..., 0] * xq_[..., 0] + freqs_cis[..., 1] * xq_[..., 1]
        xk_out = freqs_cis[..., 0] * xk_[..., 0] + freqs_cis[..., 1] * xk_[..., 1]
        return xq_out.reshape(*xq.shape).type_as(xq), xk_out.reshape(*xk.shape).type_as(xk)

    def forward(self, img, txt):
        iq, ik, iv = self.img_qkv(img).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        tq, tk, tv = self.txt_qkv(txt).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        iq, ik, tq, tk = self.norm(iq, self.img_q), self.norm(ik, self.img_k), self.norm(tq, self.txt_q), self.norm(tk, self.txt_k)
        q, k, v = torch.cat((tq, iq), dim=2), torch.cat((tk, ik), dim=2), torch.cat((tv, iv), dim=2)
        pe = self.rope(torch.arange(q.shape[2], device=q.device, dtype=torch.float64), D)[None, None]
        q, k = self.turn(q, k, pe)
        out = F.scaled_dot_product_attention(q, k, v)
        out = out.transpose(1, 2).flatten(2)
        return self.img_proj(out[:, txt.shape[1] :]), self.txt_proj(out[:, : txt.shape[1]])


@case("layer_norm", lambda c: (c(), T(2, S, W), T(2, W)))
class XiModulated(nn.Module):
    """A diffusion transformer's: norms without weights, of which a condition makes shift, scale and gate; attention of timm's."""

    def __init__(self, eps=1e-6, fused_attn=False):
        super().__init__()
        self.eps, self.fused_attn, self.scale = eps, fused_attn, D**-0.5
        self.qkv, self.proj, self.q_norm, self.k_norm = nn.Linear(W, W * 3, bias=True), nn.Linear(W, W), nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(W, 3 * W, bias=True))

    def norm(self, x):
        mu = x.mean(-1, keepdim=True)
        var = ((x - mu) ** 2).mean(-1, keepdim=True)
        return (x - mu) / (var + self.eps).sqrt()

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x, c):
        shift, scale, gate = self.ada(c).chunk(3, dim=1)
        y = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x + gate.unsqueeze(1) * self.attn(y)


@case("attention", lambda c: (c(), T(S, W), torch.tensor([0, 3, 7, S])))
class XiBlocks(nn.Module):
    """A tower of pictures of many sizes: no batch; a mask of blocks, which a loop over bounds opens."""

    def __init__(self, num_heads=H):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, D
        self.qkv, self.proj = nn.Linear(W, W * 3, bias=True), nn.Linear(W, W)

    def forward(self, hidden_states, cu_seqlens):
        seq_length = hidden_states.shape[0]
        q, k, v = self.qkv(hidden_states).reshape(seq_length, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        attention_mask = torch.full([1, seq_length, seq_length], torch.finfo(q.dtype).min, device=q.device, dtype=q.dtype)
        for i in range(1, len(cu_seqlens)):
            attention_mask[..., cu_seqlens[i - 1] : cu_seqlens[i], cu_seqlens[i - 1] : cu_seqlens[i]] = 0
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        attn_weights = torch.matmul(q, k.transpose(1, 2)) / math.sqrt(self.head_dim)
        attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
        attn_output = torch.matmul(attn_weights, v)
        return self.proj(attn_output.transpose(0, 1).reshape(seq_length, -1))


@case("attention", lambda c: (c(), T(2, W, 3, 4)))
class XiUnet(nn.Module):
    """A picture's block of a diffusion model: channels first, a convolution of one place, roots of the scale on both sides."""

    def __init__(self, channels=W, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.proj_out = nn.Conv1d(channels, channels * 3, 1), nn.Conv1d(channels, channels, 1)

    def attention(self, qkv):
        bs, width, length = qkv.shape
        ch = width // (3 * self.num_heads)
        q, k, v = qkv.chunk(3, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum(
            "bct,bcs->bts",
            (q * scale).view(bs * self.num_heads, ch, length),
            (k * scale).view(bs * self.num_heads, ch, length),
        )
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v.reshape(bs * self.num_heads, ch, length))
        return a.reshape(bs, -1, length)

    def forward(self, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        h = self.proj_out(self.attention(self.qkv(self.norm(x))))
        return (x + h).reshape(b, c, *spatial)


# ---- speech
class XiRelative(nn.Module):
    """What an encoder of speech adds: positions have keys of their own, which are shifted into place."""

    def __init__(self, n_head, n_feat, dropout_rate=0.0):
        super().__init__()
        self.d_k, self.h = n_feat // n_head, n_head
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(n_feat, n_feat) for _ in range(4))
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u, self.pos_bias_v = nn.Parameter(torch.randn(n_head, self.d_k)), nn.Parameter(torch.randn(n_head, self.d_k))
        self.dropout = nn.Dropout(p=dropout_rate)

    def rel_shift(self, x):
        zero_pad = torch.zeros((*x.size()[:3], 1), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=-1)
        x_padded = x_padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))
        return x_padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]

    def forward_qkv(self, query, key, value):
        n_batch = query.size(0)
        q = self.linear_q(query).view(n_batch, -1, self.h, self.d_k)
        k = self.linear_k(key).view(n_batch, -1, self.h, self.d_k)
        v = self.linear_v(value).view(n_batch, -1, self.h, self.d_k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward_attention(self, value, scores, mask):
        n_batch = value.size(0)
        if mask is not None:
            mask = mask.unsqueeze(1).eq(0)
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
            attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        else:
            attn = torch.softmax(scores, dim=-1)
        x = torch.matmul(self.dropout(attn), value)
        return self.linear_out(x.transpose(1, 2).contiguous().view(n_batch, -1, self.h * self.d_k))


@case("attention", lambda c: (c(H, W), T(2, S, W), T(1, 2 * S - 1, W), torch.arange(S)[None, None, :] < torch.tensor([S, 7])[:, None, None]))
class XiConformer(XiRelative):
    """A conformer's: two biases of queries, and a mask that is used once more after the softmax."""

    def forward(self, x, pos_emb, mask=None):
        q, k, v = self.forward_qkv(x, x, x)
        q = q.transpose(1, 2)
        p = self.linear_pos(pos_emb).view(pos_emb.size(0), -1, self.h, self.d_k).transpose(1, 2)
        q_with_bias_u = (q + self.pos_bias_u).transpose(1, 2)
        q_with_bias_v = (q + self.pos_bias_v).transpose(1, 2)
        matrix_ac = torch.matmul(q_with_bias_u, k.transpose(-2, -1))
        matrix_bd = self.rel_shift(torch.matmul(q_with_bias_v, p.transpose(-2, -1)))
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        return self.forward_attention(v, scores, mask)


@case("attention", lambda c: (c(), T(2, S, W)))
class XiGatedBias(nn.Module):
    """WavLM's: a bias of buckets, which a gate of each query scales; heads are in the batch; torch's own attention."""

    def __init__(self, num_buckets=8, max_distance=12):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(W, W) for _ in range(4))
        self.rel_attn_embed = nn.Embedding(num_buckets, H)
        self.gru_rel_pos_const, self.gru_rel_pos_linear = nn.Parameter(torch.ones(1, H, 1, 1)), nn.Linear(D, 8)

    def compute_bias(self, n):
        at = torch.arange(n, dtype=torch.long)
        far = (at[None, :] - at[:, None]).clamp(-3, 4) + 3
        return self.rel_attn_embed(far.to(self.rel_attn_embed.weight.device)).permute([2, 0, 1])

    def forward(self, hidden_states):
        bsz, tgt_len, _ = hidden_states.size()
        position_bias = self.compute_bias(tgt_len).unsqueeze(0).repeat(bsz, 1, 1, 1)
        gated = hidden_states.view(hidden_states.shape[:-1] + (H, -1)).permute(0, 2, 1, 3)
        proj = self.gru_rel_pos_linear(gated)
        proj = proj.view(gated.shape[:-1] + (2, 4)).sum(-1)
        gate_a, gate_b = torch.sigmoid(proj).chunk(2, dim=-1)
        gate_output = gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0
        gated_bias = gate_output * position_bias
        query, key, value = (f(hidden_states).view(bsz, -1, H, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=gated_bias)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, tgt_len, W))


@case("attention", lambda c: (c(), T(2, 6, W), T(2, S, W)))
class XiWhisper(nn.Module):
    """A speech decoder's cross attention: no bias of keys, a dict of what was projected, and a switch of the class."""

    use_sdpa = True

    def __init__(self, n_state=W, n_head=H):
        super().__init__()
        self.n_head = n_head
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x, xa: Optional[torch.Tensor] = None, mask: Optional[torch.Tensor] = None, kv_cache: Optional[dict] = None):
        q = self.query(x)
        if kv_cache is None or xa is None or self.key not in kv_cache:
            k, v = self.key(x if xa is None else xa), self.value(x if xa is None else xa)
        else:
            k, v = kv_cache[self.key], kv_cache[self.value]
        wv, qk = self.qkv_attention(q, k, v, mask)
        return self.out(wv), qk

    def qkv_attention(self, q, k, v, mask=None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        if self.use_sdpa:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None and n_ctx > 1)
            return a.permute(0, 2, 1, 3).flatten(start_dim=2), None
        qk = (q * scale) @ (k * scale).transpose(-1, -2)
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        qk = qk.float()
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2), qk.detach()


# ---- rotations and norms
@case("rope", lambda c: (c(), T(2, S, H, D), torch.randint(40, (2, S))))
class XiYarn(nn.Module):
    """Frequencies that are bent by a ramp, and a factor of both tables; neighbours turn, by a stack."""

    def __init__(self, dim=D, base=10000.0, factor=4.0, original=16, fast=32, slow=1):
        super().__init__()

        def place(turns):
            return (dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

        low, high = max(math.floor(place(fast)), 0), min(math.ceil(place(slow)), dim - 1)
        powers = base ** (torch.arange(0, dim, 2).float() / dim)
        ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3), 0, 1)
        extrapolated = 1 - ramp
        self.register_buffer("inv_freq", (1.0 / (factor * powers)) * (1 - extrapolated) + (1.0 / powers) * extrapolated, persistent=False)
        self.attention_factor = 0.1 * math.log(factor) + 1.0

    def forward(self, x, positions):
        freqs = positions[..., None].float() * self.inv_freq
        cos = (freqs.cos() * self.attention_factor).unsqueeze(-2).to(x.dtype)
        sin = (freqs.sin() * self.attention_factor).unsqueeze(-2).to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


@case("rope", lambda c: (c(), T(2, H, 13, D), T(2, H, 13, D)))
class XiGrid(nn.Module):
    """A picture's: rows turn one half of each head and columns the other; the first token stands still."""

    def __init__(self, dim=D, grid=(3, 4), temperature=100.0):
        super().__init__()
        bands = 1.0 / (temperature ** (torch.arange(0, dim // 4).float() / (dim // 4)))
        ys, xs = torch.meshgrid(torch.arange(grid[0]).float(), torch.arange(grid[1]).float(), indexing="ij")
        pos = torch.stack([ys, xs], dim=-1).reshape(-1, 2)
        emb = (pos[:, :, None] * bands).flatten(1).repeat_interleave(2, -1)
        self.register_buffer("sin_embed", emb.sin(), persistent=False)
        self.register_buffer("cos_embed", emb.cos(), persistent=False)
        self.num_prefix_tokens = 1

    @staticmethod
    def rot(x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)

    def turn(self, x):
        return x * self.cos_embed + self.rot(x) * self.sin_embed

    def forward(self, q, k):
        npt = self.num_prefix_tokens
        q = torch.cat([q[:, :, :npt, :], self.turn(q[:, :, npt:, :])], dim=2).type_as(k)
        k = torch.cat([k[:, :, :npt, :], self.turn(k[:, :, npt:, :])], dim=2).type_as(k)
        return q, k


@case("rms_norm", lambda c: (c(), T(2, S, W)))
class XiBothNorms(nn.Module):
    """OLMo's: queries and keys are normed over all heads before they are cut, by the length of a vector; then attention."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.att_proj, self.attn_out = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)
        self.q_scale, self.k_scale = nn.Parameter(torch.rand(W) + 0.5), nn.Parameter(torch.rand(W) + 0.5)

    def norm(self, x, weight):
        with torch.autocast(enabled=False, device_type=x.device.type):
            og_dtype = x.dtype
            x = x.to(torch.float32)
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            x = x * torch.rsqrt(length.square() / x.size(-1) + self.eps)
            x = x.to(og_dtype)
        return weight * x

    def forward(self, x):
        B, T_, C = x.size()
        q, k, v = self.att_proj(x).split((W, W, W), dim=-1)
        q, k = self.norm(q, self.q_scale).to(dtype=v.dtype), self.norm(k, self.k_scale).to(dtype=v.dtype)
        q, k, v = (t.view(B, T_, H, C // H).transpose(1, 2) for t in (q, k, v))
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.attn_out(att.transpose(1, 2).contiguous().view(B, T_, C))
'''
