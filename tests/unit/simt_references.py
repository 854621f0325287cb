"""What the SIMT kernels must compute, in float64, and how far a float32 evaluation may be from it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
UNIT = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}  # half a unit in the last place, relative
ETA = {F32: 2.0**-149, F16: 2.0**-25, BF16: 2.0**-134}  # absolute, where results are subnormal
U = UNIT[F32]

# of the float64 inputs: [(result, slack beyond the rounding of the result), ..] for every output
Reference = Callable[..., list[tuple[Tensor, Tensor]]]


def _rms(x: Tensor, w: Tensor | None, eps: float, cast: torch.dtype | None) -> list[tuple[Tensor, Tensor]]:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    slack = 24 * U * y.abs()
    if w is not None:
        if cast is not None:
            slack = slack + UNIT[cast] * y.abs() + ETA[cast]
        y, slack = y * w, slack * w.abs() + U * (y * w).abs()
    return [(y, slack)]


def rms_reference(dtype: torch.dtype) -> Reference:
    return lambda x, w, eps, cast: _rms(x, w, eps, dtype if cast else None)


def add_rms_reference(dtype: torch.dtype) -> Reference:
    def reference(x: Tensor, r: Tensor, w: Tensor | None, eps: float, cast: bool) -> list[tuple[Tensor, Tensor]]:
        total = (x + r).to(dtype).double()  # one rounding, exactly
        return [*_rms(total, w, eps, dtype if cast else None), (total, torch.full_like(total, -1.0))]

    return reference


def layer_norm_reference(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> list[tuple[Tensor, Tensor]]:
    mean, scale = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, correction=0, keepdim=True) + eps)
    y = (x - mean) * scale
    slack = 24 * U * (y.abs() + scale * x.abs().mean(-1, keepdim=True))
    if w is not None:
        y, slack = y * w, slack * w.abs()
    if b is not None:
        y = y + b
    return [(y, slack + 2 * U * y.abs())]


def softmax_reference(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    y = torch.softmax(x, -1)
    distance = (x.amax(-1, keepdim=True) - x).nan_to_num(0.0, 0.0, 0.0)
    return [(y, (16 + 3 * distance) * U * y + 2.0**-126)]


def softmax_backward_reference(grad: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    inner = grad * y
    slack = y.abs() * (24 * U * inner.abs().sum(-1, keepdim=True) + 4 * U * grad.abs())
    return [(y * (grad - inner.sum(-1, keepdim=True)), slack)]


def silu_reference(g: Tensor, u: Tensor) -> list[tuple[Tensor, Tensor]]:
    y = torch.nn.functional.silu(g) * u
    return [(y, (8 + 2 * g.abs().clamp(max=200)) * U * y.abs() + 2.0**-126 * (g * u).abs())]


def gelu_reference(g: Tensor, u: Tensor, approximate: str) -> list[tuple[Tensor, Tensor]]:
    if approximate == "tanh":
        factor = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    else:
        factor = 0.5 * torch.erfc(-g / math.sqrt(2))
    y = g * factor * u
    steep = 8 + 8 * (g.abs() + g.abs() ** 3).clamp(max=400)
    return [(y, steep * U * y.abs() + 2.0**-126 * (g * u).abs())]


def _gated_gradient(
    d: Tensor, g: Tensor, u: Tensor, factor: Tensor, slope: Tensor, steep: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of (d * u * (F + g F'), d * g * F), whose terms are off by ``steep`` units of float32 each, and by an exponential
    that flushes: F' has it times up to 1.6 + 0.22 g^2."""
    first, second = d * u * (factor + g * slope), d * (g * factor)
    terms = (d * u).abs() * (factor + (g * slope).abs())
    flush = 2.0**-126 * (1 + 2 * g.abs() + g.abs() ** 3)
    return [
        (first, steep * U * terms + flush * (d * u).abs()),
        (second, steep * U * second.abs() + flush * d.abs()),
    ]


def silu_backward_reference(d: Tensor, g: Tensor, u: Tensor) -> list[tuple[Tensor, Tensor]]:
    s, rest = torch.sigmoid(g), torch.sigmoid(-g)
    return _gated_gradient(d, g, u, s, s * rest, 8 + 4 * g.abs().clamp(max=200))


def gelu_backward_reference(d: Tensor, g: Tensor, u: Tensor, approximate: str) -> list[tuple[Tensor, Tensor]]:
    if approximate == "tanh":
        c = 2 * math.sqrt(2 / math.pi)
        z = c * (g + 0.044715 * g**3)
        factor = torch.sigmoid(z)
        slope = factor * torch.sigmoid(-z) * (c * (1 + 3 * 0.044715 * g * g))
    else:
        factor = 0.5 * torch.erfc(-g / math.sqrt(2))
        slope = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    return _gated_gradient(d, g, u, factor, slope, 8 + 8 * (g.abs() + g.abs() ** 3).clamp(max=400))


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    width = cos.shape[-1]
    for x in (q, k):
        turned = x[..., :width]
        if interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        slack = 2 * U * ((turned * c).abs() + (other * s).abs())
        rest = x[..., width:]
        # what is only copied is copied exactly
        pairs.append(
            (torch.cat((turned * c + other * s, rest), -1), torch.cat((slack, torch.full_like(rest, -1.0)), -1))
        )
    return pairs


def rope_backward_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> list[tuple[Tensor, Tensor]]:
    """The transposed rotation: that of the negated sines, each taken from the other element of its pair."""
    half = sin.shape[-1] // 2
    other = sin.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else sin.roll(half, -1)
    return rope_reference(q, k, cos, -other, interleaved)
