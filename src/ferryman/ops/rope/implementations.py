"""Which implementations of rotary embedding exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.rope"
_PLAIN = (unit_stride("q"), unit_stride("k"))
_GRADIENTS = (unit_stride("grad_q"), unit_stride("grad_k"))

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "rope rope_ rope_backward", batch_invariant=True),
    *menu(_HERE, "triton", "rope rope_ rope_backward", batch_invariant=True, replayable=True),
    *menu(_HERE, "cuda", "rope rope_", module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "cuda", "rope_backward", module="simt_kernels", when=_GRADIENTS, replayable=True),
    *menu(_HERE, "hip", "rope rope_", module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "hip", "rope_backward", module="simt_kernels", when=_GRADIENTS, replayable=True),
)
