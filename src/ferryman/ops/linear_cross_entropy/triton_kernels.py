"""A projection's cross entropy in Triton, by blocks of the vocabulary: products by tl.dot (those of `linear`), then one
pass over a block of logits, which in the backward is written over with its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import exp, exp_to_infinity, narrow, widen
from ferryman.backends.triton_rows import lanes
from ferryman.ops.linear_cross_entropy import block_kernels as blocks
from ferryman.ops.matmul import triton_kernels as products

BLOCK = 2048  # logits that a program reads at a time


@triton.jit
def _measure(z_ptr, goal_ptr, picked_ptr, total_ptr, lse_ptr, start, width, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes one row of a block: its log-sum-exp, its target's logit where that is here, its sum."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    col = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        mask = col < width - first
        z = widen(tl.load(z_ptr + first + col, mask=mask, other=float("-inf")))
        larger = tl.maximum(maximum, z)
        shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
        total = total * exp_to_infinity(maximum - shift) + exp_to_infinity(z - shift)
        maximum = larger
        if SMOOTH:
            plain += tl.where(mask, z, 0.0)
    larger = tl.max(maximum, 0)
    shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
    lane = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)  # what each lane has subtracted
    sum_of = tl.sum(tl.where(total == 0.0, 0.0, total * exp_to_infinity(lane - shift)), 0)
    tl.store(lse_ptr + row, shift + tl.log(sum_of))
    place = tl.load(goal_ptr + row) - start
    if (place >= 0) & (place < width):
        tl.store(picked_ptr + row, widen(tl.load(z_ptr + place)))
    if SMOOTH:
        tl.store(total_ptr + row, tl.load(total_ptr + row) + tl.sum(plain, 0))


@triton.jit(do_not_specialize=["ignore_index"])
def _slope(
    z_ptr, goal_ptr, lse_ptr, start, width, classes, ignore_index, smoothing, z_loss, factor, BLOCK: tl.constexpr
):
    """A piece of one row of a block of logits becomes its gradient."""
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    goal = tl.load(goal_ptr + row)
    lse = tl.load(lse_ptr + row)
    counted = goal != ignore_index
    valid = (goal >= 0) & (goal < classes)
    place = z_ptr + row * width + col
    # an ignored row is not read, and its gradient is 0 whatever its logits hold
    z = widen(tl.load(place, mask=(col < width) & counted, other=0.0))
    lse = tl.where(counted, lse, 0.0)
    fate = tl.where(counted, tl.where(valid, factor, float("nan")), 0.0)
    # an infinite log-sum-exp times 0 is NaN
    steep = 1.0 + 2.0 * z_loss * tl.where(z_loss == 0.0, 0.0, lse)
    p = exp(z - lse) * steep - tl.div_rn(smoothing, classes + 0.0)
    d = tl.where(col == goal - start, p - (1.0 - smoothing), p) * fate
    tl.store(place, narrow(d, z_ptr.dtype.element_ty), mask=col < width)


def _shape(target: Target, width: int) -> tuple[int, int]:
    """(elements at a time, warps): 16 elements a thread."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return block, max(1, min(8, block // (16 * lanes(target))))


def measured(z: Tensor, goal: Tensor, start: int, picked: Tensor, total: Tensor, target: Target) -> Tensor:
    lse = torch.empty(len(goal), dtype=torch.float32, device=z.device)
    block, warps = _shape(target, z.shape[-1])
    args = (z, goal, picked, total, lse, start, z.shape[-1], total.numel() > 0, block)
    launch(_measure, (len(goal),), *args, device=z.device, num_warps=warps)
    return lse


def sloped(
    z: Tensor,
    goal: Tensor,
    lse: Tensor,
    start: int,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    factor: float,
    target: Target,
) -> Tensor:
    width = z.shape[-1]
    block, warps = _shape(target, width)
    args = (z, goal, lse, start, width, classes, ignore_index, float(smoothing), float(z_loss), factor, block)
    launch(_slope, (len(goal) * triton.cdiv(width, block),), *args, device=z.device, num_warps=warps)
    return z


_PARTS = blocks.Parts(products.linear, products.linear_backward, measured, sloped, 0)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    target: Target,
) -> tuple[Tensor, Tensor]:
    return blocks.forward(_PARTS, x, weight, labels, bias, ignore_index, label_smoothing, z_loss, target)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.backward(
        _PARTS, grad, x, weight, labels, bias, lse, ignore_index, label_smoothing, z_loss, need_x, need_weight, target
    )


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Vocabularies of models and rows on and off the powers of two; the products are those of `linear`."""
    kind = getattr(torch, dtype)

    def calls(rows: int, inputs: int, classes: int) -> None:
        x = torch.empty(rows, inputs, dtype=kind, device="meta")
        w = torch.empty(classes, inputs, dtype=kind, device="meta")
        goal = torch.empty(rows, dtype=torch.int64, device="meta")
        one, lse = (torch.empty(s, dtype=torch.float32, device="meta") for s in ((), (rows,)))
        for smoothing in (0.0, 0.1):
            linear_cross_entropy(x, w, goal, None, -100, smoothing, 0.0, target)
        linear_cross_entropy_backward(one, x, w, goal, None, lse, -100, 0.0, 1e-4, True, True, target)

    shapes = [(8192, 4096, 128_256), (1021, 768, 50_257), (7, 67, 131), (3, 1, 5)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
