# ruff: noqa: E501
"""What the thirteenth set led to, in other spellings."""

from __future__ import annotations

THIRTEENTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 6, 2, 24


@case("gate_topk", lambda c: (c(), T(2, S, W)))
class OwnSparse(nn.Module):
    """A course's router: what is not chosen is -inf, and then a softmax of all; the batch stays."""

    def __init__(self, n_embed=W, num_experts=E, top_k=K):
        super().__init__()
        self.top_k = top_k
        self.linear = nn.Linear(n_embed, num_experts)

    def forward(self, mh_output):
        logits = self.linear(mh_output)
        top_k_logits, indices = logits.topk(self.top_k, dim=-1)
        zeros = torch.full_like(logits, float("-inf"))
        sparse_logits = zeros.scatter(-1, indices, top_k_logits)
        router_output = F.softmax(sparse_logits, dim=-1)
        return router_output, indices


@case("gate_topk", lambda c: (c(), T(2, S, W)))
class OwnTable(nn.Module):
    """A table of shares that add up to one, of a matrix of its own, with logits beside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, W) / 8)

    def forward(self, x):
        logits = F.linear(x, self.weight)
        scores = logits.softmax(-1, dtype=torch.float32)
        top, ids = scores.topk(K, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, ids, top), ids, logits


@case("gate_topk", lambda c: (c(), T(13, W)))
class OwnMasked(nn.Module):
    """Shares of all, times a mask of the chosen, in a table."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)

    def forward(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        ids = torch.topk(probs, K, dim=-1).indices
        mask = torch.zeros_like(probs).scatter(1, ids, 1.0)
        return probs * mask, ids
'''
