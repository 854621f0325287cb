"""paged_attention against PyTorch's attention, sequence by sequence, and what its cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.paged_attention import bounds
from ferryman.ops.paged_attention.definition import paged_attention
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests import bounded
from tests.interpreter import Interpreter
from tests.ops.paged_attention.independent import paged_attention as one_by_one

OP = registry.primitive("paged_attention")
CASES = {case.name: case for case in cases_of(OP)}
Values = tuple[Any, ...]


def drawn(name: str, seed: int = 0) -> Values:
    return double(materialise(CASES[name], OP, torch.float32, seed))


def beyond(got: Tensor, values: Values) -> float:
    """The largest error against the loop, in bounds of float64's unit roundoff."""
    exact = one_by_one(*values)
    (terms,) = bounds.paged_attention(values, (exact,))
    return bounded.beyond(got, exact, terms)


WRONG: dict[str, Callable[[Values], Values]] = {
    "one key too many": lambda v: (*v[:4], (v[4] + 1).clamp(max=v[3].shape[1] * v[1].shape[1]), v[5]),
    "one key too few": lambda v: (*v[:4], (v[4] - 1).clamp(min=0), v[5]),
    "another scale": lambda v: (*v[:5], 0.2),
    "pages the other way": lambda v: (*v[:3], v[3].flip(0), v[4].flip(0), v[5]),
    "keys for values": lambda v: (v[0], v[1], v[1], *v[3:]),
    "values for keys": lambda v: (v[0], v[2], v[2], *v[3:]),
    "half the query": lambda v: (v[0] * 0.5, *v[1:]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_definition_that_is_wrong_in_one_argument_is_caught(name: str) -> None:
    values = drawn("ragged")
    plain = tuple(v.nan_to_num(0.0) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)
    safe = (*plain[:3], plain[3].clamp(0, plain[1].shape[0] - 1), *plain[4:])
    assert beyond(OP.body(*safe), safe) <= 1
    assert beyond(OP.body(*WRONG[name](safe)), safe) > 100


def test_cases_are_hostile_where_nothing_may_read() -> None:
    _, k, v, table, lengths, _ = materialise(CASES["ragged"], OP, torch.float16)
    needed = torch.arange(table.shape[1]) * k.shape[1] < lengths[:, None]
    assert set(table[~needed].tolist()) == {-1, 2**30} and int(table[needed].min()) >= 0
    assert int(table[needed].max()) < len(k) and len(set(table[needed].tolist())) == int(needed.sum())
    assert sorted(lengths.tolist())[:2] == [0, 1] and int(lengths.max()) == table.shape[1] * k.shape[1]
    used = bounds.used(k, table, lengths)
    assert bool(k[~used].isnan().all()) and bool(v[~used].isnan().all()) and bool(k[used].isfinite().all())


def test_it_runs_through_dispatch_and_through_the_library() -> None:
    values = materialise(CASES["ragged"], OP, torch.bfloat16)
    with ferryman.trace() as trace:
        out = paged_attention(*values)
    assert list(trace.calls) == [("paged_attention", "torch")]
    assert torch.equal(torch.ops.ferryman.paged_attention.default(*values), out)
    compiled = torch.compile(lambda *args: paged_attention(*args), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*values), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": torch.zeros(5, 4, dtype=torch.int64)}, r"page_table\.dtype is torch\.int64"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"lengths\.shape\[0\] is 4; required: 5"),
        ({"q": torch.zeros(5, 3, 64)}, r"k_cache\.shape\[2\] is 2; required: a divisor of q's 3 heads"),
        ({"q": torch.zeros(5, 4, 32)}, r"k_cache\.shape\[3\] is 64"),
        ({"q": torch.zeros(5, 4, 64).half()}, r"dtype"),
        ({"scale": float("inf")}, "scale is inf"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    values = dict(zip(OP.names, materialise(CASES["ragged"], OP, torch.float32), strict=True))
    with pytest.raises(ArgumentError, match=message):
        paged_attention(**{**values, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op, line = registry.primitive("paged_attention"), registry.implementation("paged_attention", "triton")
names = ("odd_pages", "fill_nonfinite", "beyond_the_table", "exact_thirty_two")
cells = [check_cell(op, line, case, dtype, simulate=profile("h200"))
         for case in cases_of(op) if case.name in names for dtype in (torch.float16,)]
print(json.dumps({cell.case: (cell.verdict, cell.reason) for cell in cells}))
"""


def test_the_triton_kernel_is_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 4 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts
