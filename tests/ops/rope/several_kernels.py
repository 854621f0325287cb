"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

_PACKS = (
    "`rope_packs` needs heads, strides and the addresses of q, k, cos and sin in whole packs of 16 bytes; `rope` takes "
    "the rest, and the width of its packs is a parameter. Clauses could say so (`q.aligned` and three more), but the "
    "key of every call would then read four addresses, and it reads none"
)
SEVERAL = {(op, "cuda"): _PACKS for op in ("rope", "rope_", "rope_backward")}
