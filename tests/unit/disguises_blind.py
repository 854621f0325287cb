# ruff: noqa: E501
"""A fourth set of right modules, written without a look at what is recognised: norms. `case` has the op that a pass calls."""

from __future__ import annotations

HEAD = r"""
import math, types, torch, torch.nn.functional as F, torch.nn.utils.prune, torch.utils.checkpoint
from torch import nn
CASES = {}
def T(*s): return torch.randn(*s)
def case(kind, make):
    def put(c):
        CASES[c.__name__] = (kind, c, make)
        return c
    return put
ALIKE = {}
def alike(make, *more):
    def put(c):
        ALIKE[c.__name__] = (c, make, more)
        return c
    return put
"""

NORMS = r'''
W = 48


# ---- norms
@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class ZNorm(nn.Module):
    def __init__(self, width, epsilon=1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def _unit(self, t):
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, t):
        return self._unit(t.float()).type_as(t) * self.scale


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class PlusOneScale(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.delta = nn.Parameter(torch.randn(n) * 0.1)
        self.register_buffer("tiny", torch.tensor(1e-6), persistent=False)

    def forward(self, h):
        wide = h.to(torch.float32)
        power = (wide * wide).mean(dim=-1, keepdim=True)
        wide = wide / torch.sqrt(power + self.tiny)
        return (wide * (1.0 + self.delta.float())).to(h.dtype)


@case("rms_norm", lambda c: (c(), T(3, 4, W)))
class BareRms(nn.Module):
    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), eps=1e-5)


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class EuclidNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
        self.gamma = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self.gamma * x / torch.sqrt(length.square() / self.n + 1e-6)


@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class EinsumNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        ss = torch.einsum("...d,...d->...", x, x).unsqueeze(-1)
        return x * (ss / x.shape[-1] + 1e-5).pow(-0.5) * self.g


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class VarMeanNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.rand(n) + 0.5)
        self.b = nn.Parameter(torch.randn(n))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return torch.addcmul(self.b, (x - mean) * torch.rsqrt(var + 1e-5), self.w)


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class CenteredFirst(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a_2 = nn.Parameter(torch.rand(n) + 0.5)
        self.b_2 = nn.Parameter(torch.randn(n))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.a_2 * x + self.b_2


@case("layer_norm", lambda c: (c(W, bias=False), T(2, 5, W)))
class NanoNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(ndim) + 0.5)
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


@case("layer_norm", lambda c: (c(W), T(2, W, 4, 4)))
class PlaneNorm(nn.Module):
    """Over the channels of an image."""

    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)
        self.bias = nn.Parameter(torch.randn(n))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@case("layer_norm", lambda c: (c(W), T(2, W, 4, 4)))
class ChannelsLast(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = nn.LayerNorm(n)

    def forward(self, img):
        return self.ln(img.movedim(1, -1)).movedim(-1, 1)


@case("gated_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class GateThenNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, y, z):
        kind = y.dtype
        y = y.to(torch.float32) * F.silu(z.to(torch.float32))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(kind)


@case("gated_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class NormThenGate(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, hidden, gate):
        h = hidden.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.weight * h.to(hidden.dtype)
        return (h * F.silu(gate.float())).to(hidden.dtype)


@case("rms_norm", lambda c: (c(16), T(2, 5, 64), T(2, 5, 32)))
class PairNorm(nn.Module):
    """Of queries and keys, a head at a time."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.qs = nn.Parameter(torch.rand(head) + 0.5)
        self.ks = nn.Parameter(torch.rand(head) + 0.5)

    def forward(self, q, k):
        q = q.view(*q.shape[:-1], -1, self.head)
        k = k.view(*k.shape[:-1], -1, self.head)
        q = q * torch.rsqrt(q.pow(2).mean(-1, True) + 1e-6) * self.qs
        k = k * torch.rsqrt(k.pow(2).mean(-1, True) + 1e-6) * self.ks
        return q, k


@case("add_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class SumNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x, stream):
        stream = stream + x
        ms = torch.mean(stream**2, dim=-1, keepdim=True)
        return stream * torch.rsqrt(ms + 1e-6) * self.g, stream


@case("add_layer_norm", lambda c: (c(W), T(2, 5, 2 * W), T(2, 5, W)))
class Closing(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.proj = nn.Linear(2 * n, n)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(n, eps=1e-12)

    def forward(self, x, skip):
        return self.norm(self.drop(self.proj(x)) + skip)


@case("group_norm", lambda c: (c(4, W), T(2, W, 4, 4)))
class HandGroups(nn.Module):
    def __init__(self, groups, n):
        super().__init__()
        self.groups = groups
        self.gain = nn.Parameter(torch.rand(1, n, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.randn(1, n, 1, 1))

    def forward(self, x):
        b, c, h, w = x.shape
        y = x.view(b, self.groups, -1)
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return y.view(b, c, h, w) * self.gain + self.shift


@case("group_norm", lambda c: (c(4, W), T(2, W, 4, 4)))
class Wide32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class Wide32Norm(nn.LayerNorm):
    def forward(self, x):
        kept = x.dtype
        out = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return out.to(kept)


@case("layer_norm", lambda c: (c(W), T(2, 5, W), T(2, W)))
class Conditioned(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = nn.LayerNorm(n, elementwise_affine=False, eps=1e-6)
        self.to_mod = nn.Sequential(nn.SiLU(), nn.Linear(n, 2 * n))

    def forward(self, x, c):
        shift, scale = self.to_mod(c).chunk(2, dim=-1)
        return self.ln(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@case("rms_norm", lambda c: (c(W, 4), T(2, 5, W)))
class HeadwiseNorm(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        y = x.unflatten(-1, (self.heads, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.flatten(-2) * self.weight


@case("layer_norm", lambda c: (c(W), T(2, 5, W)))
class Moments(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.p = nn.ParameterDict({"mul": torch.rand(n) + 0.5, "add": torch.randn(n)})

    def forward(self, x):
        m = x.sum(-1, keepdim=True) / x.shape[-1]
        v = ((x - m) ** 2).sum(-1, keepdim=True) / x.shape[-1]
        return (x - m) * (v + 1e-5) ** -0.5 * self.p["mul"] + self.p["add"]
'''
