"""Why edits of the kernels that permute and combine tokens change nothing."""

from ferryman.ops.evidence import Equivalent

_BEHIND = (
    "What lies behind the last slot names a row that is read, and nothing of it is stored. Where it names no row, the "
    "read is a fault: memory that the launcher makes decides that, and no case."
)

EQUIVALENTS = (
    Equivalent(
        "moe_combine.triton.sums_of_slots",
        ("-1 -> 0.0 in place = tl.load(place_ptr + wide_token * slots + slot, mask=present, other=-1)",),
        "A token past the last sums row 0's numbers then, and is not stored.",
    ),
    Equivalent(
        "moe_combine.triton.sums_of_slots",
        ("known[:, None] & here[None, :] -> (known[:, None])",),
        "Columns past the width hold what lies behind the row, and are not stored.",
    ),
    Equivalent(
        "moe_combine_backward.triton.products_of_slots",
        ("tl.load(place_ptr + slot, mask=present, other=-1) -> tl.load(place_ptr + slot)",),
        _BEHIND,
    ),
    Equivalent(
        "moe_permute_backward.triton.sums_of_slots",
        (
            "tl.load(place_ptr + wide_token * slots + slot, mask=present, other=-1) -> "
            "tl.load(place_ptr + wide_token * slots + slot)",
        ),
        _BEHIND,
    ),
)
