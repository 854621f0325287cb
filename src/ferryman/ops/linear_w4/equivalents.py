"""Why edits of the kernels of 4-bit weights change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "linear_w4.triton.linear_w4_tile",
        (
            "widen(tl.load(scale_ptrs + (first // group) * scale_col, mask=col_inside, other=0.0)) -> "
            "(tl.load(scale_ptrs + first // group * scale_col, mask=col_inside, other=0.0))",
        ),
        "The float32 sum that it meets widens it.",
    ),
)
