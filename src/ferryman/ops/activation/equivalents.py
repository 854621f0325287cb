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
)
