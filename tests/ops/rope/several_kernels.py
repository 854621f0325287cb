"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

_PACKS = "which kernel serves follows from addresses, which no clause reads: elements in packs, or one by one"
SEVERAL = {(op, "cuda"): _PACKS for op in ("rope", "rope_", "rope_backward")}
