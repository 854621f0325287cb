"""Softmax and cross entropy over the last dimension: meaning and error terms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, public, wide

FLUSH = 2.0**-126  # exp of a far smaller logit may flush to zero


def _exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, relative error of its numerators and sum in units of u): 3|x - m| for the argument, 6 sqrt(n) + 8."""
    p = torch.softmax(x, -1)
    distance = 3 * (x - x.amax(-1, keepdim=True)).abs()
    return p, distance + (p * distance).nansum(-1, keepdim=True) + 6 * math.sqrt(max(x.shape[-1], 1)) + 8


def _softmax_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    (x,) = args
    if x.numel() == 0:
        return ({"accumulate": x},)
    p, relative = _exponent(x)
    relative = torch.where(p == 0, torch.zeros_like(p), relative)
    return ({"accumulate": p * relative, "absolute": torch.full_like(p, FLUSH)},)


def _softmax_gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    grad, y = args
    inner, p = (grad * y).abs().sum(-1, keepdim=True), y.abs()
    terms = p * (inner * (6 * math.sqrt(max(y.shape[-1], 1)) + 4) + 4 * grad.abs())
    return ({"accumulate": terms, "storage": p * (grad.abs() + 2 * inner)},)


def _check_softmax(op: str, **tensors: Tensor) -> None:
    checks.one_device(op, **tensors)
    checks.floating(op, **tensors)
    checks.at_least_1d(op, **tensors)
    checks.same_shape(op, **tensors)


@primitive(
    outputs=("y",),
    check=lambda x: _check_softmax("softmax", x=x),
    meta=lambda x: x.new_empty(x.shape),
    cost=lambda x: Cost(5.0 * x.numel(), 2.0 * x.numel() * x.element_size()),
    limits=Limits(bound=_softmax_bound, batch={"x": 1, "y": 1}, reduction=lambda x: x.shape[-1]),
    gradient=Gradient(backward="softmax_backward", grads=("x",)),
    lower="definition",
    autocast=("fp32", "aten::softmax.int"),
)
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, shifted by the row's maximum.

    x: (..., N), float32, float16 or bfloat16, any strides. Returns (..., N), contiguous, in x's dtype; float32
    arithmetic, one rounding. A row of -inf alone, or with NaN or +inf in it, gives NaN, as in torch.
    Raises ArgumentError.
    """
    return torch.softmax(wide(x), -1).to(x.dtype)


@primitive(
    outputs=("grad_x",),
    check=lambda grad, y: _check_softmax("softmax_backward", grad=grad, y=y),
    meta=lambda grad, y: y.new_empty(y.shape),
    cost=lambda grad, y: Cost(4.0 * y.numel(), 3.0 * y.numel() * y.element_size()),
    limits=Limits(
        bound=_softmax_gradient_bound, batch={"grad": 1, "y": 1, "grad_x": 1}, reduction=lambda grad, y: y.shape[-1]
    ),
)
def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Gradient of `softmax` from its result: ``y * (grad - sum(grad * y))``."""
    g, p = wide(grad), wide(y)
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


def _loss_parts(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(float rows, lse, target's logit or NaN where out of range, rows that count)."""
    x = wide(logits)
    counted = target != ignore_index
    valid = (target >= 0) & (target < x.shape[-1])
    picked = x.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
    return x, torch.logsumexp(x, -1), torch.where(valid, picked, math.nan), counted


def _lse_error(x: Tensor) -> Tensor:
    """Absolute error of a row's log-sum-exp in units of u."""
    p, relative = _exponent(x)
    return torch.logsumexp(x, -1).abs() * 2 + x.amax(-1).abs() + torch.where(p > 0, p * relative, 0.0).sum(-1)


def _loss_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    logits, target, ignore_index, smoothing = args
    if logits.numel() == 0:
        return {"accumulate": torch.zeros_like(outputs[0])}, {"accumulate": torch.zeros_like(outputs[1])}
    x, lse, picked, counted = _loss_parts(logits, target, ignore_index)
    lse_error = _lse_error(x)
    row = lse_error + 2 * (lse.abs() + picked.abs())
    if smoothing:
        row = row + smoothing * (6 * math.sqrt(x.shape[-1]) + 4) * (x.abs().mean(-1) + lse.abs())
    n = counted.sum()
    row = torch.where(counted, row + (lse.abs() + picked.abs()) * 6 * torch.sqrt(n.double()), 0.0)
    return {"accumulate": row.sum() / n}, {"accumulate": lse_error}


def _loss_gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    grad, logits, target, lse, ignore_index, _ = args
    if logits.numel() == 0:
        return ({"accumulate": logits},)
    counted = (target != ignore_index).unsqueeze(-1)
    n = counted.sum()
    p = torch.exp(logits - lse.unsqueeze(-1))
    error = p * (3 * (logits - lse.unsqueeze(-1)).abs() + 4 + lse.abs().unsqueeze(-1))
    error = torch.where(p > 0, error, 0.0)
    scale = grad.abs() / n
    total = scale * (error + 3) * 1.0 + 4 * outputs[0].abs()
    # where no row counts the scale is infinite, and every gradient exactly 0
    flush = torch.where(counted, scale * FLUSH, 0.0).expand_as(p)
    return ({"accumulate": torch.where(counted, total, 0.0), "absolute": flush},)


def _check_loss(op: str, logits: Tensor, target: Tensor, smoothing: float, **others: Tensor) -> None:
    checks.one_device(op, logits=logits, target=target, **others)
    checks.floating(op, logits=logits)
    checks.at_least_1d(op, logits=logits)
    if target.dtype != torch.int64:
        raise ArgumentError(op, "target.dtype", target.dtype, "torch.int64")
    checks.shaped(op, "target", target, *logits.shape[:-1])
    if logits.shape[-1] == 0:
        raise ArgumentError(op, "logits.shape[-1]", 0, "at least one class")
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError(op, "label_smoothing", smoothing, "a number in [0, 1]")


def _float32(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


@primitive(
    name="cross_entropy",
    outputs=("loss", "lse"),
    check=lambda logits, target, ignore_index, label_smoothing: _check_loss(
        "cross_entropy", logits, target, label_smoothing
    ),
    meta=lambda logits, target, ignore_index, label_smoothing: (
        logits.new_empty((), dtype=_float32(logits)),
        logits.new_empty(target.shape, dtype=_float32(logits)),
    ),
    cost=lambda logits, target, ignore_index, label_smoothing: Cost(
        5.0 * logits.numel(), float(logits.numel() * logits.element_size() + 12 * target.numel())
    ),
    limits=Limits(
        bound=_loss_bound,
        batch={"logits": 1, "target": 0, "lse": 0},
        reduction=lambda logits, target, *rest: max(logits.shape[-1], target.numel()),
    ),
    dtypes={"target": (torch.int64,)},
    gradient=Gradient(backward="cross_entropy_backward", grads=("logits",), nondifferentiable=("lse",)),
    autocast=("fp32", "aten::nll_loss"),
)
def cross_entropy_with_lse(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, with each row's natural log-sum-exp (float32, target's shape) beside the loss."""
    return _mean_loss(logits, target, ignore_index, label_smoothing)


def _mean_loss(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    x, lse, picked, counted = _loss_parts(logits, target, ignore_index)
    row = lse - picked
    if label_smoothing:
        row = (1 - label_smoothing) * row + label_smoothing * (lse - x.mean(-1))
    loss = torch.where(counted, row, 0.0).sum() / counted.sum()
    return loss.to(_float32(logits)), lse.to(_float32(logits))


@public(cross_entropy_with_lse)
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of class indices; reads the logits once and leaves them as they are.

    logits: (..., V), float32, float16 or bfloat16, any strides. target: (...), int64, class indices. Rows whose target
    is ``ignore_index`` do not count. label_smoothing in [0, 1] mixes in the uniform distribution, as in torch.
    Returns a float32 scalar whatever the logits' dtype; NaN when no row counts, or when a target that counts lies
    outside [0, V). Raises ArgumentError.
    """
    loss, _ = cross_entropy_with_lse(logits, target, ignore_index, label_smoothing)
    return loss


@primitive(
    outputs=("grad_logits",),
    check=lambda grad, logits, target, lse, ignore_index, label_smoothing: _check_loss(
        "cross_entropy_backward", logits, target, label_smoothing, grad=grad, lse=lse
    ),
    meta=lambda grad, logits, target, lse, ignore_index, label_smoothing: logits.new_empty(logits.shape),
    cost=lambda grad, logits, target, lse, ignore_index, label_smoothing: Cost(
        4.0 * logits.numel(), 2.0 * logits.numel() * logits.element_size()
    ),
    limits=Limits(
        bound=_loss_gradient_bound,
        batch="every gradient is divided by the number of rows that count",
        reduction=lambda grad, logits, *rest: 1,
    ),
)
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Gradient of `cross_entropy` for its logits: ``grad / count * (softmax - smoothed one-hot)``, 0 where ignored."""
    return _loss_gradient(grad, logits, target, lse, ignore_index, label_smoothing)


def _loss_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    x, _, _, counted = _loss_parts(logits, target, ignore_index)
    classes = x.shape[-1]
    p = torch.exp(x - lse.unsqueeze(-1).to(x.dtype))
    hot = torch.arange(classes, device=x.device) == target.unsqueeze(-1)
    d = p - (1 - label_smoothing) * hot.to(x.dtype) - label_smoothing / classes
    d = torch.where(((target < 0) | (target >= classes)).unsqueeze(-1), math.nan, d)
    scale = grad.to(x.dtype) / counted.sum()
    return torch.where(counted.unsqueeze(-1), d * scale, 0.0).to(logits.dtype)


# ------------------------------------------------------------------------------- its gradient, over the logits


def _over_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """The loss's own terms; in the gradient's, the log-sum-exp is no longer given but has the forward's error."""
    logits, target, ignore_index, smoothing = args
    loss, lse = _loss_bound(args, outputs)
    one = torch.ones((), dtype=logits.dtype, device=logits.device)
    (gradient,) = _loss_gradient_bound((one, logits, target, outputs[1], ignore_index, smoothing), outputs[2:])
    if logits.numel() == 0:
        return loss, lse, gradient
    counted = (target != ignore_index).unsqueeze(-1)
    p = torch.exp(logits - outputs[1].unsqueeze(-1))
    moved = torch.where(counted & (p > 0), p * lse["accumulate"].unsqueeze(-1) / counted.sum(), 0.0)
    return loss, lse, {**gradient, "accumulate": gradient["accumulate"] + moved}


def _check_over(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> None:
    _check_loss("cross_entropy_inplace_grad", logits, target, label_smoothing)
    checks.writable("cross_entropy_inplace_grad", logits=logits)


@primitive(
    name="cross_entropy_inplace_grad",
    outputs=("loss", "lse", "logits"),
    check=_check_over,
    meta=lambda logits, target, ignore_index, label_smoothing: (
        logits.new_empty((), dtype=_float32(logits)),
        logits.new_empty(target.shape, dtype=_float32(logits)),
        logits.new_empty_strided(logits.shape, logits.stride()),
    ),
    cost=lambda logits, target, ignore_index, label_smoothing: Cost(
        9.0 * logits.numel(), float(2 * logits.numel() * logits.element_size() + 12 * target.numel())
    ),
    limits=Limits(
        bound=_over_bound,
        batch="the loss and every gradient are divided by the number of rows that count",
        reduction=lambda logits, target, *rest: max(logits.shape[-1], target.numel()),
    ),
    dtypes={"target": (torch.int64,)},
    gradient=Gradient(
        backward="cross_entropy_inplace_grad_backward", grads=("logits",), nondifferentiable=("lse", "logits")
    ),
    mutates={"logits": "logits"},
)
def cross_entropy_with_gradient(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """What `cross_entropy_inplace_grad` computes: the loss, each row's log-sum-exp, and what becomes of the logits."""
    loss, lse = _mean_loss(logits, target, ignore_index, label_smoothing)
    one = torch.ones((), dtype=lse.dtype, device=lse.device)
    return loss, lse, _loss_gradient(one, logits, target, lse, ignore_index, label_smoothing).detach()


@public(cross_entropy_with_gradient)
def cross_entropy_inplace_grad(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """`cross_entropy` that computes its gradient at once and writes it over the logits: no second matrix of their size.

    Arguments and result as `cross_entropy`'s; the elements of logits share no memory. Afterwards **logits hold
    d loss / d logits** in their own dtype: whoever reads them again reads the gradient, as a constant that nothing
    flows back through, and PyTorch refuses the backward of an earlier op that had kept them. A leaf that requires grad
    is refused. ``loss.backward()`` multiplies them by the loss's gradient, in place and without a synchronisation, and
    hands that very memory to autograd: it can be done once, and logits must not be written to before it, nor
    another view of their memory: parts of one tensor, one after the other, are refused. Autocast
    leaves the logits as they are: a copy in another dtype would get the gradient.
    Raises ArgumentError; the backward FerrymanError.
    """
    loss, _, _ = cross_entropy_with_gradient(logits, target, ignore_index, label_smoothing)
    return loss


def _check_scaled(grad: Tensor, out_logits: Tensor) -> None:
    op = "cross_entropy_inplace_grad_backward"
    checks.one_device(op, grad=grad, out_logits=out_logits)
    checks.floating(op, grad=grad, out_logits=out_logits)
    checks.shaped(op, "grad", grad)
    checks.writable(op, out_logits=out_logits)


@primitive(
    outputs=("grad_logits",),
    check=_check_scaled,
    meta=lambda grad, out_logits: out_logits.new_empty_strided(out_logits.shape, out_logits.stride()),
    cost=lambda grad, out_logits: Cost(float(out_logits.numel()), 2.0 * out_logits.numel() * out_logits.element_size()),
    limits=Limits(
        bound=lambda args, outputs: ({"accumulate": outputs[0].abs(), "absolute": torch.full_like(outputs[0], FLUSH)},),
        reduction=lambda grad, out_logits: 1,
        batch={"out_logits": 1, "grad_logits": 1},
    ),
    lower="definition",
    mutates={"out_logits": "grad_logits"},
)
def cross_entropy_inplace_grad_backward(grad: Tensor, out_logits: Tensor) -> Tensor:
    """Gradient of `cross_entropy_inplace_grad` for its logits: what it left there times the loss's gradient, in place.

    A gradient of 1 moves nothing.
    """
    return (wide(out_logits) * grad.to(wide(out_logits).dtype)).to(out_logits.dtype)
