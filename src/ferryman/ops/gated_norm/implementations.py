"""Which implementations of the gated norm exist: all serve every call."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

_OPS = "gated_rms_norm gated_rms_norm_backward"

IMPLEMENTATIONS = menu(
    "ferryman.ops.gated_norm",
    Implementation(op=_OPS, name="torch"),
    Implementation(op=_OPS, name="triton", replayable=True),
)
