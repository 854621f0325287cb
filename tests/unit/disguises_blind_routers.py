"""Routers and losses of language models, written without a look at the porting code."""

from __future__ import annotations

ROUTERS = r'''
W, E, K, V, I = 32, 8, 2, 70, 24


# ---- routers
@case("gate_topk", lambda c: (c(), T(2, 7, W)))
class RoutMixtral(nn.Module):
    """Mixtral: shares of all, the best two, brought to a sum of one; the logits go to the balance loss."""

    def __init__(self):
        super().__init__()
        self.top_k, self.gate = K, nn.Linear(W, E, bias=False)

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


@case("gate_topk", lambda c: (c(), T(11, W)))
class RoutOlmoe(nn.Module):
    """OLMoE: shares are left as they are, unless a setting says otherwise."""

    def __init__(self, norm_topk_prob=False):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)
        self.top_k, self.norm_topk_prob = 3, norm_topk_prob

    def forward(self, x):
        probs = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probs.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts


@case("gate_topk", lambda c: (c(), T(9, W)))
class RoutDeepseek(nn.Module):
    """DeepSeek-V3: sigmoids, a bias for the choice, groups of experts, a scale."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, W) * W**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.linspace(-0.2, 0.2, 16))
        self.n_group, self.topk_group, self.top_k, self.routed_scaling_factor = 4, 2, 3, 2.5

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, W)
        scores = F.linear(hidden_states.float(), self.weight.float()).sigmoid()
        choice = scores.view(-1, 16) + self.e_score_correction_bias.unsqueeze(0)
        group_scores = choice.view(-1, self.n_group, 4).topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(group_scores)
        mask.scatter_(1, group_idx, 1)
        mask = mask.unsqueeze(-1).expand(-1, self.n_group, 4).reshape(-1, 16)
        choice = choice.masked_fill(~mask.bool(), float("-inf"))
        indices = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return indices, weights * self.routed_scaling_factor


@case("gate_topk", lambda c: (c(), T(13, W)))
class RoutSwitch(nn.Module):
    """Switch: one expert, by the largest share."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(W, E, bias=False)

    def forward(self, x):
        probs = F.softmax(self.classifier(x), dim=-1)
        share, index = probs.max(dim=-1, keepdim=True)
        return share, index


@case("gate_topk", lambda c: (c(), T(13, E)))
class RoutLargestLogit(nn.Module):
    """One expert, by the largest logit, and its share."""

    def forward(self, logits):
        index = logits.argmax(dim=-1, keepdim=True)
        return F.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, index), index


@case("gate_topk", lambda c: (c(), T(12, E)))
class RoutBySort(nn.Module):
    """The first of all experts in falling order."""

    def forward(self, logits):
        values, order = torch.sort(logits, dim=-1, descending=True)
        return torch.softmax(values[:, :K].float(), dim=-1), order[:, :K]


@case("gate_topk", lambda c: (c(), T(12, W)))
class RoutPhi(nn.Module):
    """The best logits first, shares of these; the layer has a bias."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E)

    def forward(self, x):
        logits = self.router(x)
        top, chosen = torch.topk(logits, k=4, dim=-1)
        return torch.softmax(top, dim=-1, dtype=torch.float32).type_as(x), chosen


@case("gate_topk", lambda c: (c(), T(10, E)))
class RoutSigmoidScaled(nn.Module):
    """Sigmoids brought to a sum of one, times a factor."""

    def __init__(self, factor=1.5):
        super().__init__()
        self.factor = factor

    def forward(self, router_logits):
        s = router_logits.float().sigmoid()
        w, i = torch.topk(s, 3, dim=-1, sorted=False)
        return w / (w.sum(-1, keepdim=True) + 1e-20) * self.factor, i


@case("gate_topk", lambda c: (c(), T(2, 5, W)))
class RoutBlock(nn.Module):
    """A whole block: experts of their own, one after another, with what the router chose."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = E, K
        self.gate = nn.Linear(W, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(W, I), nn.GELU(), nn.Linear(I, W)) for _ in range(E))

    def forward(self, hidden_states):
        b, s, d = hidden_states.shape
        flat = hidden_states.view(-1, d)
        router_logits = self.gate(flat)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(flat.dtype)
        out = torch.zeros_like(flat)
        mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for e in range(self.num_experts):
            idx, rows = torch.where(mask[e])
            out.index_add_(0, rows, self.experts[e](flat[rows]) * routing_weights[rows, idx, None])
        return out.reshape(b, s, d), router_logits


@case("gate_topk", lambda c: (c(), T(9, W)))
class RoutGshard(nn.Module):
    """GShard: the best, then the best of the others; the two shares make one."""

    def __init__(self):
        super().__init__()
        self.wg = nn.Linear(W, E, bias=False)

    def forward(self, x):
        gates = torch.softmax(self.wg(x).float(), dim=-1)
        first = torch.argmax(gates, dim=-1)
        others = gates.masked_fill(F.one_hot(first, E).bool(), 0.0)
        second = torch.argmax(others, dim=-1)
        both = torch.stack([first, second], dim=-1)
        w = gates.gather(-1, both)
        return w / w.sum(-1, keepdim=True), both


# ---- losses
@case("cross_entropy", lambda c: (c(), T(2, 6, V), torch.randint(V, (2, 6))))
class LossSmoothed(nn.Module):
    """Smoothing by keyword, with a default."""

    def forward(self, logits, labels, *, smoothing=0.1):
        logp = torch.log_softmax(logits.float().view(-1, V), dim=-1)
        own = logp.gather(1, labels.view(-1, 1)).squeeze(1)
        return -((1.0 - smoothing) * own + smoothing * logp.mean(dim=-1)).mean()


@case("cross_entropy", lambda c: (c(), T(2, 6, V), torch.randint(V, (2, 6))))
class LossShifted(nn.Module):
    """Each token's next; a sum divided by how many there are."""

    def forward(self, logits, labels):
        logits = logits[:, :-1].reshape(-1, logits.size(-1)).float()
        target = labels[:, 1:].reshape(-1)
        return F.cross_entropy(logits, target, reduction="sum") / target.numel()
'''
