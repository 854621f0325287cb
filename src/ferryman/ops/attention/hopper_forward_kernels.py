"""Attention's forward pass on Hopper, in Gluon: warp-specialised, with TMA and asynchronous warpgroup products.

One warp loads tiles of Q, K and V by TMA into rings in shared memory; two warpgroups of 64 query rows each consume
them. Within a warpgroup the softmax of one block of keys runs while the tensor cores multiply the block before by V.
The two take turns to issue products, so that one's softmax hides behind the other's. Programs are persistent: the next
tile's Q, K and V arrive during the last one's epilogue (one program for each tile: 0.87 of the speed at D128, S8192).

Heads are filled up with zeros, by TMA, to 64, 128 or 256 columns. Of 256 blocks have 64 keys, and results go out by
way of Q's tile, for want of shared memory and registers.

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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ferryman.ops.attention.hopper_consumer_kernels import _consume
from ferryman.ops.attention.hopper_descriptor_kernels import described
from ferryman.ops.attention.hopper_place_kernels import _LISTED, BLOCK_M, STAGES, _block, _block_n, _place, _rings
from ferryman.ops.attention.hopper_tile_kernels import WORKERS, _barriers


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
        bias_desc = described(
            bias,
            bias_batches,
            bias_heads,
            num_queries,
            num_keys,
            stride_bb,
            stride_bh,
            stride_bm,
            64,
            BLOCK_N,
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
