"""add_layer_norm against PyTorch's functional of the sum, and how far rounding the sum may move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import off
from tests.ops.norm.independent import add_layer_norm as exact

OP = registry.primitive("add_layer_norm")
BACKWARD = registry.primitive("add_layer_norm_backward")
CASES = {case.name: case for case in cases_of(OP)}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 3.0, 1e3])
def test_rounding_the_sum_moves_the_result_within_its_term(mean: float, dtype: torch.dtype) -> None:
    """Everything in float64 but the sum's own rounding, so that nothing else hides the term."""
    generator = torch.Generator().manual_seed(4)
    x, residual = ((mean + torch.randn(64, 96, generator=generator, dtype=torch.float64)).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator, dtype=torch.float64)
    args = (x.double(), residual.double(), weight, None, 1e-5)
    wanted = exact(*args)
    moved = functional.layer_norm((x + residual).double(), (96,), weight, None, 1e-5)
    term = OP.limits.bound(args, wanted)[0]["storage"] * UNIT[dtype]
    worst = float(((moved - wanted[0]).abs() / (term + 2.0**-40)).max())
    assert 2.0**-12 < worst <= 1  # within it, and it is no matter of other sizes


def test_dispatch_serves_it_and_the_sum_goes_on() -> None:
    x, residual = torch.randn(5, 64, requires_grad=True), torch.randn(5, 64)
    weight, bias = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    with ferryman.trace() as traced:
        y, s = ops.add_layer_norm(x, residual, weight, bias)
        y.retain_grad()
        s.retain_grad()
        (y.sin().sum() + s.cos().sum()).backward()
    assert {(op, line.split(".")[0]) for op, line in traced.calls} == {
        ("add_layer_norm", "torch"),
        ("add_layer_norm_backward", "torch"),
    }
    assert torch.equal(s, x + residual)
    given = (y.grad, s.grad, s, weight, bias, 1e-5)  # what the backward got: cos(y), and -sin(s)
    assert y.grad is not None and s.grad is not None and torch.equal(y.grad, y.cos()) and torch.equal(s.grad, -s.sin())
    gradients = tuple(t.grad for t in (x, weight, bias) if t.grad is not None)
    assert off(BACKWARD, [t.detach() if isinstance(t, Tensor) else t for t in given], gradients, torch.float32) <= 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"residual": torch.randn(5, 64).half()}, "residual.dtype"),
        ({"residual": torch.randn(4, 64)}, "residual.shape"),
        ({"bias": torch.randn(63)}, "bias.shape"),
        ({"weight": torch.randn(65)}, "weight.shape"),
        ({"eps": -1.0}, "eps"),
        ({"x": torch.randn(5, 64).double(), "residual": torch.randn(5, 64).double()}, "x.dtype"),
    ],
)
def test_what_does_not_fit_is_an_argument_error(change: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"x": torch.randn(5, 64), "residual": torch.randn(5, 64), **change}
    with pytest.raises(ArgumentError, match=named):
        ops.add_layer_norm(**given)
