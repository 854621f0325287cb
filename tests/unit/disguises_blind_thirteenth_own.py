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


@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))))
class OwnFlat(nn.Module):
    """Labels are flat before the head is asked."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(W, V, bias=False)

    def forward(self, h, target):
        flat = target.reshape(-1)
        logits = self.output(h)
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), flat)


@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S)).masked_fill(torch.arange(S) < 3, 0)))
class OwnPad(nn.Module):
    """The number of the padding is an argument, and how much is smoothed is written down."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(W, V)

    def forward(self, out, target, pad: int = 0):
        scores = self.generator(out)
        return F.cross_entropy(scores.view(-1, V), target.contiguous().view(-1), ignore_index=pad, label_smoothing=0.1)


@case("linear", lambda c: (c(), T(2, S, W)))
class OwnQuery(nn.Module):
    """A JAX port's: the weight's heads are first, and heads stand before tokens."""

    def __init__(self):
        super().__init__()
        self.q_einsum = nn.Parameter(torch.randn(H, W, D) / 8)

    def forward(self, x):
        return torch.einsum("BTD,NDH->BNTH", x, self.q_einsum)


@case("linear", lambda c: (c(), T(2, S, H, D)))
class OwnOut(nn.Module):
    """Back from heads, of a weight whose middle is the width."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, 40, D) / 8)

    def forward(self, x):
        return torch.einsum("bthd,hwd->btw", x, self.w)


@case("selective_scan", lambda c: (c(), T(2, 12, S), torch.rand(2, 12, S), T(2, 5, S), T(2, 5, S)))
class OwnScan(nn.Module):
    """A reference's: channels before tokens, tables of all tokens first, a state that is made as a matrix is."""

    def __init__(self):
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.rand(12, 5)), nn.Parameter(torch.rand(12))

    def forward(self, u, delta, B, C):
        A = -torch.exp(self.A_log)
        batch, dim, L = u.shape
        deltaA = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
        deltaB_u = torch.einsum("bdl,bnl,bdl->bdln", delta, B, u)
        x = A.new_zeros((batch, dim, 5))
        ys = []
        for i in range(L):
            x = deltaA[:, :, i] * x + deltaB_u[:, :, i]
            y = torch.einsum("bdn,bn->bd", x, C[:, :, i])
            ys.append(y)
        y = torch.stack(ys, dim=2)
        return y + u * self.D[:, None]


@case("gate_topk", lambda c: (c(), T(2, S, W)))
class OwnSingle(nn.Module):
    """One expert a token: a sigmoid of what is -inf but for it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, E, bias=False)

    def forward(self, hidden):
        logits = self.router(hidden.reshape(-1, W))
        top, ids = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, top)
        return torch.sigmoid(scores.float()).to(scores.dtype), ids
'''
