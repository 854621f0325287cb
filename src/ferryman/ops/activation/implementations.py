"""Which implementations of the gated activations exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.activation"
_FORWARD = "silu_mul gelu_mul"
_BACKWARD = "silu_mul_backward gelu_mul_backward"
_PLAIN = (unit_stride("gate"), unit_stride("up"))
_GRADIENT = (unit_stride("grad"), *_PLAIN)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", _FORWARD, roundings=("activation",)),
    *menu(_HERE, "torch", _BACKWARD),
    *menu(_HERE, "triton", f"{_FORWARD} {_BACKWARD}", batch_invariant=True, replayable=True),
    *menu(_HERE, "cuda", _FORWARD, module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "cuda", _BACKWARD, module="simt_kernels", when=_GRADIENT, replayable=True),
    *menu(_HERE, "hip", _FORWARD, module="simt_kernels", when=_PLAIN, replayable=True),
    *menu(_HERE, "hip", _BACKWARD, module="simt_kernels", when=_GRADIENT, replayable=True),
)
