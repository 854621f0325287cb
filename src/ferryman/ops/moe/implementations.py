"""Which implementations of products by experts exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import absent, dtypes, feature, multiple_of, one_of, when_interpreted
from ferryman.ops.menu import Implementation, menu

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

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe",
    Implementation(op="grouped_linear", name="torch.grouped_mm", where=":grouped_mm", when=_HOPPER, partial=True),
    Implementation(
        op="moe_experts",
        name="torch.grouped_mm",
        where=":moe_experts_grouped_mm",
        when=_HOPPER_EXPERTS,
        partial=True,
        roundings=("h", "a", "y"),
    ),
    Implementation(
        op="moe_experts_backward",
        name="torch.grouped_mm",
        where=":moe_experts_backward_grouped_mm",
        when=(*_HOPPER_EXPERTS, absent("bias")),
        partial=True,
        roundings=("h", "u", "a", "dh", "dx"),
    ),
    Implementation(op=_GROUPED, name="torch.loop", accumulation="split-k"),
    Implementation(op="moe_experts", name="torch.loop", accumulation="split-k", roundings=("h", "a", "y")),
    Implementation(
        op="moe_experts_backward", name="torch.loop", accumulation="split-k", roundings=("h", "u", "a", "dh", "dx")
    ),
    Implementation(op="grouped_linear", name="triton", when=_DOT, replayable=True),
    Implementation(op="grouped_linear_backward", name="triton", when=_DOT, replayable=True),
    Implementation(op="moe_experts", name="triton", when=_DOT, roundings=("a", "y")),
    Implementation(op="moe_experts_backward", name="triton", when=_DOT, roundings=("a", "dh", "dx")),
)
