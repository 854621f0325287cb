"""Which implementations of softmax and cross entropy exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import unit_stride
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.softmax"
_ALL = "softmax softmax_backward cross_entropy cross_entropy_backward"
_OVER = "cross_entropy_inplace_grad cross_entropy_inplace_grad_backward"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", f"{_ALL} {_OVER}"),
    *menu(_HERE, "triton", _ALL, replayable=True),
    *menu(_HERE, "triton", _OVER, module="loss_kernels", replayable=True),
    *menu(_HERE, "cuda", "softmax", module="simt_kernels", when=(unit_stride("x"),), replayable=True),
    *menu(_HERE, "hip", "softmax", module="simt_kernels", when=(unit_stride("x"),), replayable=True),
)
