"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

_LAYOUT = "elementwise: the C++ of tensors without gaps needs no rows"
SEVERAL = {(f"{op}{way}", "cuda"): _LAYOUT for op in ("silu_mul", "gelu_mul") for way in ("", "_backward")}
