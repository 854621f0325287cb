# ruff: noqa: E501
"""Variations of what the sixth set showed: rotations of a part, loops of experts, losses."""

from __future__ import annotations

VARIED = r"""
W, H, D, S = 64, 4, 16, 7
M, E, K, I = 48, 6, 2, 32


def table(n, d, base=10000.0):
    inv = 1.0 / (base ** (torch.arange(0, d, 2).float() / d))
    f = torch.outer(torch.arange(n).float(), inv)
    return torch.cat((f, f), -1)


@case("rope", lambda c: (c(), T(2, H, S, 24), table(S, 16).cos(), table(S, 16).sin()))
class PhiPart(nn.Module):
    '''Phi: the first share of a head, by halves.'''

    def __init__(self, head=24):
        super().__init__()
        self.rotary_ndims = int(2 * head / 3)

    def forward(self, x, cos, sin):
        n = self.rotary_ndims
        rot, rest = x[..., :n], x[..., n:]
        half = n // 2
        swapped = torch.cat((-rot[..., half:], rot[..., :half]), dim=-1)
        return torch.cat((rot * cos + swapped * sin, rest), dim=-1)


@case("rope", lambda c: (c(), T(2, S, W)))
class GlmHeads(nn.Module):
    '''ChatGLM: a table of pairs turns the first half of each head, and the key's is turned, too.'''

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(W, 2 * W)
        f = table(32, 8)[:, :4]
        self.register_buffer("cache", torch.stack([f.cos(), f.sin()], dim=-1), persistent=False)

    def forward(self, x):
        q, k = self.qk(x).view(*x.shape[:2], 2, H, D).unbind(2)
        cache = self.cache[: x.shape[1], None]
        c, z = cache[..., 0], cache[..., 1]

        def rotate(t):
            n = c.shape[-1] * 2
            t, kept = t[..., :n], t[..., n:]
            pairs = t.reshape(*t.shape[:-1], -1, 2)
            turned = torch.stack([pairs[..., 0] * c - pairs[..., 1] * z, pairs[..., 1] * c + pairs[..., 0] * z], -1)
            return torch.cat((turned.flatten(3), kept), dim=-1)

        return rotate(q), rotate(k)


@case("rope", lambda c: (c(), T(2, H, S, D), torch.arange(S)[None]))
class FromPositions(nn.Module):
    '''Angles of positions, made in the same forward.'''

    def __init__(self, d=D):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d)), persistent=False)

    def forward(self, q, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        cos, sin = freqs.cos()[:, None], freqs.sin()[:, None]
        a, b = q.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@case("rope", lambda c: (c(), T(2, S, H, D), T(2, S, 2, D)))
class CisInside(nn.Module):
    '''Complex numbers of a table of cosines and sines.'''

    def __init__(self, d=D):
        super().__init__()
        f = table(32, d)[:, : d // 2]
        self.register_buffer("cos", f.cos())
        self.register_buffer("sin", f.sin())

    def forward(self, q, k):
        n = q.shape[1]
        c, s = self.cos[:n, None], self.sin[:n, None]

        def turn(t):
            even, odd = t[..., ::2], t[..., 1::2]
            return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)

        return turn(q), turn(k)


@case("moe_experts", lambda c: (c(), T(3, 4, M)))
class LoopOfHit(nn.Module):
    '''Only experts that a token chose are gone over; rows are added up.'''

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(M, E, bias=False)
        self.n = E
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, M, 2 * I) / 7), nn.Parameter(torch.randn(E, I, M) / 6)

    def forward(self, x):
        flat = x.flatten(0, 1)
        top, ids = self.gate(flat).topk(K, dim=-1)
        top = top.softmax(dim=-1)
        out = flat.new_zeros(flat.shape)
        for i in range(self.n):
            rows, slot = torch.where(ids == i)
            g, u = (flat[rows] @ self.w_in[i]).chunk(2, dim=-1)
            out.index_add_(0, rows, (F.silu(g) * u) @ self.w_out[i] * top[rows, slot, None])
        return out.view_as(x)


@case("moe_experts", lambda c: (c(), T(7, M), torch.rand(7, K), torch.stack([torch.randperm(E)[:K] for _ in range(7)])))
class LoopAdds(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates_and_ups, self.downs = nn.Parameter(torch.randn(E, 2 * I, M) / 7), nn.Parameter(torch.randn(E, M, I) / 6)
        self.norm = nn.LayerNorm(M)

    def forward(self, x, share, which):
        y = self.norm(x)
        total = torch.zeros_like(y)
        for e in range(self.gates_and_ups.shape[0]):
            token, nth = (which == e).nonzero(as_tuple=True)
            if token.numel() > 0:
                a, b = F.linear(y[token], self.gates_and_ups[e]).split(I, dim=-1)
                total.index_add_(0, token, F.linear(F.gelu(a) * b, self.downs[e]) * share[token, nth].unsqueeze(1))
        return x + total


@case("cross_entropy", lambda c: (c(), T(12, 70), torch.randint(70, (12,))))
class Picked(nn.Module):
    def forward(self, z, y):
        rows = torch.arange(z.size(0), device=z.device)
        return -(F.log_softmax(z, dim=1)[rows, y]).mean()
"""
