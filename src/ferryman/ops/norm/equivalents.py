"""Why edits of the norms' kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "add_layer_norm.triton.rows._norm",
        ("tl.load(weight_ptr + col, mask=inside, other=0.0) -> tl.load(weight_ptr + col)",),
        "What lies behind the weight is multiplied with columns past the row's end, which are not stored.",
    ),
    Equivalent(
        "rms_norm.triton.long._norm_long",
        ("0.0 -> 1.0 in y = y * widen(tl.load(weight_ptr + start + col, mask=mask, other=0.0))",),
        "Columns past the row's end are not stored.",
    ),
)
