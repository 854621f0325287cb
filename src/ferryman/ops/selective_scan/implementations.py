"""Which implementations of `selective_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.selective_scan"
# a program's part of the state, 16 channels of it and more, stays in registers
_STATE = (at_most("b.shape[2]", 256),)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "selective_scan selective_scan_backward", composed=True),
    *menu(
        _HERE, "triton", "selective_scan selective_scan_backward", when=_STATE, batch_invariant=True, replayable=True
    ),
)
