"""Which implementations of matrix products exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, feature, multiple_of, unit_stride, when_interpreted
from ferryman.ops.menu import Implementation, menu

_ALL = "linear linear_backward"
# Triton 3.6's interpreter multiplies bfloat16 operands of tl.dot as raw integers.
_DOT = (when_interpreted(dtypes("x", torch.float32, torch.float16)),)
# wgmma and 16-byte copies: of the weight where it lies (x is copied where its rows are not 16 bytes apart).
_HOPPER = (
    feature("wgmma"),
    dtypes("x", torch.float16, torch.bfloat16),
    multiple_of("weight.shape[0]", 8),
    multiple_of("weight.shape[1]", 8),
    unit_stride("weight"),
    multiple_of("weight.stride[0]", 8),
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.matmul",
    # cuBLAS may round split-K partials to the storage dtype: torch allows it by default.
    Implementation(op="linear", name="torch", accumulation="split-k", differentiable="linear_with_gradient"),
    Implementation(op="linear_backward", name="torch", accumulation="split-k"),
    Implementation(op=_ALL, name="triton", when=_DOT, replayable=True, reads=("tf32",), tf32="tf32-rz"),
    Implementation(
        op="linear",
        name="cuda",
        where="hopper_kernels",
        when=_HOPPER,
        replayable=True,
        configurations="configurations",
    ),
)

# What a lockfile of version 7 was measured with: the same code, whose variables had other names.
SAME_KERNELS = {
    "linear": ("52cbbef820c2cdd673a7c477d4ac0dc096add142cb71777807feca3be951c094",),
}
