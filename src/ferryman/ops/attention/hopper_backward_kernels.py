"""Attention's backward pass on Hopper: what goes before and after the Gluon kernels, and their launcher.

One kernel for all three gradients, which multiplies 5 times where two, one for dK and dV and one for dQ, multiply 7
times: each tile of keys adds its part of dQ to a float32 sum, in whatever order the tiles come.
torch.use_deterministic_algorithms asks for the two kernels.

H200, bf16, TFLOP/s (of 5 products) to cuDNN's backward beside it, whose own clock moves by 10% with the power; medians:
causal B2 H32 S8192 D128 549 to 485, the two kernels 457; with 8 KV heads 546 to 470, 453; B4 H32 S2048 D128 415 to 367;
full B2 H32 S4096 D128 550 to 505, 448; causal B4 H32 S4096 D64 421 to 352, the two kernels 385; with 8 KV heads 437 to
349, 404; full B2 H32 S4096 D64 455 to 417, 412; 12 heads of B2 S1024 D64 50.0 us to 92.4, 54.8. With plain kernels the
first two and causal S4096 D64: 245, 242, 166. Spilling (by up to 248 bytes) the first three had 496, 497, 362.
Tried at D64: dQ within its own block, which waits for the other warpgroup's dS (0.94 of the speed); a third warpgroup
that sums dQ (1781 us where the two kernels took 1905); of the two kernels, warpgroups that take turns, blocks of 64
queries, and the last product a block later (none faster). At D128: dK before dQ (0.87 of the speed). Tiles dealt in
advance end unevenly (0.94).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ferryman.backends.base import Target
from ferryman.backends.triton import launch
from ferryman.ops.attention.hopper_dkv_kernels import BLOCK_N, attention_backward_dkv_hopper
from ferryman.ops.attention.hopper_dq_kernels import attention_backward_dq_hopper
from ferryman.ops.attention.hopper_kernels import _LOG2E, _described, _strides

_PADDING = 128  # query rows: that of the largest block
_HALF = tl.constexpr(64)  # columns of dQ that one warpgroup adds


@triton.jit(do_not_specialize=["num_heads", "num_queries", "padded"])
def attention_backward_rows(
    out, grad_out, grad_lse, lse, rows_lse, rows_delta,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, num_heads, num_queries, padded,
    HEAD_DIM: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["num_queries", "padded", "grad_scale"])
def attention_backward_cast(sums, grad_q, num_queries, padded, grad_scale, HEAD_DIM: tl.constexpr):
    """dQ from its float32 sum: 64 rows of a head. The sum is in the order of ``hopper_dkv_kernels._add_dq``."""
    tiles = tl.cdiv(num_queries, 64)
    first = tl.program_id(0) % tiles * 64
    head_id = (tl.program_id(0) // tiles).to(tl.int64)
    x = tl.load(sums + (head_id * padded + first) * HEAD_DIM + tl.arange(0, 64 * HEAD_DIM))
    # (half, 8 rows on, block of 16 columns, warp, row, quad, 8 columns on, column)
    x = tl.reshape(x, [HEAD_DIM // _HALF, 2, _HALF // 16, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [3, 1, 4, 0, 2, 6, 5, 7]), [64, HEAD_DIM])
    rows = tl.arange(0, 64)[:, None]
    to = grad_q + (head_id * num_queries + first) * HEAD_DIM + rows * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(to, (x * grad_scale).to(grad_q.dtype.element_ty), mask=first + rows < num_queries)


def _together(heads: int, most: int) -> int:
    """Of how many heads the tiles are claimed longest first, while the others' tensors stay out of the L2: 32 at once
    lost 8% at S8192 D128. In equal groups: a small one at the end would keep few programs busy."""
    return -(-heads // -(-heads // most))


def serves(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    """Whether `backward` takes the call, one without a window, a softcap or a mask, on a Hopper."""
    shaped = q.shape[-1] in (64, 128) and q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] >= 128
    numbered = q.shape[0] * q.shape[1] * (q.shape[2] + _PADDING) < 2**31  # rows, in 32 bits
    numbered = numbered and max(q.shape[2], k.shape[2]) * q.shape[3] < 2**31
    return shaped and numbered and math.isfinite(scale) and all(map(_described, (grad_out, q, k, v)))


def backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor,
    causal: bool, scale: float, deterministic: bool, target: Target,
) -> None:  # fmt: skip
    """The gradients, contiguous, are written; the rest as in ``triton_kernels.attention_backward``."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group, device = heads // kv_heads, q.device
    padded = -(-queries // _PADDING) * _PADDING
    rows_lse, rows_delta = (torch.empty((batch, heads, padded), dtype=torch.float32, device=device) for _ in range(2))
    counters = torch.zeros((2, 4), dtype=torch.int32, device=device)  # 16 bytes apart
    launch(
        attention_backward_rows, (batch * heads * (padded // 64),),
        out, grad_out, grad_lse, lse, rows_lse, rows_delta, *_strides(out), *_strides(grad_out),
        heads, queries, padded,
        device=device, HEAD_DIM=dim, HAS_GRAD_LSE=grad_lse is not None, num_warps=4,
    )  # fmt: skip
    sums = rows_lse if deterministic else torch.zeros((batch, heads, padded, dim), dtype=torch.float32, device=device)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(grad_out))
    score_scale = scale * _LOG2E
    tiles = -(-keys // BLOCK_N.value) * batch * kv_heads
    launch(
        attention_backward_dkv_hopper, (min(tiles, target.units),),
        q, k, v, grad_out, rows_lse, rows_delta, grad_k, grad_v, sums, counters[0], *strides,
        heads, kv_heads, group, _together(batch * kv_heads, 4), queries, keys, batch, padded, score_scale, scale,
        device=device, HEAD_DIM=dim, BLOCK_M=64 if dim == 128 else 128, CAUSAL=causal, FUSED=not deterministic,
        num_warps=4,
    )  # fmt: skip
    if deterministic:
        launch(
            attention_backward_dq_hopper, (min(-(-queries // 128) * batch * heads, target.units),),
            q, k, v, grad_out, rows_lse, rows_delta, grad_q, counters[1], *strides,
            heads, kv_heads, group, _together(batch * heads, 8), queries, keys, batch, padded, score_scale, scale,
            device=device, HEAD_DIM=dim, CAUSAL=causal, num_warps=4,
        )  # fmt: skip
    else:
        launch(
            attention_backward_cast, (batch * heads * -(-queries // 64),), sums, grad_q, queries, padded, scale,
            device=device, HEAD_DIM=dim, num_warps=4,
        )  # fmt: skip
