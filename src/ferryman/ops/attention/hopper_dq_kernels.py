"""dQ of attention on Hopper, in Gluon: a pass of its own over the keys, bitwise repeatable.

One warp loads tiles by TMA; two warpgroups own 64 query rows each, whose Q and dO stay while K and V go by. dS is an
operand from registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ferryman.ops.attention.hopper_descriptor_kernels import described
from ferryman.ops.attention.hopper_dkv_kernels import DYNAMIC
from ferryman.ops.attention.hopper_tile_kernels import FACTS, WORKERS, _barriers, below, fact, store_rows, tell

BLOCK_M = gl.constexpr(128)  # 64 rows for each of the workers
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
# What `_claim` says of a tile: the head of the batch, or -1 where all are done; its first query row; how many blocks of
# keys some row sees, and how many of them, the leading ones, all rows see
HEAD, FIRST, BLOCKS, WHOLE = map(gl.constexpr, range(4))


@gluon.jit
def _claim(counter, num_tiles, heads, heads_together, num_queries, num_keys, CAUSAL: gl.constexpr):
    """The next tile of the grid (HEAD, FIRST, ..): programs that are done early take more."""
    index = gl.atomic_add(counter, 1, sem="relaxed")
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.maximum(gl.minimum(heads_together, heads - head_first), 1)
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
    if index >= num_tiles * heads:
        head = -1
    return head, tile * BLOCK_M, blocks, gl.minimum(full, blocks)


@gluon.jit
def _consume_blocks(
    dq,
    step,
    tile,
    tile_ring,
    q_tile,
    do_tile,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    row_lse,
    row_delta,
    position,
    num_keys,
    score_scale,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
):
    """dQ += dS K over blocks of keys, the last one first. EDGE: those with a key that is hidden from some row; without
    it those before. In one loop that asks at each block 0.98 of the speed at D128, 0.96 at D64."""
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    first = fact(tile_ring, tile, BLOCKS)
    last = fact(tile_ring, tile, WHOLE)
    if not EDGE:
        first = last
        last = 0
    for block in range(first - 1, last - 1, -1):
        slot = step & (STAGES - 1)
        phase = (step & STAGES) // STAGES
        k_tile = k_ring.index(slot)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), phase)
        dp = warpgroup_mma(do_tile, v_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        p = gl.exp2(scores * score_scale - row_lse[:, None])
        dp = warpgroup_mma_wait(0, [dp])
        mbarrier.arrive(v_empty.index(slot))
        ds = dp - row_delta[:, None]
        if EDGE:
            columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
            inside = below(gl.full([64], num_keys - block * BLOCK_N, gl.int32, row_layout), columns)
            ds = gl.where(inside, ds, 0.0)  # P is 0 beside a padded key, but dP is NaN where dO is Inf
            seen = inside
            if CAUSAL:
                seen = below(gl.minimum(position + 1, num_keys) - block * BLOCK_N, columns)
            p = gl.where(seen, p, 0.0)
        ds = (p * ds).to(dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, a_layout), k_tile, dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(k_empty.index(slot))
        step += 1
    return dq, step


@gluon.jit
def _consume(arguments, WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr):
    """64 query rows of each tile."""
    (
        grad_q,
        rows_lse,
        rows_delta,
        q_tiles,
        do_tiles,
        k_ring,
        v_ring,
        tile_ring,
        tile_full,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        num_queries,
        num_keys,
        padded,
        apart,
        score_scale,
        grad_scale,
    ) = arguments
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_tile = q_tiles.index(WORKER)
    do_tile = do_tiles.index(WORKER)
    step = 0
    tile = 0
    mbarrier.wait(tile_full.index(0), 0)
    while fact(tile_ring, tile, HEAD) >= 0:
        head = fact(tile_ring, tile, HEAD)
        rows = fact(tile_ring, tile, FIRST) + 64 * WORKER + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
        row_lse = gl.load(rows_lse + (head.to(gl.int64) * padded + rows))
        row_delta = gl.load(rows_delta + (head.to(gl.int64) * padded + rows))
        position = rows + (num_keys - num_queries)
        dq = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        mbarrier.wait(q_full, tile & 1)
        dq, step = _consume_blocks(
            dq,
            step,
            tile,
            tile_ring,
            q_tile,
            do_tile,
            k_ring,
            v_ring,
            k_full,
            k_empty,
            v_full,
            v_empty,
            row_lse,
            row_delta,
            position,
            num_keys,
            score_scale,
            HEAD_DIM,
            CAUSAL,
            True,
        )
        dq, step = _consume_blocks(
            dq,
            step,
            tile,
            tile_ring,
            q_tile,
            do_tile,
            k_ring,
            v_ring,
            k_full,
            k_empty,
            v_full,
            v_empty,
            row_lse,
            row_delta,
            position,
            num_keys,
            score_scale,
            HEAD_DIM,
            CAUSAL,
            False,
        )
        head = fact(tile_ring, tile, HEAD)
        first = fact(tile_ring, tile, FIRST) + 64 * WORKER
        mbarrier.arrive(q_empty)
        store_rows((dq * grad_scale).to(dtype), grad_q, head, first, num_queries, apart, HEAD_DIM)
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile & 2) // 2)


@gluon.jit
def _produce(arguments, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp: everything that the consumers read."""
    (
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        q_tiles,
        do_tiles,
        k_ring,
        v_ring,
        tile_ring,
        tile_full,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        counter,
        num_tiles,
        num_heads,
        group,
        batch_heads,
        heads_together,
        num_queries,
        num_keys,
    ) = arguments
    dtype: gl.constexpr = k_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    step = 0
    tile = 0
    facts = _claim(counter, num_tiles, batch_heads, heads_together, num_queries, num_keys, CAUSAL)
    tell(tile_ring, tile_full, tile, facts)
    while facts[0] >= 0:
        head, row, blocks, _ = facts
        batch = head // num_heads
        query_head = head % num_heads
        kv_head = query_head // group
        mbarrier.wait(q_empty, tile & 1 ^ 1)
        mbarrier.expect(q_full, BLOCK_M * HEAD_DIM * 4)
        for worker in gl.static_range(WORKERS):
            tma.async_copy_global_to_shared(
                q_desc,
                [batch, query_head, row + 64 * worker, 0],
                q_full,
                q_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], q_layout),
            )
            tma.async_copy_global_to_shared(
                do_desc,
                [batch, query_head, row + 64 * worker, 0],
                q_full,
                do_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], q_layout),
            )
        for block in range(blocks - 1, -1, -1):
            slot = step & (STAGES - 1)
            free = (step & STAGES) // STAGES ^ 1
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), BLOCK_N * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(
                k_desc,
                [batch, kv_head, block * BLOCK_N, 0],
                k_full.index(slot),
                k_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
            )
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), BLOCK_N * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(
                v_desc,
                [batch, kv_head, block * BLOCK_N, 0],
                v_full.index(slot),
                v_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
            )
            step += 1
        tile += 1
        facts = _claim(counter, num_tiles, batch_heads, heads_together, num_queries, num_keys, CAUSAL)
        tell(tile_ring, tile_full, tile, facts)


@gluon.jit(do_not_specialize=DYNAMIC)
def attention_backward_dq_hopper(
    q,
    k,
    v,
    grad_out,
    rows_lse,
    rows_delta,
    grad_q,
    counter,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gm,
    num_heads,
    kv_heads,
    group,
    heads_together,
    num_queries,
    num_keys,
    batch,
    padded,
    apart,
    score_scale,
    grad_scale,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """grad_q (B, H, Sq, D), a head's rows ``apart`` apart; the rest as ``attention_backward_dkv_hopper`` takes it."""
    dtype: gl.constexpr = q.dtype.element_ty
    num_tiles = gl.cdiv(num_queries, BLOCK_M)
    batch_heads = batch * num_heads
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    flat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, HEAD_DIM], dtype)
    q_desc = described(
        q, batch, num_heads, num_queries, HEAD_DIM, stride_qb, stride_qh, stride_qm, 64, HEAD_DIM, flat_layout
    )
    do_desc = described(
        grad_out, batch, num_heads, num_queries, HEAD_DIM, stride_gb, stride_gh, stride_gm, 64, HEAD_DIM, flat_layout
    )
    k_desc = described(
        k, batch, kv_heads, num_keys, HEAD_DIM, stride_kb, stride_kh, stride_kn, BLOCK_N, HEAD_DIM, flat_layout
    )
    v_desc = described(
        v, batch, kv_heads, num_keys, HEAD_DIM, stride_vb, stride_vh, stride_vn, BLOCK_N, HEAD_DIM, flat_layout
    )
    q_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    tile_ring = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = _barriers(2, 1)
    q_full = _barriers(1, 1).index(0)
    q_empty = _barriers(1, WORKERS).index(0)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, WORKERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, WORKERS)
    consumer = (
        grad_q,
        rows_lse,
        rows_delta,
        q_tiles,
        do_tiles,
        k_ring,
        v_ring,
        tile_ring,
        tile_full,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        num_queries,
        num_keys,
        padded,
        apart,
        score_scale,
        grad_scale,
    )
    producer = (
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        q_tiles,
        do_tiles,
        k_ring,
        v_ring,
        tile_ring,
        tile_full,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        counter,
        num_tiles,
        num_heads,
        group,
        batch_heads,
        heads_together,
        num_queries,
        num_keys,
    )
    gl.warp_specialize(
        [
            (_consume, (consumer, gl.constexpr(0), HEAD_DIM, CAUSAL)),
            (_consume, (consumer, gl.constexpr(1), HEAD_DIM, CAUSAL)),
            (_produce, (producer, HEAD_DIM, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


attention_backward_dq_hopper.uses_scratch = True  # TMA descriptors
