"""Which implementations of matrix products exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, when_interpreted
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.matmul"
_ALL = "linear linear_backward"
# Triton 3.6's interpreter multiplies bfloat16 operands of tl.dot as raw integers.
_DOT = (when_interpreted(dtypes("x", torch.float32, torch.float16)),)

IMPLEMENTATIONS = (
    # cuBLAS may round split-K partials to the storage dtype: torch allows it by default.
    *menu(_HERE, "torch", _ALL, accumulation="split-k"),
    *menu(_HERE, "triton", _ALL, when=_DOT, replayable=True, reads=("tf32",)),
)
