"""linear_w4 against a product with weights that a plain loop unpacks, and what its cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.linear_w4.definition import linear_w4
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests import bounded
from tests.interpreter import Interpreter
from tests.ops.linear_w4.independent import linear_w4 as plain

OP = registry.primitive("linear_w4")
CASES = {case.name: case for case in cases_of(OP)}
Values = tuple[Any, ...]


def drawn(name: str, seed: int = 0) -> Values:
    return double(materialise(CASES[name], OP, torch.float32, seed))


def beyond(got: Tensor, values: Values) -> float:
    """The largest error against the loop, in bounds of float64's unit roundoff."""
    exact = plain(*values)
    (terms,) = OP.limits.bound(values, (exact,))
    return bounded.beyond(got, exact, terms)


WRONG: dict[str, Callable[[Values], Values]] = {
    "halves swapped": lambda v: (v[0], (v[1] << 4) | (v[1] >> 4), *v[2:]),
    "zero at 7": lambda v: (v[0], (v[1] & 15).add(1).clamp(max=15) | (v[1] & 240), *v[2:]),
    "scales of the next group": lambda v: (*v[:2], v[2].roll(1, 1), *v[3:]),
    "scales of the next row": lambda v: (*v[:2], v[2].roll(1, 0), *v[3:]),
    "no bias": lambda v: (*v[:3], None, v[4]),
    "columns the other way": lambda v: (v[0].flip(-1), *v[1:]),
    "another group": lambda v: (*v[:2], v[2].repeat_interleave(2, 1), v[3], v[4] // 2),
}


@pytest.mark.parametrize("name", [name for name in WRONG if name != "another group"])
def test_a_definition_that_is_wrong_in_one_argument_is_caught(name: str) -> None:
    values = drawn("ragged")
    assert beyond(OP.body(*WRONG[name](values)), values) > 100


def test_a_group_is_as_long_as_it_says() -> None:
    """Twice as many groups of half the length, with the scales repeated, are the same weight; rolled they are not."""
    values = drawn("ragged")
    same = WRONG["another group"](values)
    assert beyond(OP.body(*same), values) <= 1
    assert beyond(OP.body(*same[:2], same[2].roll(1, 1), *same[3:]), values) > 100


def test_every_value_of_4_bits_is_tried() -> None:
    weight = materialise(CASES["square"], OP, torch.float16)[1]
    assert weight.dtype == torch.uint8 and set(((weight >> 4).unique()).tolist()) == set(range(16))
    assert set(((weight & 15).unique()).tolist()) == set(range(16))


def test_it_runs_through_dispatch_and_through_the_library() -> None:
    values = materialise(CASES["ragged"], OP, torch.float16)
    with ferryman.trace() as trace:
        y = linear_w4(*values)
    assert list(trace.calls) == [("linear_w4", "torch")]
    assert torch.equal(torch.ops.ferryman.linear_w4.default(*values), y)
    compiled = torch.compile(lambda *args: linear_w4(*args), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*values), y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(101, 48, dtype=torch.int8)}, r"weight\.dtype is torch\.int8; required: torch\.uint8"),
        ({"weight": torch.zeros(101, 96, dtype=torch.uint8)}, r"weight\.shape is \(101, 96\); required: \(N, 48\)"),
        ({"scales": torch.ones(101, 2)}, r"scales\.shape is \(101, 2\); required: \(101, 3\)"),
        ({"group": 40}, "group is 40; required: an even divisor of x's last dimension, 96"),
        ({"group": 3}, "group is 3"),
        ({"bias": torch.ones(100)}, r"bias\.shape"),
        ({"scales": torch.ones(101, 3).half()}, "dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    values = dict(zip(OP.names, materialise(CASES["ragged"], OP, torch.float32), strict=True))
    with pytest.raises(ArgumentError, match=message):
        linear_w4(**{**values, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op, line = registry.primitive("linear_w4"), registry.implementation("linear_w4", "triton")
names = ("ragged", "group_96", "fill_nonfinite", "exact_integers_ragged")
cells = [check_cell(op, line, case, dtype, simulate=profile("h200"))
         for case in cases_of(op) if case.name in names for dtype in (torch.float16, torch.float32)]
print(json.dumps({f"{cell.case} {cell.dtype}": (cell.verdict, cell.reason) for cell in cells}))
"""


def test_the_triton_kernel_is_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 8 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


@pytest.mark.parametrize(
    ("device", "rows", "chosen", "source"),
    [
        ("h100", 128, "triton", "profile"),
        ("h100", 129, "torch", "menu"),
        ("h100", 4096, "torch", "menu"),
        ("h200", 129, "torch", "menu"),
        ("mi300x", 4096, "triton", "profile"),
    ],
)
def test_many_rows_are_multiplied_by_unpacked_weights(device: str, rows: int, chosen: str, source: str) -> None:
    """From the rows on that the device's profile has; a device that has none keeps its order."""
    x = torch.empty(1, rows, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 2048, dtype=torch.uint8, device="meta")
    scales = torch.empty(4096, 32, dtype=torch.bfloat16, device="meta")
    explanation = ferryman.explain("linear_w4", x, weight, scales, None, 128, device=device)
    assert (explanation.chosen, explanation.source) == (chosen, source)
