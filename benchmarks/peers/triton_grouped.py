"""A layer of experts by a plain grouped product in Triton over tokens sorted by expert: a program for each tile of an
expert's rows and of its columns, tiles by autotuning, nothing fused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from ferryman_peers import _common, _experts
from torch import Tensor

NAME = "triton-grouped"
SLOW_START = True  # it compiles or tunes for seconds a call


def available() -> str | None:
    return _common.missing("triton")


def version() -> str:
    return str(triton.__version__)


_CONFIGS = [
    triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for n, k, warps, stages in ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 3), (256, 64, 8, 3), (64, 128, 4, 3))
]


@triton.autotune(configs=_CONFIGS, key=["columns", "depth", "BLOCK_M"])
@triton.jit
def _grouped(
    x_ptr,
    weight_ptr,
    y_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    columns,
    depth,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``tiles`` of rows; tile i has the rows from first[i] to end[i] of expert[i], none if they are empty."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    group = 8 * across  # eight tiles of rows share the columns that they read
    row = program // group * 8 + program % group % min(tiles - program // group * 8, 8)
    column = program % group // min(tiles - program // group * 8, 8)
    first, end = tl.load(first_ptr + row), tl.load(end_ptr + row)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_ptr += tl.load(expert_ptr + row).to(tl.int64) * columns * depth
    a = x_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    b = weight_ptr + n.to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, depth, BLOCK_K):
        left = tl.load(a, mask=(m[:, None] < end) & (k[None, :] < depth - at), other=0.0)
        right = tl.load(b, mask=(n[None, :] < columns) & (k[:, None] < depth - at), other=0.0)
        total = tl.dot(left, right, total)
        a += BLOCK_K
        b += BLOCK_K
    place = y_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < columns))


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    experts, columns, depth = weight.shape
    block = min(128, max(16, triton.next_power_of_2(len(x) // experts)))
    y = torch.empty(len(x), columns, dtype=x.dtype, device=x.device)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    last = torch.cumsum((ends - starts + block - 1) // block, 0)
    tiles = triton.cdiv(len(x), block) + min(experts, len(x))  # at most
    tile = torch.arange(tiles, device=x.device)
    expert = torch.searchsorted(last, tile, right=True).clamp(max=experts - 1)
    before = tile - torch.where(expert > 0, last[expert - 1], 0)
    first = (starts[expert] + before * block).int()
    _grouped[lambda meta: (tiles * triton.cdiv(columns, meta["BLOCK_N"]),)](
        x, weight.contiguous(), y, expert.int(), first, ends[expert].contiguous(), columns, depth, tiles, BLOCK_M=block
    )
    return y


def _forward(*args: Any) -> Callable[[], Any]:
    return functools.partial(_experts.layer, _product, *args)


OPS = {"moe_experts": _forward}
