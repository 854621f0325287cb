"""Why edits of the gated delta rule's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "gated_delta_rule.triton.recurrent._recurrent",
        ("0.0 -> 1.0 in v = widen(tl.load(v_ptr + at * v_l + column * v_v, mask=column < dim, other=0.0))",),
        "A column of the state reads its own column of v alone, and those past the width are not stored.",
    ),
    Equivalent(
        "gated_delta_rule.triton.parallel._outputs",
        ("0.0 -> 1.0 in d = beta[:, None] * tl.load(wrong_ptr + out, mask=shape, other=0.0)",),
        "Past the last token beta is 0; what stands past the last column is not stored.",
    ),
)
