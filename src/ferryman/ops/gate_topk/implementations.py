"""Which implementations of `gate_topk` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.gate_topk"
# a program keeps a token's experts in registers
_EXPERTS = (at_most("logits.shape[1]", 1024),)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "gate_topk gate_topk_backward", composed=True),
    *menu(_HERE, "triton", "gate_topk gate_topk_backward", when=_EXPERTS, batch_invariant=True, replayable=True),
)
