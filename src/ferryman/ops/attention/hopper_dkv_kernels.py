"""dK and dV of attention on Hopper, in Gluon, and dQ in the same pass where its order of additions is free.

One warp loads tiles by TMA; two warpgroups own 64 keys each, whose K and V stay while queries go by. Scores are kept
transposed, (keys, queries), so that P^T and dS^T are operands from registers; dS also goes through shared memory to
dQ += dS K, half of whose columns each warpgroup adds to a float32 sum in global memory.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from ferryman.ops.attention.hopper_kernels import _barriers, _named_barrier

WORKERS = gl.constexpr(2)
BLOCK_N = gl.constexpr(128)  # 64 keys for each of the workers
STAGES = gl.constexpr(2)


@gluon.jit
def claim_tile(counter, ring, full, turn):
    """The producer's: the next tile of the grid, told to the consumers. Programs that are done early take more."""
    index = gl.atomic_add(counter, 1, sem="relaxed")
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(turn % 2).store(gl.full([1], index, gl.int32, layout))
    mbarrier.arrive(full.index(turn % 2))
    return index


@gluon.jit
def told_tile(ring, full, turn):
    """The consumers': a slot is told anew after everyone has released the tile of that turn."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    return gl.max(ring.index(turn % 2).load(layout), 0)


@gluon.jit
def store_rows(x, to, base, first, num_rows, HEAD_DIM: gl.constexpr):
    """64 rows from ``first`` on, where inside, of a contiguous (rows, HEAD_DIM) matrix that begins at row ``base``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    x = gl.convert_layout(x, layout)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    gl.store(to + base * HEAD_DIM + (rows[:, None] * HEAD_DIM + cols[None, :]), x, mask=(rows < num_rows)[:, None])


@gluon.jit
def _place(index, num_tiles, heads, heads_together, num_queries, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """(first key, KV head of the batch, first block of queries, blocks, how many turns need masks, 1 if the last block
    is the first turn): the keys that most queries see are first, and so are the blocks that need masks."""
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


@triton.constexpr_function
def _reduction(offset):
    return f"{{ red.relaxed.gpu.global.add.v4.f32 [$1 + {offset}], {{$2, $3, $4, $5}}; mov.u32 $0, 0; }}"


@gluon.jit
def _add_chunks(x, pointer, OFFSET: gl.constexpr):
    """x (warps, rows, quads, chunks, 4): a chunk is 16 bytes of each thread, 2048 of them all."""
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
def _add_dq(dq, sums, row, WORKER: gl.constexpr):
    """Adds half of the columns of 64 rows, in the order of the threads' registers: one address, 512 bytes for each
    warp's instruction. ``attention_backward_cast`` knows the order. gl.atomic_add would wait for what was there."""
    N: gl.constexpr = dq.shape[1]
    x = gl.permute(gl.reshape(dq, [4, 2, 8, N // 16, 2, 4, 2]), [0, 2, 5, 1, 3, 4, 6])
    x = gl.reshape(x, [4, 8, 4, N // 8, 4])
    pointer = (sums + row.to(gl.int64) * (N * WORKERS)).to(gl.int64, bitcast=True)
    _add_chunks(x, pointer, WORKER * N * 256)


@gluon.jit
def _consume_blocks(
    dk, dv, step, begin, end, low, turns, tail, first_key, num_queries, num_keys, score_scale, sums, sums_row,
    k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty, do_full, do_empty,
    WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, FUSED: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """dK += dS^T Q and dV += P^T dO over turns ``begin`` to ``end``. EDGE: some pair of a query and a key is hidden.

    P is rounded as late as dP is there: 16 bits of it beside all of S and dP spill registers (0.97 of the speed).
    """
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
        block = low + turn - tail
        if EDGE:
            block = _block_of(turn, low, turns, tail)
        q_tile = q_ring.index(slot)
        do_tile = do_ring.index(slot)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(k_tiles.index(WORKER), q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v_tiles.index(WORKER), do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        row_lse = lse_ring.index(slot).load(row_layout)
        p = gl.exp2(scores * score_scale - row_lse[None, :])
        if EDGE:
            # the bounds of a key's queries within the block, once: each element is then compared with them
            start = block * BLOCK_M
            rows = gl.arange(0, BLOCK_M, row_layout)
            keys = first_key + gl.arange(0, 64, key_layout)
            inside = rows[None, :] < gl.where(keys < num_keys, num_queries - start, 0)[:, None]
            seen = inside
            if CAUSAL:
                seen = seen & (rows[None, :] >= (keys - (num_keys - num_queries + start))[:, None])
            p = gl.where(seen, p, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        row_delta = delta_ring.index(slot).load(row_layout)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        ds = p * (dp - row_delta[None, :])
        if EDGE:
            ds = gl.where(inside, ds, 0.0)  # P is 0 there, but dP is NaN beside an Inf of V or dO
        ds = ds.to(dtype)
        if FUSED:
            buffer = step % 2 * WORKERS
            ds_ring.index(buffer + WORKER).store(ds)
            fence_async_shared()
            _named_barrier("sync", 8)  # both are done with the dS of two steps before, too
            half: gl.constexpr = HEAD_DIM // WORKERS
            dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
            dq = gl.zeros([64, half], gl.float32, dq_layout)
            for other in gl.static_range(WORKERS):
                dq = warpgroup_mma(
                    ds_ring.index(buffer + other).permute((1, 0)),
                    k_tiles.index(other).slice(half * WORKER, half, 1), dq, use_acc=other > 0, is_async=True,
                )  # fmt: skip
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(1 + WORKERS, [dv])
            mbarrier.arrive(do_empty.index(slot))
            dq = warpgroup_mma_wait(1, [dq])
            _add_dq(dq, sums, sums_row + block * BLOCK_M, WORKER)
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(1, [dv])
            mbarrier.arrive(do_empty.index(slot))
        dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(q_empty.index(slot))
        step += 1
    return dk, dv, step


@gluon.jit
def _consume(
    arguments, WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
    FUSED: gl.constexpr,
):  # fmt: skip
    """64 keys of each tile; the heads of a group one after the other, so that dK and dV are sums in one order."""
    (
        grad_k, grad_v, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, tile_ring,
        tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty,
        num_tiles, all_heads, group, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    step = 0
    tile = 0
    index = told_tile(tile_ring, tile_full, tile)
    while index < num_tiles * all_heads:
        first, head, low, turns, edges, tail = _place(
            index, num_tiles, all_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M
        )
        first += 64 * WORKER
        dk = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        mbarrier.wait(k_full, tile & 1)
        mbarrier.wait(v_full, tile & 1)
        for member in range(group):
            sums_row = (head * group + member) * padded
            dk, dv, step = _consume_blocks(
                dk, dv, step, 0, edges, low, turns, tail, first, num_queries, num_keys, score_scale, sums, sums_row,
                k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty, do_full, do_empty,
                WORKER, HEAD_DIM, BLOCK_M, CAUSAL, FUSED, True,
            )  # fmt: skip
            dk, dv, step = _consume_blocks(
                dk, dv, step, edges, turns, low, turns, tail, first, num_queries, num_keys, score_scale, sums, sums_row,
                k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, q_full, q_empty, do_full, do_empty,
                WORKER, HEAD_DIM, BLOCK_M, CAUSAL, FUSED, False,
            )  # fmt: skip
        mbarrier.arrive(kv_empty)
        base = head.to(gl.int64) * num_keys
        store_rows((dk * grad_scale).to(dtype), grad_k, base, first, num_keys, HEAD_DIM)
        store_rows(dv.to(dtype), grad_v, base, first, num_keys, HEAD_DIM)
        tile += 1
        index = told_tile(tile_ring, tile_full, tile)


@gluon.jit
def _produce(arguments, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp: everything that the consumers read."""
    (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        tile_ring, tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, counter,
        num_tiles, kv_heads, all_heads, group, heads_together, num_queries, num_keys, padded,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    step = 0
    tile = 0
    index = claim_tile(counter, tile_ring, tile_full, tile)
    while index < num_tiles * all_heads:
        first, head, low, turns, _, tail = _place(
            index, num_tiles, all_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M
        )
        batch = head // kv_heads
        kv_head = head % kv_heads
        mbarrier.wait(kv_empty, tile & 1 ^ 1)
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
                tma.async_copy_global_to_shared(delta_desc, [rows + row], do_full.index(slot), delta_ring.index(slot))
                step += 1
        tile += 1
        index = claim_tile(counter, tile_ring, tile_full, tile)


DYNAMIC = [
    "num_heads", "kv_heads", "group", "heads_together", "num_queries", "num_keys", "batch", "padded", "score_scale",
    "grad_scale",
]  # fmt: skip


@gluon.jit(do_not_specialize=DYNAMIC)
def attention_backward_dkv_hopper(
    q, k, v, grad_out, rows_lse, rows_delta, grad_k, grad_v, sums, counter,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm,
    num_heads, kv_heads, group, heads_together, num_queries, num_keys, batch, padded, score_scale, grad_scale,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """grad_k, grad_v contiguous (B, Hk, Sk, D). rows_lse, rows_delta (B, H, padded) of ``attention_backward_rows``.

    FUSED: sums (B, H, padded, D) float32, zeros, take dQ before its scale. counter: int32, zero.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    num_tiles = gl.cdiv(num_keys, BLOCK_N)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
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
    if FUSED:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
        ds_ring = gl.allocate_shared_memory(dtype, [2 * WORKERS, 64, BLOCK_M], ds_layout)
    tile_ring = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = _barriers(2, 1)
    k_full = _barriers(1, 1).index(0)
    v_full = _barriers(1, 1).index(0)
    kv_empty = _barriers(1, WORKERS).index(0)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, WORKERS)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, WORKERS)
    consumer = (
        grad_k, grad_v, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, tile_ring,
        tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty,
        num_tiles, batch * kv_heads, group, heads_together, num_queries, num_keys, padded, score_scale, grad_scale,
    )  # fmt: skip
    producer = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        tile_ring, tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, counter,
        num_tiles, kv_heads, batch * kv_heads, group, heads_together, num_queries, num_keys, padded,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consumer, gl.constexpr(0), HEAD_DIM, BLOCK_M, CAUSAL, FUSED)),
            (_consume, (consumer, gl.constexpr(1), HEAD_DIM, BLOCK_M, CAUSAL, FUSED)),
            (_produce, (producer, HEAD_DIM, BLOCK_M, CAUSAL)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


attention_backward_dkv_hopper.uses_scratch = True  # TMA descriptors
