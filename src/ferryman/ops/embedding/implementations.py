"""Which implementations of a table's rows exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.menu import Implementation, menu

IMPLEMENTATIONS = menu(
    "ferryman.ops.embedding",
    Implementation(op="embedding", name="torch", batch_invariant=True),
    # atomic additions on GPUs, unless PyTorch is asked for deterministic algorithms
    Implementation(op="embedding_backward", name="torch", deterministic="asked", composed=True),
    Implementation(op="embedding", name="triton", batch_invariant=True, replayable=True),
    Implementation(op="embedding_backward", name="triton"),
)
