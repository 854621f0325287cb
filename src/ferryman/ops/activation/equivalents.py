"""Why edits of the activations' kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "gelu_mul.triton.normal",
        (
            "0.3989422804014327 -> 0.7978845608028654 in "
            "return tl.where(x < 0, tail, 1.0 - tail), bell * 0.3989422804014327",
        ),
        "The forward takes the distribution alone; the density is for its gradient.",
    ),
    Equivalent(
        "gelu_mul.triton._factor",
        ("s * rest * (1.5957691216057308 + 0.21406448696540377 * bounded) -> (s * rest)",),
        "The forward takes the factor alone; its slope is for the gradient.",
    ),
    Equivalent(
        "gelu_mul.triton._gated",
        (
            "tl.load(up_ptr + first * up_stride + start + (row * up_stride + col), mask=mask) -> "
            "tl.load(up_ptr + first * up_stride + start + (row * up_stride + col))",
        ),
        "What lies behind a row, or the last one, is multiplied and not stored.",
    ),
    Equivalent(
        "triton._gated_backward",
        (
            "grad_up_ptr -> grad_ptr in tl.store(grad_up_ptr + place, "
            "narrow(d * (g * factor), grad_up_ptr.dtype.element_ty), mask=mask)",
        ),
        "It is a dtype: the gradients have that of the result's gradient.",
    ),
    Equivalent(
        "silu_mul.triton._gated",
        (
            "y_ptr.dtype.element_ty == tl.float32 -> (y_ptr.dtype.element_ty != tl.float32)",
            "y_ptr -> gate_ptr in factor, _ = _factor(g, KIND, y_ptr.dtype.element_ty == tl.float32)",
        ),
        "The result has the gate's dtype; and interpreted, exp is one function. Compiled, float32 would get the form "
        "for 16 bits where the comparison is turned: a GPU alone can show it.",
    ),
    Equivalent(
        "cuda.flat",
        ("after_previous(platform::thread_index()) -> (platform::thread_index())",),
        "Nothing is started here ahead of the kernel before it.",
    ),
    Equivalent(
        "cuda.flat",
        ("start += blocks * TILE; -> start = ferryman_narrow(start + (blocks * TILE)); in start += blocks * TILE;",),
        "A grid has a block for every tile, below 2^31 of them: none takes a second.",
    ),
    Equivalent(
        "cuda.flat",
        ("-> - 1 in } while (!EXACT && start < n);",),
        "A grid has a block for every tile, below 2^31 of them: none takes a second.",
    ),
    Equivalent(
        "cuda.flat",
        ("0 -> 1 in op.read(in[p], 0, at);",),
        "Of tensors that are one row, strides are 0.",
    ),
    Equivalent(
        "cuda.strided",
        ("< -> <= in for (i64 item = platform::block_index(); item < work; item += blocks) {",),
        "A grid has a block for every item, below 2^31 of them: none meets the end.",
    ),
    Equivalent(
        "gelu_mul_backward.cuda.factor",
        ("< -> <= in slope *= 1.5957691216f + 0.214064449f * (square < 1e8f ? square : 1e8f);",),
        "Both sides are 1e8 where they are equal.",
    ),
    Equivalent(
        "gelu_mul_backward.cuda.factor",
        ("square < 1e8f -> true in slope *= 1.5957691216f + 0.214064449f * (square < 1e8f ? square : 1e8f);",),
        "A square is infinite for gates past 1.8e19 alone. PyTorch's own gradient is NaN there, so no case has them.",
    ),
    Equivalent(
        "gelu_mul_backward.cuda.normal",
        ("< -> <= in return v < 0.0f ? tail : 1.0f - tail;",),
        "At 0 the tail is a half, and so is what it leaves of 1.",
    ),
)
