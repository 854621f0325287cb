"""Which implementations of `ssd_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.ssd_scan"
# a program's part of the state, 32 rows of it, stays in registers
_STATE = (at_most("b.shape[3]", 256),)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "ssd_scan ssd_scan_backward", composed=True),
    *menu(_HERE, "triton", "ssd_scan", when=_STATE, batch_invariant=True, replayable=True),
    *menu(_HERE, "triton", "ssd_scan_backward", batch_invariant=True, replayable=True),
)
