"""Why edits of the convolution's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "causal_conv1d.triton.in_rows",
        (
            "WIDTH - 4 -> (4 - WIDTH) in w_a = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 4) * w_k, mask=known & "
            "(WIDTH >= 4), other=0.0))",
        ),
        "Runs are of 4 taps at most: with 4 both are 0, with fewer nothing is read.",
    ),
    Equivalent(
        "causal_conv1d.triton.in_rows",
        (
            "0.0 -> 1.0 in w_c = widen(tl.load(weight_ptr + d * w_d + (WIDTH - 2) * w_k, mask=known & (WIDTH >= 2), "
            "other=0.0))",
        ),
        "Runs are of 2 taps or more, and channels past the last are not stored.",
    ),
)
