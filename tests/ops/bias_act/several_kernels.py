"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

SEVERAL = {("bias_act_backward", "triton"): "without a bias there is no sum, and the kernel is elementwise"}
