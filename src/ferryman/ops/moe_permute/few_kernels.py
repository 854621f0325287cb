"""`moe_permute` of few slots, and their order alone, in one Triton kernel: a slot's rank is how many slots come before
it, counted.

Counting reads all ids once for each few slots, and spares the launches of a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded

ROWS = 4  # slots, or experts, of a program
SLOTS = 256  # that are compared with them at once
PIECE = 1024  # elements of a row
ALONE = 256  # slots up to which a program takes one piece of its rows; beyond, all: it counts once


@triton.jit
def expert_of(ids_ptr, slot, count, experts, slots, ids_row, ids_col):
    """The expert of each slot, ``experts`` where its id is no expert's."""
    token, choice = (slot // slots).to(tl.int64), slot % slots
    ids = tl.load(ids_ptr + token * ids_row + choice * ids_col, mask=slot < count, other=-1)
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


@triton.jit(do_not_specialize=["count", "experts", "programs"])
def rows_by_rank(
    x_ptr,
    ids_ptr,
    out_ptr,
    ends_ptr,
    source_ptr,
    count,
    experts,
    programs,
    width,
    slots,
    each,
    x_row,
    x_col,
    ids_row,
    ids_col,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
    HIDE: tl.constexpr,
):
    """The first ``programs`` place ROWS slots each, with HIDE -1 for one of no expert, and copy ``each`` columns of
    their rows of x, where there is one; the others count ends."""
    program = tl.program_id(0)
    counted = tl.zeros([ROWS], tl.int32)
    if program < programs:
        across = tl.maximum(tl.cdiv(width, each), 1)
        slot = (program // across) * ROWS + tl.arange(0, ROWS)
        own = expert_of(ids_ptr, slot, count, experts, slots, ids_row, ids_col)
        for begin in range(0, count, SLOTS):
            other = begin + tl.arange(0, SLOTS)
            theirs = expert_of(ids_ptr, other, count, experts, slots, ids_row, ids_col)[None, :]
            earlier = (other[None, :] < slot[:, None]) & (theirs == own[:, None])
            before = ((theirs < own[:, None]) | earlier) & (other < count)[None, :]
            counted += tl.sum(before.to(tl.int32), 1)
        live = slot < count
        known = live & (own < experts)
        begins = (program % across) * each
        placed = slot
        if HIDE:
            placed = tl.where(known, slot, -1)
        tl.store(source_ptr + counted, placed, mask=live & (begins == 0))  # by one program
        if x_ptr is not None:
            x_rows = x_ptr + (tl.where(known, slot, 0) // slots).to(tl.int64)[:, None] * x_row
            out_rows = out_ptr + counted.to(tl.int64)[:, None] * width
            for begin in range(begins, tl.minimum(begins + each, width), PIECE):
                col = begin + tl.arange(0, PIECE)
                here = (col < width)[None, :]
                x = tl.load(x_rows + col[None, :] * x_col, mask=known[:, None] & here, other=0.0)
                tl.store(out_rows + col[None, :], x, mask=live[:, None] & here)
    else:
        expert = (program - programs) * ROWS + tl.arange(0, ROWS)
        for begin in range(0, count, SLOTS):
            other = begin + tl.arange(0, SLOTS)
            theirs = expert_of(ids_ptr, other, count, experts, slots, ids_row, ids_col)[None, :]
            upto = (theirs <= expert[:, None]) & (other < count)[None, :]
            counted += tl.sum(upto.to(tl.int32), 1)
        tl.store(ends_ptr + expert, counted, mask=expert < experts)


def ranked(x: Tensor | None, topk_ids: Tensor, order: Tensor, ends: Tensor, hide: bool) -> Tensor | None:
    """Fills the slots' order and the experts' ends; x's rows in that order, where there is an x."""
    count, experts = topk_ids.numel(), len(ends)
    width = 0 if x is None else x.shape[1]
    rows = None if x is None else torch.empty(count, width, dtype=x.dtype, device=x.device)
    each = PIECE if count <= ALONE else max(width, 1)
    programs = triton.cdiv(count, ROWS) * max(triton.cdiv(width, each), 1)
    launch(
        rows_by_rank,
        (programs + triton.cdiv(experts, ROWS),),
        x,
        topk_ids,
        rows,
        ends,
        order,
        count,
        experts,
        programs,
        width,
        topk_ids.shape[1],
        each,
        *((0, 0) if x is None else x.stride()),
        *topk_ids.stride(),
        ROWS,
        SLOTS,
        PIECE,
        hide,
        device=topk_ids.device,
        num_warps=4,
    )
    return rows


def moe_permute(x: Tensor, topk_ids: Tensor, num_experts: int, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    order, ends = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (topk_ids.numel(), num_experts))
    rows = ranked(x, topk_ids, order, ends, True)
    assert rows is not None
    return rows, ends, order


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Layers of models, one token and some, and widths off every tile."""
    kind = getattr(torch, dtype)

    def call(shape: tuple[int, int, int, int], ids: torch.dtype) -> None:
        tokens, experts, slots, width = shape
        x = torch.empty(tokens, width, dtype=kind, device="meta")
        moe_permute(x, torch.empty(tokens, slots, dtype=ids, device="meta"), experts, target)

    shapes = [(1, 8, 2, 4096), (128, 128, 8, 2048), (32, 256, 8, 7168), (17, 5, 3, 67)]
    return recorded(lambda s=s, i=i: call(s, i) for s in shapes for i in (torch.int32, torch.int64))  # type: ignore[misc]
