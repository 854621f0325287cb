"""Which implementations of products with weights of 4 bits exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, multiple_of, threshold, unit_stride, when_interpreted
from ferryman.ops.menu import Implementation, menu

_WHEN = (
    when_interpreted(dtypes("x", torch.float32, torch.float16)),  # the interpreter has no bfloat16 dot
    multiple_of("group", 32),  # a block of one group has at least 16 even columns, the least that a matrix unit takes
    unit_stride("weight"),
)

# unpacking takes as long for any rows; from so many on, the vendor's product of unpacked weights saves more
_MANY = threshold(
    "linear_w4.torch.rows", "rows", ("x.shape",), lambda view: view.args["x"].numel() / max(1, view.args["x"].shape[-1])
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.linear_w4",
    Implementation(op="linear_w4", name="torch", accumulation="split-k", roundings=("w",), leads=(_MANY,)),
    Implementation(op="linear_w4", name="triton", when=_WHEN, replayable=True),
)
