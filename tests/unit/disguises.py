# ruff: noqa: E501
"""Right modules in spellings that people write by hand, by kind; and look-alikes of each kind, which differ in little."""

from __future__ import annotations

HEAD = """
import math, types, torch, torch.nn.functional as F
from torch import nn
D = 64
ACT = {"silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh}
def turn(x): a, b = x.chunk(2, -1); return torch.cat((-b, a), -1)
def root(h, eps): return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
def ones(*shape): return nn.Parameter(torch.linspace(0.5, 1.5, 64).reshape(*(shape or (64,))))
class Config:
    def __init__(self, **given): self.__dict__.update(given)
class Norm(nn.Module):
    def __init__(self): super().__init__(); self.g, self.e = ones(), 1e-5
class Gated(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b, self.c = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)
class Heads(nn.Module):
    def __init__(self): super().__init__(); self.qkv, self.drop = nn.Linear(64, 192), nn.Softmax(dim=-1)
    def split(self, x): return [t.view(*x.shape[:-1], 4, 16).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1)]
class Turned(Heads):
    def angles(self, x):
        inv = 1.0 / 100 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
        t = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), inv); t = torch.cat((t, t), -1)
        return t.cos().to(x.dtype), t.sin().to(x.dtype)
class Table(nn.Module):
    def __init__(self): super().__init__(); self.t = nn.Parameter(torch.linspace(-1, 1, 1280).sin().reshape(20, 64))
"""

_NORM = "class M(Norm):\n    def forward(self, x): "
_G = "class M(Gated):\n    def forward(self, x): "
_T = "class M(Turned):\n    def forward(self, x):\n        q, k, v = self.split(x); c, s = self.angles(x)\n        "
_SDPA = "return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)\n"
_BLOCK = "class M(nn.Module):\n    def __init__(self): super().__init__(); self.f, self.n = nn.Linear(64, 64), nn.LayerNorm(64)\n    def forward(self, x): "

# kind -> [(code, op that a pass calls, the input)]; the input is "x" (2, 5, 64), "ids" or "bcs" (2, 64, 9)
RIGHT: dict[str, list[tuple[str, str, str]]] = {
    "the weight in a ParameterList or ParameterDict": [
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g = ones(64, 1)\n    def forward(self, x): return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.g\n",
            "rms_norm",
            "bcs",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.p = nn.ParameterList([ones()])\n    def forward(self, x): return self.p[0] * root(x.float(), 1e-6).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.p = nn.ParameterDict({'scale': ones()})\n    def forward(self, x): return self.p['scale'] * root(x.float(), 1e-6).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.p = nn.ParameterDict({'w': ones(), 'b': nn.Parameter(torch.linspace(-1, 1, 64))})\n    def forward(self, x): h = x.float(); d = h - h.mean(-1, keepdim=True); return (d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5) * self.p.w + self.p.b).to(x.dtype)\n",
            "layer_norm",
            "x",
        ),
    ],
    "a weight of shape (1, 1, D)": [
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g = ones(1, 1, 64)\n    def forward(self, x): return self.g * root(x.float(), 1e-6).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g = ones(1, 64)\n    def forward(self, x): return root(x, 1e-6) * self.g\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.b = ones(1, 1, 64), nn.Parameter(torch.linspace(-1, 1, 64).reshape(1, 1, 64))\n    def forward(self, x): d = x - x.mean(-1, keepdim=True); return d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5) * self.g + self.b\n",
            "layer_norm",
            "x",
        ),
    ],
    "nested functions, lambdas, try, *args": [
        (
            "class M(Norm):\n    def forward(self, x):\n        def scale(h): return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.e)\n        h = x.float(); return self.g * (h * scale(h)).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(Norm):\n    def forward(self, x):\n        mean = lambda t: t.mean(-1, keepdim=True)\n        h = x.float(); return self.g * (h * torch.rsqrt(mean(h * h) + self.e)).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(Norm):\n    def forward(self, *args): x = args[0]; return self.g * root(x.float(), self.e).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(Norm):\n    def forward(self, x):\n        try:\n            h = x.float()\n        except RuntimeError:\n            h = x\n        return self.g * root(h, self.e).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(Norm):\n    def forward(self, x, *args, **kwargs): return self.g * root(x.float(), self.e).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
    ],
    "eps of a config object": [
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), Config(eps=1e-5, width=64)\n    def forward(self, x): return self.g * root(x.float(), self.config.eps).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), types.SimpleNamespace(eps=1e-5)\n    def forward(self, x): return self.g * root(x.float(), self.config.eps).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), {'eps': 1e-5}\n    def forward(self, x): return self.g * root(x.float(), self.config['eps']).to(x.dtype)\n",
            "rms_norm",
            "x",
        ),
    ],
    "softmax as a method or a module": [
        (
            "class M(Heads):\n    def forward(self, x): q, k, v = self.split(x); return ((q @ k.transpose(-1, -2)) / 4).softmax(-1) @ v\n",
            "attention",
            "x",
        ),
        (
            "class M(Heads):\n    def forward(self, x): q, k, v = self.split(x); w = q @ k.transpose(-1, -2); return w.softmax(dim=-1) @ v\n",
            "attention",
            "x",
        ),
        (
            "class M(Heads):\n    def forward(self, x): q, k, v = self.split(x); return self.drop(q @ k.transpose(-1, -2)) @ v\n",
            "softmax",
            "x",
        ),
        (
            "class M(Heads):\n    def forward(self, x): q, k, v = self.split(x); return torch.Tensor.softmax(q @ k.transpose(-1, -2), -1) @ v\n",
            "softmax",
            "x",
        ),
    ],
    "g * sigmoid(g) * u": [
        (_G + "g, u = self.a(x), self.b(x); return self.c(g * torch.sigmoid(g) * u)\n", "silu_mul", "x"),
        (
            _G + "g = self.a(x); return self.c(u_ * g.sigmoid() * g) if (u_ := self.b(x)) is not None else x\n",
            "silu_mul",
            "x",
        ),
        (_G + "g = self.a(x); g = g * g.sigmoid(); return self.c(g * self.b(x))\n", "silu_mul", "x"),
        (
            "class M(Gated):\n    def swish(self, t): return t * torch.sigmoid(t)\n    def forward(self, x): return self.c(self.swish(self.a(x)) * self.b(x))\n",
            "silu_mul",
            "x",
        ),
        (
            "def swish(t): return t * torch.sigmoid(t)\n" + _G + "return self.c(swish(self.a(x)) * self.b(x))\n",
            "silu_mul",
            "x",
        ),
    ],
    "a gate of a table or ModuleDict": [
        (_G + "return self.c(ACT['silu'](self.a(x)) * self.b(x))\n", "silu_mul", "x"),
        (
            "class M(Gated):\n    def __init__(self): super().__init__(); self.name = 'silu'\n    def forward(self, x): return self.c(ACT[self.name](self.a(x)) * self.b(x))\n",
            "silu_mul",
            "x",
        ),
        (
            "class M(Gated):\n    def __init__(self): super().__init__(); self.acts = nn.ModuleDict({'s': nn.SiLU(), 'g': nn.GELU()})\n    def forward(self, x): return self.c(self.acts['s'](self.a(x)) * self.b(x))\n",
            "silu_mul",
            "x",
        ),
    ],
    "a product in place": [
        (_G + "t = F.silu(self.a(x)); t *= self.b(x); return self.c(t)\n", "silu_mul", "x"),
        (_G + "t = F.gelu(self.a(x)); t.mul_(self.b(x)); return self.c(t)\n", "gelu_mul", "x"),
        (_G + "return self.c(F.silu(self.a(x)).mul_(self.b(x)))\n", "silu_mul", "x"),
    ],
    "rope inline, as a method or nested": [
        (_T + "q = q * c + turn(q) * s; k = k * c + turn(k) * s\n        " + _SDPA, "rope", "x"),
        (
            "class M(Turned):\n    def rot(self, q, k, c, s): return q * c + turn(q) * s, k * c + turn(k) * s\n    def forward(self, x):\n        q, k, v = self.split(x); c, s = self.angles(x); q, k = self.rot(q, k, c, s)\n        "
            + _SDPA,
            "rope",
            "x",
        ),
        (_T + "def rot(t): return t * c + turn(t) * s\n        q, k = rot(q), rot(k)\n        " + _SDPA, "rope", "x"),
        (
            _T
            + "def rot(t, c, s): return t * c + turn(t) * s\n        q, k = rot(q, c, s), rot(k, c, s)\n        "
            + _SDPA,
            "rope",
            "x",
        ),
    ],
    "a residual by .add or +=": [
        (_BLOCK + "return self.n(x.add(self.f(x)))\n", "add_layer_norm", "x"),
        (_BLOCK + "h = self.f(x); h += x; return self.n(h)\n", "add_layer_norm", "x"),
        (_BLOCK + "h = self.f(x); h.add_(x); return self.n(h)\n", "add_layer_norm", "x"),
    ],
    "index_select as an embedding": [
        (
            "class M(Table):\n    def forward(self, i): return self.t.index_select(0, i.reshape(-1)).view(*i.shape, -1)\n",
            "embedding",
            "ids",
        ),
        (
            "class M(Table):\n    def forward(self, i): return torch.index_select(self.t, 0, i.flatten()).reshape(*i.shape, 64)\n",
            "embedding",
            "ids",
        ),
    ],
    "padding on the left and a convolution": [
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.w, self.b = nn.Parameter(torch.linspace(-1, 1, 256).sin().reshape(64, 1, 4)), ones()\n    def forward(self, x): return F.conv1d(F.pad(x, (3, 0)), self.w, self.b, groups=64)\n",
            "causal_conv1d",
            "bcs",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.conv = nn.Conv1d(64, 64, 4, groups=64)\n    def forward(self, x): return self.conv(F.pad(x, (3, 0)))\n",
            "causal_conv1d",
            "bcs",
        ),
        (
            "class M(nn.Module):\n    def __init__(self): super().__init__(); self.conv = nn.Conv1d(64, 64, 4, groups=64, padding=3)\n    def forward(self, x): return self.conv(x)[..., :x.shape[-1]]\n",
            "causal_conv1d",
            "bcs",
        ),
    ],
    "a subclass of Conv1d": [
        (
            "class M(nn.Conv1d):\n    def __init__(self): super().__init__(64, 64, 4, groups=64)\n    def forward(self, x): return super().forward(F.pad(x, (3, 0)))\n",
            "causal_conv1d",
            "bcs",
        ),
        (
            "class M(nn.Conv1d):\n    def __init__(self): super().__init__(64, 64, 4, groups=64, padding=3)\n    def forward(self, x): return super().forward(x)[..., : -self.padding[0]]\n",
            "causal_conv1d",
            "bcs",
        ),
    ],
    "a LayerNorm that transposes around": [
        (
            "class M(nn.LayerNorm):\n    def __init__(self): super().__init__(64)\n    def forward(self, x): return super().forward(x.transpose(1, 2)).transpose(1, 2)\n",
            "layer_norm",
            "bcs",
        ),
        (
            "class M(nn.LayerNorm):\n    def __init__(self): super().__init__(64)\n    def forward(self, x): return F.layer_norm(x.transpose(1, -1), self.normalized_shape, self.weight, self.bias, self.eps).transpose(1, -1)\n",
            "layer_norm",
            "bcs",
        ),
    ],
    "getattr of a library": [
        (_G + "return self.c(getattr(F, 'silu')(self.a(x)) * self.b(x))\n", "silu_mul", "x"),
        (
            "class M(Gated):\n    def __init__(self): super().__init__(); self.kind = 'gelu'\n    def forward(self, x): return self.c(getattr(F, self.kind)(self.a(x)) * self.b(x))\n",
            "gelu_mul",
            "x",
        ),
    ],
}

_C = "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), Config(eps=1e-5, width=64, gain=2.0)\n"
_W = "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g = ones(1, 1, 64)\n    def forward(self, x): "

# what it does -> (its code, the op that it resembles, its input)
WRONG: dict[str, tuple[str, str, str]] = {
    "a weight (1, D) that is a bias": (
        "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g = ones(1, 64)\n    def forward(self, x): return self.g + root(x, 1e-6)\n",
        "rms_norm",
        "x",
    ),
    "a weight (1, 1, D) for the mean too": (
        _W + "return (root(x, 1e-6) - root(x, 1e-6).mean(-1, keepdim=True)) * self.g\n",
        "rms_norm",
        "x",
    ),
    "a weight (1, 1, D) turned": (_W + "return root(x, 1e-6) * self.g.flip(-1)\n", "rms_norm", "x"),
    "a factor of a config": (
        _C + "    def forward(self, x): return self.g * root(x, self.config.eps) * self.config.gain\n",
        "rms_norm",
        "x",
    ),
    "an eps of a property that counts": (
        "class Odd:\n    n = 0\n    @property\n    def eps(self): self.n += 1; return 1e-5 * self.n\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), Odd()\n    def forward(self, x): return self.g * root(x, self.config.eps)\n",
        "rms_norm",
        "x",
    ),
    "an eps that a config makes when asked": (
        "class Odd:\n    def __init__(self): self.n = 1\n    def __getattr__(self, name):\n        if name != 'eps': raise AttributeError(name)\n        self.n = self.n + 1; return 1e-5 * self.n\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(), Odd()\n    def forward(self, x): return self.g * root(x, self.config.eps)\n",
        "rms_norm",
        "x",
    ),
    "a config that the forward asks by name": (
        _C + "    def forward(self, x): return self.g * root(x, self.config.eps) * getattr(self.config, 'g' + 'ain')\n",
        "rms_norm",
        "x",
    ),
    "a config that the forward changes": (
        _C
        + "    def forward(self, x): self.config.eps = self.config.eps * 2; return self.g * root(x, self.config.eps)\n",
        "rms_norm",
        "x",
    ),
    "an inner function that keeps half": (
        "class M(Norm):\n    def forward(self, x):\n        def scale(h): return torch.rsqrt(h[..., :32].pow(2).mean(-1, keepdim=True) + self.e)\n        return self.g * (x * scale(x))\n",
        "rms_norm",
        "x",
    ),
    "an inner function with a branch by size": (
        "class M(Norm):\n    def forward(self, x):\n        def scale(h): return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.e) if h.abs().max() < 1e30 else 0 * h\n        return self.g * (x * scale(x))\n",
        "rms_norm",
        "x",
    ),
    "an inner function that shadows another": (
        "def scale(h): return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)\nclass M(Norm):\n    def forward(self, x):\n        def pick(scale): return scale(x)\n        return self.g * (x * pick(lambda h: 2.0))\n",
        "rms_norm",
        "x",
    ),
    "a lambda that forgets the root": (
        "class M(Norm):\n    def forward(self, x):\n        mean = lambda t: t.mean(-1, keepdim=True)\n        return self.g * x / (mean(x * x) + self.e)\n",
        "rms_norm",
        "x",
    ),
    "a softmax of the heads": (
        "class M(Heads):\n    def forward(self, x): q, k, v = self.split(x); return (q @ k.transpose(-1, -2)).softmax(1) @ v\n",
        "softmax",
        "x",
    ),
    "a softmax that is a method of its own": (
        "class Soft:\n    def softmax(self, x): return x / x.sum(-1, keepdim=True)\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.s = Soft()\n    def forward(self, x): return self.s.softmax(x)\n",
        "softmax",
        "x",
    ),
    "a softmax of a local that is no tensor": (
        "class Soft:\n    def softmax(self, x): return x / x.sum(-1, keepdim=True)\nclass M(nn.Module):\n    def forward(self, x): s = Soft(); return s.softmax(x)\n",
        "softmax",
        "x",
    ),
    "a softmax to the base of 2": (
        "class M(nn.Module):\n    def forward(self, x): t = 2 ** x; return t / t.sum(-1, keepdim=True)\n",
        "softmax",
        "x",
    ),
    "another's sigmoid": (
        _G + "g, u = self.a(x), self.b(x); return self.c(g * torch.sigmoid(u) * self.b(x + 1))\n",
        "silu_mul",
        "x",
    ),
    "a sigmoid of twice": (
        _G + "g, u = self.a(x), self.b(x); return self.c(g * torch.sigmoid(2 * g) * u)\n",
        "silu_mul",
        "x",
    ),
    "a sigmoid without its factor": (
        _G + "g, u = self.a(x), self.b(x); return self.c(torch.sigmoid(g) * u * u)\n",
        "silu_mul",
        "x",
    ),
    "a sigmoid that learns nothing": (
        _G + "g, u = self.a(x), self.b(x); return self.c(g * torch.sigmoid(g.detach()) * u)\n",
        "silu_mul",
        "x",
    ),
    "a gate that changes before the product": (
        _G + "g, u = self.a(x), self.b(x); return self.c(g * torch.sigmoid(g) * g.mul_(2) * u)\n",
        "silu_mul",
        "x",
    ),
    "an activation of what changes in the product": (
        _G + "g = self.a(x); return self.c(F.silu(g) * g.mul_(2))\n",
        "silu_mul",
        "x",
    ),
    "a product in place that another name sees": (
        _G + "t = self.a(x); k = t; t = F.relu(t, inplace=True); t *= self.b(x); return self.c(t + k)\n",
        "silu_mul",
        "x",
    ),
    "a product in place of a product": (
        _G + "t = F.silu(self.a(x)); k = t; t *= self.b(x); return self.c(k + t)\n",
        "silu_mul",
        "x",
    ),
    "a product in place with itself": (_G + "t = F.silu(self.a(x)); t *= t; return self.c(t)\n", "silu_mul", "x"),
    "a quotient in place": (_G + "t = F.silu(self.a(x)); t /= 2 + self.b(x) ** 2; return self.c(t)\n", "silu_mul", "x"),
    "another entry of the table": (_G + "return self.c(ACT['tanh'](self.a(x)) * self.b(x))\n", "silu_mul", "x"),
    "a table whose entry does something else": (
        "class Odd(dict):\n    def __getitem__(self, k): return torch.tanh\nTAB = Odd(silu=F.silu)\n"
        + _G
        + "return self.c(TAB['silu'](self.a(x)) * self.b(x))\n",
        "silu_mul",
        "x",
    ),
    "another function by getattr": (
        _G + "return self.c(getattr(F, 'hardswish')(self.a(x)) * self.b(x))\n",
        "silu_mul",
        "x",
    ),
    "an add that is no sum": (
        "class Odd:\n    def add(self, x): return x * 3\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.odd, self.n = Odd(), nn.LayerNorm(64)\n    def forward(self, x): return self.n(self.odd.add(x) + 0.5 * x.square().sum())\n",
        "add_rms_norm",
        "x",
    ),
    "an add of an object before a norm": (
        "class Odd:\n    def add(self, x): return x * x\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.odd, self.n = Odd(), nn.LayerNorm(64)\n    def forward(self, x): return self.n(self.odd.add(x))\n",
        "add_layer_norm",
        "x",
    ),
    "an add with a factor": (_BLOCK + "return self.n(x.add(self.f(x), alpha=2))\n", "add_layer_norm", "x"),
    "an add in place that the caller sees": (
        _BLOCK + "y = self.f(x); h = y; h += x; return self.n(h) + y\n",
        "add_layer_norm",
        "x",
    ),
}
