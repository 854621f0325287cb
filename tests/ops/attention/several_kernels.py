"""Lines that launch one kernel or another, and why: tests/unit/test_one_kernel_a_line.py sees each do so."""

from __future__ import annotations

SEVERAL = {
    ("attention_backward", "triton"): "without sinks there is no gradient of them, which is a pass that follows",
}
