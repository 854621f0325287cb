"""An elementwise activation after an optional bias: meaning and costs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.bias_act import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide

QUICK = 1.702
_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
# what alpha is where the call gives none, as PyTorch's functionals have it
ALPHAS = {"leaky_relu": 0.01, "elu": 1.0}
CAPPED = "softcap"  # its alpha is the cap, which the call must give
_LEAST, _MOST = 1e-18, 1e18  # of a cap: z over it, and its products, stay far inside of float32


def _elu(z: Tensor, alpha: float) -> Tensor:
    # not functional.elu, which may subtract 1 from an exp; and what `where` leaves out must stay finite for autograd
    return torch.where(z > 0, z, alpha * torch.expm1(z.clamp(max=0.0)))


_FORMULAS: dict[str, Callable[[Tensor, float], Tensor]] = {
    # not functional.gelu, whose erf is off by 6 units, and NaN at +inf, on CPUs with AVX-512
    "gelu": lambda z, alpha: z * (0.5 * (1 + torch.erf(z * 0.5**0.5))),
    "gelu_tanh": lambda z, alpha: z * (0.5 * (1 + torch.tanh(_ROOT * (z + _CUBIC * z**3)))),
    "quick_gelu": lambda z, alpha: z * torch.sigmoid(QUICK * z),
    "silu": lambda z, alpha: functional.silu(z),
    "relu": lambda z, alpha: functional.relu(z),
    "relu2": lambda z, alpha: functional.relu(z).square(),
    "leaky_relu": lambda z, alpha: torch.where(z > 0, z, alpha * z),
    "elu": _elu,
    "tanh": lambda z, alpha: torch.tanh(z),
    "sigmoid": lambda z, alpha: torch.sigmoid(z),
    "hardswish": lambda z, alpha: functional.hardswish(z),
    CAPPED: lambda z, alpha: alpha * torch.tanh(z / alpha),
}
ACTIVATIONS = tuple(_FORMULAS)
UNCAPPED = tuple(name for name in ACTIVATIONS if name != CAPPED)  # whose alpha may be None


def _gelu_gradient(d: Tensor, z: Tensor) -> Tensor:
    return d * (0.5 * (1 + torch.erf(z * 0.5**0.5)) + z * (torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)))


def _gelu_tanh_gradient(d: Tensor, z: Tensor) -> Tensor:
    t = torch.tanh(_ROOT * (z + _CUBIC * z**3))
    return d * (0.5 * (1 + t) + z * (0.5 * (1 - t * t) * _ROOT * (1 + 3 * _CUBIC * z * z)))


def _swish_gradient(d: Tensor, z: Tensor, scale: float) -> Tensor:
    s = torch.sigmoid(scale * z)
    return d * (s * (1 + scale * z * (1 - s)))


def _sigmoid_gradient(d: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return d * (s * (1 - s))


# At kinks as PyTorch's own gradients are; at NaN too, but for elu and hardswish, where PyTorch's
# depends on the tensor's size; there NaN stays.
_GRADIENTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "gelu": lambda d, z, alpha: _gelu_gradient(d, z),
    "gelu_tanh": lambda d, z, alpha: _gelu_tanh_gradient(d, z),
    "quick_gelu": lambda d, z, alpha: _swish_gradient(d, z, QUICK),
    "silu": lambda d, z, alpha: _swish_gradient(d, z, 1.0),
    "relu": lambda d, z, alpha: torch.where(z <= 0, 0.0, d),
    "relu2": lambda d, z, alpha: torch.where(z <= 0, 0.0, 2 * z * d),
    "leaky_relu": lambda d, z, alpha: torch.where(z > 0, d, alpha * d),
    "elu": lambda d, z, alpha: torch.where(z > 0, d, d * (alpha * torch.exp(z.clamp(max=0.0)))),
    "tanh": lambda d, z, alpha: d * (1 - torch.tanh(z).square()),
    "sigmoid": lambda d, z, alpha: _sigmoid_gradient(d, z),
    "hardswish": lambda d, z, alpha: torch.where(z <= -3, 0.0, torch.where(z >= 3, d, d * (z / 3 + 0.5))),
    CAPPED: lambda d, z, alpha: d * (1 - torch.tanh(z / alpha).square()),
}


def slope(activation: str, alpha: float | None) -> float:
    """alpha, or what PyTorch's functional takes without one; 0 where the activation has none."""
    return ALPHAS.get(activation, 0.0) if alpha is None else alpha


def _check(
    op: str, x: Tensor, bias: Tensor | None, activation: str, alpha: float | None, grad: Tensor | None = None
) -> None:
    checks.one_device(op, x=x, bias=bias, grad=grad)
    checks.floating(op, x=x, bias=bias, grad=grad)
    checks.same_dtype(op, x=x, grad=grad)
    if grad is not None:
        checks.same_shape(op, x=x, grad=grad)
    if bias is not None:
        checks.at_least_1d(op, x=x)
        checks.shaped(op, "bias", bias, x.shape[-1])
    if activation not in ACTIVATIONS:
        raise ArgumentError(op, "activation", repr(activation), ", ".join(ACTIVATIONS))
    if activation == CAPPED:
        if alpha is None or not _LEAST <= alpha <= _MOST:
            raise ArgumentError(op, "alpha", alpha, f"the cap of {CAPPED}, from {_LEAST} to {_MOST}")
        return
    if alpha is None:
        return
    if activation not in ALPHAS:
        raise ArgumentError(op, "alpha", alpha, f"None with {activation}; {', '.join((*ALPHAS, CAPPED))} have one")
    if not -math.inf < alpha < math.inf:
        raise ArgumentError(op, "alpha", alpha, "a finite number")


def _cost(x: Tensor, bias: Tensor | None, tensors: int, biases: int) -> Cost:
    bias_bytes = 0 if bias is None else bias.numel() * bias.element_size()
    return Cost(8.0 * x.numel(), float(tensors * x.numel() * x.element_size() + biases * bias_bytes))


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide(x) if bias is None else wide(x) + wide(bias)


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[bounds.Terms, ...]:
    x, bias, activation, alpha = args
    return bounds.forward(x, bias, activation, slope(activation, alpha), outputs)


def _gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[bounds.Terms, ...]:
    grad, x, bias, activation, alpha = args
    return bounds.backward(grad, x, bias, activation, slope(activation, alpha), outputs)


@primitive(
    outputs=("y",),
    check=lambda x, bias, activation, alpha: _check("bias_act", x, bias, activation, alpha),
    meta=lambda x, bias, activation, alpha: x.new_empty(x.shape),
    cost=lambda x, bias, activation, alpha: _cost(x, bias, 2, 1),
    limits=Limits(bound=_bound, batch={"x": 1, "y": 1}, reduction=lambda *args: 1),
    gradient=Gradient(backward="bias_act_backward", grads=("x", "bias")),
    lower="definition",
    elementwise=("x",),
)
def bias_act(x: Tensor, bias: Tensor | None = None, activation: str = "gelu", alpha: float | None = None) -> Tensor:
    """An activation of ``x + bias``, elementwise.

    x: any shape, float32, float16 or bfloat16, any strides. bias: (N,), the length of x's last dimension, any of these
    dtypes, or None. activation: "gelu" (by erf), "gelu_tanh", "quick_gelu" (``z * sigmoid(1.702 z)``), "silu", "relu",
    "relu2" (the square of relu), "leaky_relu", "elu", "tanh", "sigmoid", "hardswish" or "softcap"
    (``alpha * tanh(z / alpha)``). alpha: the negative slope of leaky_relu (0.01 if None), the factor of elu (1 if
    None), finite; the cap of softcap, from 1e-18 to 1e18; None for the others. Returns x's shape and dtype, its
    dimensions in memory in the order of x's where no bias lies along another last one, else contiguous. Arithmetic is
    float32 with one rounding; the sum with the bias is not rounded to x's dtype. Raises ArgumentError. Source: the
    functionals of these names in torch.nn.functional; So et al., arXiv:2109.08668 (relu2); Gemma Team,
    arXiv:2408.00118 (softcap).
    """
    return _FORMULAS[activation](_sum(x, bias), slope(activation, alpha)).to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_bias"),
    check=lambda grad, x, bias, activation, alpha: _check("bias_act_backward", x, bias, activation, alpha, grad),
    meta=lambda grad, x, bias, activation, alpha: (
        x.new_empty(x.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
    cost=lambda grad, x, bias, activation, alpha: _cost(x, bias, 3, 2),
    limits=Limits(
        bound=_gradient_bound,
        batch={"grad": 1, "x": 1, "grad_x": 1},
        reduction=lambda grad, x, bias, *rest: 1 if bias is None else max(1, x.numel() // max(x.shape[-1], 1)),
    ),
)
def bias_act_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, alpha: float | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_act`: grad_x in x's dtype, and grad_bias in the bias's (an empty tensor without one).

    grad_bias is the sum over rows of what grad_x is before its rounding.
    """
    g = _GRADIENTS[activation](wide(grad), _sum(x, bias), slope(activation, alpha))
    if bias is None:
        return g.to(x.dtype), x.new_empty(0)
    rows = g.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return g.to(x.dtype), rows.sum(0).to(bias.dtype)
