"""Why edits of group_norm's kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "group_norm.triton.long._of_channels",
        ("tl.load(vector + channel, mask=inside, other=0.0) -> tl.load(vector + channel)",),
        "A channel past the group's is not stored.",
    ),
    Equivalent(
        "group_norm_backward.triton.long.columns_kernel",
        ("c < channels -> (c <= channels) in inside = (line < lines) & (c < channels)",),
        "One column more is read, the next line's first, and is not stored.",
    ),
    Equivalent(
        "group_norm_backward.triton.long.sums_kernel",
        ("(piece + 1) * tiles_a_piece -> ((piece + 1) * tiles_a_piece).to(tl.float16).to(tl.float32)",),
        "A number of tiles: float16 has every one up to 2048, of four million places.",
    ),
)
