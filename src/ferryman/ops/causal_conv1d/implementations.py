"""Which implementations of `causal_conv1d` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.causal_conv1d"
_OPS = "causal_conv1d causal_conv1d_backward"
# a program of the backward keeps the weight's gradient, a column for each tap
_NARROW = (at_most("weight.shape[1]", 32),)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", _OPS, composed=True),
    *menu(_HERE, "triton", _OPS, when=_NARROW, batch_invariant=True, replayable=True),
)
