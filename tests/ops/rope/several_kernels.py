"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

_PACKS = (
    "packs are as wide as addresses, lengths and strides allow together (`x.aligned` speaks of 16 bytes alone), and of "
    "one element they are another kernel"
)
SEVERAL = {(op, "cuda"): _PACKS for op in ("rope", "rope_", "rope_backward")}
