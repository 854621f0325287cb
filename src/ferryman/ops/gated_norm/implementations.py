"""Which implementations of the gated norm exist: all serve every call."""

from __future__ import annotations

from ferryman.ops.menu import menu

_HERE = "ferryman.ops.gated_norm"
_OPS = "gated_rms_norm gated_rms_norm_backward"

IMPLEMENTATIONS = (*menu(_HERE, "torch", _OPS), *menu(_HERE, "triton", _OPS, replayable=True))
