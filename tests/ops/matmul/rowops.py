"""What Triton's interpreter runs of this family: tests/unit/test_triton_rowops.py judges every call."""

from __future__ import annotations

from torch import Tensor

from tests.unit.triton_rowops_inputs import Calls, Inputs

OPS = ("linear", "linear_backward")
REFUSED = {"bfloat16": "multiplies bfloat16 as raw integers"}  # a dtype, and what is said


def calls(inputs: Inputs) -> Calls:
    def both(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Calls:
        g = inputs(*x.shape[:-1], weight.shape[0])
        yield "linear", name, (x, weight, bias)
        yield "linear_backward", name, (g, x, weight, bias, True, True)

    sizes = [
        ((64, 64), 64),
        ((37, 71), 101),
        ((1, 128), 96),
        ((33, 65), 1),
        ((9, 1), 17),
        ((5, 0), 8),
        ((0, 32), 16),
        ((2, 5, 48), 40),
        ((64,), 24),
        ((7, 32), 0),
        ((130, 257), 259),
    ]
    for shape, n in sizes:
        yield from both(f"{shape} {n}", inputs(*shape), inputs(n, shape[-1]), inputs(n) if n % 2 else None)
    for layout in inputs.layouts:
        yield from both(layout, inputs(6, 5, 40, layout=layout), inputs(24, 40), inputs(24))
        yield from both(f"weight {layout}", inputs(9, 40), inputs(24, 40, layout=layout), inputs(24))
    yield from both("nonfinite", inputs(9, 40, kind="nonfinite"), inputs(24, 40), inputs(24))
    yield "linear_backward", "x alone", (inputs(5, 6), inputs(5, 7), inputs(6, 7), None, True, False)
    yield "linear_backward", "weight alone", (inputs(5, 6), inputs(5, 7), inputs(6, 7), inputs(6), False, True)
