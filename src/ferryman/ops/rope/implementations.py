"""Which implementations of rotary embedding exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.rope"
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_PLAIN = (unit_stride("q"), unit_stride("k"))

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "rope rope_ rope_backward", batch_invariant=True),
    *menu(_HERE, "triton", "rope rope_ rope_backward", batch_invariant=True, replayable=True),
    *menu(_HERE, "cuda", "rope rope_", module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "cuda", "rope_backward", module="simt_kernels", replayable=True),
    *menu(_HERE, "hip", "rope rope_", module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "hip", "rope_backward", module="simt_kernels", replayable=True),
)
