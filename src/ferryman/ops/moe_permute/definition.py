"""Tokens' rows sorted by their experts, and experts' rows summed back to tokens: meaning and error terms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide

IDS = (torch.int32, torch.int64)
MAX_EXPERTS = 1023
Terms = dict[str, Tensor]
_NO_BATCH = "rows are divided among experts by their place"


def _slots(op: str, name: str, tokens: Tensor) -> None:
    if tokens.dim() != 2:
        raise ArgumentError(op, f"{name}.dim()", tokens.dim(), "2: tokens and the experts that each has chosen")
    if tokens.numel() >= 2**31:
        raise ArgumentError(op, f"{name}.numel()", tokens.numel(), "less than 2^31: slots have int32 numbers")


def _check_permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    op = "moe_permute"
    checks.one_device(op, x=x, topk_ids=topk_ids)
    checks.floating(op, x=x)
    if x.dim() != 2:
        raise ArgumentError(op, "x.dim()", x.dim(), "2")
    if topk_ids.dtype not in IDS:
        raise ArgumentError(op, "topk_ids.dtype", topk_ids.dtype, "torch.int32 or torch.int64")
    _slots(op, "topk_ids", topk_ids)
    if len(topk_ids) != len(x):
        raise ArgumentError(op, "topk_ids.shape[0]", len(topk_ids), f"{len(x)}, x's rows")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ArgumentError(op, "num_experts", num_experts, f"1 to {MAX_EXPERTS}")


def _permute_meta(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    return (
        x.new_empty(rows, x.shape[1]),
        x.new_empty(num_experts, dtype=torch.int32),
        x.new_empty(rows, dtype=torch.int32),
    )


def _permute_cost(x: Tensor, topk_ids: Tensor, num_experts: int) -> Cost:
    """A token's row is read once, however many experts it has."""
    rows = topk_ids.numel()
    written = rows * x.shape[1] * x.element_size() + 4 * (rows + num_experts)
    return Cost(0.0, float(written + x.numel() * x.element_size() + rows * topk_ids.element_size()))


def _sum_of(terms: Tensor, count: int, roundings: int) -> Terms:
    """A float32 sum of ``count`` terms, which ``terms`` has the magnitudes of: 6 sqrt(count) (Higham & Mary 2019), and
    the roundings of each; products and sums that are subnormal are off by 2^-150 each."""
    error = (6 * math.sqrt(max(count, 1)) + roundings) * terms.nan_to_num(0.0, posinf=0.0)
    return {"accumulate": error, "absolute": terms.new_full((), max(count, 1) * 2.0**-148)}


@primitive(
    outputs=("rows", "offsets", "source"),
    check=_check_permute,
    meta=_permute_meta,
    cost=_permute_cost,
    limits=Limits(
        bound=lambda args, outputs: tuple({"accumulate": torch.zeros_like(o)} for o in outputs),  # nothing is rounded
        batch=_NO_BATCH,
        reduction=lambda *args: 1,
    ),
    gradient=Gradient(backward="moe_permute_backward", grads=("x",), nondifferentiable=("offsets", "source")),
    dtypes={"topk_ids": IDS},
)
def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row of x for each expert that its token has chosen, sorted by expert. Returns (rows, offsets, source).

    x: (T, H), float32, float16 or bfloat16; topk_ids: (T, k), int32 or int64; any strides. num_experts: E, 1 to 1023.
    Slot ``t * k + j`` is the j-th choice of token t. rows: (T k, H) in x's dtype, contiguous: those of expert 0 first,
    and of one expert's in the order of slots. offsets: (E,) int32: expert e's rows end before offsets[e], as
    `grouped_linear` takes them. source: (T k,) int32, the slot of each row, as `moe_combine` takes it.
    A slot whose id is no expert's has no row; as many rows remain at the end, which are 0, and have source -1.
    Nothing is rounded. x has a gradient: the sum over its token's rows. Raises ArgumentError.
    """
    slots, flat = topk_ids.shape[1], topk_ids.reshape(-1).long()
    keys, order = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(num_experts, device=keys.device), right=True)
    source = torch.where(keys < num_experts, order, -1)
    token = order // max(slots, 1)
    return torch.where(source[:, None] >= 0, x[token], 0.0), ends.int(), source.int()


def places(source: Tensor, slots: int) -> Tensor:
    """(slots,) int64: the row of each slot, the last one that names it; -1 where none does."""
    wanted = source.long()
    at = torch.where((wanted >= 0) & (wanted < slots), wanted, slots)
    row = torch.arange(len(wanted), device=wanted.device)
    return wanted.new_full((slots + 1,), -1).scatter_reduce(0, at, row, "amax")[:slots]


def _gathered(y: Tensor, place: Tensor) -> Tensor:
    """A row of y for each slot; 0 for a slot without one."""
    if not len(y):
        return y.new_zeros(len(place), y.shape[1])
    return torch.where(place[:, None] >= 0, y[place.clamp(min=0)], 0.0)


def _check_source(op: str, rows: Tensor, source: Tensor) -> None:
    if rows.dim() != 2:
        raise ArgumentError(op, "the rows' dim()", rows.dim(), "2")
    if source.dtype != torch.int32:
        raise ArgumentError(op, "source.dtype", source.dtype, "torch.int32")
    checks.shaped(op, "source", source, len(rows))


def _check_permute_backward(grad: Tensor, source: Tensor, topk_ids: Tensor) -> None:
    op = "moe_permute_backward"
    checks.one_device(op, grad=grad, source=source, topk_ids=topk_ids)
    checks.floating(op, grad=grad)
    _check_source(op, grad, source)
    _slots(op, "topk_ids", topk_ids)


def _permute_backward_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad, source, topk_ids = args
    sums = _gathered(grad.abs(), places(source, topk_ids.numel())).reshape(*topk_ids.shape, grad.shape[1]).sum(1)
    return (_sum_of(sums, topk_ids.shape[1], 1),)


@primitive(
    outputs=("grad_x",),
    check=_check_permute_backward,
    meta=lambda grad, source, topk_ids: grad.new_empty(topk_ids.shape[0], grad.shape[1]),
    cost=lambda grad, source, topk_ids: Cost(
        float(grad.numel()),
        float((grad.numel() + topk_ids.shape[0] * grad.shape[1]) * grad.element_size() + 4 * source.numel()),
    ),
    limits=Limits(
        bound=_permute_backward_bound, batch=_NO_BATCH, reduction=lambda grad, source, topk_ids: topk_ids.shape[1]
    ),
    dtypes={"source": (torch.int32,), "topk_ids": IDS},
)
def moe_permute_backward(grad: Tensor, source: Tensor, topk_ids: Tensor) -> Tensor:
    """Gradient of `moe_permute` for x: a token's is the sum of its rows'. Float32 accumulation, one rounding. Of
    topk_ids the shape alone is read; a row whose source is no slot counts nothing."""
    rows = _gathered(wide(grad), places(source, topk_ids.numel()))
    return rows.reshape(*topk_ids.shape, grad.shape[1]).sum(1).to(grad.dtype)


def _check_combine(
    y: Tensor, source: Tensor, topk_weights: Tensor, *, op: str = "moe_combine", grad: Tensor | None = None
) -> None:
    checks.one_device(op, y=y, source=source, topk_weights=topk_weights, grad=grad)
    checks.floating(op, y=y, topk_weights=topk_weights, grad=grad)
    checks.same_dtype(op, y=y, grad=grad)
    _check_source(op, y, source)
    _slots(op, "topk_weights", topk_weights)
    checks.shaped(op, "grad", grad, len(topk_weights), y.shape[1])


def _combine_cost(y: Tensor, source: Tensor, topk_weights: Tensor) -> Cost:
    moved = (y.numel() + len(topk_weights) * y.shape[1]) * y.element_size() + 4 * source.numel()
    return Cost(2.0 * y.numel(), float(moved + topk_weights.numel() * topk_weights.element_size()))


def _shares(topk_weights: Tensor, place: Tensor, like: Tensor) -> Tensor:
    """(slots, 1): a slot's weight; 0 where it has no row."""
    flat = topk_weights.reshape(-1).to(like.dtype)
    return torch.where(place >= 0, flat, 0.0)[:, None]


def _combine_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    y, source, topk_weights = args
    place = places(source, topk_weights.numel())
    sums = (_gathered(y, place) * _shares(topk_weights, place, y)).abs()
    return (_sum_of(sums.reshape(*topk_weights.shape, y.shape[1]).sum(1), topk_weights.shape[1], 2),)


@primitive(
    outputs=("out",),
    check=_check_combine,
    meta=lambda y, source, topk_weights: y.new_empty(topk_weights.shape[0], y.shape[1]),
    cost=_combine_cost,
    limits=Limits(
        bound=_combine_bound, batch=_NO_BATCH, reduction=lambda y, source, topk_weights: topk_weights.shape[1]
    ),
    gradient=Gradient(backward="moe_combine_backward", grads=("y", "topk_weights")),
    dtypes={"source": (torch.int32,)},
)
def moe_combine(y: Tensor, source: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum of a token's rows, which lie sorted by expert: what undoes `moe_permute`.

    y: (R, H), float32, float16 or bfloat16. source: (R,) int32: the slot ``t * k + j`` of each row. topk_weights:
    (T, k), of any of these float dtypes. Any strides.
    Returns (T, H) in y's dtype, contiguous: the sum over j of ``topk_weights[t, j]`` times the row of its slot; float32
    accumulation, one rounding. source is values on the device, so nothing checks them, and any have a meaning: a row
    whose source is no slot is not read, of rows with the same slot the last one counts, and a slot without a row adds
    nothing, whatever its weight. y and topk_weights have gradients. Raises ArgumentError.
    """
    place = places(source, topk_weights.numel())
    rows = _gathered(wide(y), place)
    return (rows * _shares(topk_weights, place, rows)).reshape(*topk_weights.shape, y.shape[1]).sum(1).to(y.dtype)


def _to_slots(grad: Tensor, slots: int) -> Tensor:
    """A row of a token's gradient for each of its slots."""
    return grad.repeat_interleave(slots, 0)


def _gradients(
    grad: Tensor, y: Tensor, source: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(place, which rows count, the gradient of every row; by slot y and grad), in grad's dtype."""
    tokens, slots = topk_weights.shape
    place = places(source, tokens * slots)
    above = _to_slots(grad, slots)
    at = source.long().clamp(0, max(tokens * slots - 1, 0))
    if not tokens * slots:
        return place, torch.zeros_like(source, dtype=torch.bool), torch.zeros_like(y), y[:0], above
    inside = (source >= 0) & (source < tokens * slots)
    mine = inside & (place[at] == torch.arange(len(y), device=y.device))
    share = _shares(topk_weights, place, grad)
    return place, mine, torch.where(mine[:, None], (above * share)[at], 0.0), _gathered(y, place), above


def _combine_backward_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad, y, source, topk_weights, need_y, need_weights = args
    _, _, to_y, rows, above = _gradients(grad, y, source, topk_weights)
    sums = (rows * above).abs().sum(1).reshape(topk_weights.shape) if topk_weights.numel() else topk_weights.abs()
    nothing = {"accumulate": y.new_empty(0)}
    return (
        _sum_of(to_y.abs(), 0, 0) if need_y else nothing,
        _sum_of(sums, y.shape[1], 2) if need_weights else nothing,
    )


def _combine_backward_meta(
    grad: Tensor, y: Tensor, source: Tensor, topk_weights: Tensor, need_y: bool, need_topk_weights: bool
) -> tuple[Tensor, Tensor]:
    to_weights = topk_weights.new_empty(topk_weights.shape) if need_topk_weights else y.new_empty(0)
    return y.new_empty(y.shape if need_y else 0), to_weights


def _combine_backward_cost(grad: Tensor, y: Tensor, source: Tensor, topk_weights: Tensor, *needs: Any) -> Cost:
    moved = _combine_cost(y, source, topk_weights).bytes + needs[0] * needs[1] * y.numel() * y.element_size()
    return Cost(float(y.numel() * (needs[0] + 2 * needs[1])), moved)


@primitive(
    outputs=("grad_y", "grad_topk_weights"),
    check=lambda grad, y, source, topk_weights, *needs: _check_combine(
        y, source, topk_weights, op="moe_combine_backward", grad=grad
    ),
    meta=_combine_backward_meta,
    cost=_combine_backward_cost,
    limits=Limits(bound=_combine_backward_bound, batch=_NO_BATCH, reduction=lambda grad, y, *rest: max(y.shape[1], 1)),
    dtypes={"source": (torch.int32,)},
)
def moe_combine_backward(
    grad: Tensor, y: Tensor, source: Tensor, topk_weights: Tensor, need_y: bool, need_topk_weights: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `moe_combine`, an empty tensor where not needed. Float32 accumulation, one rounding.

    grad_y: its slot's weight times the token's gradient; 0 for a row that does not count. grad_topk_weights: the
    token's gradient times the slot's row; 0 for a slot without one."""
    _, _, to_y, rows, above = _gradients(wide(grad), wide(y), source, topk_weights)
    to_weights = y.new_empty(0)
    if need_topk_weights:
        sums = (rows * above).sum(1) if topk_weights.numel() else rows.new_zeros(0)
        to_weights = sums.reshape(topk_weights.shape).to(topk_weights.dtype)
    return to_y.to(y.dtype) if need_y else y.new_empty(0), to_weights
