"""Which implementations of `gate_topk` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import Implementation, menu

# a program keeps a token's experts in registers
_EXPERTS = (at_most("logits.shape[1]", 1024),)

IMPLEMENTATIONS = menu(
    "ferryman.ops.gate_topk",
    Implementation(op="gate_topk gate_topk_backward", name="torch", composed=True),
    Implementation(
        op="gate_topk gate_topk_backward", name="triton", when=_EXPERTS, batch_invariant=True, replayable=True
    ),
)
