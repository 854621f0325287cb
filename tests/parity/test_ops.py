"""Every implementation that runs on any CPU, on every small case, in every dtype: PASS."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from parity_support import CPU, DTYPES, OPS, check, strict

from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench.grid import on_meta
from ferryman.porting.inputs.cases import APART, arguments, as_tuple, cases_of, forward_of, output_gradients
from ferryman.porting.judging import metrics
from ferryman.porting.judging.parity import check_cell, prepare
from ferryman.porting.judging.results import GateName
from tests import families
from tests.lines import serving


def _passes_every_gate(op: str, case: Case, dtype: torch.dtype, never: set[GateName]) -> None:
    primitive = registry.primitive(op)
    prepared = prepare(primitive, case, dtype, CPU)
    for name in ("torch", "definition"):
        line = serving(op, name, prepared.args.values)
        cell = check_cell(primitive, line, case, dtype, prepared=prepared)
        assert (cell.implementation, cell.verdict) == (line.name, "PASS"), f"{case.name}: {cell.reason}"
        assert list(cell.gates) == list(get_args(GateName))
        assert cell.gates["G0"].outcome == cell.gates["G5"].outcome == "pass"
        assert all(g.reason for g in cell.gates.values() if g.outcome == "n/a")
        assert all(cell.gates[name].outcome == "n/a" for name in never), f"{case.name}: {cell.gates}"
        assert cell.ratio is None or cell.ratio <= 1


@pytest.mark.daily(7)
@pytest.mark.alternate(within="test_every_case_passes_every_gate")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_torch_and_the_definition_pass_every_gate(op: str, dtype: torch.dtype) -> None:
    """Each case in one dtype, in turn; below, and by `make check`, in all of them."""
    primitive = registry.primitive(op)
    never = set(get_args(GateName)) - _applicable(primitive)
    for i, case in enumerate(cases_of(primitive), start=zlib.crc32(op.encode())):
        if DTYPES[i % 3] is dtype:
            _passes_every_gate(op, case, dtype, never)


@pytest.mark.slow
@pytest.mark.alternate("dtype")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_case_passes_every_gate(op: str, dtype: torch.dtype) -> None:
    primitive = registry.primitive(op)
    never = set(get_args(GateName)) - _applicable(primitive)
    for case in cases_of(primitive):
        _passes_every_gate(op, case, dtype, never)


def _most_elements(op: Primitive, case: Case) -> int:
    """Of one result."""
    return max(t.numel() for t in as_tuple(op.meta(*on_meta(op, case, torch.float32))))


def _applicable(primitive: Primitive) -> set[GateName]:
    """The gates that apply to some case of an op."""
    expected: set[GateName] = set(get_args(GateName))
    elements = [_most_elements(primitive, c) for c in cases_of(primitive) if not c.exact]
    if max(elements, default=0) < metrics.ENOUGH:  # a scalar and one number a row, or exact whole numbers
        expected -= {"G3", "G4"}
    if isinstance(primitive.limits.batch, str):  # why the op has no independent samples
        expected -= {"G6"}
    if primitive.gradient.backward is None:
        expected -= {"G7"}
    return expected


@pytest.mark.parametrize("op", OPS)
def test_every_gate_applies_to_some_case_of_every_op(op: str) -> None:
    """A gate that is n/a everywhere would check nothing. That no other applies, the test of all cases says."""
    primitive, line = registry.primitive(op), serving(op, "torch")
    kernel, cases = registry.launcher(line), cases_of(primitive)
    exact = [(c.name, torch.bfloat16 if "float32" in c.inexact else torch.float32) for c in cases if c.exact]
    exact += [(name, torch.float32) for name, dtype in exact if dtype is not torch.float32]
    others = [(c.name, torch.float32) for c in cases if not c.exact]
    missing = _applicable(primitive)
    for name, dtype in filter(None, itertools.chain(*itertools.zip_longest(exact, others))):
        for cell in check(op, kernel, line, (dtype,), name):
            missing -= {gate for gate, judged in cell.gates.items() if judged.outcome != "n/a"}
        if not missing:
            return
    pytest.fail(f"no case of {op} is judged by {sorted(missing)}")


@pytest.mark.parametrize("op", [op for op in OPS if forward_of(registry.primitive(op)) is not None])
def test_a_backward_is_tried_on_all_its_forwards_cases(op: str) -> None:
    backward = registry.primitive(op)
    forward = forward_of(backward)
    assert forward is not None
    assert {c.name for c in cases_of(backward)} >= {c.name for c in cases_of(forward)}


def made_apart(cases: Iterable[Case]) -> list[Case]:
    """The cases that are made of one for their gradients' layout; a case of the op's own may name a layout, too."""
    return [c for c in cases if c.gradients in APART and c.name.endswith(f"_gradients_{c.gradients}")]


def test_a_case_that_names_its_gradients_layout_is_none_that_is_made() -> None:
    cases = cases_of(registry.primitive("rms_norm_backward"))
    own = [replace(c, gradients=kind) for c, kind in zip(cases, ("rows", "last", "strided:1,64+0"), strict=False)]
    apart = made_apart(cases)
    assert [c.gradients for c in apart] == ["rows", "last"] and made_apart([*own, *cases]) == apart


@pytest.mark.parametrize("op", [op for op in OPS if forward_of(registry.primitive(op)) is not None])
def test_some_gradients_lie_as_no_other_tensor_does(op: str) -> None:
    """Strides taken for another tensor's would go unseen: any layout of a case is its gradients', too."""
    backward = registry.primitive(op)
    forward = forward_of(backward)
    assert forward is not None
    apart = made_apart(cases_of(backward))
    assert [c.gradients for c in apart] == ["rows", "last"]
    for case in apart:
        args = arguments(case, backward, torch.float32, 0, CPU)
        gradients = output_gradients(backward, forward)
        assert all(args.values[backward.names.index(name)] is not None for name in gradients)
        other = {(b.tensor.shape, b.tensor.stride()) for name, b in args.buffers.items() if name not in gradients}
        for name in gradients:
            tensor = args.buffers[name].tensor
            plain = tensor.dim() < (2 if case.gradients == "rows" else 1) or tensor.numel() < 2
            assert plain or (tensor.shape, tensor.stride()) not in other


RIGHT = [(op, kernel) for op, kernels in families.table("structural", "RIGHT").items() for kernel in kernels]


@pytest.mark.parametrize(("op", "kernel"), RIGHT)
@pytest.mark.parametrize("seed", range(3))
def test_a_correct_alternative_raises_no_alarm(op: str, kernel: object, seed: int) -> None:
    for cell in check(op, kernel, strict(op), seed=seed):  # type: ignore[arg-type]
        assert cell.verdict == "PASS", f"{cell.dtype} {cell.case}: {cell.reason}"


def test_there_are_alternatives_of_several_ops() -> None:
    assert len(RIGHT) >= 4
