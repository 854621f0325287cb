"""Products with weights of 4 bits in Triton: a tile of packed bytes is split into its even and its odd columns, which
are integers that 16 bits hold, and multiplied as such; a group's sum is then scaled in float32. The weight is never
rounded. Limit for few rows: the packed bytes; for many: the matrix units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, narrow, widen
from ferryman.backends.triton_rows import collapse_rows
from ferryman.errors import Unsupported


@triton.jit(do_not_specialize=["m"])
def linear_w4_tile(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    k,
    group,
    x_row,
    weight_row,
    scale_row,
    scale_col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y (m, n), dense = x (m, k) @ w (n, k).T + bias (n). A block of BLOCK_K columns lies in one group."""
    down = tl.cdiv(m, BLOCK_M)
    tile_m = (tl.program_id(0) % down) * BLOCK_M
    tile_n = (tl.program_id(0) // down) * BLOCK_N
    row = tile_m + tl.arange(0, BLOCK_M)
    col = tile_n + tl.arange(0, BLOCK_N)
    half = tl.arange(0, BLOCK_K // 2)
    row_inside = row < m
    col_inside = col < n
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_row + 2 * half[None, :]
    weight_ptrs = weight_ptr + col.to(tl.int64)[None, :] * weight_row + half[:, None]
    scale_ptrs = scales_ptr + col.to(tl.int64) * scale_row
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, group):
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, first + group, BLOCK_K):
            even = tl.load(x_ptrs + start, mask=row_inside[:, None], other=0.0)
            odd = tl.load(x_ptrs + start + 1, mask=row_inside[:, None], other=0.0)
            packed = tl.load(weight_ptrs + start // 2, mask=col_inside[None, :], other=0x88)
            low = ((packed & 15).to(tl.int8) - 8).to(even.dtype)
            high = ((packed >> 4).to(tl.int8) - 8).to(even.dtype)
            part = tl.dot(even, low, part, input_precision="ieee")
            part = tl.dot(odd, high, part, input_precision="ieee")
        scale = widen(tl.load(scale_ptrs + (first // group) * scale_col, mask=col_inside, other=0.0))
        total += part * scale[None, :]
    if bias_ptr is not None:
        total += widen(tl.load(bias_ptr + col, mask=col_inside, other=0.0))[None, :]
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(y_ptrs, narrow(total, y_ptr.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int
    options: Mapping[str, Any] = {}


def _tile(target: Target, itemsize: int, m: int, group: int) -> Tile:
    """k: the largest power of two up to 128 that divides a group."""
    k = min(group & -group, 64 if itemsize == 4 else 128)
    options = {"waves_per_eu": 2} if target.vendor == "amd" else {}
    stages = 3 if target.vendor == "nvidia" and target.shared_memory > 100_000 else 2
    if m <= 16:
        return Tile(16, 32, k, 4, stages, options)
    if itemsize == 4:
        return Tile(32, 32, min(k, 32), 4, 2, options)
    return Tile(64, 64, min(k, 64), 4, stages, options)


def linear_w4(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int, target: Target) -> Tensor:
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("linear_w4: Triton's interpreter multiplies bfloat16 as raw integers; use float16")
    n, depth = weight.shape[0], x.shape[-1]
    shape = (*x.shape[:-1], n)
    if not x.numel() or not weight.numel():
        y = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return y if bias is None else y.copy_(bias.expand(shape))
    x, m, x_row = collapse_rows(x)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    tile = _tile(target, x.element_size(), m, group)
    launch(
        linear_w4_tile,
        (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),),
        x,
        weight,
        scales,
        None if bias is None else bias.contiguous(),
        y,
        m,
        n,
        depth,
        group,
        x_row,
        weight.stride(0),
        *scales.stride(),
        tile.m,
        tile.n,
        tile.k,
        device=x.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **tile.options,
    )
    return y


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Decoding and prefill rows of projections, groups of 32 to 128, with a bias and without."""
    kind = getattr(torch, dtype)

    def call(rows: int, inputs: int, outputs: int, group: int) -> None:
        x = torch.empty(rows, inputs, dtype=kind, device="meta")
        packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(outputs, inputs // group, dtype=kind, device="meta")
        linear_w4(x, packed, scales, None, group, target)
        linear_w4(x, packed, scales, scales[:, 0].contiguous(), group, target)

    shapes = [(m, 4096, 4096, group) for m in (1, 16, 512) for group in (32, 64, 128)]
    return recorded(lambda s=s: call(*s) for s in [*shapes, (5, 96, 37, 32)])  # type: ignore[misc]
