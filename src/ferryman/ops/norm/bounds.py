"""Error terms of the norms; derived in docs/parity.md. Arguments and outputs are float64.

Each function returns one mapping per output: "accumulate" is multiplied by the accumulator's unit roundoff, "storage"
by that of x's dtype, a declared rounding's name likewise by the latter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Terms = dict[str, Tensor]
U32 = 2.0**-24
ETA = 2.0**-149  # float32 underflows gradually: two roundings of a subnormal result, half a unit each


def _relative(n: int) -> float:
    """Relative error of rsqrt(mean square) times x times weight: half of 6 sqrt(n) for the sum, and 8 roundings."""
    return 3 * math.sqrt(n) + 8


def rms_norm(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, weight, _, cast = args
    y = outputs[0].abs()
    terms: Terms = {"accumulate": _relative(x.shape[-1]) * y, "storage": y * float(cast and weight is not None)}
    return (terms if weight is None else terms | _scaled_underflow(weight, cast),)


def _scaled_underflow(weight: Tensor, cast: bool) -> Terms:
    """The normalised value may be subnormal before the weight scales it, in float32 and, when cast, in storage."""
    return {"absolute": ETA * (1 + weight.abs()), "storage_flush": weight.abs() * (0.5 * cast)}


def add_rms_norm(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """The rounded sum moves y twice: directly, and through the root mean square."""
    x, _, weight, _, cast = args
    y, s = (t.abs() for t in outputs)
    terms: Terms = {"accumulate": _relative(x.shape[-1]) * y, "storage": y * (2.0 + float(cast and weight is not None))}
    return terms if weight is None else terms | _scaled_underflow(weight, cast), {"accumulate": s}


def _rows(x: Tensor) -> Tensor:
    """(rows, N); reshape(-1, N) cannot tell how many rows have no element."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rms_gradient(g: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Terms, Terms]:
    n = x.shape[-1]
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    hat, gw = (x * r).abs(), (g if weight is None else g * weight).abs()
    inner = (gw * hat).mean(-1, keepdim=True)
    grad_x = r * (gw * _relative(n) + hat * inner * (6 * math.sqrt(n) + 3 * _relative(n)))
    for_x: Terms = {"accumulate": grad_x, "absolute": ETA * (1 + r * (2 + hat + inner))}
    if weight is None:
        return for_x, {"accumulate": x.new_empty(0)}
    products, rows = _rows(g.abs() * hat), _rows(g.abs())
    grad_weight = products.sum(0) * (6 * math.sqrt(max(len(products), 1)) + _relative(n))
    return for_x, {"accumulate": grad_weight, "absolute": ETA * (1 + rows).sum(0)}


def rms_norm_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    return _rms_gradient(*args)


def add_rms_norm_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """The saved sum is rounded to the storage dtype, which moves the gradient as it moves the forward result."""
    grad_y, grad_residual, s, weight, eps = args
    for_x, for_weight = _rms_gradient(grad_y, s, weight, eps)
    r = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    hat, gw = (s * r).abs(), (grad_y if weight is None else grad_y * weight).abs()
    saved = r * (gw + 4 * hat * (gw * hat).mean(-1, keepdim=True))
    for_x |= {"accumulate": for_x["accumulate"] + grad_residual.abs(), "storage": saved}
    if weight is None:
        return for_x, for_weight
    return for_x, for_weight | {"storage": 2 * _rows(grad_y.abs() * hat).sum(0)}


def _layer(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rstd, normalised, error of the normalised value in units of u, relative error of rstd in units of u).

    The mean is off by at most e = 6 sqrt(n) u mean|x|; the centred value inherits e, and its variance e squared, which
    matters when the mean dwarfs the deviation.
    """
    n = x.shape[-1]
    d = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    e = 6 * math.sqrt(n) * x.abs().mean(-1, keepdim=True)
    second = 0.5 * (e * r).square() * U32
    rstd = _relative(n) + second
    return r, d * r, r * (e + x.abs()) + (d * r).abs() * rstd, rstd


def layer_norm(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, weight, bias, eps = args
    _, _, error, _ = _layer(x, eps)
    total = error if weight is None else error * weight.abs()
    total = total + 2 * outputs[0].abs()
    total = total if bias is None else total + bias.abs()
    return ({"accumulate": total} if weight is None else {"accumulate": total, "absolute": ETA * (1 + weight.abs())},)


def layer_norm_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    g, x, weight, bias, eps = args
    n = x.shape[-1]
    r, hat, error, rstd = _layer(x, eps)
    gw = (g if weight is None else g * weight).abs()
    root = 6 * math.sqrt(n)
    mean, inner = gw.mean(-1, keepdim=True), (gw * hat.abs()).mean(-1, keepdim=True)
    moved = error * inner + hat.abs() * (gw * error).mean(-1, keepdim=True)
    grad_x = r * ((gw + mean + hat.abs() * inner) * (rstd + 4) + mean * root + hat.abs() * inner * root + moved)
    rows = max(g.numel() // max(n, 1), 1)
    many = 6 * math.sqrt(rows)
    flat = _rows(g.abs())
    for_x = {"accumulate": grad_x, "absolute": ETA * (1 + r * (3 + hat.abs() + inner))}
    grad_weight = (flat * _rows(hat.abs())).sum(0) * many + (flat * _rows(error)).sum(0)
    return (
        for_x,
        {"accumulate": x.new_empty(0)}
        if weight is None
        else {
            "accumulate": grad_weight,
            "absolute": ETA * (1 + flat).sum(0),
        },
        {"accumulate": x.new_empty(0) if bias is None else flat.sum(0) * many},
    )


COARSEST = 2.0**-8  # the largest unit roundoff of a storage dtype, bfloat16's


def _moved_by_the_sum(s: Tensor, eps: float) -> Tensor:
    """How far rounding the elements of s moves the normalised value, in units u of the storage dtype.

    The centred values move by e = u (|s| + mean|s|) at most, and the root s of their mean square plus eps, a norm, by
    u p with p = rms(|s| + mean|s|): the normalised value by u (e + |n| p) / (s - u p). Where u p may be half of s or
    more, any two normalised values differ by sqrt(n) + |n| at most, which is 2 u p / s of that.
    """
    r, hat, _, _ = _layer(s, eps)
    each = s.abs() + s.abs().mean(-1, keepdim=True)
    p = each.square().mean(-1, keepdim=True).sqrt() * r
    near = (each * r + hat.abs() * p) / (1 - COARSEST * p).clamp_min(0.5)
    return torch.where(COARSEST * p < 0.5, near, 2 * p * (math.sqrt(s.shape[-1]) + hat.abs()))


def add_layer_norm(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, residual, weight, bias, eps = args
    s = x + residual
    (terms,) = layer_norm((s, weight, bias, eps), outputs)
    moved = _moved_by_the_sum(s, eps)
    return terms | {"storage": moved if weight is None else moved * weight.abs()}, {"accumulate": s.abs()}


def add_layer_norm_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """The saved sum is rounded to the storage dtype, which moves the gradients as it moves the forward result.

    n, the normalised value, moves as `_moved_by_the_sum` says, rstd by its part p / (1 - u p). Where u p may be half or
    more, rstd is at most 1 / sqrt(eps) and n at most sqrt(N); 2 u p is 1 or more there.
    """
    grad_y, grad_residual, s, weight, bias, eps = args
    for_sum, for_weight, for_bias = layer_norm_backward((grad_y, s, weight, bias, eps), outputs)
    d = s - s.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    n, gw = (d * r).abs(), (grad_y if weight is None else grad_y * weight).abs()
    moved, mean = _moved_by_the_sum(s, eps), gw.mean(-1, keepdim=True)
    p = (s.abs() + s.abs().mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt() * r
    scaled = p / (1 - COARSEST * p).clamp_min(0.5)
    shared, reached = (gw * n).mean(-1, keepdim=True), (gw * moved).mean(-1, keepdim=True)
    own = gw + mean + n * shared
    near = r * (1 + COARSEST * scaled) * (moved * shared + (n + COARSEST * moved) * reached) + r * scaled * own
    far = 2 * p * (r * own + (gw + (1 + s.shape[-1]) * mean) / math.sqrt(eps or 1e-300))
    for_sum |= {"storage": torch.where(COARSEST * p < 0.5, near, far)}
    if grad_residual is not None:
        for_sum |= {"accumulate": for_sum["accumulate"] + grad_residual.abs()}
    if weight is not None:
        for_weight |= {"storage": 2 * _rows(grad_y.abs() * moved).sum(0)}
    return for_sum, for_weight, for_bias
