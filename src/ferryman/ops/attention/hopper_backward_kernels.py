"""Attention's backward pass on Hopper: what goes before and after the Gluon kernels, and their launcher.

`attention_backward_fused` has one kernel for all three gradients, which multiplies 5 times where the two of
`attention_backward_ordered`, one for dK and dV and one for dQ, multiply 7 times: each tile of keys adds its part of dQ
to a float32 sum, in whatever order the tiles come.

Spilling, even 100 bytes a thread, costs a tenth of the speed. At D64 dQ within its own block, which waits for the other
warpgroup's dS, is slower, and so is a third warpgroup that sums dQ; at D128 dK before dQ is. Tiles dealt in advance end
unevenly. Times beside cuDNN's: benchmarks/results/h200/full/attention_backward.md.
"""

from __future__ import annotations

import functools
import heapq
from typing import Any

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention.hopper_descriptor_kernels import operand, strides
from ferryman.ops.attention.hopper_dkv_kernels import BLOCK_N, attention_backward_dkv_hopper
from ferryman.ops.attention.hopper_dq_kernels import attention_backward_dq_hopper
from ferryman.ops.attention.hopper_kernels import runs_on
from ferryman.ops.attention.hopper_softmax_kernels import _LOG2E
from ferryman.ops.attention.sinks_kernels import delta_of
from ferryman.ops.attention.tile_kernels import _place
from ferryman.ops.attention.triton_kernels import backward_arguments, forms, gradients, rest, row_steps

_HEAD_DIMS = (64, 128)
_PADDING = 128  # query rows: that of the largest block
_HALF = tl.constexpr(64)  # columns of dQ that one warpgroup adds
# In turns, one of which takes a block of queries: beginning and ending a tile of keys; adding up the shares' parts.
_TILE_TURNS, _SUM_TURNS = 2.0, 2.0
_OF_L2 = 1.25  # what heads that are claimed together may fill
_MANY_TILES = 8  # for each unit: they end evenly
_PARTS_BYTES = 512 << 20  # what the shares' parts of dK and dV may take


@triton.jit(do_not_specialize=["num_heads", "num_queries", "padded"])
def attention_backward_rows(
    out,
    grad_out,
    grad_lse,
    lse,
    rows_lse,
    rows_delta,
    stride_ob,
    stride_oh,
    stride_om,
    stride_gb,
    stride_gh,
    stride_gm,
    num_heads,
    num_queries,
    padded,
    HEAD_DIM: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """lse in base 2, +inf where P is 0 (rows that see nothing, and beyond the end); rowsum(out * grad_out) - grad_lse.

    (B, H, padded): a tile of rows is read whole.
    """
    tiles = padded // 64
    head_id = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head_id // num_heads
    head = head_id % num_heads
    rows = tl.program_id(0) % tiles * 64 + tl.arange(0, 64)
    row_inside = rows < num_queries
    inside = row_inside[:, None]
    wide = rows.to(tl.int64)[:, None]
    cols = tl.arange(0, HEAD_DIM)[None, :]
    o = tl.load(out + batch * stride_ob + head * stride_oh + wide * stride_om + cols, mask=inside, other=0.0)
    g = tl.load(grad_out + batch * stride_gb + head * stride_gh + wide * stride_gm + cols, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse + head_id * num_queries + rows, mask=row_inside, other=0.0).to(tl.float32)
    log_sum = tl.load(lse + head_id * num_queries + rows, mask=row_inside, other=float("-inf")) * 1.4426950408889634
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum)
    tl.store(rows_lse + head_id * padded + rows, log_sum)
    tl.store(rows_delta + head_id * padded + rows, delta)


@triton.jit(do_not_specialize=["num_queries", "padded", "apart", "grad_scale"])
def attention_backward_cast(sums, grad_q, num_queries, padded, apart, grad_scale, HEAD_DIM: tl.constexpr):
    """dQ from its float32 sum: 64 rows of a head. The sum is in the order of ``hopper_fused_kernels.add_dq``."""
    tiles = tl.cdiv(num_queries, 64)
    first = tl.program_id(0) % tiles * 64
    head_id = (tl.program_id(0) // tiles).to(tl.int64)
    x = tl.load(sums + (head_id * padded + first) * HEAD_DIM + tl.arange(0, 64 * HEAD_DIM))
    # (half, 8 rows on, block of 16 columns, warp, row, quad, 8 columns on, column)
    x = tl.reshape(x, [HEAD_DIM // _HALF, 2, _HALF // 16, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [3, 1, 4, 0, 2, 6, 5, 7]), [64, HEAD_DIM])
    rows = first + tl.arange(0, 64)
    to = grad_q + (_place(head_id, rows, num_queries, apart) * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(to, (x * grad_scale).to(grad_q.dtype.element_ty), mask=(rows < num_queries)[:, None])


@triton.jit(do_not_specialize=["shares", "apart"])
def attention_backward_sum(parts, grad_k, grad_v, shares, size, apart, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """dK and dV, ``size`` elements of each head, in rows that are ``apart`` rows apart, from their ``parts`` (2, heads,
    shares, size), float32, in the order of the shares."""
    tiles = tl.cdiv(size, BLOCK)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    which = tl.program_id(1)
    heads = tl.num_programs(0) // tiles
    first = (which * heads + head) * shares
    total = tl.zeros([BLOCK], tl.float32)
    for share in range(shares):
        total += tl.load(parts + (first + share) * size + columns, mask=inside, other=0.0)
    to = grad_k
    if which == 1:
        to = grad_v
    place = _place(head, columns // HEAD_DIM, size // HEAD_DIM, apart)
    tl.store(to + place * HEAD_DIM + columns % HEAD_DIM, total.to(grad_k.dtype.element_ty), mask=inside)


@functools.lru_cache(maxsize=4096)
def deal(
    batch: int, kv_heads: int, group: int, queries: int, keys: int, dim: int, causal: bool, units: int, l2_bytes: int
) -> tuple[int, int]:
    """(among how many programs a group's query heads are shared, of how many KV heads the tiles are claimed together).

    Together, the tiles of heads are claimed longest first, and these heads' tensors should lie in the L2. Shares are
    for few tiles, or for those that end unevenly: with the least time of `_last_end` and the sum of parts, as far as
    the parts' memory allows.
    """
    per_head = dim * (2 * queries * group * (2 + 2) + 2 * keys * 2)  # Q, dO, the sum of dQ; K, V
    most = max(1, int(_OF_L2 * l2_bytes) // per_head) if l2_bytes else 4
    together = _together(batch * kv_heads, most)
    if -(-keys // BLOCK_N.value) * batch * kv_heads >= _MANY_TILES * units:
        return 1, together

    def time(shares: int) -> float:
        ends = _last_end(batch * kv_heads, group, shares, together, queries, keys, dim, causal, units)
        return ends + (_SUM_TURNS if shares > 1 else 0.0)

    fitting = _PARTS_BYTES // (batch * kv_heads * keys * dim * 2 * 4)  # dK and dV, float32
    return min((n for n in range(1, min(group, max(fitting, 1)) + 1) if group % n == 0), key=time), together


def _last_end(
    kv_heads: int, group: int, shares: int, together: int, queries: int, keys: int, dim: int, causal: bool, units: int
) -> float:
    """When the last tile ends, in turns of a block of queries, if each program claims the next one as it is done."""
    turns = -(-queries // _block_m(dim))
    seen = [
        turns - min(max(0, first - (keys - queries)) // _block_m(dim), turns) if causal else turns
        for first in range(0, keys, BLOCK_N.value)
    ]
    programs = [0.0] * units
    for first in range(0, kv_heads, together):
        for tile in seen:
            for _ in range(min(together, kv_heads - first) * shares):
                heapq.heapreplace(programs, programs[0] + tile * group / shares + _TILE_TURNS)
    return max(programs)


def _block_m(dim: int) -> int:
    return 64 if dim == 128 else 128


def _together(heads: int, most: int) -> int:
    """Groups of ``most`` at most, equal ones: a small one at the end would keep few programs busy."""
    return -(-heads // -(-heads // most))


def attention_backward_fused(*given: Any) -> tuple[torch.Tensor, ...]:
    """The arguments of `attention_backward`, and a Target. Two runs add to dQ in different orders."""
    return _gradients(*given, ordered=False)


def attention_backward_ordered(*given: Any) -> tuple[torch.Tensor, ...]:
    """The arguments of `attention_backward`, and a Target. Two runs give the same bits."""
    return _gradients(*given, ordered=True)


def _gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
    *,
    ordered: bool,
) -> tuple[torch.Tensor, ...]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grad_q, grad_k, grad_v = gradients(q, k, v)
    apart_q, apart_k = row_steps(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: delta_of(grad_out, grad_lse, out), lse)
    (grad_out, over_g), (q, over_q), (k, over_k), (v, over_v) = map(operand, (grad_out, q, k, v))
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    scale = dim**-0.5 if scale is None else scale
    group, device = heads // kv_heads, q.device
    padded = -(-queries // _PADDING) * _PADDING
    rows_lse, rows_delta = (torch.empty((batch, heads, padded), dtype=torch.float32, device=device) for _ in range(2))
    counters = torch.zeros((2, 4), dtype=torch.int32, device=device)  # 16 bytes apart
    launch(
        attention_backward_rows,
        (batch * heads * (padded // 64),),
        out,
        grad_out,
        grad_lse,
        lse,
        rows_lse,
        rows_delta,
        *strides(out),
        *over_g,
        heads,
        queries,
        padded,
        device=device,
        HEAD_DIM=dim,
        HAS_GRAD_LSE=grad_lse is not None,
        num_warps=4,
    )
    sums = rows_lse if ordered else torch.zeros((batch, heads, padded, dim), dtype=torch.float32, device=device)
    steps = (*over_q, *over_k, *over_v, *over_g)
    score_scale = scale * _LOG2E.value
    tiles = -(-keys // BLOCK_N.value) * batch * kv_heads
    shares, together = deal(batch, kv_heads, group, queries, keys, dim, causal, target.units, target.l2_bytes)
    to_k, to_v = grad_k, grad_v
    apart_to = apart_k
    if shares > 1:
        apart_to = 1
        parts = torch.empty((2, batch * kv_heads, shares, keys * dim), dtype=torch.float32, device=device)
        to_k, to_v = parts[0], parts[1]
    launch(
        attention_backward_dkv_hopper,
        (min(tiles * shares, target.units),),
        q,
        k,
        v,
        grad_out,
        rows_lse,
        rows_delta,
        to_k,
        to_v,
        sums,
        counters[0],
        *steps,
        heads,
        kv_heads * shares,
        shares,
        group // shares,
        together * shares,
        queries,
        keys,
        batch,
        padded,
        apart_to,
        score_scale,
        scale,
        device=device,
        HEAD_DIM=dim,
        BLOCK_M=_block_m(dim),
        CAUSAL=causal,
        FUSED=not ordered,
        num_warps=4,
    )
    if shares > 1:
        launch(
            attention_backward_sum,
            (batch * kv_heads * triton.cdiv(keys * dim, 1024), 2),
            parts,
            grad_k,
            grad_v,
            shares,
            keys * dim,
            apart_k,
            device=device,
            HEAD_DIM=dim,
            BLOCK=1024,
            num_warps=4,
        )
    if ordered:
        launch(
            attention_backward_dq_hopper,
            (min(-(-queries // 128) * batch * heads, target.units),),
            q,
            k,
            v,
            grad_out,
            rows_lse,
            rows_delta,
            grad_q,
            counters[1],
            *steps,
            heads,
            kv_heads,
            group,
            _together(batch * heads, 8),
            queries,
            keys,
            batch,
            padded,
            apart_q,
            score_scale,
            scale,
            device=device,
            HEAD_DIM=dim,
            CAUSAL=causal,
            num_warps=4,
        )
    else:
        launch(
            attention_backward_cast,
            (batch * heads * -(-queries // 64),),
            sums,
            grad_q,
            queries,
            padded,
            apart_q,
            scale,
            device=device,
            HEAD_DIM=dim,
            num_warps=4,
        )
    return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: rows_delta[..., :queries], lse)


def specialisations(target: Target, dtype: str, head_dims: tuple[int, ...] = _HEAD_DIMS) -> list[Specialisation]:
    """What both compile: causal and full, and few keys, whose query heads are shared among programs."""
    kind = getattr(torch, dtype)
    dims = tuple(d for d in head_dims if d in _HEAD_DIMS)
    if not runs_on(target) or kind == torch.float32 or not dims:
        return []
    calls = []
    for form in forms(target, kind, dims):
        q, k, _, *options = form
        if q.shape[2] == 1 or options[1:] != [None, None, 0.0, None, None, None, None, 0.0, None]:
            continue
        few = (q, k[:, :1, :128], k[:, :1, :128], *options)
        for given in (form, few):
            arguments = (*backward_arguments(given, False), target)
            calls += [
                functools.partial(run, *arguments) for run in (attention_backward_fused, attention_backward_ordered)
            ]
    return recorded(calls)
