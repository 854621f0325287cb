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

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "linear": (
        "9cebe73a00ccd5252934257f77216eeac730d36c043e535d7f6d2386a0700a28",
        ("52cbbef820c2cdd673a7c477d4ac0dc096add142cb71777807feca3be951c094",),
    ),
}
