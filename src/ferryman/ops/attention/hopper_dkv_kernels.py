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
FACTS = gl.constexpr(8)  # int32 for each tile in the ring
# What `_claim` says of a tile: the KV head of the batch, or -1 where all are done; its first key; how many turns there
# are, and how many of them, the first ones, need masks; the first query of turn 0, and what turn 0 adds to it
HEAD, FIRST, TURNS, MASKED, START, JUMP = map(gl.constexpr, range(6))


@gluon.jit
def tell(ring, full, turn, facts):
    """The producer's: what the consumers need to know of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(len(facts)):
        ring.index((turn & 1) * FACTS + i).store(gl.full([1], facts[i], gl.int32, layout))
    mbarrier.arrive(full.index(turn & 1))


@gluon.jit
def told(ring, turn, FACT: gl.constexpr):
    """The consumers'. A slot is told anew after everyone has released the tile of that turn. Facts are read where they
    are used: registers, all of which the loops need, are scarcer than loads."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.index((turn & 1) * FACTS + FACT).load(layout), 0)


@gluon.jit
def hidden(x):
    """The integer ``x``, of which LLVM then knows nothing: what is computed from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _rows_layout(head_dim):
    registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]][: 4 + head_dim // 64]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, head_dim])


@gluon.jit
def store_rows(x, to, base, first, num_rows, HEAD_DIM: gl.constexpr):
    """64 rows from ``first`` on, where inside, of a contiguous (rows, HEAD_DIM) matrix that begins at row ``base``.

    From the product's layout, in which two lanes then swap halves: 8 bytes for each, a sector for four. By way of
    shared memory 16 would be stored, whose addresses the compiler keeps in registers during the loops.
    """
    layout: gl.constexpr = _rows_layout(HEAD_DIM)
    x = gl.convert_layout(x, layout)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    gl.store(to + base * HEAD_DIM + (rows[:, None] * HEAD_DIM + cols[None, :]), x, mask=(rows < num_rows)[:, None])


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
def _row_of(turn, start, jump, BLOCK_M: gl.constexpr):
    """The first query of a turn: a ragged block is the first turn, the others follow in order."""
    row = start + turn * BLOCK_M
    if turn == 0:
        row += jump
    return row


@gluon.jit
def below(bounds, columns):
    """columns < bounds, (rows, columns), in a product's layout, where the columns of a thread differ by constants.

    With the thread's own part taken from the bound, each is compared with an immediate; compared as they are, LLVM
    keeps all of them in registers round the loops.
    """
    return (columns & ~6)[None, :] < bounds[:, None] - (columns & 6)[None, :]


@gluon.jit
def _masks(
    first_key, row, num_queries, num_keys, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """(which pairs of 64 keys and the queries from ``row`` on are there, which of them see each other)."""
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, layout))
    inside = below(gl.where(keys < num_keys, num_queries - row, 0), columns)
    seen = inside
    if CAUSAL:
        seen = seen & (below(keys - (num_keys - num_queries) - row, columns) == 0)
    return inside, seen


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
    dk, dv, step, tile, member, arguments,
    WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, FUSED: gl.constexpr,
    TURNS_OF: gl.constexpr,
):  # fmt: skip
    """dK += dS^T Q and dV += P^T dO over the blocks of queries of one head: those that need masks ("masked"), because
    some query does not see some key, the others ("whole"), or "all".

    dK, dV, S and dP leave a thread some 30 registers. Two loops are 5% faster at D64; the fused kernel, whose two spill
    32 bytes, is 10% faster with one. P is rounded as late as dP is there: 16 bits of it beside all of S and dP spill.
    """
    (
        _, _, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, tile_ring, _, _, _, _,
        q_full, q_empty, do_full, do_empty, group, num_queries, num_keys, padded, score_scale, _,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    none = gl.zeros([64, BLOCK_M], gl.float32, score_layout)
    if FUSED:
        sums_row = (told(tile_ring, tile, HEAD) * group + member) * hidden(padded)
    masked = told(tile_ring, tile, MASKED)
    start = told(tile_ring, tile, START)
    jump = told(tile_ring, tile, JUMP)
    begin = 0
    end = masked
    if TURNS_OF == "whole":
        begin = masked
    if TURNS_OF != "masked":
        end = told(tile_ring, tile, TURNS)
    for turn in range(begin, end):
        row = start + turn * BLOCK_M
        if TURNS_OF != "whole":
            row = _row_of(turn, start, jump, BLOCK_M)
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
            first_key = told(tile_ring, tile, FIRST) + 64 * WORKER
            masks = _masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
            p = gl.where(masks[1], p, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        if TURNS_OF != "all":
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        row_delta = delta_ring.index(slot).load(row_layout)
        ds = dp - row_delta[None, :]
        # P is 0 where there is nothing, but dP is NaN beside an Inf of V or dO. The mask of dS is made anew: 64
        # predicates would be kept in registers.
        if TURNS_OF == "masked":
            first_key = told(tile_ring, tile, FIRST) + 64 * WORKER
            masks = _masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
            ds = gl.where(masks[0], ds, 0.0)
        if TURNS_OF == "all":
            if turn < masked:
                first_key = told(tile_ring, tile, FIRST) + 64 * WORKER
                inside, seen = _masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
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
                    k_tiles.index(other).slice(half * WORKER, half, 1), dq, use_acc=other > 0, is_async=True,
                )  # fmt: skip
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q_tile, dk, is_async=True)
            dv = warpgroup_mma_wait(1 + WORKERS, [dv])
            mbarrier.arrive(do_empty.index(slot))
            dq = warpgroup_mma_wait(1, [dq])
            _add_dq(dq, sums, sums_row + row, WORKER)
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
        grad_k, grad_v, _, _, _, q_ring, _, _, _, _, tile_ring, tile_full, k_full, v_full, kv_empty, _, _, _, _,
        group, _, num_keys, _, _, grad_scale,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    step = 0
    tile = 0
    mbarrier.wait(tile_full.index(0), 0)
    while told(tile_ring, tile, HEAD) >= 0:
        dk = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
        mbarrier.wait(k_full, tile & 1)
        mbarrier.wait(v_full, tile & 1)
        for member in range(group):
            if FUSED:
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
        base = told(tile_ring, tile, HEAD).to(gl.int64) * num_keys
        first = told(tile_ring, tile, FIRST) + 64 * WORKER
        mbarrier.arrive(kv_empty)
        store_rows((dk * grad_scale).to(dtype), grad_k, base, first, num_keys, HEAD_DIM)
        store_rows(dv.to(dtype), grad_v, base, first, num_keys, HEAD_DIM)
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile & 2) // 2)


@gluon.jit
def _produce(arguments, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp: everything that the consumers read."""
    (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        tile_ring, tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, counter,
        batch, kv_heads, group, heads_together, num_queries, num_keys, padded,
    ) = arguments  # fmt: skip
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
                k_desc, [batch_id, kv_head, first + 64 * worker, 0], k_full,
                k_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
            )  # fmt: skip
        mbarrier.expect(v_full, BLOCK_N * HEAD_DIM * 2)
        for worker in gl.static_range(WORKERS):
            tma.async_copy_global_to_shared(
                v_desc, [batch_id, kv_head, first + 64 * worker, 0], v_full,
                v_tiles.index(worker)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], kv_layout),
            )  # fmt: skip
        for member in range(group):
            query_head = kv_head * group + member
            rows = (head * group + member) * hidden(padded)
            for turn in range(turns):
                row = _row_of(turn, start, jump, BLOCK_M)
                slot = step & (STAGES - 1)
                free = (step & STAGES) // STAGES ^ 1
                mbarrier.wait(q_empty.index(slot), free)
                mbarrier.expect(q_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                tma.async_copy_global_to_shared(
                    q_desc, [batch_id, query_head, row, 0], q_full.index(slot),
                    q_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                )  # fmt: skip
                tma.async_copy_global_to_shared(lse_desc, [rows + row], q_full.index(slot), lse_ring.index(slot))
                mbarrier.wait(do_empty.index(slot), free)
                mbarrier.expect(do_full.index(slot), BLOCK_M * (HEAD_DIM * 2 + 4))
                tma.async_copy_global_to_shared(
                    do_desc, [batch_id, query_head, row, 0], do_full.index(slot),
                    do_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_layout),
                )  # fmt: skip
                tma.async_copy_global_to_shared(delta_desc, [rows + row], do_full.index(slot), delta_ring.index(slot))
                step += 1
        tile += 1
        facts = _claim(counter, num_tiles, all_heads, heads_together, num_queries, num_keys, CAUSAL, BLOCK_M)
        tell(tile_ring, tile_full, tile, facts)


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
        grad_k, grad_v, sums, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring, ds_ring, tile_ring,
        tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty,
        group, num_queries, num_keys, padded, score_scale, grad_scale,
    )  # fmt: skip
    producer = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, k_tiles, v_tiles, q_ring, do_ring, lse_ring, delta_ring,
        tile_ring, tile_full, k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, counter,
        batch, kv_heads, group, heads_together, num_queries, num_keys, padded,
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
