# ruff: noqa: E501
"""The fifteenth set: everything but attention and rotations, written without a look at the porting code."""

from __future__ import annotations

FIFTEENTH = r'''
import dataclasses, functools
from collections import OrderedDict
from typing import List, NamedTuple, Optional, Tuple, Union
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- norms of images and sequences
def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@case("layer_norm", lambda c: (c(W), T(2, S, W), T(2, W)))
class FfDit(nn.Module):
    """A diffusion transformer's last layer: a norm without weights, a shift and a scale of the condition."""

    def __init__(self, hidden_size, patch=2, out_channels=4):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch * patch * out_channels, bias=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = modulate(self.norm_final(x), shift, scale)
        return self.linear(x)


class FloatNorm(nn.LayerNorm):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        origin_dtype = inputs.dtype
        return F.layer_norm(
            inputs.float(),
            self.normalized_shape,
            self.weight.float() if self.weight is not None else None,
            self.bias.float() if self.bias is not None else None,
            self.eps,
        ).to(origin_dtype)


@case("layer_norm", lambda c: (c(W), T(2, S, W), T(2, 6, W)))
class FfVideoBlock(nn.Module):
    """A video model's block: a learned table is added to six parts of the time, and a norm is in float32."""

    def __init__(self, dim):
        super().__init__()
        self.norm1 = FloatNorm(dim, 1e-6, elementwise_affine=False)
        self.norm2 = FloatNorm(dim, 1e-6, elementwise_affine=True)
        self.mix = nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, hidden_states, temb):
        shift_msa, scale_msa, gate_msa, c_shift, c_scale, c_gate = (self.scale_shift_table + temb.float()).chunk(6, dim=1)
        norm = (self.norm1(hidden_states.float()) * (1 + scale_msa) + shift_msa).type_as(hidden_states)
        hidden_states = (hidden_states.float() + self.mix(norm) * gate_msa).type_as(hidden_states)
        norm = (self.norm2(hidden_states.float()) * (1 + c_scale) + c_shift).type_as(hidden_states)
        return (hidden_states.float() + self.ffn(norm).float() * c_gate).type_as(hidden_states)


@case("group_norm", lambda c: (c(16), T(2, 16, 3, 4, 5)))
class FfFrames(nn.Module):
    """A video autoencoder's step: each frame is an image, and frames are part of the batch while it is normed."""

    def __init__(self, channels, groups=4):
        super().__init__()
        self.norm = nn.GroupNorm(num_groups=groups, num_channels=channels, eps=1e-6, affine=True)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        y = self.norm(y)
        y = y * torch.sigmoid(y)
        y = self.conv(y)
        return x + y.view(b, t, c, h, w).transpose(1, 2)


class WideGroups(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


def normalization(channels, groups=8):
    return WideGroups(groups, channels)


@case("group_norm", lambda c: (c(32, 48, out_channels=16), T(2, 32, 6, 6), T(2, 48)))
class FfAdm(nn.Module):
    """A guided diffusion's residual block, whose second norm is scaled and shifted by the time."""

    def __init__(self, channels, emb_channels, dropout=0.0, out_channels=None, use_scale_shift_norm=True):
        super().__init__()
        self.out_channels = out_channels or channels
        self.use_scale_shift_norm = use_scale_shift_norm
        self.in_layers = nn.Sequential(normalization(channels), nn.SiLU(), nn.Conv2d(channels, self.out_channels, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, 2 * self.out_channels if use_scale_shift_norm else self.out_channels))
        self.out_layers = nn.Sequential(
            normalization(self.out_channels, 4), nn.SiLU(), nn.Dropout(p=dropout), nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)
        )
        self.skip = nn.Identity() if self.out_channels == channels else nn.Conv2d(channels, self.out_channels, 1)

    def forward(self, x, emb):
        h = self.in_layers(x)
        emb_out = self.emb_layers(emb).type(h.dtype)
        while len(emb_out.shape) < len(h.shape):
            emb_out = emb_out[..., None]
        if self.use_scale_shift_norm:
            out_norm, out_rest = self.out_layers[0], self.out_layers[1:]
            scale, shift = torch.chunk(emb_out, 2, dim=1)
            h = out_norm(h) * (1 + scale) + shift
            h = out_rest(h)
        else:
            h = self.out_layers(h + emb_out)
        return self.skip(x) + h


class ChannelNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.channels, self.eps = channels, eps
        self.gamma, self.beta = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        x = x.transpose(1, -1)
        x = F.layer_norm(x, (self.channels,), self.gamma, self.beta, self.eps)
        return x.transpose(1, -1)


@case("layer_norm", lambda c: (c(24), T(2, 24, S), (torch.arange(S) < torch.tensor([[S], [7]])).float()[:, None]))
class FfSpeech(nn.Module):
    """A speech model's dilated, depthwise convolutions with norms of channels, and a mask of lengths."""

    def __init__(self, channels, kernel_size=3, n_layers=2, p_dropout=0.0):
        super().__init__()
        self.n_layers = n_layers
        self.drop = nn.Dropout(p_dropout)
        self.convs_sep, self.convs_1x1, self.norms_1, self.norms_2 = (nn.ModuleList() for _ in range(4))
        for i in range(n_layers):
            dilation = kernel_size**i
            padding = (kernel_size * dilation - dilation) // 2
            self.convs_sep.append(nn.Conv1d(channels, channels, kernel_size, groups=channels, dilation=dilation, padding=padding))
            self.convs_1x1.append(nn.Conv1d(channels, channels, 1))
            self.norms_1.append(ChannelNorm(channels))
            self.norms_2.append(ChannelNorm(channels))

    def forward(self, x, x_mask, g=None):
        if g is not None:
            x = x + g
        for i in range(self.n_layers):
            y = self.convs_sep[i](x * x_mask)
            y = F.gelu(self.norms_1[i](y))
            y = self.convs_1x1[i](y)
            y = self.drop(F.gelu(self.norms_2[i](y)))
            x = x + y
        return x * x_mask


@case("group_norm", lambda c: (c(24), T(3, 24, 20)))
class FfSeparator(nn.Module):
    """A separation network's norm over channels and time together, by means of means."""

    def __init__(self, channel_size, eps=1e-8):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.rand(1, channel_size, 1) + 0.5)
        self.beta = nn.Parameter(torch.randn(1, channel_size, 1))
        self.prelu = nn.PReLU()

    def gln(self, y):
        mean = y.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        var = (torch.pow(y - mean, 2)).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + self.eps, 0.5) + self.beta

    def forward(self, x):
        return self.gln(self.prelu(x))


@case("gated_rms_norm", lambda c: (c(), T(2, S, 4 * 12), T(2, S, 4 * 12)))
class FfHeadGate(nn.Module):
    """Each head's output is normed in float32, weighted, and then gated."""

    def __init__(self, heads=4, width=12, eps=1e-6):
        super().__init__()
        self.heads, self.width, self.variance_epsilon = heads, width, eps
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.out = nn.Linear(heads * width, W, bias=False)

    def norm(self, hidden_states, gate):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * F.silu(gate.to(torch.float32))
        return hidden_states.to(input_dtype)

    def forward(self, o, z):
        shape = o.shape
        o, z = o.reshape(-1, self.width), z.reshape(-1, self.width)
        return self.out(self.norm(o, z).reshape(shape))


# ---- feed-forwards and gates
@case("silu_mul", lambda c: (c(W, 40), T(2, S, W)))
class FfPacked(nn.Module):
    """Two matrices in one parameter, which a single product uses (a fused layer's way to write it)."""

    def __init__(self, in_features, hidden_features, out_features=None, bias=True):
        super().__init__()
        out_features = out_features or in_features
        self.hidden_features = hidden_features
        self.w12 = nn.Parameter(torch.randn(2, hidden_features, in_features) / 8)
        self.b12 = nn.Parameter(torch.randn(2, hidden_features) / 4) if bias else None
        self.w3 = nn.Linear(hidden_features, out_features, bias=bias)

    def forward(self, x):
        w12 = self.w12.view(-1, self.w12.shape[-1])
        b12 = self.b12.flatten() if self.b12 is not None else None
        x1, x2 = F.linear(x, w12, b12).unflatten(-1, (2, self.hidden_features)).unbind(dim=-2)
        return self.w3(F.silu(x1) * x2)


ACT2CLS = {"gelu": nn.GELU, "gelu_tanh": (nn.GELU, {"approximate": "tanh"}), "silu": nn.SiLU, "relu": nn.ReLU}


def get_activation(name):
    found = ACT2CLS[name]
    cls, kwargs = found if isinstance(found, tuple) else (found, {})
    return cls(**kwargs)


@dataclasses.dataclass
class EncoderConfig:
    hidden_size: int = W
    intermediate_size: int = 44
    hidden_activation: str = "gelu"
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    norm_eps: float = 1e-5


@case("gelu_mul", lambda c: (c(EncoderConfig()), T(2, S, W)))
class FfEncoder(nn.Module):
    """A modern encoder's feed-forward behind its norm, in parts of tokens where a setting says so."""

    def __init__(self, config, chunk_size_feed_forward=0):
        super().__init__()
        self.config, self.chunk = config, chunk_size_feed_forward
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        self.Wi = nn.Linear(config.hidden_size, int(config.intermediate_size) * 2, bias=config.mlp_bias)
        self.act = get_activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def feed(self, hidden_states):
        input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
        return self.Wo(self.drop(self.act(input) * gate))

    def forward(self, hidden_states):
        normed = self.mlp_norm(hidden_states)
        if self.chunk > 0:
            return hidden_states + torch.cat([self.feed(part) for part in normed.split(self.chunk, dim=1)], dim=1)
        return hidden_states + self.feed(normed)


@torch.jit.ignore
def bias_gelu(y, bias):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@case("bias_act", lambda c: (c(), T(S, 2, W)))
class FfBiasLater(nn.Module):
    """A parallel model's layer gives its bias apart, and the activation adds it; the last one is added by hand."""

    class SkipBias(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight), self.bias

    def __init__(self, inner=96):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = self.SkipBias(W, inner), self.SkipBias(inner, W)

    def forward(self, hidden_states, residual=None):
        intermediate, bias = self.dense_h_to_4h(hidden_states)
        intermediate = bias_gelu(intermediate, bias)
        output, bias = self.dense_4h_to_h(intermediate)
        output = output + bias
        return output if residual is None else output + residual


# ---- convolutions
@case("causal_conv1d", lambda c: (c(W), T(2, S, W)))
class FfShortGate(nn.Module):
    """A short convolution between two gates, of one layer's three parts; what is padded too much is cut off."""

    def __init__(self, dim, L_cache=3, bias=False):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, kernel_size=L_cache, groups=dim, bias=bias, padding=L_cache - 1)
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, x, attention_mask=None):
        seqlen = x.shape[1]
        if attention_mask is not None and attention_mask.shape[1] > 1:
            x = (x * attention_mask[:, :, None]).to(x.dtype)
        BCx = self.in_proj(x).transpose(-1, -2)
        B, C, x = BCx.chunk(3, dim=-2)
        Bx = B * x
        conv_out = self.conv(Bx)[..., :seqlen]
        y = C * conv_out
        return self.out_proj(y.transpose(-1, -2).contiguous())


@case("causal_conv1d", lambda c: (c(32), T(2, S, 32)))
class FfLeftPad(nn.Conv1d):
    """A subclass of torch's convolution that takes tokens last but one, and pads on the left alone."""

    def __init__(self, hidden_size, kernel_size=4, activation="silu"):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=True, padding=0)
        self.activation = activation

    def forward(self, x, mask=None):
        if mask is not None:
            x = x.mul(mask.unsqueeze(-1))
        x = x.movedim(-1, -2)
        x = F.pad(x, (self.kernel_size[0] - 1, 0))
        y = self._conv_forward(x, self.weight, self.bias).movedim(-2, -1)
        return F.silu(y) if self.activation is not None else y


# ---- routers and experts
@case("gate_topk", lambda c: (c(), T(2, S, W)))
class FfBiasedSoft(nn.Module):
    """Shares of a softmax; a bias decides who is chosen, and not how much they weigh; a floor under the sum."""

    def __init__(self, n=6, k=3):
        super().__init__()
        self.top_k, self.norm_min = k, 1e-12
        self.weight = nn.Parameter(torch.randn(n, W) / 8)
        self.e_score_correction_bias = nn.Parameter(torch.randn(1, n) / 20, requires_grad=False)

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        with torch.autocast(device_type="cpu", enabled=False):
            logits = F.linear(hidden_states.float(), self.weight.float())
            routing_weights = F.softmax(logits, dim=-1, dtype=torch.float)
            _, selected = torch.topk(routing_weights + self.e_score_correction_bias.squeeze(), self.top_k, dim=-1)
            routing_weights = torch.gather(routing_weights, dim=-1, index=selected)
            routing_weights = routing_weights / torch.clamp(routing_weights.sum(dim=-1, keepdim=True), min=self.norm_min)
        return logits, selected, routing_weights.to(hidden_states.dtype)


@case("moe_experts", lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class FfParallel(nn.Module):
    """Tokens are sorted by their expert, cut into a list of sizes, and each part has a matrix of a stack."""

    class Stack(nn.Module):
        def __init__(self, n, n_in, n_out):
            super().__init__()
            self.weight, self.n = nn.Parameter(torch.randn(n, n_out, n_in) / n_in**0.5), n

        def forward(self, inputs, sizes):
            parts = inputs.split(sizes, dim=0)
            return torch.cat([F.linear(parts[i], self.weight[i]) for i in range(self.n)], dim=0)

    def __init__(self):
        super().__init__()
        self.input_linear, self.output_linear, self.activation = self.Stack(E, W, 2 * I), self.Stack(E, I, W), nn.SiLU()

    def forward(self, x, top_k_index, top_k_gates):
        flat = top_k_index.flatten()
        _, order = flat.sort(0)
        batch_index = order.div(K, rounding_mode="trunc")
        sizes = torch.bincount(flat, minlength=E).tolist()
        gates = top_k_gates.flatten()[order]
        h = self.input_linear(x[batch_index], sizes)
        a, b = h.chunk(2, dim=-1)
        out = self.output_linear(self.activation(a) * b, sizes) * gates[:, None]
        zeros = torch.zeros((x.shape[0], x.shape[1]), dtype=out.dtype, device=out.device)
        return zeros.index_add(0, batch_index, out)


# ---- embeddings
@case("embedding", lambda c: (c(), torch.randint(2, V, (2, S)).masked_fill(torch.arange(S) > 8, 1)))
class FfPositions(nn.Module):
    """Words, their places (which padding has none of) and a kind, in a sum that is normed."""

    def __init__(self, padding_idx=1):
        super().__init__()
        self.padding_idx = padding_idx
        self.word_embeddings = nn.Embedding(V, W, padding_idx=padding_idx)
        self.position_embeddings = nn.Embedding(24, W, padding_idx=padding_idx)
        self.token_type_embeddings = nn.Embedding(2, W)
        self.LayerNorm, self.dropout = nn.LayerNorm(W, eps=1e-5), nn.Dropout(0.1)
        self.register_buffer("token_type_ids", torch.zeros(1, 24, dtype=torch.long), persistent=False)

    def places(self, input_ids, past=0):
        mask = input_ids.ne(self.padding_idx).int()
        return ((torch.cumsum(mask, dim=1).type_as(mask) + past) * mask).long() + self.padding_idx

    def forward(self, input_ids=None, token_type_ids=None, inputs_embeds=None):
        position_ids = self.places(input_ids)
        if token_type_ids is None:
            token_type_ids = self.token_type_ids[:, : input_ids.shape[1]].expand(*input_ids.shape)
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        embeddings = inputs_embeds + self.token_type_embeddings(token_type_ids)
        embeddings += self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


# ---- losses
@case("cross_entropy", lambda c: (c(), T(2, 12, V), torch.randint(V, (2, 12)).masked_fill(torch.arange(12) < 3, -100)))
class FfChunks(nn.Module):
    """A loss over parts of the tokens, so that few logits are wide at a time; their sum by how many count."""

    def __init__(self, num_output_chunks=4, ignore_index=-100):
        super().__init__()
        self.num_output_chunks, self.ignore_index = num_output_chunks, ignore_index

    def one(self, logits, labels):
        return F.cross_entropy(logits.float(), labels, ignore_index=self.ignore_index, reduction="sum")

    def forward(self, logits, labels):
        total_elements = (labels != self.ignore_index).sum()
        labels = [target.reshape(-1) for target in labels.chunk(self.num_output_chunks, dim=1)]
        logits = [part.reshape(-1, part.size(-1)) for part in logits.chunk(self.num_output_chunks, dim=1)]
        total_loss = 0.0
        for logits_chunk, labels_chunk in zip(logits, labels):
            total_loss += self.one(logits_chunk, labels_chunk)
        return total_loss / total_elements


@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))))
class FfHeadZ(nn.Module):
    """A head, and a loss with the square of the log of the sum beside it, as one number."""

    def __init__(self, z_weight=1e-3):
        super().__init__()
        self.norm, self.output = nn.RMSNorm(W, eps=1e-5), nn.Linear(W, V, bias=False)
        self.z_weight = z_weight

    def forward(self, h, labels):
        logits = self.output(self.norm(h)).flatten(0, 1).float()
        labels = labels.flatten(0, 1)
        lse = torch.logsumexp(logits, dim=-1)
        nll = lse - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return nll.mean() + self.z_weight * lse.square().mean()


@case("cross_entropy", lambda c: (c(), T(2, S, V), torch.randint(V, (2, S)).masked_fill(torch.arange(S) > 8, -100)))
class FfSmoother(nn.Module):
    """Smoothed labels, by a log softmax whose rows of padding are filled with zeros."""

    def __init__(self, epsilon: float = 0.1, ignore_index: int = -100):
        super().__init__()
        self.epsilon, self.ignore_index = epsilon, ignore_index

    def forward(self, logits, labels):
        log_probs = -F.log_softmax(logits, dim=-1)
        if labels.dim() == log_probs.dim() - 1:
            labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        labels = torch.clamp(labels, min=0)
        nll_loss = log_probs.gather(dim=-1, index=labels)
        smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
        nll_loss = nll_loss.masked_fill(padding_mask, 0.0)
        smoothed_loss = smoothed_loss.masked_fill(padding_mask, 0.0)
        num_active_elements = padding_mask.numel() - padding_mask.long().sum()
        nll_loss = nll_loss.sum() / num_active_elements
        smoothed_loss = smoothed_loss.sum() / (num_active_elements * log_probs.shape[-1])
        return (1 - self.epsilon) * nll_loss + self.epsilon * smoothed_loss


# ---- scans
@case("selective_scan", lambda c: (c(32), T(2, S, 32)))
class FfMinimal(nn.Module):
    """The heart of a state-space block, in few lines: a matrix of three parts, and a loop over tokens."""

    def __init__(self, d_inner, dt_rank=4, d_state=6):
        super().__init__()
        self.dt_rank, self.d_state = dt_rank, d_state
        self.x_proj = nn.Linear(d_inner, dt_rank + d_state * 2, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=True)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, d_state + 1).float().repeat(d_inner, 1)))
        self.D = nn.Parameter(torch.ones(d_inner))

    def ssm(self, x):
        A, Dskip = -torch.exp(self.A_log.float()), self.D.float()
        delta, B, C = self.x_proj(x).split(split_size=[self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        return self.selective_scan(x, delta, A, B, C, Dskip)

    def selective_scan(self, u, delta, A, B, C, Dskip):
        b, l, d_in = u.shape
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x = torch.zeros((b, d_in, A.shape[1]), device=deltaA.device)
        ys = []
        for i in range(l):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
        return torch.stack(ys, dim=1) + u * Dskip

    def forward(self, x):
        return self.ssm(x)


@case("gated_delta_rule", lambda c: (c(), T(2, S, W)))
class FfLinearHead(nn.Module):
    """A layer of a delta rule with decays: three matrices, keys of length one, and a state that goes along."""

    def __init__(self, heads=3, dk=8, dv=10):
        super().__init__()
        self.heads, self.dk, self.dv = heads, dk, dv
        self.qk_proj, self.v_proj = nn.Linear(W, 2 * heads * dk, bias=False), nn.Linear(W, heads * dv, bias=False)
        self.b_proj, self.a_proj = nn.Linear(W, heads, bias=False), nn.Linear(W, heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(heads).log()), nn.Parameter(torch.rand(heads))
        self.o_proj = nn.Linear(heads * dv, W, bias=False)

    def rule(self, q, k, v, beta, g, scale=None, initial_state=None):
        q, k, v, beta, g = (t.transpose(1, 2).to(torch.float32) for t in (q, k, v, beta, g))
        b, h, t, dk = k.shape
        o = torch.zeros(b, h, t, v.shape[-1]).to(v)
        s = torch.zeros(b, h, dk, v.shape[-1]).to(v) if initial_state is None else initial_state
        scale = dk**-0.5 if scale is None else scale
        for i in range(t):
            b_q, b_k, b_v, b_beta = q[:, :, i] * scale, k[:, :, i], v[:, :, i].clone(), beta[:, :, i]
            s = s.clone() * g[:, :, i].exp()[..., None, None]
            b_v = b_v - (s.clone() * b_k[..., None]).sum(-2)
            b_v = b_v * b_beta[..., None]
            s = s.clone() + b_k.unsqueeze(-1) * b_v.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", b_q, s)
        return o.transpose(1, 2)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = (F.normalize(z.view(b, t, self.heads, self.dk), p=2, dim=-1) for z in self.qk_proj(x).chunk(2, dim=-1))
        v = self.v_proj(x).view(b, t, self.heads, self.dv)
        beta = self.b_proj(x).sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias)
        return self.o_proj(self.rule(q, k, v, beta, g).to(x.dtype).flatten(-2))
'''
