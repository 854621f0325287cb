"""causal_conv1d against PyTorch's conv1d, one token after another, and with planted errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.causal_conv1d import bounds
from ferryman.ops.causal_conv1d.definition import causal_conv1d
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32, ratio
from tests.interpreter import Interpreter
from tests.ops.causal_conv1d import independent

OP, BACKWARD = registry.primitive("causal_conv1d"), registry.primitive("causal_conv1d_backward")
CASES = {case.name: case for case in cases_of(OP)}
GRADIENTS = {case.name: case for case in cases_of(BACKWARD)}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("split", [(1,) * 9, (2, 5, 1, 1), (4, 5)])
def test_tokens_after_each_other_give_what_all_give_at_once(dtype: torch.dtype, split: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, state = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 21, 9), (21, 4), (21,), (2, 21, 3))
    )
    exact, last = OP.body(*double((x, weight, bias, state)), "silu")
    terms, _ = OP.limits.bound((*double((x, weight, bias, state)), "silu"), (exact, last))
    parts, kept = [], state
    for piece in x.split(split, -1):
        with ferryman.trace() as trace:
            y, kept = causal_conv1d(piece, weight, bias, kept, "silu")
        assert list(trace.calls) == [("causal_conv1d", "torch")]
        parts.append(y)
    assert ratio(torch.cat(parts, -1), exact, terms, UNIT[dtype]) <= 1
    whole, final = causal_conv1d(x, weight, bias, state, "silu")
    assert ratio(whole, exact, terms, UNIT[dtype]) <= 1
    assert torch.equal(kept, final) and torch.equal(final.double(), last)


def test_the_slopes_that_the_bounds_take_are_the_largest() -> None:
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    derivative = z * torch.sigmoid(z)
    for limit in (bounds.SLOPE, bounds.BEND, bounds.THIRD):
        (derivative,) = torch.autograd.grad(derivative.sum(), z, create_graph=True)
        assert 0.98 * limit < float(derivative.detach().abs().max()) <= limit
    slope = torch.autograd.grad((z * torch.sigmoid(z)).sum(), z)[0]
    assert 0.99 * bounds.SPAN < float(slope.max() - slope.min()) <= bounds.SPAN


def test_the_bound_holds_for_the_worst_roundings_and_is_not_much_larger() -> None:
    """Terms of one sign, and every partial sum just above a power of two: each rounding costs a half unit."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand((1, 4096, 40), generator=generator) * 2.0**-3
    weight = 1 + torch.rand((4096, 4), generator=generator) * 2.0**-3
    exact, last = OP.body(*double((x, weight)), None, None, None)
    terms, _ = OP.limits.bound((*double((x, weight)), None, None, None), (exact, last))
    got, _ = causal_conv1d(x, weight)
    assert 0.15 < ratio(got, exact, terms, 0.0) <= 1


def taken(name: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = materialise(CASES[name], OP, dtype)
    return values, double(values)


def theirs(*values: Any) -> Tensor:
    return independent.causal_conv1d(*values)[0]


PLANTED: dict[str, Callable[..., Tensor]] = {
    "a tap late": lambda x, w, b, s, a: theirs(x, w.roll(1, 1), b, s, a),
    "the oldest tap dropped": lambda x, w, b, s, a: theirs(x, w * (torch.arange(w.shape[1]) > 0), b, s, a),
    "taps reversed": lambda x, w, b, s, a: theirs(x, w.flip(1), b, s, a),
    "the next channel's": lambda x, w, b, s, a: theirs(x, w.roll(1, 0), b, s, a),
    "no state": lambda x, w, b, s, a: theirs(x, w, b, None, a),
    "the state a place late": lambda x, w, b, s, a: theirs(x, w, b, s.roll(1, -1), a),
    "no bias": lambda x, w, b, s, a: theirs(x, w, None, s, a),
    "no activation": lambda x, w, b, s, a: theirs(x, w, b, s, None),
    "a bias after the activation": lambda x, w, b, s, a: theirs(x, w, None, s, a) + b[:, None],
    "a future token": lambda x, w, b, s, a: theirs(x.roll(-1, -1), w, b, s, a),
    "a factor": lambda x, w, b, s, a: theirs(x, w, b, s, a) * (1 + 2.0**-14),
    "a bfloat16 sum": lambda x, w, b, s, a: functional.silu(theirs(x, w, b, s, None).bfloat16().double()),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_beyond_the_bound(error: str) -> None:
    values, wide = taken("width_4", torch.float32)
    exact, final = OP.body(*wide)
    terms, _ = OP.limits.bound(wide, (exact, final))
    assert ratio(causal_conv1d(*values)[0], exact, terms, U32) <= 1
    assert ratio(PLANTED[error](*wide), exact, terms, U32) > 20


def test_it_runs_through_dispatch_and_trains() -> None:
    values, wide = taken("state", torch.float32)
    leaves: list[Any] = [v.clone().requires_grad_() if isinstance(v, Tensor) else v for v in values]
    with ferryman.trace() as trace:
        y, final = causal_conv1d(*leaves)
        (y.sum() + final.sum()).backward()
    assert list(trace.calls) == [("causal_conv1d", "torch"), ("causal_conv1d_backward", "torch")]
    ones = double((torch.ones_like(y), torch.ones_like(final)))
    exact = BACKWARD.body(*ones, *wide)
    terms = BACKWARD.limits.bound((*ones, *wide), exact)
    for leaf, wanted, allowed in zip(leaves, exact, terms, strict=False):
        assert ratio(leaf.grad, wanted, allowed, U32) <= 1
    again = torch.ops.ferryman.causal_conv1d.default(*values)
    assert torch.equal(again[0], y) and torch.equal(again[1], final)


def test_channels_stay_innermost() -> None:
    x = torch.randn(2, 5, 24).transpose(1, 2)
    y, final = causal_conv1d(x, torch.randn(24, 4))
    assert y.stride() == x.stride() and final.is_contiguous()
    assert causal_conv1d(x.contiguous(), torch.randn(24, 4))[0].is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(5, 9)}, r"x\.shape is \(5, 9\); required: \(B, D, L\)"),
        ({"weight": torch.ones(6, 4)}, r"weight\.shape is \(6, 4\); required: \(5, W\)"),
        ({"weight": torch.ones(5, 0)}, r"weight\.shape is \(5, 0\)"),
        ({"bias": torch.ones(4)}, r"bias\.shape is \(4,\); required: \(5,\)"),
        ({"initial_state": torch.ones(2, 5, 4)}, r"initial_state\.shape is \(2, 5, 4\); required: \(2, 5, 3\)"),
        ({"initial_state": torch.ones(2, 5, 3).half()}, r"initial_state\.dtype is torch\.float16"),
        ({"activation": "relu"}, r"activation is 'relu'; required: None, 'silu', 'swish'"),
        ({"weight": torch.ones(5, 4).double()}, r"weight\.dtype is torch\.float64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.ones(2, 5, 9), "weight": torch.ones(5, 4), "bias": torch.ones(5), "initial_state": None}
    with pytest.raises(ArgumentError, match=message):
        causal_conv1d(**{**given, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
names = {"causal_conv1d": ("layout_channels",), "causal_conv1d_backward": ("width_2",)}
found = {}
for op in map(registry.primitive, names):
    line = registry.implementation(op.name, "triton")
    for case in cases_of(op):
        if case.name in names[op.name]:
            cell = check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
            found[f"{op.name} {case.name}"] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_the_triton_kernels_are_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 2 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts
