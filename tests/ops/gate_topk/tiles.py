"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

import torch

from ferryman.ops.primitive import TensorSpec
from tests.stand_in_cases import case

TILES = {
    "gate_topk": (
        case(
            "logits",
            *(5, 1021),
            logits=TensorSpec((5, 1021)),
            k=3,
            scoring="softmax",
            bias=TensorSpec((1021,), "float32", "uniform"),
            n_group=1,
            topk_group=1,
            renormalise=True,
            scale=1.0,
            ids_dtype=torch.int64,
        ),
    )
}
