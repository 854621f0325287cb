"""Which implementations of the gated activations exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import Implementation, menu

_FORWARD = "silu_mul gelu_mul"
_BACKWARD = "silu_mul_backward gelu_mul_backward"
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_PLAIN = (unit_stride("gate"), unit_stride("up"))

IMPLEMENTATIONS = menu(
    "ferryman.ops.activation",
    Implementation(op=_FORWARD, name="torch", roundings=("activation",)),
    Implementation(op=_BACKWARD, name="torch"),
    Implementation(op=f"{_FORWARD} {_BACKWARD}", name="triton", batch_invariant=True, replayable=True),
    Implementation(op=f"{_FORWARD} {_BACKWARD}", name="cuda", where="simt_kernels", when=_PLAIN, replayable=True),
    Implementation(op=f"{_FORWARD} {_BACKWARD}", name="hip", where="simt_kernels", when=_PLAIN, replayable=True),
)
