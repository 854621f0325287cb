# ruff: noqa: E501
"""The twelfth set: attention, rotations and norms of many repositories, written without a look at the porting code."""

from __future__ import annotations

TWELFTH = r'''
import dataclasses, functools
from typing import Optional
W, H, D, S = 64, 8, 8, 11


# ---- norms
@case("rms_norm", lambda c: (c(W), T(2, S, W)))
class TwHalfSafe(nn.Module):
    """T5's: the variance is of float32; what is normed is cast only where the weight is half."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


def tw_modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@case("layer_norm", lambda c: (c(), T(2, S, W), T(2, W)))
class TwModulated(nn.Module):
    """A diffusion transformer's last layer: a norm without a weight, of which a condition makes scale and shift."""

    def __init__(self, hidden_size=W, patch=2, out_channels=4):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch * patch * out_channels, bias=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = tw_modulate(self.norm_final(x), shift, scale)
        return self.linear(x)


class TwUnit(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.rand(dim) + 0.5)

    def _norm(self, x):
        return x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.gamma


@case("add_rms_norm", lambda c: (c(), T(2, S, W)))
class TwPreNorm(nn.Module):
    """A block of two residuals: the sum of the first is normed, and is added again."""

    def __init__(self, dim=W, hidden=96):
        super().__init__()
        self.mix, self.w1, self.w2 = nn.Linear(dim, dim), nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = TwUnit(dim), TwUnit(dim)

    def forward(self, x):
        h = x + self.mix(self.attention_norm(x))
        return h + self.w2(F.silu(self.w1(self.ffn_norm(h))))


@case("gated_rms_norm", lambda c: (c(W), T(2, S, W), T(2, S, W)))
class TwNormThenGate(nn.Module):
    """Qwen3-Next's order: the norm comes first, and the gate is a SiLU in float32."""

    def __init__(self, hidden_size, eps=1e-6, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * F.silu(gate.to(torch.float32))
        return hidden_states.to(input_dtype)


@case("layer_norm", lambda c: (c(16), T(2, 16, 3, 2)))
class TwChannels(nn.Module):
    """Segment Anything's: a layer norm of the channels of an image, where they lie."""

    def __init__(self, num_channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_channels) + 0.5)
        self.bias = nn.Parameter(torch.randn(num_channels) / 4)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        x = self.weight[:, None, None] * x + self.bias[:, None, None]
        return x


@case("group_norm", lambda c: (c(W, H), T(2, S, W)))
class TwHeadwise(nn.Module):
    """RWKV's: each head is a group of a layer of (tokens, channels), and an epsilon grows with heads."""

    def __init__(self, dim, heads, divisor=8):
        super().__init__()
        self.ln_x = nn.GroupNorm(heads, dim, eps=1e-5 * divisor**2)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T_, C = x.size()
        y = self.ln_x(x.reshape(B * T_, C)).view(B, T_, C)
        return self.output(y)


# ---- rotations
def tw_sinusoidal(num_pos: int, dim: int) -> torch.Tensor:
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.int64) / dim))
    sinusoid_inp = torch.einsum("i , j -> i j", torch.arange(num_pos, dtype=torch.int64).float(), inv_freq).float()
    return torch.cat((torch.sin(sinusoid_inp), torch.cos(sinusoid_inp)), dim=1)


def tw_every_two(x):
    x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, H, D), torch.randint(20, (2, S))))
class TwGptJ(nn.Module):
    """GPT-J's: neighbours turn, a sine and a cosine in one table that is gathered by position, a part of each head."""

    def __init__(self, rotary_dim=4, most=32):
        super().__init__()
        self.rotary_dim = rotary_dim
        self.register_buffer("embed_positions", tw_sinusoidal(most, rotary_dim), persistent=False)

    def turn(self, tensor, sin, cos):
        sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
        cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
        return (tensor * cos) + (tw_every_two(tensor) * sin)

    def forward(self, query, key, position_ids):
        table = self.embed_positions.repeat(position_ids.shape[0], 1, 1)
        at = position_ids.unsqueeze(-1).repeat(1, 1, table.shape[-1])
        sincos = torch.gather(table, 1, at)
        sin, cos = torch.split(sincos, sincos.shape[-1] // 2, dim=-1)
        out = []
        for t in (query, key):
            rot, rest = t[:, :, :, : self.rotary_dim], t[:, :, :, self.rotary_dim :]
            out.append(torch.cat([self.turn(rot, sin, cos), rest], dim=-1))
        return tuple(out)


def tw_precompute(seq_len: int, n_elem: int, base: int = 10000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    freqs = 1.0 / (base ** (torch.arange(0, n_elem, 2)[: (n_elem // 2)].float() / n_elem))
    t = torch.arange(seq_len, device=freqs.device)
    freqs = torch.outer(t, freqs)
    freqs_cis = torch.polar(torch.ones_like(freqs), freqs)
    cache = torch.stack([freqs_cis.real, freqs_cis.imag], dim=-1)
    return cache.to(dtype=dtype)


def tw_apply(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    xshaped = x.float().reshape(*x.shape[:-1], -1, 2)
    freqs_cis = freqs_cis.view(1, xshaped.size(1), 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * freqs_cis[..., 0] - xshaped[..., 1] * freqs_cis[..., 1],
            xshaped[..., 1] * freqs_cis[..., 0] + xshaped[..., 0] * freqs_cis[..., 1],
        ],
        -1,
    )
    x_out2 = x_out2.flatten(3)
    return x_out2.type_as(x)


@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, 2, D), torch.arange(3, 3 + S)))
class TwFast(nn.Module):
    """gpt-fast's: cosines and sines stacked in one table, rows of it are taken by input positions."""

    def __init__(self, block_size=32):
        super().__init__()
        self.freqs_cis: Optional[torch.Tensor] = None
        self.freqs_cis = tw_precompute(block_size, D, 10000)

    def forward(self, q, k, input_pos: Optional[torch.Tensor] = None):
        freqs_cis = self.freqs_cis[input_pos]
        return tw_apply(q, freqs_cis), tw_apply(k, freqs_cis)


def tw_rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def tw_rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (tw_rotate_half(q) * sin)
    k_embed = (k * cos) + (tw_rotate_half(k) * sin)
    return q_embed, k_embed


class TwLong(nn.Module):
    """Frequencies of Llama 3.1: long waves are slower, and some between."""

    def __init__(self, dim, base=10000.0, factor=8.0, low=1.0, high=4.0, old=64):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        wavelen = 2 * math.pi / inv_freq
        llama = torch.where(wavelen > old / low, inv_freq / factor, inv_freq)
        smooth = (old / wavelen - low) / (high - low)
        smoothed = (1 - smooth) * llama / factor + smooth * llama
        medium = ~(wavelen < old / high) * ~(wavelen > old / low)
        self.register_buffer("inv_freq", torch.where(medium, smoothed, llama), persistent=False)
        self.attention_scaling = 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        position_ids_expanded = position_ids[:, None, :].float()
        device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
        with torch.autocast(device_type=device_type, enabled=False):
            freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.attention_scaling
            sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


@case("rope", lambda c: (c(), T(2, S, W), torch.arange(S)[None].expand(2, -1)))
class TwRotated(nn.Module):
    """Queries and keys of layers are turned by a child's tables, as what every layer shares."""

    def __init__(self):
        super().__init__()
        self.rotary_emb = TwLong(D)
        self.q_proj, self.k_proj = nn.Linear(W, H * D, bias=False), nn.Linear(W, 2 * D, bias=False)

    def forward(self, hidden_states, position_ids):
        shape = (*hidden_states.shape[:-1], -1, D)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = self.rotary_emb(hidden_states, position_ids)
        q, k = tw_rotary(q, k, cos, sin)
        return q, k


@case("rope", lambda c: (c(), T(2, H, 12, D), T(2, H, 12, D)))
class TwAxial(nn.Module):
    """A vision tower's: rows and columns of patches turn a half of the frequencies each, in float32."""

    def __init__(self, grid=(3, 4), theta=100.0):
        super().__init__()
        h, w = grid
        inv = 1.0 / (theta ** (torch.arange(0, D // 2, 2, dtype=torch.float) / (D // 2)))
        ys = torch.arange(h).unsqueeze(1).expand(-1, w).flatten()
        xs = torch.arange(w).unsqueeze(0).expand(h, -1).flatten()
        full = torch.outer(torch.arange(max(h, w)).float(), inv)
        emb = full[torch.stack([ys, xs], dim=-1)].flatten(1)
        self.register_buffer("rotary_pos_emb", emb, persistent=False)

    def forward(self, q, k):
        emb = torch.cat((self.rotary_pos_emb, self.rotary_pos_emb), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        q_dtype, k_dtype = q.dtype, k.dtype
        q, k = q.float(), k.float()
        cos, sin = cos.unsqueeze(0).float(), sin.unsqueeze(0).float()
        q = (q * cos) + (tw_rotate_half(q) * sin)
        k = (k * cos) + (tw_rotate_half(k) * sin)
        return q.to(q_dtype), k.to(k_dtype)


# ---- attention
def tw_repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def tw_eager(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None):
    key_states = tw_repeat_kv(key, module.num_key_value_groups)
    value_states = tw_repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if softcap is not None:
        attn_weights = attn_weights / softcap
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * softcap
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : key_states.shape[-2]]
        attn_weights = attn_weights + causal_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


@dataclasses.dataclass
class TwConfig:
    hidden_size: int = W
    num_attention_heads: int = H
    num_key_value_heads: int = 2
    head_dim: int = D
    sliding_window: int = 4
    query_pre_attn_scalar: float = 16.0
    attn_logit_softcapping: Optional[float] = 5.0
    attention_dropout: float = 0.0
    attention_bias: bool = False


@case("attention", lambda c: (c(TwConfig(), 0), T(2, S, W)))
class TwCapped(nn.Module):
    """Gemma 2's: a cap of scores, a window that every other layer has, a scale of its own."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.query_pre_attn_scalar**-0.5
        self.attention_dropout = config.attention_dropout
        self.sliding_window = config.sliding_window if not bool(layer_idx % 2) else None
        self.q_proj = nn.Linear(W, config.num_attention_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(W, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(W, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, W, bias=config.attention_bias)

    def make_mask(self, x):
        n = x.shape[1]
        full = torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
        mask = torch.triu(full, diagonal=1)
        if self.sliding_window is not None:
            mask = mask.masked_fill(torch.tril(torch.ones_like(mask, dtype=torch.bool), diagonal=-self.sliding_window), torch.finfo(x.dtype).min)
        return mask[None, None]

    def forward(self, hidden_states):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        q = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        out, weights = tw_eager(
            self, q, k, v, self.make_mask(hidden_states), scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0, softcap=self.config.attn_logit_softcapping,
        )
        return self.o_proj(out.reshape(*input_shape, -1).contiguous())


@case("attention", lambda c: (c(), T(2, S, W)))
class TwQkNorm(nn.Module):
    """Qwen 3's: each head of queries and keys is normed, then turned; torch's attention has groups."""

    def __init__(self, n_heads=H, n_kv=2):
        super().__init__()
        self.n_heads, self.n_kv = n_heads, n_kv
        self.W_query = nn.Linear(W, n_heads * D, bias=False)
        self.W_key, self.W_value = nn.Linear(W, n_kv * D, bias=False), nn.Linear(W, n_kv * D, bias=False)
        self.out_proj = nn.Linear(n_heads * D, W, bias=False)
        self.q_norm, self.k_norm = TwUnit(D, 1e-6), TwUnit(D, 1e-6)
        angles = torch.arange(32)[:, None] * (1.0 / (10000.0 ** (torch.arange(0, D, 2).float() / D)))[None, :]
        angles = torch.cat([angles, angles], dim=1)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def rope(self, x):
        n = x.shape[2]
        cos, sin = self.cos[:n, :].unsqueeze(0).unsqueeze(0), self.sin[:n, :].unsqueeze(0).unsqueeze(0)
        x_rotated = (x * cos) + (tw_rotate_half(x) * sin)
        return x_rotated.to(dtype=x.dtype)

    def forward(self, x):
        b, num_tokens, _ = x.shape
        queries = self.W_query(x).view(b, num_tokens, self.n_heads, D).transpose(1, 2)
        keys = self.W_key(x).view(b, num_tokens, self.n_kv, D).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.n_kv, D).transpose(1, 2)
        queries, keys = self.rope(self.q_norm(queries)), self.rope(self.k_norm(keys))
        keys = keys.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        values = values.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        attn_scores = queries @ keys.transpose(2, 3)
        mask = torch.triu(torch.ones(num_tokens, num_tokens, device=x.device, dtype=torch.bool), diagonal=1)
        attn_scores = attn_scores.masked_fill(mask, -torch.inf)
        attn_weights = torch.softmax(attn_scores / D**0.5, dim=-1)
        context = (attn_weights @ values).transpose(1, 2).reshape(b, num_tokens, -1)
        return self.out_proj(context)


class TwCache(nn.Module):
    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim, dtype=torch.float32):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype))
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype))

    def update(self, input_pos, k_val, v_val):
        assert input_pos.shape[0] == k_val.shape[2]
        k_out, v_out = self.k_cache.clone(), self.v_cache.clone()
        k_out[:, :, input_pos] = k_val
        v_out[:, :, input_pos] = v_val
        return k_out, v_out


@case("attention", lambda c: (c(), T(2, 5, W), torch.arange(5)))
class TwStatic(nn.Module):
    """A cache of a fixed length: what is new is written at positions, a row of a mask of all places is taken."""

    def __init__(self, n_head=H, n_local_heads=2, length=16):
        super().__init__()
        self.n_head, self.n_local_heads, self.dim = n_head, n_local_heads, W
        self.wqkv = nn.Linear(W, (n_head + 2 * n_local_heads) * D, bias=False)
        self.wo = nn.Linear(W, W, bias=False)
        self.kv_cache = TwCache(2, length, n_local_heads, D)
        self.register_buffer("causal_mask", torch.tril(torch.ones(length, length, dtype=torch.bool)), persistent=False)

    def forward(self, x, input_pos=None):
        bsz, seqlen, _ = x.shape
        mask = self.causal_mask[None, None, input_pos]
        kv_size = self.n_local_heads * D
        q, k, v = self.wqkv(x).split([self.dim, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, D)
        k = k.view(bsz, seqlen, self.n_local_heads, D)
        v = v.view(bsz, seqlen, self.n_local_heads, D)
        q, k, v = map(lambda t: t.transpose(1, 2), (q, k, v))
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        y = y.transpose(1, 2).contiguous().view(bsz, seqlen, self.dim)
        return self.wo(y)


def tw_slopes(n):
    start = 2 ** (-(2 ** -(math.log2(n) - 3)))
    return [start * start**i for i in range(n)]


@case("attention", lambda c: (c(), T(2, S, W), torch.ones(2, S).masked_fill(torch.arange(S) > 8, 0)))
class TwSloped(nn.Module):
    """Bloom's: a slope of each head times the place of each key, by baddbmm; a mask of the caller's is -inf."""

    def __init__(self, heads=H):
        super().__init__()
        self.heads, self.inv_norm_factor, self.beta = heads, 1.0 / math.sqrt(D), 1.0
        self.query_key_value, self.dense = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.register_buffer("slopes", torch.tensor(tw_slopes(heads)), persistent=False)

    def alibi(self, mask, dtype):
        at = ((mask.cumsum(dim=-1) - 1) * mask)[:, None, :]
        alibi = self.slopes[..., None] * at
        return alibi.reshape(mask.shape[0] * self.heads, 1, mask.shape[1]).to(dtype)

    def forward(self, hidden_states, attention_mask):
        b, n, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(b, n, self.heads, 3, D)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * self.heads, n, D)
        k = k.permute(0, 2, 3, 1).reshape(b * self.heads, D, n)
        v = v.transpose(1, 2).reshape(b * self.heads, n, D)
        scores = self.alibi(attention_mask, q.dtype).baddbmm(batch1=q, batch2=k, beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.view(b, self.heads, n, n)
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        probs = probs.view(b * self.heads, n, n)
        context = torch.bmm(probs, v).view(b, self.heads, n, D).transpose(1, 2).reshape(b, n, W)
        return self.dense(context)


def tw_sdpa(Q, K, V, S_, sm_scale, sliding_window=0):
    n_tokens, n_heads, q_mult, d_head = Q.shape
    K = K[:, :, None, :].expand(-1, -1, q_mult, -1)
    V = V[:, :, None, :].expand(-1, -1, q_mult, -1)
    S_ = S_.reshape(n_heads, q_mult, 1, 1).expand(-1, -1, n_tokens, -1)
    mask = torch.triu(Q.new_full((n_tokens, n_tokens), -float("inf")), diagonal=1)
    if sliding_window > 0:
        mask += torch.tril(mask.new_full((n_tokens, n_tokens), -float("inf")), diagonal=-sliding_window)
    QK = torch.einsum("qhmd,khmd->hmqk", Q, K)
    QK *= sm_scale
    QK += mask[None, None, :, :]
    QK = torch.cat([QK, S_], dim=-1)
    W_ = torch.softmax(QK, dim=-1)
    W_ = W_[..., :-1]
    attn = torch.einsum("hmqk,khmd->qhmd", W_, V)
    return attn.reshape(n_tokens, -1)


@case("attention", lambda c: (c(), T(S, W)))
class TwOss(nn.Module):
    """A reference of an open model: no batch, groups beside heads, sinks, scores changed in place."""

    def __init__(self, sliding_window=3):
        super().__init__()
        self.sliding_window, self.sm_scale = sliding_window, 1 / math.sqrt(D)
        self.sinks = nn.Parameter(torch.randn(H))
        self.norm = TwUnit(W)
        self.qkv, self.out = nn.Linear(W, D * (H + 2 * 2)), nn.Linear(D * H, W)

    def forward(self, x):
        t = self.norm(x)
        qkv = self.qkv(t)
        q = qkv[:, : H * D].contiguous()
        k = qkv[:, H * D : (H + 2) * D].contiguous()
        v = qkv[:, (H + 2) * D : (H + 4) * D].contiguous()
        q, k, v = q.view(-1, 2, H // 2, D), k.view(-1, 2, D), v.view(-1, 2, D)
        t = tw_sdpa(q, k, v, self.sinks, self.sm_scale, self.sliding_window)
        return x + self.out(t)


@case("attention", lambda c: (c(W, H), T(2, 6, W), T(2, S, W)))
class TwSpeech(nn.Module):
    """Whisper's: a quarter of the scale on either side, keys of an encoder, a mask for the decoder alone."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None, kv_cache: Optional[dict] = None):
        q = self.query(x)
        if kv_cache is None or xa is None or self.key not in kv_cache:
            k = self.key(x if xa is None else xa)
            v = self.value(x if xa is None else xa)
        else:
            k = kv_cache[self.key]
            v = kv_cache[self.value]
        wv, qk = self.qkv_attention(q, k, v, mask)
        return self.out(wv)

    def qkv_attention(self, q, k, v, mask=None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = (q * scale) @ (k * scale).transpose(-1, -2)
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        qk = qk.float()
        w = F.softmax(qk, dim=-1).to(q.dtype)
        out = (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)
        return out, qk.detach()


def tw_heads(x, heads):
    bs, length, width = x.shape
    x = x.view(bs, length, heads, -1)
    x = x.transpose(1, 2)
    return x.reshape(bs, heads, length, -1)


@case("attention", lambda c: (c(), T(2, S, W), T(2, 3, W)))
class TwResampler(nn.Module):
    """An image adapter's: latents look at what is there and at themselves; the softmax is in float32."""

    def __init__(self, dim=W, dim_head=D, heads=H):
        super().__init__()
        self.scale, self.dim_head, self.heads = dim_head**-0.5, dim_head, heads
        inner_dim = dim_head * heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x, latents):
        x = self.norm1(x)
        latents = self.norm2(latents)
        b, l, _ = latents.shape
        q = self.to_q(latents)
        kv_input = torch.cat((x, latents), dim=-2)
        k, v = self.to_kv(kv_input).chunk(2, dim=-1)
        q, k, v = tw_heads(q, self.heads), tw_heads(k, self.heads), tw_heads(v, self.heads)
        scale = 1 / math.sqrt(math.sqrt(self.dim_head))
        weight = (q * scale) @ (k * scale).transpose(-2, -1)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        out = weight @ v
        out = out.permute(0, 2, 1, 3).reshape(b, l, -1)
        return self.to_out(out)


@case("attention", lambda c: (c(), T(2, S, W), torch.ones(2, S).masked_fill(torch.arange(S) > 8, 0)))
class TwBert(nn.Module):
    """BERT's: the caller's mask becomes a bias, heads by a method, a dropout, arguments that nobody gives."""

    def __init__(self, hidden_size=W, heads=H, dropout=0.1):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, hidden_size // heads
        self.all_head_size = heads * self.attention_head_size
        self.query, self.key = nn.Linear(hidden_size, self.all_head_size), nn.Linear(hidden_size, self.all_head_size)
        self.value, self.dropout = nn.Linear(hidden_size, self.all_head_size), nn.Dropout(dropout)

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        x = x.view(new_x_shape)
        return x.permute(0, 2, 1, 3)

    def extended(self, mask, dtype):
        mask = mask[:, None, None, :].to(dtype=dtype)
        return (1.0 - mask) * torch.finfo(dtype).min

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + self.extended(attention_mask, hidden_states.dtype)
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        attention_probs = self.dropout(attention_probs)
        if head_mask is not None:
            attention_probs = attention_probs * head_mask
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        new_context_layer_shape = context_layer.size()[:-2] + (self.all_head_size,)
        context_layer = context_layer.view(new_context_layer_shape)
        return (context_layer, attention_probs) if output_attentions else (context_layer,)


@case("attention", lambda c: (c(), T(2, 3, W), T(2, H, 6, D), T(2, H, 6, D)))
class TwPast(nn.Module):
    """A decoder with a tuple of what was: new keys are behind it, a triangle of the last rows is a buffer's part."""

    def __init__(self, n_embd=W, n_head=H, block_size=32):
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x, past_key, past_value):
        B, T_, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T_, self.n_head, C // self.n_head).transpose(1, 2)
        k = torch.cat([past_key, k], dim=-2)
        v = torch.cat([past_value, v], dim=-2)
        present = (k, v)
        ns, nd = k.size(-2), q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, ns - nd : ns, :ns] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T_, C)
        return self.resid_dropout(self.c_proj(y)), present


@case("attention", lambda c: (c(), T(2, S, W)))
class TwOneKey(nn.Module):
    """StarCoder's: one head of keys for all, so that queries of all heads are rows of one product; a scalar hides."""

    def __init__(self, embed_dim=W, num_heads=H, max_positions=32):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kv_dim = self.head_dim
        self.register_buffer("bias", torch.tril(torch.ones((max_positions, max_positions), dtype=torch.bool)), persistent=False)
        self.c_attn, self.c_proj = nn.Linear(embed_dim, embed_dim + 2 * self.kv_dim), nn.Linear(embed_dim, embed_dim)
        self.attn_dropout = nn.Dropout(0.0)

    def _attn(self, query, key, value, attention_mask):
        scale_factor = self.head_dim**-0.5
        batch_size, query_length = query.shape[0], query.size(1)
        attn_shape = (batch_size, query_length, self.num_heads, key.size(-1))
        attn_view = (batch_size, query_length * self.num_heads, key.size(-1))
        query = query.reshape(batch_size, query_length * self.num_heads, self.head_dim)
        attn_weights = torch.bmm(query * scale_factor, key).view(attn_shape)
        mask_value = torch.full([], torch.finfo(attn_weights.dtype).min, dtype=attn_weights.dtype, device=attn_weights.device)
        attn_weights = torch.where(attention_mask, attn_weights, mask_value)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = self.attn_dropout(attn_weights)
        return torch.bmm(attn_weights.view(attn_view), value).view(batch_size, query_length, -1)

    def forward(self, hidden_states):
        query, key_value = self.c_attn(hidden_states).split((self.embed_dim, 2 * self.kv_dim), dim=2)
        key, value = key_value.split((self.head_dim, self.head_dim), dim=-1)
        n = hidden_states.shape[1]
        mask = self.bias[None, :n, :n].unsqueeze(2)
        return self.c_proj(self._attn(query, key.transpose(-1, -2), value, mask))
'''
