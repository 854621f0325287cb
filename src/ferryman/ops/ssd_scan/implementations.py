"""Which implementations of `ssd_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import menu

_HERE = "ferryman.ops.ssd_scan"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "ssd_scan ssd_scan_backward", composed=True),
    *menu(_HERE, "triton", "ssd_scan ssd_scan_backward", batch_invariant=True, replayable=True),
)
