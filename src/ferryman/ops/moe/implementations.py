"""Which implementations of products by experts exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import absent, dtypes, feature, multiple_of, one_of, when_interpreted
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.moe"
_GROUPED = "grouped_linear grouped_linear_backward"
# Triton's interpreter multiplies bfloat16 operands of tl.dot as raw integers.
_DOT = (when_interpreted(dtypes("x", torch.float32, torch.float16)),)
# torch._grouped_mm: bfloat16 on Hopper, rows 16 bytes apart from an address that 16 divides
_HOPPER = (
    feature("wgmma"),
    dtypes("x", torch.bfloat16),
    multiple_of("weight.shape[1]", 8),
    multiple_of("weight.shape[2]", 8),
    one_of("x.aligned", True),
    one_of("weight.aligned", True),
)
_HOPPER_EXPERTS = (
    feature("wgmma"),
    dtypes("x", torch.bfloat16),
    multiple_of("down.shape[1]", 8),
    multiple_of("down.shape[2]", 8),
    one_of("gate_up.aligned", True),
    one_of("down.aligned", True),
)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch.grouped_mm", "grouped_linear", when=_HOPPER, function="grouped_mm", partial=True),
    *menu(
        _HERE,
        "torch.grouped_mm",
        "moe_experts",
        when=_HOPPER_EXPERTS,
        function="moe_experts_grouped_mm",
        partial=True,
        roundings=("h", "a", "y"),
    ),
    *menu(
        _HERE,
        "torch.grouped_mm",
        "moe_experts_backward",
        when=(*_HOPPER_EXPERTS, absent("bias")),
        function="moe_experts_backward_grouped_mm",
        partial=True,
        roundings=("h", "u", "a", "dh", "dx"),
    ),
    *menu(_HERE, "torch.loop", _GROUPED, accumulation="split-k"),
    *menu(_HERE, "torch.loop", "moe_experts", accumulation="split-k", roundings=("h", "a", "y")),
    *menu(
        _HERE,
        "torch.loop",
        "moe_experts_backward",
        accumulation="split-k",
        roundings=("h", "u", "a", "dh", "dx"),
    ),
    *menu(_HERE, "triton", "grouped_linear", when=_DOT, replayable=True),
    *menu(_HERE, "triton", "grouped_linear_backward", when=_DOT, replayable=True),
    *menu(_HERE, "triton", "moe_experts", when=_DOT, roundings=("a", "y")),
    *menu(_HERE, "triton", "moe_experts_backward", when=_DOT, roundings=("a", "dh", "dx")),
)
