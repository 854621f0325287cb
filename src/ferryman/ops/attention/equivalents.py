"""Why edits of attention's kernels change nothing."""

from ferryman.ops.attention.few_queries_equivalents import FEW_QUERIES
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
    Equivalent(
        "attention_backward.triton.decode._saturation",
        (
            "-17.0 / 315 + square * (62.0 / 2835) -> (-17.0 / 315 - square * (62.0 / 2835))",
            "-17.0 / 315 + square * (62.0 / 2835) -> (-17.0 / 315)",
        ),
        "The series serves |x| < 1/4, where its last term is at most x^9 * 62 / 2835 = 8.4e-8: 2.8 u of the cap where "
        "its sign turns. The scores' bound has 6 u of the cap for tanh, of which its rounding takes less than 1 there.",
        within=True,
    ),
    *FEW_QUERIES,
)
