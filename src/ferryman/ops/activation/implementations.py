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

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "gelu_mul": (
        "e31ce76f15386a16e302c9fab210e7e00d3187c5c99edce877c5629591a89eaa",
        ("10532f4876d15b9bdbe2685b1298ff7a174e195417d598248a11a836a531e17c",),
    ),
    "gelu_mul_backward": (
        "85380a8d6a52d8697ead6534200cd724e8efa1d4a7b211be755b8dc503a7f55f",
        ("6def66af752a1ee45cb93157f4a2601e99f50b71c52b0ed387b2463e072d0dfb",),
    ),
    "silu_mul": (
        "6abbcbf67ed7ced50727280a4f7ee089abf373760e2b6d972df1a5b2d111bf0d",
        ("ede27850b29984faee1bd2124339a9989044b6f42ba96a35dbcb41d7efa81ad9",),
    ),
    "silu_mul_backward": (
        "5268dd5432ef83f68566411891d796f2d29a93094d3866b49d1bb532f332b738",
        ("28ca88248ed8fda1a6e92b0f9853fd3215e8675bc7c85341ae5242a4bcad4922",),
    ),
}
