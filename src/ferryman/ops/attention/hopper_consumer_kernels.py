"""The consumers of attention's forward on Hopper, in Gluon: two warpgroups, of 64 query rows each."""

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

from ferryman.ops.attention.hopper_place_kernels import (
    _LISTED,
    _OF_MASK,
    STAGES,
    _bits,
    _block,
    _block_n,
    _first_of_span,
    _place,
    _rings,
)
from ferryman.ops.attention.hopper_softmax_kernels import (
    _LN2,
    _LOG2E,
    _decayed,
    _operand,
    _packed,
    _row_sums,
    _softmax_block,
    _with_sink,
)
from ferryman.ops.attention.hopper_tile_kernels import WORKERS, _named_barrier


@gluon.jit
def _bias_slot(bias_full, step, WORKER: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Where a worker's tile of the mask lies, once it is there; 0 without a mask."""
    slot = 0
    if HAS_BIAS:
        RINGS: gl.constexpr = _rings(HEAD_DIM, HAS_BIAS)
        slot = step % RINGS * WORKERS + WORKER
        mbarrier.wait(bias_full.index(slot), (step // RINGS) & 1)
    return slot


@gluon.jit
def _consume_blocks(
    acc,
    p,
    row_max,
    row_sum,
    step,
    first,
    last,
    q_tile,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    bias_ring,
    bias_full,
    bias_empty,
    position,
    first_seen,
    num_keys,
    full,
    lists,
    key_mask,
    stride_mask_n,
    score_scale,
    cap,
    WORKER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    dtype: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
    EDGE: gl.constexpr,
):
    """Blocks ``first`` down to ``last``: each one's softmax beside the product of the block before with V.

    No product is under way at the end of an iteration: there ptxas would serialise them all.
    """
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    for block in range(first, last - 1, -1):
        p16 = _operand(p, dtype, p_layout)
        before = step - 1
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
        _named_barrier("sync", 8 + WORKER)
        scores = warpgroup_mma(q_tile, k_ring.index(step % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        acc = warpgroup_mma(p16, v_ring.index(before % STAGES), acc, is_async=True)
        if HEAD_DIM != 64:
            _named_barrier("arrive", 8 + (WORKER + 1) % WORKERS)
        scores = warpgroup_mma_wait(1, [scores])
        if HEAD_DIM == 64:  # the other's turn once the scores are there: 3% faster
            _named_barrier("arrive", 8 + (WORKER + 1) % WORKERS)
        mbarrier.arrive(k_empty.index(step % STAGES))
        bias_slot = _bias_slot(bias_full, step, WORKER, HEAD_DIM, HAS_BIAS)
        own_mask = key_mask
        if EDGE and RANGE == _LISTED:
            own_mask += _block(lists, block, full, num_keys, BLOCK_N) * _bits(BLOCK_N)
        p, row_max, decay = _softmax_block(
            scores,
            row_max,
            position,
            first_seen,
            block * BLOCK_N,
            num_keys,
            score_scale,
            cap,
            bias_ring.index(bias_slot),
            bias_empty.index(bias_slot),
            own_mask,
            stride_mask_n,
            CAUSAL,
            HAS_CAP,
            HAS_BIAS,
            RANGE,
            HAS_SPAN,
            EDGE,
        )
        row_sum = _decayed(row_sum, decay, HEAD_DIM) + _row_sums(p, HEAD_DIM)
        p = _packed(p, dtype)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(before % STAGES))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None]
        step += 1
    return acc, p, row_max, row_sum, step


@gluon.jit
def _consume(
    arguments,
    WORKER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
):
    """64 query rows of each tile."""
    (
        out_desc,
        lse,
        sinks,
        q_ring,
        k_ring,
        v_ring,
        out_ring,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        bias_ring,
        bias_full,
        bias_empty,
        num_tiles,
        num_heads,
        batch_heads,
        heads_together,
        num_queries,
        num_keys,
        key_range,
        window,
        chunk,
        lists,
        key_mask,
        stride_mask_b,
        stride_mask_n,
        score_scale,
        cap,
    ) = arguments
    dtype: gl.constexpr = q_ring.dtype
    Q_RINGS: gl.constexpr = _rings(HEAD_DIM, HAS_BIAS)
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_tile = out_ring.index(WORKER)
    if WORKER == WORKERS - 1:
        _named_barrier("arrive", 8)  # the first turn is worker 0's
    step = 0
    total = num_tiles * batch_heads
    programs = gl.num_programs(0)
    for turn in range(gl.cdiv(total, programs)):
        index = turn * programs + gl.program_id(0)
        if turn % 2 == 1:  # back and forth: who had the longest tile of one round has the shortest of the next
            index = turn * programs + programs - 1 - gl.program_id(0)
        if index < total:
            row, head, low, full_low, full, blocks, origin, own_keys, shift, shifted, least = _place(
                index,
                num_tiles,
                batch_heads,
                heads_together,
                num_heads,
                num_queries,
                num_keys,
                key_range,
                window,
                chunk,
                stride_mask_b,
                stride_mask_n,
                HEAD_DIM,
                CAUSAL,
                HAS_BIAS,
                RANGE,
                HAS_SPAN,
            )
            row += 64 * WORKER
            position = row + gl.arange(0, 64, row_layout) + shift
            first_seen = position
            if HAS_SPAN:
                first_seen = _first_of_span(position, window, chunk, shifted, least)
            own_mask = key_mask
            own_lists = lists
            if RANGE == _OF_MASK:
                own_mask += (head // num_heads).to(gl.int64) * stride_mask_b + origin.to(gl.int64) * stride_mask_n
            first_mask = own_mask
            if RANGE == _LISTED:
                own_lists += origin.to(gl.int64) * (2 * gl.cdiv(num_keys, BLOCK_N))
                own_mask += origin.to(gl.int64) * gl.cdiv(num_keys, BLOCK_N) * _bits(BLOCK_N) + 64 * WORKER
                first_mask = own_mask + _block(own_lists, blocks - 1, full, num_keys, BLOCK_N) * _bits(BLOCK_N)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, acc_layout)
            row_max = gl.full([64], float("-inf"), gl.float32, row_layout)
            q_slot = turn % Q_RINGS * WORKERS + WORKER
            q_tile = q_ring.index(q_slot)
            mbarrier.wait(q_full.index(q_slot), turn // Q_RINGS & 1)
            mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
            none = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
            scores = warpgroup_mma(
                q_tile, k_ring.index(step % STAGES).permute((1, 0)), none, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(step % STAGES))
            bias_slot = _bias_slot(bias_full, step, WORKER, HEAD_DIM, HAS_BIAS)
            p, row_max, _ = _softmax_block(
                scores,
                row_max,
                position,
                first_seen,
                (blocks - 1) * BLOCK_N,
                own_keys,
                score_scale,
                cap,
                bias_ring.index(bias_slot),
                bias_empty.index(bias_slot),
                first_mask,
                stride_mask_n,
                CAUSAL,
                HAS_CAP,
                HAS_BIAS,
                RANGE,
                HAS_SPAN,
                True,
            )
            row_sum = _row_sums(p, HEAD_DIM)
            p = _packed(p, dtype)
            step += 1
            middle = gl.minimum(full, blocks - 1)
            lower = 0
            if HAS_SPAN:
                middle = gl.maximum(middle, low)
                lower = gl.minimum(full_low, middle)
            acc, p, row_max, row_sum, step = _consume_blocks(
                acc,
                p,
                row_max,
                row_sum,
                step,
                blocks - 2,
                middle,
                q_tile,
                k_ring,
                v_ring,
                k_full,
                k_empty,
                v_full,
                v_empty,
                bias_ring,
                bias_full,
                bias_empty,
                position,
                first_seen,
                own_keys,
                full,
                own_lists,
                own_mask,
                stride_mask_n,
                score_scale,
                cap,
                WORKER,
                HEAD_DIM,
                dtype,
                CAUSAL,
                HAS_CAP,
                HAS_BIAS,
                RANGE,
                HAS_SPAN,
                True,
            )
            acc, p, row_max, row_sum, step = _consume_blocks(
                acc,
                p,
                row_max,
                row_sum,
                step,
                middle - 1,
                lower,
                q_tile,
                k_ring,
                v_ring,
                k_full,
                k_empty,
                v_full,
                v_empty,
                bias_ring,
                bias_full,
                bias_empty,
                position,
                first_seen,
                own_keys,
                full,
                own_lists,
                own_mask,
                stride_mask_n,
                score_scale,
                cap,
                WORKER,
                HEAD_DIM,
                dtype,
                CAUSAL,
                HAS_CAP,
                HAS_BIAS,
                RANGE,
                HAS_SPAN,
                False,
            )
            if HAS_SPAN:
                acc, p, row_max, row_sum, step = _consume_blocks(
                    acc,
                    p,
                    row_max,
                    row_sum,
                    step,
                    lower - 1,
                    low,
                    q_tile,
                    k_ring,
                    v_ring,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    bias_ring,
                    bias_full,
                    bias_empty,
                    position,
                    first_seen,
                    own_keys,
                    full,
                    own_lists,
                    own_mask,
                    stride_mask_n,
                    score_scale,
                    cap,
                    WORKER,
                    HEAD_DIM,
                    dtype,
                    CAUSAL,
                    HAS_CAP,
                    HAS_BIAS,
                    RANGE,
                    HAS_SPAN,
                    True,
                )
            if HEAD_DIM <= 128:
                mbarrier.arrive(q_empty.index(q_slot))
            before = step - 1
            mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
            p16 = _operand(p, dtype, p_layout)
            last = warpgroup_mma(p16, v_ring.index(before % STAGES), acc, is_async=True)
            if HEAD_DIM == 64:
                row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
            empty = row_sum == 0.0  # a NaN sum is not empty
            safe_sum = gl.where(empty, 1.0, row_sum)
            log_sum = gl.where(empty, float("-inf"), row_max + gl.log2(safe_sum))
            share = 1.0 / safe_sum
            if HAS_SINKS:
                kept, log_sum = _with_sink(log_sum, gl.load(sinks + head % num_heads).to(gl.float32) * _LOG2E)
                share *= kept
            rows = row + gl.arange(0, 64, row_layout)
            gl.store(lse + head.to(gl.int64) * num_queries + rows, log_sum * _LN2, mask=rows < num_queries)
            factor = gl.convert_layout(share, gl.SliceLayout(1, acc_layout))
            total_v = warpgroup_mma_wait(0, [last])
            mbarrier.arrive(v_empty.index(before % STAGES))
            hidden = gl.convert_layout(empty.to(gl.int32), gl.SliceLayout(1, acc_layout))
            result = gl.where((hidden != 0)[:, None], 0.0, total_v * factor[:, None])
            tma.store_wait(0)  # the tile before has left the buffer
            gl.thread_barrier()
            out_tile.store(result.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            flat: gl.constexpr = out_desc.layout
            tma.async_copy_shared_to_global(
                out_desc,
                [head // num_heads, head % num_heads, row, 0],
                out_tile._reinterpret(dtype, [1, 1, 64, HEAD_DIM], flat),
            )
            if HEAD_DIM > 128:
                tma.store_wait(0)
                gl.thread_barrier()
                mbarrier.arrive(q_empty.index(q_slot))
    tma.store_wait(0)
