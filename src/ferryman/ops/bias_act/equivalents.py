"""Why edits of the kernels of bias and activation change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "bias_act_backward.triton.columns._backward_columns",
        ("out_ptr -> partial_ptr in g = _gradient(d, x + bias, alpha, KIND, out_ptr.dtype.element_ty == tl.float32)",),
        "Partial sums are float32: 16 bits get float32's exact exp, which the interpreter takes for all dtypes.",
    ),
)
