# ruff: noqa: E501
"""The thirteenth set: layers, experts, heads, convolutions and scans, written without a look at the porting code."""

from __future__ import annotations

THIRTEENTH = r'''
import dataclasses, functools
from typing import NamedTuple, Optional
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 6, 2, 24


# ---- MLPs
@dataclasses.dataclass
class MlpConfig:
    n_embd: int = W
    hidden_mult: float = 8 / 3
    multiple_of: int = 16
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dropout: float = 0.0


def round_up(n, to):
    return to * ((n + to - 1) // to)


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu2": lambda t: F.relu(t).pow(2)}


@case("silu_mul", lambda c: (c(MlpConfig()), T(2, S, W)))
class OthSwiglu(nn.Module):
    """An activation by name, of a table of functions, and a hidden size that is computed."""

    def __init__(self, config):
        super().__init__()
        inner = round_up(int(config.hidden_mult * config.n_embd), config.multiple_of)
        self.fc_1 = nn.Linear(config.n_embd, inner, bias=config.mlp_bias)
        self.fc_2 = nn.Linear(config.n_embd, inner, bias=config.mlp_bias)
        self.proj = nn.Linear(inner, config.n_embd, bias=config.mlp_bias)
        self.act, self.drop = ACTS[config.hidden_act], nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fc_1, x_fc_2 = self.fc_1(x), self.fc_2(x)
        x = self.act(x_fc_1) * x_fc_2
        return self.drop(self.proj(x))


@case("gelu_mul", lambda c: (c(), T(2, S, W)))
class OthGeglu(nn.Module):
    """One matrix, whose second half is the gate; a layer norm between; an inner size of two thirds."""

    class Gate(nn.Module):
        def forward(self, x):
            x, gate = x.chunk(2, dim=-1)
            return F.gelu(gate) * x

    def __init__(self, dim=W, mult=4):
        super().__init__()
        inner = int(dim * mult * 2 / 3)
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, inner * 2, bias=False), self.Gate(), nn.LayerNorm(inner), nn.Dropout(0.0), nn.Linear(inner, dim, bias=False))

    def forward(self, x):
        return self.net(x) + x


@case("bias_act", lambda c: (c(), T(2, S, W)))
class OthTimm(nn.Module):
    """timm's way: layers or convolutions, as asked; a norm that may be none; two dropouts."""

    def __init__(self, in_features=W, hidden_features=None, out_features=None, act_layer=nn.GELU, norm_layer=None, bias=True, drop=0.0, use_conv=False):
        super().__init__()
        out_features = out_features or in_features
        hidden_features = hidden_features or 2 * in_features
        linear_layer = functools.partial(nn.Conv2d, kernel_size=1) if use_conv else nn.Linear
        self.fc1 = linear_layer(in_features, hidden_features, bias=bias)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm_layer(hidden_features) if norm_layer is not None else nn.Identity()
        self.fc2 = linear_layer(hidden_features, out_features, bias=bias)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


@case("silu_mul", lambda c: (c(), T(2, S, W)))
class OthSlices(nn.Module):
    """Slices of tensor-parallel pretraining: each slice's layer by itself, partial results are summed."""

    def __init__(self, pretraining_tp=2, inner=96, hidden_act=nn.SiLU()):
        super().__init__()
        self.tp, self.inner = pretraining_tp, inner
        self.gate_proj, self.up_proj = nn.Linear(W, inner, bias=False), nn.Linear(W, inner, bias=False)
        self.down_proj, self.act_fn = nn.Linear(inner, W, bias=False), hidden_act

    def forward(self, x):
        if self.tp > 1:
            slice = self.inner // self.tp
            gate_slices, up_slices = self.gate_proj.weight.split(slice, dim=0), self.up_proj.weight.split(slice, dim=0)
            down_slices = self.down_proj.weight.split(slice, dim=1)
            gate = torch.cat([F.linear(x, gate_slices[i]) for i in range(self.tp)], dim=-1)
            up = torch.cat([F.linear(x, up_slices[i]) for i in range(self.tp)], dim=-1)
            states = (self.act_fn(gate) * up).split(slice, dim=-1)
            return sum([F.linear(states[i], down_slices[i]) for i in range(self.tp)])
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@case("bias_act", lambda c: (c(), T(2, S, W)))
class OthChannel(nn.Module):
    """A channel mix: what came a step before is mixed in, the square of what is above zero, and a gate outside."""

    def __init__(self, dim=W):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix_k, self.time_mix_r = nn.Parameter(torch.rand(1, 1, dim)), nn.Parameter(torch.rand(1, 1, dim))
        self.key, self.receptance, self.value = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        k = torch.square(torch.relu(self.key(xk)))
        return torch.sigmoid(self.receptance(xr)) * self.value(k)


# ---- linears
@case("linear", lambda c: (c(), T(2, S, W)))
class OthHeads(nn.Module):
    """One weight of three dimensions: a matrix of each head, by einsum (Gemma's and JAX ports' way)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, W, D) / 8)
        self.b = nn.Parameter(torch.randn(H, D) / 8)

    def forward(self, x):
        return torch.einsum("bsw,hwd->bshd", x, self.w) + self.b


@case("linear", lambda c: (c(), T(2, W, 5, 6)))
class OthPixels(nn.Module):
    """A convolution of single places by a matrix product, channels first."""

    def __init__(self, out=48):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, W, 1, 1) / 8), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        b, c, h, w = x.shape
        flat = x.permute(0, 2, 3, 1).reshape(b * h * w, c)
        y = F.linear(flat, self.weight.squeeze(-1).squeeze(-1), self.bias)
        return y.view(b, h, w, -1).permute(0, 3, 1, 2).contiguous()


# ---- routers and experts
class Routing(NamedTuple):
    weights: torch.Tensor
    experts: torch.Tensor
    logits: Optional[torch.Tensor] = None


@case("gate_topk", lambda c: (c(W, E), T(2, S, W)))
class OthRouter(nn.Module):
    """Mixtral's choice with a result of names; noise while it is trained alone; weights add up to one."""

    def __init__(self, dim, n_experts, k=K, jitter=0.0):
        super().__init__()
        self.k, self.jitter = k, jitter
        self.layer = nn.Linear(dim, n_experts, bias=False)

    def forward(self, x):
        x = x.reshape(-1, x.size(-1))
        if self.training and self.jitter > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        logits = self.layer(x)
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        top, experts = scores.topk(self.k, dim=-1)
        top = top / top.sum(dim=-1, keepdim=True)
        return Routing(top.to(x.dtype), experts, logits)


@case("gate_topk", lambda c: (c(), T(13, W)))
class OthTopThenSoft(nn.Module):
    """The logits of a few experts are chosen, a softmax of those, and a table of all experts with zeros elsewhere."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, W) / 8)

    def forward(self, x):
        logits = x @ self.gate.t()
        values, indices = torch.topk(logits, K, dim=-1)
        weights = F.softmax(values, dim=-1, dtype=torch.float).to(x.dtype)
        return torch.zeros_like(logits).scatter(-1, indices, weights), indices


@case("moe_experts", lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class OthSortedExperts(nn.Module):
    """DeepSeek's inference: tokens in order of experts, by counts, each expert a slice of them."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, topk_ids, topk_weight):
        idxs = topk_ids.view(-1).argsort()
        counts = torch.bincount(topk_ids.view(-1), minlength=E).tolist()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        outputs, start = [], 0
        for i, n in enumerate(counts):
            if n == 0:
                continue
            part = sorted_tokens[start : start + n]
            g, u = (part @ self.w_in[i].T).chunk(2, dim=-1)
            outputs.append((F.silu(g) * u) @ self.w_out[i].T)
            start += n
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype).mul_(topk_weight.unsqueeze(dim=-1)).sum(dim=1).type(new_x.dtype))


@case("moe_experts", lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class OthGathered(nn.Module):
    """Each token's matrices are gathered, and products are einsums (decoding of few tokens)."""

    def __init__(self):
        super().__init__()
        self.mlp1, self.mlp2 = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, t, expert_indices, expert_weights):
        w1 = self.mlp1[expert_indices]
        h = torch.einsum("beck,bk->bec", w1, t)
        gate, up = h.split(I, dim=-1)
        h = F.silu(gate) * up
        w2 = self.mlp2[expert_indices, ...]
        h = torch.einsum("beck,bek->bec", w2, h)
        return torch.einsum("bec,be->bc", h, expert_weights)


# ---- losses and heads
@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))))
class OthLm(nn.Module):
    """nanoGPT's end: a last norm, a head, a loss where targets are given, logits beside."""

    def __init__(self, vocab=V):
        super().__init__()
        self.ln_f, self.lm_head = nn.LayerNorm(W), nn.Linear(W, vocab, bias=False)

    def forward(self, x, targets=None):
        x = self.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :])


@case("cross_entropy", lambda c: (c(), T(2, S, V), torch.randint(V, (2, S)).masked_fill(torch.arange(S) > 8, -100)))
class OthZLoss(nn.Module):
    """OLMo's loss: a cross entropy and the square of the log of the sum, times a small number."""

    def __init__(self, ignore_index=-100, z_scale=1e-4):
        super().__init__()
        self.ignore_index, self.z_scale = ignore_index, z_scale

    def forward(self, logits, labels):
        flat, labels = logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1)
        loss = F.cross_entropy(flat, labels, ignore_index=self.ignore_index, reduction="mean")
        z_squared = flat.logsumexp(-1).pow(2)
        mask = labels != self.ignore_index
        return loss, self.z_scale * (z_squared * mask).sum() / mask.sum()


@case("cross_entropy", lambda c: (c(), T(15, 10), torch.randint(10, (15,))))
class OthSmooth(nn.Module):
    """Smoothed labels of images, by a log softmax and means."""

    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing
        self.confidence = 1.0 - smoothing

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logprobs = F.log_softmax(x, dim=-1)
        nll_loss = -logprobs.gather(dim=-1, index=target.unsqueeze(1))
        nll_loss = nll_loss.squeeze(1)
        smooth_loss = -logprobs.mean(dim=-1)
        loss = self.confidence * nll_loss + self.smoothing * smooth_loss
        return loss.mean()


@case("cross_entropy", lambda c: (c(), T(2, S, V), torch.randint(V, (2, S))))
class OthShift(nn.Module):
    """The next token's loss, of a criterion that is a child, with a softcap before."""

    def __init__(self, cap=30.0):
        super().__init__()
        self.criterion, self.final_logit_softcapping = nn.CrossEntropyLoss(reduction="none"), cap

    def forward(self, logits, labels):
        logits = self.final_logit_softcapping * torch.tanh(logits / self.final_logit_softcapping)
        shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        loss = self.criterion(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return loss.view(shift_labels.shape).mean(dim=1)


# ---- embeddings
@case("embedding", lambda c: (c(), torch.randint(V, (2, S))))
class OthTokens(nn.Module):
    """Tokens and learned positions, and a norm; positions are a buffer, and may be given."""

    def __init__(self, most=32):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(V, W, padding_idx=0), nn.Embedding(most, W)
        self.token_type_embeddings = nn.Embedding(2, W)
        self.LayerNorm, self.dropout = nn.LayerNorm(W, eps=1e-12), nn.Dropout(0.1)
        self.register_buffer("position_ids", torch.arange(most).expand((1, -1)), persistent=False)

    def forward(self, input_ids, token_type_ids=None, position_ids=None, past_length: int = 0):
        seq_length = input_ids.size(1)
        if position_ids is None:
            position_ids = self.position_ids[:, past_length : seq_length + past_length]
        if token_type_ids is None:
            token_type_ids = torch.zeros(input_ids.size(), dtype=torch.long, device=self.position_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings += self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


@case("embedding", lambda c: (c(), torch.randint(20, (2, S, 4))))
class OthBooks(nn.Module):
    """Several codebooks of audio: one table, an offset of each book, and their sum."""

    def __init__(self, books=4, size=20):
        super().__init__()
        self.table = nn.Embedding(books * size, W)
        self.register_buffer("audio_tokens_offsets", torch.arange(books) * size, persistent=False)

    def forward(self, codes):
        inputs_embeds = self.table(codes + self.audio_tokens_offsets.view(-1, books := codes.shape[-1]))
        return inputs_embeds.sum(dim=2)


# ---- convolutions, scans, delta rules
@case("causal_conv1d", lambda c: (c(), T(2, S, W)))
class OthShort(nn.Module):
    """A short convolution as a subclass of Conv1d, padded at the left by hand, with a mask that may be none."""

    class Conv(nn.Conv1d):
        def __init__(self, dim, kernel_size=4, activation="silu"):
            super().__init__(dim, dim, kernel_size, groups=dim, bias=False, padding=0)
            self.activation = activation

        def forward(self, x, mask=None, cache=None):
            if mask is not None:
                x = x * mask.unsqueeze(-1)
            if cache is not None:
                return self.step(x, cache)
            x = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
            x = self._conv_forward(x, self.weight, self.bias).transpose(1, 2)
            return F.silu(x) if self.activation is not None else x

        def step(self, x, cache):
            cache.copy_(torch.roll(cache, -1, -1))
            cache[..., -1] = x.squeeze(1)
            return F.silu((cache * self.weight.squeeze(1)).sum(-1))[:, None]

    def __init__(self):
        super().__init__()
        self.k_proj, self.k_conv1d = nn.Linear(W, W, bias=False), self.Conv(W)

    def forward(self, hidden_states):
        return F.normalize(self.k_conv1d(self.k_proj(hidden_states)).unflatten(-1, (H, D)), p=2, dim=-1)


@case("selective_scan", lambda c: (c(), T(2, S, 12)))
class OthMinimal(nn.Module):
    """A minimal Mamba: what a step takes is computed of x, whole tables of discretised A and B, a loop over steps."""

    def __init__(self, d_in=12, n=5, rank=3):
        super().__init__()
        self.n, self.rank = n, rank
        self.x_proj, self.dt_proj = nn.Linear(d_in, rank + 2 * n, bias=False), nn.Linear(rank, d_in)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(d_in, 1)))
        self.D = nn.Parameter(torch.ones(d_in))

    def ssm(self, x):
        A, D = -torch.exp(self.A_log.float()), self.D.float()
        delta, B, C = self.x_proj(x).split(split_size=[self.rank, self.n, self.n], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        return self.selective_scan(x, delta, A, B, C, D)

    def selective_scan(self, u, delta, A, B, C, D):
        (b, l, d_in), n = u.shape, A.shape[1]
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x = torch.zeros((b, d_in, n), device=deltaA.device)
        ys = []
        for i in range(l):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            y = torch.einsum("bdn,bn->bd", x, C[:, i, :])
            ys.append(y)
        y = torch.stack(ys, dim=1)
        return y + u * D

    def forward(self, x):
        return self.ssm(x)


@case("gated_delta_rule", lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class OthDelta(nn.Module):
    """A gated delta rule as a reference in tests has it: einsums, heads in front, a state that may be given."""

    def rule(self, q, k, v, beta, g, scale=None, initial_state=None):
        q, k, v, beta, g = map(lambda x: x.transpose(1, 2).contiguous().to(torch.float32), [q, k, v, beta, g])
        B, H, T, K, V = *k.shape, v.shape[-1]
        o = torch.zeros(B, H, T, V, dtype=v.dtype, device=v.device)
        h = torch.zeros(B, H, K, V, dtype=v.dtype, device=v.device)
        if initial_state is not None:
            h = initial_state
        if scale is None:
            scale = 1 / (q.shape[-1] ** 0.5)
        q = q * scale
        for i in range(T):
            b_q, b_k, b_v = q[:, :, i], k[:, :, i], v[:, :, i].clone()
            h = h.clone() * g[:, :, i].exp()[..., None, None]
            b_v = b_v - (h.clone() * b_k[..., None]).sum(-2)
            b_v = b_v * beta[:, :, i][..., None]
            h = h.clone() + b_k.unsqueeze(-1) * b_v.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", b_q, h)
        return o.transpose(1, 2).contiguous()

    def forward(self, q, k, v, a, b):
        q, k = F.normalize(q, p=2, dim=-1), F.normalize(k, p=2, dim=-1)
        return self.rule(q, k, v, b.sigmoid(), F.logsigmoid(a))
'''
