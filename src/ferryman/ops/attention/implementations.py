"""Which implementations of attention exist, and under which conditions."""

from __future__ import annotations

import torch

from ferryman.ops.clauses import dtypes, when_interpreted
from ferryman.ops.menu import menu

_HERE = "ferryman.ops.attention"
_DOT = (when_interpreted(dtypes("q", torch.float32, torch.float16)),)

IMPLEMENTATIONS = (
    *menu(_HERE, "torch", "attention", roundings=("p",), traced="attention_traced"),
    # FlashAttention-2's backward adds dQ atomically, and rounds every query head's dK and dV before a group's sum.
    *menu(_HERE, "torch", "attention_backward", roundings=("p", "ds"), accumulation="split-k", deterministic=False),
    *menu(
        _HERE,
        "triton",
        "attention",
        when=_DOT,
        roundings=("p",),
        replayable=True,
        configurations="configurations",
    ),
    # On Hopper the tiles of keys add to dQ in the order in which they come.
    *menu(
        _HERE,
        "triton",
        "attention_backward",
        when=_DOT,
        roundings=("p", "ds"),
        deterministic="asked",
        replayable=True,
        reads=("deterministic",),
    ),
)
