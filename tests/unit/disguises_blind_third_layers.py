# ruff: noqa: E501
"""The sixth set of right modules: norms, feed-forwards and convolutions."""

from __future__ import annotations

THIRD_LAYERS = r"""
W, E, K, I = 48, 4, 2, 32


# ---- norms
@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class CastLate(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(hidden_size)), eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class NormByNorm(nn.Module):
    def __init__(self, d, eps=1e-8):
        super().__init__()
        self.d, self.eps, self.scale = d, eps, nn.Parameter(torch.rand(d))

    def forward(self, x):
        ms = torch.sum(torch.pow(x, 2), dim=-1, keepdim=True).div(self.d)
        return torch.mul(x.div(torch.sqrt(ms.add(self.eps))), self.scale)


@case("layer_norm", lambda c: (c(W), T(2, 5, W), T(2, W), T(2, W)))
class Modulated(nn.Module):
    '''DiT: a norm without weights, then a shift and a scale of each sample.'''

    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n, elementwise_affine=False, eps=1e-6)

    def forward(self, x, shift, scale):
        return self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@case("layer_norm", lambda c: (c(W), T(2, W, 5)))
class ChannelNorm1d(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        x = x.transpose(1, -1)
        x = F.layer_norm(x, (x.shape[-1],), self.gamma, self.beta, self.eps)
        return x.transpose(1, -1)


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class Moments(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w, self.b, self.eps = nn.Parameter(torch.rand(n)), nn.Parameter(torch.randn(n)), 1e-5

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        xhat = (x - mean) / (var + self.eps).sqrt()
        return torch.addcmul(self.b, self.w, xhat)


@case("group_norm", lambda c: (c(W), T(2, W, 4, 3)))
class GroupsByView(nn.Module):
    def __init__(self, ch, g=6):
        super().__init__()
        self.g, self.weight, self.bias = g, nn.Parameter(torch.rand(1, ch, 1, 1)), nn.Parameter(torch.randn(1, ch, 1, 1))

    def forward(self, x):
        n, c, h, w = x.size()
        x = x.view(n, self.g, -1)
        x = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
        return x.view(n, c, h, w) * self.weight + self.bias


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class Block(nn.Module):
    '''Pre-norm with a layer scale on the branch.'''

    def __init__(self, n):
        super().__init__()
        self.norm = CastLate(n)
        self.ff = nn.Linear(n, n)
        self.gamma = nn.Parameter(1e-2 * torch.ones(n))

    def forward(self, x):
        return x + self.gamma * self.ff(self.norm(x))


# ---- feed-forwards
@case("silu_mul", lambda c: (c(W, I), T(2, 5, W)))
class Packed(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(n, 2 * inner, bias=False), nn.Linear(inner, n, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


@case("silu_mul", lambda c: (c(W, I), T(2, 5, W)))
class PackedOther(nn.Module):
    '''The second half is the gate.'''

    def __init__(self, n, inner):
        super().__init__()
        self.w12, self.w3 = nn.Linear(n, 2 * inner), nn.Linear(inner, n)

    def forward(self, x):
        x, gate = self.w12(x).split(self.w12.out_features // 2, dim=-1)
        return self.w3(F.silu(gate) * x)


@case("gelu_mul", lambda c: (c(W), T(2, W, 4, 3)))
class GatedByOnes(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.project_in, self.project_out = nn.Conv2d(n, 2 * I, 1, bias=False), nn.Conv2d(I, n, 1, bias=False)

    def forward(self, x):
        x1, x2 = self.project_in(x).chunk(2, dim=1)
        return self.project_out(F.gelu(x1) * x2)


@case("bias_act", lambda c: (c(W), T(2, 5, W)))
class ByConv1(nn.Module):
    '''Fairseq and TTS: linears are convolutions of width 1.'''

    def __init__(self, n):
        super().__init__()
        self.w_1, self.w_2 = nn.Conv1d(n, 2 * n, 1), nn.Conv1d(2 * n, n, 1)
        self.layer_norm, self.dropout = nn.LayerNorm(n), nn.Dropout(0.1)

    def forward(self, x):
        residual = x
        output = x.transpose(1, 2)
        output = self.w_2(F.relu(self.w_1(output)))
        output = self.dropout(output.transpose(1, 2))
        return self.layer_norm(output + residual)


@case("linear", lambda c: (c(W, I), T(2, 5, W)))
class Conv1D(nn.Module):
    '''GPT-2: weights lie the other way.'''

    def __init__(self, nx, nf):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 7), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


@case("gelu_mul", lambda c: (c(W, I), T(2, 5, W)))
class DenseGated(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(n, inner, bias=False), nn.Linear(n, inner, bias=False), nn.Linear(inner, n, bias=False)
        self.dropout = nn.Dropout(0.1)

    @staticmethod
    def act(input):
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))

    def forward(self, h):
        h = self.act(self.wi_0(h)) * self.wi_1(h)
        return self.wo(self.dropout(h))


@case("bias_act", lambda c: (c(W), T(2, 5, W)))
class SquaredRelu(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(n, 2 * n, bias=False), nn.Linear(2 * n, n, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


# ---- convolutions
@case("causal_conv1d", lambda c: (c(W), T(2, 9, W)))
class PadLeft(nn.Module):
    def __init__(self, n, k=4):
        super().__init__()
        self.k, self.conv = k, nn.Conv1d(n, n, kernel_size=k, groups=n, bias=True)

    def forward(self, x):
        x = x.transpose(1, 2)
        x = F.pad(x, (self.k - 1, 0), value=0.0)
        return F.silu(self.conv(x)).transpose(1, 2)


@case("causal_conv1d", lambda c: (c(W), T(2, 9, W)))
class Mixes(nn.Module):
    '''RWKV: each row and the one before, in shares that are a parameter.'''

    def __init__(self, n):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix = nn.Parameter(torch.rand(1, 1, n))

    def forward(self, x):
        xx = self.time_shift(x)
        return x * self.time_mix + xx * (1 - self.time_mix)


@case("causal_conv1d", lambda c: (c(W), T(2, W, 9)))
class Trimmed(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.conv1d = nn.Conv1d(n, n, bias=True, kernel_size=3, groups=n, padding=2)
        self.chomp = 2

    def forward(self, x):
        x = self.conv1d(x)
        return x[:, :, : -self.chomp].contiguous()


@case("causal_conv1d", lambda c: (c(W), T(2, 9, W)))
class Stepped(nn.Module):
    '''Shifted rows of a list.'''

    def __init__(self, n, k=3):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(k, n) / 2)

    def forward(self, x):
        b, t, n = x.shape
        out = self.filters[0] * x
        for j in range(1, self.filters.shape[0]):
            shifted = torch.cat([x.new_zeros(b, j, n), x[:, :-j]], dim=1)
            out = out + self.filters[j] * shifted
        return out
"""
