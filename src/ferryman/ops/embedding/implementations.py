"""Which implementations of a table's rows exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import Clause, unit_stride
from ferryman.ops.menu import Implementation, menu

_ROWS = (unit_stride("weight"),)  # a table is not copied to read some of its rows
# Each id is compared with every other.
_FEW = Clause(
    "at most 2048 ids", ("ids.shape",), lambda view: int(view.args["ids"].numel()), lambda count: count <= 2048
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.embedding",
    Implementation(op="embedding", name="torch", batch_invariant=True),
    # atomic additions on GPUs, unless PyTorch is asked for deterministic algorithms
    Implementation(op="embedding_backward", name="torch", deterministic="asked", composed=True),
    Implementation(op="embedding", name="triton", batch_invariant=True, replayable=True),
    Implementation(
        op="embedding_backward",
        name="triton.few",
        where="few_kernels",
        when=(_FEW,),
        replayable=True,
        partial=True,
    ),
    Implementation(op="embedding_backward", name="triton.sorted"),
    Implementation(
        op="embedding", name="cuda", where="simt_kernels", when=_ROWS, batch_invariant=True, replayable=True
    ),
    Implementation(op="embedding", name="hip", where="simt_kernels", when=_ROWS, batch_invariant=True, replayable=True),
)
