"""Which implementations of `bias_act` exist; none has a condition."""

from __future__ import annotations

from ferryman.ops.menu import menu

_HERE = "ferryman.ops.bias_act"
_OPS = "bias_act bias_act_backward"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", _OPS),
    *menu(_HERE, "triton", _OPS, batch_invariant=True, replayable=True),
)
