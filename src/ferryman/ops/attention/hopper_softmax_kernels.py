"""The softmax of attention's forward on Hopper, in Gluon: masks, cap and sums of a block, P as an operand, a sink."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ferryman.ops.attention.hopper_place_kernels import _LISTED, _OF_MASK
from ferryman.ops.attention.pair_mask_kernels import ROWS

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


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
def _with_sink(log_sum, sink):
    """(what is left of a row's probabilities, its log-sum-exp) with one logit more; both in base 2.

    A row that saw nothing has a log-sum of -inf and a result of 0; of infinite ones no difference may be taken.
    """
    top = gl.maximum(log_sum, sink)
    finite_top = gl.where(gl.abs(top) == float("inf"), 0.0, top)
    kept = 1.0 / (1.0 + gl.exp2(sink - gl.where(log_sum == float("-inf"), 0.0, log_sum)))
    return kept, finite_top + gl.log2(gl.exp2(log_sum - finite_top) + gl.exp2(sink - finite_top))
