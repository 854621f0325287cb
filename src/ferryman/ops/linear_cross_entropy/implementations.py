"""Which implementations of a projection's cross entropy exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, when_interpreted
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.linear_cross_entropy"
_WHEN = (when_interpreted(dtypes("x", torch.float32, torch.float16)),)  # the interpreter has no bfloat16 dot
_BACKWARD = "linear_cross_entropy_backward"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "linear_cross_entropy", roundings=("logits",)),
    *menu(_HERE, "torch", _BACKWARD, roundings=("logits", "slope"), accumulation="split-k", deterministic="asked"),
    *menu(_HERE, "triton", "linear_cross_entropy", roundings=("logits",), when=_WHEN),
    *menu(_HERE, "triton", _BACKWARD, roundings=("logits", "slope"), accumulation="split-k", when=_WHEN),
)
