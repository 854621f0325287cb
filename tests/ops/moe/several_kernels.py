"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

_ORDER = "rows are put in order by their ranks or by counts, which for moe_permute are lines; the products are the same"
SEVERAL = {(op, "triton"): _ORDER for op in ("moe_experts", "moe_experts_backward")}
