"""Which implementations of sorting rows by expert, and of summing them back, exist."""

from __future__ import annotations

from ferryman.ops.clauses import Clause
from ferryman.ops.menu import Implementation, menu

MOST = 4096  # slots that each program reads whole
_FEW = Clause(
    f"at most {MOST} slots",
    ("topk_ids.shape",),
    lambda view: int(view.args["topk_ids"].numel()),
    lambda count: count <= MOST,
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe_permute",
    # a row for each slot is gathered before it is summed
    Implementation(op="moe_permute", name="torch"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="torch", composed=True),
    Implementation(op="moe_permute", name="triton.ranks", where="few_kernels", when=(_FEW,), partial=True),
    Implementation(op="moe_permute", name="triton.counted"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="triton"),
)
