"""Which implementations of sorting rows by expert, and of summing them back, exist."""

from __future__ import annotations

from ferryman.ops.clauses import Clause
from ferryman.ops.menu import Implementation, menu

# ids that each program reads whole
_FEW = Clause(
    "at most 1024 slots",
    ("topk_ids.shape",),
    lambda view: int(view.args["topk_ids"].numel()),
    lambda count: count <= 1024,
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe_permute",
    # a row for each slot is gathered before it is summed
    Implementation(op="moe_permute", name="torch"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="torch", composed=True),
    Implementation(op="moe_permute", name="triton.sorted"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="triton"),
    # behind the other until a GPU has timed it
    Implementation(op="moe_permute", name="triton.ranks", where="few_kernels", when=(_FEW,), partial=True),
)
