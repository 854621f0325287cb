"""Why edits of the paged kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "paged_attention.triton.paged_attention_join",
        (
            "dim < HEAD_DIM -> (dim <= HEAD_DIM) in "
            "out += tl.load(parts + place * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0) * kept",
            "tl.load(parts + place * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0) -> "
            "tl.load(parts + place * HEAD_DIM + dim)",
        ),
        "Lanes past the head's dimension hold the next part's first numbers, and are not stored.",
    ),
)
