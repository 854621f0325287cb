"""Cross entropy of a projection whose logits are never whole: meaning and error terms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, Rounding, primitive, public, wide

ROUNDED_LOGITS = Rounding("logits", "a block of logits is rounded to the storage dtype")
ROUNDED_SLOPE = Rounding("slope", "a block of the logits' gradient is rounded to the storage dtype")


def _check(
    op: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    smoothing: float,
    z_loss: float,
    **others: Tensor,
) -> None:
    floats = {"x": x, "weight": weight, "bias": bias}
    checks.one_device(op, **floats, target=target, **others)
    checks.floating(op, **floats)
    checks.same_dtype(op, **floats)
    checks.at_least_1d(op, x=x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(op, "weight.shape", tuple(weight.shape), f"(V, {x.shape[-1]}), to match x {tuple(x.shape)}")
    if weight.shape[0] == 0:
        raise ArgumentError(op, "weight.shape[0]", 0, "at least one class")
    checks.shaped(op, "bias", bias, weight.shape[0])
    if target.dtype != torch.int64:
        raise ArgumentError(op, "target.dtype", target.dtype, "torch.int64")
    checks.shaped(op, "target", target, *x.shape[:-1])
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError(op, "label_smoothing", smoothing, "a number in [0, 1]")
    checks.non_negative(op, z_loss=z_loss)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = _flat(wide(x)) @ wide(weight).T
    return z if bias is None else z + wide(bias)


def _kind(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _picked(z: Tensor, target: Tensor) -> Tensor:
    valid = (target >= 0) & (target < z.shape[-1])
    return torch.where(valid, z.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1), math.nan)


def _cost(x: Tensor, weight: Tensor, products: int) -> Cost:
    moved = (x.numel() + weight.numel()) * x.element_size()
    return Cost(2.0 * products * x.numel() * weight.shape[0], float(moved * (1 if products == 1 else 2)))


def _logit_error(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor) -> Tensor:
    """6 sqrt(K) |x| @ |W| (Higham & Mary 2019) and the bias's addition, in units of u."""
    error = (6 * math.sqrt(max(x.shape[-1], 1)) + 1) * (_flat(x).abs() @ weight.abs().T)
    return error if bias is None else error + bias.abs() + z.abs()


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """An error of the logits moves the log-sum-exp by its mean under the softmax, to first order; 2 covers the rest
    while it is below 1. exp errs by 3 |z - lse| + 4 of each term, sums by 6 sqrt(V), block by block and over blocks."""
    x, weight, target, bias, ignore_index, smoothing, z_loss = args
    loss, lse_out = outputs
    if target.numel() == 0:
        return {"accumulate": torch.zeros_like(loss)}, {"accumulate": torch.zeros_like(lse_out)}
    target, z = target.reshape(-1), _logits(x, weight, bias)
    lse, picked, counted = torch.logsumexp(z, -1), _picked(z, target), target != ignore_index
    p, error, root = torch.softmax(z, -1), _logit_error(x, weight, bias, z), 6 * math.sqrt(z.shape[-1]) + 8
    off = 6 * (z - lse.unsqueeze(-1)).abs() + 2 * error
    lse_error = torch.where(p > 0, p * off, 0.0).sum(-1) + 2 * root + 4 * (lse.abs() + z.amax(-1).abs())
    lse_moved = 2 * torch.where(p > 0, p * z.abs(), 0.0).sum(-1)
    hot = _picked(error, target) + 2 * (lse.abs() + picked.abs())
    slope = 1 + 2 * z_loss * lse.abs()
    row = slope * lse_error + hot + 4 * z_loss * lse.square()
    moved = slope * lse_moved + picked.abs()
    if smoothing:
        mean = z.abs().mean(-1)
        row = row + smoothing * (root * (mean + lse.abs()) + error.mean(-1))
        moved = moved + smoothing * mean
    n = counted.sum()
    row = row + 6 * torch.sqrt(n.double()) * (lse.abs() + picked.abs() + z_loss * lse.square())
    each = {"accumulate": row, "logits": moved}
    means = {name: torch.where(counted, term, 0.0).sum() / n for name, term in each.items()}
    rows = {"accumulate": lse_error, "logits": lse_moved}
    return means, {name: term.reshape(lse_out.shape) for name, term in rows.items()}


@primitive(
    name="linear_cross_entropy",
    outputs=("loss", "lse"),
    check=lambda x, weight, target, bias, ignore_index, label_smoothing, z_loss: _check(
        "linear_cross_entropy", x, weight, target, bias, label_smoothing, z_loss
    ),
    meta=lambda x, weight, target, *rest: (
        x.new_empty((), dtype=_kind(x)),
        x.new_empty(target.shape, dtype=_kind(x)),
    ),
    cost=lambda x, weight, *rest: _cost(x, weight, 1),
    limits=Limits(
        bound=_bound,
        roundings=(ROUNDED_LOGITS,),
        batch={"x": 1, "target": 0, "lse": 0},
        reduction=lambda x, weight, target, *rest: max(x.shape[-1], weight.shape[0], target.numel()),
    ),
    gradient=Gradient(
        backward="linear_cross_entropy_backward", grads=("x", "weight", "bias"), nondifferentiable=("lse",)
    ),
    autocast=("low", "aten::linear"),
    dtypes={"target": (torch.int64,)},
)
def linear_cross_entropy_with_lse(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy`, with each row's natural log-sum-exp (float32, target's shape) beside the loss."""
    z, flat = _logits(x, weight, bias), target.reshape(-1)
    lse, counted = torch.logsumexp(z, -1), flat != ignore_index
    # a target outside makes the loss NaN, and every element of its row's gradient
    wrong = counted & ((flat < 0) | (flat >= z.shape[-1]))
    row = lse * torch.where(wrong, math.nan, 1.0) - _picked(z, flat)
    if label_smoothing:
        row = (1 - label_smoothing) * row + label_smoothing * (lse - z.mean(-1))
    if z_loss:
        row = row + z_loss * lse.square()
    loss = torch.where(counted, row, 0.0).sum() / counted.sum()
    return loss.to(_kind(x)), lse.to(_kind(x)).reshape(target.shape)


@public(linear_cross_entropy_with_lse)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Mean cross entropy of the logits ``x @ weight.T + bias``, which exist in blocks of the vocabulary alone.

    x: (..., K), float32, float16 or bfloat16, any strides. weight: (V, K), bias: (V,) or None, both in x's dtype.
    target: (...), int64, class indices. Rows whose target is ``ignore_index`` do not count. label_smoothing in [0, 1]
    mixes in the uniform distribution. z_loss >= 0 adds z_loss times the square of each row's log-sum-exp.
    Returns a float32 scalar; NaN when no row counts, or when a target that counts lies outside [0, V): nothing outside
    is read, and the gradient of that row is NaN. The forward keeps each row's log-sum-exp; the backward computes the
    logits again, block by block: a weight's gradient is whole within a block. Raises ArgumentError.
    """
    loss, _ = linear_cross_entropy_with_lse(x, weight, target, bias, ignore_index, label_smoothing, z_loss)
    return loss


def _steep(p: Tensor, lse: Tensor, z_loss: float) -> Tensor:
    """p, whose slope z_loss adds to: without it an infinite log-sum-exp does not count."""
    return p * (1 + 2 * z_loss * lse) if z_loss else p


def _slope(
    z: Tensor, target: Tensor, lse: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """(gradient of each row's loss for its logits, rows that count)."""
    classes, counted = z.shape[-1], (target != ignore_index).unsqueeze(-1)
    lse = lse.to(z.dtype).unsqueeze(-1)
    hot = torch.arange(classes, device=z.device) == target.unsqueeze(-1)
    d = _steep(torch.exp(z - lse), lse, z_loss) - (1 - smoothing) * hot.to(z.dtype) - smoothing / classes
    d = torch.where(((target < 0) | (target >= classes)).unsqueeze(-1), math.nan, d)
    return torch.where(counted, d, 0.0), counted


def _scale(grad: Tensor, counted: Tensor) -> Tensor:
    """The loss's gradient for each row that counts; 0 where none does."""
    n = counted.sum()
    return torch.where(n > 0, grad / n.clamp(min=1), 0.0)


def _gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """The slope's own error goes through the products; they err by 6 sqrt of their depth, round each block's part, and
    are scaled afterwards. A slope that is rounded may be subnormal, and so may a block's part: float16 holds them times
    a power of two, at least 1 / sqrt(2 rows). The saved log-sum-exp is as far off as logits that the forward may round.
    """
    grad, x, weight, target, bias, lse, ignore_index, smoothing, z_loss, need_x, need_weight = args
    target, lse, z = target.reshape(-1), lse.reshape(-1), _logits(x, weight, bias)
    d, counted = _slope(z, target, lse, ignore_index, smoothing, z_loss)
    scale, inputs, rows = _scale(grad, counted).abs(), _flat(x).abs(), len(z)
    p = _steep(torch.exp(z - lse.unsqueeze(-1)), lse.abs().unsqueeze(-1), z_loss)
    error = 3 * (z - lse.unsqueeze(-1)).abs() + 8 + 2 * lse.abs().unsqueeze(-1) + 2 * _logit_error(x, weight, bias, z)
    hot = (torch.arange(z.shape[-1], device=z.device) == target.unsqueeze(-1)).to(z.dtype)
    own = torch.where(counted, torch.where(p > 0, p * error, 0.0) + 3 * hot + smoothing / z.shape[-1], 0.0)
    moved = torch.where(counted & (p > 0), 2 * p * z.abs(), 0.0)
    saved = p * moved.sum(-1, keepdim=True)
    d, flush = d.abs(), counted.to(z.dtype).expand_as(d) * (2.0 * math.sqrt(max(rows, 1)))

    # what half a step of a subnormal block's part becomes; of x all parts are added, each of 128 classes or more
    part = scale * math.sqrt(max(rows, 1) / 2)

    def through(left: bool, other: Tensor, depth: int) -> dict[str, Tensor]:
        def times(term: Tensor) -> Tensor:
            return scale * ((term if left else term.T) @ other)

        size = times(d)
        return {
            "accumulate": times(own) + (6 * math.sqrt(max(depth, 1)) + 6) * size,
            "logits": times(moved),
            "storage": times(saved),
            "slope": size,
            "slope_flush": times(flush) + part * (1 + depth / 128 if left else 1),
            "split-k": 2 * size,
            "absolute": torch.full_like(size, 2.0**-126),
        }

    empty = {"accumulate": x.new_empty(0)}
    terms = [through(True, weight.abs(), z.shape[-1]) if need_x else empty]
    terms[0] = {name: term.reshape(x.shape) for name, term in terms[0].items()} if need_x else empty
    terms.append(through(False, inputs, rows) if need_weight else empty)
    if bias is None:
        return (*terms, empty)
    sums = through(False, inputs.new_ones(rows, 1), rows)
    return (*terms, {name: term.squeeze(-1) for name, term in sums.items()})


@primitive(
    outputs=("grad_x", "grad_weight", "grad_bias"),
    check=lambda grad, x, weight, target, bias, lse, ignore_index, label_smoothing, z_loss, need_x, need_weight: _check(
        "linear_cross_entropy_backward", x, weight, target, bias, label_smoothing, z_loss, grad=grad, lse=lse
    ),
    meta=lambda grad, x, weight, target, bias, lse, ignore_index, label_smoothing, z_loss, need_x, need_weight: (
        x.new_empty(x.shape if need_x else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
    cost=lambda grad, x, weight, *rest: _cost(x, weight, 1 + rest[-2] + rest[-1]),
    limits=Limits(
        bound=_gradient_bound,
        roundings=(ROUNDED_LOGITS, ROUNDED_SLOPE),
        batch="every gradient is divided by the number of rows that count",
        reduction=lambda grad, x, weight, target, *rest: max(x.shape[-1], weight.shape[0], target.numel()),
    ),
)
def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `linear_cross_entropy` from each row's log-sum-exp; an empty tensor where not needed or no bias."""
    z = _logits(x, weight, bias)
    d, counted = _slope(z, target.reshape(-1), lse.reshape(-1), ignore_index, label_smoothing, z_loss)
    scale = _scale(grad.to(z.dtype), counted)
    return (
        (d @ wide(weight) * scale).to(x.dtype).reshape(x.shape) if need_x else x.new_empty(0),
        (d.T @ _flat(wide(x)) * scale).to(weight.dtype) if need_weight else weight.new_empty(0),
        x.new_empty(0) if bias is None else (d.sum(0) * scale).to(bias.dtype),
    )
