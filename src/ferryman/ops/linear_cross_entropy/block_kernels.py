"""A projection's cross entropy by blocks of the vocabulary, for any pair of products. Host side, without a toolchain.

Every block has all rows. So the weight's gradient is whole within a block, x is read once a block, and only the
gradient of x is summed over blocks, in float32. A block's logits take at most a part of x and the weight (`SHARE`), and
so does what a block adds to the gradient of x at a time: beside its results a step takes little more than that sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.backends.base import Target

LEAST_BYTES, SHARE, STEP = 8 << 20, 24, 128


@dataclass(frozen=True)
class Parts:
    """What differs between implementations. product: logits of a block. gradients: of that product. measure: adds a
    block to the rows' state and gives its log-sum-exps. slope: the logits' gradient, times a factor, in their dtype.
    bytes: that a logit takes at the peak, beside its storage."""

    product: Callable[[Tensor, Tensor, Tensor | None, Target], Tensor]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]
    measure: Callable[..., Tensor]
    slope: Callable[..., Tensor]
    bytes: int


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _room(x: Tensor, weight: Tensor) -> int:
    return max(LEAST_BYTES, (x.numel() + weight.numel()) * x.element_size() // SHARE)


def width_of(rows: int, x: Tensor, weight: Tensor, extra: int) -> int:
    """Columns of a block."""
    return max(STEP, _room(x, weight) // (max(rows, 1) * (x.element_size() + extra)) // STEP * STEP)


def _blocks(rows: int, x: Tensor, weight: Tensor, extra: int) -> Iterator[slice]:
    step = width_of(rows, x, weight, extra)
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))


def forward(
    parts: Parts,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    target: Target,
) -> tuple[Tensor, Tensor]:
    flat, goal, device = _rows(x), labels.reshape(-1).contiguous(), x.device
    rows, classes = len(goal), weight.shape[0]
    picked = torch.full((rows,), math.nan, dtype=torch.float32, device=device)
    total = torch.zeros(rows if smoothing else 0, dtype=torch.float32, device=device)
    if rows == 0:
        return picked.new_full((), math.nan), picked.reshape(labels.shape)
    block_lses = []
    for block in _blocks(rows, x, weight, parts.bytes):
        z = parts.product(flat, weight[block], None if bias is None else bias[block], target)
        block_lses.append(parts.measure(z, goal, block.start, picked, total, target))
    lse = torch.logsumexp(torch.stack(block_lses, -1), -1)
    row = lse - picked
    if smoothing:
        row = (1.0 - smoothing) * row + smoothing * (lse - total / classes)
    if z_loss:
        row = row + z_loss * lse.square()
    counted = goal != ignore_index
    return row.masked_fill(~counted, 0.0).sum() / counted.sum(), lse.reshape(labels.shape)


def backward(
    parts: Parts,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    flat, goal, device = _rows(x), labels.reshape(-1).contiguous(), x.device
    lse, rows = lse.reshape(-1).contiguous(), labels.numel()
    count = (goal != ignore_index).sum()
    # float16 ends at 65504, and a sum of as many slopes may not reach it
    factor = 2.0 ** -(max(rows, 1).bit_length() // 2) if x.dtype == torch.float16 else 1.0
    scale = torch.where(count > 0, grad.float() / count.clamp(min=1), 0.0) / factor
    grad_x = torch.zeros(flat.shape if need_x else 0, dtype=torch.float32, device=device)
    grad_weight = torch.zeros(weight.shape if need_weight else 0, dtype=weight.dtype, device=device)
    grad_bias = torch.zeros(0 if bias is None else bias.shape, dtype=x.dtype, device=device)
    step = max(STEP, _room(x, weight) // max(1, flat.shape[1] * x.element_size()) // STEP * STEP)
    for block in _blocks(rows, x, weight, parts.bytes) if rows else ():
        part, shift = weight[block], None if bias is None else bias[block]
        z = parts.product(flat, part, shift, target)
        d = parts.slope(z, goal, lse, block.start, weight.shape[0], ignore_index, smoothing, z_loss, factor, target)
        for first in range(0, rows, step) if need_x else ():
            some = slice(first, min(first + step, rows))
            grad_x[some] += parts.gradients(d[some], flat[some], part, None, True, False, target)[0]
        if not need_weight and bias is None:
            continue
        _, of_weight, of_bias = parts.gradients(d, flat, part, shift, False, need_weight, target)
        if need_weight:
            torch.mul(of_weight, scale, out=grad_weight[block])
        if bias is not None:
            torch.mul(of_bias, scale, out=grad_bias[block])
    return (grad_x.mul_(scale).to(x.dtype).reshape(x.shape) if need_x else x.new_empty(0)), grad_weight, grad_bias
