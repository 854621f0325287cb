"""Which implementations of paged attention exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, unit_stride, when_interpreted
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.paged_attention"
_WHEN = (
    when_interpreted(dtypes("q", torch.float32, torch.float16)),  # the interpreter has no bfloat16 dot
    unit_stride("k_cache"),
    unit_stride("v_cache"),
)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "paged_attention", roundings=("p",)),
    *menu(_HERE, "triton", "paged_attention", when=_WHEN, roundings=("p",), replayable=True),
)
