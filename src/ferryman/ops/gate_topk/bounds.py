"""What routing computes, and its error terms. Arguments are of one float dtype; bounds take float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
LEAST = 1e-20  # is added to a sum of sigmoids
U = 2.0**-24
FLUSH = 2.0**-126  # an exp of a large negative argument may flush to zero


def scored(x: Tensor, scoring: str) -> Tensor:
    return torch.softmax(x, -1) if scoring == "softmax" else _sigmoid(x)


def _sigmoid(x: Tensor) -> Tensor:
    """Autograd through it is the oracle of gradients: that of `torch.sigmoid`, s (1 - s), cancels, to 0 from x = 37 on
    in float64, where the slope is 1e-16. Here 1 / (1 + e) and e / (1 + e), whose slopes do not; each side's exp stays
    finite where the other one counts. NaN stays, in the slope too, which `clamp` would make 0."""
    above, below = torch.exp(-x.masked_fill(x < 0.0, 0.0)), torch.exp(x.masked_fill(x > 0.0, 0.0))
    return torch.where(x >= 0.0, 1 / (1 + above), below / (1 + below))


def ordered(values: Tensor) -> Tensor:
    """Indices, the largest value first; of equal ones the lowest index, NaN before all.

    On a GPU `sort` puts a NaN whose sign bit is set behind all numbers: see `unsigned_nan`.
    """
    return unsigned_nan(values).sort(stable=True, dim=-1, descending=True).indices


def unsigned_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), math.nan, values)


def compared(x: Tensor, scoring: str, bias: Tensor | None) -> Tensor:
    """What experts are compared by. Scores rise with logits, so that without a bias these are compared, unrounded."""
    return x if bias is None else scored(x, scoring) + bias


def group_scores(x: Tensor, scoring: str, bias: Tensor | None, n_group: int) -> Tensor:
    """(T, groups)."""
    if scoring == "softmax":
        return compared(x, scoring, bias).unflatten(-1, (n_group, -1)).amax(-1)
    score = scored(x, scoring) if bias is None else scored(x, scoring) + bias
    return unsigned_nan(score).unflatten(-1, (n_group, -1)).sort(-1, descending=True).values[..., :2].sum(-1)


def allowed(x: Tensor, scoring: str, bias: Tensor | None, n_group: int, topk_group: int) -> Tensor:
    """(T, E): whether an expert's group was chosen."""
    best = ordered(group_scores(x, scoring, bias, n_group))[:, :topk_group]
    groups = torch.zeros(len(x), n_group, dtype=torch.bool, device=x.device).scatter(1, best, True)
    return groups.repeat_interleave(x.shape[1] // n_group, 1)


def ranked(x: Tensor, scoring: str, bias: Tensor | None, n_group: int, topk_group: int) -> tuple[Tensor, Tensor | None]:
    """(experts in order, those of other groups last; whether a group was chosen, None without groups)."""
    order = ordered(compared(x, scoring, bias))
    if n_group == 1:
        return order, None
    inside = allowed(x, scoring, bias, n_group, topk_group)
    outside = (~inside.gather(1, order)).to(torch.int8)
    return order.gather(1, outside.sort(stable=True, dim=-1).indices), inside


def chosen(x: Tensor, k: int, scoring: str, bias: Tensor | None, n_group: int, topk_group: int) -> Tensor:
    """(T, k) experts, the best first."""
    return ranked(x, scoring, bias, n_group, topk_group)[0][:, :k]


def shares(x: Tensor, ids: Tensor, scoring: str, renormalise: bool) -> Tensor:
    """The weights of chosen experts, unscaled."""
    if scoring == "softmax" and renormalise:
        return torch.softmax(x.gather(1, ids), -1)
    scores = scored(x, scoring).gather(1, ids)
    return scores / (scores.sum(-1, keepdim=True) + LEAST) if renormalise else scores


def _relative(x: Tensor, scoring: str, of: Tensor) -> Tensor:
    """What a score is off by, in units of itself: exp's argument is rounded, scaled to base two with two roundings;
    8 for the rest. Of a softmax over ``of``, whose sum carries the mean of those, and 6 sqrt(n)."""
    if scoring == "sigmoid":
        return (2 * x.abs() * torch.sigmoid(-x) + 8).nan_to_num(8.0, posinf=8.0)
    top = of.amax(-1, keepdim=True)
    mean = (torch.softmax(of, -1) * 3 * (of - top).abs()).nan_to_num(0.0).sum(-1, keepdim=True)
    own = 3 * (x - top).abs() + mean + 6 * math.sqrt(of.shape[-1]) + 8
    return own.nan_to_num(0.0, posinf=0.0)  # an exp of -inf is 0


def forward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """Weights by their arithmetic. ids exactly, but where compared numbers lie within their errors of each other."""
    x, k, scoring, *_, renormalise, scale, _ = args
    weights, ids = outputs[0].abs(), outputs[1].long()
    if not len(x):
        return {"accumulate": weights}, {"absolute": weights}
    logits = x.gather(1, ids)
    relative = _relative(logits, scoring, logits if renormalise else x)
    flushed = torch.full_like(weights, 2 * FLUSH)
    if renormalise and scoring == "sigmoid":
        score = torch.sigmoid(logits)
        total = score.sum(-1, keepdim=True) + LEAST
        mean = (score * relative).sum(-1, keepdim=True) / total
        relative = relative + mean + 6 * math.sqrt(k) + 3
        flushed = flushed + FLUSH * (1 + k * score / total) / total
    moved, moved_ids = _either(args, ids)
    # what stands there in place of the oracle's has errors of its own
    worst = 2 * _relative(x, scoring, x).amax(-1, keepdim=True) + 6 * math.sqrt(k) + 5
    return (
        {
            "accumulate": weights * (relative + 2) + moved * abs(scale) * worst,
            "absolute": (flushed * abs(scale) + moved * abs(scale)).nan_to_num(0.0),
        },
        {"absolute": moved_ids},
    )


def _either(args: tuple, ids: Tensor) -> tuple[Tensor, Tensor]:
    """How far weights (unscaled) and ids may lie from the oracle's because another choice is as right.

    Two experts may change places where the numbers that they are compared by differ by less than both are off, but for
    those of equal logits and biases, which every arithmetic finds equal. Ranks that follow each other so form a
    cluster: at each of its ranks any of its experts may stand. Where one reaches beyond rank k, the chosen ones' sum
    moves by as many of its experts' differences as are inside. A token whose groups are as close may choose any expert.
    """
    x, k, scoring, bias, n_group, topk_group, renormalise, *_ = args
    still = torch.zeros(ids.shape, dtype=torch.float64, device=x.device), torch.zeros_like(ids, dtype=torch.float64)
    sums = n_group > 1 and scoring == "sigmoid"
    if bias is None and not sums:
        return still
    experts, score = x.shape[1], scored(x, scoring)
    number = score if bias is None else score + bias
    error = U * ((score * (_relative(x, scoring, x) + 1)).nan_to_num(0.0) + number.abs().nan_to_num(0.0)) + 2 * FLUSH
    most = error.amax(-1, keepdim=True)
    order, _ = ranked(x, scoring, bias, n_group, topk_group)
    spread, span = still
    if bias is not None:
        given = bias.expand_as(x).gather(1, order)
        value, by, own = (t.gather(1, order) for t in (score, number, x))
        near = by[:, :-1] - by[:, 1:] <= 2 * most
        if n_group > topk_group:  # the last expert of a chosen group, and the first of the others
            near[:, experts // n_group * topk_group - 1] = False
        same = (own[:, :-1] == own[:, 1:]) & (given[:, :-1] == given[:, 1:])
        first = torch.zeros_like(order[:, :1])
        cluster = torch.cat([first, (~near).long().cumsum(-1)], 1)
        loose = torch.zeros_like(by).scatter_add(1, cluster[:, 1:], (near & ~same).to(by.dtype)).gather(1, cluster) > 0
        high, low = (_of_cluster(value, cluster, kind) for kind in ("amax", "amin"))
        last, lowest = (_of_cluster(order.to(by.dtype), cluster, kind) for kind in ("amax", "amin"))
        spread = torch.where(loose, torch.maximum(high - value, value - low), 0.0)[:, :k]
        span = torch.where(loose, torch.maximum(last - order, order - lowest), 0.0)[:, :k]
        if renormalise:
            edge = (cluster[:, :k] == cluster[:, k : k + 1]) & loose[:, :k] if k < experts else loose[:, :k] & False
            turned = ((high - low)[:, :k] * edge).sum(-1, keepdim=True)
            total = score.gather(1, ids).sum(-1, keepdim=True)
            least = (total - turned).clamp(min=0.0) + LEAST
            spread = ((spread + value[:, :k] * turned / (total + LEAST)) / least).clamp(max=1.0)
    if n_group > 1:
        groups = group_scores(x, scoring, bias, n_group).sort(-1, descending=True).values
        if topk_group < n_group and (sums or bias is not None):
            gap = groups[:, topk_group - 1 : topk_group] - groups[:, topk_group : topk_group + 1]
            close = gap <= 4 * most + 2 * U * groups.abs().amax(-1, keepdim=True)
            spread, span = torch.where(close, 1.0, spread), torch.where(close, float(experts), span)
    return spread.nan_to_num(1.0), span.nan_to_num(float(experts))


def _of_cluster(value: Tensor, cluster: Tensor, kind: str) -> Tensor:
    reduced = torch.zeros_like(value).scatter_reduce(1, cluster, value, kind, include_self=False)
    return reduced.gather(1, cluster)


def gradient(
    grad: Tensor, x: Tensor, topk_ids: Tensor, scoring: str, renormalise: bool, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the gradient for logits; each expert's share, whether it was chosen, what comes to it, the mean of that, the
    divisor)."""
    experts = x.shape[1]
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < experts)
    place = torch.where(known, ids, experts)
    empty = x.new_zeros(len(x), experts + 1)
    above = empty.scatter_add(1, place, grad * scale)[:, :experts]
    there = empty.scatter(1, place, 1.0)[:, :experts] > 0
    divisor = torch.ones_like(x[:, :1])
    if scoring == "softmax":
        share = torch.softmax(x.masked_fill(~there, -math.inf) if renormalise else x, -1)
        if renormalise:  # a row that names no expert
            share = torch.where(there, share, 0.0)
        mean = torch.where(there, share * above, 0.0).sum(-1, keepdim=True)
        moved = share * (above - mean)
        return torch.where(there, moved, 0.0) if renormalise else moved, (share, there, above, mean, divisor)
    score = torch.sigmoid(x)
    slope = score * torch.sigmoid(-x)
    mean = torch.zeros_like(divisor)
    if renormalise:
        divisor = torch.where(there, score, 0.0).sum(-1, keepdim=True) + LEAST
        mean = torch.where(there, score * above, 0.0).sum(-1, keepdim=True) / divisor
    share = torch.where(there, slope / divisor, 0.0)
    return torch.where(there, slope * ((above - mean) / divisor), 0.0), (share, there, above, mean, divisor)


def backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """A share times the difference of what comes to it and the mean of that, which may cancel."""
    grad, x, topk_ids, scoring, renormalise, scale = args
    if not x.numel():
        return ({"accumulate": torch.zeros_like(x)},)
    k = topk_ids.shape[1]
    _, (share, there, above, mean, divisor) = gradient(grad, x, topk_ids, scoring, renormalise, scale)
    counted = torch.where(there, x, -math.inf) if scoring == "softmax" and renormalise else x
    relative = _relative(x, scoring, counted)
    weight = torch.sigmoid(x) / divisor if scoring == "sigmoid" else share
    magnitude = torch.where(there, weight * above.abs(), 0.0)
    if scoring == "sigmoid" and not renormalise:
        magnitude = torch.zeros_like(magnitude)
    of_mean = (magnitude * (relative + 6 * math.sqrt(k) + 8)).sum(-1, keepdim=True)
    if scoring == "sigmoid" and renormalise:
        worst = torch.where(there, relative, 0.0).amax(-1, keepdim=True) + 6 * math.sqrt(k) + 3
        relative = relative + worst  # the divisor's
        of_mean = of_mean + mean.abs() * worst
    # 1 - sigma is a sigmoid itself
    twice = 2 if scoring == "sigmoid" else 1
    moved = outputs[0].abs() * (twice * relative + 4) + share * (of_mean + above.abs() + mean.abs())
    absolute = 4 * FLUSH * (1 + above.abs() + mean.abs()) * (1 + 1 / divisor)
    if scoring == "sigmoid" or renormalise:  # the others' gradient is 0, whatever the row holds
        moved, absolute = (torch.where(there, term, 0.0) for term in (moved, absolute))
    return ({"accumulate": moved, "absolute": absolute},)
