"""Gated activations: meaning and error terms."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, Rounding, primitive, wide

ROUNDED_ACTIVATION = Rounding("activation", "the activation is rounded to the storage dtype before the product")
FLUSH = 2.0**-126  # exp of a large negative argument may flush to zero; the product inherits it
ETA = 2.0**-149  # float32 underflows gradually: two roundings of a subnormal result, half a unit each


_BACKWARD_BATCH = {"grad": 0, "gate": 0, "up": 0, "grad_gate": 0, "grad_up": 0}


def _one_term(*args: object) -> int:
    return 1


def _check(op: str, gate: Tensor, up: Tensor, grad: Tensor | None = None, approximate: str = "none") -> None:
    given = {"gate": gate, "up": up} | ({} if grad is None else {"grad": grad})
    checks.one_device(op, **given)
    checks.floating(op, **given)
    checks.same_dtype(op, **given)
    checks.same_shape(op, **given)
    if approximate not in ("none", "tanh"):
        raise ArgumentError(op, "approximate", repr(approximate), "'tanh' or 'none'")


def _cost(x: Tensor, tensors: int) -> Cost:
    return Cost(6.0 * x.numel(), float(tensors * x.numel() * x.element_size()))


def _rounded(activation: Tensor, like: Tensor, roundings: frozenset[str]) -> Tensor:
    return wide(activation.to(like.dtype)) if ROUNDED_ACTIVATION.name in roundings else activation


def _silu(gate: Tensor, up: Tensor, roundings: frozenset[str] = frozenset()) -> Tensor:
    return (_rounded(functional.silu(wide(gate)), gate, roundings) * wide(up)).to(gate.dtype)


def _silu_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, roundings: frozenset[str] = frozenset()
) -> tuple[Tensor, Tensor]:
    d, g, u = wide(grad), wide(gate), wide(up)
    s = torch.sigmoid(g)
    activation = _rounded(g * s, gate, roundings)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * activation).to(gate.dtype)


def _silu_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """exp's argument is rounded twice (times log2 e): (1 - sigma)|g| units reach the result; 8 for the rest."""
    gate, up = args
    y = outputs[0].abs()
    return (
        {
            "accumulate": y * (2 * gate.abs() * torch.sigmoid(-gate) + 8),
            "activation": y,
            "activation_flush": 0.5 * up.abs(),
            "absolute": FLUSH * (gate * up).abs() + ETA * (1 + up.abs()),
        },
    )


def _silu_gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """d silu = sigma (1 + g (1 - sigma)): the inner sum can cancel, so its terms count separately; what the product
    before it loses as a subnormal is multiplied by it."""
    grad, gate, up = args
    s = torch.sigmoid(gate)
    error = 2 * gate.abs() * (1 - s) + 8
    terms = s * (1 + gate.abs() * (1 - s)) * (error + 2 * gate.abs() * s)
    flush = FLUSH * (1 + gate.abs())
    eta = ETA * (1 + grad.abs())
    subnormal = eta * (1 + up.abs()) * (1 + gate.abs())
    return (
        {"accumulate": (grad * up).abs() * terms, "absolute": flush * (grad * up).abs() + subnormal},
        {
            "accumulate": outputs[1].abs() * error,
            "activation": outputs[1].abs(),
            "activation_flush": 0.5 * grad.abs(),
            "absolute": flush * grad.abs() + eta,
        },
    )


@primitive(
    outputs=("y",),
    check=lambda gate, up: _check("silu_mul", gate, up),
    meta=lambda gate, up: gate.new_empty(gate.shape),
    cost=lambda gate, up: _cost(gate, 3),
    limits=Limits(
        bound=_silu_bound,
        roundings=(ROUNDED_ACTIVATION,),
        rounded=lambda roundings: functools.partial(_silu, roundings=roundings),
        batch={"gate": 0, "up": 0, "y": 0},
        reduction=_one_term,
    ),
    gradient=Gradient(backward="silu_mul_backward", grads=("gate", "up")),
    lower="definition",
    elementwise=("gate", "up"),
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU (SwiGLU's elementwise part): ``gate * sigmoid(gate) * up``.

    gate, up: same shape and dtype (float32, float16, bfloat16), any strides. Returns the same, its dimensions in memory
    in the order of gate's. Arithmetic is float32 with one rounding; an implementation may also round the activation.
    Raises ArgumentError. Source: Shazeer, arXiv:2002.05202.
    """
    return _silu(gate, up)


@primitive(
    outputs=("grad_gate", "grad_up"),
    check=lambda grad, gate, up: _check("silu_mul_backward", gate, up, grad),
    meta=lambda grad, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    cost=lambda grad, gate, up: _cost(gate, 5),
    limits=Limits(
        bound=_silu_gradient_bound,
        roundings=(ROUNDED_ACTIVATION,),
        batch=_BACKWARD_BATCH,
        reduction=_one_term,
        rounded=lambda roundings: functools.partial(_silu_gradient, roundings=roundings),
    ),
)
def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_mul`: (grad_gate, grad_up)."""
    return _silu_gradient(grad, gate, up)


def _factor(g: Tensor, approximate: str) -> Tensor:
    """F with gelu(g) = g F(g)."""
    if approximate == "none":
        return 0.5 * (1 + torch.erf(g * 0.5**0.5))
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


def _derivative(g: Tensor, approximate: str) -> tuple[Tensor, Tensor, Tensor]:
    """(gate's factor F, F', |z|) with gelu(g) = g F(g)."""
    if approximate == "none":
        return _factor(g, approximate), torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi), g.abs()
    c = math.sqrt(2 / math.pi)
    z = c * (g + 0.044715 * g**3)
    t = torch.tanh(z)
    return 0.5 * (1 + t), 0.5 * (1 - t * t) * c * (1 + 3 * 0.044715 * g * g), z.abs()


def _gelu(gate: Tensor, up: Tensor, approximate: str, roundings: frozenset[str] = frozenset()) -> Tensor:
    # PyTorch's own vectorised erf-gelu is off by 6 units on AVX-512 CPUs, and NaN at +inf; torch.erf is not.
    g = wide(gate)
    return (_rounded(g * _factor(g, approximate), gate, roundings) * wide(up)).to(gate.dtype)


def _gelu_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, approximate: str, roundings: frozenset[str] = frozenset()
) -> tuple[Tensor, Tensor]:
    d, g, u = wide(grad), wide(gate), wide(up)
    factor, slope, _ = _derivative(g, approximate)
    activation = _rounded(g * factor, gate, roundings)
    return (d * u * (factor + g * slope)).to(gate.dtype), (d * activation).to(gate.dtype)


def _gelu_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """1 + tanh(z) cancels for negative gates, so the factor's error is absolute: 4 units, and z's 4 through F'."""
    gate, up, approximate = args
    _, slope, z = _derivative(gate, approximate)
    y = outputs[0].abs()
    return (
        {
            "accumulate": (gate * up).abs() * (4 + 4 * z * slope) + 8 * y,
            "activation": y,
            "activation_flush": 0.5 * up.abs(),
            "absolute": ETA * (1 + up.abs()),
        },
    )


def _gelu_gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """F' = (1 - t^2) z'/2 cancels as tanh saturates: t is off by 2 units and its square by half of one, so 1 - t^2 by 5
    and half of it by 3. Beyond |z| = 10 float32's tanh is +-1 exactly (1 - |t| < 2^-25 from 9.02): F' is lost whole."""
    grad, gate, up, approximate = args
    _, slope, z = _derivative(gate, approximate)
    steep = (gate * slope).abs()
    factor = 4 + 4 * z * slope + steep * (4 * z * (1 + z) + 12)
    if approximate == "tanh":
        steepness = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate * gate)
        factor = factor + gate.abs() * torch.where(z < 10, 3 * steepness, slope / 2.0**-24)
    return (
        {"accumulate": (grad * up).abs() * factor, "absolute": FLUSH * (1 + (grad * up * gate).abs())},
        {
            "accumulate": (grad * gate).abs() * (4 + 4 * z * slope) + 8 * outputs[1].abs(),
            "activation": outputs[1].abs(),
            "activation_flush": 0.5 * grad.abs(),
            "absolute": ETA * (2 + grad.abs()),
        },
    )


@primitive(
    outputs=("y",),
    check=lambda gate, up, approximate: _check("gelu_mul", gate, up, None, approximate),
    meta=lambda gate, up, approximate: gate.new_empty(gate.shape),
    cost=lambda gate, up, approximate: _cost(gate, 3),
    limits=Limits(
        bound=_gelu_bound,
        roundings=(ROUNDED_ACTIVATION,),
        batch={"gate": 0, "up": 0, "y": 0},
        reduction=_one_term,
        rounded=lambda roundings: functools.partial(_gelu, roundings=roundings),
    ),
    gradient=Gradient(backward="gelu_mul_backward", grads=("gate", "up")),
    lower="definition",
    elementwise=("gate", "up"),
)
def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Gated GELU (GeGLU's elementwise part): ``gelu(gate) * up``.

    gate, up: same shape and dtype (float32, float16, bfloat16), any strides. approximate: "tanh" or "none" (erf), as
    in torch. Returns the same, its dimensions in memory in the order of gate's; float32 arithmetic, one rounding; an
    implementation may also round the activation. Raises ArgumentError. Source: Hendrycks & Gimpel, arXiv:1606.08415.
    """
    return _gelu(gate, up, approximate)


@primitive(
    outputs=("grad_gate", "grad_up"),
    check=lambda grad, gate, up, approximate: _check("gelu_mul_backward", gate, up, grad, approximate),
    meta=lambda grad, gate, up, approximate: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    cost=lambda grad, gate, up, approximate: _cost(gate, 5),
    limits=Limits(
        bound=_gelu_gradient_bound,
        roundings=(ROUNDED_ACTIVATION,),
        batch=_BACKWARD_BATCH,
        reduction=_one_term,
        rounded=lambda roundings: functools.partial(_gelu_gradient, roundings=roundings),
    ),
)
def gelu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Gradients of `gelu_mul`: (grad_gate, grad_up)."""
    return _gelu_gradient(grad, gate, up, approximate)
