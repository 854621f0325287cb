"""Why edits of the rotary kernels change nothing."""

from ferryman.ops.evidence import Equivalent

EQUIVALENTS = (
    Equivalent(
        "rope.triton._angles",
        ("(line < lines) & (col < rotary) -> (col < rotary)",),
        "A line past the last turns pairs that are not stored.",
    ),
    Equivalent(
        "rope.triton._rotate",
        ("0.0 -> 1.0 in a = widen(tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0))",),
        "What stands for a pair past the last column or line is not stored.",
    ),
    Equivalent(
        "rope_backward.triton._rotate",
        ("tl.load(x_ptr + (line * x_stride + col), mask=mask, other=0.0) -> tl.load(x_ptr + (line * x_stride + col))",),
        "What lies behind a line, or the last one, is turned with pairs that are not stored.",
    ),
    Equivalent(
        "rope_.triton._angles",
        (
            "tl.load(ptr + (line * stride + col), mask=(line < lines) & (col < rotary), other=0.0) -> "
            "tl.load(ptr + (line * stride + col))",
        ),
        "An angle past the last column or line turns a pair that is not stored.",
    ),
    Equivalent(
        "rope_.triton._rotate",
        ("x_stride -> out_stride in b = widen(tl.load(x_ptr + half + (line * x_stride + col), mask=mask, other=0.0))",),
        "The result is written over x: both strides are x's.",
    ),
)
