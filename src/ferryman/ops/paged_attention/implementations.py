"""Which implementations of paged attention exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, unit_stride, when_interpreted
from ferryman.ops.menu import Implementation, menu

_WHEN = (
    when_interpreted(dtypes("q", torch.float32, torch.float16)),  # the interpreter has no bfloat16 dot
    unit_stride("k_cache"),
    unit_stride("v_cache"),
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.paged_attention",
    Implementation(op="paged_attention", name="torch", roundings=("p",)),
    Implementation(op="paged_attention", name="triton", when=_WHEN, roundings=("p",), replayable=True),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "paged_attention": (
        "95fbc44f20412e35ff14c89ece4bafc2feabd59f93c3b847401b5a4a67fcfb12",
        ("7ad2a9cedbdc42b53af4f0c8d457139561b40c0dd57f527cac131563bf8901ca",),
    ),
}
