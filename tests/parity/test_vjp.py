"""G7, gradients end to end: planted backwards, saved tensors swapped, forwards that change under autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_support import OPS, strict, torch_kernel
from torch import Tensor

import ferryman
from ferryman.dispatch import plan, registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import as_tuple, cases_of
from ferryman.porting.judging import vjp
from ferryman.porting.judging.parity import check_cell
from ferryman.porting.judging.results import Cell
from tests.lines import serving

Kernel = Callable[..., Any]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Kernel], None]]:
    """Replaces a backward of the torch menu where dispatch finds it."""
    changed: dict[str, Kernel] = {}
    real = registry.launcher

    def launcher(line: Implementation) -> Kernel:
        return changed[line.op] if line.op in changed and line.backend == "torch" else real(line)

    def plant(op: str, kernel: Kernel) -> None:
        changed[op] = kernel
        plan.drop_plans()

    monkeypatch.setattr(registry, "launcher", launcher)
    yield plant
    monkeypatch.undo()
    plan.drop_plans()


def cells_of(op: str, *names: str) -> list[Cell]:
    primitive = registry.primitive(op)
    return [
        check_cell(primitive, serving(op, "torch"), case, torch.float32)
        for case in cases_of(primitive)
        if not names or case.name in names
    ]


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", [op for op in OPS if registry.primitive(op).gradient.backward])
def test_a_backward_that_is_a_hundredth_too_large_fails_its_forwards_gradients(
    op: str, planted: Callable[[str, Kernel], None]
) -> None:
    backward = str(registry.primitive(op).gradient.backward)
    right = torch_kernel(backward)

    def larger(*args: Any) -> Any:
        outputs = tuple(o * 1.01 for o in as_tuple(right(*args)))
        return outputs if len(outputs) > 1 else outputs[0]

    assert all(c.verdict == "PASS" for c in cells_of(op, "prime", "full", "ragged", "d64"))
    planted(backward, larger)
    cells = [c for c in cells_of(op) if c.gates["G7"].outcome != "n/a"]
    failed = [c for c in cells if c.gates["G7"].outcome == "fail"]
    assert len(failed) >= 0.6 * len(cells) >= 5
    assert all("backward: torch" in (c.gates["G7"].reason or "") for c in failed)


def test_saved_tensors_in_the_wrong_order_are_caught(planted: Callable[[str, Kernel], None]) -> None:
    right = torch_kernel("attention_backward")
    planted("attention_backward", lambda g, gl, q, k, v, *rest: right(g, gl, q, v, k, *rest))
    assert all(c.gates["G7"].outcome == "fail" for c in cells_of("attention", "full", "causal", "gqa", "window"))


def test_the_gradients_of_a_replaced_kernel_come_from_its_own_outputs() -> None:
    """A forward that is right when it is called, and wrong under autograd: that is its fourth call here."""
    calls = 0

    def forgetful(x: Tensor, target: Any) -> Tensor:
        nonlocal calls
        calls += 1
        y: Tensor = torch_kernel("softmax")(x * (0.5 if calls == 4 else 1.0), target)
        return y

    case = next(c for c in cases_of(registry.primitive("softmax")) if c.name == "vector")
    cell = check_cell(registry.primitive("softmax"), strict("softmax"), case, torch.float32, kernel=forgetful)
    assert calls == 4 and cell.gates["G7"].outcome == "fail"
    assert "the forward under autograd" in (cell.gates["G7"].reason or "")


def test_what_raises_under_autograd_fails_and_what_does_not_apply_says_why() -> None:
    def third_call(*args: Any, count: list[int] = [0]) -> Any:  # noqa: B006 - a counter
        count[0] += 1
        if count[0] > 3:
            raise RuntimeError("only three")
        return torch_kernel("softmax")(*args)

    case = next(c for c in cases_of(registry.primitive("softmax")) if c.name == "vector")
    cell = check_cell(registry.primitive("softmax"), strict("softmax"), case, torch.float32, kernel=third_call)
    assert cell.gates["G7"].outcome == "fail" and "only three" in (cell.gates["G7"].reason or "")
    for op, name, text in (
        ("softmax_backward", "prime", "not differentiated again"),
        ("softmax", "fill_nonfinite", "not finite"),
    ):
        primitive = registry.primitive(op)
        case = next(c for c in cases_of(primitive) if c.name == name)
        gate = check_cell(primitive, serving(op, "torch"), case, torch.float32).gates["G7"]
        assert gate.outcome == "n/a" and text in (gate.reason or "")


def test_a_saved_index_stays_an_integer_for_the_backwards_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a definition of a backward that raises is that cell's verdict: the other cells are still judged."""
    op, seen, evaluate = registry.primitive("gate_topk"), set(), vjp._analytic

    def looked(backward: Primitive, given: dict[str, Any]) -> Any:
        seen.add(given["topk_ids"].dtype)
        return evaluate(backward, given)

    calls: list[str] = []

    def raises(backward: Primitive, given: dict[str, Any]) -> Any:
        if calls:  # the first one is on the oracle's own outputs
            raise IndexError("of the definition")
        calls.append(backward.name)
        return evaluate(backward, given)

    case = next(c for c in cases_of(op) if not c.exact)
    monkeypatch.setattr(vjp, "_analytic", looked)
    cell = check_cell(op, serving("gate_topk", "torch"), case, torch.float32)
    assert cell.gates["G7"].outcome == "pass"
    assert seen and not any(dtype.is_floating_point for dtype in seen)

    monkeypatch.setattr(vjp, "_analytic", raises)
    monkeypatch.setattr(vjp, "PASSES", vjp.PASSES[:1])
    cell = check_cell(op, serving("gate_topk", "torch"), case, torch.float32)
    assert cell.verdict == "MISTRUSTED" and "IndexError: of the definition" in (cell.reason or "")


def test_the_gradients_name_the_backward_that_ran() -> None:
    (cell,) = cells_of("softmax", "prime")
    assert cell.gates["G7"].reason == "backward: torch"
    with ferryman.use("definition"):  # what the caller has asked for does not decide what is checked
        (cell,) = cells_of("softmax", "prime")
    assert cell.gates["G7"].reason == "backward: torch"
