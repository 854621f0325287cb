"""Why edits of the products' kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "triton._matmul",
        ("tl.minimum(col, n - tile_n - 1) -> (col)",),
        "What is read past the last column is not stored.",
    ),
    Equivalent(
        "linear_backward.triton._matmul",
        ("0.0 -> 1.0 in b = tl.load(b_ptrs, mask=(depth < k - start)[:, None] & b_inside[None, :], other=0.0)",),
        "Past the last term it meets a 0 of the other factor; past the last column it is not stored.",
    ),
    Equivalent(
        "linear.triton._matmul",
        ("0.0 -> 1.0 in total_sum += widen(tl.load(bias_ptr + tile_n + col, mask=b_inside, other=0.0))[None, :]",),
        "Columns past the last are not stored.",
    ),
    Equivalent(
        "linear.triton._matmul",
        (
            "c_ptr -> a_ptr in tl.store(c_ptrs, narrow(total_sum, c_ptr.dtype.element_ty), mask=a_inside[:, None] & "
            "b_inside[None, :])",
        ),
        "It is a dtype: the result has x's.",
    ),
)
