"""Which implementations of a table's rows exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import menu

_HERE = "ferryman.ops.embedding"

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "embedding", batch_invariant=True),
    # atomic additions on GPUs, unless PyTorch is asked for deterministic algorithms
    *menu(_HERE, "torch", "embedding_backward", deterministic="asked", composed=True),
    *menu(_HERE, "triton", "embedding", batch_invariant=True, replayable=True),
    *menu(_HERE, "triton", "embedding_backward"),
)
