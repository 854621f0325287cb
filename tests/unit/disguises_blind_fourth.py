# ruff: noqa: E501
"""The seventh set of right modules: norms, linear layers and gated layers of more strangers."""

from __future__ import annotations

FOURTH = r"""
C = 64


def wide(n=C, by=1.0):
    return nn.Parameter(1.0 + 0.3 * by * torch.sin(torch.arange(n).float()))


@case("rms_norm", lambda c: (c(C), T(2, 5, C)))
class FlaxScale(nn.Module):
    def __init__(self, features, epsilon=1e-6):
        super().__init__()
        self.scale = nn.Parameter(0.2 * torch.randn(features))
        self.epsilon = epsilon

    def _normed_inputs(self, inputs):
        mean_sq = torch.mean(torch.square(inputs), dim=-1, keepdim=True)
        return inputs * torch.rsqrt(mean_sq + self.epsilon)

    def forward(self, inputs):
        dtype = inputs.dtype
        normed = self._normed_inputs(inputs.to(torch.float32))
        scale = self.scale.to(torch.float32).reshape((1,) * (inputs.ndim - 1) + (-1,))
        return (normed * (scale + 1)).to(dtype)


@case("rms_norm", lambda c: (c(), T(3, 4, C)))
class SumThenRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("lam", wide())
        self.register_buffer("tiny", torch.tensor(1e-5), persistent=False)

    def forward(self, h):
        n = h.size(-1)
        energy = torch.einsum("...i,...i->...", h, h).unsqueeze(-1)
        denominator = torch.sqrt(torch.add(torch.div(energy, n), self.tiny))
        return torch.mul(torch.div(h, denominator), self.lam)


@case("layer_norm", lambda c: (c(C), T(2, 5, C)))
class AnnotatedLn(nn.Module):
    "From the annotated transformer, with the variance's eps under the root."

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.a_2, self.b_2, self.eps = wide(size), nn.Parameter(torch.linspace(-1, 1, size)), eps

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        sigma = x.std(-1, keepdim=True, unbiased=False)
        return self.a_2 * ((x - mu) / (sigma ** 2 + self.eps) ** 0.5) + self.b_2


@case("group_norm", lambda c: (c(12), T(2, 12, 20)))
class GlobalLn(nn.Module):
    "Speech separation: over channels and time together."

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, channels).view(1, channels, 1))
        self.beta = nn.Parameter(torch.linspace(-1, 1, channels).view(1, channels, 1))

    def forward(self, y):
        mean = y.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        var = (torch.pow(y - mean, 2)).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + 1e-8, 0.5) + self.beta


@case("group_norm", lambda c: (c(16, 4), T(2, 16, 6, 5)))
class ImageGroups(nn.Module):
    def __init__(self, ch, g):
        super().__init__()
        self.g, self.w, self.b = g, nn.Parameter(torch.linspace(0.5, 1.5, ch)[None, :, None, None]), nn.Parameter(torch.zeros(1, ch, 1, 1))

    def forward(self, img):
        n, c, hh, ww = img.shape
        z = img.reshape(n, self.g, c // self.g * hh * ww)
        v, m = torch.var_mean(z, dim=-1, correction=0, keepdim=True)
        z = (z - m) * (v + 1e-6).rsqrt()
        return z.reshape(n, c, hh, ww) * self.w + self.b


@case("gated_rms_norm", lambda c: (c(), T(2, 5, C), T(2, 5, C)))
class SsmOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = wide()

    def forward(self, y, z):
        y32 = y.float() * (z.float() * torch.sigmoid(z.float()))
        ms = (y32 * y32).sum(-1, keepdim=True) / y32.shape[-1]
        return (y32 / (ms + 1e-5).sqrt() * self.weight).type_as(y)


@case("add_rms_norm", lambda c: (c(), T(2, 5, C), T(2, 5, C)))
class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = wide()

    def forward(self, delta, stream):
        stream = stream + delta
        unit = stream * torch.reciprocal(torch.sqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6))
        return unit * self.w, stream


@case("rms_norm", lambda c: (c(), T(2, 7, 4, 16), T(2, 7, 2, 16)))
class QkPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_gain, self.k_gain = wide(16), wide(16, 2.0)

    @staticmethod
    def unit(t, gain):
        return F.rms_norm(t, (t.shape[-1],), eps=1e-6) * gain

    def forward(self, q, k):
        return self.unit(q, self.q_gain), self.unit(k, self.k_gain)


@case("layer_norm", lambda c: (c(), T(2, 5, C), T(2, C)))
class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(C, 2 * C)

    def forward(self, x, cond):
        shift, scale = self.lin(F.silu(cond))[:, None].chunk(2, dim=2)
        c = x - x.mean(2, True)
        n = c * torch.rsqrt(c.square().mean(2, True) + 1e-6)
        return torch.addcmul(shift, n, 1 + scale)


@case("linear", lambda c: (c(C, 96), T(2, 5, C)))
class JaxDense(nn.Module):
    def __init__(self, din, dout):
        super().__init__()
        self.params = nn.ParameterDict({"kernel": nn.Parameter(0.1 * torch.randn(din, dout)), "bias": nn.Parameter(torch.linspace(-1, 1, dout))})

    def forward(self, x):
        y = torch.tensordot(x, self.params["kernel"], dims=1)
        return y + self.params["bias"]


@case("linear", lambda c: (c(), T(2, 5, C)))
class DenseGeneral(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(0.1 * torch.randn(C, 4, 16))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 64).reshape(4, 16))

    def forward(self, x):
        return torch.einsum("btd,dhk->bthk", x, self.kernel) + self.bias


@case("linear", lambda c: (c(), T(2, 5, C)))
class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.g, self.b = nn.Parameter(torch.randn(32, C)), nn.Parameter(torch.linspace(0.5, 1.5, 32)), nn.Parameter(torch.zeros(32))

    @property
    def weight(self):
        return self.v * (self.g / self.v.norm(dim=1)).unsqueeze(1)

    def forward(self, x):
        return F.linear(x, self.weight, self.b)


@case("linear", lambda c: (c(), T(2, 5, C)))
class MergedLora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(C, 48, bias=False)
        self.down, self.up, self.alpha = nn.Parameter(0.1 * torch.randn(8, C)), nn.Parameter(0.1 * torch.randn(48, 8)), 16

    def forward(self, x):
        return F.linear(x, self.base.weight + (self.alpha / 8) * (self.up @ self.down))


@case("linear", lambda c: (c(), T(2, 5, C)))
class Equalised(nn.Module):
    def __init__(self, lr=0.01):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(40, C) / lr), nn.Parameter(torch.linspace(-1, 1, 40))
        self.w_gain, self.b_gain = lr / math.sqrt(C), lr

    def forward(self, x):
        w = self.weight.to(x.dtype) * self.w_gain
        b = self.bias.to(x.dtype) * self.b_gain
        flat = x.reshape(-1, C)
        return torch.addmm(b.unsqueeze(0), flat, w.t()).reshape(*x.shape[:-1], 40)


@case("linear", lambda c: (c(), T(2, 5, C)))
class ThreeAtOnce(nn.Module):
    def __init__(self):
        super().__init__()
        for n, o in (("wq", 64), ("wk", 32), ("wv", 32)):
            setattr(self, n, nn.Linear(C, o, bias=False))

    def forward(self, x):
        big = torch.cat([m.weight for m in (self.wq, self.wk, self.wv)], dim=0)
        return torch.split(torch.matmul(x, big.T), [64, 32, 32], dim=-1)


@case("silu_mul", lambda c: (c(), T(2, 5, C)))
class TwoInKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.gating_einsum = nn.Parameter(0.1 * torch.randn(2, C, 96))
        self.linear = nn.Parameter(0.1 * torch.randn(96, C))

    def forward(self, x):
        gate, up = torch.einsum("bsd,gdf->gbsf", x, self.gating_einsum)
        return (gate * gate.sigmoid() * up) @ self.linear


@case("gelu_mul", lambda c: (c(), T(2, 5, C)))
class TanhGateByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(C, 80, False), nn.Linear(C, 80, False), nn.Linear(80, C, False)

    def act(self, u):
        return u * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * u * u * u)))

    def forward(self, x):
        return self.wo(self.act(self.wi_0(x)).mul_(self.wi_1(x)))


@case("silu_mul", lambda c: (c(), T(2, 5, C)))
class EveryOther(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp1, self.mlp2 = nn.Linear(C, 2 * 48), nn.Linear(48, C)

    def forward(self, x):
        t = self.mlp1(x)
        a, b = t[..., ::2], t[..., 1::2]
        return x + self.mlp2(F.silu(a) * b)


@case("bias_act", lambda c: (c(), T(2, 5, C)))
class SquareRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(C, 100), nn.Linear(100, C)

    def forward(self, x):
        k = torch.clamp_min(self.key(x), 0.0)
        return self.value(k ** 2)


@case("bias_act", lambda c: (c(), T(2, 5, C)))
class ClipMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict(dict(c_fc=nn.Linear(C, 100), c_proj=nn.Linear(100, C)))

    def forward(self, x):
        h = self.net["c_fc"](x)
        return self.net["c_proj"](h / (1 / torch.sigmoid(1.702 * h)))


@case("silu_mul", lambda c: (c(), T(2, 5, C)))
class ConfiguredMlp(nn.Module):
    ACTS = {"swish": lambda t: t * torch.sigmoid(t), "relu": torch.relu}

    def __init__(self, act="swish"):
        super().__init__()
        self.fused, self.back, self.act_name = nn.Linear(C, 2 * 72, bias=False), nn.Linear(72, C, bias=False), act
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        up, gate = self.fused(x).tensor_split(2, dim=-1)
        return self.drop(self.back(self.drop(up * self.ACTS[self.act_name](gate))))


@case("linear", lambda c: (c(), T(2, 8, C)))
class ChunkedFfn(nn.Module):
    def __init__(self, rows=4):
        super().__init__()
        self.one, self.two, self.rows = nn.Linear(C, 100), nn.Linear(100, C), rows

    def _ff(self, x):
        return self.two(F.leaky_relu(self.one(x), 0.1))

    def forward(self, x):
        return torch.cat([self._ff(part) for part in x.split(self.rows, dim=1)], dim=1)
"""
