"""Which implementations of `gate_topk` exist, and under which conditions.

No C++ form: a token's experts lie in one warp's registers in Triton, too, and reductions over them are its shuffles.
What C++ would save is Triton's launch, which a replay goes past.
"""

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

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "gate_topk_backward": (
        "d238f7e4147dea091fb3f138c0e36f23ab8a0313be15d8325905a2a4c5fb7469",
        ("898db814daf91e092ae5aa7a809121ec2ea2ab83b53f295adec6d8f35e618b2b",),
    ),
}
