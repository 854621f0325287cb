# ruff: noqa: E501
"""The fourth set of right modules, once more: two dozen of many kinds, written after the others were served."""

from __future__ import annotations

MIXED = r"""
import functools
W, H, D, S = 48, 4, 16, 7


def sweep(t, d):
    a = torch.outer(torch.arange(t).float(), 1.0 / 500.0 ** (torch.arange(0, d, 2).float() / d))
    return a.cos(), a.sin()


# ---- norms
@case("rms_norm", lambda c: (c(W), T(2, 5, W)))
class ScaleSecond(nn.Module):
    def __init__(self, n, tiny=1e-5):
        super().__init__()
        self.tiny = tiny
        self.register_parameter("amp", nn.Parameter(torch.rand(1, 1, n) + 0.5))

    def forward(self, seq):
        energy = torch.sum(seq * seq, dim=2, keepdim=True).div(seq.size(2))
        return seq.mul(self.amp).mul(energy.add(self.tiny).rsqrt())


@case("layer_norm", lambda c: (c(W), T(3, W)))
class StdNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.mult, self.plus = nn.Parameter(torch.rand(n) + 0.5), nn.Parameter(torch.randn(n))

    def forward(self, v):
        mu = torch.mean(v, -1).unsqueeze(-1)
        second = torch.mean(v * v, -1).unsqueeze(-1)
        both = torch.rsqrt(torch.mean((v - mu) ** 2, -1).unsqueeze(-1) + 1e-5 + 0.0 * second)
        return torch.addcmul(self.plus, self.mult, (v - mu) * both)


@case("group_norm", lambda c: (c(W, 6), T(2, W, 5, 3)))
class FoldedGroups(nn.Module):
    def __init__(self, ch, parts):
        super().__init__()
        self.parts, self.ch, self.tol = parts, ch, 1e-5
        self.scale, self.move = nn.Parameter(torch.rand(ch, 1, 1)), nn.Parameter(torch.randn(ch, 1, 1))

    def forward(self, img):
        g = img.unflatten(1, (self.parts, self.ch // self.parts))
        g = g - g.mean((2, 3, 4), keepdim=True)
        g = g * (g.square().mean((2, 3, 4), keepdim=True) + self.tol).rsqrt()
        return torch.addcmul(self.move, g.flatten(1, 2), self.scale)


@case("layer_norm", lambda c: (c(W), T(2, W, 11)))
class SeqChannels(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.inner = nn.LayerNorm(n, eps=1e-6)

    def forward(self, x):
        return torch.transpose(self.inner(torch.transpose(x, 1, 2)), 1, 2)


@case("gated_rms_norm", lambda c: (c(W), T(2, 5, W), T(2, 5, W)))
class LateGate(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_parameter("g", nn.Parameter(torch.rand(n)))

    def forward(self, core, door):
        c = core.float()
        c = c / torch.sqrt(c.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
        return (c * self.g * (door.float() * torch.sigmoid(door.float()))).to(core.dtype)


# ---- layers
def quick(x):
    return torch.sigmoid(1.0 * x) * x


@case("silu_mul", lambda c: (c(), T(2, 5, W)))
class Table(nn.Module):
    KINDS = {"quick": quick, "other": lambda v: F.gelu(v)}

    def __init__(self, kind="quick"):
        super().__init__()
        self.fn = self.KINDS[kind]
        self.io = nn.ModuleDict({"in": nn.Linear(W, 128), "out": nn.Linear(64, W)})

    def forward(self, x):
        left, right = self.io["in"](x).tensor_split(2, dim=-1)
        return self.io["out"](right * self.fn(left))


@case("bias_act", lambda c: (c(), T(2, 5, W)))
class Piped(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = [nn.Linear(W, 64), functools.partial(F.gelu, approximate="none"), nn.Linear(64, W)]
        self.hold = nn.ModuleList(s for s in self.steps if isinstance(s, nn.Module))
        self.bend = self.steps[1]
        del self.steps

    def forward(self, x):
        first, last = self.hold
        return last(self.bend(first(x)))


@case("gelu_mul", lambda c: (c(), T(2, 5, W)))
class Erf(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Linear(W, 64), nn.Linear(W, 64)

    def forward(self, x):
        z = self.p(x)
        return self.q(x) * (z * 0.5 * (torch.erf(z * math.sqrt(0.5)) + 1))


@case("linear", lambda c: (c(), T(2, 5, W)))
class Dotted(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.offset = nn.Parameter(torch.randn(W, 3, 8)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return torch.tensordot(x, self.kernel, dims=([-1], [0])) + self.offset


@case("linear", lambda c: (c(W, 40), T(2, 5, W)))
class Baddbmm(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mat, self.row = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(1, o))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.row, flat, self.mat).unflatten(0, x.shape[:-1])


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(W), nn.Linear(W, 64), nn.Linear(64, W)

    def forward(self, x):
        return self.two(F.relu(self.one(self.norm(x))))


@case("bias_act", lambda c: (c(), T(2, 5, W)))
class Skipped(Base):
    def forward(self, x, scale: float = 1.0):
        return torch.add(x, super().forward(x), alpha=scale)


# ---- rotary
@case("rope", lambda c: (c(), T(2, H, S, D), T(2, 2, S, D), *sweep(S, D)))
class Filled(nn.Module):
    def forward(self, q, k, co, si):
        outs = []
        qq = q.new_empty(q.shape)
        qq[..., : D // 2] = q[..., : D // 2] * co - q[..., D // 2 :] * si
        qq[..., D // 2 :] = q[..., D // 2 :] * co + q[..., : D // 2] * si
        kk = k.new_empty(k.shape)
        kk[..., : D // 2] = k[..., : D // 2] * co - k[..., D // 2 :] * si
        kk[..., D // 2 :] = k[..., D // 2 :] * co + k[..., : D // 2] * si
        return qq, kk


@case("rope", lambda c: (c(), T(2, S, H, D), *sweep(S, D)))
class Polar(nn.Module):
    def forward(self, x, co, si):
        pairs = x.unflatten(-1, (-1, 2))
        re, im = pairs.select(-1, 0), pairs.select(-1, 1)
        co, si = co.unsqueeze(-2), si.unsqueeze(-2)
        out = torch.empty_like(pairs)
        out[..., 0] = re * co - im * si
        out[..., 1] = im * co + re * si
        return out.flatten(-2)


@case("rope", lambda c: (c(), T(2, H, S, D), *sweep(S, D)))
class Swapped(nn.Module):
    def forward(self, x, co, si):
        lo, hi = x.tensor_split(2, dim=-1)
        return torch.hstack([(lo * co - hi * si).movedim(-1, 1), (hi * co + lo * si).movedim(-1, 1)]).movedim(1, -1)


# ---- attention
@case("attention", lambda c: (c(), T(2, S, W)))
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = nn.MultiheadAttention(W, 4, bias=False, batch_first=True)

    def forward(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        out, _ = self.att(x, x, x, attn_mask=seen, need_weights=False)
        return x + out


@case("attention", lambda c: (c(), T(2, H, S, D), T(2, H, S, D), T(2, H, S, D)))
class Stable(nn.Module):
    def forward(self, a, b, c):
        z = torch.einsum("nhid,nhjd->nhij", a / D**0.25, b / D**0.25)
        z = (z - z.max(dim=-1, keepdim=True).values).exp()
        z = z / z.sum(dim=-1, keepdim=True)
        return torch.einsum("nhij,nhjd->nhid", z, c)


@case("attention", lambda c: (c(), T(2, S, W)))
class OneKv(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(W, 64), nn.Linear(W, 32)

    def forward(self, x):
        q = self.q(x).unflatten(2, (4, 16)).movedim(2, 1)
        k, v = self.kv(x)[:, None].tensor_split(2, dim=3)
        return F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True).movedim(1, 2).flatten(2)


# ---- experts, losses, tables
@case("moe_experts", lambda c: (c(), T(9, 32)))
class Picked(nn.Module):
    def __init__(self, count=4, inner=24):
        super().__init__()
        self.pick = nn.Linear(32, count)
        self.fc1, self.fc2 = nn.Parameter(torch.randn(count, 2 * inner, 32) * 0.1), nn.Parameter(torch.randn(count, 32, inner) * 0.1)

    def forward(self, x):
        p, where = self.pick(x).softmax(dim=-1).topk(2)
        both = (self.fc1[where] @ x[:, None, :, None]).squeeze(-1)
        a, b = both.chunk(2, dim=-1)
        y = (self.fc2[where] @ (F.silu(a) * b).unsqueeze(-1)).squeeze(-1)
        return (p[..., None] * y).sum(dim=1)


@case("cross_entropy", lambda c: (c(), T(12, W), torch.randint(30, (12,))))
class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.CrossEntropyLoss(reduction="sum", ignore_index=3)
        self.out = nn.Linear(W, 30)

    def forward(self, h, y):
        return self.score(self.out(h), y) / max(len(y), 1)


@case("cross_entropy", lambda c: (c(), T(2, 6, 30), torch.randint(30, (2, 6))))
class Nll(nn.Module):
    def forward(self, z, y):
        lp = z.log_softmax(-1)
        return torch.mean(-torch.take_along_dim(lp, y[..., None], dim=-1).squeeze(-1))


@case("embedding", lambda c: (c(), torch.randint(20, (2, 6))))
class Took(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(20, W))

    def forward(self, i):
        return torch.take_along_dim(self.rows, i.reshape(-1, 1).expand(-1, W), 0).view(*i.shape, W)


# ---- convolutions
@case("causal_conv1d", lambda c: (c(), T(2, 24, 9)))
class Unfolded(nn.Module):
    def __init__(self, n=24, k=3):
        super().__init__()
        self.k = k
        self.f = nn.Parameter(torch.randn(n, k))

    def forward(self, x):
        wide = torch.cat([x.new_zeros(x.shape[0], x.shape[1], self.k - 1), x], dim=-1)
        return torch.einsum("bctk,ck->bct", wide.unfold(-1, self.k, 1), self.f)


@case("causal_conv1d", lambda c: (c(), T(2, 9, 24)))
class Trimmed(nn.Module):
    def __init__(self, n=24):
        super().__init__()
        self.c = nn.Conv1d(n, n, 4, padding=3, groups=n)

    def forward(self, seq):
        y = self.c(seq.mT)
        return torch.narrow(y, 2, 0, seq.shape[1]).mT


@case("add_rms_norm", lambda c: (c(), T(2, 5, W)))
class Resid(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.post = nn.Linear(W, W), nn.RMSNorm(W, eps=1e-6)

    def forward(self, x):
        x = torch.add(input=x, other=self.mix(x))
        return self.post(x) + x
"""
