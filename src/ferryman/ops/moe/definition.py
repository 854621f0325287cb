"""Products by experts, and a layer of them: meaning. Error terms stand in bounds.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.moe import bounds, gradient_bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, Rounding, primitive, wide

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", *bounds.CLAMPED)
ROUNDED_H = Rounding("h", "the first product is rounded to the storage dtype before the activation")
ROUNDED_A = Rounding("a", "the gated activation is rounded to the storage dtype before the second product")
ROUNDED_Y = Rounding("y", "an expert's result is rounded to the storage dtype before the weighted sum")
ROUNDED_U = Rounding("u", "the gradient times the second weights is rounded to the storage dtype")
WEIGHTED_A = Rounding("a", "the gated activation, times its share, is rounded to the storage dtype")
ROUNDED_DH = Rounding("dh", "the gradient of the first product is rounded to the storage dtype")
ROUNDED_DX = Rounding("dx", "the gradient of x by one slot is rounded to the storage dtype before the sum over slots")
MAX_EXPERTS = 1023
_NO_BATCH = "rows are divided among experts by their place"


def _check_grouped(op: str, x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor | None = None) -> None:
    checks.one_device(op, x=x, weight=weight, offsets=offsets, grad=grad)
    checks.floating(op, x=x, weight=weight, grad=grad)
    checks.same_dtype(op, x=x, weight=weight, grad=grad)
    for name, tensor, dims in (("x", x, 2), ("weight", weight, 3), ("offsets", offsets, 1)):
        if tensor.dim() != dims:
            raise ArgumentError(op, f"{name}.dim()", tensor.dim(), str(dims))
    if offsets.dtype != torch.int32:
        raise ArgumentError(op, "offsets.dtype", offsets.dtype, "torch.int32")
    if weight.shape[2] != x.shape[1]:
        raise ArgumentError(op, "weight.shape[2]", weight.shape[2], f"{x.shape[1]}, x's columns")
    if not 1 <= len(weight) <= MAX_EXPERTS:
        raise ArgumentError(op, "weight.shape[0]", len(weight), f"1 to {MAX_EXPERTS} experts")
    checks.shaped(op, "offsets", offsets, len(weight))
    checks.shaped(op, "grad", grad, x.shape[0], weight.shape[1])


def _moved(x: Tensor, weight: Tensor) -> float:
    """Of experts that have a row: no more than there are rows."""
    read = min(len(weight), len(x)) * weight.shape[1] * weight.shape[2]
    return float((x.numel() + read + len(x) * weight.shape[1]) * x.element_size())


@primitive(
    outputs=("y",),
    check=lambda x, weight, offsets: _check_grouped("grouped_linear", x, weight, offsets),
    meta=lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[1]),
    cost=lambda x, weight, offsets: Cost(2.0 * x.numel() * weight.shape[1], _moved(x, weight)),
    limits=Limits(bound=bounds.grouped_linear, batch=_NO_BATCH, reduction=lambda x, weight, offsets: x.shape[1]),
    gradient=Gradient(backward="grouped_linear_backward", grads=("x", "weight")),
    dtypes={"offsets": (torch.int32,)},
)
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x @ weight[e].T`` for the rows of every expert e, which lie together.

    x: (T, K), its rows sorted by expert. weight: (E, N, K), E from 1 to 1023. Both float32, float16 or bfloat16, one
    dtype, any strides. offsets: (E,) int32: expert e's rows end before offsets[e], and begin where those before it end.
    Returns (T, N) in x's dtype, contiguous; float32 accumulation, one rounding; 0 for rows beyond the last end.
    Offsets are values on the device, so nothing checks them. Any have a meaning, and none reads or writes elsewhere: a
    row belongs to the first expert whose offset is larger than the row's number, and to none if there is no such one.
    So an offset below an earlier one gives an expert no rows, and one beyond T counts as T.
    Raises ArgumentError for shapes and dtypes that do not fit. Source: torch.nn.functional.grouped_mm, whose weight is
    this one transposed.
    """
    return bounds.each(wide(x), wide(weight), offsets).to(x.dtype)


@primitive(
    outputs=("grad_x", "grad_weight"),
    check=lambda grad, x, weight, offsets, need_x, need_weight: _check_grouped(
        "grouped_linear_backward", x, weight, offsets, grad
    ),
    meta=lambda grad, x, weight, offsets, need_x, need_weight: (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(weight.shape if need_weight else 0),
    ),
    cost=lambda grad, x, weight, offsets, need_x, need_weight: Cost(
        2.0 * x.numel() * weight.shape[1] * (need_x + need_weight),
        need_x * _moved(x, weight)
        + need_weight * float((x.numel() + grad.numel() + weight.numel()) * x.element_size()),
    ),
    limits=Limits(
        bound=bounds.grouped_linear_backward,
        batch=_NO_BATCH,
        reduction=lambda grad, x, weight, *rest: max(weight.shape[1], len(x)),
    ),
    dtypes={"offsets": (torch.int32,)},
)
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_linear`: grad_x, grad_weight; an empty tensor where not needed. An expert without rows, and
    a row without an expert, has gradient 0."""
    g = wide(grad)
    return (
        bounds.each(g, wide(weight).mT, offsets).to(x.dtype) if need_x else x.new_empty(0),
        bounds.over_rows(g, wide(x), offsets, len(weight)).to(x.dtype) if need_weight else x.new_empty(0),
    )


def _check_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    *,
    op: str = "moe_experts",
    grad: Tensor | None = None,
) -> None:
    floats = {"x": x, "gate_up": gate_up, "down": down, "bias": bias, "grad": grad}
    checks.one_device(op, **floats, topk_ids=topk_ids, topk_weights=topk_weights)
    checks.floating(op, **floats, topk_weights=topk_weights)
    checks.same_dtype(op, **floats)
    for name, tensor, dims in (("x", x, 2), ("gate_up", gate_up, 3), ("down", down, 3), ("topk_ids", topk_ids, 2)):
        if tensor.dim() != dims:
            raise ArgumentError(op, f"{name}.dim()", tensor.dim(), str(dims))
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(op, "topk_ids.dtype", topk_ids.dtype, "torch.int32 or torch.int64")
    experts, width, inner = down.shape
    if not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(op, "down.shape[0]", experts, f"1 to {MAX_EXPERTS} experts")
    if width != x.shape[1]:
        raise ArgumentError(op, "down.shape[1]", width, f"{x.shape[1]}, x's columns")
    checks.shaped(op, "gate_up", gate_up, experts, 2 * inner, width)
    checks.shaped(op, "bias", bias, experts, 2 * inner + width)
    if len(topk_ids) != len(x):
        raise ArgumentError(op, "topk_ids.shape[0]", len(topk_ids), f"{len(x)}, x's rows")
    checks.shaped(op, "topk_weights", topk_weights, *topk_ids.shape)
    checks.shaped(op, "grad", grad, *x.shape)
    if activation not in ACTIVATIONS:
        raise ArgumentError(op, "activation", repr(activation), ", ".join(map(repr, ACTIVATIONS)))


def _experts_cost(x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor, *rest: Any) -> Cost:
    """Of tokens that choose as many experts as they can together."""
    slots = topk_ids.numel()
    read = min(slots, len(down)) * 3 * down.shape[1] * down.shape[2]
    moved = (2 * x.numel() + read) * x.element_size()
    moved += slots * (topk_ids.element_size() + topk_weights.element_size())
    return Cost(6.0 * slots * down.shape[1] * down.shape[2], float(moved))


def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    roundings: frozenset[str] = frozenset(),
) -> Tensor:
    def rounded(name: str, value: Tensor) -> Tensor:
        return wide(value.to(x.dtype)) if name in roundings else value

    experts, _, inner = down.shape
    out = torch.zeros_like(wide(x), memory_format=torch.contiguous_format)
    for expert in range(experts):
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        if not len(token):
            continue
        h = wide(x)[token] @ wide(gate_up[expert]).T
        if bias is not None:
            h = h + wide(bias[expert, : 2 * inner])
        gate, up = bounds.halves(rounded("h", h), activation)
        y = rounded("a", bounds.activated(gate, activation) * bounds.factor(up, activation)) @ wide(down[expert]).T
        if bias is not None:
            y = y + wide(bias[expert, 2 * inner :])
        out.index_add_(0, token, rounded("y", y) * topk_weights[token, slot].to(out.dtype)[:, None])
    return out.to(x.dtype)


def _rounded(roundings: frozenset[str]) -> Callable[..., Any]:
    return functools.partial(_experts, roundings=roundings)


@primitive(
    outputs=("out",),
    check=_check_experts,
    meta=lambda x, *rest: x.new_empty(x.shape),
    cost=_experts_cost,
    limits=Limits(
        bound=bounds.moe_experts,
        roundings=(ROUNDED_H, ROUNDED_A, ROUNDED_Y),
        rounded=_rounded,
        batch={"x": 1, "topk_ids": 1, "topk_weights": 1, "out": 1},
        reduction=lambda x, gate_up, down, topk_ids, *rest: max(x.shape[1], down.shape[2], topk_ids.shape[1]),
    ),
    gradient=Gradient(backward="moe_experts_backward", grads=("x", "gate_up", "down", "topk_weights", "bias")),
    dtypes={"topk_ids": (torch.int32, torch.int64)},
)
def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str = "silu",
    bias: Tensor | None = None,
) -> Tensor:
    """A layer of gated experts: the sum over a token's chosen e of ``weight * (act(x @ g.T) * (x @ u.T)) @ down[e].T``.

    x: (T, H). gate_up: (E, 2 I, H): g is its first I rows, u the others. down: (E, H, I). bias: (E, 2 I + H) or None:
    2 I numbers for the first product, then H for the second. All of one dtype: float32, float16 or bfloat16; any
    strides. topk_ids: (T, k) int32 or int64. topk_weights: (T, k), of any of these float dtypes. activation: "silu",
    "gelu" (erf), "gelu_tanh", or gpt-oss's "swiglu_oai": gate is cut to at most 7, up to -7 to 7, and their product is
    ``(up + 1) * gate * sigmoid(1.702 * gate)``; "swiglu_oai_interleaved" takes g from the even rows of gate_up, u from
    the odd ones, as gpt-oss's weights lie, and the first 2 I numbers of bias likewise. E from 1 to 1023.
    Returns (T, H) in x's dtype, contiguous. float32 accumulation; an implementation may round the first product, the
    gated activation, and each expert's result to the storage dtype, where float16 overflows beyond 65504. A slot whose
    id is no expert's adds nothing, whatever its weight; an expert chosen twice counts twice. All but topk_ids have
    gradients: the backward makes the first product again, and keeps nothing but the arguments.
    Raises ArgumentError for shapes and dtypes that do not fit. Source: Shazeer et al., arXiv:1701.06538; gpt-oss,
    arXiv:2508.10925; the layout of transformers' Mixtral and Qwen3-MoE experts.
    """
    return _experts(x, gate_up, down, topk_ids, topk_weights, activation, bias)


_NEEDS = ("x", "gate_up", "down", "topk_weights", "bias")


def _check_gradients(grad: Tensor, *args: Any) -> None:
    _check_experts(*args[:7], op="moe_experts_backward", grad=grad)


def _gradients_meta(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, gate_up, down, _, topk_weights, _, bias = args[:7]
    like = (x, gate_up, down, topk_weights, bias)
    return tuple(
        x.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(like, args[7:], strict=True)
    )


def _gradients_cost(grad: Tensor, *args: Any) -> Cost:
    """Two thirds of the forward again; as much for the gradient of x, and as much for that of the weights."""
    x, gate_up, down, topk_ids = args[:4]
    need_x, need_gate_up, need_down, need_weights, need_bias = args[7:]
    work = 2.0 * topk_ids.numel() * down.shape[1] * down.shape[2]
    inside = need_x or need_gate_up or (need_bias and args[6] is not None)
    products = 2 * (inside or need_down or need_weights) + (inside or need_weights)
    written = need_gate_up * gate_up.numel() + need_down * down.numel() + need_x * x.numel()
    moved = _experts_cost(*args[:7]).bytes + (x.numel() + written) * x.element_size()
    return Cost(work * (products + 2 * need_x + 2 * need_gate_up + need_down), float(moved))


def _gradients(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    *needs: bool,
    roundings: frozenset[str] = frozenset(),
) -> tuple[Tensor, ...]:
    def rounded(name: str, value: Tensor) -> Tensor:
        return wide(value.to(x.dtype)) if name in roundings else value

    (experts, _, inner), g, rows = down.shape, wide(grad), wide(x)
    like = (x, gate_up, down, topk_weights, x.new_empty(0) if bias is None else bias)
    to_x, to_gate_up, to_down, to_weights, to_bias = (g.new_zeros(t.shape) for t in like)
    for expert in range(experts):
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        if not len(token):
            continue
        above = g[token]
        h, u = rows[token] @ wide(gate_up[expert]).T, rounded("u", above @ wide(down[expert]))
        if bias is not None:
            h = h + wide(bias[expert, : 2 * inner])
        gate, raw = bounds.halves(rounded("h", h), activation)
        share = topk_weights[token, slot].to(g.dtype)[:, None]
        opened, up = bounds.activated(gate, activation), bounds.factor(raw, activation)
        own = (opened * up * u).sum(-1)
        to_gate = share * u * up * gradient_bounds.slope(gate, activation)
        to_up = share * u * opened * gradient_bounds.passed(raw, activation)
        dh = rounded("dh", bounds.joined(to_gate, to_up, activation))
        to_x.index_add_(0, token, rounded("dx", dh @ wide(gate_up[expert])))
        to_gate_up[expert] = dh.T @ rows[token]
        to_down[expert] = above.T @ rounded("a", share * (opened * up))
        if bias is not None:
            own = own + above @ wide(bias[expert, 2 * inner :])
            to_bias[expert] = torch.cat([dh.sum(0), (share * above).sum(0)])
        to_weights[token, slot] = own
    gradients = zip((to_x, to_gate_up, to_down, to_weights, to_bias), like, needs, strict=True)
    return tuple(gradient.to(t.dtype) if need else x.new_empty(0) for gradient, t, need in gradients)


def _rounded_gradients(roundings: frozenset[str]) -> Callable[..., Any]:
    return functools.partial(_gradients, roundings=roundings)


@primitive(
    outputs=tuple(f"grad_{name}" for name in _NEEDS),
    check=_check_gradients,
    meta=_gradients_meta,
    cost=_gradients_cost,
    limits=Limits(
        bound=gradient_bounds.moe_experts_backward,
        roundings=(ROUNDED_H, ROUNDED_U, WEIGHTED_A, ROUNDED_DH, ROUNDED_DX),
        rounded=_rounded_gradients,
        batch={"grad": 1, "x": 1, "topk_ids": 1, "topk_weights": 1, "grad_x": 1, "grad_topk_weights": 1},
        reduction=lambda grad, x, gate_up, down, topk_ids, *rest: max(*gate_up.shape[1:], topk_ids.numel()),
    ),
    dtypes={"topk_ids": (torch.int32, torch.int64)},
)
def moe_experts_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
    need_x: bool,
    need_gate_up: bool,
    need_down: bool,
    need_topk_weights: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `moe_experts`: grad_x, grad_gate_up, grad_down, grad_topk_weights, grad_bias, each as its tensor;
    an empty one where not needed. The first product is made again from x. With u = grad @ down[e], a slot's share has
    the gradient of (act(gate) * up) . u, and of grad . bias with a bias. An expert that no slot names, and a slot of no
    expert, has gradient 0, whatever its weight. float32 accumulation; what may be rounded to the storage dtype on the
    way is named by the op's roundings, and float16 overflows there beyond 65504."""
    needs = (need_x, need_gate_up, need_down, need_topk_weights, need_bias)
    a, b, c, d, e = _gradients(grad, x, gate_up, down, topk_ids, topk_weights, activation, bias, *needs)
    return a, b, c, d, e
