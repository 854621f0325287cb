"""Which implementations of rotary embedding exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import Implementation, menu

# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_PLAIN = (unit_stride("q"), unit_stride("k"))

IMPLEMENTATIONS = menu(
    "ferryman.ops.rope",
    Implementation(op="rope rope_ rope_backward", name="torch", batch_invariant=True),
    Implementation(op="rope rope_ rope_backward", name="triton", batch_invariant=True, replayable=True),
    Implementation(op="rope rope_", name="cuda", where="simt_kernels", when=_PLAIN, replayable=True),
    Implementation(op="rope_backward", name="cuda", where="simt_kernels", replayable=True),
    Implementation(op="rope rope_", name="hip", where="simt_kernels", when=_PLAIN, replayable=True),
    Implementation(op="rope_backward", name="hip", where="simt_kernels", replayable=True),
)
