"""Look-alikes of routers and losses, each with one fault, written without a look at the porting code."""

from __future__ import annotations

ROUTERS = r'''
W, E, K, V = 32, 8, 2, 70


# ---- routers
@alike(lambda c: (c(), T(9, E)))
class NotLargest(nn.Module):
    """The smallest logits."""

    def forward(self, logits):
        top, i = torch.topk(logits, K, dim=-1, largest=False)
        return torch.softmax(top, -1), i


@alike(lambda c: (c(), T(9, E)))
class NotFalling(nn.Module):
    """The best two, the better one last."""

    def forward(self, logits):
        values, order = torch.softmax(logits, -1).sort(dim=-1)
        w = values[:, -K:]
        return w / w.sum(-1, keepdim=True), order[:, -K:]


@alike(lambda c: (c(), T(9, E)), lambda: (T(9, E) * 4,))
class NotSigmoidWeights(nn.Module):
    """Chosen by sigmoids, weighted by shares of all."""

    def forward(self, logits):
        _, i = torch.topk(torch.sigmoid(logits), K, dim=-1)
        return torch.softmax(logits, -1).gather(-1, i) * 2.0, i


@alike(lambda c: (c(), T(9, W)), lambda: (T(9, W) * 0.1,))
class NotChoiceAlone(nn.Module):
    """The bias is in the weights as well."""

    def __init__(self):
        super().__init__()
        self.gate, self.correction = nn.Linear(W, E, bias=False), nn.Parameter(torch.linspace(-0.3, 0.3, E))

    def forward(self, x):
        s = torch.sigmoid(self.gate(x)) + self.correction
        w, i = torch.topk(s, K, dim=-1)
        return w / (w.sum(-1, keepdim=True) + 1e-20), i


@alike(lambda c: (c(), T(9, E)))
class NotOfChosen(nn.Module):
    """Divided by the sum of all sigmoids."""

    def forward(self, logits):
        s = torch.sigmoid(logits.float())
        w, i = torch.topk(s, K, dim=-1)
        return w / (s.sum(-1, keepdim=True) + 1e-20), i


@alike(lambda c: (c(), T(9, W)))
class NotWithoutNoise(nn.Module):
    """Noise in training, as large as a second matrix says."""

    def __init__(self):
        super().__init__()
        self.gate, self.noise = nn.Linear(W, E, bias=False), nn.Linear(W, E, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, i = logits.topk(K, dim=-1)
        return F.softmax(top, dim=-1), i


@alike(lambda c: (c(), T(9, E)))
class NotOverExperts(nn.Module):
    """Shares of an expert's tokens."""

    def forward(self, logits):
        p = torch.softmax(logits, dim=0)
        w, i = p.topk(K, dim=-1)
        return w / w.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(9, E)), lambda: (T(9, E) - 9.0,))
class NotLittleAdded(nn.Module):
    """A hundredth is added to the sum of the chosen sigmoids."""

    def forward(self, logits):
        w, i = torch.topk(logits.sigmoid(), K, dim=-1)
        return w / (w.sum(-1, keepdim=True) + 1e-2), i


@alike(lambda c: (c(), T(9, E)))
class NotOnce(nn.Module):
    """Shares of shares."""

    def forward(self, logits):
        w, i = torch.topk(torch.softmax(logits.float(), -1), K, dim=-1)
        return torch.softmax(w, dim=-1), i


@alike(lambda c: (c(), T(9, W)))
class NotFirst(nn.Module):
    """The best is left out."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(W, E, bias=False)

    def forward(self, x):
        p = torch.softmax(self.gate(x), dim=-1)
        w, i = torch.topk(p, K + 1, dim=-1)
        w, i = w[:, 1:], i[:, 1:]
        return w / w.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(9, E)), lambda: (T(9, E) * 20.0,), lambda: (torch.arange(72.0).reshape(9, E),))
class NotUnclamped(nn.Module):
    """Logits have a most and a least value."""

    def forward(self, logits):
        p = logits.clamp(-5.0, 5.0).softmax(-1)
        w, i = p.topk(K, dim=-1)
        return w / w.sum(-1, keepdim=True), i


@alike(lambda c: (c(), T(9, E)))
class NotWholeRow(nn.Module):
    """The last expert is never chosen, and counts."""

    def forward(self, logits):
        p = logits.softmax(-1)
        w, i = p[:, :-1].topk(K, dim=-1)
        return w / w.sum(-1, keepdim=True), i


# ---- losses
@alike(lambda c: (c(), T(2, 6, V), torch.randint(V, (2, 6))))
class NotMeanSmoothed(nn.Module):
    """What is smoothed is a sum over classes."""

    def forward(self, logits, labels, smoothing=0.1):
        logp = torch.log_softmax(logits.view(-1, V), dim=-1)
        own = logp.gather(1, labels.view(-1, 1)).squeeze(1)
        return -((1.0 - smoothing) * own + smoothing * logp.sum(dim=-1)).mean()


@alike(lambda c: (c(), T(2, 6, V), torch.randint(V, (2, 6))))
class NotCountOfShifted(nn.Module):
    """The sum is divided by how many labels there were before the shift."""

    def forward(self, logits, labels):
        shifted = logits[:, :-1].reshape(-1, logits.size(-1))
        return F.cross_entropy(shifted, labels[:, 1:].reshape(-1), reduction="sum") / labels.numel()
'''
