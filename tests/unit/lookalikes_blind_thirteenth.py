# ruff: noqa: E501
"""Look-alikes of the thirteenth set, each with one fault, written without a look at the porting code."""

from __future__ import annotations

THIRTEENTH = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 6, 2, 24


# ---- MLPs
@alike(lambda c: (c(), T(2, S, W)))
class NotSwiglu(nn.Module):
    """The other half goes through a sigmoid as well."""

    def __init__(self):
        super().__init__()
        self.fc_1, self.fc_2, self.proj = nn.Linear(W, 96, bias=False), nn.Linear(W, 96, bias=False), nn.Linear(96, W, bias=False)

    def forward(self, x):
        h = F.silu(self.fc_1(x)) * torch.sigmoid(self.fc_2(x))
        return self.proj(h)


@alike(lambda c: (c(), T(2, S, W)))
class NotSlices(nn.Module):
    """Slices of gate and up are joined, and the halves are read crosswise."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(W, 96, bias=False), nn.Linear(W, 96, bias=False), nn.Linear(96, W, bias=False)

    def forward(self, x):
        g, u = self.gate_proj.weight.split(48, dim=0), self.up_proj.weight.split(48, dim=0)
        gate = torch.cat([F.linear(x, t) for t in g], dim=-1)
        up = torch.cat([F.linear(x, t) for t in reversed(u)], dim=-1)
        return self.down_proj(F.silu(gate) * up)


@alike(lambda c: (c(), T(2, S, W)))
class NotGeglu(nn.Module):
    """The gate has the other half's mean taken away, and is multiplied by itself."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(W, 192), nn.Linear(96, W)

    def forward(self, x):
        x, gate = self.fc(x).chunk(2, dim=-1)
        return self.out(F.gelu(gate - x.mean(-1, keepdim=True)) * gate)


@alike(lambda c: (c(), T(2, S, W)), lambda: (T(2, S, W) * 5,))
class NotSquared(nn.Module):
    """The square keeps the sign."""

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(W, 96, bias=False), nn.Linear(96, W, bias=False)

    def forward(self, x):
        k = self.key(x)
        return self.value(k * k.abs())


# ---- linears
@alike(lambda c: (c(), T(2, 8, 8, 8)))
class NotHeads(nn.Module):
    """Each head has its own part of what comes in, and not all of it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, 8) / 3)

    def forward(self, x):
        return torch.einsum("bshw,hwd->bshd", x, self.w)


# ---- routers and experts
@alike(lambda c: (c(), T(2, S, W)))
class NotRouter(nn.Module):
    """Weights of the few are divided by their length, and not by their sum."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(W, E, bias=False)

    def forward(self, x):
        scores = self.layer(x.reshape(-1, W)).softmax(dim=-1, dtype=torch.float32)
        scores = scores / scores.sum(-1, keepdim=True)
        top, experts = scores.topk(K, dim=-1)
        return (top / top.norm(dim=-1, keepdim=True)).to(x.dtype), experts


@alike(lambda c: (c(), T(13, W)))
class NotTopThenSoft(nn.Module):
    """The least are chosen, and not the largest."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, W) / 8)

    def forward(self, x):
        logits = x @ self.gate.t()
        values, indices = torch.topk(logits, K, dim=-1, largest=False)
        weights = F.softmax(values, dim=-1, dtype=torch.float).to(x.dtype)
        return torch.zeros_like(logits).scatter(-1, indices, weights), indices


@alike(lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class NotSortedExperts(nn.Module):
    """What experts gave is not put back into the tokens' order."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x, ids, weight):
        idxs = ids.view(-1).argsort(stable=True)
        counts = torch.bincount(ids.view(-1), minlength=E).tolist()
        rows, outputs, start = x[idxs // ids.shape[1]], [], 0
        for i, n in enumerate(counts):
            g, u = (rows[start : start + n] @ self.w_in[i].T).chunk(2, dim=-1)
            outputs.append((F.silu(g) * u) @ self.w_out[i].T)
            start += n
        outs = torch.cat(outputs, dim=0)[idxs]
        return (outs.view(*ids.shape, -1) * weight[..., None]).sum(dim=1)


@alike(lambda c: (c(), T(14, W), torch.randint(E, (14, K)), torch.rand(14, K)))
class NotGathered(nn.Module):
    """Weights are on what goes into an expert, and not on what comes out."""

    def __init__(self):
        super().__init__()
        self.mlp1, self.mlp2 = nn.Parameter(torch.randn(E, 2 * I, W) / 8), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, t, ids, weights):
        gate, up = torch.einsum("beck,bek->bec", self.mlp1[ids], t[:, None] * weights[..., None]).split(I, dim=-1)
        return torch.einsum("beck,bek->bec", self.mlp2[ids], F.silu(gate) * up).sum(1)


# ---- losses
@alike(lambda c: (c(), T(2, S, W), torch.randint(V, (2, S)).masked_fill(torch.arange(S) < 4, -100)), lambda: (T(2, S, W), torch.randint(V, (2, S)).masked_fill(torch.arange(S) < 9, -100)))
class NotLm(nn.Module):
    """The sum is divided by how many labels after the first count, though all are summed."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(W, V, bias=False)

    def forward(self, x, labels):
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="sum")
        return loss / (labels[:, 1:] != -100).sum().clamp(min=1)


@alike(lambda c: (c(), T(15, 10), torch.randint(10, (15,))))
class NotSmooth(nn.Module):
    """The smoothed part is shared among the other classes alone."""

    def forward(self, x, target):
        logp = F.log_softmax(x, dim=-1)
        nll = -logp.gather(-1, target.unsqueeze(1)).squeeze(1)
        rest = (-logp.sum(-1) - nll) / (x.shape[-1] - 1)
        return (0.9 * nll + 0.1 * rest).mean()


# ---- embeddings, convolutions, scans
@alike(lambda c: (c(), torch.randint(20, (2, S, 4))))
class NotBooks(nn.Module):
    """The offsets go the other way: the first book has the last rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(80, W)
        self.register_buffer("offsets", torch.arange(4).flip(0) * 20)

    def forward(self, codes):
        return self.table(codes + self.offsets.view(-1, 4)).sum(dim=2)


@alike(lambda c: (c(), T(2, S, W)))
class NotShort(nn.Module):
    """The rows are padded by one less, so that one of the future is read."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(W, W, 4, groups=W, bias=False)

    def forward(self, x):
        x = F.pad(x.transpose(1, 2), (2, 1))
        return F.silu(self.conv(x)).transpose(1, 2)


@alike(lambda c: (c(), T(2, S, 12), torch.rand(2, S, 12), T(2, S, 5), T(2, S, 5)))
class NotMinimal(nn.Module):
    """What a step gives out is of the state before it."""

    def __init__(self, d=12, n=5):
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(d, 1))), nn.Parameter(torch.ones(d))

    def forward(self, u, delta, B, C):
        dA = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.A_log.float())).to(u.dtype))
        dBu = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x, ys = u.new_zeros(u.shape[0], 12, 5), []
        for i in range(u.shape[1]):
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
            x = dA[:, i] * x + dBu[:, i]
        return torch.stack(ys, dim=1) + u * self.D
'''
