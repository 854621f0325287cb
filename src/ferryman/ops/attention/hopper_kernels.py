"""Attention's forward pass on Hopper, in Gluon: warp-specialised, with TMA and asynchronous warpgroup products.

One warp loads tiles of Q, K and V by TMA into rings in shared memory; two warpgroups of 64 query rows each consume
them. Within a warpgroup the softmax of one block of keys runs while the tensor cores multiply the block before by V.
The two take turns to issue products, so that one's softmax hides behind the other's. Programs are persistent: the next
tile's Q, K and V arrive during the last one's epilogue (one program for each tile: 0.87 of the speed at D128, S8192).

Heads are filled up with zeros, by TMA, to 64, 128 or 256 columns. Of 256 blocks have 64 keys, and results go out by
way of Q's tile, for want of shared memory and registers.

Same meaning and rounding points as ``triton_kernels.attention_forward``, which serves whatever the menu keeps from it.

Tiles of keys begin with the first key that a sequence has or its mask leaves, where a copy by TMA may begin as well; of
a float mask only at 16-byte steps of a row. A bool mask of keys is read in blocks at an end, and in all blocks of a
sequence that has holes. A window and chunks end the blocks early; those that they cut are masked. Of any other bool
mask, kernels before list the blocks that a tile of queries sees, and say in bits which pairs see each other.

A float mask comes as tiles of 64 rows, one for each warpgroup, through a ring of its own. At D128 shared memory has
room for one such tile and for one tile of Q, where there are two else.

H200, causal bf16, against cuDNN beside it: B2 H32 S8192 D128 1.10, with 8 KV heads 1.15, B4 H32 S4096 D64 1.07 (the
plain kernel: 0.55, 0.63, 0.68). How many heads are dealt together decides: as many as fit half of the L2 give 1.10,
1.11, 0.98, all of them 1.00, 1.15, 1.03, four of them 0.77, 0.77, 1.00.

At D64 the exponentials alone would take 1056 cycles of a unit for 128 x 128 scores, the products 1024; it takes some
2100. In the loop ptxas moves the wait for the product with V ahead of most of the softmax. Held behind it (by a branch
on the sums, which is never taken) the product hides, and yet the kernel is as fast or slower by up to 6%: at its power
cap the chip then runs slower. Tried, too, when it had 412 TFLOP/s: three warpgroups of 160 registers (373), three with
64 keys (335), no turns (404); when it had 404: tiles claimed as they come (404; 1.05 at B16 H32 S1024, 0.90 where it
takes 18 us). Blocks of 256 keys do not fit the registers.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention.arguments import OF_HOPPER, hiding
from ferryman.ops.attention.hopper_tile_kernels import described
from ferryman.ops.attention.key_mask_kernels import FACTS, keys_of_mask
from ferryman.ops.attention.pair_mask_kernels import ROWS, tiles_of_mask
from ferryman.ops.attention.triton_kernels import _heads_together, blank, forms, outputs

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)
HEAD_DIMS = (64, 128, 256)  # of tiles in shared memory; heads of other sizes are filled up with zeros, by TMA
WORKERS = gl.constexpr(2)
BLOCK_M = gl.constexpr(128)  # 64 rows for each of the workers
STAGES = gl.constexpr(2)
_SPILLS = 32  # bytes of a thread, as kernels of wide heads have them (`_wide`)
# key ranges, as they are given and by `keys_of_mask`; blocks by `tiles_of_mask`; 0: neither
_GIVEN, _OF_MASK, _LISTED = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@triton.constexpr_function
def _rings(HEAD_DIM, HAS_BIAS):
    """How many tiles of Q, and of a mask, a consumer has."""
    return 1 if HEAD_DIM > 128 or (HAS_BIAS and HEAD_DIM > 64) else 2


@triton.constexpr_function
def _block_n(HEAD_DIM):
    """Keys of a block."""
    return 64 if HEAD_DIM > 128 else 128


@triton.constexpr_function
def _bits(BLOCK_N):
    """Words of a listed block's bits."""
    return BLOCK_N // 32 * ROWS.value


@gluon.jit
def _named_barrier(INSTRUCTION: gl.constexpr, barrier):
    """``bar.sync`` or ``bar.arrive`` of two warpgroups. Triton itself takes the first ids only."""
    asm: gl.constexpr = "{ bar." + INSTRUCTION + " $1, 256; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _first_of_span(position, window, chunk, shifted, least):
    """The first key that the window and the chunk (0: none) leave to a query, at least ``least``. Positions are counted
    from a key that is ``shifted`` behind the one that chunks are counted from. Integers or tensors."""
    of_chunk = (position + shifted) // gl.maximum(chunk, 1) * chunk - gl.where(chunk > 0, shifted, 0)
    of_window = gl.where(window > 0, position - window + 1, 0)
    return gl.maximum(gl.maximum(of_chunk, of_window), least)


@gluon.jit
def _place(
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
    mask_batch,
    mask_step,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
):
    """(first query row, head of the batch; of blocks of keys the first that some row sees, the first that all see, the
    end of those, and of those that some row sees; the key that blocks and positions are counted from; how many keys
    there are from it on; query 0's position; and `_first_of_span`'s ``shifted`` and ``least``). Of listed blocks the
    whole ones count as seen by all, and the table stands for the key."""
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    group_size = heads_together * num_tiles
    head_first = (index // group_size) * heads_together
    count = gl.minimum(heads_together, batch_heads - head_first)
    within = index % group_size
    tile = within // count
    head = head_first + within % count
    origin = 0
    shifted = 0
    least = 0
    end = num_keys
    if RANGE == _GIVEN:
        of_batch = key_range + head // num_heads * 2
        origin = gl.minimum(gl.maximum(gl.load(of_batch), 0), num_keys)
        end = gl.minimum(gl.maximum(gl.load(of_batch + 1), 0), num_keys)
        if HAS_BIAS:  # whose tiles are copied from 16-byte steps of a row only
            least = origin % 8
            origin -= least
            shifted = -least
        num_keys = gl.maximum(end - origin, 0)
    if RANGE == _OF_MASK:
        of_batch = key_range + head // num_heads * FACTS
        origin = gl.load(of_batch)
        num_keys = gl.load(of_batch + 1) - origin
        end = gl.load(of_batch + 2)
        shifted = origin - gl.load(of_batch + 4)
    shift = end - num_queries - origin
    blocks = gl.cdiv(num_keys, BLOCK_N)
    full = num_keys // BLOCK_N
    if RANGE == _LISTED:
        tile = num_tiles - 1 - tile  # longest first, as most masks have it
        origin = head // num_heads * mask_batch + head % num_heads * mask_step + tile
        full = gl.load(key_range + 2 * origin + 1)
        blocks = gl.load(key_range + 2 * origin) + full
    if RANGE > 0:
        blocks = gl.maximum(blocks, 1)
    if CAUSAL:
        tile = num_tiles - 1 - tile  # longest first
        last = gl.minimum(tile * BLOCK_M + BLOCK_M, num_queries)
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(last + shift, 1), BLOCK_N))
        full = gl.minimum(full, gl.maximum(tile * BLOCK_M + shift + 1, 0) // BLOCK_N)
    low = 0
    full_low = 0
    if HAS_SPAN:
        last = gl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
        low = _first_of_span(tile * BLOCK_M + shift, window, chunk, shifted, least) // BLOCK_N
        low = gl.minimum(low, blocks - 1)
        full_low = gl.cdiv(_first_of_span(last + shift, window, chunk, shifted, least), BLOCK_N)
    if RANGE == _OF_MASK:
        full = gl.where(gl.load(of_batch + 3) != 0, full, 0)  # a block may have holes
    return tile * BLOCK_M, head, low, full_low, full, blocks, origin, num_keys, shift, shifted, least


@gluon.jit
def _block(lists, index, full, num_keys, BLOCK_N: gl.constexpr):
    """The number of a tile's block by its index: those that are seen whole come first. Of a tile that sees nothing,
    whose list is empty, any block."""
    blocks = gl.cdiv(num_keys, BLOCK_N)
    number = gl.load(lists + gl.where(index < full, blocks + index, index - full))
    return gl.minimum(gl.maximum(number, 0), blocks - 1)


@gluon.jit
def _seen_by_bits(bits, scores):
    """Which of the 64 queries and the keys of scores see each other. A thread's columns differ by constants: its own
    part, two bits, is shifted out of the words first, so that each column is an immediate."""
    columns = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
    rows = gl.arange(0, 64, gl.SliceLayout(1, scores.type.layout))
    word = gl.load(bits + rows)[:, None] >> (columns & 6)
    for n in gl.static_range(1, scores.shape[1] // 32):
        next_word = gl.load(bits + n * ROWS + rows)[:, None] >> (columns & 6)
        word = gl.where(columns >= 32 * n, next_word, word)
    return (word & (1 << (columns & 25))) != 0


@gluon.jit
def _capped(x, cap):
    """cap * tanh(x), of which the difference from one is what counts: the quotient is at most 1."""
    e = gl.exp2(gl.abs(x) * (-2.0 * _LOG2E.value))
    size = (1.0 - e) / (1.0 + e)
    return gl.where(x < 0, -size, size) * cap


@gluon.jit
def _softmax_block(
    scores,
    row_max,
    position,
    first_seen,
    first_key,
    num_keys,
    score_scale,
    cap,
    bias_tile,
    bias_empty,
    key_mask,
    stride_mask_n,
    CAUSAL: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
    EDGE: gl.constexpr,
):
    """(p, new row maximum in base 2, factor for what was summed before)."""
    to_base_2 = score_scale
    if HAS_CAP:
        scores = _capped(scores * score_scale, cap)
        to_base_2 = _LOG2E.value
    if HAS_BIAS:
        added = bias_tile.load(scores.type.layout).to(gl.float32)
        scores = scores + added if HAS_CAP else scores * score_scale + added
        fence_async_shared()  # else ptxas lets a warp pass the barrier before its reads return, and the next copy is no
        gl.thread_barrier()  # access that they are in order with; now all of the warpgroup have read it
        mbarrier.arrive(bias_empty)
        to_base_2 = _LOG2E.value
    if EDGE and RANGE == _LISTED:
        scores = gl.where(_seen_by_bits(key_mask, scores), scores, float("-inf"))
    elif EDGE:
        layout: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        keys = first_key + gl.arange(0, scores.shape[1], layout)
        inside = keys < num_keys
        if RANGE == _OF_MASK:
            inside = gl.load(key_mask + keys * stride_mask_n, mask=inside, other=0) != 0
        scores = gl.where(inside[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        if HAS_SPAN:
            scores = gl.where(keys[None, :] >= first_seen[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * to_base_2)  # it is above 0, and commutes with max
    # -inf: no key seen yet. +inf: the sum becomes inf and the row inf/inf = NaN. Neither may give inf - inf.
    finite_max = gl.where(gl.abs(new_max) == float("inf"), 0.0, new_max)
    p = gl.exp2(scores * to_base_2 - finite_max[:, None])
    return p, new_max, gl.exp2(row_max - finite_max)


@gluon.jit
def _row_sums(p, HEAD_DIM: gl.constexpr):
    """Of each row. At D64 of what a thread has of it, (rows, 4): the four are added after the last block (4% faster;
    at D128 1% slower)."""
    if HEAD_DIM == 64:
        sums = gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    else:
        sums = gl.sum(p, 1)
    return sums


@gluon.jit
def _decayed(row_sum, decay, HEAD_DIM: gl.constexpr):
    """The sums so far, to the new maximum. At D64 a thread whose share of a row is 0 keeps it where an infinite maximum
    stays (a decay of inf): the row's sum is inf, as it is where one sum is kept, and not NaN."""
    if HEAD_DIM == 64:
        decay = gl.convert_layout(gl.minimum(decay, 1.0), gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return row_sum * decay


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """P rounded to ``dtype``, two to an integer: a loop carries 16-bit values unpacked, one to a register."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    to: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + to + ".f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _operand(packed, dtype: gl.constexpr, layout: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [packed.shape[0], packed.shape[1] * 2]), layout)


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
def _with_sink(log_sum, sink):
    """(what is left of a row's probabilities, its log-sum-exp) with one logit more; both in base 2.

    A row that saw nothing has a log-sum of -inf and a result of 0; of infinite ones no difference may be taken.
    """
    top = gl.maximum(log_sum, sink)
    finite_top = gl.where(gl.abs(top) == float("inf"), 0.0, top)
    kept = 1.0 / (1.0 + gl.exp2(sink - gl.where(log_sum == float("-inf"), 0.0, log_sum)))
    return kept, finite_top + gl.log2(gl.exp2(log_sum - finite_top) + gl.exp2(sink - finite_top))


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


@gluon.jit
def _produce(
    arguments,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
):
    """One warp: everything that the consumers read."""
    (
        q_desc,
        k_desc,
        v_desc,
        bias_desc,
        q_ring,
        k_ring,
        v_ring,
        bias_ring,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        bias_full,
        bias_empty,
        num_tiles,
        num_heads,
        group,
        batch_heads,
        bias_batches,
        bias_heads,
        heads_together,
        num_queries,
        num_keys,
        key_range,
        window,
        chunk,
        lists,
        stride_mask_b,
        stride_mask_n,
    ) = arguments
    RINGS: gl.constexpr = _rings(HEAD_DIM, HAS_BIAS)
    dtype: gl.constexpr = q_ring.dtype
    q_layout: gl.constexpr = q_desc.layout
    kv_layout: gl.constexpr = k_desc.layout
    size: gl.constexpr = HEAD_DIM * 2
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    step = 0
    total = num_tiles * batch_heads
    programs = gl.num_programs(0)
    for turn in range(gl.cdiv(total, programs)):
        index = turn * programs + gl.program_id(0)
        if turn % 2 == 1:  # back and forth: who had the longest tile of one round has the shortest of the next
            index = turn * programs + programs - 1 - gl.program_id(0)
        if index < total:
            row, head, low, _, full, blocks, origin, _, _, _, _ = _place(
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
            batch = head // num_heads
            kv_head = head % num_heads // group
            for block in range(blocks - 1, low - 1, -1):
                key = origin + block * BLOCK_N
                if RANGE == _LISTED:
                    own_lists = lists + origin.to(gl.int64) * (2 * gl.cdiv(num_keys, BLOCK_N))
                    key = _block(own_lists, block, full, num_keys, BLOCK_N) * BLOCK_N
                slot = step % STAGES
                free = (step // STAGES) & 1 ^ 1
                mbarrier.wait(k_empty.index(slot), free)
                mbarrier.expect(k_full.index(slot), BLOCK_N * size)
                tma.async_copy_global_to_shared(
                    k_desc,
                    [batch, kv_head, key, 0],
                    k_full.index(slot),
                    k_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
                )
                if block == blocks - 1:
                    for worker in gl.static_range(WORKERS):
                        q_slot = turn % RINGS * WORKERS + worker
                        mbarrier.wait(q_empty.index(q_slot), turn // RINGS & 1 ^ 1)
                        mbarrier.expect(q_full.index(q_slot), 64 * size)
                        tma.async_copy_global_to_shared(
                            q_desc,
                            [batch, head % num_heads, row + 64 * worker, 0],
                            q_full.index(q_slot),
                            q_ring.index(q_slot)._reinterpret(dtype, [1, 1, 64, HEAD_DIM], q_layout),
                        )
                if HAS_BIAS:
                    for worker in gl.static_range(WORKERS):
                        bias_slot = step % RINGS * WORKERS + worker
                        mbarrier.wait(bias_empty.index(bias_slot), step // RINGS & 1 ^ 1)
                        mbarrier.expect(bias_full.index(bias_slot), 64 * BLOCK_N * 2)
                        tma.async_copy_global_to_shared(
                            bias_desc,
                            [batch % bias_batches, head % num_heads % bias_heads, row + 64 * worker, key],
                            bias_full.index(bias_slot),
                            bias_ring.index(bias_slot)._reinterpret(dtype, [1, 1, 64, BLOCK_N], bias_desc.layout),
                        )
                mbarrier.wait(v_empty.index(slot), free)
                mbarrier.expect(v_full.index(slot), BLOCK_N * size)
                tma.async_copy_global_to_shared(
                    v_desc,
                    [batch, kv_head, key, 0],
                    v_full.index(slot),
                    v_ring.index(slot)._reinterpret(dtype, [1, 1, BLOCK_N, HEAD_DIM], kv_layout),
                )
                step += 1


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), ARRIVALS)
    return bars


_DYNAMIC = ["num_heads", "kv_heads", "group", "heads_together", "num_queries", "num_keys", "width", "value_width"]
_DYNAMIC += ["batch_heads", "bias_batches", "bias_heads", "window", "chunk", "score_scale", "cap"]


@gluon.jit(do_not_specialize=_DYNAMIC)
def attention_forward_hopper(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    bias,
    key_range,
    lists,
    key_mask,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_bb,
    stride_bh,
    stride_bm,
    stride_mask_b,
    stride_mask_n,
    num_heads,
    kv_heads,
    group,
    heads_together,
    num_queries,
    num_keys,
    width,
    value_width,
    batch_heads,
    bias_batches,
    bias_heads,
    window,
    chunk,
    score_scale,
    cap,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RANGE: gl.constexpr,
    HAS_SPAN: gl.constexpr,
):
    """out (B, H, Sq, value_width) by its strides, as are q and k, of ``width`` columns, and v; lse (B, H, Sq) float32,
    natural logarithm. No width is above HEAD_DIM, the columns of a tile.

    sinks (H,), bias (1 or B, 1 or H, Sq, Sk), which is added to the scores, and key_range, else anything. Scores are
    multiplied by score_scale, above 0: in base 2 where nothing else is done to them; where HAS_CAP, they are then cap
    times the tanh of it. RANGE: key_range is (B, 2), or what `keys_of_mask` makes of it and of key_mask, uint8 (B, Sk).
    Tiles of keys begin with the first key that is seen, where a copy may begin as well. Or, of any bool mask, the
    lengths, lists and bits (key_mask) of `tiles_of_mask`, which say all that is hidden, with how many tables further
    the next sequence's (stride_mask_b) and the next head's (stride_mask_n) are. HAS_SPAN: a window or chunks (the other
    0), which only causal attention has here, or a key range beside bias.

    A persistent program takes tiles of 128 rows, the longest first among as many heads as fit the L2.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    BLOCK_N: gl.constexpr = _block_n(HEAD_DIM)
    num_tiles = gl.cdiv(num_queries, BLOCK_M)
    batch = batch_heads // num_heads
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    flat_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, HEAD_DIM], dtype)
    q_desc = described(
        q, batch, num_heads, num_queries, width, stride_qb, stride_qh, stride_qm, 64, HEAD_DIM, flat_layout
    )
    k_desc = described(
        k, batch, kv_heads, num_keys, width, stride_kb, stride_kh, stride_kn, BLOCK_N, HEAD_DIM, flat_layout
    )
    v_desc = described(
        v, batch, kv_heads, num_keys, value_width, stride_vb, stride_vh, stride_vn, BLOCK_N, HEAD_DIM, flat_layout
    )
    out_desc = described(
        out, batch, num_heads, num_queries, value_width, stride_ob, stride_oh, stride_om, 64, HEAD_DIM, flat_layout
    )
    RINGS: gl.constexpr = _rings(HEAD_DIM, HAS_BIAS)
    q_ring = gl.allocate_shared_memory(dtype, [RINGS * WORKERS, 64, HEAD_DIM], tile_layout)
    if HEAD_DIM > 128:  # results go where Q was
        out_ring = q_ring
    else:
        out_ring = gl.allocate_shared_memory(dtype, [WORKERS, 64, HEAD_DIM], tile_layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    q_full = _barriers(RINGS * WORKERS, 1)
    q_empty = _barriers(RINGS * WORKERS, 1)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, WORKERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, WORKERS)
    if HAS_BIAS:
        bias_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
        flat_bias: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, BLOCK_N], dtype)
        bias_desc = tma.make_tensor_descriptor(
            bias,
            [bias_batches, bias_heads, num_queries, num_keys],
            [stride_bb, stride_bh, stride_bm, 1],
            [1, 1, 64, BLOCK_N],
            flat_bias,
        )
        bias_ring = gl.allocate_shared_memory(dtype, [RINGS * WORKERS, 64, BLOCK_N], bias_layout)
        bias_full = _barriers(RINGS * WORKERS, 1)
        bias_empty = _barriers(RINGS * WORKERS, 1)
    else:  # not read
        bias_desc, bias_ring, bias_full, bias_empty = k_desc, k_ring, k_full, k_empty
    consumer = (
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
    )
    producer = (
        q_desc,
        k_desc,
        v_desc,
        bias_desc,
        q_ring,
        k_ring,
        v_ring,
        bias_ring,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        bias_full,
        bias_empty,
        num_tiles,
        num_heads,
        group,
        batch_heads,
        bias_batches,
        bias_heads,
        heads_together,
        num_queries,
        num_keys,
        key_range,
        window,
        chunk,
        lists,
        stride_mask_b,
        stride_mask_n,
    )
    # A name would make tensors of the constants.
    gl.warp_specialize(
        [
            (_consume, (consumer, gl.constexpr(0), HEAD_DIM, CAUSAL, HAS_SINKS, HAS_CAP, HAS_BIAS, RANGE, HAS_SPAN)),
            (_consume, (consumer, gl.constexpr(1), HEAD_DIM, CAUSAL, HAS_SINKS, HAS_CAP, HAS_BIAS, RANGE, HAS_SPAN)),
            (_produce, (producer, HEAD_DIM, CAUSAL, HAS_BIAS, RANGE, HAS_SPAN)),
        ],
        [4, 1],
        [240, 24],
    )


attention_forward_hopper.uses_scratch = True  # TMA descriptors


# ------------------------------------------------------------------------------------------------------------- launcher


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Over (batch, head, row); those of dimensions of one element are as good as any, and arbitrary."""
    return tuple(x.shape[-1] if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False))


def _described(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can stand for ``x``: 16-byte aligned rows, none of them expanded."""
    step = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return aligned and all(s > 0 and s % step == 0 and s < 2**39 for s in _strides(x))


def operand(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where a TMA descriptor cannot stand for it."""
    return x if _described(x) else x.clone(memory_format=torch.contiguous_format)


def _bias(mask: torch.Tensor) -> torch.Tensor:
    """A float mask as (1 or B, 1 or H, Sq, Sk) whose rows a TMA descriptor can stand for."""
    bias = mask[(None,) * (4 - mask.dim())]
    bias = bias[tuple(slice(1) if bias.stride(i) == 0 else slice(None) for i in (0, 1))]
    if _described(bias):
        return bias
    rows = bias.new_empty((*bias.shape[:3], -(-bias.shape[3] // 8) * 8))[..., : bias.shape[3]]
    return rows.copy_(bias)


def of_keys(mask: torch.Tensor, keys: int) -> bool:
    """Whether a bool mask has a column for each key, and one row for all queries and heads."""
    alike = all(mask.dim() < -d or mask.shape[d] == 1 or mask.stride(d) == 0 for d in (-2, -3))
    return alike and mask.dim() > 0 and mask.shape[-1] == keys


def _key_mask(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """A bool mask of keys alone as uint8 (batch, 1, 1, Sk), whose keys lie side by side."""
    mask = mask.view(torch.uint8)[(None,) * (4 - mask.dim())][:, :1, :1]
    return (mask if mask.stride(3) == 1 else mask.contiguous()).expand(batch, 1, 1, mask.shape[3])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    tile = min(d for d in HEAD_DIMS if d >= dim)
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    key_range = None if key_range is None else key_range.contiguous()
    q, k, v = operand(q), operand(k), operand(v)
    biased = mask is not None and mask.dtype != torch.bool
    bias = _bias(mask) if mask is not None and biased else q
    kind, ranges, lists, own, apart, step = 0, lse, lse, q, 0, 0
    if mask is not None and not biased and not of_keys(mask, keys):
        kind, shape = _LISTED.value, (batch, heads, queries, keys)
        own, lists, ranges, apart, step = tiles_of_mask(mask, key_range, shape, causal, window, chunk, _block_n(tile))
        causal, window, chunk = False, None, None
    elif mask is not None and not biased:
        kind, own = _OF_MASK.value, _key_mask(mask, batch)
        ranges, apart, step = keys_of_mask(own, key_range, batch), own.stride(0), own.stride(3)
    elif key_range is not None:
        kind, ranges = _GIVEN.value, key_range
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size()) * (heads // kv_heads)
    # Tiles are dealt in advance: those of all heads end evenly, a group's do not. Many short ones at once wait for K
    # and V (B16 H32 S1024 D64: 227 us, in groups 210).
    if causal and 2 * k.numel() * k.element_size() <= 3 * target.l2_bytes and (queries > 1024 or dim > 64):
        together = batch * heads
    tiles = -(-queries // BLOCK_M.value) * batch * heads
    scale = dim**-0.5 if scale is None else scale
    launch(
        attention_forward_hopper,
        (min(tiles, target.units),),
        q,
        k,
        v,
        out,
        lse,
        lse if sinks is None else sinks.contiguous(),
        bias,
        ranges,
        lists,
        own,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(out.transpose(1, 2)),
        *_strides(bias),
        apart,
        step,
        heads,
        kv_heads,
        heads // kv_heads,
        together,
        queries,
        keys,
        dim,
        v.shape[3],
        batch * heads,
        bias.shape[0],
        bias.shape[1],
        window or 0,
        chunk or 0,
        scale / softcap if softcap else scale * (1.0 if biased else _LOG2E.value),
        softcap,
        device=q.device,
        HEAD_DIM=tile,
        CAUSAL=causal,
        HAS_SINKS=sinks is not None,
        HAS_CAP=softcap > 0,
        HAS_BIAS=biased,
        RANGE=kind,
        HAS_SPAN=window is not None or chunk is not None or (biased and key_range is not None),
        num_warps=4,
    )
    return out.transpose(1, 2), lse


def runs_on(target: Target) -> bool:
    return target.arch == "sm_90" and "wgmma" in target.features


def specialisations(target: Target, dtype: str, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Specialisation]:
    """What `attention` compiles: causal and full, without sinks and a float mask, and with either or both; with a key
    range or a mask of keys; causal ones in a window, without and with sinks, and with a soft cap, without a window and
    in one; and with a mask of pairs, without and with sinks."""
    kind = getattr(torch, dtype)
    dims = tuple(d for d in head_dims if d in OF_HOPPER)
    if not runs_on(target) or kind == torch.float32 or not dims:
        return []
    plain = [
        f
        for f in forms(target, kind, dims)
        if f[0].shape[2] > 1 and f[4:] == (None, None, 0.0, None, None, None, None, 0.0, None)
    ]
    biased = [
        (*f[:7], torch.empty((1, f[0].shape[1], f[0].shape[2], f[1].shape[2]), dtype=kind, device="meta"), *f[8:])
        for f in plain
    ]
    sunk = [(*f[:8], torch.empty(f[0].shape[1], dtype=kind, device="meta"), *f[9:]) for f in (*plain, *biased)]
    ranges = torch.empty((2, 2), dtype=torch.int32, device="meta")
    ranged = [(*f[:9], ranges, *f[10:]) for f in plain]
    spans = [(*f[:5], 512, *f[6:]) for f in (*plain, *sunk[: len(plain)]) if f[3]]
    capped = [(*f[:6], 50.0, *f[7:]) for f in (*plain, *spans[: len(spans) // 2]) if f[3]]
    masked = [(*f[:7], torch.empty((2, 1, 1, 4096), dtype=torch.bool, device="meta"), *f[8:]) for f in plain]
    pairs = [
        (*f[:7], torch.empty((f[0].shape[2], f[1].shape[2]), dtype=torch.bool, device="meta"), *f[8:])
        for f in (*plain, *sunk[: len(plain)])
    ]
    every = (*plain, *biased, *sunk, *ranged, *spans, *capped, *masked, *pairs)
    kernels = recorded([functools.partial(attention, *(*form, target)) for form in every])
    return [replace(one, spills_allowed=_SPILLS) if _wide(one) else one for one in kernels]


def _wide(one: Specialisation) -> bool:
    """Whether a kernel has 256 columns of a head, or reads a mask beside 128, which leaves it no register."""
    columns = one.constexprs.get("HEAD_DIM", 0)
    hides = one.constexprs.get("HAS_BIAS") or one.constexprs.get("RANGE") == _OF_MASK.value
    return columns > 128 or (columns == 128 and bool(hides))
