"""Paged attention in Triton: the heads of a KV head's group are one tile of 16 rows, the keys of a sequence are divided
over programs, and a second kernel joins their parts in order. Limit: the bytes of the pages that a length reaches.

A program reads its sequence's length and pages on the device, so that one launch serves any lengths: programs beyond a
length end at once. Slots beyond it are neither read nor multiplied, since they may hold NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, narrow
from ferryman.errors import Unsupported

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_ROWS = 16  # the least that a matrix unit takes
_MOST_SPLITS = 64


@triton.jit(do_not_specialize=["most_pages", "page_size", "group", "heads", "share", "score_scale"])
def paged_attention_parts(
    q,
    k_cache,
    v_cache,
    page_table,
    lengths,
    parts,
    tops,
    sums,
    stride_qb,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_tb,
    stride_tj,
    stride_length,
    most_pages,
    page_size,
    group,
    heads,
    share,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (batch * KV heads, splits, tiles of a group's heads). parts (splits, B, H, D), tops and sums (splits, B, H),
    float32: of the keys [split * share, (split + 1) * share), P @ V, the largest score times log2(e), the sum of P."""
    kv_heads = heads // group
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) % kv_heads
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * group + row
    dim = tl.arange(0, BLOCK_D)
    row_inside = row < group
    inside = row_inside[:, None] & (dim < HEAD_DIM)[None, :]
    length = tl.minimum(tl.load(lengths + batch * stride_length), most_pages * page_size)
    lo = tl.program_id(1) * share
    hi = tl.minimum(lo + share, length)

    q_tile = tl.load(
        q + batch * stride_qb + head.to(tl.int64)[:, None] * stride_qh + dim[None, :], mask=inside, other=0.0
    )
    keys_of = k_cache + kv_head.to(tl.int64) * stride_kh
    values_of = v_cache + kv_head.to(tl.int64) * stride_vh
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(lo, hi, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        there = place < hi
        page = tl.load(
            page_table + batch * stride_tb + (place // page_size).to(tl.int64) * stride_tj, mask=there, other=0
        ).to(tl.int64)
        slot = (place % page_size).to(tl.int64)
        seen = there[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys_of + (page * stride_kp + slot * stride_ks)[:, None] + dim[None, :], mask=seen, other=0.0)
        v = tl.load(values_of + (page * stride_vp + slot * stride_vs)[:, None] + dim[None, :], mask=seen, other=0.0)
        s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * score_scale
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1), propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(p, 1)
        # a column beyond the keys is 0, also where the row is NaN
        weights = tl.where(there[None, :], p, 0.0)
        out = tl.dot(narrow(weights, v.dtype), v, out * kept[:, None], input_precision=PRECISION)
        top = higher
    all_rows = (tl.num_programs(0) // kv_heads).to(tl.int64) * heads
    to = tl.program_id(1) * all_rows + batch * heads + head
    tl.store(parts + to[:, None] * HEAD_DIM + dim[None, :], out, mask=inside)
    tl.store(tops + to, top, mask=row_inside)
    tl.store(sums + to, total, mask=row_inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def paged_attention_join(parts, tops, sums, result, rows, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (B * H). result (B, H, D): the parts of a row, each scaled to the largest score, over the sum."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([], float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(tops + split * rows.to(tl.int64) + row), propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for split in range(splits):
        place = split * rows.to(tl.int64) + row
        kept = tl.exp2(tl.load(tops + place) - shift)
        total += tl.load(sums + place) * kept
        out += tl.load(parts + place * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0) * kept
    out = tl.where(total == 0.0, 0.0, out / total)
    tl.store(result + row * HEAD_DIM + dim, narrow(out, result.dtype.element_ty), mask=dim < HEAD_DIM)


class Config(NamedTuple):
    block_n: int
    warps: int
    stages: int
    options: Mapping[str, Any] = {}


def _config(target: Target, dim: int, itemsize: int) -> Config:
    wide = dim * itemsize > 256
    if itemsize == 4 and dim > 128:  # IEEE products keep both operands in registers: less spills none
        return Config(16, 8, 1)
    if target.vendor == "amd":
        return Config(16 if wide else 32, 4, 1, {"waves_per_eu": 2})
    return Config(32 if wide else 64, 4, 2)


def _splits(target: Target, programs: int, room: int, block: int) -> int:
    """Programs enough for every unit twice, each with four blocks of keys at least."""
    wanted = triton.cdiv(2 * target.units, max(1, programs))
    return max(1, min(wanted, triton.cdiv(room, 4 * block), _MOST_SPLITS))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None,
    target: Target,
) -> Tensor:
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise Unsupported("paged_attention: Triton's interpreter multiplies bfloat16 as raw integers; use float16")
    batch, heads, dim = q.shape
    pages, size, groups, _ = k_cache.shape
    room = page_table.shape[1] * size
    if not q.numel() or not pages or not room:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group, config = heads // groups, _config(target, dim, q.element_size())
    splits = _splits(target, batch * groups, room, config.block_n)
    share = triton.cdiv(triton.cdiv(room, splits), config.block_n) * config.block_n
    parts = torch.empty((splits, batch, heads, dim), dtype=torch.float32, device=q.device)
    tops, sums = (torch.empty((splits, batch, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    block_d = max(16, triton.next_power_of_2(dim))
    factor = dim**-0.5 if scale is None else scale
    launch(
        paged_attention_parts,
        (batch * groups, splits, triton.cdiv(group, _ROWS)),
        q,
        k_cache,
        v_cache,
        page_table,
        lengths,
        parts,
        tops,
        sums,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *page_table.stride(),
        lengths.stride(0),
        page_table.shape[1],
        size,
        group,
        heads,
        share,
        factor * LOG2E.value,
        device=q.device,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=_ROWS,
        BLOCK_N=config.block_n,
        PRECISION="ieee",
        num_warps=config.warps,
        num_stages=config.stages,
        **config.options,
    )
    launch(
        paged_attention_join,
        (batch * heads,),
        parts,
        tops,
        sums,
        result,
        batch * heads,
        splits,
        device=q.device,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        num_warps=1,
        num_stages=1,
    )
    return result


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Heads of models, grouped and not, and one that is no power of two."""
    kind = getattr(torch, dtype)

    def call(heads: int, groups: int, dim: int, size: int) -> None:
        q = torch.empty(4, heads, dim, dtype=kind, device="meta")
        cache = torch.empty(64, size, groups, dim, dtype=kind, device="meta")
        table = torch.empty(4, 16, dtype=torch.int32, device="meta")
        paged_attention(q, cache, cache, table, table[:, 0].contiguous(), None, target)

    shapes = [(32, 8, 64, 16), (32, 8, 128, 16), (32, 8, 128, 64), (8, 8, 128, 16), (8, 1, 256, 16), (4, 2, 80, 7)]
    return recorded(lambda s=s: call(*s) for s in shapes)  # type: ignore[misc]
