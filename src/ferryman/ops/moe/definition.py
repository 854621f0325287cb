"""Products by experts, and a layer of them: meaning. Error terms stand in bounds.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.moe import bounds
from ferryman.ops.primitive import Cost, Rounding, primitive, wide

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROUNDED_H = Rounding("h", "the first product is rounded to the storage dtype before the activation")
ROUNDED_A = Rounding("a", "the gated activation is rounded to the storage dtype before the second product")
ROUNDED_Y = Rounding("y", "an expert's result is rounded to the storage dtype before the weighted sum")
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
    bound=bounds.grouped_linear,
    backward="grouped_linear_backward",
    grads=("x", "weight"),
    batch=_NO_BATCH,
    reduction=lambda x, weight, offsets: x.shape[1],
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
    bound=bounds.grouped_linear_backward,
    batch=_NO_BATCH,
    reduction=lambda grad, x, weight, *rest: max(weight.shape[1], len(x)),
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
) -> None:
    op = "moe_experts"
    floats = {"x": x, "gate_up": gate_up, "down": down, "bias": bias}
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
        gate, up = rounded("h", h).split(inner, -1)
        y = rounded("a", bounds.activated(gate, activation) * up) @ wide(down[expert]).T
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
    bound=bounds.moe_experts,
    roundings=(ROUNDED_H, ROUNDED_A, ROUNDED_Y),
    rounded=_rounded,
    batch={"x": 1, "topk_ids": 1, "topk_weights": 1, "out": 1},
    reduction=lambda x, gate_up, down, topk_ids, *rest: max(x.shape[1], down.shape[2], topk_ids.shape[1]),
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
    "gelu" (erf) or "gelu_tanh". E from 1 to 1023.
    Returns (T, H) in x's dtype, contiguous. float32 accumulation; an implementation may round the first product, the
    gated activation, and each expert's result to the storage dtype, where float16 overflows beyond 65504. A slot whose
    id is no expert's adds nothing,
    whatever its weight; an expert chosen twice counts twice. Not differentiable: compose `grouped_linear`, which is.
    Raises ArgumentError for shapes and dtypes that do not fit. Source: Shazeer et al., arXiv:1701.06538; the layout of
    transformers' Mixtral and Qwen3-MoE experts.
    """
    return _experts(x, gate_up, down, topk_ids, topk_weights, activation, bias)
