# ruff: noqa: E501
"""Right modules as a stranger might write them, by kind; and look-alikes that differ in one place of each."""

from __future__ import annotations

import textwrap

# Of several modules, M is the one that is built. Names without an import are those of `disguises.HEAD`.
_RAW: dict[str, list[tuple[str, str, str]]] = {}


def _kind(name: str, *spellings: tuple[str, str, str]) -> None:
    _RAW[name] = [(textwrap.dedent(code).lstrip("\n"), op, x) for code, op, x in spellings]


def _m(init: str, body: str, base: str = "nn.Module", size: str = "", before: str = "") -> str:
    """A module M of what its __init__ does and its forward's lines, after other code."""
    own = textwrap.indent(textwrap.dedent(init).strip("\n"), "        ")
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "        ")
    return (
        f"{textwrap.dedent(before).strip()}\n"
        f"class M({base}):\n    def __init__(self):\n        super().__init__({size})\n{own}\n"
        f"    def forward(self, x):\n{lines}\n"
    )


_W = "self.scale = ones()"
_WB = "self.scale, self.shift = ones(), nn.Parameter(torch.linspace(-1, 1, 64))"
_kind(
    "a root mean square",
    (
        _m(_W, "inv = torch.mean(x * x, -1, keepdim=True).add_(1e-6).rsqrt_()\nreturn (x * inv).mul(self.scale)"),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W,
            "rms = torch.linalg.vector_norm(x, ord=2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5\nreturn torch.div(x, torch.sqrt(rms.pow(2) + 1e-6)) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W,
            "ms = torch.sum(x ** 2, dim=-1, keepdim=True) / x.size(-1)\nreturn torch.einsum('...d,d->...d', x * (ms + 1e-6).pow(-0.5), self.scale)",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W + "; self.register_buffer('eps', torch.tensor(1e-6), persistent=False)",
            "h = x.to(torch.float32)\nreturn (h * torch.rsqrt(torch.mean(h.square(), dim=-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W + "; self.eps = torch.tensor([1e-6])",
            "h = x.to(torch.float32)\nreturn (h * torch.rsqrt(torch.mean(h.square(), dim=-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W + "; self.eps = nn.Parameter(torch.tensor(1e-6), requires_grad=False)",
            "return self.scale * x / (x.square().mean(-1, True) + self.eps).sqrt()",
        ),
        "rms_norm",
        "x",
    ),
    (
        """
     def _rms(t, *, eps): return 1 / torch.sqrt((t * t).mean(dim=-1, keepdims=True) + eps)
     class M(nn.Module):
         eps: float = 1e-6
         def __init__(self): super().__init__(); self.scale = ones()
         @property
         def weight(self): return self.scale
         def forward(self, x): return x * _rms(x, eps=self.eps) * self.weight
     """,
        "rms_norm",
        "x",
    ),
    (
        """
     class Base(nn.Module):
         def __init__(self, dim, eps=1e-6): super().__init__(); self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(dim)), eps
         def _scale(self): return self.weight
         def forward(self, hidden):
             kept = hidden.dtype; hidden = hidden.float()
             out = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
             return (out * self._scale().float()).to(kept)
     class M(Base):
         def __init__(self): super().__init__(64); nn.init.normal_(self.weight)
         def _scale(self): return 1 + super()._scale()
     """,
        "rms_norm",
        "x",
    ),
    (
        _m(
            "self.gamma = nn.Parameter(torch.linspace(-0.5, 0.5, 64))",
            "y = x.float()\ny = y * y.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()\nreturn torch.addcmul(y, y, self.gamma.float()).to(x.dtype)",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            "self.gamma = nn.Parameter(torch.linspace(-0.5, 0.5, 64))",
            "y = x.float()\ny = y * y.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()\nreturn (y + y * self.gamma.float()).type_as(x)",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W,
            "b, s, d = x.shape\nflat = x.reshape(b * s, d)\nnorm = (flat.pow(2).sum(dim=1) / d + 1e-6).rsqrt()\nreturn (flat * norm[:, None] * self.scale[None]).reshape(b, s, d)",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(_W, "return F.rms_norm(input=x, normalized_shape=[x.shape[-1]], weight=self.scale, eps=1e-6)"),
        "rms_norm",
        "x",
    ),
    (
        _m(
            "self.norm = nn.RMSNorm(64, eps=1e-6, elementwise_affine=False); self.scale = ones()",
            "return self.norm(x) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    (_m("self.dim = 64", "return F.rms_norm(x, (self.dim,), None, 1e-5)"), "rms_norm", "x"),
    (
        _m(
            _W,
            "with torch.autocast(device_type=x.device.type, enabled=False):\n    h = x.float()\n    out = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)\nreturn out.to(x.dtype) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    (
        _m(
            _W,
            "eps = 1e-6 if x.dtype != torch.float16 else 1e-6\nout = torch.empty_like(x)\nout.copy_(x * torch.rsqrt((x ** 2).mean(-1, keepdim=True) + eps))\nreturn out * self.scale",
        ),
        "rms_norm",
        "x",
    ),
)
_kind(
    "a layer norm",
    (
        _m(
            _WB,
            "std, mean = torch.std_mean(x, dim=-1, unbiased=False, keepdim=True)\nreturn self.scale * ((x - mean) / torch.sqrt(std.square() + 1e-5)) + self.shift",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(
            _WB,
            "mean = x.mean(dim=-1, keepdim=True)\nvar = torch.var(x, dim=-1, correction=0, keepdim=True)\nreturn self.shift + self.scale * (x - mean) * torch.rsqrt(var + 1e-5)",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(
            _WB,
            "centred = x - torch.mean(x, -1, True)\nreturn torch.addcmul(self.shift, self.scale, torch.addcdiv(torch.zeros_like(x), centred, (centred.square().mean(-1, True) + 1e-5).sqrt()))",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(
            _WB,
            "mu = x.sum(-1, keepdim=True) / 64\nd = x.sub(mu)\nv = (d * d).sum(-1, keepdim=True).div(64)\nreturn d.mul(v.add(1e-5).rsqrt()).mul(self.scale).add(self.shift)",
        ),
        "layer_norm",
        "x",
    ),
    (_m("self.scale = ones()", "return F.layer_norm(x, x.shape[-1:], eps=1e-5) * self.scale"), "layer_norm", "x"),
    (
        _m(_WB, "y = F.layer_norm(x, [64], None, None, 1e-5)\nreturn torch.add(self.shift, torch.mul(y, self.scale))"),
        "layer_norm",
        "x",
    ),
    (
        _m(
            "self.ln = nn.LayerNorm(64, elementwise_affine=False); " + _WB,
            "return self.ln(x) * self.scale + self.shift",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(_WB, "y = x.movedim(1, -1)\ny = F.layer_norm(y, (64,), self.scale, self.shift)\nreturn y.movedim(-1, 1)"),
        "layer_norm",
        "bcs",
    ),
    (
        _m("pass", "return super().forward(x.swapaxes(-1, -2)).swapaxes(-1, -2).contiguous()", "nn.LayerNorm", "64"),
        "layer_norm",
        "bcs",
    ),
    (
        """
     from dataclasses import dataclass, field
     @dataclass(frozen=True)
     class Cfg:
         hidden: int = 64
         layer_norm_eps: float = 1e-12
     class M(nn.Module):
         cfg = Cfg()
         def __init__(self): super().__init__(); self.weight, self.bias = ones(), nn.Parameter(torch.linspace(-1, 1, 64))
         @staticmethod
         def _moments(t): m = t.mean(-1, keepdim=True); return m, ((t - m) ** 2).mean(-1, keepdim=True)
         def forward(self, x):
             mean, var = self._moments(x)
             return (x - mean) / (var + self.cfg.layer_norm_eps) ** 0.5 * self.weight + self.bias
     """,
        "layer_norm",
        "x",
    ),
    (
        _m(
            "self.scale = ones()",
            "m = x.mean(-1, keepdim=True)\nd = x - m\nreturn d / d.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt() * self.scale",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(
            "pass",
            "x = x - x.mean(dim=-1, keepdim=True)\nreturn x * (x.var(-1, keepdim=True, correction=0) + 1e-6).rsqrt()",
        ),
        "layer_norm",
        "x",
    ),
)
_kind(
    "a group norm",
    (
        _m(
            _WB,
            "b, c, s = x.shape\ng = x.view(b, 8, c // 8, s)\nmean = g.mean((2, 3), keepdim=True)\nvar = g.var((2, 3), unbiased=False, keepdim=True)\ny = ((g - mean) / torch.sqrt(var + 1e-5)).view(b, c, s)\nreturn y * self.scale.view(1, -1, 1) + self.shift.view(1, -1, 1)".replace(
                "8,", "self.groups,"
            ).replace("// 8", "// self.groups"),
        ).replace("self.scale, self.shift =", "self.groups = 8; self.scale, self.shift =", 1),
        "group_norm",
        "bcs",
    ),
    (
        _m(
            _WB + "; self.num_groups = 4",
            "n = x.shape[0]\nh = x.reshape(n, self.num_groups, -1)\nv, m = torch.var_mean(h, dim=-1, keepdim=True, correction=0)\nh = (h - m) * torch.rsqrt(v + 1e-5)\nreturn h.reshape(x.shape) * self.scale[:, None] + self.shift[:, None]",
        ),
        "group_norm",
        "bcs",
    ),
    (
        _m(
            "pass",
            "return F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)",
            "nn.GroupNorm",
            "8, 64",
        ),
        "group_norm",
        "bcs",
    ),
    (
        _m(
            _WB + "; self.g = 16",
            "return F.group_norm(x, num_groups=self.g, weight=self.scale, bias=self.shift, eps=1e-6)",
        ),
        "group_norm",
        "bcs",
    ),
    (
        _m(
            _WB + "; self.g = 16",
            "h = F.layer_norm(x.reshape(x.shape[0], self.g, -1), (x[0].numel() // self.g,), eps=1e-6)\nreturn torch.addcmul(self.shift.view(-1, 1), h.view_as(x), self.scale.view(-1, 1))",
        ),
        "group_norm",
        "bcs",
    ),
)
_kind(
    "a norm of queries and keys",
    (
        """
     class M(Heads):
         def __init__(self): super().__init__(); self.qn, self.kn = nn.Parameter(torch.linspace(0.5, 1.5, 16)), nn.Parameter(torch.linspace(0.5, 1.5, 16))
         @staticmethod
         def _n(t, w): return F.rms_norm(t, t.shape[-1:], w, 1e-6)
         def forward(self, x):
             q, k, v = self.split(x)
             return F.scaled_dot_product_attention(self._n(q, self.qn), self._n(k, self.kn), v)
     """,
        "rms_norm",
        "x",
    ),
    (
        """
     class M(Heads):
         def __init__(self): super().__init__(); self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
         def forward(self, x):
             q, k, v = self.split(x)
             q, k = (n(t) for n, t in zip(self.norms, (q, k)))
             return F.scaled_dot_product_attention(q, k, v)
     """,
        "layer_norm",
        "x",
    ),
    (
        """
     def l2(t, eps=1e-6): return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps)
     class M(Heads):
         def forward(self, x):
             q, k, v = self.split(x); q, k = l2(q), l2(k)
             return F.scaled_dot_product_attention(q, k, v, is_causal=True)
     """,
        "rms_norm",
        "x",
    ),
)
_L = "self.w, self.b = nn.Parameter(torch.linspace(-1, 1, 6144).sin().reshape(96, 64) / 8), nn.Parameter(torch.linspace(-1, 1, 96))"
_kind(
    "a linear layer",
    (_m(_L, "return torch.nn.functional.linear(input=x, weight=self.w, bias=self.b)"), "linear", "x"),
    (
        _m(
            _L,
            "flat = x.flatten(0, -2)\nreturn torch.addmm(input=self.b, mat1=flat, mat2=self.w.T).unflatten(0, x.shape[:-1])",
        ),
        "linear",
        "x",
    ),
    (_m(_L, "out = torch.einsum('bsi,oi->bso', x, self.w)\nout += self.b\nreturn out"), "linear", "x"),
    (_m(_L, "return torch.matmul(x, self.w.permute(1, 0)) + self.b[None, None, :]"), "linear", "x"),
    (_m(_L, "return torch.inner(x, self.w) + self.b"), "linear", "x"),
    (_m("self.c = nn.Conv1d(64, 96, 1)", "return self.c(x.transpose(1, 2)).transpose(1, 2)"), "linear", "x"),
    (_m("self.c = nn.Conv1d(64, 96, kernel_size=1, bias=False)", "return self.c(x.mT).mT"), "linear", "x"),
    (_m(_L, "return torch.bmm(x, self.w.t().unsqueeze(0).expand(x.shape[0], 64, 96)) + self.b"), "linear", "x"),
    (
        _m(
            _L,
            "y = x.new_empty(*x.shape[:-1], 96)\ntorch.matmul(x, self.w.t(), out=y) if not torch.is_grad_enabled() else y.copy_(x @ self.w.t())\nreturn y + self.b",
        ),
        "linear",
        "x",
    ),
    (_m("self.l = nn.Linear(64, 96)", "return F.linear(x, self.l.weight, self.l.bias)"), "linear", "x"),
    (_m("self.l = nn.Linear(64, 96)", "return x @ self.l.weight.T + self.l.bias"), "linear", "x"),
    (
        """
     class M(nn.Module):
         def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.randn(64, 96) / 8); self.bias = nn.Parameter(torch.randn(96)); self.nf = 96
         def forward(self, x):
             size_out = x.size()[:-1] + (self.nf,)
             x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
             return x.view(size_out)
     """,
        "linear",
        "x",
    ),
    (
        """
     class M(nn.Linear):
         def __init__(self): super().__init__(64, 96); self.scaling = 1.0
         def forward(self, input): return super().forward(input)
     """,
        "linear",
        "x",
    ),
    (
        """
     class M(nn.Module):
         def __init__(self): super().__init__(); self.weights = nn.ParameterList([torch.randn(32, 64) / 8 for _ in range(3)])
         def forward(self, x): return torch.cat([F.linear(x, w) for w in self.weights], dim=-1)
     """,
        "linear",
        "x",
    ),
)
_G3 = "self.w1, self.w2, self.w3 = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False), nn.Linear(64, 96, bias=False)"
_GU = "self.gate_up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(96, 64, bias=False)"
_kind(
    "a gated layer",
    (_m(_G3, "gate = F.silu(input=self.w1(x))\nreturn self.w2(torch.mul(gate, self.w3(x)))"), "silu_mul", "x"),
    (_m(_G3, "return self.w2(torch.multiply(self.w3(x), F.silu(self.w1(x))))"), "silu_mul", "x"),
    (
        _m(_GU, "gate, up = torch.split(self.gate_up(x), 96, dim=-1)\nreturn self.down(F.gelu(gate) * up)"),
        "gelu_mul",
        "x",
    ),
    (_m(_GU, "h = self.gate_up(x)\nreturn self.down(h[..., 96:] * F.silu(h[..., :96]))"), "silu_mul", "x"),
    (
        _m(
            _GU,
            "h = self.gate_up(x).view(*x.shape[:-1], 2, 96)\na, b = h.unbind(-2)\nreturn self.down(torch.sigmoid(a) * a * b)",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(
            _GU,
            "h = self.gate_up(x).unflatten(-1, (2, -1))\nreturn self.down(F.silu(h.select(-2, 0)) * h.select(-2, 1))",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(
            _GU,
            "u, g = torch.tensor_split(self.gate_up(x), 2, dim=-1)\nreturn self.down(u * F.gelu(g, approximate='tanh'))",
        ),
        "gelu_mul",
        "x",
    ),
    (
        _m(
            _GU,
            "h = self.gate_up(x)\ng, u = h.narrow(-1, 0, 96), h.narrow(-1, 96, 96)\nreturn self.down(g / (1 + (-g).exp()) * u)",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(_GU, "h = self.gate_up(x)\ng, u = h[..., ::2], h[..., 1::2]\nreturn self.down(u * (g * g.sigmoid()))"),
        "silu_mul",
        "x",
    ),
    (
        _m(_G3 + "\nself.act = lambda t: t * torch.sigmoid(t)", "return self.w2(self.act(self.w1(x)) * self.w3(x))"),
        "silu_mul",
        "x",
    ),
    (
        _m(
            _G3 + "\nself.act = types.MethodType(lambda self, t: F.silu(t), self)",
            "return self.w2(self.act(self.w1(x)) * self.w3(x))",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(_G3 + "\nself.act = nn.Sequential(nn.SiLU())", "return self.w2(self.act(self.w1(x)) * self.w3(x))"),
        "silu_mul",
        "x",
    ),
    (
        _m(
            "self.gate = nn.Sequential(nn.Linear(64, 96), nn.SiLU())\nself.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)",
            "return self.down(self.gate(x) * self.up(x))",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(
            "self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)])",
            "g, u = [layer(x) for layer in self.layers[:2]]\nreturn self.layers[2](F.silu(g) * u)",
        ),
        "silu_mul",
        "x",
    ),
    (
        """
     class Swish(nn.Module):
         def forward(self, t): return t.mul(t.sigmoid())
     class M(nn.Module):
         def __init__(self): super().__init__(); self.act = Swish(); self.i, self.o = nn.Linear(64, 192), nn.Linear(96, 64)
         def forward(self, x):
             up, gate = self.i(x).chunk(chunks=2, dim=-1)
             up = up * self.act(gate)
             return self.o(up)
     """,
        "silu_mul",
        "x",
    ),
    (
        """
     class NewGELU(nn.Module):
         def forward(self, t): return 0.5 * t * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (t + 0.044715 * torch.pow(t, 3.0))))
     class GEGLU(nn.Module):
         def __init__(self): super().__init__(); self.act = NewGELU()
         def forward(self, x): x, gate = x.chunk(2, dim=-1); return self.act(gate) * x
     class M(nn.Sequential):
         def __init__(self): super().__init__(nn.Linear(64, 192), GEGLU(), nn.Linear(96, 64))
     """,
        "gelu_mul",
        "x",
    ),
    (
        _m(
            _GU,
            "h, g = self.gate_up(x).chunk(2, -1)\nout = torch.addcmul(torch.zeros_like(h), h, F.silu(g))\nreturn self.down(out)",
        ),
        "silu_mul",
        "x",
    ),
    (
        _m(_GU, "h = F.silu(self.gate_up(x)[..., :96])\nh = h.mul(self.gate_up(x)[..., 96:])\nreturn self.down(h)"),
        "silu_mul",
        "x",
    ),
    (_m(_G3, "up = self.w3(x)\nup.mul_(F.silu(self.w1(x)))\nreturn self.w2(up)"), "silu_mul", "x"),
    (_m(_G3, "g = self.w1(x)\ng = F.silu(g, inplace=False)\nreturn self.w2(g * self.w3(x))"), "silu_mul", "x"),
    (
        _m(_G3, "g = self.w1(x)\nreturn self.w2(torch.erf(g / math.sqrt(2)).add(1).mul(g).mul(0.5) * self.w3(x))"),
        "gelu_mul",
        "x",
    ),
)
_S = "    def forward(self, x):\n        q, k, v = self.split(x)\n"


def _h(body: str, base: str = "Heads", before: str = "") -> str:
    """Heads of 16, whose forward is these lines of q, k and v of (2, 4, 5, 16); as `c`, `s` (5, 16) the angles."""
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "        ")
    angles = "        c, s = self.angles(x)\n" if base == "Turned" else ""
    return f"{textwrap.dedent(before).strip()}\nclass M({base}):\n{_S}{angles}{lines}\n"


_kind(
    "attention by hand",
    (
        _h(
            "scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))\nmask = torch.tril(torch.ones(5, 5, device=x.device)).bool()\nscores = torch.where(mask, scores, torch.finfo(scores.dtype).min)\nprobs = F.softmax(scores, dim=-1)\nreturn torch.matmul(probs, v).transpose(1, 2).reshape(x.shape)"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "s = torch.einsum('bhqd,bhkd->bhqk', q, k).mul_(0.25)\ns = s + torch.full((5, 5), float('-inf')).triu(1)\nreturn torch.einsum('bhqk,bhkd->bqhd', s.softmax(dim=-1), v).flatten(2)"
        ),
        "softmax",
        "x",
    ),
    (
        _h(
            "s = (q * q.shape[-1] ** -0.5) @ k.mT\ns.masked_fill_(torch.triu(torch.ones_like(s, dtype=torch.bool), 1), -torch.inf)\np = torch.nn.functional.softmax(s, -1, dtype=torch.float32).to(v.dtype)\nreturn (p @ v).permute(0, 2, 1, 3).flatten(2)"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "outs = []\nfor i in range(4):\n    w = torch.softmax(q[:, i] @ k[:, i].transpose(-1, -2) / 4, dim=-1)\n    outs.append(w @ v[:, i])\nreturn torch.cat(outs, dim=-1)"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "k, v = k[:, :2].repeat_interleave(2, dim=1), v[:, :2].repeat_interleave(2, dim=1)\nreturn F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "k, v = (t[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v))\na = torch.softmax(q @ k.mT * 0.25, -1)\nreturn a @ v"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).tril().logical_not(), float('-inf'))\nreturn F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.3)"
        ),
        "attention",
        "x",
    ),
    (
        _h(
            "s = torch.baddbmm(torch.zeros(8, 5, 5), q.reshape(8, 5, 16), k.reshape(8, 5, 16).transpose(1, 2), alpha=0.25)\nreturn torch.bmm(s.softmax(-1), v.reshape(8, 5, 16)).view(2, 4, 5, 16)"
        ),
        "softmax",
        "x",
    ),
    (
        _h(
            "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))\natt = att.masked_fill(self.bias[:, :, :5, :5] == 0, float('-inf'))\natt = F.softmax(att, dim=-1)\ny = att @ v\nreturn y.transpose(1, 2).contiguous().view(2, 5, 64)"
        ).replace(
            "    def forward",
            "    def __init__(self): super().__init__(); self.register_buffer('bias', torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))\n    def forward",
            1,
        ),
        "attention",
        "x",
    ),
    (_h("s = q @ k.mT / 4\ns = s - s.logsumexp(dim=-1, keepdim=True)\nreturn s.exp() @ v"), "attention", "x"),
    (_h("p = F.log_softmax(q @ k.mT / 4, dim=-1).exp()\nreturn p @ v"), "attention", "x"),
    (
        _h(
            "s = q @ k.mT / 4\ns = s - s.max(dim=-1, keepdim=True)[0].detach()\ne = s.exp()\nreturn torch.div(e, torch.sum(e, -1, keepdim=True)) @ v"
        ),
        "attention",
        "x",
    ),
    (
        """
     class M(nn.Module):
         def __init__(self):
             super().__init__(); self.heads, self.scale = 4, 16 ** -0.5
             self.to_q, self.to_kv, self.to_out = nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False), nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0))
             self.attend = nn.Softmax(dim=-1)
         def forward(self, x):
             q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
             q, k, v = map(lambda t: t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2), (q, k, v))
             dots = torch.einsum('b h i d, b h j d -> b h i j', q, k) * self.scale
             attn = self.attend(dots)
             out = torch.einsum('b h i j, b h j d -> b h i d', attn, v)
             return self.to_out(out.transpose(1, 2).flatten(2))
     """,
        "softmax",
        "x",
    ),
    (
        """
     def attention(query, key, value, mask=None, dropout=None):
         d_k = query.size(-1)
         scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
         if mask is not None:
             scores = scores.masked_fill(mask == 0, -1e9)
         p_attn = scores.softmax(dim=-1)
         if dropout is not None:
             p_attn = dropout(p_attn)
         return torch.matmul(p_attn, value), p_attn
     class M(nn.Module):
         def __init__(self): super().__init__(); self.linears = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)]); self.h, self.d_k, self.attn = 4, 16, None
         def forward(self, x):
             query, key, value = [lin(t).view(2, -1, self.h, self.d_k).transpose(1, 2) for lin, t in zip(self.linears, (x, x, x))]
             x, self.attn = attention(query, key, value)
             return self.linears[-1](x.transpose(1, 2).contiguous().view(2, -1, 64))
     """,
        "softmax",
        "x",
    ),
)
_END = "\nreturn F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)"
_kind(
    "rope",
    (
        _h(
            "f = torch.polar(torch.ones(5, 8), torch.outer(torch.arange(5.0), 100 ** -(torch.arange(0, 16, 2) / 16)))\nq, k = rot(q, f), rot(k, f)"
            + _END,
            before="def rot(t, f): return torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * f).flatten(-2).to(t.dtype)",
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "q = torch.add(torch.mul(q, c), torch.mul(half(q), s))\nk = torch.add(torch.mul(k, c), torch.mul(half(k), s))"
            + _END,
            "Turned",
            "def half(t): return torch.cat([t[..., t.size(-1) // 2:].neg(), t[..., :t.size(-1) // 2]], dim=-1)",
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "q = torch.addcmul(q * c, half(q), s); k = torch.addcmul(k * c, half(k), s)" + _END,
            "Turned",
            "def half(t): a, b = torch.split(t, t.shape[-1] // 2, -1); return torch.cat((b.neg(), a), -1)",
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "q, k = apply_rotary(q, c[:, :8], s[:, :8]), apply_rotary(k, c[:, :8], s[:, :8])" + _END,
            "Turned",
            """
     def apply_rotary(x, cos, sin):
         x_ = x.reshape(*x.shape[:-1], -1, 2)
         x1, x2 = x_[..., 0], x_[..., 1]
         return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)
     """,
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "q, k = apply_rotary(q, c[:, :8], s[:, :8]), apply_rotary(k, c[:, :8], s[:, :8])" + _END,
            "Turned",
            """
     def apply_rotary(x, cos, sin):
         out = torch.empty_like(x)
         out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
         out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
         return out
     """,
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "q, k = apply_rotary(q, c[:, :8], s[:, :8]), apply_rotary(k, c[:, :8], s[:, :8])" + _END,
            "Turned",
            """
     def apply_rotary(x, cos, sin):
         r = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
         return torch.einsum('...ij,...j->...i', r, x.unflatten(-1, (-1, 2))).flatten(-2)
     """,
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "c, s = c[..., :8], s[..., :8]\nq, qp = q.split((8, 8), -1); k, kp = k.split((8, 8), -1)\nq = torch.cat((q * c + turn(q) * s, qp), -1)\nk = torch.cat((k * c + turn(k) * s, kp), -1)"
            + _END,
            "Turned",
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "sign = torch.cat((-torch.ones(8), torch.ones(8)))\nq = q * c + q.roll(8, -1) * (s * sign)\nk = k * c + k.roll(8, -1) * (s * sign)"
            + _END,
            "Turned",
        ),
        "rope",
        "x",
    ),
    (
        """
     class RotaryEmbedding(nn.Module):
         def __init__(self, dim=16, base=100.0):
             super().__init__(); self.register_buffer('inv_freq', 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)
         def forward(self, x, n):
             t = torch.arange(n, device=x.device, dtype=self.inv_freq.dtype)
             f = torch.einsum('i,j->ij', t, self.inv_freq); f = torch.cat((f, f), dim=-1)
             return f.cos()[None, None].to(x.dtype), f.sin()[None, None].to(x.dtype)
     def rotate_every(t):
         u, w = t.chunk(2, dim=-1); return torch.concat((-w, u), dim=-1)
     def rotate_both(q, k, cos, sin): return (q * cos) + (rotate_every(q) * sin), (k * cos) + (rotate_every(k) * sin)
     class M(Heads):
         def __init__(self): super().__init__(); self.rotary = RotaryEmbedding()
         def forward(self, x):
             q, k, v = self.split(x); cos, sin = self.rotary(v, q.shape[-2])
             q, k = rotate_both(q, k, cos=cos, sin=sin)
             return F.scaled_dot_product_attention(q, k, v)
     """,
        "rope",
        "x",
    ),
    (
        _h(
            "q1, q2 = q[..., :8], q[..., 8:]; k1, k2 = k[..., :8], k[..., 8:]\nc, s = c[:, :8], s[:, :8]\nq = torch.cat([q1 * c - q2 * s, q1 * s + q2 * c], -1)\nk = torch.cat([k1 * c - k2 * s, k1 * s + k2 * c], -1)\nw = torch.softmax(q @ k.mT / 4, -1)\nreturn w @ v",
            "Turned",
        ),
        "rope",
        "x",
    ),
    (
        _h(
            "qs, ks = (t.reshape(*t.shape[:-1], 8, 2) for t in (q, k))\nc, s = c[:, :8], s[:, :8]\nq = torch.stack([qs[..., 0] * c - qs[..., 1] * s, qs[..., 1] * c + qs[..., 0] * s], -1).reshape(q.shape)\nk = torch.stack([ks[..., 0] * c - ks[..., 1] * s, ks[..., 1] * c + ks[..., 0] * s], -1).reshape(k.shape)"
            + _END,
            "Turned",
        ),
        "rope",
        "x",
    ),
)
_CV = "self.kernel, self.bias = nn.Parameter(torch.linspace(-1, 1, 256).sin().reshape(64, 1, 4)), ones()"
_kind(
    "a causal convolution",
    (
        _m(
            "pass",
            "return super().forward(F.pad(x, [self.kernel_size[0] - 1, 0]))",
            "nn.Conv1d",
            "64, 64, kernel_size=4, groups=64, bias=False",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            _CV,
            "n = x.size(2)\ny = F.conv1d(x, self.kernel, self.bias, padding=self.kernel.shape[-1] - 1, groups=x.size(1))\nreturn y[:, :, :n]",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            _CV,
            "y = torch.conv1d(torch.nn.functional.pad(input=x, pad=(3, 0), mode='constant', value=0), self.kernel, groups=64)\nreturn y + self.bias.view(1, -1, 1)",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            "self.pad, self.conv = nn.ZeroPad1d((3, 0)), nn.Conv1d(64, 64, 4, groups=64)",
            "return self.conv(self.pad(x))",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            "self.conv = nn.Conv1d(64, 64, 4, padding=3, groups=64)",
            "x = self.conv(x)\nreturn x.narrow(-1, 0, x.shape[-1] - 3)",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            "self.conv = nn.Conv1d(64, 64, 4, padding=3, groups=64)",
            "x = x.transpose(1, 2)\nx = self.conv(x)[..., :-3]\nreturn F.silu(x.transpose(1, 2))",
        ),
        "causal_conv1d",
        "x",
    ),
    (
        _m(
            "self.net = nn.Sequential(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(64, 64, 4, groups=64), nn.SiLU())",
            "return self.net(x)",
        ),
        "causal_conv1d",
        "bcs",
    ),
    (
        _m(
            _CV,
            "out = x * self.kernel[:, 0, 3, None] + self.bias[:, None]\nfor i in range(1, 4):\n    out = out + F.pad(x, (i, -i)) * self.kernel[:, 0, 3 - i, None]\nreturn out",
        ),
        "causal_conv1d",
        "bcs",
    ),
)
_kind(
    "rows of a table",
    (
        _m("self.t = nn.Parameter(torch.randn(20, 64))", "return F.embedding(weight=self.t, input=x)"),
        "embedding",
        "ids",
    ),
    (
        _m(
            "self.t = nn.Parameter(torch.randn(20, 64))",
            "return torch.take_along_dim(self.t, x.reshape(-1, 1), dim=0).view(x.shape + (64,))",
        ),
        "embedding",
        "ids",
    ),
    (
        _m("self.t = nn.Parameter(torch.randn(20, 64))", "return self.t[x.flatten()].unflatten(0, x.shape)"),
        "embedding",
        "ids",
    ),
    (_m("self.e = nn.Embedding(20, 64)", "return self.e.weight[x] * math.sqrt(64)"), "embedding", "ids"),
    (
        _m(
            "self.e, self.p = nn.Embedding(20, 64), nn.Embedding(8, 64)",
            "pos = torch.arange(x.shape[1], device=x.device)\nreturn self.e(x) + self.p(pos)",
        ),
        "embedding",
        "ids",
    ),
    (_m("self.dim = 64", "return super().forward(x) * self.dim ** 0.5", "nn.Embedding", "20, 64"), "embedding", "ids"),
)
_LOGITS = (
    "self.head = nn.Linear(64, 40); self.register_buffer('y', torch.tensor([[1, 7, 39, 0, 2], [4, 4, 5, 38, 11]]))"
)
_kind(
    "a cross entropy",
    (_m(_LOGITS, "return F.cross_entropy(self.head(x).flatten(0, 1), self.y.flatten())"), "cross_entropy", "x"),
    (
        _m(
            _LOGITS,
            "logits = self.head(x)\nreturn F.cross_entropy(input=logits.view(-1, logits.size(-1)), target=self.y.view(-1), ignore_index=-1)",
        ),
        "cross_entropy",
        "x",
    ),
    (
        _m(
            _LOGITS + "; self.loss = nn.CrossEntropyLoss()",
            "logits = self.head(x)[:, :-1].reshape(-1, 40)\nreturn self.loss(logits, self.y[:, 1:].reshape(-1))",
        ),
        "cross_entropy",
        "x",
    ),
    (
        _m(_LOGITS, "return F.nll_loss(F.log_softmax(self.head(x).view(-1, 40), dim=-1), self.y.view(-1))"),
        "cross_entropy",
        "x",
    ),
    (
        _m(
            _LOGITS,
            "z = self.head(x).view(-1, 40)\nt = z.gather(1, self.y.view(-1, 1)).squeeze(1)\nreturn (torch.logsumexp(z, dim=-1) - t).mean()",
        ),
        "cross_entropy",
        "x",
    ),
    (
        _m(
            _LOGITS,
            "z, y = self.head(x).flatten(0, 1), self.y.flatten()\nreturn (z.logsumexp(-1) - z.gather(1, y.unsqueeze(1)).squeeze(1)).mean()",
        ),
        "cross_entropy",
        "x",
    ),
)
_FN = "self.attn, self.mlp = nn.Linear(64, 64), nn.Linear(64, 64); self.n1, self.n2 = nn.LayerNorm(64), nn.RMSNorm(64, eps=1e-6)"
_kind(
    "a residual before a norm",
    (_m(_FN, "x = x + self.attn(self.n1(x))\nreturn x + self.mlp(self.n2(x))"), "add_rms_norm", "x"),
    (_m(_FN, "x = self.n1(self.attn(x) + x)\nreturn self.n2(self.mlp(x).add_(x))"), "add_layer_norm", "x"),
    (_m(_FN, "h = torch.add(input=x, other=self.attn(x))\nreturn self.n2(h), h"), "add_rms_norm", "x"),
    (
        _m(
            _FN,
            "residual, x = x, self.attn(x)\nx = residual + x\nresidual, x = x, self.n2(x)\nreturn residual + self.mlp(x)",
        ),
        "add_rms_norm",
        "x",
    ),
    (
        _m(
            "self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]); self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])",
            "for block, norm in zip(self.blocks, self.norms):\n    x = norm(x + block(x))\nreturn x",
        ),
        "layer_norm",
        "x",
    ),
    (
        _m(_FN + "; self.alpha = 1.0", "x = torch.add(x, self.attn(x), alpha=self.alpha)\nreturn self.n1(x)"),
        "layer_norm",
        "x",
    ),
)
_kind(
    "a gated norm",
    (
        """
     class RMSNormGated(nn.Module):
         def __init__(self, n, eps): super().__init__(); self.weight, self.variance_epsilon = nn.Parameter(torch.ones(n)), eps
         def forward(self, hidden_states, gate=None):
             input_dtype = hidden_states.dtype
             hidden_states = hidden_states.to(torch.float32)
             variance = hidden_states.pow(2).mean(-1, keepdim=True)
             hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
             hidden_states = self.weight * hidden_states.to(input_dtype)
             hidden_states = hidden_states * F.silu(gate.to(torch.float32))
             return hidden_states.to(input_dtype)
     class M(nn.Module):
         def __init__(self): super().__init__(); self.z, self.out = nn.Linear(64, 64), RMSNormGated(64, 1e-6)
         def forward(self, x): return self.out(x, gate=self.z(x))
     """,
        "gated_rms_norm",
        "x",
    ),
    (
        """
     class N(nn.Module):
         def __init__(self): super().__init__(); self.w = ones()
         def forward(self, y, z):
             y = y.float() * F.silu(z.float())
             return (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w).to(z.dtype)
     class M(nn.Module):
         def __init__(self): super().__init__(); self.i, self.n = nn.Linear(64, 128), N()
         def forward(self, x): a, b = self.i(x).chunk(2, -1); return self.n(a, b)
     """,
        "gated_rms_norm",
        "x",
    ),
)
_kind(
    "a bias and an activation",
    (
        _m(
            "self.f, self.p = nn.Linear(64, 96), nn.Linear(96, 64)",
            "return self.p(F.gelu(self.f(x), approximate='tanh'))",
        ),
        "bias_act",
        "x",
    ),
    (
        _m("self.f, self.p = nn.Linear(64, 96), nn.Linear(96, 64)", "return self.p(F.relu(self.f(x)).square())"),
        "bias_act",
        "x",
    ),
    (
        _m(
            "self.f, self.p = nn.Linear(64, 96), nn.Linear(96, 64)",
            "h = self.f(x)\nh = h * torch.sigmoid(1.702 * h)\nreturn self.p(h)",
        ),
        "bias_act",
        "x",
    ),
    (
        _m("self.f, self.p = nn.Linear(64, 96), nn.Linear(96, 64)", "h = torch.relu(self.f(x)) ** 2\nreturn self.p(h)"),
        "bias_act",
        "x",
    ),
    (
        _m(
            "self.net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64))",
            "return x + self.net(x)",
        ),
        "bias_act",
        "x",
    ),
    (
        _m(
            "self.f, self.b = nn.Linear(64, 96, bias=False), nn.Parameter(torch.zeros(96))",
            "return F.gelu(self.f(x) + self.b)",
        ),
        "bias_act",
        "x",
    ),
)
_EXP = """
     class Experts(nn.Module):
         def __init__(self):
             super().__init__(); self.num_experts = 4
             self.gate_up_proj = nn.Parameter(torch.linspace(-1, 1, 4 * 64 * 192).sin().reshape(4, {shape}) / 8)
             self.down_proj = nn.Parameter(torch.linspace(-1, 1, 4 * 64 * 96).sin().reshape(4, {other}) / 8)
         def forward(self, hidden, idx, weights):
{body}
     class M(nn.Module):
         def __init__(self): super().__init__(); self.router, self.experts = nn.Linear(64, 4, bias=False), Experts()
         def forward(self, x):
             flat = x.reshape(-1, x.shape[-1])
             w, i = torch.topk(F.softmax(self.router(flat), dim=-1, dtype=torch.float), 2, dim=-1)
             w = (w / w.sum(-1, keepdim=True)).to(x.dtype)
             return self.experts(flat, i, w).view(x.shape)
"""


def _experts(body: str, turned: bool = False) -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 13)
    return textwrap.dedent(
        _EXP.format(shape="64, 192" if turned else "192, 64", other="96, 64" if turned else "64, 96", body=lines)
    )


_kind(
    "experts",
    (
        _experts("""
     out = torch.zeros_like(hidden)
     mask = F.one_hot(idx, num_classes=self.num_experts).permute(2, 1, 0)
     for e in range(self.num_experts):
         pos, tok = torch.where(mask[e])
         cur = hidden[tok]
         gate, up = F.linear(cur, self.gate_up_proj[e]).chunk(2, dim=-1)
         cur = F.linear(F.silu(gate) * up, self.down_proj[e]) * weights[tok, pos, None]
         out.index_add_(0, tok, cur.to(out.dtype))
     return out
     """),
        "moe_experts",
        "x",
    ),
    (
        _experts(
            """
     h = torch.einsum('td,edf->tef', hidden, self.gate_up_proj)
     g, u = h.chunk(2, dim=-1)
     y = torch.einsum('tef,efd->ted', F.silu(g) * u, self.down_proj)
     y = y.gather(1, idx[..., None].expand(-1, -1, y.shape[-1]))
     return (y * weights[..., None]).sum(1)
     """,
            True,
        ),
        "moe_experts",
        "x",
    ),
    (
        _experts("""
     out = hidden.new_zeros(hidden.shape)
     for e in range(self.num_experts):
         hit = (idx == e)
         share = (weights * hit).sum(-1, keepdim=True)
         g, u = (hidden @ self.gate_up_proj[e].t()).split(96, -1)
         out = out + share * ((F.silu(g) * u) @ self.down_proj[e].t())
     return out
     """),
        "moe_experts",
        "x",
    ),
)

RIGHT = {f"{kind}, by a stranger": spellings for kind, spellings in _RAW.items()}
WRONG: dict[str, tuple[str, str, str]] = {
    # norms
    "an rms whose eps stands outside the mean root": (
        _m(_W, "inv = torch.mean(x * x, -1, keepdim=True).rsqrt_()\nreturn (x * (inv + 1e-3)).mul(self.scale)"),
        "rms_norm",
        "x",
    ),
    "an rms whose eps is under a sum": (
        _m(
            _W,
            "ms = (torch.sum(x ** 2, dim=-1, keepdim=True) + 1e-3) / x.size(-1)\nreturn x * (ms + 1e-6).pow(-0.5) * self.scale + 0 * ms * self.scale.sum() + self.scale[0] * ms",
        ),
        "rms_norm",
        "x",
    ),
    "an rms divided by one less": (
        _m(
            _W,
            "ms = torch.sum(x ** 2, dim=-1, keepdim=True) / (x.size(-1) - 1)\nreturn x * (ms + 1e-6).pow(-0.5) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    "an rms of the cube": (
        _m(_W, "ms = torch.mean(x.abs() ** 3, dim=-1, keepdim=True)\nreturn x * (ms + 1e-6).pow(-0.5) * self.scale"),
        "rms_norm",
        "x",
    ),
    "an rms of the fourth root": (
        _m(_W, "ms = torch.mean(x ** 2, dim=-1, keepdim=True)\nreturn x * (ms + 1e-6).pow(-0.25) * self.scale"),
        "rms_norm",
        "x",
    ),
    "a norm by the largest": (
        _m(
            _W,
            "n = torch.linalg.vector_norm(x, ord=float('inf'), dim=-1, keepdim=True)\nreturn x / (n + 1e-6) * self.scale",
        ),
        "rms_norm",
        "x",
    ),
    "a norm to length one": (_m(_W, "return F.normalize(x, p=2.0, dim=-1, eps=1e-6) * self.scale"), "rms_norm", "x"),
    "an rms over tokens": (
        _m(_W, "return x * torch.rsqrt(x.square().mean(-2, True) + 1e-6) * self.scale"),
        "rms_norm",
        "x",
    ),
    "an rms over all of a sample": (
        _m(_W, "return x * torch.rsqrt(x.square().mean((-1, -2), True) + 1e-6) * self.scale"),
        "rms_norm",
        "x",
    ),
    "an rms that is detached": (
        _m(_W, "return x * torch.rsqrt(x.square().mean(-1, True) + 1e-6).detach() * self.scale"),
        "rms_norm",
        "x",
    ),
    "an rms whose offset is two": (
        _m(_W, "return root(x.float(), 1e-6).to(x.dtype) * (2 + self.scale)"),
        "rms_norm",
        "x",
    ),
    "an rms whose weight is squared": (
        _m(_W, "return root(x.float(), 1e-6).to(x.dtype) * self.scale * self.scale"),
        "rms_norm",
        "x",
    ),
    "a helper whose default eps is another": (
        "def n(t, eps=1e-2): return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps) + eps\nclass M(nn.Module):\n    def forward(self, x): return n(x)\n",
        "rms_norm",
        "x",
    ),
    "an eps that grows": (
        "class M(nn.Module):\n    def __init__(self): super().__init__(); self.scale, self.n = ones(), [0]\n    def forward(self, x): self.n[0] += 1; return x * torch.rsqrt(x.square().mean(-1, True) + 1e-2 * self.n[0]) * self.scale\n",
        "rms_norm",
        "x",
    ),
    "a standard deviation of n - 1": (
        _m(
            _WB,
            "std, mean = torch.std_mean(x, dim=-1, keepdim=True)\nreturn self.scale * ((x - mean) / torch.sqrt(std.square() + 1e-5)) + self.shift",
        ),
        "layer_norm",
        "x",
    ),
    "a layer norm whose eps is beside the deviation": (
        _m(
            _WB,
            "mean = x.mean(-1, keepdim=True)\nstd = x.std(-1, keepdim=True, unbiased=False)\nreturn self.scale * (x - mean) / (std + 1e-3) + self.shift",
        ),
        "layer_norm",
        "x",
    ),
    "a layer norm that scales the mean back": (
        _m(
            _WB,
            "mean = x.mean(dim=-1, keepdim=True)\nvar = torch.var(x, dim=-1, correction=0, keepdim=True)\nreturn self.shift + self.scale * x - mean * torch.rsqrt(var + 1e-5)",
        ),
        "layer_norm",
        "x",
    ),
    "a layer norm whose bias is under the weight": (
        _m(
            _WB,
            "d = x - x.mean(-1, True)\nreturn (d * torch.rsqrt(d.square().mean(-1, True) + 1e-5) + self.shift) * self.scale",
        ),
        "layer_norm",
        "x",
    ),
    "a layer norm of another median": (
        _m(
            _WB,
            "d = x - x.median(-1, keepdim=True).values\nreturn d * torch.rsqrt(d.square().mean(-1, True) + 1e-5) * self.scale + self.shift",
        ),
        "layer_norm",
        "x",
    ),
    "a group norm by strides": (
        _m(
            _WB + "; self.g = 8",
            "b, c, n = x.shape\nh = x.view(b, c // self.g, self.g, n).transpose(1, 2)\nh = (h - h.mean((2, 3), keepdim=True)) * torch.rsqrt(h.var((2, 3), unbiased=False, keepdim=True) + 1e-5)\nreturn h.transpose(1, 2).reshape(b, c, n) * self.scale[:, None] + self.shift[:, None]",
        ),
        "group_norm",
        "bcs",
    ),
    "a group norm of n - 1": (
        _m(
            _WB + "; self.g = 8",
            "h = x.view(x.shape[0], self.g, -1)\nh = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + 1e-5)\nreturn h.view_as(x) * self.scale[:, None] + self.shift[:, None]",
        ),
        "group_norm",
        "bcs",
    ),
    "a norm of queries by the sum": (
        _h("q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6)\nreturn q, k, v"),
        "rms_norm",
        "x",
    ),
    # linear layers
    "a linear layer of the absolute": (_m(_L, "return x @ self.w.abs().t() + self.b"), "linear", "x"),
    "a convolution of three": (
        _m("self.c = nn.Conv1d(64, 96, 3, padding=1)", "return self.c(x.transpose(1, 2)).transpose(1, 2)"),
        "linear",
        "x",
    ),
    "a convolution of one place in groups": (
        _m("self.c = nn.Conv1d(64, 96, 1, groups=2)", "return self.c(x.transpose(1, 2)).transpose(1, 2)"),
        "linear",
        "x",
    ),
    "a convolution of one place by twos": (
        _m("self.c = nn.Conv1d(64, 96, 1, stride=2)", "return self.c(x.transpose(1, 2)).transpose(1, 2)"),
        "linear",
        "x",
    ),
    "a convolution of one place that pads": (
        _m("self.c = nn.Conv1d(64, 96, 1, padding=1)", "return self.c(x.transpose(1, 2)).transpose(1, 2)"),
        "linear",
        "x",
    ),
    "a convolution of one place that reflects": (
        _m(
            "self.c = nn.Conv1d(64, 96, 1, padding=1, padding_mode='reflect')",
            "return self.c(x.transpose(1, 2)).transpose(1, 2)",
        ),
        "linear",
        "x",
    ),
    "an addmm with half a bias": (
        _m(_L, "return torch.addmm(self.b, x.flatten(0, -2), self.w.T, beta=0.5).unflatten(0, x.shape[:-1])"),
        "linear",
        "x",
    ),
    # gates
    "a gate of the other half": (
        _m(_GU, "h = self.gate_up(x)\nreturn self.down(h[..., 96:] * torch.sigmoid(h[..., :96]))"),
        "silu_mul",
        "x",
    ),
    "a gate whose sigmoid is of the product": (
        _m(_GU, "a, b = self.gate_up(x).chunk(2, -1)\nreturn self.down(a * b * torch.sigmoid(a * b))"),
        "silu_mul",
        "x",
    ),
    "a gate with a sequence of two": (
        _m(
            _G3 + "\nself.act = nn.Sequential(nn.SiLU(), nn.Tanh())",
            "return self.w2(self.act(self.w1(x)) * self.w3(x))",
        ),
        "silu_mul",
        "x",
    ),
    "a gate with a sequence that subclasses": (
        "class S(nn.Sequential):\n    def forward(self, t): return super().forward(t) * 2\n"
        + _m(_G3 + "\nself.act = S(nn.SiLU())", "return self.w2(self.act(self.w1(x)) * self.w3(x))"),
        "silu_mul",
        "x",
    ),
    "a product in place into what is seen": (
        _m(_G3, "up = self.w3(x)\nkept = up\nup.mul_(F.silu(self.w1(x)))\nreturn self.w2(up) + kept.sum()"),
        "silu_mul",
        "x",
    ),
    "a product in place into an argument": (
        "class Same(nn.Module):\n    def forward(self, t): return t\n"
        + _m(
            _G3 + "; self.same = Same(); self.w4 = nn.Linear(64, 64)",
            "up = self.same(x)\nup *= F.silu(self.w4(x))\nreturn up + x",
        ),
        "silu_mul",
        "x",
    ),
    "an activation whose cube is a square": (
        _m(
            _G3,
            "g = self.w1(x)\nreturn self.w2(0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * torch.pow(g, 2.0)))) * self.w3(x))",
        ),
        "gelu_mul",
        "x",
    ),
    "an activation with another constant": (
        "class A(nn.Module):\n    def forward(self, t): return 0.5 * t * (1.0 + torch.tanh(0.79788456 * (t + 0.0447 * t ** 3)))\n"
        + _m(_G3 + "; self.act = A()", "return self.w2(self.act(self.w1(x)) * self.w3(x))"),
        "gelu_mul",
        "x",
    ),
    # attention, rope
    "a softmax over queries": (
        _h(
            "s = torch.einsum('bhqd,bhkd->bhqk', q, k) * 0.25\nreturn torch.einsum('bhqk,bhkd->bhqd', s.softmax(dim=-2), v)"
        ),
        "softmax",
        "x",
    ),
    "a softmax whose largest learns nothing of the sum": (
        _h(
            "s = q @ k.mT / 4\ns = s - s.mean(dim=-1, keepdim=True).detach()\ne = s.exp()\nreturn torch.div(e, torch.sum(e, -1, keepdim=True) + 1.0) @ v"
        ),
        "softmax",
        "x",
    ),
    "a softmax of the sum of all": (
        _h(
            "s = q @ k.mT / 4\ne = (s - s.max(dim=-1, keepdim=True)[0]).exp()\nreturn torch.div(e, torch.sum(e, (-1, -2), keepdim=True)) @ v"
        ),
        "softmax",
        "x",
    ),
    "a mask on the other side": (
        _h("return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 5).triu(0).bool())"),
        "rms_norm",
        "x",
    ),
    "a rope with halves in their place": (
        _h(
            "q = q * c + torch.cat((-q[..., :8], q[..., 8:]), -1) * s\nk = k * c + torch.cat((-k[..., :8], k[..., 8:]), -1) * s"
            + _END,
            "Turned",
        ),
        "rope",
        "x",
    ),
    "a rope that rolls without a sign": (
        _h("q = q * c + q.roll(8, -1) * s\nk = k * c + k.roll(8, -1) * s" + _END, "Turned"),
        "rope",
        "x",
    ),
    "a rope whose pairs are swapped": (
        _h(
            "c, s = c[:, :8], s[:, :8]\na, b = q[..., 0::2], q[..., 1::2]\nq = torch.stack([b * c - a * s, b * s + a * c], -1).flatten(-2)"
            + _END,
            "Turned",
        ),
        "rope",
        "x",
    ),
    "a rope of the cosine alone": (
        _h("q = q * c + turn(q) * c; k = k * c + turn(k) * c" + _END, "Turned"),
        "rope",
        "x",
    ),
    "a rope whose second is turned by the first": (
        _h("q, k = (t * c + turn(q) * s for t in (q, k))" + _END, "Turned"),
        "none",
        "x",
    ),
    "names that change places": (_h("q, k = k, q\nq, k = q * 2, q + k" + _END), "none", "x"),
    # convolutions, tables, losses
    "a convolution padded on the right": (
        _m(
            "self.pad, self.conv = nn.ZeroPad1d((0, 3)), nn.Conv1d(64, 64, 4, groups=64)",
            "return self.conv(self.pad(x))",
        ),
        "causal_conv1d",
        "bcs",
    ),
    "a convolution padded with ones": (
        _m(
            "self.net = nn.Sequential(nn.ConstantPad1d((3, 0), 1.0), nn.Conv1d(64, 64, 4, groups=64))",
            "return self.net(x)",
        ),
        "causal_conv1d",
        "bcs",
    ),
    "a convolution that dilates": (
        _m(
            "self.net = nn.Sequential(nn.ZeroPad1d((3, 0)), nn.Conv1d(64, 64, 2, dilation=3, groups=64))",
            "return self.net(x)",
        ),
        "causal_conv1d",
        "bcs",
    ),
    "shifts in the other order": (
        _m(
            _CV,
            "out = x * self.kernel[:, 0, 0, None] + self.bias[:, None]\nfor i in range(1, 4):\n    out = out + F.pad(x, (i, -i)) * self.kernel[:, 0, i - 1, None]\nreturn out",
        ),
        "causal_conv1d",
        "bcs",
    ),
    "rows from the other end": (
        _m("self.t = nn.Parameter(torch.randn(20, 64))", "return self.t.flip(0)[x]"),
        "embedding",
        "ids",
    ),
    "rows beside the first": (
        _m("self.t = nn.Parameter(torch.randn(20, 64))", "return self.t[x] - self.t[0]"),
        "embedding",
        "ids",
    ),
    "rows times their width": (
        _m("pass", "return super().forward(x) * (self.embedding_dim ** 0.5 + x[..., None])", "nn.Embedding", "20, 64"),
        "embedding",
        "ids",
    ),
    "a cross entropy of the next": (
        _m(_LOGITS, "z = self.head(x).view(-1, 40)\nreturn F.nll_loss(F.log_softmax(z, dim=0), self.y.view(-1))"),
        "cross_entropy",
        "x",
    ),
    "a cross entropy that sums": (
        _m(
            _LOGITS,
            "z = self.head(x).view(-1, 40)\nt = z.gather(1, self.y.view(-1, 1)).squeeze(1)\nreturn (torch.logsumexp(z, dim=-1) - t).sum()",
        ),
        "cross_entropy",
        "x",
    ),
    # what is seen of a residual
    "a residual with a weight": (
        _m(_FN, "h = torch.add(input=x, other=self.attn(x), alpha=2)\nreturn self.n2(h), h"),
        "add_rms_norm",
        "x",
    ),
    "a residual that is taken off": (_m(_FN, "return self.n2(torch.sub(self.attn(x), x))"), "add_rms_norm", "x"),
}
