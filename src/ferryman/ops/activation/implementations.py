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

# What a lockfile of version 7 was measured with: the same code, whose variables had other names.
SAME_KERNELS = {
    "gelu_mul": ("10532f4876d15b9bdbe2685b1298ff7a174e195417d598248a11a836a531e17c",),
    "gelu_mul_backward": ("6def66af752a1ee45cb93157f4a2601e99f50b71c52b0ed387b2463e072d0dfb",),
    "silu_mul": ("ede27850b29984faee1bd2124339a9989044b6f42ba96a35dbcb41d7efa81ad9",),
    "silu_mul_backward": ("28ca88248ed8fda1a6e92b0f9853fd3215e8675bc7c85341ae5242a4bcad4922",),
}
