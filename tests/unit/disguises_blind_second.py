"""A fifth set of right modules, written before any of them was tried: norms, gates, rotary embeddings, convolutions."""

from __future__ import annotations

SECOND = r"""
import functools, operator
W, H, D, S = 48, 4, 16, 7


# ---- norms
@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class EinsumRms(nn.Module):
    def __init__(self, n, floor=1e-6):
        super().__init__()
        self.floor, self.n = floor, n
        self.g = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, u):
        power = torch.einsum("...i,...i->...", u, u)[..., None] / self.n
        return self.g * (u / (power + self.floor).sqrt())


@case("rms_norm", lambda c: (c(W), T(4, W)))
class LinalgRms(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.root = math.sqrt(n)
        self.amp = nn.Parameter(torch.rand(n))

    def forward(self, u):
        length = torch.linalg.vector_norm(u, ord=2, dim=-1, keepdim=True) / self.root
        return u * (length * length + 1e-5) ** -0.5 * self.amp


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class Float64Eps(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))
        self.variance_epsilon = 1e-6

    def forward(self, hidden):
        kind = hidden.dtype
        hidden = hidden.to(torch.float32)
        v = hidden.square().mean(dim=-1, keepdim=True)
        hidden = hidden * torch.rsqrt(v.add_(self.variance_epsilon))
        return self.weight * hidden.to(kind)


@case("rms_norm", lambda c: (c(D), T(2, S, H, D)))
class HeadNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(d) * 0.02)

    def forward(self, heads):
        f = heads.float()
        f = f * torch.reciprocal(torch.sqrt(torch.mean(f**2, -1, True) + 1e-6))
        return (f * (self.gamma.float() + 1.0)).to(heads.dtype)


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class VarMean(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(n)), nn.Parameter(torch.randn(n))

    def forward(self, u):
        var, mean = torch.var_mean(u, dim=-1, correction=0, keepdim=True)
        return (u - mean) / torch.sqrt(var + 1e-5) * self.a + self.b


@case("layer_norm", lambda c: (c(W), T(3, W)))
class NoBias(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))
        self.register_parameter("bias", None)

    def forward(self, u):
        centred = u - u.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = y * self.weight
        return y if self.bias is None else y + self.bias


@case("layer_norm", lambda c: (c(W), T(2, W, 4, 3)))
class Channels(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(n)), nn.Parameter(torch.randn(n))

    def forward(self, img):
        u = img.mean(1, keepdim=True)
        s = (img - u).pow(2).mean(1, keepdim=True)
        img = (img - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * img + self.bias[:, None, None]


@case("gated_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class NormThenGate(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.rand(n))

    def forward(self, y, z):
        y = y * torch.sigmoid(z) * z
        return F.rms_norm(y, (y.shape[-1],), self.w, 1e-5)


@case("add_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class Merge(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(n))

    def forward(self, stream, branch):
        stream = stream + branch
        return stream, F.rms_norm(stream, stream.shape[-1:], self.scale, 1e-6)


@case("add_layer_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class PostNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = nn.LayerNorm(n)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, sub):
        return self.ln(x + self.drop(sub))


@case("group_norm", lambda c: (c(W), T(2, W, 9)))
class GroupsByReshape(nn.Module):
    def __init__(self, ch, groups=4):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.rand(ch)), nn.Parameter(torch.randn(ch))

    def forward(self, sig):
        b, c, t = sig.shape
        g = sig.reshape(b, self.groups, -1)
        mean, var = g.mean(-1, keepdim=True), g.var(-1, keepdim=True, unbiased=False)
        g = ((g - mean) / (var + 1e-5).sqrt()).reshape(b, c, t)
        return g * self.weight.reshape(1, c, 1) + self.bias.reshape(1, c, 1)


# ---- activations and gates
@case("silu_mul", lambda c: (c(), T(3, 2 * W)))
class Halves(nn.Module):
    def forward(self, packed):
        n = packed.shape[-1] // 2
        gate, up = packed[..., :n], packed[..., n:]
        return up * (gate * torch.sigmoid(gate))


@case("silu_mul", lambda c: (c(W, 64), T(2, 3, W)))
class SwiGlu(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.w12 = nn.Linear(n, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, n, bias=False)

    def forward(self, x):
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


@case("silu_mul", lambda c: (c(W, 64), T(2, 3, W)))
class DictGate(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.proj = nn.ModuleDict({"gate": nn.Linear(n, inner), "up": nn.Linear(n, inner), "down": nn.Linear(inner, n)})
        self.act = nn.SiLU()

    def forward(self, x):
        p = self.proj
        return p["down"](self.act(p["gate"](x)) * p["up"](x))


@case("gelu_mul", lambda c: (c(W, 64), T(2, 3, W)))
class GeGlu(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.proj, self.out = nn.Linear(n, inner * 2), nn.Linear(inner, n)

    def forward(self, x):
        value, gate = self.proj(x).tensor_split(2, -1)
        return self.out(value * F.gelu(gate))


@case("gelu_mul", lambda c: (c(), T(3, W), T(3, W)))
class TanhGate(nn.Module):
    def forward(self, g, u):
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * torch.pow(g, 3))
        return 0.5 * g * (1 + torch.tanh(inner)) * u


@case("bias_act", lambda c: (c(W), T(2, 3, W)))
class BiasGelu(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.b = nn.Parameter(torch.randn(n))

    def forward(self, x):
        t = x + self.b
        return t * 0.5 * (1.0 + torch.erf(t * (0.5**0.5)))


@case("bias_act", lambda c: (c(W, 64), T(2, 3, W)))
class SquaredRelu(nn.Module):
    def __init__(self, n, inner):
        super().__init__()
        self.up, self.down = nn.Linear(n, inner), nn.Linear(inner, n)

    def forward(self, x):
        return self.down(torch.square(torch.relu(self.up(x))))


@case("bias_act", lambda c: (c(), T(2, 3, W)))
class QuickByExp(nn.Module):
    def forward(self, x):
        return x / (1 + torch.exp(-1.702 * x))


# ---- linear
@case("linear", lambda c: (c(W, 24), T(2, 3, W)))
class InFirst(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.kernel, self.shift = nn.Parameter(torch.randn(i, o) / 7), nn.Parameter(torch.randn(o))

    def forward(self, x):
        return torch.tensordot(x, self.kernel, dims=1) + self.shift


@case("linear", lambda c: (c(W, 24), T(2, 3, W)))
class Named(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weights = nn.ParameterDict({"w": nn.Parameter(torch.randn(o, i) / 7), "b": nn.Parameter(torch.randn(o))})

    def forward(self, x):
        return F.linear(x, self.weights["w"], self.weights["b"])


@case("linear", lambda c: (c(W, H, D), T(2, 3, W)))
class HeadsOut(nn.Module):
    def __init__(self, n, h, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, h, d) / 7)

    def forward(self, x):
        return torch.einsum("bsn,nhd->bhsd", x, self.w)


# ---- rotary
def table(t, d, base=10000.0):
    a = torch.outer(torch.arange(t).float(), base ** (-torch.arange(0, d, 2).float() / d))
    return a


@case("rope", lambda c: (c(S, D), T(2, H, S, D)))
class OwnTables(nn.Module):
    def __init__(self, most, d):
        super().__init__()
        a = table(most, d)
        self.register_buffer("cos", torch.cat((a, a), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((a, a), -1).sin(), persistent=False)

    def forward(self, q):
        n = q.size(-2)
        half = q.size(-1) // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
        return q * self.cos[:n] + turned * self.sin[:n]


@case("rope", lambda c: (c(), T(2, S, H, D), table(S, D).cos(), table(S, D).sin()))
class FrontHalf(nn.Module):
    def forward(self, x, c, s):
        c, s = c[None, :, None, :], s[None, :, None, :]
        left, right = torch.split(x, x.shape[-1] // 2, dim=-1)
        return torch.cat([left * c - right * s, left * s + right * c], dim=-1)


@case("rope", lambda c: (c(), T(2, S, H, D), torch.polar(torch.ones(S, D // 2), table(S, D))))
class ByComplex(nn.Module):
    def forward(self, x, turns):
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * turns[:, None]).flatten(-2).type_as(x)


@case("rope", lambda c: (c(), T(2, H, S, D), table(S, 8).cos(), table(S, 8).sin()))
class Part(nn.Module):
    def forward(self, x, c, s):
        turned, rest = x[..., :8], x[..., 8:]
        a, b = turned[..., :4], turned[..., 4:]
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


@case("rope", lambda c: (c(), T(2, S, H, D), table(S, D).cos(), table(S, D).sin()))
class Neighbours(nn.Module):
    def forward(self, x, c, s):
        c, s = c.unsqueeze(1), s.unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = even * c - odd * s
        out[..., 1::2] = even * s + odd * c
        return out


# ---- convolutions
@case("causal_conv1d", lambda c: (c(W), T(2, W, 11)))
class PadLeft(nn.Module):
    def __init__(self, ch, k=4):
        super().__init__()
        self.k = k
        self.conv = nn.Conv1d(ch, ch, k, groups=ch)

    def forward(self, x):
        return F.silu(self.conv(F.pad(x, (self.k - 1, 0))))


@case("causal_conv1d", lambda c: (c(W), T(2, 11, W)))
class CutRight(nn.Module):
    def __init__(self, ch, k=4):
        super().__init__()
        self.depthwise = nn.Conv1d(ch, ch, k, groups=ch, padding=k - 1)

    def forward(self, x):
        t = x.size(1)
        return self.depthwise(x.transpose(1, 2))[:, :, :t].transpose(1, 2)


@case("causal_conv1d", lambda c: (c(W), T(2, W, 11)))
class TapByTap(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.taps, self.bias = nn.Parameter(torch.randn(ch, 3)), nn.Parameter(torch.randn(ch))

    def forward(self, x):
        p = F.pad(x, (2, 0))
        n = x.shape[-1]
        return sum(p[:, :, i : i + n] * self.taps[:, i, None] for i in range(3)) + self.bias[:, None]


# ---- embeddings
@case("embedding", lambda c: (c(60, W), torch.randint(0, 60, (2, 5))))
class Scaled(nn.Module):
    def __init__(self, words, n):
        super().__init__()
        self.table = nn.Embedding(words, n)
        self.by = n**0.5

    def forward(self, ids):
        return self.table(ids) * self.by


@case("embedding", lambda c: (c(60, W), torch.randint(0, 60, (2, 5))))
class Bare(nn.Module):
    def __init__(self, words, n):
        super().__init__()
        self.table = nn.Parameter(torch.randn(words, n))

    def forward(self, ids):
        return F.embedding(ids, self.table)
"""
