# ruff: noqa: E501
"""The sixth set of right modules: routers, experts and losses."""

from __future__ import annotations

THIRD_EXPERTS = r"""
W, E, K, I = 48, 4, 2, 32


# ---- routers
@case("gate_topk", lambda c: (c(), T(2, 6, W)))
class SoftThenTop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, 8, bias=False)

    def forward(self, hidden):
        hidden = hidden.view(-1, W)
        router_logits = self.gate(hidden)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected = torch.topk(routing_weights, 2, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        return routing_weights.to(hidden.dtype), selected


@case("gate_topk", lambda c: (c(), T(12, W)))
class TopThenSoft(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.top_k = nn.Parameter(torch.randn(8, W) / 7), nn.Parameter(torch.randn(8)), 2

    def forward(self, x):
        logits = F.linear(x, self.weight, self.bias)
        top, indices = torch.topk(logits, self.top_k, dim=-1)
        return F.softmax(top, dim=1, dtype=top.dtype), indices


@case("gate_topk", lambda c: (c(), T(12, W)))
class SigmoidBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, W) / 7), 2.5
        self.register_buffer("e_score_correction_bias", torch.randn(8) / 10)

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        _, idx = torch.topk(choice, k=2, dim=-1, sorted=False)
        w = scores.gather(1, idx)
        w = w / (w.sum(dim=-1, keepdim=True) + 1e-20)
        return idx, w * self.scale


# ---- experts
@case("moe_experts", lambda c: (c(), T(9, W)))
class StackedLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E, bias=False)
        self.w13, self.w2 = nn.Parameter(torch.randn(E, 2 * I, W) / 7), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x):
        w, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        y = torch.zeros_like(x)
        for e in range(E):
            at, nth = (ids == e).nonzero(as_tuple=True)
            if at.numel() == 0:
                continue
            h = x[at] @ self.w13[e].t()
            h = F.silu(h[:, :I]) * h[:, I:]
            y.index_add_(0, at, (h @ self.w2[e].T) * w[at, nth].unsqueeze(-1))
        return y


@case("moe_experts", lambda c: (c(), T(9, W)))
class PickedWeights(nn.Module):
    '''Each row's matrices are picked, one product for all.'''

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(E, 2 * I, W) / 7), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, x):
        scores, ids = self.router(x).topk(K, dim=-1)
        scores = scores.softmax(-1)
        h = torch.einsum("td,tkfd->tkf", x, self.gate_up[ids])
        g, u = h.chunk(2, dim=-1)
        out = torch.einsum("tkf,tkdf->tkd", F.silu(g) * u, self.down[ids])
        return (out * scores[..., None]).sum(dim=1)


@case("moe_experts", lambda c: (c(), T(2, 5, W)))
class OneHotMask(nn.Module):
    '''Mixtral's dispatch over stacked weights.'''

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(E, 2 * I, W) / 7), nn.Parameter(torch.randn(E, W, I) / 6)

    def forward(self, hidden):
        b, s, n = hidden.shape
        x = hidden.reshape(-1, n)
        weights, selected = torch.topk(F.softmax(self.gate(x), dim=1, dtype=torch.float), K, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        final = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=E).permute(2, 1, 0)
        for e in range(E):
            idx, top_x = torch.where(mask[e])
            current = x[top_x]
            gate, up = F.linear(current, self.gate_up_proj[e]).chunk(2, dim=-1)
            current = F.linear(F.silu(gate) * up, self.down_proj[e]) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(x.dtype))
        return final.reshape(b, s, n)


class Mlp(nn.Module):
    def __init__(self, n=W, inner=I):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(n, inner, bias=False), nn.Linear(inner, n, bias=False), nn.Linear(n, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@case("silu_mul", lambda c: (c(), T(9, W)))
class ListLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(W, E, bias=False), nn.ModuleList([Mlp() for _ in range(E)])

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x), K)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(chosen == i)
            results[batch_idx] += weights[batch_idx, nth, None] * expert(x[batch_idx])
        return results


# ---- losses
ids = lambda n, *s: torch.randint(n, s)


class Lm(nn.Module):
    def __init__(self, n=W, vocab=70, tied=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, n)
        self.lm_head = nn.Linear(n, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.ln_f = nn.LayerNorm(n)


@case("cross_entropy", lambda c: (c(), T(2, 6, W), ids(70, 2, 6)))
class TiedShifted(Lm):
    def forward(self, hidden, labels):
        lm_logits = self.lm_head(self.ln_f(hidden))
        shift_logits = lm_logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1)), lm_logits


@case("cross_entropy", lambda c: (c(), ids(70, 2, 6), torch.tensor([[3, 4, -1, 5, 6, -1], [1, 2, 3, 4, 5, 6]])))
class NanoLoss(Lm):
    def forward(self, idx, targets=None):
        x = self.ln_f(self.wte(idx))
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss


@case("linear_cross_entropy", lambda c: (c(), T(2, 6, W), ids(70, 2, 6)))
class HeadLoss(Lm):
    '''Logits leave nothing but the loss.'''

    def forward(self, hidden, labels):
        z = hidden @ self.wte.weight.t()
        return F.cross_entropy(z.flatten(0, 1).float(), labels.flatten())


@case("cross_entropy", lambda c: (c(), T(2, 6, 70), torch.tensor([[3, 4, -100, 5, 6, -100], [1, 2, 3, 4, 5, 6]])))
class MaskedNll(nn.Module):
    def forward(self, logits, labels):
        keep = labels != -100
        logp = F.log_softmax(logits.float(), dim=-1)
        nll = -logp.gather(-1, labels.masked_fill(~keep, 0).unsqueeze(-1)).squeeze(-1)
        return (nll * keep).sum() / keep.sum()


@case("cross_entropy", lambda c: (c(), T(2, 6, 70), ids(70, 2, 6)))
class NllOfRows(nn.Module):
    def forward(self, logits, labels):
        logp = torch.log_softmax(logits[:, :-1, :], dim=-1).reshape(-1, logits.size(-1))
        return F.nll_loss(logp, labels[:, 1:].reshape(-1))


@case("cross_entropy", lambda c: (c(), T(12, 70), ids(70, 12)))
class MinusLse(nn.Module):
    def forward(self, logits, target):
        picked = logits[torch.arange(logits.shape[0], device=logits.device), target]
        return (torch.logsumexp(logits, dim=-1) - picked).mean()


@case("softmax", lambda c: (c(70), T(2, 6, 70), ids(70, 2, 6)))
class PerToken(nn.Module):
    '''Log-probabilities of a policy, in a loop over rows, and the entropy.'''

    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, logits, index):
        p = torch.softmax(logits, dim=-1)
        return p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
"""
