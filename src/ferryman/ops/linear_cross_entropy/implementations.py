"""Which implementations of a projection's cross entropy exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, when_interpreted
from ferryman.ops.menu import Implementation, menu

_WHEN = (when_interpreted(dtypes("x", torch.float32, torch.float16)),)  # the interpreter has no bfloat16 dot
_BACKWARD = "linear_cross_entropy_backward"

IMPLEMENTATIONS = menu(
    "ferryman.ops.linear_cross_entropy",
    Implementation(op="linear_cross_entropy", name="torch", roundings=("logits",)),
    Implementation(
        op=_BACKWARD, name="torch", roundings=("logits", "slope"), accumulation="split-k", deterministic="asked"
    ),
    Implementation(op="linear_cross_entropy", name="triton.blas", where="blas_kernels", roundings=("logits",)),
    Implementation(
        op=_BACKWARD,
        name="triton.blas",
        where="blas_kernels",
        roundings=("logits", "slope"),
        accumulation="split-k",
        deterministic="asked",
    ),
    Implementation(op="linear_cross_entropy", name="triton.tiled", roundings=("logits",), when=_WHEN),
    Implementation(
        op=_BACKWARD, name="triton.tiled", roundings=("logits", "slope"), accumulation="split-k", when=_WHEN
    ),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "linear_cross_entropy": (
        "825546b9b73df91a695009075d9907c89697b27d013ab95d0ac769a7d2fcad51",
        ("edccdea7e4ba124534ab4eb6e5d8dd11ff9ae332d21d797322a7b4bb23262b4e",),
    ),
}
