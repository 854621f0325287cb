"""Why edits of the gate's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "gate_topk_backward.triton.route_gradient",
        ("inside & (named == 1) -> (named == 1) in there = inside & (named == 1)",),
        "Ids are experts': no lane past the last expert is named.",
    ),
    Equivalent(
        "gate_topk_backward.triton.route_gradient",
        (
            "0.0 -> 1.0 in x = widen(tl.load(logits_ptr + token * row_stride + index * col_stride, mask=inside, "
            "other=0.0))",
        ),
        "What stands past the last expert is not counted, and not stored.",
    ),
)
