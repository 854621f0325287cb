"""Which implementations of writing into a paged cache exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_most
from ferryman.ops.menu import Implementation, menu

# 32 bits count the elements of a token
_COUNTED = tuple(at_most(f"{name}.shape[{place}]", 32_767) for name in ("k", "v") for place in (1, 2))

IMPLEMENTATIONS = menu(
    "ferryman.ops.kv_append",
    Implementation(op="kv_append", name="torch"),
    Implementation(op="kv_append", name="triton", replayable=True),
    Implementation(op="kv_append", name="cuda", where="simt_kernels", when=_COUNTED, replayable=True),
    Implementation(op="kv_append", name="hip", where="simt_kernels", when=_COUNTED, replayable=True),
)
