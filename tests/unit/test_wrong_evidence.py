"""Evidence that is wrong itself, a kernel that is not there, a backend that an op lacks: each is said by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.cli import doctor
from ferryman.device_profiles import detect
from ferryman.dispatch import recipe, registry
from ferryman.errors import ArgumentError, EvidenceError
from ferryman.ops.domain import Domain, Form
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Limits, TensorSpec
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import TIERS, cases_of, materialise, must_be_arguments
from ferryman.porting.judging.parity import check_cell
from ferryman.porting.judging.prepared import prepare, unprepared
from ferryman.porting.judging.results import Cell
from ferryman.porting.running import cells
from tests.cli.run import ferryman

CPU = torch.device("cpu")
SOFTMAX, NORM = registry.primitive("softmax"), registry.primitive("layer_norm_backward")


def checked(case: Case, monkeypatch: pytest.MonkeyPatch, bound: Callable[..., Any] | None = None) -> Cell:
    """The only cell of softmax, by PyTorch."""
    monkeypatch.setattr(cells, "tier_cases", lambda op, tier: [case])
    op = SOFTMAX if bound is None else dataclasses.replace(SOFTMAX, limits=Limits(bound=bound))
    lines = [registry.implementation("softmax", "torch")]
    (cell,) = cells.check_op(op, lines, [torch.float32], "small", 0, CPU, detect("cpu"))
    return cell


def softmax_case(**args: Any) -> Case:
    return Case("one", {"x": TensorSpec((2, 3))} | args)


def test_no_case_of_an_op_names_what_is_no_argument() -> None:
    for op in registry.primitives().values():
        for tier in TIERS:
            for case in cases_of(op, tier):
                must_be_arguments(case, op)


@pytest.mark.parametrize("op", registry.primitives())
def test_an_argument_that_no_op_has_is_refused(op: str) -> None:
    primitive = registry.primitive(op)
    (case, *_), known = cases_of(primitive), primitive.names[0]
    wrong = dataclasses.replace(case, name="one", args={**case.args, f"{known}_s": None})
    with pytest.raises(EvidenceError, match=rf"^{op}, case one: unknown argument '{known}_s'; nearest: .*\b{known}\b"):
        materialise(wrong, primitive, torch.float32)


def test_its_cell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = checked(softmax_case(temperatur=2.0), monkeypatch)
    assert cell.verdict == "MISTRUSTED"
    assert (cell.reason or "").startswith("softmax, case one: unknown argument 'temperatur'; nearest: ")


def raising(d: Draw) -> Tensor:
    raise RuntimeError("no such rows")


def missing(d: Draw) -> Tensor:
    return d.normal() * d.given("lenghts")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("nrmal", "UnknownName: unknown fill 'nrmal'; nearest: normal"),
        ("raises", "RuntimeError: no such rows"),
        ("misses", "KeyError: 'lenghts'"),
    ],
)
def test_a_fill_that_raises_is_named_with_its_case(named: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fills = (Fill("raises", "raises", raising), Fill("misses", "reads what is not there", missing))
    own = Evidence("softmax", tuple, fills=fills)
    monkeypatch.setattr(registry, "evidences", lambda: {"softmax": own})
    cell = checked(softmax_case(x=TensorSpec((2, 3), fill=named)), monkeypatch)
    assert cell.verdict == "MISTRUSTED"
    assert (cell.reason or "").startswith(f"softmax, case one: the fill '{named}' of x raised {why}")


def test_a_fill_of_a_cotangent_is_named_too() -> None:
    case = dataclasses.replace(cases_of(registry.primitive("softmax_backward"))[0], cotangent="nrmal")
    with pytest.raises(EvidenceError, match=f"softmax_backward, case {case.name}: the fill 'nrmal' of grad raised"):
        materialise(case, registry.primitive("softmax_backward"), torch.float32)


def test_fills_that_need_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Fill("other", "what the other one has", lambda d: d.given("weight" if d.parameter == "x" else "x").double())
    monkeypatch.setattr(registry, "evidences", lambda: {"linear": Evidence("linear", tuple, fills=(own,))})
    specs = {name: TensorSpec((3, 3), fill="other") for name in ("x", "weight")}
    with pytest.raises(EvidenceError, match=r"^linear, case one: the fills of x, weight need each other's content$"):
        materialise(Case("one", specs), registry.primitive("linear"), torch.float32)


def test_memory_that_lacks_is_no_fault_of_a_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(d: Draw) -> Tensor:
        raise torch.OutOfMemoryError("too little")

    own = Evidence("softmax", tuple, fills=(Fill("large", "large", large),))
    monkeypatch.setattr(registry, "evidences", lambda: {"softmax": own})
    cell = checked(softmax_case(x=TensorSpec((2, 3), fill="large")), monkeypatch)
    assert (cell.verdict, cell.reason) == ("NOT_RUN", "the oracle ran out of memory: too little")


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        (lambda args, y: ({"accumulate": y[0].new_ones(3, 2)},), "'accumulate' of y is (3, 2); required: (2, 3)"),
        (lambda args, y: ({"absolute": y[0].new_ones(1, 2, 3)},), "'absolute' of y is (1, 2, 3); required: (2, 3)"),
        (lambda args, y: (), "bound returned terms of 0 results; required: 1: y"),
        (lambda args, y: {"accumulate": y[0]}, "bound returned dict; required: a tuple of a dict for each of y"),
        (lambda args, y: y, "bound returned Tensor; required: a tuple of a dict for each of y"),
    ],
)
def test_a_bound_that_does_not_fit_says_what_is_required(
    bound: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = checked(softmax_case(), monkeypatch, bound)
    assert (
        cell.verdict == "MISTRUSTED"
        and (cell.reason or "").startswith("softmax: its bound")
        and why in (cell.reason or "")
    )


def test_terms_that_broadcast_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = checked(softmax_case(), monkeypatch, lambda args, outputs: ({"accumulate": args[0].new_full((2, 1), 8.0)},))
    assert cell.verdict == "PASS", cell.reason


def test_a_backward_whose_bound_lacks_a_result_is_named() -> None:
    few = dataclasses.replace(NORM, limits=Limits(bound=lambda args, outputs: ({}, {})))
    with pytest.raises(EvidenceError, match="returned terms of 2 results; required: 3: grad_x, grad_weight, grad_bias"):
        prepare(few, cases_of(NORM)[0], torch.float32, CPU)


def test_what_else_a_definition_raises_is_said_as_before() -> None:
    assert unprepared(RuntimeError("no")) == "the definition or its bound raised RuntimeError: no"


def test_a_symbol_that_a_domain_lacks_is_named_with_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain({"x": Form("N M")}, symbols={"N": "width"})
    monkeypatch.setattr(registry, "evidences", lambda: {"softmax": Evidence("softmax", tuple, fuzz=domain)})
    with pytest.raises(
        EvidenceError, match=r"^softmax: the form 'N M' of x: unknown symbol of a domain 'M'; nearest: N"
    ):
        fuzz.case(SOFTMAX, lambda options: options[0])


def test_a_misspelt_gradient_names_those_that_a_backward_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.primitive("add_layer_norm")
    backward = registry.primitive("add_layer_norm_backward")
    (known, *_) = op.gradient_names()
    first = next(p for p in backward.parameters if p.name == known)
    wrong = tuple(p.replace(name="grad_yy") if p is first else p for p in backward.parameters)
    types = {**backward.types, "grad_yy": "Tensor"}
    monkeypatch.setattr(
        registry, "primitive", lambda name: dataclasses.replace(backward, parameters=wrong, types=types)
    )
    gradients = ", ".join(op.gradient_names())
    message = f"'grad_yy' is no argument, output or gradient of add_layer_norm; its gradients are {gradients}"
    with pytest.raises(ValueError, match=message):
        recipe.Recipe.of(op)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """A menu line of softmax_backward whose function its module lacks."""
    line = registry.implementation("softmax_backward", "torch")
    wrong = dataclasses.replace(line, where=f"{line.where.partition(':')[0]}:softmax_bakward")
    lines = registry._catalogue.menu["softmax_backward"]
    menu = tuple(wrong if one is line else one for one in lines)
    monkeypatch.setitem(registry._catalogue.menu, "softmax_backward", menu)
    return wrong


def test_a_launcher_that_is_not_there_is_named_with_its_file(lost: Implementation) -> None:
    op = registry.primitive("softmax_backward")
    cell = check_cell(op, lost, cases_of(op)[0], torch.float32)
    assert cell.verdict == "QUARANTINED"
    assert "softmax/torch_kernels.py has no function softmax_bakward, which the menu names" in (cell.reason or "")


def test_doctor_names_kernels_of_ours_that_cannot_be_loaded(lost: Implementation) -> None:
    faults = doctor._faults()
    assert list(faults) == ["kernels softmax_backward torch"]
    assert "has no function softmax_bakward" in faults["kernels softmax_backward torch"]


def test_every_kernel_of_ours_that_could_run_here_loads() -> None:
    assert doctor._faults() == {}


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    menu = tuple(x for x in registry.implementations("softmax_backward") if x.backend != "torch")
    monkeypatch.setitem(registry._catalogue.menu, "softmax_backward", menu)


def test_an_op_without_a_line_of_the_backend_that_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    asked = ("check", "--op", "softmax", "--op", "softmax_backward", "--backend", "torch", "--device", "cpu")
    done = ferryman(*asked, "--dtype", "f32", "--json")
    assert done.code == 2 and done.out == ""
    assert "--backend of softmax_backward is torch; required: one or more of its own: " in done.err
    assert "triton" in done.err and "definition" in done.err


def test_ops_that_nobody_named_may_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    cells.require_lines(None, ["torch"])
    cells.require_lines(["softmax", "softmax_backward"], ["torch", "definition"])
    cells.require_lines(["softmax", "softmax_backward"], None)
    with pytest.raises(ArgumentError, match="softmax_backward"):
        cells.require_lines(["softmax_backward"], ["torch"])


def test_a_simulated_device_is_asked_for_a_line_of_each_op_too() -> None:
    (op, *_) = [op for op in registry.primitives() if not registry.asked(op, ["hip"])]
    done = ferryman("check", "--backend", "simulated", "--backend", "hip", "--op", op)
    assert done.code == 2 and f"--backend of {op} is hip; required: one or more of its own: " in done.err
