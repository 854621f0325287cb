# ruff: noqa: E501
"""More right modules in spellings of real repositories, by kind, written without a look at what is handled."""

from __future__ import annotations

import textwrap

# Of several modules, M is the one that is built. Names without an import are those of `disguises.HEAD`.
_RAW: dict[str, list[tuple[str, str, str]]] = {}


def _kind(name: str, *spellings: tuple[str, str, str]) -> None:
    _RAW[name] = [(textwrap.dedent(code).lstrip("\n"), op, x) for code, op, x in spellings]


def _norm(body: str, init: str = "self.g, self.eps = ones(), 1e-6", base: str = "nn.Module", size: str = "") -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "        ")
    return (
        f"class M({base}):\n    def __init__(self):\n        super().__init__({size}); {init}\n"
        f"    def forward(self, x):\n{lines}\n"
    )


_WB = "self.g, self.b, self.eps = ones(), nn.Parameter(torch.linspace(-1, 1, 64)), 1e-5"
_kind(
    "a root mean square in other functions",
    (
        _norm("return x * (x.norm(2, dim=-1, keepdim=True).pow(2).div(x.size(-1)) + self.eps).rsqrt() * self.g"),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "ms = torch.einsum('...d,...d->...', x, x).unsqueeze(-1) / x.shape[-1]\nreturn self.g * (x / torch.sqrt(ms + self.eps))"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "n = torch.linalg.vector_norm(x, dim=-1, keepdim=True)\nreturn x / (n.square() / 64 + self.eps).sqrt() * self.g"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "return x.float().pow(2).mean(-1, keepdim=True).add(self.eps).pow(-0.5).mul(x.float()).type_as(x) * self.g"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "r = torch.reciprocal(torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + self.eps))\nreturn torch.mul(torch.mul(x, r), self.g)"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "s = torch.matmul(x.unsqueeze(-2), x.unsqueeze(-1)).squeeze(-1)\nreturn x * torch.rsqrt(s / self.g.numel() + self.eps) * self.g"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "shape = x.shape\nx = x.view(-1, shape[-1])\nx = x * torch.rsqrt((x * x).sum(1, keepdim=True) / shape[-1] + self.eps)\nreturn (x * self.g).view(shape)"
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "kept = x.dtype\nx = x.to(torch.float32).float()\nvar = (x ** 2).mean(dim=-1, keepdim=True)\nx = x / (var + self.eps) ** 0.5\nreturn (self.g.to(torch.float32) * x).to(kept)"
        ),
        "rms_norm",
        "x",
    ),
)
_kind(
    "where a norm's numbers come from",
    (
        """
     from dataclasses import dataclass
     @dataclass
     class Args:
         dim: int = 64
         norm_eps: float = 1e-6
     class M(nn.Module):
         def __init__(self, args=Args()):
             super().__init__(); self.args, self.weight = args, ones()
         def _norm(self, x): return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.args.norm_eps)
         def forward(self, x): return self._norm(x.float()).type_as(x) * self.weight
     """,
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g",
            "self.g = ones(); self.register_buffer('eps', torch.tensor(1e-6))",
        ),
        "rms_norm",
        "x",
    ),
    (
        _norm(
            "return root(x, self._eps()) * self.g\ndef _eps(self): return 1e-6".replace("\ndef", "\n").replace(
                "\n _eps(self): return 1e-6", ""
            ),
            "self.g, self._eps = ones(), (lambda: 1e-6)",
        ),
        "rms_norm",
        "x",
    ),
    ("EPS = 1e-6\n" + _norm("return self.g * (x * (x.square().mean(-1, True) + EPS) ** -0.5)"), "rms_norm", "x"),
    (
        _norm("return root(x, self.hp['norm']['eps']) * self.g", "self.g, self.hp = ones(), {'norm': {'eps': 1e-6}}"),
        "rms_norm",
        "x",
    ),
)
_kind(
    "a norm by a scripted or a far function",
    (
        """
     @torch.jit.script
     def fused(x, g, eps: float):
         v = x.float().pow(2).mean(-1, keepdim=True)
         return (x.float() * torch.rsqrt(v + eps)).to(x.dtype) * g
     """
        + "\n"
        + textwrap.indent(_norm("return fused(x, self.g, self.eps)"), "     "),
        "rms_norm",
        "x",
    ),
    ("from tests.unit.disguises_elsewhere import rms\n" + _norm("return rms(x, self.g, self.eps)"), "rms_norm", "x"),
    (
        "import tests.unit.disguises_elsewhere as lib\n" + _norm("return lib.layer(x, self.g, self.b, self.eps)", _WB),
        "layer_norm",
        "x",
    ),
    (
        """
     class Base(nn.Module):
         def statistic(self, x): return x.pow(2).mean(-1, keepdim=True)
         def forward(self, x): return self.g * (x * torch.rsqrt(self.statistic(x) + 1e-6))
     class M(Base):
         def __init__(self): super().__init__(); self.g = ones()
         def statistic(self, x): return super().statistic(x.float())
     """,
        "rms_norm",
        "x",
    ),
)
_kind(
    "a layer norm by hand",
    (
        _norm(
            "v, m = torch.var_mean(x, -1, unbiased=False, keepdim=True)\nreturn (x - m) / torch.sqrt(v + self.eps) * self.g + self.b",
            _WB,
        ),
        "layer_norm",
        "x",
    ),
    (
        _norm(
            "m = x.mean(-1, keepdim=True)\nv = x.var(dim=-1, keepdim=True, unbiased=False)\nreturn torch.addcmul(self.b, (x - m) * torch.rsqrt(v + self.eps), self.g)",
            _WB,
        ),
        "layer_norm",
        "x",
    ),
    (
        _norm(
            "m = x.mean(-1, keepdim=True)\nv = (x * x).mean(-1, keepdim=True) - m * m\nreturn (x - m) * (v + self.eps).rsqrt() * self.g + self.b",
            _WB,
        ),
        "layer_norm",
        "x",
    ),
    (
        _norm(
            "u = x.mean(1, keepdim=True)\ns = (x - u).pow(2).mean(1, keepdim=True)\nx = (x - u) / torch.sqrt(s + self.eps)\nreturn self.g[:, None] * x + self.b[:, None]",
            _WB,
        ),
        "layer_norm",
        "bcs",
    ),
    (
        _norm("kept = x.dtype\nreturn super().forward(x.type(torch.float32)).type(kept)", "pass", "nn.LayerNorm", "64"),
        "layer_norm",
        "x",
    ),
    (
        _norm(
            "y = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)\nreturn y.type_as(x)",
            "pass",
            "nn.LayerNorm",
            "64",
        ),
        "layer_norm",
        "x",
    ),
    (
        _norm("return F.layer_norm(x.permute(0, 2, 1), (64,), self.g, self.b, self.eps).permute(0, 2, 1)", _WB),
        "layer_norm",
        "bcs",
    ),
)
_kind(
    "a norm inside a larger forward",
    (
        """
     class M(Heads):
         def __init__(self): super().__init__(); self.qs, self.ks = nn.Parameter(torch.linspace(0.5, 1.5, 16)), nn.Parameter(torch.linspace(0.5, 1.5, 16))
         def forward(self, x):
             q, k, v = self.split(x)
             q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.qs
             k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6) * self.ks
             return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
     """,
        "rms_norm",
        "x",
    ),
    (_norm("y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g\nreturn y, x"), "rms_norm", "x"),
    (
        """
     def norm(x): return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
     class M(nn.Module):
         def __init__(self): super().__init__(); self.f = nn.Linear(64, 64)
         def forward(self, x): return x + self.f(norm(x))
     """,
        "rms_norm",
        "x",
    ),
    (
        """
     class M(nn.Module):
         def __init__(self): super().__init__(); self.f, self.g = nn.Linear(64, 64), ones()
         def forward(self, x): return x + self.f(root(x.float(), 1e-6).to(x.dtype) * self.g)
     """,
        "rms_norm",
        "x",
    ),
    (
        """
     class Scale(nn.Module):
         def __init__(self): super().__init__(); self.g = ones()
         def forward(self, x): return x * self.g
     class Unit(nn.Module):
         def forward(self, x): return x * torch.rsqrt(torch.mean(x ** 2, -1, keepdim=True) + 1e-6)
     class M(nn.Sequential):
         def __init__(self): super().__init__(Unit(), Scale())
     """,
        "rms_norm",
        "x",
    ),
    (
        """
     class Inner(nn.Module):
         def __init__(self): super().__init__(); self.g = ones()
         def forward(self, *, hidden): return root(hidden, 1e-6) * self.g
     class M(nn.Module):
         def __init__(self): super().__init__(); self.n = Inner()
         def forward(self, x): return self.n(hidden=x)
     """,
        "rms_norm",
        "x",
    ),
)
_FUSED = "self.w, self.o = nn.Linear(64, 192), nn.Linear(96, 64)"
_kind(
    "a fused gate and up",
    (_norm("h = self.w(x)\nreturn self.o(F.silu(h[..., :96]) * h[..., 96:])", _FUSED), "silu_mul", "x"),
    (
        _norm("up, gate = torch.split(self.w(x), [96, 96], dim=-1)\nreturn self.o(up * F.gelu(gate))", _FUSED),
        "gelu_mul",
        "x",
    ),
    (
        _norm("h = self.w(x)\ng, u = h.view(*h.shape[:-1], 2, 96).unbind(-2)\nreturn self.o(F.silu(g) * u)", _FUSED),
        "silu_mul",
        "x",
    ),
    (
        """
     class GEGLU(nn.Module):
         def forward(self, x):
             x, gate = x.chunk(2, dim=-1)
             return F.gelu(gate) * x
     class M(nn.Sequential):
         def __init__(self): super().__init__(nn.Linear(64, 192), GEGLU(), nn.Linear(96, 64))
     """,
        "gelu_mul",
        "x",
    ),
    (
        "@torch.jit.script\ndef swiglu(x):\n    a, b = x.chunk(2, -1)\n    return F.silu(a) * b\n"
        + _norm("return self.o(swiglu(self.w(x)))", _FUSED),
        "silu_mul",
        "x",
    ),
    (
        "from tests.unit.disguises_elsewhere import swiglu\n" + _norm("return self.o(swiglu(self.w(x)))", _FUSED),
        "silu_mul",
        "x",
    ),
    (
        _norm(
            "h = self.w(x).unflatten(-1, (2, 96))\nreturn self.o(h[..., 0, :].sigmoid() * h[..., 0, :] * h[..., 1, :])",
            _FUSED,
        ),
        "silu_mul",
        "x",
    ),
)
_G = "self.a, self.b, self.c = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)"
_P = "self.w1, self.w2, self.w3 = (nn.Parameter(torch.linspace(-1, 1, 6144).sin().reshape(s) / 8) for s in ((96, 64), (64, 96), (96, 64)))"
_kind(
    "an activation in other words",
    (
        _norm("return self.c(self.act(self.a(x)) * self.b(x))", _G + "; self.act = lambda t: t * torch.sigmoid(t)"),
        "silu_mul",
        "x",
    ),
    (
        _norm(
            "return self.c(self.act(self.a(x)) * self.b(x))",
            "import functools; " + _G + "; self.act = functools.partial(F.gelu, approximate='tanh')",
        ),
        "gelu_mul",
        "x",
    ),
    (
        "def new_gelu(x): return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))\n"
        + _norm("return self.c(new_gelu(self.a(x)) * self.b(x))", _G),
        "gelu_mul",
        "x",
    ),
    (
        """
     class GELU(nn.Module):
         def forward(self, x): return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
     """
        + "\n"
        + textwrap.indent(_norm("return self.c(self.act(self.a(x)) * self.b(x))", _G + "; self.act = GELU()"), "     "),
        "gelu_mul",
        "x",
    ),
    (_norm("g = self.a(x)\nreturn self.c(g / (1 + torch.exp(-g)) * self.b(x))", _G), "silu_mul", "x"),
    (
        _norm("gate = self.a(x)\ns = torch.sigmoid(gate)\nh = gate * s\nh = h * self.b(x)\nreturn self.c(h)", _G),
        "silu_mul",
        "x",
    ),
    (
        _norm("return x + self.c(torch.addcmul(torch.zeros_like(x[..., :1]), F.silu(self.a(x)), self.b(x)))", _G),
        "silu_mul",
        "x",
    ),
    (_norm("return self.c(F.silu(input=self.a(x)).multiply(self.b(x)))", _G), "silu_mul", "x"),
    (
        _norm(
            "return self.c(self.gate(x) * self.b(x))", _G + "; self.gate = nn.Sequential(nn.Linear(64, 96), nn.SiLU())"
        ),
        "silu_mul",
        "x",
    ),
    (
        _norm(
            "return self.m['down'](self.m['act'](self.m['gate'](x)) * self.m['up'](x))",
            "self.m = nn.ModuleDict(dict(gate=nn.Linear(64, 96), up=nn.Linear(64, 96), act=nn.SiLU(), down=nn.Linear(96, 64)))",
        ),
        "silu_mul",
        "x",
    ),
    (
        _norm(
            "for f in (self.a,): g = f(x)\nreturn self.c(self.ACT[0](g) * self.b(x))",
            _G + "; self.ACT = [F.silu, F.gelu]",
        ),
        "silu_mul",
        "x",
    ),
    (
        _norm("return self.c(self._gated(self.a(x), self.b(x))), None\n", _G).rstrip()
        + "\n    @staticmethod\n    def _gated(g, u): return F.gelu(g) * u\n",
        "gelu_mul",
        "x",
    ),
)
_kind(
    "a gated layer of parameters",
    (
        _norm(
            "g = torch.einsum('bsd,fd->bsf', x, self.w1)\nu = torch.einsum('bsd,fd->bsf', x, self.w3)\nreturn torch.einsum('bsf,df->bsd', F.silu(g) * u, self.w2)",
            _P,
        ),
        "silu_mul",
        "x",
    ),
    (_norm("return (F.silu(x @ self.w1.t()) * (x @ self.w3.t())) @ self.w2.t()", _P), "silu_mul", "x"),
    (
        _norm("h = F.silu(F.linear(x, self.w1))\nh = h * F.linear(x, self.w3)\nreturn F.linear(h, self.w2)", _P),
        "linear",
        "x",
    ),
    (
        _norm(
            "w = torch.cat((self.w1, self.w3))\ng, u = F.linear(x, w).chunk(2, -1)\nreturn F.linear(u * F.gelu(g, approximate='tanh'), self.w2)",
            _P,
        ),
        "gelu_mul",
        "x",
    ),
)
_L = "self.w, self.b = nn.Parameter(torch.linspace(-1, 1, 6144).sin().reshape(96, 64) / 8), nn.Parameter(torch.linspace(-1, 1, 96))"
_LT = _L.replace("(96, 64)", "(64, 96)")
_kind(
    "a linear layer in other words",
    (_norm("return torch.einsum('...i,oi->...o', x, self.w) + self.b", _L), "linear", "x"),
    (
        _norm("y = torch.addmm(self.b, x.view(-1, x.size(-1)), self.w)\nreturn y.view(x.size()[:-1] + (96,))", _LT),
        "linear",
        "x",
    ),
    (_norm("return torch.baddbmm(self.b.view(1, 1, -1), x, self.w.t().expand(x.shape[0], -1, -1))", _L), "linear", "x"),
    (_norm("return F.linear(x, self.w.t(), self.b)", _LT), "linear", "x"),
    (_norm("return torch.tensordot(x, self.w, dims=([-1], [0])) + self.b", _LT), "linear", "x"),
    (_norm("return (self.w @ x.transpose(-1, -2)).transpose(-1, -2) + self.b", _L), "linear", "x"),
    (_norm("return x.matmul(self.w.transpose(0, 1)).add(self.b)", _L), "linear", "x"),
    (_norm("return (x.unsqueeze(-2) * self.w).sum(-1) + self.b", _L), "linear", "x"),
)
_kind(
    "a bias and an activation",
    (
        "class M(nn.Sequential):\n    def __init__(self): super().__init__(nn.Linear(64, 96), New(), nn.Linear(96, 64))\nclass New(nn.Module):\n    def forward(self, x): return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))\n",
        "bias_act",
        "x",
    ),
    (_norm("h = x + self.b\nreturn h * 0.5 * (1.0 + torch.erf(h * 0.70710678118654752440))", _WB), "bias_act", "x"),
    (_norm("return torch.square(F.relu(x))", "pass"), "bias_act", "x"),
)
_S = "class M(Heads):\n    def forward(self, x):\n        q, k, v = self.split(x)\n        "
_kind(
    "a softmax in other words",
    (
        _S
        + "s = q @ k.transpose(-1, -2) / 4\n        e = torch.exp(s - s.max(-1, keepdim=True).values)\n        return (e / e.sum(-1, keepdim=True)) @ v\n",
        "attention",
        "x",
    ),
    (
        _S
        + "s = torch.einsum('bhid,bhjd->bhij', q, k) * 0.25\n        m = torch.ones(5, 5, dtype=torch.bool).triu(1)\n        s = s.masked_fill(m, float('-inf')).softmax(dim=-1)\n        return torch.einsum('bhij,bhjd->bhid', s, v)\n",
        "attention",
        "x",
    ),
    (
        _S + "a = torch.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype)\n        return a @ v\n",
        "attention",
        "x",
    ),
    (
        _S
        + "b = q.flatten(0, 1); s = torch.baddbmm(b.new_zeros(1, 1, 1), b, k.flatten(0, 1).mT, beta=0, alpha=0.25)\n        return F.softmax(s.float(), -1).type_as(q) @ v.flatten(0, 1)\n",
        "softmax",
        "x",
    ),
    (
        """
     class Stable(nn.Module):
         def forward(self, x):
             e = (x - x.amax(-1, keepdim=True)).exp()
             return e / e.sum(dim=-1, keepdim=True)
     class M(Heads):
         def __init__(self): super().__init__(); self.soft = Stable()
         def forward(self, x): q, k, v = self.split(x); return self.soft(q @ k.mT) @ v
     """,
        "softmax",
        "x",
    ),
    (
        _S + "def attend(q, k, v):\n            return (q @ k.mT).softmax(-1) @ v\n        return attend(q, k, v)\n",
        "attention",
        "x",
    ),
)
_kind(
    "attention by another name",
    (
        "sdpa = F.scaled_dot_product_attention\n"
        + _S
        + "return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)\n",
        "attention",
        "x",
    ),
    (
        "class M(Heads):\n    def __init__(self): super().__init__(); self.attend = F.scaled_dot_product_attention\n    def forward(self, x): q, k, v = self.split(x); return self.attend(q, k, v)\n",
        "attention",
        "x",
    ),
    (
        "import functools\n"
        + _S
        + "attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)\n        return attend(q, k, v)\n",
        "attention",
        "x",
    ),
    (
        "from torch.nn.functional import scaled_dot_product_attention as attend\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.w, self.b = nn.Parameter(torch.linspace(-1, 1, 12288).sin().reshape(192, 64) / 8), nn.Parameter(torch.zeros(192))\n    def forward(self, x):\n        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in F.linear(x, self.w, self.b).chunk(3, -1))\n        return attend(query=q, key=k, value=v).transpose(1, 2).flatten(2)\n",
        "attention",
        "x",
    ),
)
_T = "class M(Turned):\n    def forward(self, x):\n        q, k, v = self.split(x); c, s = self.angles(x)\n        "
_END = "\n        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)\n"
_HALF = "c, s = c[..., :8], s[..., :8]; "
_kind(
    "rope in other words",
    (
        """
     def apply(xq, xk, f):
         a = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
         b = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
         return torch.view_as_real(a * f).flatten(3).type_as(xq), torch.view_as_real(b * f).flatten(3).type_as(xk)
     class M(Turned):
         def forward(self, x):
             q, k, v = self.split(x); c, s = self.angles(x)
             q, k = apply(q, k, torch.complex(c[:, :8], s[:, :8]))
             return F.scaled_dot_product_attention(q, k, v)
     """,
        "rope",
        "x",
    ),
    (
        _T
        + _HALF
        + "q1, q2 = q.chunk(2, -1); k1, k2 = k.chunk(2, -1)\n        q = torch.cat((q1 * c - q2 * s, q2 * c + q1 * s), -1)\n        k = torch.cat((k1 * c - k2 * s, k2 * c + k1 * s), -1)"
        + _END,
        "rope",
        "x",
    ),
    (
        "def rotate(t, c, s):\n    a, b = t.chunk(2, dim=-1)\n    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)\n"
        + _T
        + _HALF
        + "q, k = rotate(q, c, s), rotate(k, c, s)"
        + _END,
        "rope",
        "x",
    ),
    (
        "def every_two(x):\n    a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack((-b, a), dim=-1).flatten(-2)\n"
        + _T
        + "c, s = (t[:, :8].repeat_interleave(2, -1) for t in (c, s))\n        q = (q * c) + (every_two(q) * s)\n        k = (k * c) + (every_two(k) * s)"
        + _END,
        "rope",
        "x",
    ),
    (
        _T
        + "r, p = q[..., :8], q[..., 8:]; c, s = c[..., :8], s[..., :8]\n        a, b = r[..., :4], r[..., 4:]\n        q = torch.cat((r * c + torch.cat((-b, a), -1) * s, p), -1)"
        + _END,
        "rope",
        "x",
    ),
    (
        """
     class Rotary(nn.Module):
         def __init__(self):
             super().__init__()
             t = torch.outer(torch.arange(32.0), 100 ** -torch.linspace(0, 1, 8))
             self.register_buffer('cos', t.cos(), persistent=False); self.register_buffer('sin', t.sin(), persistent=False)
         def forward(self, x):
             c, s = self.cos[None, :x.size(-3), None, :], self.sin[None, :x.size(-3), None, :]
             a, b = x.float().chunk(2, dim=-1)
             return torch.cat((a * c + b * s, a * (-s) + b * c), 3).type_as(x)
     class M(nn.Module):
         def __init__(self): super().__init__(); self.qkv, self.rotary = nn.Linear(64, 192), Rotary()
         def forward(self, x):
             q, k, v = (t.view(*x.shape[:2], 4, 16) for t in self.qkv(x).split(64, -1))
             q, k = self.rotary(q), self.rotary(k)
             return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
     """,
        "rope",
        "x",
    ),
    (
        "class M(Turned):\n    @staticmethod\n    def half(t): return torch.cat((-t[..., 8:], t[..., :8]), -1)\n    def turned(self, t, c, s): return (t * c) + (self.half(t) * s)\n    def forward(self, x):\n        q, k, v = self.split(x); c, s = self.angles(x)\n        q, k = self.turned(q, c, s), self.turned(k, c, s)"
        + _END,
        "rope",
        "x",
    ),
)
_CONV = "self.conv = nn.Conv1d(64, 64, 4, groups=64)"
_CW = "self.w, self.b = nn.Parameter(torch.linspace(-1, 1, 256).sin().reshape(64, 4)), ones()"
_kind(
    "a causal convolution in other words",
    (
        "class M(nn.Sequential):\n    def __init__(self): super().__init__(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(64, 64, 4, groups=64))\n",
        "causal_conv1d",
        "bcs",
    ),
    (
        _norm("return (F.pad(x, (3, 0)).unfold(-1, 4, 1) * self.w[:, None]).sum(-1) + self.b[:, None]", _CW),
        "causal_conv1d",
        "bcs",
    ),
    (
        "class M(nn.Conv1d):\n    def __init__(self): self.__pad = 3; super().__init__(64, 64, 4, padding=3, groups=64)\n    def forward(self, x):\n        y = super().forward(x)\n        return y[:, :, :-self.__pad] if self.__pad else y\n".replace(
            "self.__pad = 3; super().__init__(64, 64, 4, padding=3, groups=64)",
            "super().__init__(64, 64, 4, padding=3, groups=64); self.__pad = 3",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _norm(
            "z = torch.zeros(x.shape[0], 64, 3, dtype=x.dtype, device=x.device)\nreturn self.conv(torch.cat((z, x), dim=2))",
            _CONV,
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _norm(
            "y = self.conv(F.pad(x.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0)))\nreturn F.silu(y).transpose(1, 2)",
            _CONV,
        ),
        "causal_conv1d",
        "x",
    ),
    (
        _norm(
            "p = F.pad(x, (3, 0)); n = x.shape[-1]\nreturn sum(self.w[:, i, None] * p[..., i : i + n] for i in range(4)) + self.b[:, None]",
            _CW,
        ),
        "causal_conv1d",
        "bcs",
    ),
)
_kind(
    "rows of a table in other words",
    (
        "class M(Table):\n    def forward(self, i): return F.one_hot(i, self.t.shape[0]).to(self.t.dtype) @ self.t\n",
        "embedding",
        "ids",
    ),
    (
        "class M(Table):\n    def forward(self, i): return self.t.gather(0, i.reshape(-1, 1).expand(-1, 64)).view(*i.shape, 64)\n",
        "embedding",
        "ids",
    ),
    (
        "class M(nn.Embedding):\n    def __init__(self): super().__init__(20, 64); self.scale = 8.0\n    def forward(self, i): return super().forward(i) * self.scale\n",
        "embedding",
        "ids",
    ),
    ("class M(Table):\n    def forward(self, i): return self.t[i.long()]\n", "embedding", "ids"),
)
_F = "self.f, self.n = nn.Linear(64, 64), nn.LayerNorm(64)"
_kind(
    "a residual in other words",
    (_norm("return self.n(torch.add(x, self.f(x), alpha=1))", _F), "add_layer_norm", "x"),
    (_norm("kept = x\nx = self.f(x)\nx = kept + x\nreturn self.n(x)", _F), "add_layer_norm", "x"),
    (_norm("return self.n(x + self.drop(self.f(x)))", _F + "; self.drop = nn.Dropout(0.1)"), "add_layer_norm", "x"),
    (
        _norm(
            "x = x + self.f(self.m(x))\nx = x + self.h(self.n(x))\nreturn x",
            _F + "; self.m, self.h = nn.LayerNorm(64), nn.Linear(64, 64)",
        ),
        "add_layer_norm",
        "x",
    ),
    (_norm("y = x.clone()\ny.add_(self.f(x))\nreturn self.n(y)", _F), "add_layer_norm", "x"),
    (_norm("return self.n(sum((x, self.f(x))))", _F), "add_layer_norm", "x"),
)
_kind(
    "a gated norm",
    (
        """
     class Gated2(nn.Module):
         def __init__(self): super().__init__(); self.weight, self.eps = ones(), 1e-5
         def forward(self, x, z=None):
             if z is not None: x = x * F.silu(z)
             return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
     class M(nn.Module):
         def __init__(self): super().__init__(); self.f, self.n = nn.Linear(64, 64), Gated2()
         def forward(self, x): return self.n(x, self.f(x))
     """,
        "gated_rms_norm",
        "x",
    ),
    (
        """
     class M(nn.Module):
         def __init__(self): super().__init__(); self.f, self.g = nn.Linear(64, 64), ones()
         def forward(self, x): y = root(x, 1e-6) * self.g; return y * F.silu(self.f(x))
     """,
        "silu_mul",
        "x",
    ),
)
_kind(
    "experts",
    (
        """
     class Experts(nn.Module):
         def __init__(self):
             super().__init__(); self.n = 4
             self.wi = nn.Parameter(torch.linspace(-1, 1, 4 * 192 * 64).sin().reshape(4, 192, 64) / 8)
             self.wo = nn.Parameter(torch.linspace(-1, 1, 4 * 64 * 96).sin().reshape(4, 64, 96) / 8)
         def forward(self, x, idx, w):
             out = torch.zeros_like(x)
             for e in range(self.n):
                 t, k = torch.where(idx == e)
                 g, u = F.linear(x[t], self.wi[e]).chunk(2, -1)
                 out.index_add_(0, t, F.linear(F.silu(g) * u, self.wo[e]) * w[t, k, None])
             return out
     class M(nn.Module):
         def __init__(self): super().__init__(); self.r, self.e = nn.Linear(64, 4), Experts()
         def forward(self, x):
             f = x.reshape(-1, 64); w, i = self.r(f).softmax(-1).topk(2, -1)
             return self.e(f, i, w).view_as(x)
     """,
        "moe_experts",
        "x",
    ),
)

RIGHT = _RAW

_N = "self.g, self.eps = ones(), 1e-6"
WRONG: dict[str, tuple[str, str, str]] = {
    "an eps beside the root": (
        _norm("return x / (x.norm(dim=-1, keepdim=True) * 64 ** -0.5 + self.eps) * self.g"),
        "rms_norm",
        "x",
    ),
    "a norm that clamps": (_norm("return F.normalize(x, dim=-1) * 8.0 * self.g"), "rms_norm", "x"),
    "a norm inline over half": (
        _norm("y = x * torch.rsqrt(x[..., :32].pow(2).mean(-1, keepdim=True) + self.eps) * self.g\nreturn y, x"),
        "rms_norm",
        "x",
    ),
    "a variance of n - 1": (
        _norm(
            "v, m = torch.var_mean(x, -1, keepdim=True)\nreturn (x - m) / torch.sqrt(v + self.eps) * self.g + self.b",
            _WB,
        ),
        "layer_norm",
        "x",
    ),
    "an activation that bends elsewhere": (
        _norm("g = self.a(x)\nreturn self.c(g / (1 + torch.exp(-1.01 * g)) * self.b(x))", _G),
        "silu_mul",
        "x",
    ),
    "a rope turned too far, inline": (_T + "q = q * c + turn(q) * s * 1.001" + _END, "rope", "x"),
    "a rope with both signs, inline": (
        _T + _HALF + "a, b = q.chunk(2, -1)\n        q = torch.cat((a * c - b * s, b * c - a * s), -1)" + _END,
        "rope",
        "x",
    ),
    "a convolution that sees one ahead": (_norm("return self.conv(F.pad(x, (2, 1)))", _CONV), "causal_conv1d", "bcs"),
    "a pad of ones": (_norm("return self.conv(F.pad(x, (3, 0), value=1.0))", _CONV), "causal_conv1d", "bcs"),
    "a sum in place that the caller sees": (
        _norm("y = self.f(x)\nz = y[..., :32]\ny += x\nreturn self.n(y) + z.sum()", _F),
        "add_layer_norm",
        "x",
    ),
    "a product of another name": (
        _norm("g = self.a(x)\ns = torch.sigmoid(g)\ng = g + 1\nreturn self.c(g * s * self.b(x))", _G),
        "silu_mul",
        "x",
    ),
    "a softmax that adds one": (
        _S + "e = torch.exp(q @ k.mT)\n        return (e / (1 + e.sum(-1, keepdim=True))) @ v\n",
        "softmax",
        "x",
    ),
    "a softmax without its largest": (
        _S
        + "s = q @ k.mT\n        e = torch.exp(s - s.mean(-1, keepdim=True))\n        return (e / e.sum(-1, keepdim=True)) @ v\n",
        "softmax",
        "x",
    ),
}
