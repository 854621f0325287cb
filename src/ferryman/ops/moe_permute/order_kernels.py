"""Slots in the order of their experts, in Triton, by counting: nothing is sorted, and nothing waits for the device.

Few slots take one kernel (`few_kernels`). Of more, one kernel counts each expert's slots in each block of slots, a
second adds up the blocks before, and a third places each slot behind those of lower experts, of earlier blocks, and of
its own block. A slot whose id is no expert's comes last, as one of an expert more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.triton import launch
from ferryman.ops.moe_permute.few_kernels import expert_of, ranked

ROWS = 64  # slots, or experts, of a program that places them
SLOTS = 256  # of a block: those that a program counts
EXPERTS = 64  # that are compared with them at once
COLUMNS, BLOCKS = 64, 16  # experts of a program that adds up blocks, and blocks at once


@triton.jit(do_not_specialize=["count", "experts"])
def count_slots(
    ids_ptr, counts_ptr, count, experts, slots, ids_row, ids_col, SLOTS: tl.constexpr, EXPERTS: tl.constexpr
):
    """counts (blocks, experts + 1): the slots that each expert has in a block, and none."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    theirs = expert_of(ids_ptr, slot, count, experts, slots, ids_row, ids_col)[None, :]
    live = (slot < count)[None, :]
    counts_ptr += tl.program_id(0).to(tl.int64) * (experts + 1)
    for begin in range(0, experts + 1, EXPERTS):
        expert = begin + tl.arange(0, EXPERTS)
        each = tl.sum(((theirs == expert[:, None]) & live).to(tl.int32), 1)
        tl.store(counts_ptr + expert, each, mask=expert <= experts)


@triton.jit(do_not_specialize=["blocks", "experts"])
def sum_counts(counts_ptr, totals_ptr, blocks, experts, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """counts (blocks, experts + 1) becomes what the blocks before have; totals (experts + 1,), what all have."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        at = counts_ptr + block.to(tl.int64)[:, None] * (experts + 1) + expert[None, :]
        here = (block < blocks)[:, None] & (expert <= experts)[None, :]
        each = tl.load(at, mask=here, other=0)
        tl.store(at, total[None, :] + tl.cumsum(each, 0) - each, mask=here)
        total += tl.sum(each, 0)
    tl.store(totals_ptr + expert, total, mask=expert <= experts)


@triton.jit(do_not_specialize=["count", "experts", "programs"])
def place_slots(
    ids_ptr,
    counts_ptr,
    totals_ptr,
    order_ptr,
    ends_ptr,
    count,
    experts,
    programs,
    slots,
    ids_row,
    ids_col,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDE: tl.constexpr,
):
    """The first ``programs`` place ROWS slots each, with HIDE -1 for one of no expert; the others add up ends."""
    program = tl.program_id(0)
    before = tl.zeros([ROWS], tl.int32)
    if program < programs:
        slot = program * ROWS + tl.arange(0, ROWS)
        live = slot < count
        own = expert_of(ids_ptr, slot, count, experts, slots, ids_row, ids_col)
        block = program * ROWS // SLOTS
        other = block * SLOTS + tl.arange(0, SLOTS)
        theirs = expert_of(ids_ptr, other, count, experts, slots, ids_row, ids_col)[None, :]
        before += tl.sum(((theirs == own[:, None]) & (other[None, :] < slot[:, None])).to(tl.int32), 1)
        before += tl.load(counts_ptr + block.to(tl.int64) * (experts + 1) + own, mask=live, other=0)
        for begin in range(0, experts, EXPERTS):
            expert = begin + tl.arange(0, EXPERTS)
            total = tl.load(totals_ptr + expert, mask=expert < experts, other=0)
            before += tl.sum(tl.where(expert[None, :] < own[:, None], total[None, :], 0), 1)
        placed = slot
        if HIDE:
            placed = tl.where(own < experts, slot, -1)
        tl.store(order_ptr + before, placed, mask=live)
    else:
        own = (program - programs) * ROWS + tl.arange(0, ROWS)
        for begin in range(0, experts, EXPERTS):
            expert = begin + tl.arange(0, EXPERTS)
            total = tl.load(totals_ptr + expert, mask=expert < experts, other=0)
            before += tl.sum(tl.where(expert[None, :] <= own[:, None], total[None, :], 0), 1)
        tl.store(ends_ptr + own, before, mask=own < experts)


def slots_by_rank(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(slots in the order of their experts, equal ones in their own; int32 end offsets). topk_ids: (T, slots).

    Slots whose id is no expert's come last, behind the last end. For few slots: each is compared with all."""
    order, ends = (torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in (topk_ids.numel(), experts))
    ranked(None, topk_ids, order, ends, False)
    return order, ends


def slots_by_count(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """`slots_by_rank` of any number of slots."""
    order, ends = (torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in (topk_ids.numel(), experts))
    counted(topk_ids, order, ends, False)
    return order, ends


def counted(topk_ids: Tensor, order: Tensor, ends: Tensor, hide: bool) -> None:
    """Fills the slots' order and the experts' ends; ``hide``: a slot whose id is no expert's is -1."""
    (count, experts), device = (len(order), len(ends)), topk_ids.device
    blocks = triton.cdiv(count, SLOTS)
    counts = torch.empty(blocks, experts + 1, dtype=torch.int32, device=device)
    totals = torch.empty(experts + 1, dtype=torch.int32, device=device)
    ids = (topk_ids.shape[1], *topk_ids.stride())
    launch(count_slots, (blocks,), topk_ids, counts, count, experts, *ids, SLOTS, EXPERTS, device=device, num_warps=4)
    columns = triton.cdiv(experts + 1, COLUMNS)
    launch(sum_counts, (columns,), counts, totals, blocks, experts, BLOCKS, COLUMNS, device=device, num_warps=4)
    programs = triton.cdiv(count, ROWS)
    launch(
        place_slots,
        (programs + triton.cdiv(experts, ROWS),),
        topk_ids,
        counts,
        totals,
        order,
        ends,
        count,
        experts,
        programs,
        *ids,
        ROWS,
        SLOTS,
        EXPERTS,
        hide,
        device=device,
        num_warps=4,
    )
