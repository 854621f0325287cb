"""Why edits of attention's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "attention.triton.decode._forward_range",
        ("MASK > 0 -> (MASK >= 0) in if EDGE or HAS_CAP or MASK > 0:",),
        "Whole blocks take the general branch then, which hides nothing. Compiled, its product and difference are no "
        "fma; the interpreter rounds both in either branch.",
    ),
    Equivalent(
        "attention.triton.decode._kept",
        ("(b >= least).to(tl.int8) -> (b >= least)",),
        "Joined with a number of 8 bits, true is 1; compiled, two kinds cannot be joined.",
    ),
    Equivalent(
        "attention.triton.decode._key_ranges",
        ("full_hi = tl.minimum(full_hi, past) -> pass",),
        "full_hi is bounded by hi afterwards, the last row's bound. Few rows that end at the last key leave no whole "
        "block between the first row's bound and the last's.",
    ),
    Equivalent(
        "attention.triton.decode.attention_forward",
        ("0.0 -> 1.0 in sink = tl.load(sinks + head, mask=row_inside, other=0.0).to(tl.float32) * LOG2E",),
        "Rows past the last are not stored.",
    ),
)
