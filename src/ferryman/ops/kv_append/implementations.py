"""Which implementations of writing into a paged cache exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

IMPLEMENTATIONS = menu(
    "ferryman.ops.kv_append",
    Implementation(op="kv_append", name="torch"),
    Implementation(op="kv_append", name="triton", replayable=True),
)
