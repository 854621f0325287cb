"""Which implementations of the norms exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.norm"
_FORWARD = "rms_norm add_rms_norm layer_norm"
_ALL = f"{_FORWARD} rms_norm_backward add_rms_norm_backward layer_norm_backward"
_SIMT = tuple(
    line
    for backend in ("cuda", "hip")
    for line in (
        *menu(_HERE, backend, "rms_norm layer_norm", module="simt_kernels", when=(unit_stride("x"),), replayable=True),
        *menu(_HERE, backend, "add_rms_norm", module="simt_kernels",
              when=(unit_stride("x"), unit_stride("residual")), replayable=True),
    )
)  # fmt: skip

IMPLEMENTATIONS = (*menu(_HERE, "torch", _ALL), *menu(_HERE, "triton", _ALL, replayable=True), *_SIMT)
