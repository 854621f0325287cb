"""embedding against Python's own indexing and autograd's sums, and what its cases are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.embedding.definition import embedding
from ferryman.porting.inputs.cases import cases_of, double, materialise
from tests.interpreter import Interpreter

OP, BACKWARD = registry.primitive("embedding"), registry.primitive("embedding_backward")
CASES = {case.name: case for case in cases_of(OP)}
GRADIENTS = {case.name: case for case in cases_of(BACKWARD)}


def test_a_table_without_rows_gives_nan_and_an_empty_gradient() -> None:
    values = double(materialise(CASES["no_table"], OP, torch.float32))
    y = OP.body(*values)
    assert y.numel() and bool(y.isnan().all())
    grad = BACKWARD.body(*double(materialise(GRADIENTS["no_table"], BACKWARD, torch.float32)))
    assert grad.shape == values[1].shape and not grad.numel()


def test_autograd_gives_what_pytorch_gives() -> None:
    ids = torch.tensor([[1, 3, 1], [0, 1, 4]], dtype=torch.int32)
    weight = torch.arange(20.0).reshape(5, 4).requires_grad_()
    with ferryman.trace() as trace:
        embedding(ids, weight, 2.0).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2.0, 6.0, 0.0, 2.0, 2.0]
    assert ("embedding", "torch") in trace.calls and ("embedding_backward", "torch") in trace.calls


def test_ids_outside_the_table_are_tried() -> None:
    for name in ("outside", "outside_int32"):
        ids, weight, _ = materialise(CASES[name], OP, torch.float32)
        assert int(ids.min()) < -1 and int(ids.max()) > len(weight) and bool((ids == -1).any())
        rows = embedding(ids, weight)
        assert bool(rows.isnan().all(-1)[(ids < 0) | (ids >= len(weight))].all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(3)}, r"ids\.dtype is torch\.float32; required: torch\.int64 or torch\.int32"),
        ({"weight": torch.zeros(3)}, r"weight\.shape is \(3,\)"),
        ({"scale": float("nan")}, "scale is nan; required: a finite number or None"),
        ({"weight": torch.zeros(3, 2, dtype=torch.float64)}, r"weight\.dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    given = {"ids": torch.tensor([0]), "weight": torch.zeros(3, 2), "scale": None}
    with pytest.raises(ArgumentError, match=message):
        embedding(**{**given, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
found = {}
back = "embedding_backward"
for name, which in (("embedding", "triton"), (back, "triton.sorted"), (back, "triton.few")):
    op, line = registry.primitive(name), registry.implementation(name, which)
    for case in cases_of(op):
        if case.name in ("two_dims", "outside_int32", "repeated", "exact_outside"):
            cell = check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
            found[f"{name} {which} {case.name}"] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_the_triton_kernels_are_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 12 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


def test_few_ids_are_summed_in_one_launch() -> None:
    """Sorting costs the host more than a sum. Of more ids each would be compared with too many."""
    weight = torch.empty(50_257, 768, dtype=torch.bfloat16, device="meta")
    for count, line in ((1, "triton.few"), (2048, "triton.few"), (2049, "triton.sorted")):
        ids = torch.empty(count, dtype=torch.int64, device="meta")
        grad = torch.empty(count, 768, dtype=torch.bfloat16, device="meta")
        why = ferryman.explain("embedding_backward", grad, ids, weight, None, device="h100")
        assert why.chosen == line
