"""Which implementations of sorting rows by expert, and of summing them back, exist."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe_permute",
    # a row for each slot is gathered before it is summed
    Implementation(op="moe_permute", name="torch"),
    Implementation(op="moe_permute_backward moe_combine moe_combine_backward", name="torch", composed=True),
    Implementation(op="moe_permute moe_permute_backward moe_combine moe_combine_backward", name="triton"),
)
