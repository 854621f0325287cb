"""Which implementations of writing into a paged cache exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import menu

_HERE = "ferryman.ops.kv_append"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "kv_append"),
    *menu(_HERE, "triton", "kv_append", replayable=True),
)
