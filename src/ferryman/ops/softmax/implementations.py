"""Which implementations of softmax and cross entropy exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_least, at_most, feature, not_multiple_of, same_dtype, unit_stride
from ferryman.ops.menu import Implementation, menu

_ALL = "softmax softmax_backward cross_entropy cross_entropy_backward"
_OVER = "cross_entropy_inplace_grad cross_entropy_inplace_grad_backward"
# A row is spread over a cluster of up to 8 blocks of 1024 threads, each of which keeps 128 bytes. Up to 16384 classes
# Triton's kernel, too, keeps it in registers and reads it once.
_CLUSTERS = (
    feature("clusters"),
    unit_stride("logits"),
    at_least("logits.shape[-1]", 2**14 + 1),
    at_most("logits.shape[-1]", 2**18 - 64),
)
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_BACKWARD = (same_dtype("grad", "y"), unit_stride("y"))
# Rows of multiples of 16 are read in whole words by Triton too, and faster: the row streams through.
_ODD = (*_CLUSTERS, not_multiple_of("logits.shape[-1]", 16))

IMPLEMENTATIONS = menu(
    "ferryman.ops.softmax",
    Implementation(op=f"{_ALL} {_OVER}", name="torch"),
    Implementation(op=_ALL, name="triton", replayable=True),
    Implementation(op=_OVER, name="triton", where="loss_kernels", replayable=True),
    Implementation(op="softmax", name="cuda", where="simt_kernels", when=(unit_stride("x"),), replayable=True),
    Implementation(
        op="softmax_backward", name="cuda", where="simt_softmax_backward_kernels", when=_BACKWARD, replayable=True
    ),
    Implementation(
        op="cross_entropy_inplace_grad",
        name="cuda",
        where="simt_loss_kernels",
        when=_CLUSTERS,
        replayable=True,
        partial=True,
    ),
    Implementation(
        op="cross_entropy cross_entropy_backward",
        name="cuda",
        where="simt_loss_kernels",
        when=_ODD,
        replayable=True,
        partial=True,
    ),
    Implementation(op="softmax", name="hip", where="simt_kernels", when=(unit_stride("x"),), replayable=True),
    Implementation(
        op="softmax_backward", name="hip", where="simt_softmax_backward_kernels", when=_BACKWARD, replayable=True
    ),
)
