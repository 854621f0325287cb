"""Every gate on kernels with one planted error each, and on right kernels that it must let through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from parity_support import CPU, DTYPES, OPS, check, strict
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Limits, TensorSpec
from ferryman.porting.inputs.cases import as_tuple, cases_of, forward_of, specs_of
from ferryman.porting.judging.parity import check_cell, prepare
from ferryman.porting.judging.results import Cell, Gate, GateName
from tests import families
from tests.lines import serving, torch_kernel

BF16 = torch.bfloat16
Kernel = Callable[..., Any]


def exact_cases(op: str) -> list[Case]:
    return [c for c in cases_of(registry.primitive(op)) if c.exact]


def judged(
    op: str,
    kernel: Kernel,
    gate: GateName,
    case: Case | None = None,
    dtypes: tuple[Any, ...] = DTYPES,
    line: Implementation | None = None,
) -> list[Cell]:
    """The cells to which a gate applies."""
    primitive, cells = registry.primitive(op), []
    for dtype in dtypes:
        for each in [case] if case is not None else cases_of(primitive):
            cells.append(check_cell(primitive, line or strict(op), each, dtype, kernel=kernel))
    return [c for c in cells if gate in c.gates and c.gates[gate].outcome != "n/a"]


# --- G1, exact probes


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", OPS)
def test_one_unit_in_one_element_of_an_exact_case_is_caught(op: str) -> None:
    primitive, right, caught = registry.primitive(op), torch_kernel(op), 0
    assert len(exact_cases(op)) >= 2

    for case in exact_cases(op):
        absent = {n for n in primitive.outputs if case.args.get(n.removeprefix("grad_"), case) is None}
        absent |= {f"grad_{name}" for name in primitive.added if name not in case.args}
        at = next((i for i, n in enumerate(primitive.outputs) if n not in absent | set(case.inexact)), None)
        if at is None or any(0 in spec.shape for spec in specs_of(case)):
            continue  # nothing is written that could be wrong

        def kernel(*args: Any, at: int = at) -> Any:
            outputs = as_tuple(right(*args))
            output = outputs[at]
            place = torch.unravel_index(torch.tensor(output.numel() // 2), output.shape)
            output[place] = torch.nextafter(output[place], torch.full_like(output[place], 1e4))
            return outputs if len(outputs) > 1 else outputs[0]

        for dtype in DTYPES:
            cell = check_cell(primitive, strict(op), case, dtype, kernel=kernel)
            if cell.gates["G1"].outcome == "n/a":
                assert case.inexact
                continue
            assert cell.gates["G1"].outcome == "fail", f"{case.name} {dtype}"
            assert "bit for bit" in (cell.gates["G1"].reason or "") and cell.worst is not None
            caught += 1
    assert caught >= 5


STRUCTURAL: dict[str, tuple[Kernel, ...]] = families.table("structural", "ERRORS")


@pytest.mark.parametrize(("op", "kernel"), [(op, k) for op, many in STRUCTURAL.items() for k in many])
def test_structural_errors_fail_the_exact_probe(op: str, kernel: Kernel) -> None:
    primitive, failed = registry.primitive(op), 0
    for case in exact_cases(op):
        for dtype in DTYPES:
            cell = check_cell(primitive, strict(op), case, dtype, kernel=kernel)
            failed += cell.gates.get("G1") is not None and cell.gates["G1"].outcome == "fail"
    assert failed >= 3


def test_there_are_structural_errors_of_many_ops() -> None:
    assert len(STRUCTURAL) >= 10 and {*STRUCTURAL} <= {*OPS}


def test_a_declaration_excuses_only_what_it_declares() -> None:
    from tests.ops.matmul.structural import linear_in_bfloat16_sums as in_bfloat16_sums

    op, case = "linear", next(c for c in exact_cases("linear") if c.name == "exact_integers_ragged")
    primitive = registry.primitive(op)
    for line, dtype, outcome in (
        (strict(op), BF16, "fail"),
        (strict(op, accumulation="split-k"), BF16, "n/a"),
        (strict(op, accumulation="split-k"), torch.float32, "fail"),
    ):
        gate = check_cell(primitive, line, case, dtype, kernel=in_bfloat16_sums).gates["G1"]
        assert gate.outcome == outcome and gate.reason
    few = next(c for c in exact_cases(op) if c.name == "exact_few")
    cell = check_cell(primitive, strict(op, accumulation="split-k"), few, BF16, kernel=in_bfloat16_sums)
    assert cell.gates["G1"].outcome == "pass"  # sixteen bits hold every partial sum of this one


# --- G4, bias

LARGE = Case(
    "large_enough",
    {
        "x": TensorSpec((256, 1024)),
        "weight": TensorSpec((1024,), fill="weight"),
        "eps": 1e-6,
        "cast_before_weight": False,
    },
)
LOGITS = Case("large_enough", {"x": TensorSpec((128, 512))})


def norm(change: Callable[[Tensor], Tensor], root: float = 1.0) -> Kernel:
    def kernel(x: Tensor, weight: Tensor, eps: float, cast: bool, target: Any) -> Tensor:
        h = x.float()
        y = h * (torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * root) * weight.float()
        return change(y).to(x.dtype)

    return kernel


def truncated(y: Tensor) -> Tensor:
    return (y.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("change", [truncated, lambda y: y * 1.001, lambda y: y * 1.0005, lambda y: y * 0.9998])
def test_a_bias_far_below_a_unit_is_caught(change: Callable[[Tensor], Tensor]) -> None:
    (cell,) = judged("rms_norm", norm(change), "G4", LARGE, (BF16,))
    assert cell.gates["G4"].outcome == "fail", cell.gates["G4"]
    assert "lean" in (cell.gates["G4"].reason or "") and (cell.gates["G4"].measure or 0) >= 1


def test_an_honest_approximation_of_one_sign_is_none() -> None:
    """rsqrt and exp of every vendor are off by up to 2 units in the last place, and may be so with one sign."""
    for dtype in DTYPES:
        for root in (1 - 2.0**-22, 1 + 2.0**-22):
            (cell,) = judged("rms_norm", norm(lambda y: y, root), "G4", LARGE, (dtype,))
            assert cell.verdict == "PASS", cell.reason

        def biased_exp(x: Tensor, target: Any) -> Tensor:
            h = x.float()
            d = h - h.amax(-1, keepdim=True)
            e = torch.exp(d) * torch.where(d < -1, 1 + 2.0**-22, 1.0)
            return (e / e.sum(-1, keepdim=True)).to(x.dtype)

        (cell,) = judged("softmax", biased_exp, "G4", LOGITS, (dtype,))
        assert cell.verdict == "PASS", cell.reason


@pytest.mark.parametrize(("heeds", "outcome"), [(True, "pass"), (False, "fail")])
def test_what_is_deterministic_where_asked_may_differ_by_default_alone(heeds: bool, outcome: str) -> None:
    """A kernel whose runs differ in the last bit, unless it heeds torch.use_deterministic_algorithms."""
    runs = 0

    def kernel(*args: Any) -> Tensor:
        nonlocal runs
        runs += 1
        y: Tensor = torch_kernel("softmax")(*args)
        fixed = heeds and torch.are_deterministic_algorithms_enabled()
        return y if fixed or runs % 2 else torch.nextafter(y, torch.zeros_like(y))

    case = next(c for c in cases_of(registry.primitive("softmax")) if c.name == "prime")
    asked = strict("softmax", deterministic="asked")
    cell = check_cell(registry.primitive("softmax"), asked, case, torch.float32, kernel=kernel)
    assert cell.gates["G5"].outcome == outcome, cell.gates["G5"]
    assert not torch.are_deterministic_algorithms_enabled()
    by_default = check_cell(registry.primitive("softmax"), strict("softmax"), case, torch.float32, kernel=kernel)
    assert by_default.gates["G5"].outcome == "fail"


# --- G6, batch invariance


def other_alone(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """A small-batch path of its own, with another eps."""
    y: Tensor = torch_kernel("rms_norm")(x, weight, eps + 0.1 * (x.dim() > 1 and x.shape[0] == 1), cast, target)
    return y


def other_order_alone(x: Tensor, target: Any) -> Tensor:
    h = x.float()
    e = torch.exp(h - h.amax(-1, keepdim=True)) if h.numel() else h
    if x.shape[0] == 1:
        total = sum((e[..., i : i + 1] for i in range(e.shape[-1])), torch.zeros(()))
    else:
        total = e.sum(-1, keepdim=True)
    return (e / total).to(x.dtype).contiguous()


def test_a_sample_that_differs_alone_is_caught() -> None:
    cells = judged("rms_norm", other_alone, "G6")
    failed = [c for c in cells if c.gates["G6"].outcome == "fail"]
    assert len(failed) >= 20 and all(c.verdict == "FAIL" for c in failed)
    assert all("alone" in (c.gates["G6"].reason or "") for c in failed)


def test_other_bits_alone_are_bounded_unless_invariance_is_declared() -> None:
    case = next(c for c in cases_of(registry.primitive("softmax")) if c.name == "prime")
    (plain,) = judged("softmax", other_order_alone, "G6", case, (torch.float32,))
    assert plain.verdict == "PASS" and "bounded" in (plain.gates["G6"].reason or "")
    assert 0 < (plain.gates["G6"].measure or 0) <= 1
    declared = strict("softmax", batch_invariant=True)
    (claimed,) = judged("softmax", other_order_alone, "G6", case, (torch.float32,), declared)
    assert claimed.verdict == "FAIL" and "declared batch-invariant" in (claimed.gates["G6"].reason or "")


def batch_gate(op: str, case: Case) -> Gate:
    return check_cell(registry.primitive(op), serving(op, "torch"), case, torch.float32).gates["G6"]


@pytest.mark.parametrize("op", [op for op in OPS if isinstance(registry.primitive(op).limits.batch, str)])
def test_an_op_without_a_batch_says_why(op: str) -> None:
    case = cases_of(registry.primitive(op))[0]
    assert batch_gate(op, case) == Gate(outcome="n/a", reason=str(registry.primitive(op).limits.batch))


def test_where_there_is_no_batch_the_reason_is_said() -> None:
    small = [c for c in cases_of(registry.primitive("rms_norm")) if c.name in ("vector", "one_row")]
    for gate in (batch_gate("rms_norm", case) for case in small):
        assert gate.outcome == "n/a" and "fewer than two" in (gate.reason or "")
    assert len(small) == 2
    assert isinstance(registry.primitive("softmax").limits.batch, dict)
    softmax = registry.primitive("softmax")
    silent = dataclasses.replace(softmax, limits=Limits(bound=softmax.limits.bound))
    case = cases_of(silent)[1]
    gate = check_cell(silent, registry.implementation("softmax", "torch"), case, torch.float32).gates["G6"]
    assert gate.outcome == "n/a" and gate.reason == "the op declares no batch axis"


# --- what results may not depend on, and what cells hold


@pytest.mark.parametrize("op", [op for op in OPS if registry.primitive(op).limits.unseen is not None])
def test_what_leaks_within_the_bound_is_caught(op: str) -> None:
    """A unit or two of each result, by the sum of all that the call is given."""
    primitive, right = registry.primitive(op), torch_kernel(op)

    def leaking(*args: Any) -> Any:
        given = [a.double().nan_to_num() for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        share = float(torch.stack([a.sum() for a in given]).sum()) % 1 * 2.0**-22
        outputs = [y * (1 + share * torch.arange(y.numel()).sin().view(y.shape)) for y in as_tuple(right(*args))]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    for case in cases_of(primitive):
        cell = check_cell(primitive, strict(op), case, torch.float32, kernel=leaking)
        if not case.exact and cell.gates["G2"].outcome == "pass" and cell.gates["G5"].outcome == "fail":
            assert cell.verdict == "FAIL" and "may not see" in (cell.gates["G5"].reason or "")
            assert (cell.reading or "").startswith("future tokens leak")
            return
    pytest.fail(f"no case of {op} shows it")


def test_a_wrong_kernel_is_not_run_again() -> None:
    for cell in check("softmax", lambda x, target: x.clone(memory_format=torch.contiguous_format), dtypes=(BF16,)):
        if cell.verdict == "FAIL":
            assert cell.gates["G6"].outcome == cell.gates["G7"].outcome == "n/a"
            assert "wrong already" in (cell.gates["G7"].reason or "")


def test_cells_hold_every_gate_their_errors_and_how_many_terms_were_summed() -> None:
    counted = families.table("structural", "TERMS")
    assert len(counted) >= 5
    for op, (name, terms) in counted.items():
        primitive = registry.primitive(op)
        case = next(c for c in cases_of(primitive) if c.name == name)
        cell = check_cell(primitive, serving(op, "torch"), case, BF16)
        assert cell.reduction == terms and list(cell.gates) == list(get_args(GateName))
        prepared = prepare(primitive, case, BF16, CPU)
        assert sum(cell.distribution) == sum(o.numel() for o in prepared.oracle)
        assert cell.reading is None
        assert forward_of(primitive) is None or cell.gates["G7"].outcome == "n/a"
