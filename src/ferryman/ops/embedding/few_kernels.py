"""The gradient of a table for few ids, in one launch on a table of zeros: sorting costs the host more than the sum.

A program for each place and part of the columns looks whether its id stands at an earlier place; if not, it sums the
gradient's rows at all places that have it, in their order, and ends with the last. Float32 until it is stored, no
atomics, bitwise repeatable. Limit: the table's bytes, written once and once more for the rows that occur; all ids are
read once for each place and part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import narrow, widen
from ferryman.ops.embedding.triton_kernels import _dense

BLOCK = 256  # columns of a program at most
TILE = 8192  # elements of the gradient that are added up at a time
WARPS = 4


@triton.jit(do_not_specialize=["count"])
def _embedding_backward_few(
    grad_ptr,
    ids_ptr,
    out_ptr,
    grad_row,
    count,
    height,
    width,
    scale,
    SCALED: tl.constexpr,
    IDS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = tl.cdiv(width, BLOCK)
    place = tl.program_id(0) // across
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    here = col < width
    row = tl.load(ids_ptr + place).to(tl.int64)
    if (row >= 0) & (row < height):
        other = tl.arange(0, IDS)
        same = tl.load(ids_ptr + other, mask=other < count, other=-1).to(tl.int64) == row
        # one reduction says both: an earlier place counts for more than all that are not
        seen = tl.sum(tl.where(same, tl.where(other < place, 2 * IDS, 1), 0))
        if seen < 2 * IDS:
            total = widen(tl.load(grad_ptr + place.to(tl.int64) * grad_row + col, mask=here, other=0.0))
            later = seen - 1
            first = place + 1
            while later > 0:
                run = first + tl.arange(0, RUN)
                hit = tl.load(ids_ptr + run, mask=run < count, other=-1).to(tl.int64) == row
                hits = tl.sum(hit.to(tl.int32))
                if hits > 0:
                    places = run.to(tl.int64)[:, None] * grad_row + col[None, :]
                    mask = hit[:, None] & here[None, :]
                    total += tl.sum(widen(tl.load(grad_ptr + places, mask=mask, other=0.0)), 0)
                later -= hits
                first += RUN
            if SCALED:
                total = total * scale
            tl.store(out_ptr + row * width + col, narrow(total, out_ptr.dtype.element_ty), mask=here)


def embedding_backward(grad: Tensor, ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    height, width = weight.shape
    count = ids.numel()
    out = torch.zeros(height, width, dtype=weight.dtype, device=weight.device)
    if out.numel() == 0 or count == 0:
        return out
    grad, ids = _dense(grad.reshape(count, width)), ids.contiguous()
    block = min(triton.next_power_of_2(width), BLOCK)
    compared = max(triton.next_power_of_2(count), 128)  # at most 2048, by the menu
    run = min(TILE // block, compared)
    grid = (count * triton.cdiv(width, block),)
    args = (grad, ids, out, grad.stride(0), count, height, width, 1.0 if scale is None else float(scale))
    launch(
        _embedding_backward_few,
        grid,
        *args,
        scale is not None,
        compared,
        run,
        block,
        device=weight.device,
        num_warps=WARPS,
    )
    return out


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Tables of models, one id and as many as it takes, ids of both kinds, with a scale and without."""
    kind = getattr(torch, dtype)

    def calls(count: int, height: int, width: int) -> None:
        weight = torch.empty(height, width, dtype=kind, device="meta")
        grad = torch.empty(count, width, dtype=kind, device="meta")
        for ids in (torch.empty(count, dtype=i, device="meta") for i in (torch.int64, torch.int32)):
            for scale in (None, 2.5):
                embedding_backward(grad, ids, weight, scale, target)

    shapes = [(1, 128_256, 4096), (2048, 32_000, 4096), (1016, 50_257, 768), (504, 2, 768), (512, 256_000, 5376)]
    shapes += [(200, 1000, 512), (5, 37, 67), (3, 5, 1)]
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
