"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.lines import torch_kernel


def rope_with_sin_of_the_other_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inter: bool, target: Any) -> Any:
    return torch_kernel("rope")(q, k, cos, sin.roll(sin.shape[-1] // 2, -1), inter, target)


ERRORS = {
    "rope": (rope_with_sin_of_the_other_half,),
}
