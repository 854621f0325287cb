"""What Triton's interpreter runs of this family: tests/unit/test_triton_rowops.py judges every call."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.triton_rowops_inputs import FILLS, LONG, SHAPES, Calls, Inputs

OPS = ("rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward", "layer_norm", "layer_norm_backward")


def calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Calls:
        g = inputs(*x.shape)
        yield "rms_norm", name, (x, weight, eps, False)
        yield "rms_norm_backward", name, (g, x, weight, eps)
        yield "add_rms_norm", name, (x, g, weight, eps, True)
        yield "add_rms_norm_backward", name, (g, g, x, weight, eps)
        yield "layer_norm", name, (x, weight, bias, eps)
        yield "layer_norm_backward", name, (g, x, weight, bias, eps)

    for shape in (s for s in SHAPES if s[-1]):
        yield from both(f"{shape}", inputs(*shape), inputs(shape[-1]), inputs(shape[-1]))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(40), inputs(40))
    for kind in FILLS:
        yield from both(kind, inputs(5, 384, kind=kind), inputs(384), inputs(384))
    for other in (torch.float32, torch.float16, torch.bfloat16):
        yield from both(f"weight {other}", inputs(5, 96), inputs(96, dtype=other), inputs(96, dtype=other))
    yield from both("no weight", inputs(5, 96), None, None)
    yield "layer_norm", "bias alone", (inputs(5, 96), None, inputs(96), 1e-5)
    yield "layer_norm_backward", "bias alone", (inputs(5, 96), inputs(5, 96), None, inputs(96), 1e-5)
    yield "layer_norm_backward", "weight alone", (inputs(5, 96), inputs(5, 96), inputs(96), None, 1e-5)
    if inputs.dtype == torch.bfloat16:  # what the storage dtype does not interact with, and takes longest interpreted
        yield from both("many rows", inputs(1100, 40), inputs(40), inputs(40))
        x, g = inputs(10, 8300), inputs(10, 8300)  # fits LARGE, but not with sums of the weight's gradient beside it
        yield "layer_norm_backward", "split sums", (g, x, inputs(8300), inputs(8300), 1e-5)
    x, weight = inputs(*LONG, kind="offset"), inputs(LONG[-1])
    yield "add_rms_norm", "long", (x, inputs(*LONG), weight, 1e-6, True)
    yield "layer_norm", "long", (x, weight, weight, 1e-5)
    x, g, weight = inputs(*LONG, kind="offset"), inputs(*LONG), inputs(LONG[-1])
    yield "layer_norm_backward", "long", (g, x, weight, weight, 1e-5)
    yield "add_rms_norm_backward", "long", (g, g, x, None, 1e-6)
    yield "rms_norm", "cast", (inputs(5, 160), inputs(160), 1e-6, True)
    yield "rms_norm", "strided weight", (inputs(5, 160), inputs(320)[::2], 1e-6, True)
