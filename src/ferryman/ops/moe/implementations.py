"""Which implementations of products by experts exist, and under which conditions."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.ops.clauses import (
    Clause,
    View,
    absent,
    dtypes,
    either,
    feature,
    multiple_of,
    one_of,
    threshold,
    when_interpreted,
)
from ferryman.ops.menu import Implementation, menu
from ferryman.ops.moe_permute.implementations import FEW

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


MANY_EXPERTS = 64


def _many(rows: str, experts: str, *, many_experts: bool = False, limit: str = "rows") -> Clause:
    """From so many rows of an expert, on average, CUTLASS's products lead; with fewer the weights bound both, and ours
    writes less. ``rows``: a tensor of as many rows, or of their experts. ``many_experts``: where MANY_EXPERTS and more
    are, fewer rows do. ``limit``: the profile's name of the number."""

    def mean(view: View) -> float:
        given, count = view.args[rows], len(view.args[experts])
        if many_experts and count < MANY_EXPERTS:
            return 0.0
        total = given.numel() if given.dtype in (torch.int32, torch.int64) else len(given)
        return float(total / max(1, count))

    facts = (f"{rows}.shape", f"{experts}.shape")
    if many_experts:
        what = f"rows an expert, of {MANY_EXPERTS} experts and more"
        return threshold("moe.grouped_mm.rows_of_many", what, facts, mean)
    return threshold(f"moe.grouped_mm.{limit}", "rows an expert, on average", facts, mean)


def _wide() -> Clause:
    """From such widths on a row gains more by faster products than torch's steps beside them move for it."""

    def both(view: View) -> float:
        _, width, inner = view.args["down"].shape
        return float(width * inner / max(1, width + inner))

    return threshold("moe.grouped_mm.widths", "of widths H and I: H I / (H + I)", ("down.shape",), both)


# Without a gate, a step beside the products reads and writes the result once: 4 bytes against 2 K operations.
_COLUMNS = threshold(
    "moe.grouped_mm.columns", "columns of a weight", ("weight.shape",), lambda v: v.args["weight"].shape[2]
)
_LINEAR_LEADS = (either(_many("x", "weight"), _many("x", "weight", many_experts=True)), _COLUMNS)
_GRADIENT_LEADS = (_many("x", "weight"), _COLUMNS)
_LEADS = (_many("topk_ids", "down", limit="forward_rows"), _wide())
_LAYER_GRADIENT_LEADS = (_many("topk_ids", "down"), _wide())


def _by_order(op: str, roundings: tuple[str, ...]) -> tuple[Implementation, ...]:
    """The slots' order as `moe_permute` finds it: of few by their ranks, of any number by counts. The products are the
    same."""
    alike: dict[str, Any] = {"op": op, "roundings": roundings, "kin": "experts"}
    return (
        Implementation(name="triton.ranks", where=f":{op}_ranked", when=(*_DOT, FEW), partial=True, **alike),
        Implementation(name="triton.counted", where=f":{op}_counted", when=_DOT, **alike),
    )


# torch.loop, ahead by up to a tenth for few wide experts, never leads: it waits for the device to read offsets

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
        leads=_GRADIENT_LEADS,
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
        leads=_LAYER_GRADIENT_LEADS,
        roundings=("h", "u", "a", "dh", "dx"),
    ),
    Implementation(op=_GROUPED, name="torch.loop", accumulation="split-k"),
    Implementation(op="moe_experts", name="torch.loop", accumulation="split-k", roundings=("h", "a", "y")),
    Implementation(
        op="moe_experts_backward", name="torch.loop", accumulation="split-k", roundings=("h", "u", "a", "dh", "dx")
    ),
    Implementation(op="grouped_linear", name="triton", when=_DOT, replayable=True),
    Implementation(op="grouped_linear_backward", name="triton", when=_DOT, replayable=True),
    *_by_order("moe_experts", ("a", "y")),
    *_by_order("moe_experts_backward", ("a", "dh", "dx")),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "grouped_linear": (
        "98c0dd83ddabfada4a3cf4efa95dacfef882d5b610cde20fe420339c90dd9c84",
        ("3e2316b25d7fd29e631b92f7e0ff06a534098eabf816eb52cf73c0920798da0f",),
    ),
    "grouped_linear_backward": (
        "273ccf5aee5ad15ed21460388263010f3288190a382e0c2b612bbd3281b768af",
        ("5102b66fd239d4744b5848f8a615830239abe3588ee375fab2c906619de9e80e",),
    ),
    "moe_experts": (
        "86f888e4221a8e13b8d89c4e298636aaa572e482cecd9561196cdac019b9522f",
        (
            "50b3d28e400a1ab5943eed1ea274573a59033fc0a6a5ef08a3ca11038067fdba",
            "81189d0dd32a36618a908d7cffa5ba66079ae300b20f98693a39a8cba3a2b9c3",
            "359c38be9def89f01249bb8b1e595c82c3201a373677277a2399de2ec5d7fe24",
        ),
    ),
    "moe_experts_backward": (
        "bee8e6c1dc35b84bdcb00ddbc62d4cd741d5931772bbff94400efbf018d4f9b3",
        (
            "1e6f118aa9eb2c54c3d2d4186b279b751bfff603d7d059fb9d0c1c309faf6310",
            "8a2d3013647397d7b004744282e8f86d6674caceaecf62ad107ad5db4a358f43",
        ),
    ),
}
