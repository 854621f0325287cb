"""dK and dV of attention on Hopper, in Gluon, and dQ in the same pass where its order of additions is free.

One warp loads tiles by TMA; two warpgroups own 64 keys each, whose K and V stay while queries go by. Scores are kept
transposed, (keys, queries), so that P^T and dS^T are operands from registers; dS also goes through shared memory to
dQ += dS K, half of whose columns (at D64: of whose rows) each warpgroup adds to a float32 sum in global memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferryman.ops.attention.hopper_descriptor_kernels import described, described_numbers
from ferryman.ops.attention.hopper_fused_kernels import STAGES, add_dq, consume_member
from ferryman.ops.attention.hopper_tile_kernels import (
    FACTS,
    FIRST,
    HEAD,
    JUMP,
    MASKED,
    START,
    TURNS,
    WORKERS,
    _barriers,
    _named_barrier,
    fact,
    hidden,
    masks,
    row_of,
    store_rows,
    tell,
)

BLOCK_N = gl.constexpr(128)  # 64 keys for each of the workers


@gluon.jit
def _claim(
    counter, num_tiles, heads, heads_together, num_queries, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr
):
    """The next tile of the grid (HEAD, FIRST, ..): programs that are done early take more.

    The keys that most queries see are first, and so are the blocks of queries that need masks.
    """
    index = gl.atomic_add(counter, 1, sem="relaxed")
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.maximum(gl.minimum(heads_together, heads - head_first), 1)
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
    if index >= num_tiles * heads:
        head = -1
    return head, first, turns, edges, (low - tail) * BLOCK_M, tail * turns * BLOCK_M


@gluon.jit
def _consume_blocks(
    dk,
    dv,
    step,
    tile,
    member,
    arguments,
    WORKER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    CAUSAL: gl.constexpr,
    FUSED: gl.constexpr,
    TURNS_OF: gl.constexpr,
):
    """dK += dS^T Q and dV += P^T dO over the blocks of queries of one head: those that need masks ("masked"), because
    some query does not see some key, the others ("whole"), or "all".

    dK, dV, S and dP leave a thread some 30 registers. Two loops are 5% faster at D64; the fused kernel, whose two spill
    32 bytes, is 10% faster with one. P is rounded as late as dP is there: 16 bits of it beside all of S and dP spill.
    """
    (
        _,
        _,
        sums,
        k_tiles,
        v_tiles,
        q_ring,
        do_ring,
        lse_ring,
        delta_ring,
        ds_ring,
        tile_ring,
        _,
        _,
        _,
        _,
        q_full,
        q_empty,
        do_full,
        do_empty,
        group,
        num_queries,
        num_keys,
        padded,
        _,
        score_scale,
        _,
    ) = arguments
    dtype: gl.constexpr = q_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    none = gl.zeros([64, BLOCK_M], gl.float32, score_layout)
    if FUSED:
        sums_row = (fact(tile_ring, tile, HEAD) * group + member) * hidden(padded)
    masked = fact(tile_ring, tile, MASKED)
    start = fact(tile_ring, tile, START)
    jump = fact(tile_ring, tile, JUMP)
    begin = 0
    end = masked
    if TURNS_OF == "whole":
        begin = masked
    if TURNS_OF != "masked":
        end = fact(tile_ring, tile, TURNS)
    for turn in range(begin, end):
        row = start + turn * BLOCK_M
        if TURNS_OF != "whole":
            row = row_of(turn, start, jump, BLOCK_M)
        slot = step & (STAGES - 1)
        phase = (step & STAGES) // STAGES
        own = hidden(WORKER)  # 16 descriptors of K and V would stay in 32 registers
        q_tile = q_ring.index(slot)
        do_tile = do_ring.index(slot)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(k_tiles.index(own), q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v_tiles.index(own), do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        row_lse = lse_ring.index(slot).load(row_layout)
        p = gl.exp2(scores * score_scale - row_lse[None, :])
        if TURNS_OF == "masked":
            first_key = fact(tile_ring, tile, FIRST) + 64 * WORKER
            both = masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
            p = gl.where(both[1], p, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        if TURNS_OF != "all":
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        row_delta = delta_ring.index(slot).load(row_layout)
        ds = dp - row_delta[None, :]
        # P is 0 where there is nothing, but dP is NaN beside an Inf of V or dO. The mask of dS is made anew: 64
        # predicates would be kept in registers.
        if TURNS_OF == "masked":
            first_key = fact(tile_ring, tile, FIRST) + 64 * WORKER
            both = masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
            ds = gl.where(both[0], ds, 0.0)
        if TURNS_OF == "all":
            if turn < masked:
                first_key = fact(tile_ring, tile, FIRST) + 64 * WORKER
                inside, seen = masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
                p = gl.where(seen, p, 0.0)
                ds = gl.where(inside, ds, 0.0)
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        ds = (p * ds).to(dtype)
        if FUSED:
            buffer = (step & 1) * WORKERS
            ds_ring.index(buffer + WORKER).store(ds)
            fence_async_shared()
            _named_barrier("sync", 8)  # both are done with the dS of two steps before, too
            half: gl.constexpr = HEAD_DIM // WORKERS
            dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
            dq = gl.zeros([64, half], gl.float32, dq_layout)
            for other in gl.static_range(WORKERS):
                dq = warpgroup_mma(
                    ds_ring.index(buffer + other).permute((1, 0)),
                    k_tiles.index(other).slice(half * WORKER, half, 1),
                    dq,
                    use_acc=other > 0,
                    is_async=True,
                )
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(1 + WORKERS, [dv])
            mbarrier.arrive(do_empty.index(slot))
            dq = warpgroup_mma_wait(1, [dq])
            add_dq(dq, sums, sums_row + row, WORKER, HEAD_DIM)
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
    arguments,
    WORKER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    CAUSAL: gl.constexpr,
    FUSED: gl.constexpr,
):
    """64 keys of each tile; the heads of a group one after the other, so that dK and dV are sums in one order."""
    (
        grad_k,
        grad_v,
        _,
        _,
        _,
        _,
        _,
        _,
        _,
        _,
        tile_ring,
        tile_full,
        k_full,
        v_full,
        kv_empty,
        _,
        _,
        _,
        _,
        group,
        _,
        num_keys,
        _,
        apart,
        _,
        grad_scale,
    ) = arguments
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    step = 0
    tile = 0
    mbarrier.wait(tile_full.index(0), 0)
    while fact(tile_ring, tile, HEAD) >= 0:
        dk = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        mbarrier.wait(k_full, tile & 1)
        mbarrier.wait(v_full, tile & 1)
        for member in range(group):
            if FUSED and HEAD_DIM == 64:
                dk, dv, step = consume_member(dk, dv, step, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M, CAUSAL)
            elif FUSED:
                dk, dv, step = _consume_blocks(
                    dk, dv, step, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M, CAUSAL, FUSED, "all"
                )
            else:
                dk, dv, step = _consume_blocks(
                    dk, dv, step, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M, CAUSAL, FUSED, "masked"
                )
                dk, dv, step = _consume_blocks(
                    dk, dv, step, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M, CAUSAL, FUSED, "whole"
                )
        head = fact(tile_ring, tile, HEAD)
        first = fact(tile_ring, tile, FIRST) + 64 * WORKER
        mbarrier.arrive(kv_empty)
        store_rows((dk * grad_scale).to(grad_k.dtype.element_ty), grad_k, head, first, num_keys, apart, HEAD_DIM)
        store_rows(dv.to(grad_v.dtype.element_ty), grad_v, head, first, num_keys, apart, HEAD_DIM)
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile & 2) // 2)


@gluon.jit
def _produce(arguments, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp: everything that the consumers read."""
    (
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        lse_desc,
        delta_desc,
        k_tiles,
        v_tiles,
        q_ring,
        do_ring,
        lse_ring,
        delta_ring,
        tile_ring,
        tile_full,
        k_full,
        v_full,
        kv_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
        counter,
        batch,
        kv_heads,
        shares,
        group,
        heads_together,
        num_queries,
        num_keys,
        padded,
    ) = arguments
    num_tiles = gl.cdiv(hidden(num_keys), BLOCK_N)  # computed before, these would be kept by the consumers, too
    all_heads = hidden(batch) * kv_heads
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    step = 0
    tile = 0
    facts = _claim(counter, num_tiles, all_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M)
    tell(tile_ring, tile_full, tile, facts)
    while facts[0] >= 0:
        head, first, turns, _, start, jump = facts
        batch_id = head // kv_heads
        kv_head = head % kv_heads
        mbarrier.wait(kv_empty, tile & 1 ^ 1)
        mbarrier.expect(k_full, BLOCK_N * HEAD_DIM * 2)
        for worker in gl.static_range(WORKERS):
            tma.async_copy_global_to_shared(
                k_desc,
                [batch_id, kv_head // shares, first + 64 * worker, 0],
                k_full,
                k_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
            )
        mbarrier.expect(v_full, BLOCK_N * HEAD_DIM * 2)
        for worker in gl.static_range(WORKERS):
            tma.async_copy_global_to_shared(
                v_desc,
                [batch_id, kv_head // shares, first + 64 * worker, 0],
                v_full,
                v_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
            )
        for member in range(group):
            query_head = kv_head * group + member
            rows = (head * group + member) * hidden(padded)
            for turn in range(turns):
                row = row_of(turn, start, jump, BLOCK_M)
                slot = step & (STAGES - 1)
                free = (step & STAGES) // STAGES ^ 1
                mbarrier.wait(q_empty.index(slot), free)
                mbarrier.expect(q_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                tma.async_copy_global_to_shared(
                    q_desc,
                    [batch_id, query_head, row, 0],
                    q_full.index(slot),
                    q_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                )
                tma.async_copy_global_to_shared(lse_desc, [rows + row], q_full.index(slot), lse_ring.index(slot))
                mbarrier.wait(do_empty.index(slot), free)
                mbarrier.expect(do_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                tma.async_copy_global_to_shared(
                    do_desc,
                    [batch_id, query_head, row, 0],
                    do_full.index(slot),
                    do_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                )
                tma.async_copy_global_to_shared(delta_desc, [rows + row], do_full.index(slot), delta_ring.index(slot))
                step += 1
        tile += 1
        facts = _claim(counter, num_tiles, all_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M)
        tell(tile_ring, tile_full, tile, facts)


DYNAMIC = [
    "num_heads",
    "kv_heads",
    "shares",
    "group",
    "heads_together",
    "num_queries",
    "num_keys",
    "batch",
    "padded",
    "apart",
    "score_scale",
    "grad_scale",
]


@gluon.jit(do_not_specialize=DYNAMIC)
def attention_backward_dkv_hopper(
    q,
    k,
    v,
    grad_out,
    rows_lse,
    rows_delta,
    grad_k,
    grad_v,
    sums,
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
    shares,
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
    BLOCK_M: gl.constexpr,
    CAUSAL: gl.constexpr,
    FUSED: gl.constexpr,
):
    """grad_k, grad_v (B, kv_heads, Sk, D), a head's rows ``apart`` rows apart, of which each ``shares`` are of one head
    of k and v, and of ``group`` query heads. rows_lse, rows_delta (B, H, padded) of ``attention_backward_rows``.

    FUSED: sums (B, H, padded, D) float32, zeros, take dQ before its scale. counter: int32, zero.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    flat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_M, HEAD_DIM], dtype)
    row_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    q_desc = described(
        q, batch, num_heads, num_queries, HEAD_DIM, stride_qb, stride_qh, stride_qm, BLOCK_M, HEAD_DIM, flat_layout
    )
    do_desc = described(
        grad_out,
        batch,
        num_heads,
        num_queries,
        HEAD_DIM,
        stride_gb,
        stride_gh,
        stride_gm,
        BLOCK_M,
        HEAD_DIM,
        flat_layout,
    )
    k_desc = described(
        k, batch, kv_heads // shares, num_keys, HEAD_DIM, stride_kb, stride_kh, stride_kn, 64, HEAD_DIM, flat_layout
    )
    v_desc = described(
        v, batch, kv_heads // shares, num_keys, HEAD_DIM, stride_vb, stride_vh, stride_vn, 64, HEAD_DIM, flat_layout
    )
    lse_desc = described_numbers(rows_lse, batch * num_heads * padded, BLOCK_M, row_layout)
    delta_desc = described_numbers(rows_delta, batch * num_heads * padded, BLOCK_M, row_layout)
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
    tile_ring = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = _barriers(2, 1)
    k_full = _barriers(1, 1).index(0)
    v_full = _barriers(1, 1).index(0)
    kv_empty = _barriers(1, WORKERS).index(0)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, WORKERS)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, WORKERS)
    consumer = (
        grad_k,
        grad_v,
        sums,
        k_tiles,
        v_tiles,
        q_ring,
        do_ring,
        lse_ring,
        delta_ring,
        ds_ring,
        tile_ring,
        tile_full,
        k_full,
        v_full,
        kv_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
        group,
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
        lse_desc,
        delta_desc,
        k_tiles,
        v_tiles,
        q_ring,
        do_ring,
        lse_ring,
        delta_ring,
        tile_ring,
        tile_full,
        k_full,
        v_full,
        kv_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
        counter,
        batch,
        kv_heads,
        shares,
        group,
        heads_together,
        num_queries,
        num_keys,
        padded,
    )
    gl.warp_specialize(
        [
            (_consume, (consumer, gl.constexpr(0), HEAD_DIM, BLOCK_M, CAUSAL, FUSED)),
            (_consume, (consumer, gl.constexpr(1), HEAD_DIM, BLOCK_M, CAUSAL, FUSED)),
            (_produce, (producer, HEAD_DIM, BLOCK_M, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


attention_backward_dkv_hopper.uses_scratch = True  # TMA descriptors
