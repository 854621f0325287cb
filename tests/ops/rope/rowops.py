"""What Triton's interpreter runs of this family: tests/unit/test_triton_rowops.py judges every call."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.triton_rowops_inputs import Calls, Inputs

OPS = ("rope", "rope_backward")


def calls(inputs: Inputs) -> Calls:
    def both(
        name: str, q: Tensor, k: Tensor, rotary: int, batch: int = 1, angles: torch.dtype = torch.float32
    ) -> Calls:
        cos, sin = (inputs(batch, q.shape[2], rotary, dtype=angles) for _ in range(2))
        for interleaved in (False, True):
            yield "rope", f"{name} {interleaved}", (q, k, cos, sin, interleaved)
            yield "rope_backward", f"{name} {interleaved}", (q, k, cos, sin, interleaved)

    for heads, k_heads, dim, rotary in ((4, 2, 64, 64), (3, 1, 80, 32), (40, 8, 16, 12), (1, 1, 2, 2), (2, 2, 10, 6)):
        yield from both(f"{heads} {dim} {rotary}", inputs(2, heads, 3, dim), inputs(2, k_heads, 3, dim), rotary, 2)
    for tokens in (3, 37):  # heads of one token at a time, and tokens of one head
        strided = (inputs(2, tokens, n, 32).transpose(1, 2) for n in (4, 2))
        yield from both(f"heads {tokens}", *strided, 32, 2)
    yield from both("many heads", inputs(1, 19, 11, 80).transpose(1, 2), inputs(1, 9, 19, 80), 20)
    fused = inputs(2, 13, 6, 32)
    yield from both("fused", fused[:, :, :4].transpose(1, 2), fused[:, :, 4:].transpose(1, 2), 32)
    yield from both("expanded", inputs(1, 1, 3, 32).expand(2, 4, 3, 32), inputs(2, 2, 3, 32), 32, 2)
    yield from both("last", inputs(2, 2, 3, 32, layout="last"), inputs(2, 2, 3, 32, layout="last"), 16)
    yield from both("own dtype", inputs(2, 2, 3, 32), inputs(2, 2, 3, 32), 32, angles=inputs.dtype)
    yield from both("nonfinite", inputs(2, 2, 9, 32, kind="nonfinite"), inputs(2, 2, 9, 32), 32)
    yield from both("offset", inputs(2, 2, 3, 32, layout="offset"), inputs(2, 2, 3, 32), 32)
    yield from both("empty", inputs(2, 2, 0, 32), inputs(2, 2, 0, 32), 32)
    yield from both("no k", inputs(2, 2, 3, 32), inputs(2, 0, 3, 32), 32)
