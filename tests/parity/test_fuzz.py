"""Every implementation that runs on any CPU, on cases that nobody thought of; a failure is shrunk to the least one.

`pytest -m "slow or not slow" tests/parity/test_fuzz.py` is the long run: 20,000 cases of all ops, drawn without
chance, so that a failure is the change's; with `--hypothesis-seed=N` other ones for each N beside the first hundred.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seed_of_cases
from hypothesis import strategies as st
from parity_support import CPU, strict

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.domain import Domain, Form, Sizes
from ferryman.ops.evidence import Evidence
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import arguments, forward_of
from ferryman.porting.inputs.fills import Buffer, dtype_name
from ferryman.porting.judging.parity import check_cell, prepare
from ferryman.porting.running.cells import check_case
from ferryman.porting.running.drawn import check_drawn, fault, is_wrong
from tests.lines import serving

OPS = fuzz.known()
QUICK, LONG = 100, max(300, -(-20_000 // len(OPS)))  # examples of each op
HALF = -(-(LONG - QUICK) // 2)


def fuzzed(op: Primitive, examples: int, fixed: bool, other: int | None = None) -> int:
    """How many cases ran, each with every implementation; AssertionError names the smallest case that fails. fixed: the
    same ones each time; ``other``, a number: others that are the same each time."""
    done = 0

    @settings(
        max_examples=examples,
        derandomize=fixed and other is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        nonlocal done
        case, dtype = fuzz.case(op, lambda options: data.draw(st.sampled_from(options)))
        seed = data.draw(st.integers(0, 2**16))
        prepared = prepare(op, case, dtype, CPU, seed)
        for name in ("torch", "definition"):
            line = serving(op.name, name, prepared.args.values)
            (cell,) = check_case(op, [line], case, dtype, CPU, detect(CPU), prepared=prepared)
            assert (cell.implementation, cell.verdict) == (line.name, "PASS"), fault(cell, case, dtype, seed)
        done += 1

    (holds if other is None else seed_of_cases(other)(holds))()
    return done


def test_there_is_data_for_every_op() -> None:
    assert tuple(registry.primitives()) == OPS
    assert QUICK * len(OPS) >= 2_000 and (QUICK + 2 * HALF) * len(OPS) >= 20_000
    with pytest.raises(UnknownName, match="op that fuzzing knows"):
        fuzz.case(replace(registry.primitive("softmax"), name="other"), lambda options: options[0])


@pytest.mark.parametrize("op", OPS)
def test_a_hundred_cases(op: str) -> None:
    assert fuzzed(registry.primitive(op), QUICK, fixed=True) >= QUICK


@pytest.mark.slow
@pytest.mark.alternate("half")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("half", (1, 2))
def test_hundreds_of_cases(op: str, half: int, request: pytest.FixtureRequest) -> None:
    """Beside the hundred of the quick test. CI draws one half of them a week."""
    given = request.config.getoption("--hypothesis-seed")
    chance = random.Random(None if given == "random" else f"{given}, {half}")
    other = half if given is None else chance.getrandbits(32)
    assert fuzzed(registry.primitive(op), HALF, fixed=True, other=other) >= HALF


def specs(op: str, count: int = 400) -> list[tuple[Case, torch.dtype, dict[str, TensorSpec]]]:
    """Each case with its dtype and its tensors; those of a list are told apart by their number."""
    drawn = fuzz.cases(registry.primitive(op), count)
    return [(c, d, dict(named_specs(c.args))) for c, d in drawn]


def named_specs(args: Mapping[str, Any]) -> Iterator[tuple[str, TensorSpec]]:
    for name, value in args.items():
        if isinstance(value, TensorSpec):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}_{i}", one) for i, one in enumerate(value) if isinstance(one, TensorSpec))


@pytest.mark.parametrize("op", [op for op in OPS if forward_of(registry.primitive(op)) is None])
def test_the_cases_are_as_hostile_as_they_are_said_to_be(op: str) -> None:
    drawn = specs(op)
    assert {d for _, d, _ in drawn} == set(registry.evidence(registry.primitive(op)).dtypes)
    tensors = [t for _, _, mine in drawn for t in mine.values()]
    sizes = {n for t in tensors for n in t.shape}
    empty = sum(any(0 in t.shape for t in mine.values()) for _, _, mine in drawn)
    assert 0.02 < empty / len(drawn) < 0.2
    assert {0, 1} <= sizes and sizes & {3, 5, 7, 17, 19, 37, 67, 251}
    shared = [t for t in tensors if Buffer.repeats(t.shape, t.layout)]
    zero = re.compile(r"[:,]0[,+]")  # a stride of 0
    assert any(zero.search(t.layout) for t in shared), "none expanded"
    assert any(not zero.search(t.layout) for t in shared), "none overlapping"
    assert any(t.layout.endswith(("+1", "+3")) for t in tensors), "none misaligned"
    fills = {t.fill for t in tensors}
    assert {"normal", "nonfinite", "zeros"} <= fills
    domain = fuzz.domain_of(registry.primitive(op))
    assert domain is not None
    for name, form in domain.arguments.items():
        if isinstance(form, fuzz.Form):
            assert {(c.args[name] is None) for c, _, _ in drawn} == ({True, False} if form.optional else {False})
            if form.mixed:
                assert len({mine[name].dtype for _, _, mine in drawn if name in mine}) >= 4
        elif isinstance(form, tuple):
            assert {c.args[name] for c, _, _ in drawn} == set(form)


def test_a_counter_gives_the_same_cases_whatever_part_is_asked_for() -> None:
    op = registry.primitive("attention")
    assert list(fuzz.cases(op, 20))[7:] == list(fuzz.cases(op, 13, first=7))
    assert list(fuzz.cases(op, 20)) != list(fuzz.cases(op, 20, seed=1))
    again = eval(fuzz.described(*next(fuzz.cases(op, 1))), {"Case": Case, "TensorSpec": TensorSpec, "torch": torch})  # noqa: S307
    assert again == next(fuzz.cases(op, 1))


def test_a_case_with_numbers_that_are_not_finite_is_written_as_python_that_makes_it_again() -> None:
    args = {"dt_max": math.inf, "dt_min": -math.inf, "eps": 1e-6, "window": 3, "scales": [math.nan, 1.0], "on": True}
    text = fuzz.described(Case("fuzz_1", args), torch.float16)
    again, dtype = eval(text, {"Case": Case, "TensorSpec": TensorSpec, "torch": torch})  # noqa: S307
    assert dtype == torch.float16 and repr(again) == repr(Case("fuzz_1", args))


def test_variants_have_few_shapes_and_many_contents() -> None:
    op = registry.primitive("rms_norm")
    drawn = list(fuzz.variants(op, 5, 20))
    kept = {
        (tuple((n, a.shape, a.layout, a.dtype) for n, a in c.args.items() if isinstance(a, TensorSpec)), d)
        for c, d in drawn
    }
    assert len(drawn) == 100 and len(kept) == 5 and len({c.name for c, _ in drawn}) == 100
    assert len({c.args["x"].fill for c, _ in drawn}) >= 6


def test_cases_are_judged_by_their_numbers() -> None:
    op, lines = registry.primitive("softmax"), [registry.implementation("softmax", n) for n in ("torch", "definition")]
    started: list[tuple[str, ...]] = []
    skip = {("softmax", dtype_name(fuzz.numbered(op, 7, 2)[1]), "fuzz_7", "torch")}

    def starting(*key: str) -> None:
        started.append(key)

    cells = list(check_drawn(op, lines, [4, 7], 2, CPU, detect(CPU), skip=skip, starting=starting))
    expected = [("fuzz_4", "torch"), ("fuzz_4", "definition"), ("fuzz_7", "definition")]
    assert [(c.case, c.implementation) for c in cells] == expected == [(case, name) for _, _, case, name in started]
    assert {c.verdict for c in cells} == {"PASS"} and not any(map(is_wrong, cells))


def test_a_domain_that_raises_is_said_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    op, line = registry.primitive("softmax"), registry.implementation("softmax", "torch")
    broken = replace(registry.evidence(op), fuzz=Domain({"x": fuzz.Form("... M")}))
    monkeypatch.setattr(registry, "evidences", lambda: {"softmax": broken})
    cells = list(check_drawn(op, [line], [0, 1], 0, CPU, detect(CPU)))
    assert [(c.case, c.verdict) for c in cells] == [("fuzz_0", "MISTRUSTED"), ("fuzz_1", "MISTRUSTED")]
    unknown = "its domain raised EvidenceError: softmax: the form '... M' of x: unknown symbol of a domain 'M'"
    assert all(is_wrong(c) and str(c.reason).startswith(unknown) for c in cells)
    assert fuzz.numbers(op, 3, 0, {torch.float16}) == [0, 1, 2]


def test_an_op_that_nothing_can_be_drawn_for_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.primitive("softmax_backward")
    assert fuzz.undrawable(op) is None
    monkeypatch.setattr(registry, "evidences", lambda: {"softmax": Evidence("softmax", cases=tuple)})
    assert fuzz.undrawable(op) == "the evidence of softmax has no domain and no small case"
    monkeypatch.setattr(registry, "evidences", dict)
    assert fuzz.undrawable(op) == "no evidence.py has a record of softmax"


def contiguous_only(x: torch.Tensor, target: object) -> torch.Tensor:
    """Reads rows where they would lie if x were contiguous."""
    flat = torch.as_strided(x, (x.numel(),), (1,)) if x.numel() else x
    return torch.softmax(flat.reshape(x.shape).float(), -1).to(x.dtype).contiguous()


def swallows_nan(x: torch.Tensor, target: object) -> torch.Tensor:
    return torch.softmax(x.float(), -1).nan_to_num(0.0).to(x.dtype).contiguous()


def forgets_the_last_column(x: torch.Tensor, target: object) -> torch.Tensor:
    h = x.float()
    h[..., 8:] = torch.where(torch.arange(8, h.shape[-1]) == h.shape[-1] - 1, -float("inf"), h[..., 8:])
    return torch.softmax(h, -1).to(x.dtype).contiguous()


@pytest.mark.parametrize("kernel", [contiguous_only, swallows_nan, forgets_the_last_column])
def test_a_wrong_kernel_does_not_get_through(kernel: Callable[..., Any]) -> None:
    op, verdicts = registry.primitive("softmax"), []
    for case, dtype in fuzz.cases(op, 100):
        clean = arguments(case, op, dtype, 0, CPU)
        size = clean.values[0].untyped_storage().nbytes() // clean.values[0].element_size()
        if clean.values[0].storage_offset() + clean.values[0].numel() > size:
            continue  # the wrong read would leave the allocation
        verdicts.append(check_cell(op, strict("softmax"), case, dtype, kernel=kernel).verdict)
    assert verdicts.count("FAIL") >= 5 and "PASS" in verdicts


def test_a_failure_is_shrunk() -> None:
    def first(options: Sequence[Any]) -> Any:
        return options[0]

    case, _ = fuzz.case(registry.primitive("attention"), first)
    assert all(t.layout == "contiguous" for t in case.args.values() if isinstance(t, TensorSpec)), (
        "what Hypothesis shrinks to is the first option of every choice"
    )


def test_the_slope_of_gelu_near_zero_that_the_long_run_found() -> None:
    """PyTorch's vectorised backward of the erf form is 4.8 units off there: 1.02 bounds."""
    op, tensor = registry.primitive("gelu_mul"), TensorSpec((3, 3, 127), fill="uniform")
    case = Case("fuzz", {"gate": tensor, "up": tensor, "approximate": "none"})
    prepared = prepare(op, case, torch.float32, CPU, 1210)
    cell = check_cell(op, registry.implementation(op.name, "torch"), case, torch.float32, prepared=prepared)
    assert (cell.implementation, cell.verdict) == ("torch", "PASS"), cell.reason


def test_a_list_of_tensors_is_drawn() -> None:
    """As many as a symbol says, of one fill; contents that are drawn anew stay a list."""
    domain = Domain({"parts": Form("R N", count="many")}, symbols={"R": "rows", "N": "width", "many": "groups"})
    draws = [
        fuzz._drawn(Evidence("any", list, fuzz=domain), registry.primitive("softmax"), random.Random(n).choice, Sizes())
        for n in range(40)
    ]
    assert {len(args["parts"]) for args in draws} == {1, 2, 3}
    assert all(len({spec.fill for spec in args["parts"]}) == 1 for args in draws)
    assert any(len({spec.layout for spec in args["parts"]}) > 1 for args in draws)
    again = fuzz._refilled(domain, dict(draws[0]), torch.float32, random.Random(1).choice)
    assert [spec.shape for spec in again["parts"]] == [spec.shape for spec in draws[0]["parts"]]
