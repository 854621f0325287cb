# ruff: noqa: E501
"""What the fifteenth set's mending takes beside: the same mechanisms in other modules."""

from __future__ import annotations

FIFTEENTH_OWN = r'''
W, H, D, S, V, E, K, I = 64, 8, 8, 11, 70, 5, 2, 24


# ---- rows of a length of ours, of as many as there are
@case("rms_norm", lambda c: (c(), T(2, S, W)))
class FoRows(nn.Module):
    """Each head's columns are a row of a norm, and what follows reads them as they were."""

    def __init__(self, width=16):
        super().__init__()
        self.width, self.weight, self.out = width, nn.Parameter(torch.rand(width) + 0.5), nn.Linear(W, W)

    def forward(self, x):
        h = x.view(*x.shape[:-1], -1, self.width)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return self.out(h.flatten(-2))


@case("layer_norm", lambda c: (c(), T(2, S, W)))
class FoRowsAlone(nn.Module):
    """Such a norm and nothing else."""

    def __init__(self, width=16):
        super().__init__()
        self.width = width
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def norm(self, h):
        h = h - h.mean(-1, keepdim=True)
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias

    def forward(self, x):
        return self.norm(x.reshape(-1, self.width)).reshape(x.shape)


# ---- what ends with its result: sides of a choice read their own locals
@case("gated_delta_rule", lambda c: (c(), T(2, S, 3, 8), T(2, S, 3, 8), T(2, S, 3, 6), T(2, S, 3), T(2, S, 3)))
class FoOptional(nn.Module):
    """A rule with a state and a scale that a caller may give, and names that are used again."""

    def forward(self, q, k, v, g, beta, scale=None, initial_state=None):
        k, g, beta = F.normalize(k, dim=-1), -F.softplus(g), torch.sigmoid(beta)
        q, k, v, g, beta = [t.transpose(1, 2) for t in (q, k, v, g, beta)]
        b, h, n, d = k.shape
        if scale is None:
            scale = d**-0.5
        if initial_state is None:
            state = torch.zeros(b, h, d, v.shape[-1]).to(v)
        else:
            state = initial_state
        out = torch.zeros_like(v)
        for i in range(n):
            state = state * g[:, :, i].exp()[..., None, None]
            delta = (v[:, :, i] - (state * k[:, :, i][..., None]).sum(-2)) * beta[:, :, i][..., None]
            state = state + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
            out[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i] * scale, state)
        return out.transpose(1, 2)


@case("layer_norm", lambda c: (c(), T(2, S, W)))
class FoSides(nn.Module):
    """Both sides of a choice use one name for steps of their own, and each ends with its result."""

    def __init__(self, width=W):
        super().__init__()
        self.weight, self.bias, self.out = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(width)), nn.Linear(W, W)

    def forward(self, x, residual=None):
        if residual is None:
            h = x - x.mean(-1, keepdim=True)
            v = h.pow(2).mean(-1, keepdim=True)
            h = h / torch.sqrt(v + 1e-5) * self.weight + self.bias
            return self.out(h)
        else:
            h = x + residual
            v = h.amax(-1, keepdim=True)
            return self.out(h / v)


# ---- a loss whose code says how many classes there are
@case("cross_entropy", lambda c: (c(), T(3, 5, V), torch.randint(V, (3, 5))))
class FoClasses(nn.Module):
    """The log of a sum, and each row's own logit, of logits that are seen as a matrix of so many columns."""

    def forward(self, logits, labels):
        flat = logits.reshape(-1, V).float()
        return (torch.logsumexp(flat, dim=-1) - flat.gather(-1, labels.reshape(-1, 1)).squeeze(-1)).mean()


@case("cross_entropy", lambda c: (c(), T(4, 3, V), torch.randint(V, (4, 3))))
class FoClassesNll(nn.Module):
    """PyTorch's loss of a log softmax, of as many classes as a setting says."""

    def __init__(self, vocab=V):
        super().__init__()
        self.vocab = vocab

    def forward(self, logits, labels):
        logp = F.log_softmax(logits.view(-1, self.vocab), dim=-1)
        return F.nll_loss(logp, labels.view(-1))


# ---- a head and a loss with the square of each row's log-sum-exp
@case("linear_cross_entropy", lambda c: (c(), T(2, S, W), torch.randint(V, (2, S))))
class FoSquares(nn.Module):
    """Logits of three sides, of a layer with a bias; a power of the sums, and PaLM's factor."""

    def __init__(self, z_loss=1e-4):
        super().__init__()
        self.lm_head, self.z_loss = nn.Linear(W, V), z_loss

    def forward(self, hidden, labels):
        logits = self.lm_head(hidden)
        log_z = torch.logsumexp(logits, -1)
        ce = (log_z - torch.gather(logits, -1, labels[..., None]).squeeze(-1)).mean()
        z = (log_z**2).mean()
        return ce + self.z_loss * z


@case("linear_cross_entropy", lambda c: (c(), T(14, W), torch.randint(V, (14,))))
class FoTiedSquares(nn.Module):
    """A product with a table of words; one mean of both terms."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(V, W) / 8)

    def forward(self, h, y):
        logits = F.linear(h, self.table).float()
        lse = logits.logsumexp(dim=-1)
        own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
        return torch.mean(lse - own + 2e-3 * lse.pow(2))
'''
