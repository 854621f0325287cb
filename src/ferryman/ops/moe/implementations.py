"""Which implementations of products by experts exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import Clause, View, absent, at_least, dtypes, feature, multiple_of, one_of, when_interpreted
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

# Rows of an expert, on average, from which CUTLASS's products lead. On an H100 it takes 4.7 ms for a layer of Mixtral
# with 512 rows, ours takes 6.8 ms; with up to 64 its weights bound both, and ours writes less.
_ROWS = 256
# Of widths H and I: 1 / (1 / H + 1 / I). What a row gains, 6 H I operations at 380 instead of 212 TFLOP/s, is more than
# what torch's steps beside the products move for it: 48 I + 46 H bytes at 3 TB/s.
_WIDTHS = 1280


def _many(rows: str, experts: str) -> Clause:
    """``rows``: a tensor of as many rows, or of their experts."""

    def measure(view: View) -> float:
        given = view.args[rows]
        count = given.numel() if given.dtype in (torch.int32, torch.int64) else len(given)
        return float(count / max(1, len(view.args[experts])))

    text = f"{_ROWS} rows an expert or more, on average"
    return Clause(text, (f"{rows}.shape", f"{experts}.shape"), measure, lambda mean: mean >= _ROWS)


def _wide() -> Clause:
    def measure(view: View) -> float:
        _, width, inner = view.args["down"].shape
        return float(width * inner / max(1, width + inner))

    text = f"widths H and I with H I / (H + I) >= {_WIDTHS}"
    return Clause(text, ("down.shape",), measure, lambda both: both >= _WIDTHS)


# Without a gate, a step beside the products reads and writes the result once: 4 bytes against 2 K operations.
_LINEAR_LEADS = (feature("wgmma"), _many("x", "weight"), at_least("weight.shape[2]", 512))
_LEADS = (feature("wgmma"), _many("topk_ids", "down"), _wide())

IMPLEMENTATIONS = menu(
    "ferryman.ops.moe",
    Implementation(
        op="grouped_linear",
        name="torch.grouped_mm",
        where=":grouped_mm",
        when=_HOPPER,
        partial=True,
        leads=_LINEAR_LEADS,
    ),
    Implementation(
        op="grouped_linear_backward",
        name="torch.grouped_mm",
        where=":grouped_mm_backward",
        when=(*_HOPPER, one_of("grad.aligned", True)),
        partial=True,
        leads=_LINEAR_LEADS,
    ),
    Implementation(
        op="moe_experts",
        name="torch.grouped_mm",
        where=":moe_experts_grouped_mm",
        when=_HOPPER_EXPERTS,
        partial=True,
        leads=_LEADS,
        roundings=("h", "a", "y"),
    ),
    Implementation(
        op="moe_experts_backward",
        name="torch.grouped_mm",
        where=":moe_experts_backward_grouped_mm",
        when=(*_HOPPER_EXPERTS, absent("bias")),
        partial=True,
        leads=_LEADS,
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
