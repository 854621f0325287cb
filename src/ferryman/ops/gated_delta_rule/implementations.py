"""Which implementations of `gated_delta_rule` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.gated_delta_rule"
_OP = "gated_delta_rule"
_BACKWARD = "gated_delta_rule_backward"
# a program's part of the state, some columns of it, stays in registers
_STATE = at_most("q.shape[3]", 256)
_FEW = at_most("q.shape[1]", 16)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", f"{_OP} {_BACKWARD}", composed=True),
    *menu(
        _HERE,
        "triton.recurrent",
        _OP,
        when=(_STATE, _FEW),
        batch_invariant=True,
        replayable=True,
        function="recurrent",
        partial=True,
    ),
    *menu(_HERE, "triton.chunked", _OP, batch_invariant=True, replayable=True),
    *menu(_HERE, "triton", _BACKWARD, module="backward_kernels", batch_invariant=True, replayable=True),
)
