"""What Triton's interpreter runs of this family: tests/unit/test_triton_rowops.py judges every call."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.triton_rowops_inputs import FILLS, LONG, SHAPES, Calls, Inputs

OPS = ("softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward")


def calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor) -> Calls:
        y = torch.softmax(x.double(), -1).to(x.dtype)
        yield "softmax", name, (x,)
        yield "softmax_backward", name, (inputs(*x.shape), y)

    def loss(name: str, x: Tensor, target: Tensor, smoothing: float = 0.0, ignore: int = -100) -> Calls:
        lse = torch.logsumexp(x.double(), -1).float()
        yield "cross_entropy", name, (x, target, ignore, smoothing)
        yield "cross_entropy_backward", name, (torch.tensor(1.5), x, target, lse, ignore, smoothing)

    for shape in SHAPES:
        yield from both(f"{shape}", inputs(*shape))
        if shape[-1]:
            yield from loss(f"{shape}", inputs(*shape), inputs.labels(*shape[:-1], classes=shape[-1]))
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout))
        yield from loss(layout, inputs(6, 5, 40, layout=layout), inputs.labels(6, 5, classes=40))
    for kind in [*FILLS, "masked"]:
        yield from both(kind, inputs(5, 384, kind=kind))
    for kind in ("normal", "nonfinite", "masked"):
        yield from both(f"long {kind}", inputs(3, LONG[-1], kind=kind))
    for kind in ("offset", "constant", "nonfinite", "zeros", "masked"):
        for width in (384, 4099):
            yield from loss(f"{kind} {width}", inputs(5, width, kind=kind), inputs.labels(5, classes=width))
    some = inputs.labels(60, classes=9) - 1
    yield from loss("ignored", inputs(60, 9), some, ignore=-1)
    yield from loss("smoothing, ignored", inputs(60, 9), some, 0.3, -1)
    yield from loss("smoothing, long", inputs(5, 4099), inputs.labels(5, classes=4099), 0.1)
    yield from loss("smoothing 1", inputs(5, 99), inputs.labels(5, classes=99), 1)
    yield from loss("all ignored", inputs(6, 9), torch.full((6,), -100))
    outside = torch.tensor([3, 9, -7, 2**40, 0, -100])
    yield from loss("out of range", inputs(6, 9), outside)
    yield from loss("out of range, long", inputs(6, 4099), torch.tensor([3, 4099, -7, 2**40, 0, -100]))
