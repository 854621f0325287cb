# ruff: noqa: E501
"""Variations of what the eighth set showed: loops over tokens, layers of experts with their router, losses."""

from __future__ import annotations

EIGHTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 4, 16, 9, 90, 6, 2, 40
keys = lambda *s: F.normalize(T(*s), dim=-1)


@case("gated_delta_rule", lambda c: (c(), T(S, 2, H, D), keys(S, 2, H, D), T(S, 2, H, 8), -T(S, 2, H).abs(), torch.rand(S, 2, H)))
class TokensFirst(nn.Module):
    """Into a tensor that it made."""

    def forward(self, q, k, v, g, b):
        n, batch, heads, width = k.shape
        memory = torch.zeros(batch, heads, width, v.shape[-1], dtype=v.dtype, device=v.device)
        out = torch.empty_like(v)
        for i in range(n):
            memory = memory * g[i].exp()[..., None, None]
            error = v[i] - torch.einsum("bhkv,bhk->bhv", memory, k[i])
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[i], error * b[i].unsqueeze(-1))
            out[i] = torch.einsum("bhkv,bhk->bhv", memory, q[i])
        return out


@case("gated_delta_rule", lambda c: (c(), T(2, S, H, D), T(2, S, H, D), T(2, S, H, 8), torch.rand(2, S, H)))
class NoDecay(nn.Module):
    """The plain delta rule; the scale is in the loop, and the state is turned."""

    def forward(self, q, k, v, beta):
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        scale = q.shape[-1] ** -0.5
        b, n, h, d = q.shape
        S_t = q.new_zeros(b, h, v.shape[-1], d)
        outputs = []
        for i in range(n):
            q_i, k_i, v_i = q[:, i] * scale, k[:, i], v[:, i]
            v_i = beta[:, i, :, None] * (v_i - (S_t @ k_i.unsqueeze(-1)).squeeze(-1))
            S_t = S_t + v_i.unsqueeze(-1) * k_i.unsqueeze(-2)
            outputs.append((S_t @ q_i.unsqueeze(-1)).squeeze(-1))
        return torch.stack(outputs, dim=1)


@case("selective_scan", lambda c: (c(), T(2, 24, S), F.softplus(T(2, 24, S)), T(2, 8, S), T(2, 8, S)))
class ChannelsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(24, 8))

    def forward(self, u, delta, B, C):
        A = -torch.exp(self.A_log.float())
        deltaA = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
        deltaB_u = torch.einsum("bdl,bnl,bdl->bdln", delta, B, u)
        x = torch.zeros((u.shape[0], 24, 8), device=u.device)
        ys = []
        for i in range(u.shape[2]):
            x = deltaA[:, :, i] * x + deltaB_u[:, :, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, :, i]))
        return torch.stack(ys, dim=2)


@case("ssd_scan", lambda c: (c(), T(2, S, H, 8), torch.rand(2, S, H), -torch.rand(H), T(2, S, H, 6), T(2, S, H, 6)))
class EachHeads(nn.Module):
    """Inputs and outputs of each head's own."""

    def forward(self, x, dt, a, b, c):
        state = torch.zeros(x.size(0), x.size(2), b.size(3), x.size(3), device=x.device, dtype=x.dtype)
        y = torch.zeros_like(x)
        for t in range(x.size(1)):
            da = (dt[:, t] * a).exp()
            state = da[..., None, None] * state + (b[:, t] * dt[:, t].unsqueeze(-1)).unsqueeze(-1) * x[:, t].unsqueeze(-2)
            y[:, t] = torch.einsum("bhn,bhnp->bhp", c[:, t], state)
        return y * 2.0
'''
