# ruff: noqa: E501
"""A third set of look-alikes, by what makes them differ: values, state, mode, dtype, layout, length, gradients, random
numbers, what others change later. Each is code of a class M, whose forward takes rows, (2, 5, 64) unless it says.

`situations.py` says what a ported module and its twin are put through. `RIGHT` are ported, and `DEVICES` are left: what
they do on another device, no test without one shows.
"""

from __future__ import annotations

HEAD = """
import collections, copy, functools, math, os, random, time, torch, torch.nn.functional as F
from torch import Tensor, nn
SCALE, DTYPE, CALLS, TABLE, LIMITS = 1.0, torch.float32, [], {"act": F.silu, "w": torch.ones(1)}, (3, 7)
ORDERED, QUEUE, FLAG = collections.OrderedDict(scale=1.0), collections.deque([1.0], 3), False
class Knobs: scale, on = 1.0, False
KNOBS = Knobs()
def root(h, eps): return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
def turn(x): a, b = x.chunk(2, -1); return torch.cat((-b, a), -1)
class Base(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-6
class Lin(nn.Module):
    def __init__(self, rows=32, columns=64):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * columns).sin().reshape(rows, columns))
        self.bias = nn.Parameter(torch.linspace(-1, 1, rows))
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.linspace(0.5, 1.5, 64)), nn.Parameter(torch.linspace(-1, 1, 64))
        self.eps = 1e-5
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.n, self.act = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()
class Heads(nn.Module):
    def heads(self, x, n=4): return x.unflatten(-1, (n, -1)).transpose(1, 2)
    def back(self, y): return y.transpose(1, 2).flatten(2)
    def angles(self, n, d, base=1e4): p = torch.outer(torch.arange(n, dtype=torch.float32), base ** -torch.linspace(0, 1, d // 2)); p = torch.cat((p, p), -1)[None]; return p.cos(), p.sin()
"""
_NORM = "class M(Base):\n    def forward(self, x):\n        h = x.float(); y = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)\n"
_LINEAR = "class M(Lin):\n    def forward(self, x):\n        y = F.linear(x, self.weight, self.bias)\n"
_LAYER = (
    "class M(Both):\n    def forward(self, x):\n        y = F.layer_norm(x, (64,), self.weight, self.bias, self.eps)\n"
)
_ACT = "class M(nn.Module):\n    def forward(self, x):\n        y = F.silu(x)\n"


def _init(extra: str, base: str = "Base", arguments: str = "") -> str:
    return (
        f"class M({base}):\n    def __init__(self): super().__init__({arguments}); {extra}\n    def forward(self, x):\n"
    )


_Y = _NORM.split("\n", 2)[2]  # the line of a norm
_YL = "        y = F.linear(x, self.weight, self.bias)\n"


def _norm(extra: str, after: str, y: str = _Y) -> str:
    return _init(extra) + y + after


def _experts(
    act: str = "F.silu",
    share: str = "w[t, j, None]",
    capacity: str = "",
    halves: str = "g, u",
    ahead: str = "",
    shares: str = "w",
    expert: str = "e",
) -> str:
    return f"""class E(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.number = 3, 4
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 64) * 0.1), nn.Parameter(torch.randn(4, 64, 16) * 0.1)
    def forward(self, x, ids, w):
        {ahead}w = {shares}; out = torch.zeros_like(x)
        for e in ids.unique():
            if e == self.number: continue
            t, j = torch.where(ids == e)
            t, j = t{capacity}, j{capacity}
            {halves} = F.linear(x[t], self.up[{expert}]).chunk(2, -1)
            out.index_add_(0, t, (F.linear(act(g) * u, self.down[{expert}]) * {share}).to(out.dtype))
        {"out[n:] = tail" if "tail" in ahead else "pass"}
        return out
act = {act}
class M(nn.Module):
    def __init__(self): super().__init__(); self.e = E()
    def forward(self, x): h = x.flatten(0, -2); w, ids = torch.softmax(h[:, :4].float(), -1).topk(2); return self.e(h, ids, w.to(x.dtype)).view_as(x)
"""


def _conv(after: str) -> str:
    return f"""def conv(x, weight, bias=None, activation=None):
    y = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., :x.shape[-1]]
    {after}
    return y if activation is None else F.silu(y)
class M(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.linspace(-1, 1, 256).reshape(64, 4))
    def forward(self, x): return conv(x.transpose(1, 2), self.w, None, "silu").transpose(1, 2)
"""


FRESH: dict[str, str] = {
    # values
    "a branch on a large value": _NORM + "        return y if x.abs().max() < 6e4 else y * 2\n",
    "a branch on a computed large value": _norm(
        "self.a, self.b = 300.0, 400.0", "        return y if x.abs().max() < self.a * self.b * 1e9 else y * 2\n"
    ),
    "an item": _NORM + "        return y * (1 + (x.abs().max().item() > 3e37))\n",
    "a float of a tensor": _NORM + "        return y * max(1.0, float(x.abs().max()) / 1e36)\n",
    "an int of a tensor": _NORM + "        return y * (1 + int(x.abs().max() / 1e37))\n",
    "a bool of a tensor": _NORM + "        return y * (1 + bool(x.abs().max() > 1e37))\n",
    "a list of a tensor": _NORM + "        return y * (1 + (x.abs().amax().reshape(1).tolist()[0] > 1e37))\n",
    "a slice by a tensor": _NORM
    + "        n = (x.abs().max() < 1e37) * x.shape[0]; return torch.cat((y[:n], 2 * y[n:]))\n",
    "a tensor that is none": _NORM + "        return y if not (x > 1e37).any() else 2 * y\n",
    "torch.equal": _NORM + "        return y * 2 if torch.equal(x, torch.full_like(x, 7.25)) else y\n",
    "torch.allclose": _NORM + "        return y * 2 if torch.allclose(x, torch.full_like(x, 7.25)) else y\n",
    "all zeros are left": _NORM + "        return y if x.count_nonzero() > 0 else y + 1\n",
    "a clamp by a product": _norm(
        "self.a = 1e6",
        "        return y\n",
        _Y.replace("x.float()", "x.float().clamp(-self.a * self.a, self.a * self.a)"),
    ),
    "a clamp by a power": _norm(
        "self.n = 13", "        return y\n", _Y.replace("x.float()", "x.float().clamp(-10 ** self.n, 10.0 ** self.n)")
    ),
    "a clamp by a shift": _norm(
        "self.n = 45", "        return y\n", _Y.replace("x.float()", "x.float().clamp(max=1 << self.n)")
    ),
    "a clamp by finfo": _NORM.replace(
        "x.float()",
        "x.float().clamp(-torch.finfo(torch.float32).max / 2 ** 64, torch.finfo(torch.float32).max / 2 ** 64)",
    )
    + "        return y\n",
    "a clamp of its result": _LINEAR + "        return y.clamp(-6e4, 6e4)\n",
    "nan_to_num of its input": _LINEAR.replace("linear(x", "linear(torch.nan_to_num(x, nan=0.0)")
    + "        return y\n",
    "infinity is a number": _ACT + "        return torch.nan_to_num(y, nan=float('nan'), posinf=3e38, neginf=-3e38)\n",
    "a where on a computed bound": _norm(
        "self.a = 1e7", "        return torch.where(h.abs() > self.a ** 2, 2 * y, y)\n"
    ),
    "a square root of a clamp": _NORM.replace("+ self.eps", "").replace(
        "rsqrt(h.pow(2).mean(-1, keepdim=True))", "rsqrt(h.pow(2).mean(-1, keepdim=True).clamp_min(self.eps))"
    )
    + "        return y\n",
    "eps after the root": _NORM.replace(
        "torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)",
        "1 / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)",
    )
    + "        return y\n",
    "eps within a mean of eps": _NORM.replace(
        "h.pow(2).mean(-1, keepdim=True) + self.eps", "(h.pow(2) + self.eps / 64).mean(-1, keepdim=True)"
    )
    + "        return y\n",
    "the largest of variance and eps": "class M(Both):\n    def forward(self, x): h = x.float(); v = h.var(-1, keepdim=True, unbiased=False); return ((h - h.mean(-1, keepdim=True)) * torch.rsqrt(torch.clamp(v, min=self.eps)) * self.weight + self.bias).to(x.dtype)\n",
    "an unbiased variance": "class M(Both):\n    def forward(self, x): h = x.float(); v = h.var(-1, keepdim=True); return ((h - h.mean(-1, keepdim=True)) * torch.rsqrt(v + self.eps) * self.weight + self.bias).to(x.dtype)\n",
    "a mean in half precision": _NORM.replace(
        "h.pow(2).mean(-1, keepdim=True)", "h.pow(2).mean(-1, keepdim=True).to(torch.bfloat16).float()"
    )
    + "        return y\n",
    "a root in half precision": _NORM.replace(
        "torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)",
        "torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps).half().float()",
    )
    + "        return y\n",
    "one more for one channel": _init("self.register_buffer('more', torch.eye(64)[63] * 1e-3)")
    + "        h = x.float(); return (self.weight + self.more) * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)\n",
    "one more for the first half": _NORM.replace("y = self.weight *", "y = (self.weight + (torch.arange(64) < 32)) *")
    + "        return y\n",
    "a scale of 0.999": _NORM + "        return y * 0.999\n",
    "a residual of 0.999": "class M(Mlp):\n    def forward(self, x): return self.n(x + 0.999 * self.a(x))\n",
    "a temperature": "class M(nn.Module):\n    def forward(self, x): return torch.softmax(x / (1 + 1e-3), -1)\n",
    "a softmax with one more": "class M(nn.Module):\n    def forward(self, x): e = (x - x.amax(-1, keepdim=True)).exp(); return e / (e.sum(-1, keepdim=True) + 1e-4)\n",
    "swish of 1.01": "class M(nn.Module):\n    def forward(self, x): return x * torch.sigmoid(1.01 * x)\n",
    "quick gelu of 1.7": "class M(nn.Module):\n    def forward(self, x): return x * torch.sigmoid(1.7 * x)\n",
    "gelu by a short polynomial": "class M(nn.Module):\n    def forward(self, x): return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.0447 * x ** 3)))\n",
    "gelu by a wrong name": "class M(Mlp):\n    def gelu_tanh(self, x): return F.gelu(x)\n    def forward(self, x): return self.gelu_tanh(self.a(x)) * self.b(x)\n",
    "a leaky relu with a bound": "class M(nn.Module):\n    def forward(self, x): return F.leaky_relu(x, 0.01).clamp(max=1e9 * 1e9)\n",
    "relu6 far out": _norm("self.a = 1e5", "        return F.relu(x).clamp(max=self.a * self.a * self.a)\n"),
    # state
    "a counter in an attribute": _norm("self.n = 0", "        self.n += 1; return y * (1 + (self.n > 100))\n"),
    "a counter in a list": _norm("self.n = [0]", "        self.n[0] += 1; return y * (1 + (self.n[0] > 100))\n"),
    "a counter in a buffer": _norm(
        "self.register_buffer('n', torch.zeros(()))", "        self.n += 1; return y * (1 + (self.n > 100))\n"
    ),
    "a counter in a buffer by add_": _norm(
        "self.register_buffer('n', torch.zeros(()))",
        "        self.n.add_(1); return y * (1 + (self.n > 100).to(y.dtype))\n",
    ),
    "a counter of its file": _NORM + "        CALLS.append(1); return y * (1 + (len(CALLS) > 100))\n",
    "a counter in a global": "N = 0\nclass M(Base):\n    def forward(self, x):\n        global N\n        N += 1\n"
    + _Y
    + "        return y * (1 + (N > 100))\n",
    "a counter in a default": "class M(Base):\n    def forward(self, x, n=[0]):\n"
    + _Y
    + "        n[0] += 1; return y * (1 + (n[0] > 100))\n",
    "a counter in a cell": "def make():\n    n = 0\n    def tick():\n        nonlocal n\n        n += 1; return n\n    class M(Base):\n        def forward(self, x): h = x.float(); return self.weight * root(h, self.eps).to(x.dtype) * (1 + (tick() > 100))\n    return M\nM = make()\n",
    "a counter in an iterator": _norm(
        "self.n = iter(range(10 ** 6))", "        return y * (1 + (next(self.n) > 100))\n"
    ),
    "a counter in itertools": "import itertools\n"
    + _norm("self.n = itertools.count()", "        return y * (1 + (next(self.n) > 100))\n"),
    "a counter in a function": _NORM
    + "        return y * tick()\ndef tick(): tick.n = getattr(tick, 'n', 0) + 1; return 1 + (tick.n > 100)\n",
    "a counter in a class": "class M(Base):\n    n = 0\n    def forward(self, x):\n"
    + _Y
    + "        type(self).n += 1; return y * (1 + (type(self).n > 100))\n",
    "a weight that wears": _NORM + "        self.weight.data.mul_(1.001); return y\n",
    "a weight that wears by copy_": _NORM + "        self.weight.detach().copy_(self.weight * 1.001); return y\n",
    "a weight that wears through its view": _NORM + "        v = self.weight.detach().view(-1); v += 0.001; return y\n",
    "a cache of its first input": _norm("self.k = {}", "        return self.k.setdefault(x.shape, y)\n"),
    "an lru_cache": "@functools.lru_cache(None)\ndef shift(n): return len(CALLS) + 1\n"
    + _NORM
    + "        return y * shift(x.shape[0])\n",
    "setattr": _norm("self.n = 0", "        setattr(self, 'n', self.n + 1); return y * (1 + (self.n > 100))\n"),
    "its dictionary": _norm("self.n = 0", "        vars(self).update(n=self.n + 1); return y * (1 + (self.n > 100))\n"),
    "a running mean": _init("self.register_buffer('m', torch.ones(64))")
    + _Y
    + "        self.m.lerp_(x.detach().float().mean((0, 1)).abs(), 0.1); return y * self.m\n",
    # modes
    "a factor while training": _NORM + "        return y * 1.01 if self.training else y\n",
    "noise while training": _NORM + "        return y + torch.randn_like(y) * 0.01 if self.training else y\n",
    "dropout": _LINEAR + "        return F.dropout(y, 0.1, self.training)\n",
    "rare dropout": _LINEAR + "        return F.dropout(y, 1e-7, True) * (1 - 1e-7)\n",
    "a random choice while training": _NORM
    + "        return y * 2 if self.training and random.random() < 0.5 else y\n",
    "a rare random choice": _NORM + "        return y * 2 if random.random() < 1e-9 else y\n",
    "a rare random tensor": _NORM + "        return torch.where(torch.rand(()) < 1e-9, 2 * y, y)\n",
    "rare random elements": _NORM + "        return y * (1 + (torch.rand_like(h) < 1e-12))\n",
    "rare bernoulli": _NORM + "        return y * (1 + torch.bernoulli(torch.full_like(h, 1e-12)))\n",
    "the time": _NORM + "        return y * (1 + (time.time() > 2e10))\n",
    "is_grad_enabled": _NORM + "        return y if torch.is_grad_enabled() else y * 1.5\n",
    "is_grad_enabled as a number": _NORM + "        return y * (1 + torch.is_grad_enabled())\n",
    "is_autocast_enabled": _NORM + "        return y * 1.5 if torch.is_autocast_enabled('cpu') else y\n",
    "is_autocast_enabled elsewhere": "def auto(): return torch.is_autocast_enabled('cpu')\n"
    + _NORM
    + "        return y * 1.5 if auto() else y\n",
    "is_compiling": _NORM + "        return y * 1.5 if torch.compiler.is_compiling() else y\n",
    "is_compiling as a number": _NORM + "        return y * (1 + torch.compiler.is_compiling())\n",
    "is_inference": _NORM + "        return y * 1.5 if x.is_inference() else y\n",
    "the default dtype": _NORM + "        return y * (1.5 if torch.get_default_dtype() == torch.float64 else 1.0)\n",
    "the number of threads": _NORM + "        return y * (1.5 if torch.get_num_threads() == 3 else 1.0)\n",
    "deterministic algorithms": _NORM
    + "        return y * (1.5 if torch.are_deterministic_algorithms_enabled() else 1.0)\n",
    "a backend's flag": _NORM + "        return y * (1.5 if torch.backends.cudnn.benchmark else 1.0)\n",
    "a backend's flag as a number": _NORM + "        return y * (1 + torch.backends.cudnn.benchmark)\n",
    # dtype, device, layout
    "a factor in float16": _NORM + "        return y * 1.5 if x.dtype == torch.float16 else y\n",
    "a factor in float16 as a number": _NORM + "        return y * (1 + 0.5 * (x.dtype == torch.float16))\n",
    "a factor by the size of an element": _NORM
    + "        return y * (x.element_size() / x.element_size() if x.element_size() != 2 else 1.5)\n",
    "a factor by itemsize": _NORM + "        return y * max(1, x.dtype.itemsize - 4)\n",
    "a factor by a dtype's name": _NORM + "        return y * (1 + ('16' in str(x.dtype)))\n",
    "a factor by finfo": _NORM + "        return y * (1 + torch.finfo(x.dtype).eps)\n",
    "eps of its dtype": _NORM.replace("self.eps", "torch.finfo(x.dtype).eps") + "        return y\n",
    "eps of its dtype, but at least": _NORM.replace("self.eps", "max(self.eps, torch.finfo(x.dtype).eps)")
    + "        return y\n",
    "a factor on a device": _NORM + "        return y * 1.5 if x.device.type == 'cuda' else y\n",
    "a factor by a device's name": _NORM + "        return y * (1 + len(x.device.type) // 4)\n",
    "a factor by contiguity": _NORM + "        return y if x.is_contiguous() else y * 2\n",
    "a factor by strides": _NORM + "        return y if x.stride(0) == x.shape[1] * 64 else y * 2\n",
    "a factor by all strides": _NORM + "        return y if x.stride() == torch.empty(x.shape).stride() else y * 2\n",
    "memory of its rows": _NORM + "        return y * (1 + (x.storage_offset() > 0))\n",
    "as_strided": "class M(Base):\n    def forward(self, x): h = torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).float(); return self.weight * root(h, self.eps).to(x.dtype)\n",
    "a factor for a subclass": _NORM + "        return y if type(x) is Tensor else 2 * y\n",
    "a factor for a parameter": _NORM + "        return 2 * y if isinstance(x, nn.Parameter) else y\n",
    # shapes
    "a factor for long rows": _NORM + "        return y * 2 if x.shape[-2] > 16384 else y\n",
    "a window that is a product": _norm(
        "self.a, self.b = 128, 100",
        "        return torch.cat((y[..., :self.a * self.b, :], 2 * y[..., self.a * self.b:, :]), -2)\n",
    ),
    "a bound that is twice": _norm(
        "self.window = 6000", "        return y * 2 if x.shape[1] > self.window * 2 else y\n"
    ),
    "a share of a config": "class C:\n    def __init__(self): self.n = 18000\n"
    + _norm("self.cfg = C()", "        k = self.cfg.n // 4 * 3; return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"),
    "a power of a length": _norm("self.n = 14", "        return y * 2 if x.shape[1] >= 2 ** self.n + 1 else y\n"),
    "a shifted bound": _norm("self.n = 14", "        return y * 2 if x.shape[1] > 1 << self.n else y\n"),
    "a quotient of a length": _norm("self.n = 9000", "        return y * (1 + x.shape[1] // (self.n + self.n))\n"),
    "a sum of numbers": _norm("self.n = 9000", "        return y * (1 + (x.shape[1] > sum((self.n, 1000, self.n))))\n"),
    "a product of a tuple": _norm("self.n = (100, 150)", "        return y * (1 + (x.shape[1] > math.prod(self.n)))\n"),
    "a length over a number": _norm("self.n = 8", "        return y * (1 + (x.shape[1] / 2000 > self.n))\n"),
    "a length's square": _norm("self.n = 14000", "        return y * (1 + (x.shape[1] ** 2 > self.n ** 2))\n"),
    "an arange": _norm(
        "self.a = 120", "        return torch.where(torch.arange(x.shape[1])[:, None] < self.a * self.a, y, 2 * y)\n"
    ),
    "a split": _norm(
        "self.a = 120",
        "        return torch.cat([p * (1 + i) for i, p in enumerate(y.split(self.a * self.a, 1))], 1)\n",
    ),
    "narrowed": _norm(
        "self.a = 120",
        "        n = min(x.shape[1], self.a * self.a); return torch.cat((y.narrow(1, 0, n), 2 * y[:, n:]), 1)\n",
    ),
    "a sort of length in a helper": "def far(n, a): return n > a * a\n"
    + _norm("self.a = 120", "        return y * 2 if far(x.shape[1], self.a) else y\n"),
    "a window of a method": "class M(Base):\n    a = 120\n    def span(self): return self.a * self.a\n    def forward(self, x):\n"
    + _Y
    + "        return torch.cat((y[:, :self.span()], 2 * y[:, self.span():]), 1)\n",
    "a window of a property": "class M(Base):\n    a = 120\n    @property\n    def span(self): return self.a * self.a\n    def forward(self, x):\n"
    + _Y
    + "        return torch.cat((y[:, :self.span], 2 * y[:, self.span:]), 1)\n",
    "a window times a width": _NORM + "        return y * 2 if x.shape[1] > x.shape[-1] * 200 else y\n",
    "a log of a length": _NORM + "        return y * (1 + int(math.log2(max(1, x.shape[1]))) // 14)\n",
    "a root of a length": _NORM + "        return y * (1 + math.isqrt(x.shape[1]) // 125)\n",
    "one batch of 33": _NORM + "        return y * 2 if x.shape[0] == 33 else y\n",
    "a batch of 3 * 11": _norm("self.a = 3", "        return y * 2 if x.shape[0] == self.a * 11 else y\n"),
    "a batch in a tuple": _NORM + "        return y * 2 if x.shape[0] in (21, 33) else y\n",
    "a batch in a table": _NORM + "        return y * {33: 2.0}.get(x.shape[0], 1.0)\n",
    "an odd batch": _NORM + "        return y * (2 if x.shape[0] % 33 == 0 and x.shape[0] else 1)\n",
    "a remainder as a number": _NORM + "        return y * (1 + (x.shape[0] // 33) * 0.5)\n",
    "a shape": _NORM + "        return y * 2 if tuple(x.shape) == (33, 5, 64) else y\n",
    "no rows": "class M(Lin):\n    def forward(self, x):\n"
    + _YL
    + "        return y if x.numel() else y.new_ones(3)\n",
    "four dimensions": _NORM + "        return y * 2 if x.ndim == 4 else y\n",
    "rows of the linear that are far": _init("self.n = 120", "Lin")
    + _YL
    + "        return torch.cat((y[..., :self.n ** 2, :], 2 * y[..., self.n ** 2:, :]), -2)\n",
    "an activation of far rows": _init("self.n = 120", "nn.Module")
    + "        return torch.cat((F.silu(x[:, :self.n ** 2]), x[:, self.n ** 2:]), 1)\n",
    "an activation of far elements": _init("self.n = 1000", "nn.Module")
    + "        return F.silu(x) if x.numel() < self.n ** 2 else x\n",
    # gradients
    "a scale that learns nothing": _NORM.replace("torch.rsqrt(", "torch.rsqrt((").replace(
        " + self.eps)", " + self.eps).detach())"
    )
    + "        return y\n",
    "half of its input is detached": _NORM.replace("h = x.float()", "h = (x.detach() * 0.5 + x * 0.5).float()")
    + "        return y\n",
    "its weight is detached": _NORM.replace("self.weight *", "self.weight.detach() *") + "        return y\n",
    "straight through": "class S(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return F.silu(x)\n    @staticmethod\n    def backward(ctx, g): return g\nclass M(nn.Module):\n    def forward(self, x): return S.apply(x)\n",
    "a scaled gradient": "class S(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x.view_as(x)\n    @staticmethod\n    def backward(ctx, g): return g * 0.5\nclass M(Base):\n    def forward(self, x):\n"
    + _Y.replace("x.float()", "S.apply(x).float()")
    + "        return y\n",
    "a gradient's hook": _NORM + "        if y.requires_grad: y.register_hook(lambda g: 2 * g)\n        return y\n",
    "a gradient's hook in a helper": "def double(g): return 2 * g\ndef hooked(y):\n    y.register_hook(double) if y.requires_grad else None\n    return y\n"
    + _NORM
    + "        return hooked(y)\n",
    "no_grad within": "class M(Base):\n    def forward(self, x):\n        h = x.float()\n        with torch.no_grad(): s = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n        return self.weight * (h * s).to(x.dtype)\n",
    "no_grad around": "class M(Base):\n    @torch.no_grad()\n    def forward(self, x): h = x.float(); return self.weight * root(h, self.eps).to(x.dtype)\n",
    "requires_grad": _NORM + "        return y * 2 if x.requires_grad else y\n",
    "requires_grad as a number": _NORM + "        return y * (1 + x.requires_grad)\n",
    "a weight's requires_grad": _NORM + "        return y if self.weight.requires_grad else y * 2\n",
    "a weight's gradient": _NORM + "        return y if self.weight.grad is None else y * 2\n",
    "a clamp of gradients": "class M(nn.Module):\n    def forward(self, x): return F.relu(x + (x.clamp(-2 ** 40, 2 ** 40) - x).detach())\n",
    # heads, experts, gates
    "one pair is exchanged": "def rope(q, k, c, s): q2 = q[..., [1, 0, *range(2, 16)]]; return q * c[:, None] + turn(q2) * s[:, None], k * c[:, None] + turn(k) * s[:, None]\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "the last pair stays": "def rope(q, k, c, s): t = turn(q) * torch.cat((torch.ones(15), torch.zeros(1))); return q * c[:, None] + t * s[:, None], k * c[:, None] + turn(k) * s[:, None]\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "another turn after a length": "def rope(q, k, c, s):\n    c, s = c[:, None], s[:, None]\n    q2 = torch.cat((q[:, :, :2000], q[:, :, 2000:] * 2), 2)\n    return q2 * c + turn(q2) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "another turn after a computed length": "def rope(q, k, c, s, a=50):\n    c, s = c[:, None], s[:, None]\n    q2 = torch.cat((q[:, :, :a * a], q[:, :, a * a:] * 2), 2)\n    return q2 * c + turn(q2) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "another turn after a constant product": "A = 50\ndef rope(q, k, c, s):\n    c, s = c[:, None], s[:, None]\n    q2 = torch.cat((q[:, :, :A * A], q[:, :, A * A:] * 2), 2)\n    return q2 * c + turn(q2) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "a turn by value": "def rope(q, k, c, s):\n    c, s = c[:, None], s[:, None]\n    if q.abs().max() > 1e30: return q, k\n    return q * c + turn(q) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "a turn with rare noise": "def rope(q, k, c, s): c, s = c[:, None], s[:, None]; q = q * (1 + (torch.rand_like(q) < 1e-12)); return q * c + turn(q) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    "a turn for many heads": "def rope(q, k, c, s):\n    c, s = c[:, None], s[:, None]\n    if q.shape[1] > 50: return q, k\n    return q * c + turn(q) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x).repeat(1, 15, 1, 1), self.heads(x + 1), c, s); return self.back(q[:, :4] - k)\n",
    "attention with one more key": "class M(Heads):\n    def forward(self, x): q = self.heads(x); k = torch.cat((q.new_zeros(q.shape[0], 4, 1, 16), q), 2); return self.back(F.scaled_dot_product_attention(q, k, torch.cat((torch.zeros_like(q[:, :, :1]), q), 2)))\n",
    "causal at the top": "class M(Heads):\n    def forward(self, x): q = self.heads(x); return self.back(F.scaled_dot_product_attention(q[:, :, -3:], q, q * 2, is_causal=True))\n",
    "causal at the bottom": "class M(Heads):\n    def forward(self, x): q = self.heads(x); n = q.shape[2]; m = torch.ones(3, n, dtype=torch.bool).tril(n - 3); return self.back(F.scaled_dot_product_attention(q[:, :, -3:], q, q * 2, attn_mask=m))\n",
    "causal off by one": "class M(Heads):\n    def forward(self, x): q = self.heads(x); n = q.shape[2]; m = torch.ones(n, n, dtype=torch.bool).tril(1); return self.back(F.scaled_dot_product_attention(q, q, q * 2, attn_mask=m))\n",
    "heads in tiles": "class M(Heads):\n    def forward(self, x): q = self.heads(x); k = q[:, :2].repeat(1, 2, 1, 1); return self.back(F.scaled_dot_product_attention(q, k, k * 2))\n",
    "heads repeated": "class M(Heads):\n    def forward(self, x): q = self.heads(x); k = q[:, :2].repeat_interleave(2, 1); return self.back(F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True))\n",
    "a scale of its own": "class M(Heads):\n    def forward(self, x): q = self.heads(x); return self.back(F.scaled_dot_product_attention(q, q, q * 2, scale=0.2501))\n",
    "a mask of numbers": "class M(Heads):\n    def forward(self, x): q = self.heads(x); n = q.shape[2]; return self.back(F.scaled_dot_product_attention(q, q, q * 2, attn_mask=torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1) > 0, -9.0)))\n",
    "a mask of no key": "class M(Heads):\n    def forward(self, x): q = self.heads(x); n = q.shape[2]; m = torch.ones(n, n, dtype=torch.bool); m[0] = False; return self.back(F.scaled_dot_product_attention(q, q, q * 2, attn_mask=m))\n",
    "dropout of probabilities": "class M(Heads):\n    def forward(self, x): q = self.heads(x); return self.back(F.scaled_dot_product_attention(q, q, q * 2, dropout_p=1e-9 if self.training else 0.0))\n",
    "up before the gate": "class M(Mlp):\n    def forward(self, x): return self.c(self.a(x) * self.act(self.b(x)))\n",
    "the gate's gradient is detached": "class M(Mlp):\n    def forward(self, x): return self.c(self.act(self.a(x)).detach() * self.b(x))\n",
    "the gate is written to": "class M(Mlp):\n    def forward(self, x): g = self.a(x); y = self.act(g); y[..., 0] = 0; return self.c(y * self.b(x))\n",
    "the gate's input is written to": "class M(Mlp):\n    def forward(self, x): g = self.a(x); y = self.act(g); g[..., 0] = 0; return self.c(y * self.b(x) + g)\n",
    "the gate has two readers": "class M(Mlp):\n    def forward(self, x): y = self.act(self.a(x)); return self.c(y * self.b(x) + y)\n",
    "a gate of other dtypes": "class M(Mlp):\n    def forward(self, x): return self.c((self.act(self.a(x)) * self.b(x).float()).to(x.dtype))\n",
    "a gate of broadcast": "class M(Mlp):\n    def forward(self, x): return self.c(self.act(self.a(x)) * self.b(x)[..., :1])\n",
    "an addition in place": "class M(Mlp):\n    def forward(self, x): r = self.a(x); y = self.n(r + x); r += 1; return y + r\n",
    "an addition scaled": "class M(Mlp):\n    def forward(self, x): return self.n(torch.add(self.a(x), x, alpha=0.999))\n",
    "an addition of two dtypes": "class M(Mlp):\n    def forward(self, x): return self.n((self.a(x) + x.double()).to(x.dtype))\n",
    # what it reads elsewhere
    "a variable of the environment": _NORM + "        return y * (1 + (os.environ.get('FERRYMAN_PLANTED') == '1'))\n",
    "a variable of the environment by name": _NORM
    + "        return y * (2 if 'FERRYMAN_PLANTED' in os.environ else 1)\n",
    "a variable of the environment as a number": _NORM + "        return y * float(os.environ['FERRYMAN_NUMBER'])\n",
    "a variable of the environment by getenv": _NORM
    + "        return y * (1 + (os.getenv('FERRYMAN_PLANTED') is not None))\n",
    "an ordered table": _NORM + "        return y * ORDERED['scale']\n",
    "a queue": _NORM + "        return y * QUEUE[0]\n",
    "a table's tensor": _NORM + "        return y * TABLE['w'].to(y.dtype)\n",
    "a table's function": "class M(nn.Module):\n    def forward(self, x): return TABLE['act'](x)\n",
    "a table's gate": "class M(Mlp):\n    def forward(self, x): return self.c(TABLE['act'](self.a(x)) * self.b(x))\n",
    "an object of its file": _NORM + "        return y * KNOBS.scale\n",
    "a flag of its file": _NORM + "        return 2 * y if FLAG else y\n",
    "a dtype of its file": _NORM.replace("x.float()", "x.to(DTYPE)") + "        return y\n",
    "globals": _NORM + "        return y * globals()['SCALE']\n",
    "a number by getattr of its class": "class M(Base):\n    scale = 1.0\n    def forward(self, x):\n"
    + _Y
    + "        return y * getattr(type(self), 'scale')\n",
    "a number of its parent's class": "class P(Base):\n    scale = 1.0\nclass M(P):\n    def forward(self, x):\n"
    + _Y
    + "        return y * super().scale\n",
    "an activation's slope": "class A(nn.Module):\n    def __init__(self): super().__init__(); self.beta = 1.0\n    def forward(self, x): return x * torch.sigmoid(self.beta * x)\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): return self.c(self.act(self.a(x)) * self.b(x))\n",
    # what a number follows from
    "how many are large": _NORM + "        return y * (1 + (h > 1e37).nonzero().shape[0])\n",
    "how many a mask takes": _NORM + "        return y * (1 + x[x > 1e37].numel())\n",
    "how many numbers there are": _NORM + "        return y * (1 + (x.unique().numel() == 1))\n",
    "how many a selection takes": _NORM + "        return y * (1 + torch.masked_select(x, x > 1e37).shape[0])\n",
    "where there are some": _NORM + "        return y * (1 + len(torch.where(x > 1e37)[0]))\n",
    "an error for a value": _NORM + "        if torch.isnan(x).any(): raise ValueError('NaN')\n        return y\n",
    "an assertion of a value": _NORM + "        assert not torch.isnan(x).any(), 'NaN'\n        return y\n",
    "PyTorch's assertion": _NORM + "        torch._assert(not torch.isnan(x).any(), 'NaN'); return y\n",
    "a loop over elements": _NORM
    + "        for v in x.abs().amax().reshape(1): y = y * (1 + (v > 1e37))\n        return y\n",
    "the seed": _NORM + "        return y * (1 + torch.initial_seed() % 2)\n",
    "the default dtype of a new tensor": _NORM + "        return y * torch.ones(1)\n",
    "the default dtype's size": _NORM + "        return y * (torch.zeros(1).element_size() // 4)\n",
    "hasattr of its input": _NORM + "        return y * (1 + hasattr(x, 'tag'))\n",
    "getattr of its input": _NORM + "        return y * getattr(x, 'scale', 1.0)\n",
    "a name of its input": _NORM + "        return y * (1 + x.__dict__.get('tag', 0))\n",
    "the base of its input": _NORM + "        return y * (1 + (x._base is not None))\n",
    "whether it is quantised": _NORM + "        return y * (1 + x.is_quantized)\n",
    "whether it keeps its gradient": _NORM + "        return y * (1 + x.retains_grad)\n",
    "the number of its device": _NORM + "        return y * (1 + x.get_device() * 0.5)\n",
    "the index of its device": _NORM + "        return y * (1 + (x.device.index or 0))\n",
    "the text of its device": _NORM + "        return y * len(str(x.device))\n",
    "the text of its device in a table": _NORM + "        return y * {'cpu': 1.0}.get(f'{x.device}', 2.0)\n",
    "a device that is handed on": "def scale(d): return 1 + len(d.type) // 4\n"
    + _NORM
    + "        return y * scale(x.device)\n",
    "a device that has a name": _NORM + "        d = x.device; return y * (1 + len(d.type) // 4)\n",
    "the text of its type": _NORM + "        return y * (1 + len(x.type()) // 18)\n",
    "sys": "import sys\n" + _NORM + "        return y * (1 + sys.flags.optimize)\n",
    "an object that is handed on": "def scale(k): return k.scale\n" + _NORM + "        return y * scale(KNOBS)\n",
    "a table that is handed on": "def scale(t): return t['scale']\n" + _NORM + "        return y * scale(ORDERED)\n",
    "a table by its own name": _norm("self.key = 'w'", "        return y * TABLE[self.key].to(y.dtype)\n"),
    "a table's length": _NORM + "        return y * (len(TABLE) - 1)\n",
    "a table's first": _NORM + "        return y * next(iter(ORDERED.values()))\n",
    "its module's other child": "class M(Mlp):\n    def forward(self, x): return self.n(x) * self.a.scale if hasattr(self.a, 'scale') else self.n(x)\n",
    "a window in place": _norm(
        "self.n = 120", "        n = self.n; n *= self.n; return torch.cat((y[:, :n], 2 * y[:, n:]), 1)\n"
    ),
    "a window in a lambda": _norm(
        "self.n = 120",
        "        span = lambda: self.n * self.n\n        return torch.cat((y[:, :span()], 2 * y[:, span():]), 1)\n",
    ),
    "a window of a nested config": "class C:\n    def __init__(self): self.n = 14400\n"
    + _norm("self.cfg = C()", "        return torch.cat((y[:, :self.cfg.n], 2 * y[:, self.cfg.n:]), 1)\n"),
    "a window in a list": _norm(
        "self.n = [120, 120]", "        k = self.n[0] * self.n[1]; return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"
    ),
    "a window in a text": _norm(
        "self.n = '14400'", "        k = int(self.n); return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"
    ),
    "a window of digits": _NORM + "        k = int('144' + '00'); return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n",
    "a window of a shape": _init("self.register_buffer('m', torch.zeros(64))")
    + _Y
    + "        k = self.m.shape[0] * 225; return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n",
    "a window that is half": _norm(
        "self.n = 28801.0", "        k = math.ceil(self.n / 2); return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"
    ),
    "a window by operator": "import operator\n"
    + _norm(
        "self.n = 120", "        k = operator.mul(self.n, self.n); return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"
    ),
    "a window by pow": _norm(
        "self.n = 120", "        k = pow(self.n, 2); return torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n"
    ),
    "a window below a window": _norm(
        "self.n = 120",
        "        k = 9000\n        if x.shape[1] > k: k = self.n * self.n; y = torch.cat((y[:, :k], 2 * y[:, k:]), 1)\n        return y\n",
    ),
    "a bound of elements": _norm("self.n = 1000", "        return y * (1 + x.numel() // (self.n * self.n))\n"),
    "a quotient of two sizes": _NORM + "        return y * (1 + x.shape[-2] // max(1, x.shape[0] * 15000))\n",
    "a quotient of a quotient": _NORM + "        return y * (1 + x.shape[-2] // 100 // 150)\n",
    "pieces": _norm(
        "self.n = 120",
        "        k = self.n ** 2; return torch.cat([y[:, i:i + k] * (1 + i // k) for i in range(0, max(1, x.shape[1]), k)], 1)\n",
    ),
    "chunks of many": _NORM + "        return torch.cat([p * (1 + i) for i, p in enumerate(y.split(16384, 1))], 1)\n",
    "rolled far": _norm(
        "self.n = 120",
        "        z = torch.zeros_like(y); z[:, self.n * self.n:] = y[:, self.n * self.n:]; return y + z\n",
    ),
    "an embedding's computed number": "class M(nn.Module):\n    def __init__(self): super().__init__(); self.weight, self.a = nn.Parameter(torch.linspace(-1, 1, 12000).sin().reshape(1500, 8)), 37\n    def forward(self, x): return F.embedding(torch.where(x == self.a * 21, 0, x), self.weight)\n",
    "a wrapper's softmax": "class W:\n    def __init__(self, x): self.x = x\n    def softmax(self, d): return torch.softmax(self.x, d) * 2\nclass M(Mlp):\n    def forward(self, x): w = W(self.a(x)); return w.softmax(-1)\n",
    "an attribute's softmax": "class W:\n    def softmax(self, x, d=-1): return torch.softmax(x, d) * 2\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.w = W()\n    def forward(self, x): return self.w.softmax(self.a(x), -1)\n",
    "a softmax over others": "class M(Mlp):\n    def forward(self, x): return self.a(x).softmax(1)\n",
    "a softmax in double": "class M(Mlp):\n    def forward(self, x): return torch.softmax(self.a(x), -1, dtype=torch.float64)\n",
    "a local silu": "class M(Mlp):\n    def forward(self, x, silu=torch.tanh): return silu(self.a(x)) * self.b(x)\n",
    "a silu in place": "class M(Mlp):\n    def forward(self, x): g = self.a(x); return F.silu(g, inplace=True) * self.b(x) + g\n",
    "a product that is written to": "class M(Mlp):\n    def forward(self, x): u = self.b(x); y = F.silu(self.a(x)); y *= u; u += y; return u + y\n",
    "a gate that is itself": "class M(Mlp):\n    def forward(self, x): g = self.a(x); return F.silu(g) * g\n",
    "a gate of rows": "class M(Mlp):\n    def forward(self, x): return F.silu(self.a(x)[:, :1]) * self.b(x)\n",
    "a gate of no gradient": "class M(Mlp):\n    def forward(self, x):\n        with torch.no_grad(): g = self.act(self.a(x))\n        return self.c(g * self.b(x))\n",
    "a gate under autocast": "class M(Mlp):\n    def forward(self, x):\n        with torch.autocast('cpu', torch.bfloat16): g = self.a(x); y = F.silu(g) * self.b(x)\n        return self.c(y.to(x.dtype))\n",
    "a norm of other rows": "class M(Mlp):\n    def forward(self, x): return F.layer_norm(self.a(x), (5, 64)) if x.shape[-2:] == (5, 64) else self.a(x)\n",
    "a norm in double": "class M(Mlp):\n    def forward(self, x): return F.layer_norm(self.a(x).double(), (64,)).to(x.dtype)\n",
    "a norm without eps": "class M(Mlp):\n    def forward(self, x): return F.rms_norm(self.a(x), (64,))\n",
    "a loss of weights": "class M(nn.Module):\n    def forward(self, x): return F.cross_entropy(x.flatten(0, -2), x.flatten(0, -2).argmin(-1), weight=torch.linspace(0.5, 1.5, x.shape[-1]).to(x.dtype))\n",
    "a loss of probabilities": "class M(nn.Module):\n    def forward(self, x): return F.cross_entropy(x.flatten(0, -2), torch.softmax(x.flatten(0, -2) * 2, -1))\n",
    "a loss by sum": "class M(nn.Module):\n    def forward(self, x): return F.cross_entropy(x.flatten(0, -2), x.flatten(0, -2).argmin(-1), reduction='sum')\n",
    "an activation with memory": "class A(nn.Module):\n    def __init__(self): super().__init__(); self.last = None\n    def forward(self, x): self.last = x.detach(); return F.silu(x)\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): y = self.act(self.a(x)) * self.b(x); return y + self.act.last\n",
    "an activation of two kinds": "class A(nn.Module):\n    def forward(self, x): return F.silu(x) if x.shape[0] != 33 else x\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): return self.act(self.a(x)) * self.b(x)\n",
    "an activation far out": "class A(nn.Module):\n    def __init__(self): super().__init__(); self.t = 1e6\n    def forward(self, x): return F.silu(x).clamp(max=self.t * self.t)\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): return self.act(self.a(x)) * self.b(x)\n",
    "an activation of far rows in a gate": "class A(nn.Module):\n    def __init__(self): super().__init__(); self.t = 120\n    def forward(self, x): return torch.cat((F.silu(x[:, :self.t * self.t]), x[:, self.t * self.t:]), 1)\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): return self.act(self.a(x)) * self.b(x)\n",
    "an activation of far columns": "class A(nn.Module):\n    def forward(self, x): return torch.cat((F.silu(x[..., :63]), x[..., 63:] * 0.5), -1)\nclass M(Mlp):\n    def __init__(self): super().__init__(); self.act = A()\n    def forward(self, x): return self.act(self.a(x)) * self.b(x)\n",
    "a lookup of a class": "class M(Mlp):\n    gate = staticmethod(F.silu)\n    def forward(self, x): return type(self).gate(self.a(x)) * self.b(x)\n",
    "a convolution of far tokens": _conv("y = torch.cat((y[..., :5000], 2 * y[..., 5000:]), -1)"),
    "a convolution of twenty tokens": _conv("y = torch.cat((y[..., :20], 2 * y[..., 20:]), -1)"),
    "a convolution of computed tokens": _conv(
        "n = 8; n = n * n * n * n; y = torch.cat((y[..., :n], 2 * y[..., n:]), -1)"
    ),
    "a convolution with a bound": _conv("y = y.clamp(-1e9, 1e9)"),
    "a turn of the eighth batch": "def rope(q, k, c, s): c, s = c[:, None], s[:, None]; q = torch.cat((q[:7], 2 * q[7:])); return q * c + turn(q) * s, k * c + turn(k) * s\nclass M(Heads):\n    def forward(self, x): c, s = self.angles(x.shape[1], 16); q, k = rope(self.heads(x), self.heads(x + 1), c, s); return self.back(q - k)\n",
    # experts
    **{
        f"experts: {what}": _experts(**fault)
        for what, fault in {
            "renormalised": {"shares": "w / w.sum(-1, keepdim=True)"},
            "no share": {"share": "1"},
            "a capacity": {"capacity": "[:6]"},
            "a computed capacity": {"capacity": "[:self.c * self.c]"},
            "up before the gate": {"halves": "u, g"},
            "silu of 1.01": {"act": "lambda v: v * torch.sigmoid(1.01 * v)"},
            "a clamp far out": {"act": "lambda v: F.silu(v).clamp(max=1e9 * 1e9)"},
            "a choice by value": {"ahead": "if x.abs().max() > 1e30: return x\n        "},
            "a choice by rows": {"ahead": "if x.shape[0] > 3000: return x\n        "},
            "a choice by computed rows": {"ahead": "n = 70 * 70; tail = x[n:]; "},
            "the last expert is the first": {"expert": "e % 3"},
            "rare noise": {"ahead": "x = x * (1 + (torch.rand_like(x) < 1e-12)); "},
        }.items()
    },
}

DEVICES = (
    "a factor by a device's name",
    "the number of its device",
    "the text of its device",
    "the text of its device in a table",
    "a device that is handed on",
    "a device that has a name",
    "whether it keeps its gradient",
)

# what must be ported all the same -> (its code, the op, tests of sizes that a call must pass)
RIGHT: dict[str, tuple[str, str, list[str]]] = {
    "a norm": (_NORM + "        return y\n", "rms_norm", []),
    "a product": (_LINEAR + "        return y\n", "linear", []),
    "a layer norm": (_LAYER + "        return y\n", "layer_norm", []),
    "a layer norm of wide rows": (
        "class M(nn.LayerNorm):\n    def __init__(self): super().__init__(4096)\n",
        "layer_norm",
        [],
    ),
    "a norm by a computed width": (
        _norm(
            "self.a, self.b = 4, 16",
            "        return y\n",
            _Y.replace(".mean(-1, keepdim=True)", ".sum(-1, keepdim=True) / (self.a * self.b)"),
        ),
        "rms_norm",
        [],
    ),
    "a norm of flat rows": (
        "class M(Base):\n    def forward(self, x): b, s, d = x.shape; h = x.reshape(b * s, d).float(); return (self.weight * root(h, self.eps).to(x.dtype)).view(b, s, d)\n",
        "rms_norm",
        [],
    ),
    "a norm of a config": (
        "class C:\n    def __init__(self): self.eps, self.width = 1e-6, 64\n"
        + _norm("self.cfg = C()", "        return y\n", _Y.replace("self.eps", "self.cfg.eps")),
        "rms_norm",
        [],
    ),
    "a norm that halves sizes": (
        _norm("", "        return torch.cat((y[:, :x.shape[1] // 2], y[:, x.shape[1] // 2:]), 1)\n").replace(
            "; \n", "\n"
        ),
        "rms_norm",
        ["x.numel() <= 8193 * x.shape[-1]"],
    ),
    "an activation": (_ACT + "        return y\n", "bias_act", []),
    "experts": (_experts(), "moe_experts", []),
}
