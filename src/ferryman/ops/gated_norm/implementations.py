"""Which implementations of the gated norm exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import Clause, row_in_registers
from ferryman.ops.menu import Implementation, menu

_OPS = "gated_rms_norm gated_rms_norm_backward"
MOST_COLUMNS = 4096  # of a padded group, beside whose gradients registers hold the weight's sums


def _rows(op: str, fits: Clause) -> Implementation:
    return Implementation(op=op, name="triton.rows", when=(fits,), replayable=True, partial=True, kin="rows")


IMPLEMENTATIONS = menu(
    "ferryman.ops.gated_norm",
    Implementation(op=_OPS, name="torch"),
    _rows("gated_rms_norm", row_in_registers("x", 2, size="group_size", beside=("gate",))),
    _rows(
        "gated_rms_norm_backward",
        row_in_registers("x", 4, size="group_size", beside=("gate", "grad"), most=MOST_COLUMNS),
    ),
    Implementation(op=_OPS, name="triton.long", where="long_kernels", replayable=True, kin="rows"),
)
