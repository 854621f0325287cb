# ruff: noqa: E501
"""The seventh set of right modules: experts, convolutions, tables, losses and scans of more strangers."""

from __future__ import annotations

FOURTH_EXPERTS = r"""
W, E, K, I = 32, 6, 2, 24


class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(W, I, bias=False), nn.Linear(W, I, bias=False), nn.Linear(I, W, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@case("silu_mul", lambda c: (c(), T(2, 9, W)))
class EachByMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(W, E, bias=False), nn.ModuleList(Ffn() for _ in range(E))

    def forward(self, x):
        flat = x.reshape(-1, W)
        p, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), K, dim=-1)
        p = p / p.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == e)
            if rows.numel() == 0:
                continue
            y[rows] += p[rows, slot, None] * expert(flat[rows])
        return y.view_as(x)


@case("moe_experts", lambda c: (c(), T(12, W), T(12, E)))
class SortedRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(0.2 * torch.randn(E, W, 2 * I)), nn.Parameter(0.2 * torch.randn(E, I, W))

    def forward(self, x, logits):
        score, index = logits.softmax(-1).topk(K, dim=-1)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E).tolist()
        rows, results, start = x[order // K], [], 0
        for e, n in enumerate(counts):
            h = rows[start : start + n] @ self.up[e]
            g, u = h.chunk(2, dim=-1)
            results.append((F.silu(g) * u) @ self.down[e])
            start += n
        y = torch.zeros_like(x)
        return y.index_add(0, order // K, torch.cat(results) * score.flatten()[order, None])


@case("moe_experts", lambda c: (c(), T(2, 5, W)))
class SlotBySlot(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E)
        self.w_in, self.w_out = nn.Parameter(0.2 * torch.randn(E, 2 * I, W)), nn.Parameter(0.2 * torch.randn(E, W, I))

    def forward(self, x):
        b, s, d = x.shape
        x = x.view(-1, d)
        weight, ids = torch.topk(self.router(x), K)
        weight = weight.softmax(-1)
        out = 0
        for j in range(K):
            w_in, w_out = self.w_in[ids[:, j]], self.w_out[ids[:, j]]
            a, g = torch.bmm(w_in, x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
            out = out + weight[:, j : j + 1] * torch.bmm(w_out, (F.silu(a) * g).unsqueeze(-1)).squeeze(-1)
        return out.view(b, s, d)


@case("moe_experts", lambda c: (c(), T(11, W), torch.randint(0, E, (11, 2)), torch.rand(11, 2)))
class StackGiven(nn.Module):
    "Chosen experts and weights are given."

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(0.2 * torch.randn(E, 2 * I, W)), nn.Parameter(0.2 * torch.randn(E, W, I))

    def forward(self, hidden, chosen, weights):
        final = torch.zeros_like(hidden)
        hits = F.one_hot(chosen, num_classes=E).permute(2, 1, 0)
        for e in range(E):
            pos, tok = hits[e].nonzero(as_tuple=True)
            state = hidden[tok]
            gate, up = F.linear(state, self.gate_up[e]).chunk(2, dim=-1)
            state = F.linear(F.silu(gate) * up, self.down[e])
            final.index_add_(0, tok, state * weights[tok, pos].unsqueeze(-1))
        return final


@case("gate_topk", lambda c: (c(), T(2, 5, W)))
class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.wg = nn.Parameter(torch.randn(E, W))

    def forward(self, h):
        h = h.flatten(0, -2)
        prob = torch.softmax(torch.mm(h.float(), self.wg.float().t()), dim=-1)
        top, where = prob.topk(K, dim=-1, sorted=True)
        top = top / top.sum(dim=-1, keepdim=True)
        return top, where


@case("gate_topk", lambda c: (c(), T(10, W)))
class BiasedChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.correction = nn.Linear(W, 8, bias=False), nn.Parameter(torch.linspace(-0.3, 0.3, 8))

    def forward(self, x):
        s = torch.sigmoid(self.w(x))
        _, idx = torch.topk(s.detach() + self.correction.detach(), 3, dim=-1)
        g = torch.gather(s, 1, idx)
        return idx, 2.5 * g / (g.sum(-1, keepdim=True) + 1e-20)


@case("causal_conv1d", lambda c: (c(), T(2, 9, W)))
class DepthwiseThenSilu(nn.Module):
    def __init__(self, k=4):
        super().__init__()
        self.conv = nn.Conv1d(W, W, k, groups=W, padding=k - 1, bias=True)

    def forward(self, u):
        n = u.shape[1]
        return F.silu(self.conv(u.mT)[..., :n]).mT


@case("causal_conv1d", lambda c: (c(), T(2, W, 9)))
class WindowsOfTime(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.k, self.taps = k, nn.Parameter(torch.randn(W, k))

    def forward(self, x):
        w = F.pad(x, (self.k - 1, 0)).unfold(-1, self.k, 1)
        return torch.einsum("bctk,ck->bct", w, self.taps)


@case("linear", lambda c: (c(), T(2, 3, 16, 16)))
class PatchRows(nn.Module):
    def __init__(self, p=4):
        super().__init__()
        self.p, self.embed = p, nn.Linear(3 * p * p, W)

    def forward(self, img):
        return self.embed(F.unfold(img, self.p, stride=self.p).transpose(1, 2))


@case("embedding", lambda c: (c(), torch.randint(0, 50, (2, 7))))
class ScaledTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_embedding, self.pos = nn.Parameter(torch.randn(50, W)), nn.Parameter(torch.randn(20, W))

    def forward(self, ids):
        x = self.input_embedding[(ids,)]
        x = x * math.sqrt(W)
        return x + self.pos[: ids.shape[-1]]


@case("cross_entropy", lambda c: (c(), T(2, 6, 50), torch.tensor([[3, 1, 4, -100, 5, 9], [2, 6, -100, -100, 5, 8]])))
class NextToken(nn.Module):
    def forward(self, logits, labels):
        pred = logits[:, :-1].contiguous().flatten(0, 1).float()
        return F.cross_entropy(pred, labels[:, 1:].flatten())


@case("cross_entropy", lambda c: (c(), T(8, 50), torch.randint(0, 50, (8,))))
class SmoothByHand(nn.Module):
    def __init__(self, eps=0.1):
        super().__init__()
        self.eps = eps

    def forward(self, logits, target):
        logp = logits.log_softmax(-1)
        nll = -logp.gather(1, target[:, None]).squeeze(1)
        return ((1 - self.eps) * nll + self.eps * -logp.mean(-1)).mean()


@case("linear_cross_entropy", lambda c: (c(), T(2, 6, W), torch.randint(0, 50, (2, 6))))
class TiedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, W)

    def forward(self, hidden, labels):
        return F.cross_entropy((hidden @ self.wte.weight.t()).view(-1, 50), labels.view(-1))


@case("selective_scan", lambda c: (c(), T(2, 8, 7), F.softplus(T(2, 8, 7)), -torch.rand(8, 4) - 0.1, T(2, 4, 7), T(2, 4, 7)))
class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, u, dt, a, b, c):
        state, ys = u.new_zeros(u.shape[0], u.shape[1], a.shape[1]), []
        for t in range(u.shape[-1]):
            d = dt[:, :, t, None]
            state = torch.exp(d * a) * state + d * u[:, :, t, None] * b[:, None, :, t]
            ys.append((state * c[:, None, :, t]).sum(-1))
        return torch.stack(ys, -1) + u * self.skip[:, None]
"""
