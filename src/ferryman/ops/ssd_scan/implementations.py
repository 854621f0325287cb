"""Which implementations of `ssd_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

IMPLEMENTATIONS = menu(
    "ferryman.ops.ssd_scan",
    Implementation(op="ssd_scan ssd_scan_backward", name="torch", composed=True),
    Implementation(op="ssd_scan ssd_scan_backward", name="triton", batch_invariant=True, replayable=True),
)
