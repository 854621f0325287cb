"""Which implementations of `causal_conv1d` exist, and under which conditions.

No C++ form: what bounds it is how positions are loaded (`run_kernels.py`), whose 16-byte loads and runs in registers
C++ would repeat.
"""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import Implementation, menu

_OPS = "causal_conv1d causal_conv1d_backward"
# a program of the backward keeps the weight's gradient, a column for each tap
_NARROW = (at_most("weight.shape[1]", 32),)

IMPLEMENTATIONS = menu(
    "ferryman.ops.causal_conv1d",
    Implementation(op=_OPS, name="torch", composed=True),
    Implementation(op="causal_conv1d", name="triton", when=_NARROW, batch_invariant=True, replayable=True),
    Implementation(
        op="causal_conv1d_backward",
        name="triton",
        where="backward_kernels",
        when=_NARROW,
        batch_invariant=True,
        replayable=True,
    ),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "causal_conv1d_backward": (
        "6d1e0b423a94509d4498e36f378831acb0711390919d7082cd872dc0a9dea8f5",
        ("c0a5be074df3af9b6cb05ced05478607776bea6a67694c5775e3a89dc5d87b4d",),
    ),
}
