"""Attention's backward pass on Hopper, in Gluon: warp-specialised, with TMA and asynchronous warpgroup products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from ferryman.backends.base import Target
from ferryman.backends.triton import launch
from ferryman.ops.attention.hopper_kernels import _barriers, _named_barrier, _strides

_LOG2E = 1.4426950408889634
PAD = 128


# ------------------------------------------------------------------------------------------------- before and after


@triton.jit(do_not_specialize=["num_heads", "num_queries", "padded"])
def attention_backward_rows(
    out, grad_out, grad_lse, lse, rows_lse, rows_delta,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    num_heads, num_queries, padded,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """lse in base 2, +inf where P is 0 (rows that see nothing, padding), and delta = rowsum(out * grad_out) - grad_lse."""
    tiles = padded // BLOCK_M
    tile = tl.program_id(0) % tiles
    head_id = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head_id // num_heads
    head = head_id % num_heads
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, HEAD_DIM)
    inside = rows < num_queries
    wide = rows.to(tl.int64)[:, None]
    o = tl.load(out + batch * stride_ob + head * stride_oh + wide * stride_om + cols, mask=inside[:, None], other=0.0)
    g = tl.load(
        grad_out + batch * stride_gb + head * stride_gh + wide * stride_gm + cols, mask=inside[:, None], other=0.0
    )
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse + head_id * num_queries + rows, mask=inside, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head_id * num_queries + rows, mask=inside, other=float("-inf")) * 1.4426950408889634
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    tl.store(rows_lse + head_id * padded + rows, row_lse)
    tl.store(rows_delta + head_id * padded + rows, delta)


@triton.jit(do_not_specialize=["num_queries", "padded", "grad_scale"])
def attention_backward_cast(
    sums, grad_q, num_queries, padded, grad_scale, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """``sums`` is in the order of `_add_dq`, in parts of WIDTH columns."""
    tiles = tl.cdiv(num_queries, 64)
    tile = tl.program_id(0) % tiles
    head_id = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.arange(0, 64)[:, None]
    col = tl.arange(0, HEAD_DIM)[None, :]
    inside = tile * 64 + row < num_queries
    within = col % WIDTH
    thread = row // 16 * 32 + row % 8 * 4 + within // 2 % 4
    chunk = col // WIDTH * (WIDTH // 8) + row // 8 % 2 * (WIDTH // 16) + within // 16
    at = chunk * 512 + thread * 4 + within // 8 % 2 * 2 + within % 2
    x = tl.load(sums + (head_id * padded + tile * 64) * HEAD_DIM + at)
    x = (x * grad_scale).to(grad_q.dtype.element_ty)
    to = grad_q + (head_id * num_queries + tile * 64) * HEAD_DIM
    tl.store(to + row * HEAD_DIM + col, x, mask=inside)


# ---------------------------------------------------------------------------------------------------- shared pieces


@gluon.jit
def _keys_place(
    index, num_tiles, heads, heads_together, num_queries, num_keys,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(first key, KV head of the batch, first block of queries, blocks, leading turns with masks, 1 if the last block
    of queries comes first): the tile with most queries, key 0's, is first."""
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.minimum(heads_together, heads - head_first)
    within = index % group_size
    first = within // count * BLOCK_N
    head = head_first + within % count
    ends = gl.cdiv(num_queries, BLOCK_M)
    low = 0
    full = 0
    if CAUSAL:
        shift = num_keys - num_queries
        low = gl.minimum(gl.maximum(first - shift, 0) // BLOCK_M, ends)
        full = gl.minimum(gl.cdiv(gl.maximum(first + BLOCK_N - 1 - shift, 0), BLOCK_M), ends)
    turns = ends - low
    tail = gl.minimum(gl.minimum(num_queries % BLOCK_M, 1), turns)
    edges = gl.minimum(tail + gl.maximum(full - low, 0), turns)
    if first + BLOCK_N > num_keys:
        edges = turns
    return first, head, low, turns, edges, tail


@gluon.jit
def _block_of(turn, low, turns, tail):
    block = low + turn - tail
    if turn < tail:
        block = low + turns - 1
    return block


@gluon.jit
def _snake(turn):
    programs = gl.num_programs(0)
    index = turn * programs + gl.program_id(0)
    if turn % 2 == 1:
        index = turn * programs + programs - 1 - gl.program_id(0)
    return index


@triton.constexpr_function
def _reduction(offset):
    return f"{{ red.relaxed.gpu.global.add.v4.f32 [$1 + {offset}], {{$2, $3, $4, $5}}; mov.u32 $0, 0; }}"


@gluon.jit
def _add_chunks(x, pointer, OFFSET: gl.constexpr):
    """x (4, 8, 4, chunks, 4): warp, row, quad of columns, then a thread's own; a chunk is 16 bytes of each thread."""
    CHUNKS: gl.constexpr = x.shape[3]
    if CHUNKS > 1:
        low, high = gl.split(gl.permute(gl.reshape(x, [4, 8, 4, 2, CHUNKS // 2, 4]), [0, 1, 2, 4, 5, 3]))
        _add_chunks(low, pointer, OFFSET)
        _add_chunks(high, pointer, OFFSET + CHUNKS // 2 * 2048)
    else:
        even, odd = gl.split(gl.reshape(x, [4, 8, 4, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        layout: gl.constexpr = x0.type.layout
        warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        thread = warp[:, None, None] * 512 + row[None, :, None] * 64 + quad[None, None, :] * 16
        gl.inline_asm_elementwise(
            _reduction(OFFSET), "=r,l,r,r,r,r", [pointer + thread, x0, x1, x2, x3], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _add_dq(dq, sums, row, PART: gl.constexpr, PARTS: gl.constexpr):
    """Adds a (64, N) part of dQ, in the order of the threads' registers: `attention_backward_cast` knows it."""
    N: gl.constexpr = dq.shape[1]
    x = gl.permute(gl.reshape(dq, [4, 2, 8, N // 16, 2, 4, 2]), [0, 2, 5, 1, 3, 4, 6])
    x = gl.reshape(x, [4, 8, 4, N // 8, 4])
    pointer = (sums + row.to(gl.int64) * (N * PARTS)).to(gl.int64, bitcast=True)
    _add_chunks(x, pointer, PART * N * 256)


# ---------------------------------------------------------------------------------------------------- dK, dV (and dQ)


@gluon.jit
def _dkv_blocks(
    dk, dv, step, begin, end, low, turns, tail, first_key, num_queries, num_keys, score_scale, sums, sums_row,
    k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty, do_full, do_empty,
    ds_full, ds_empty,
    WORKER: gl.constexpr, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr, LATE: gl.constexpr, DK_FIRST: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    key_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    none = gl.zeros([64, BLOCK_M], gl.float32, score_layout)
    for turn in range(begin, end):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q_tile = q_ring.index(slot)
        do_tile = do_ring.index(slot)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(
            k_tiles.index(WORKER), q_tile.permute((1, 0)), none, use_acc=False, is_async=True
        )
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v_tiles.index(WORKER), do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        row_lse = lse_ring.index(slot).load(row_layout)
        scores = scores * score_scale
        if EDGE:
            rows = _block_of(turn, low, turns, tail) * BLOCK_M + gl.arange(0, BLOCK_M, row_layout)
            keys = first_key + gl.arange(0, 64, key_layout)
            inside = (rows < num_queries)[None, :] & (keys < num_keys)[:, None]
            seen = inside
            if CAUSAL:
                seen = seen & (keys[:, None] <= (rows + (num_keys - num_queries))[None, :])
            scores = gl.where(seen, scores, float("-inf"))
        p = gl.exp2(scores - row_lse[None, :])
        if not LATE:
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
            dp = warpgroup_mma_wait(1, [dp])
            row_delta = delta_ring.index(slot).load(row_layout)
        else:
            dp = warpgroup_mma_wait(0, [dp])
            row_delta = delta_ring.index(slot).load(row_layout)
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        ds = p * (dp - row_delta[None, :])
        if EDGE:
            ds = gl.where(inside, ds, 0.0)
        ds16 = ds.to(dtype)
        if DQ == 1:
            buffer = (step % DS_STAGES) * WORKERS
            dsa = gl.convert_layout(ds16, a_layout)
            if DK_FIRST:
                dk = warpgroup_mma(dsa, q_tile, dk, is_async=True)
            ds_ring.index(buffer + WORKER).store(ds16)
            fence_async_shared()
            _named_barrier("sync", 8)
            if BLOCK_M == 64:
                width: gl.constexpr = HEAD_DIM // WORKERS
                dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
                dq = gl.zeros([64, width], gl.float32, dq_layout)
                for other in gl.static_range(WORKERS):
                    dq = warpgroup_mma(
                        ds_ring.index(buffer + other).permute((1, 0)),
                        k_tiles.index(other).slice(width * WORKER, width, 1), dq, use_acc=other > 0, is_async=True,
                    )  # fmt: skip
            else:
                dq_layout: gl.constexpr = acc_layout
                dq = gl.zeros([64, HEAD_DIM], gl.float32, dq_layout)
                for other in gl.static_range(WORKERS):
                    dq = warpgroup_mma(
                        ds_ring.index(buffer + other).slice(64 * WORKER, 64, 1).permute((1, 0)),
                        k_tiles.index(other), dq, use_acc=other > 0, is_async=True,
                    )  # fmt: skip
            block = low + turn - tail
            if EDGE:
                block = _block_of(turn, low, turns, tail)
            row = sums_row + block * BLOCK_M
            if not DK_FIRST:
                dk = warpgroup_mma(dsa, q_tile, dk, is_async=True)
                dv = warpgroup_mma_wait(1 + WORKERS, [dv])
                mbarrier.arrive(do_empty.index(slot))
                dq = warpgroup_mma_wait(1, [dq])
            else:
                dv, dk = warpgroup_mma_wait(WORKERS, [dv, dk])
                mbarrier.arrive(do_empty.index(slot))
                mbarrier.arrive(q_empty.index(slot))
                dq = warpgroup_mma_wait(0, [dq])
            if BLOCK_M == 64:
                _add_dq(dq, sums, row, WORKER, WORKERS)
            else:
                _add_dq(dq, sums, row + 64 * WORKER, 0, 1)
            if not DK_FIRST:
                dk = warpgroup_mma_wait(0, [dk])
                mbarrier.arrive(q_empty.index(slot))
        else:
            if DQ == 2:
                place = step % DS_STAGES
                mbarrier.wait(ds_empty.index(place), (step // DS_STAGES) & 1 ^ 1)
                ds_ring.index(place * WORKERS + WORKER).store(ds16)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(ds_full.index(place))
            dsa = gl.convert_layout(ds16, a_layout)
            dk = warpgroup_mma(dsa, q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(1, [dv])
            mbarrier.arrive(do_empty.index(slot))
            dk = warpgroup_mma_wait(0, [dk])
            mbarrier.arrive(q_empty.index(slot))
        step += 1
    return dk, dv, step


@gluon.jit
def _store_rows(x, to, base, first, num_rows, HEAD_DIM: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    x = gl.convert_layout(x, layout)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    gl.store(to + base * HEAD_DIM + (rows[:, None] * HEAD_DIM + cols[None, :]), x, mask=(rows < num_rows)[:, None])


@gluon.jit
def _dkv_consume(
    arguments, WORKER: gl.constexpr, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr, LATE: gl.constexpr,
    DK_FIRST: gl.constexpr,
):  # fmt: skip
    (
        grad_k, grad_v, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring,
        k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
        num_tiles, kv_heads_all, group, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = 64 * WORKERS
    dtype: gl.constexpr = q_ring.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    step = 0
    total = num_tiles * kv_heads_all
    for round in range(gl.cdiv(total, gl.num_programs(0))):
        index = _snake(round)
        if index < total:
            first, head, low, turns, edges, tail = _keys_place(
                index, num_tiles, kv_heads_all, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
            )
            mine = first + 64 * WORKER
            dk = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
            dv = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
            mbarrier.wait(k_full, round & 1)
            mbarrier.wait(v_full, round & 1)
            for member in range(group):
                sums_row = (head * group + member) * padded
                dk, dv, step = _dkv_blocks(
                    dk, dv, step, 0, edges, low, turns, tail, mine, num_queries, num_keys, score_scale, sums, sums_row,
                    k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty, do_full,
                    do_empty, ds_full, ds_empty,
                    WORKER, WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST, True,
                )  # fmt: skip
                dk, dv, step = _dkv_blocks(
                    dk, dv, step, edges, turns, low, turns, tail, mine, num_queries, num_keys, score_scale, sums,
                    sums_row, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty,
                    do_full, do_empty, ds_full, ds_empty,
                    WORKER, WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST, False,
                )  # fmt: skip
            mbarrier.arrive(kv_empty)
            base = head.to(gl.int64) * num_keys
            _store_rows((dk * grad_scale).to(dtype), grad_k, base, mine, num_keys, HEAD_DIM)
            _store_rows(dv.to(dtype), grad_v, base, mine, num_keys, HEAD_DIM)


@gluon.jit
def _dq_sum(
    arguments, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, DS_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """dQ += dS K by a warpgroup of its own."""
    (
        sums, k_tiles, ds_ring, k_full, kv_empty, ds_full, ds_empty,
        num_tiles, kv_heads_all, group, heads_together, num_queries, num_keys, padded,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = 64 * WORKERS
    WIDTH: gl.constexpr = HEAD_DIM // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    step = 0
    total = num_tiles * kv_heads_all
    none = gl.zeros([64, WIDTH], gl.float32, layout)
    for round in range(gl.cdiv(total, gl.num_programs(0))):
        index = _snake(round)
        if index < total:
            _, head, low, turns, _, tail = _keys_place(
                index, num_tiles, kv_heads_all, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
            )
            mbarrier.wait(k_full, round & 1)
            for member in range(group):
                for turn in range(turns):
                    place = step % DS_STAGES
                    row = (head * group + member) * padded + _block_of(turn, low, turns, tail) * BLOCK_M
                    mbarrier.wait(ds_full.index(place), (step // DS_STAGES) & 1)
                    for half in gl.static_range(BLOCK_M // 64):
                        for part in gl.static_range(PARTS):
                            dq = none
                            for worker in gl.static_range(WORKERS):
                                dq = warpgroup_mma(
                                    ds_ring.index(place * WORKERS + worker).slice(64 * half, 64, 1).permute((1, 0)),
                                    k_tiles.index(worker).slice(WIDTH * part, WIDTH, 1), dq,
                                    use_acc=worker > 0, is_async=True,
                                )  # fmt: skip
                            dq = warpgroup_mma_wait(0, [dq])
                            if half == BLOCK_M // 64 - 1 and part == PARTS - 1:
                                mbarrier.arrive(ds_empty.index(place))
                            _add_dq(dq, sums, row + 64 * half, part, PARTS)
                    step += 1
            mbarrier.arrive(kv_empty)


@gluon.jit
def _dkv_produce(
    arguments, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty,
        num_tiles, kv_heads, kv_heads_all, group, heads_together, num_queries, num_keys, padded,
    ) = arguments  # fmt: skip
    BLOCK_N: gl.constexpr = 64 * WORKERS
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    step = 0
    total = num_tiles * kv_heads_all
    for round in range(gl.cdiv(total, gl.num_programs(0))):
        index = _snake(round)
        if index < total:
            first, head, low, turns, _, tail = _keys_place(
                index, num_tiles, kv_heads_all, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
            )
            batch = head // kv_heads
            kv_head = head % kv_heads
            mbarrier.wait(kv_empty, round & 1 ^ 1)
            mbarrier.expect(k_full, BLOCK_N * HEAD_DIM * 2)
            for worker in gl.static_range(WORKERS):
                tma.async_copy_global_to_shared(
                    k_desc, [batch, kv_head, first + 64 * worker, 0], k_full,
                    k_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
                )  # fmt: skip
            mbarrier.expect(v_full, BLOCK_N * HEAD_DIM * 2)
            for worker in gl.static_range(WORKERS):
                tma.async_copy_global_to_shared(
                    v_desc, [batch, kv_head, first + 64 * worker, 0], v_full,
                    v_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
                )  # fmt: skip
            for member in range(group):
                query_head = kv_head * group + member
                rows = (head * group + member) * padded
                for turn in range(turns):
                    row = _block_of(turn, low, turns, tail) * BLOCK_M
                    slot = step % STAGES
                    free = (step // STAGES) & 1 ^ 1
                    mbarrier.wait(q_empty.index(slot), free)
                    mbarrier.expect(q_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                    tma.async_copy_global_to_shared(
                        q_desc, [batch, query_head, row, 0], q_full.index(slot),
                        q_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(lse_desc, [rows + row], q_full.index(slot), lse_ring.index(slot))
                    mbarrier.wait(do_empty.index(slot), free)
                    mbarrier.expect(do_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                    tma.async_copy_global_to_shared(
                        do_desc, [batch, query_head, row, 0], do_full.index(slot),
                        do_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        delta_desc, [rows + row], do_full.index(slot), delta_ring.index(slot)
                    )
                    step += 1


_DYNAMIC = [
    "num_heads", "kv_heads", "group", "heads_together", "num_queries", "num_keys", "batch", "padded",
    "score_scale", "grad_scale",
]  # fmt: skip


@gluon.jit(do_not_specialize=_DYNAMIC)
def attention_backward_dkv_hopper(
    q, k, v, grad_out, rows_lse, rows_delta, grad_k, grad_v, sums,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm,
    num_heads, kv_heads, group, heads_together, num_queries, num_keys, batch, padded, score_scale, grad_scale,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, WORKERS: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr, REGISTERS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr, PARTS: gl.constexpr, LATE: gl.constexpr, DK_FIRST: gl.constexpr,
):  # fmt: skip
    """DQ: 0 dK and dV alone, 1 dQ too, 2 dQ by a warpgroup of its own."""
    dtype: gl.constexpr = q.dtype.element_ty
    BLOCK_N: gl.constexpr = 64 * WORKERS
    num_tiles = gl.cdiv(num_keys, BLOCK_N)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
    flat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_M, HEAD_DIM], dtype)
    row_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    q_desc = tma.make_tensor_descriptor(
        q, [batch, num_heads, num_queries, HEAD_DIM], [stride_qb, stride_qh, stride_qm, 1],
        [1, 1, BLOCK_M, HEAD_DIM], flat_layout,
    )  # fmt: skip
    do_desc = tma.make_tensor_descriptor(
        grad_out, [batch, num_heads, num_queries, HEAD_DIM], [stride_gb, stride_gh, stride_gm, 1],
        [1, 1, BLOCK_M, HEAD_DIM], flat_layout,
    )  # fmt: skip
    k_desc = tma.make_tensor_descriptor(
        k, [batch, kv_heads, num_keys, HEAD_DIM], [stride_kb, stride_kh, stride_kn, 1],
        [1, 1, 64, HEAD_DIM], flat_layout,
    )  # fmt: skip
    v_desc = tma.make_tensor_descriptor(
        v, [batch, kv_heads, num_keys, HEAD_DIM], [stride_vb, stride_vh, stride_vn, 1],
        [1, 1, 64, HEAD_DIM], flat_layout,
    )  # fmt: skip
    lse_desc = tma.make_tensor_descriptor(rows_lse, [batch * num_heads * padded], [1], [BLOCK_M], row_layout)
    delta_desc = tma.make_tensor_descriptor(rows_delta, [batch * num_heads * padded], [1], [BLOCK_M], row_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], tile_layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], tile_layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    ds_ring = q_ring
    ds_full = None
    ds_empty = None
    if DQ > 0:
        ds_ring = gl.allocate_shared_memory(dtype, [DS_STAGES * WORKERS, 64, BLOCK_M], ds_layout)
    ds_full = _barriers(DS_STAGES, WORKERS)
    ds_empty = _barriers(DS_STAGES, 1)
    k_full = _barriers(1, 1).index(0)
    v_full = _barriers(1, 1).index(0)
    kv_empty = _barriers(1, WORKERS + (1 if DQ == 2 else 0)).index(0)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, WORKERS)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, WORKERS)
    consumer = (
        grad_k, grad_v, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring,
        k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
        num_tiles, batch * kv_heads, group, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    )  # fmt: skip
    producer = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty,
        num_tiles, kv_heads, batch * kv_heads, group, heads_together, num_queries, num_keys, padded,
    )  # fmt: skip
    summer = (
        sums, k_tiles, ds_ring, k_full, kv_empty, ds_full, ds_empty,
        num_tiles, batch * kv_heads, group, heads_together, num_queries, num_keys, padded,
    )  # fmt: skip
    if DQ == 2 and WORKERS == 2:
        gl.warp_specialize(
            [
                (_dkv_consume, (consumer, gl.constexpr(0), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_consume, (consumer, gl.constexpr(1), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dq_sum, (summer, WORKERS, HEAD_DIM, BLOCK_M, DS_STAGES, CAUSAL, PARTS)),
                (_dkv_produce, (producer, WORKERS, HEAD_DIM, BLOCK_M, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24],
        )  # fmt: skip
    elif WORKERS == 3:
        gl.warp_specialize(
            [
                (_dkv_consume, (consumer, gl.constexpr(0), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_consume, (consumer, gl.constexpr(1), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_consume, (consumer, gl.constexpr(2), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_produce, (producer, WORKERS, HEAD_DIM, BLOCK_M, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_dkv_consume, (consumer, gl.constexpr(0), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_consume, (consumer, gl.constexpr(1), WORKERS, HEAD_DIM, BLOCK_M, STAGES, DS_STAGES, CAUSAL, DQ, LATE, DK_FIRST)),
                (_dkv_produce, (producer, WORKERS, HEAD_DIM, BLOCK_M, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


attention_backward_dkv_hopper.uses_scratch = True  # TMA descriptors


# ----------------------------------------------------------------------------------------------------------- dQ alone


@gluon.jit
def _rows_place(
    index, num_tiles, heads, heads_together, num_queries, num_keys,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(first query row, head of the batch, blocks of keys that some row sees, leading blocks that all rows see)."""
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.minimum(heads_together, heads - head_first)
    within = index % group_size
    tile = within // count
    head = head_first + within % count
    blocks = gl.cdiv(num_keys, BLOCK_N)
    full = num_keys // BLOCK_N
    if CAUSAL:
        tile = num_tiles - 1 - tile  # longest first
        shift = num_keys - num_queries
        last = gl.minimum(tile * BLOCK_M + BLOCK_M, num_queries)
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(last + shift, 0), BLOCK_N))
        full = gl.minimum(full, gl.maximum(tile * BLOCK_M + shift + 1, 0) // BLOCK_N)
    return tile * BLOCK_M, head, blocks, gl.minimum(full, blocks)


@gluon.jit
def _dq_blocks(
    dq, step, first, last, q_tile, do_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, row_lse, row_delta,
    position, num_keys, score_scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    for block in range(first, last - 1, -1):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        k_tile = k_ring.index(slot)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), phase)
        dp = warpgroup_mma(do_tile, v_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        scores = scores * score_scale
        if EDGE:
            keys = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
            inside = (keys < num_keys)[None, :]
            seen = inside
            if CAUSAL:
                seen = seen & (keys[None, :] <= position[:, None])
            scores = gl.where(seen, scores, float("-inf"))
        p = gl.exp2(scores - row_lse[:, None])
        dp = warpgroup_mma_wait(0, [dp])
        mbarrier.arrive(v_empty.index(slot))
        ds = p * (dp - row_delta[:, None])
        if EDGE:
            ds = gl.where(inside, ds, 0.0)
        dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), a_layout), k_tile, dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(k_empty.index(slot))
        step += 1
    return dq, step


@gluon.jit
def _dq_ahead(
    dq, scores, dp, step, first, last, q_tile, do_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, row_lse,
    row_delta, position, num_keys, score_scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Blocks ``first`` down to ``last``, whose products with Q and dO are done a block ahead."""
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    for block in range(first, last - 1, -1):
        if AHEAD:
            slot = (step + 1) % STAGES
            phase = ((step + 1) // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            next_scores = warpgroup_mma(
                q_tile, k_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(slot), phase)
            next_dp = warpgroup_mma(do_tile, v_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = scores * score_scale
        if EDGE:
            keys = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
            inside = (keys < num_keys)[None, :]
            seen = inside
            if CAUSAL:
                seen = seen & (keys[None, :] <= position[:, None])
            scores = gl.where(seen, scores, float("-inf"))
        p = gl.exp2(scores - row_lse[:, None])
        ds = p * (dp - row_delta[:, None])
        if EDGE:
            ds = gl.where(inside, ds, 0.0)
        dq = warpgroup_mma(
            gl.convert_layout(ds.to(dtype), a_layout), k_ring.index(step % STAGES), dq, is_async=True
        )
        if AHEAD:
            scores, dp = warpgroup_mma_wait(1, [next_scores, next_dp])
            mbarrier.arrive(v_empty.index(slot))
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(k_empty.index(step % STAGES))
        step += 1
    return dq, scores, dp, step


@gluon.jit
def _dq_consume(
    arguments, WORKER: gl.constexpr, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    (
        grad_q, rows_lse, rows_delta, q_tiles, do_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, num_tiles, batch_heads, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * WORKERS
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    step = 0
    total = num_tiles * batch_heads
    for round in range(gl.cdiv(total, gl.num_programs(0))):
        index = _snake(round)
        if index < total:
            row, head, blocks, full = _rows_place(
                index, num_tiles, batch_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
            )
            row += 64 * WORKER
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
            inside = rows < num_queries
            where = head.to(gl.int64) * padded + rows
            row_lse = gl.load(rows_lse + where, mask=inside, other=float("inf"))
            row_delta = gl.load(rows_delta + where, mask=inside, other=0.0)
            position = rows + (num_keys - num_queries)
            dq = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
            mbarrier.wait(q_full, round & 1)
            q_tile = q_tiles.index(WORKER)
            do_tile = do_tiles.index(WORKER)
            if PIPE:
                if blocks > 0:
                    slot = step % STAGES
                    phase = (step // STAGES) & 1
                    none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
                    mbarrier.wait(k_full.index(slot), phase)
                    scores = warpgroup_mma(
                        q_tile, k_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
                    )
                    mbarrier.wait(v_full.index(slot), phase)
                    dp = warpgroup_mma(
                        do_tile, v_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
                    )
                    scores, dp = warpgroup_mma_wait(0, [scores, dp])
                    mbarrier.arrive(v_empty.index(slot))
                    middle = gl.maximum(full, 1)
                    dq, scores, dp, step = _dq_ahead(
                        dq, scores, dp, step, blocks - 1, middle, q_tile, do_tile, k_ring, v_ring, k_full, k_empty,
                        v_full, v_empty, row_lse, row_delta, position, num_keys, score_scale,
                        HEAD_DIM, BLOCK_N, STAGES, CAUSAL, True, True,
                    )  # fmt: skip
                    dq, scores, dp, step = _dq_ahead(
                        dq, scores, dp, step, gl.minimum(middle, blocks) - 1, 1, q_tile, do_tile, k_ring, v_ring,
                        k_full, k_empty, v_full, v_empty, row_lse, row_delta, position, num_keys, score_scale,
                        HEAD_DIM, BLOCK_N, STAGES, CAUSAL, False, True,
                    )  # fmt: skip
                    dq, scores, dp, step = _dq_ahead(
                        dq, scores, dp, step, 0, 0, q_tile, do_tile, k_ring, v_ring, k_full, k_empty,
                        v_full, v_empty, row_lse, row_delta, position, num_keys, score_scale,
                        HEAD_DIM, BLOCK_N, STAGES, CAUSAL, True, False,
                    )  # fmt: skip
            else:
                dq, step = _dq_blocks(
                    dq, step, blocks - 1, full, q_tile, do_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
                    row_lse, row_delta, position, num_keys, score_scale, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, True,
                )  # fmt: skip
                dq, step = _dq_blocks(
                    dq, step, full - 1, 0, q_tile, do_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
                    row_lse, row_delta, position, num_keys, score_scale, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, False,
                )  # fmt: skip
            mbarrier.arrive(q_empty)
            _store_rows((dq * grad_scale).to(dtype), grad_q, head.to(gl.int64) * num_queries, row, num_queries, HEAD_DIM)


@gluon.jit
def _dq_produce(
    arguments, WORKERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, num_tiles, num_heads, group, batch_heads, heads_together, num_queries, num_keys,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * WORKERS
    dtype: gl.constexpr = k_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    step = 0
    total = num_tiles * batch_heads
    for round in range(gl.cdiv(total, gl.num_programs(0))):
        index = _snake(round)
        if index < total:
            row, head, blocks, _ = _rows_place(
                index, num_tiles, batch_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
            )
            batch = head // num_heads
            query_head = head % num_heads
            kv_head = query_head // group
            mbarrier.wait(q_empty, round & 1 ^ 1)
            mbarrier.expect(q_full, BLOCK_M * HEAD_DIM * 4)
            for worker in gl.static_range(WORKERS):
                tma.async_copy_global_to_shared(
                    q_desc, [batch, query_head, row + 64 * worker, 0], q_full,
                    q_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], q_layout),
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    do_desc, [batch, query_head, row + 64 * worker, 0], q_full,
                    do_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], q_layout),
                )  # fmt: skip
            for block in range(blocks - 1, -1, -1):
                slot = step % STAGES
                free = (step // STAGES) & 1 ^ 1
                mbarrier.wait(k_empty.index(slot), free)
                mbarrier.expect(k_full.index(slot), BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(
                    k_desc, [batch, kv_head, block * BLOCK_N, 0], k_full.index(slot),
                    k_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
                )  # fmt: skip
                mbarrier.wait(v_empty.index(slot), free)
                mbarrier.expect(v_full.index(slot), BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(
                    v_desc, [batch, kv_head, block * BLOCK_N, 0], v_full.index(slot),
                    v_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
                )  # fmt: skip
                step += 1


@gluon.jit(do_not_specialize=_DYNAMIC)
def attention_backward_dq_hopper(
    q, k, v, grad_out, rows_lse, rows_delta, grad_q,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm,
    num_heads, kv_heads, group, heads_together, num_queries, num_keys, batch, padded, score_scale, grad_scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, WORKERS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, REGISTERS: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    num_tiles = gl.cdiv(num_queries, 64 * WORKERS)
    batch_heads = batch * num_heads
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    flat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, HEAD_DIM], dtype)
    q_desc = tma.make_tensor_descriptor(
        q, [batch, num_heads, num_queries, HEAD_DIM], [stride_qb, stride_qh, stride_qm, 1],
        [1, 1, 64, HEAD_DIM], flat_layout,
    )  # fmt: skip
    do_desc = tma.make_tensor_descriptor(
        grad_out, [batch, num_heads, num_queries, HEAD_DIM], [stride_gb, stride_gh, stride_gm, 1],
        [1, 1, 64, HEAD_DIM], flat_layout,
    )  # fmt: skip
    k_desc = tma.make_tensor_descriptor(
        k, [batch, kv_heads, num_keys, HEAD_DIM], [stride_kb, stride_kh, stride_kn, 1],
        [1, 1, BLOCK_N, HEAD_DIM], flat_layout,
    )  # fmt: skip
    v_desc = tma.make_tensor_descriptor(
        v, [batch, kv_heads, num_keys, HEAD_DIM], [stride_vb, stride_vh, stride_vn, 1],
        [1, 1, BLOCK_N, HEAD_DIM], flat_layout,
    )  # fmt: skip
    q_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    q_full = _barriers(1, 1).index(0)
    q_empty = _barriers(1, WORKERS).index(0)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, WORKERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, WORKERS)
    consumer = (
        grad_q, rows_lse, rows_delta, q_tiles, do_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, num_tiles, batch_heads, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    )  # fmt: skip
    producer = (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, num_tiles, num_heads, group, batch_heads, heads_together, num_queries, num_keys,
    )  # fmt: skip
    if WORKERS == 3:
        gl.warp_specialize(
            [
                (_dq_consume, (consumer, gl.constexpr(0), WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, PIPE)),
                (_dq_consume, (consumer, gl.constexpr(1), WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, PIPE)),
                (_dq_consume, (consumer, gl.constexpr(2), WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, PIPE)),
                (_dq_produce, (producer, WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_dq_consume, (consumer, gl.constexpr(0), WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, PIPE)),
                (_dq_consume, (consumer, gl.constexpr(1), WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, PIPE)),
                (_dq_produce, (producer, WORKERS, HEAD_DIM, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


attention_backward_dq_hopper.uses_scratch = True  # TMA descriptors


# ----------------------------------------------------------------------------------------------------------- launcher


def backward(
    grad_out, grad_lse, q, k, v, out, lse, causal, scale, together, target,
    fused=None, dkv=None, dq=None, persistent=True,
):
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    device = q.device
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    padded = -(-queries // PAD) * PAD
    rows = torch.empty((2, batch, heads, padded), dtype=torch.float32, device=device)
    launch(
        attention_backward_rows, (batch * heads * (padded // 64),),
        out, grad_out, grad_lse, lse, rows[0], rows[1], *_strides(out), *_strides(grad_out),
        heads, queries, padded,
        device=device, HEAD_DIM=dim, BLOCK_M=64, HAS_GRAD_LSE=grad_lse is not None, num_warps=4,
    )  # fmt: skip
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(grad_out))
    form = fused or dkv
    sums = torch.zeros((batch, heads, padded, dim), dtype=torch.float32, device=device) if fused else rows
    tiles = -(-keys // (64 * form["WORKERS"])) * batch * kv_heads
    launch(
        attention_backward_dkv_hopper, (min(tiles, target.units) if persistent else tiles,),
        q, k, v, grad_out, rows[0], rows[1], grad_k, grad_v, sums, *strides,
        heads, kv_heads, group, together, queries, keys, batch, padded, scale * _LOG2E, scale,
        device=device, HEAD_DIM=dim, CAUSAL=causal, num_warps=4, **form,
    )  # fmt: skip
    if fused:
        width = dim // form["WORKERS"] if form["DQ"] == 1 and form["BLOCK_M"] == 64 else dim // form["PARTS"]
        launch(
            attention_backward_cast, (batch * heads * -(-queries // 64),), sums, grad_q, queries, padded, scale,
            device=device, HEAD_DIM=dim, WIDTH=width, num_warps=4,
        )  # fmt: skip
    else:
        tiles = -(-queries // (64 * dq["WORKERS"])) * batch * heads
        launch(
            attention_backward_dq_hopper, (min(tiles, target.units) if persistent else tiles,),
            q, k, v, grad_out, rows[0], rows[1], grad_q, *strides,
            heads, kv_heads, group, together * group, queries, keys, batch, padded, scale * _LOG2E, scale,
            device=device, HEAD_DIM=dim, CAUSAL=causal, num_warps=4, **dq,
        )  # fmt: skip
    return grad_q, grad_k, grad_v
