"""What Triton's interpreter runs of this family: tests/unit/test_triton_rowops.py judges every call."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.triton_rowops_inputs import SHAPES, Calls, Inputs

OPS = ("silu_mul", "silu_mul_backward", "gelu_mul", "gelu_mul_backward")


def calls(inputs: Inputs) -> Calls:
    def both(name: str, gate: Tensor, up: Tensor) -> Calls:
        g = inputs(*gate.shape)
        yield "silu_mul", name, (gate, up)
        yield "silu_mul_backward", name, (g, gate, up)
        for approximate in ("tanh", "none"):
            yield "gelu_mul", f"{name} {approximate}", (gate, up, approximate)
            yield "gelu_mul_backward", f"{name} {approximate}", (g, gate, up, approximate)

    for shape in [*SHAPES[:-1], (), (50, 1033)]:
        yield from both(f"{shape}", inputs(*shape), inputs(*shape))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(6, 5, 40))
    for kind in ("offset", "tiny", "constant", "nonfinite", "zeros"):
        yield from both(kind, inputs(5, 384, kind=kind), inputs(5, 384, kind=kind))
    sweep = torch.linspace(-100.0, 100.0, 4001).to(inputs.dtype)
    yield from both("sweep", sweep, torch.ones_like(sweep))
