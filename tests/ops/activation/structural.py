"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lines import torch_kernel


def gated_the_other_way(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    return torch_kernel("silu_mul")(up, gate.contiguous(), target)  # type: ignore[no-any-return]


def honest_silu(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    silu = gate.double() * torch.sigmoid(gate.double())
    return (silu.masked_fill(gate == -torch.inf, 0) * up.double()).to(gate.dtype).contiguous()


ERRORS = {
    "silu_mul": (gated_the_other_way,),
}
RIGHT = {"silu_mul": (honest_silu,)}
TERMS = {"silu_mul": ("prime", 1)}  # a case, and how many numbers its largest sum has
