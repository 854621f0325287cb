"""Which implementations of the gated activations exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.activation"
_FORWARD = "silu_mul gelu_mul"
_BACKWARD = "silu_mul_backward gelu_mul_backward"
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_PLAIN = (unit_stride("gate"), unit_stride("up"))

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", _FORWARD, roundings=("activation",)),
    *menu(_HERE, "torch", _BACKWARD),
    *menu(_HERE, "triton", f"{_FORWARD} {_BACKWARD}", batch_invariant=True, replayable=True),
    *menu(_HERE, "cuda", f"{_FORWARD} {_BACKWARD}", module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "hip", f"{_FORWARD} {_BACKWARD}", module="simt_kernels", when=_PLAIN, replayable=True),
)
