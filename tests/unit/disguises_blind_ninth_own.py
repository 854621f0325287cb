# ruff: noqa: E501
"""Variations of what the ninth set and the loops showed: numbers round and round, slopes at a kink, named widths, loops."""

from __future__ import annotations

NINTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40
keys = lambda *s: F.normalize(T(*s), dim=-1)


@case("gated_delta_rule", lambda c: (c(), T(2, S, W)))
class DeltaLayer(nn.Module):
    """Kimi's or Qwen's layer by hand: a norm of keys inside, einsums, and results in a tensor."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(W, W, bias=False) for _ in range(3))
        self.b_proj, self.a_proj = nn.Linear(W, H), nn.Linear(W, H)

    def forward(self, x):
        b, s, _ = x.shape
        q = F.normalize(self.q_proj(x).view(b, s, H, D), dim=-1)
        k = F.normalize(self.k_proj(x).view(b, s, H, D), dim=-1)
        v = self.v_proj(x).view(b, s, H, D)
        rate, g = self.b_proj(x).sigmoid(), F.logsigmoid(self.a_proj(x))
        memory = x.new_zeros(b, H, D, D)
        outs = torch.empty_like(v)
        for t in range(s):
            memory = memory * torch.exp(g[:, t])[:, :, None, None]
            seen = torch.einsum("bhk,bhkv->bhv", k[:, t], memory)
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t], rate[:, t, :, None] * (v[:, t] - seen))
            outs[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], memory)
        return outs.flatten(2)


@case("ssd_scan", lambda c: (c(), T(2, S, H, 8), torch.rand(2, S, H) / 4, T(2, S, 6), T(2, S, 6)))
class Duality(nn.Module):
    """Mamba2's, with decays whose logarithm is a parameter."""

    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(-torch.rand(H) - 0.5)

    def forward(self, x, dt, b, c):
        h = x.new_zeros(x.shape[0], H, x.shape[3], b.shape[2])
        ys = []
        for t in range(x.shape[1]):
            keep = torch.exp(dt[:, t] * self.A)
            h = h * keep[..., None, None] + (dt[:, t].unsqueeze(-1) * x[:, t]).unsqueeze(-1) * b[:, t, None, None, :]
            ys.append((h * c[:, t, None, None, :]).sum(-1))
        return torch.stack(ys, dim=1)


@case("embedding", lambda c: (c(), torch.randint(20, (2, 6))))
class RowsAlong(nn.Module):
    """Rows by take_along_dim of a table with a dimension beside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 32))

    def forward(self, ids):
        at = ids.flatten().unsqueeze(-1).expand(ids.numel(), self.table.shape[1])
        return torch.take_along_dim(self.table, at, dim=0).reshape(*ids.shape, -1)


@case("cross_entropy", lambda c: (c(), T(7, 30), torch.randint(30, (7,))))
class NllAlong(nn.Module):
    def forward(self, logits, y):
        picked = torch.take_along_dim(logits, y.unsqueeze(1), 1).squeeze(1)
        return (logits.logsumexp(1) - picked).mean()


@case("bias_act", lambda c: (c(), T(3, S, W)))
class ByClamp(nn.Module):
    """A rectifier by clamp, between two linears."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, 96), nn.Linear(96, W)

    def forward(self, x):
        return self.b(self.a(x).clamp(min=0.0))


@case("gate_topk", lambda c: (c(), T(2, S, W)))
class NamedWidth(nn.Module):
    """Softmax first; its width is a number of the file."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)

    def forward(self, x):
        p = (x.reshape(-1, W) @ self.weight.t()).softmax(dim=-1)
        w, ids = p.topk(K, dim=-1)
        return w / w.sum(dim=-1, keepdim=True), ids
'''
