"""dQ in the pass of dK and dV of attention's backward on Hopper, in Gluon: float32 sums in global memory, added to in
whatever order tiles come, and at D64 the loop around them.

There each warpgroup takes half of a block's queries, to which the dS of both are due. It is multiplied a block later,
beside the next block's scores, so that neither warpgroup waits for the other's dS.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferryman.ops.attention.hopper_tile_kernels import (
    FIRST,
    HEAD,
    JUMP,
    MASKED,
    START,
    TURNS,
    WORKERS,
    _named_barrier,
    fact,
    hidden,
    masks,
    row_of,
)

STAGES = gl.constexpr(2)


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
def add_dq(dq, sums, row, PART: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Adds the columns from PART * N on of 64 rows, dq (64, N), in the order of the threads' registers: one address,
    512 bytes for each warp's instruction. ``attention_backward_cast`` knows the order. gl.atomic_add would wait for
    what was there."""
    N: gl.constexpr = dq.shape[1]
    x = gl.permute(gl.reshape(dq, [4, 2, 8, N // 16, 2, 4, 2]), [0, 2, 5, 1, 3, 4, 6])
    x = gl.reshape(x, [4, 8, 4, N // 8, 4])
    pointer = (sums + row.to(gl.int64) * HEAD_DIM).to(gl.int64, bitcast=True)
    _add_chunks(x, pointer, PART * N * 256)


@gluon.jit
def _dq_of(step, ds_ring, k_tiles, WORKER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(64, HEAD_DIM): dS of both workers times K, for this one's half of the queries of a step. Not waited for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dq = gl.zeros([64, HEAD_DIM], gl.float32, layout)
    for other in gl.static_range(WORKERS):
        ds = ds_ring.index((step & 1) * WORKERS + other).slice(64 * WORKER, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k_tiles.index(other), dq, use_acc=other > 0, is_async=True)
    return dq


@gluon.jit
def _add_turn(dq, turn, tile, member, arguments, WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr):
    """Adds what is this worker's of dQ of a turn. Facts are read anew, as everywhere."""
    (
        _,
        _,
        sums,
        _,
        _,
        _,
        _,
        _,
        _,
        _,
        tile_ring,
        _,
        _,
        _,
        _,
        _,
        _,
        _,
        _,
        group,
        _,
        _,
        padded,
        _,
        _,
        _,
    ) = arguments
    row = row_of(turn, fact(tile_ring, tile, START), fact(tile_ring, tile, JUMP), BLOCK_M)
    row += (fact(tile_ring, tile, HEAD) * group + member) * hidden(padded)
    add_dq(dq, sums, row + 64 * WORKER, 0, HEAD_DIM)


@gluon.jit
def consume_member(
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
):
    """dK += dS^T Q, dV += P^T dO, and dQ of the queries of one head, which sees the tile's keys.

    dS lies in two buffers by turns. Four barriers, of each buffer and writer: a worker that is a step ahead cannot
    arrive twice before the other has waited. V's product begins after dS is stored: before that its P leaves the loop
    too few registers.
    """
    (
        _,
        _,
        _,
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
        _,
        num_queries,
        num_keys,
        _,
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
    for turn in range(fact(tile_ring, tile, TURNS)):
        slot = step & (STAGES - 1)
        phase = (step & STAGES) // STAGES
        own = hidden(WORKER)
        q_tile = q_ring.index(slot)
        do_tile = do_ring.index(slot)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(k_tiles.index(own), q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        if turn > 0:
            _named_barrier("sync", 8 + (step & 1 ^ 1) * 2 + (1 - WORKER))
        dq = _dq_of(step + 1, ds_ring, k_tiles, WORKER, HEAD_DIM)  # at turn 0 of what is there, and not added
        scores, dq = warpgroup_mma_wait(0, [scores, dq])
        if turn > 0:
            _add_turn(dq, turn - 1, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v_tiles.index(own), do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        row_lse = lse_ring.index(slot).load(row_layout)
        p = gl.exp2(scores * score_scale - row_lse[None, :])
        dp = warpgroup_mma_wait(0, [dp])
        row_delta = delta_ring.index(slot).load(row_layout)
        ds = dp - row_delta[None, :]
        if turn < fact(tile_ring, tile, MASKED):
            row = row_of(turn, fact(tile_ring, tile, START), fact(tile_ring, tile, JUMP), BLOCK_M)
            first_key = fact(tile_ring, tile, FIRST) + 64 * WORKER
            inside, seen = masks(first_key, row, num_queries, num_keys, BLOCK_M, CAUSAL, score_layout)
            p = gl.where(seen, p, 0.0)
            ds = gl.where(inside, ds, 0.0)  # P is 0 where there is nothing, but dP is NaN beside an Inf of V or dO
        ds = (p * ds).to(dtype)
        ds_ring.index((step & 1) * WORKERS + WORKER).store(ds)
        fence_async_shared()
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do_tile, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q_tile, dk, is_async=True)
        _named_barrier("arrive", 8 + (step & 1) * 2 + WORKER)
        dv = warpgroup_mma_wait(1, [dv])
        mbarrier.arrive(do_empty.index(slot))
        dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(q_empty.index(slot))
        step += 1
    turns = fact(tile_ring, tile, TURNS)
    if turns > 0:
        _named_barrier("sync", 8 + (step & 1 ^ 1) * 2 + (1 - WORKER))
        dq = _dq_of(step + 1, ds_ring, k_tiles, WORKER, HEAD_DIM)
        dq = warpgroup_mma_wait(0, [dq])
        _add_turn(dq, turns - 1, tile, member, arguments, WORKER, HEAD_DIM, BLOCK_M)
    return dk, dv, step
