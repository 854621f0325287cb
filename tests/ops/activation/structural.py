"""Kernels with one structural error each, which the exact probe must fail: tests/parity/test_gates.py runs them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.lines import torch_kernel


def gated_the_other_way(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    return torch_kernel("silu_mul")(up, gate.contiguous(), target)  # type: ignore[no-any-return]


ERRORS = {
    "silu_mul": (gated_the_other_way,),
}
