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

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "rope": (
        "6b6c098304fa442325eeac20f841bb5e859ad7e3e80ed0f7953cffc88f6ac966",
        ("531d3979e4cd5275d715adab3b5b9fa4010bf692b94099fc08c8e86b64ff97bf",),
    ),
    "rope_": (
        "181e9461a4218bbc2a28ea162a927d727f0590002c15a10df3f58f90590e1226",
        ("a3593c7cd567e03c0855d167e56dd9ed22497440774f71b3bf6923bdee0f0374",),
    ),
    "rope_backward": (
        "d41a355829f2cbd10e3daa379c0dbc502e7f02f77b5e3a5d0f01edd813d5dea3",
        ("abb768baa2cce51c825ca9d7f00292a303a6d4628c6082cee3ce5c698e14635f",),
    ),
}
