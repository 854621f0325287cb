"""Which implementations of `bias_act` exist; none has a condition."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

_OPS = "bias_act bias_act_backward"

IMPLEMENTATIONS = menu(
    "ferryman.ops.bias_act",
    Implementation(op=_OPS, name="torch"),
    Implementation(op=_OPS, name="triton", batch_invariant=True, replayable=True),
)
