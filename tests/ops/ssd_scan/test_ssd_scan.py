"""ssd_scan against a sum over pairs of tokens, one token after another, and with planted errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.ops.ssd_scan import bounds
from ferryman.ops.ssd_scan.definition import ssd_scan
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32, ratio
from tests.interpreter import Interpreter
from tests.ops.ssd_scan import independent

OP = registry.primitive("ssd_scan")
CASES = {case.name: case for case in cases_of(OP)}


def taken(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = materialise(CASES[name], OP, dtype)
    return values, double(values)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("split", [(1,) * 70, (64, 1, 5), (3, 67)], ids=["tokens", "chunk", "rest"])
def test_tokens_after_each_other_give_what_all_give_at_once(dtype: torch.dtype, split: tuple[int, ...]) -> None:
    values, wide = taken("state", dtype)
    x, dt, a, b, c, d, bias, kept, softplus, *_ = values
    exact, last = OP.body(*wide)
    terms, state_terms = OP.limits.bound(wide, (exact, last))
    pieces = []
    for parts in zip(*(m.split(split, 1) for m in (x, dt, b, c)), strict=True):
        with ferryman.trace() as trace:
            y, kept = ssd_scan(parts[0], parts[1], a, parts[2], parts[3], d, bias, kept, softplus)
        assert list(trace.calls) == [("ssd_scan", "torch")]
        pieces.append(y)
    assert ratio(torch.cat(pieces, 1), exact, terms, UNIT[dtype]) <= 1
    assert kept.dtype == torch.float32 and ratio(kept, last, state_terms, U32) <= 1
    whole, final = ssd_scan(*values)
    assert ratio(whole, exact, terms, UNIT[dtype]) <= 1 and ratio(final, last, state_terms, U32) <= 1


def pairs(*args: Any) -> Tensor:
    return independent.ssd_scan(*args)[0]


def shifted(at: int, by: int) -> Callable[..., Tensor]:
    def changed(*args: Any) -> Tensor:
        given = list(args)
        given[at] = given[at].roll(by, 1 if given[at].dim() > 1 else 0)
        return pairs(*given)

    return changed


def without(at: int) -> Callable[..., Tensor]:
    def changed(*args: Any) -> Tensor:
        given = list(args)
        given[at] = None if at != 8 else False
        return pairs(*given)

    return changed


def without_the_oldest(x: Tensor, *rest: Any) -> Tensor:
    return pairs(x * (torch.arange(x.shape[1]) > 0)[:, None, None], *rest)


def with_other_state(*given: Any) -> Tensor:
    changed = list(given)
    changed[7] = given[7].roll(1, 1)
    return pairs(*changed)


def with_bfloat16_rates(*given: Any) -> Tensor:
    changed = list(given)
    changed[2] = given[2].bfloat16().double()
    return pairs(*changed)


def with_a_least_step(*given: Any) -> Tensor:
    changed = [*given[:10], 0.5, None]
    return pairs(*changed)


PLANTED: dict[str, Callable[..., Tensor]] = {
    "x a token late": shifted(0, 1),
    "steps a token late": shifted(1, 1),
    "another head's rate": shifted(2, 1),
    "b a token late": shifted(3, 1),
    "c a token early": shifted(4, -1),
    "no skip": without(5),
    "no bias of the step": without(6),
    "no state": without(7),
    "no softplus": without(8),
    "the first token dropped": without_the_oldest,
    "another head's state": with_other_state,
    "steps limited": with_a_least_step,
    "a factor": lambda *v: pairs(*v) * (1 + 2.0**-8),
    "x in bfloat16": lambda x, *v: pairs((x * 1.0).bfloat16().double(), *v),
    "decays in bfloat16": with_bfloat16_rates,
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_beyond_the_bound(error: str) -> None:
    values, wide = taken("state")
    exact, final = OP.body(*wide)
    terms, _ = OP.limits.bound(wide, (exact, final))
    assert ratio(ssd_scan(*values)[0], exact, terms, U32) <= 1
    assert ratio(PLANTED[error](*wide), exact, terms, U32) > 5


def test_the_bound_is_no_more_than_a_few_hundred_roundings() -> None:
    """Steps and rates as models have them: the bound is 5e-4 of the magnitudes at most, less than bfloat16's own."""
    generator = torch.Generator().manual_seed(1)
    x, b, c = (torch.rand(s, generator=generator).double() for s in ((1, 300, 2, 4), (1, 300, 1, 16), (1, 300, 1, 16)))
    dt = 0.001 + 0.05 * torch.rand(1, 300, 2, generator=generator).double()
    args = (x, dt, torch.tensor([-1.0, -4.0]).double(), b, c, None, None, None, False, False, None, None)
    y, final = OP.body(*args)
    terms, _ = OP.limits.bound(args, (y, final))
    assert float((U32 * terms["accumulate"] / y).max()) < 5e-4


BACKWARD = registry.primitive("ssd_scan_backward")
LEARNED = (
    "small",
    "plain",
    "state",
    "token",
    "past_a_chunk",
    "chunks",
    "prime",
    "layout_rows",
    "own_float16",
    "limits",
    "no_decay",
)


def slopes(name: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor], Counter[Any]]:
    """(exact arguments of the backward, gradients by dispatch, the exact ones, who ran)."""
    values = list(materialise(CASES[name], OP, dtype))
    leaves = []
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            values[i] = value.detach().requires_grad_()
            leaves.append(values[i])
    generator = torch.Generator().manual_seed(3)
    with ferryman.trace() as trace:
        outputs = ops.ssd_scan(*values)
        weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, leaves, weights)
    wide = [v.detach().double() if isinstance(v, Tensor) else v for v in values]
    given = dict(zip(OP.names, wide, strict=True)) | dict(
        zip(OP.gradient_names(), (w.double() for w in weights), strict=True)
    )
    args = tuple(given[n] for n in BACKWARD.names)
    exact = [
        g for g, names in zip(BACKWARD.body(*args), OP.gradient.owners, strict=True) if given[names[0]] is not None
    ]
    return args, list(gradients), exact, trace.calls


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_are_within_their_bounds(name: str, dtype: torch.dtype) -> None:
    args, gradients, exact, calls = slopes(name, dtype)
    assert set(calls) == {("ssd_scan", "torch"), ("ssd_scan_backward", "torch")}
    every = BACKWARD.limits.bound(args, BACKWARD.body(*args))
    there = [
        t
        for t, names in zip(every, OP.gradient.owners, strict=True)
        if dict(zip(BACKWARD.names, args, strict=True))[names[0]] is not None
    ]
    for got, want, terms in zip(gradients, exact, there, strict=True):
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1


def test_a_planted_error_of_a_gradient_is_beyond_its_bound() -> None:
    args, _, _, _ = slopes("small", torch.float32)
    exact = BACKWARD.body(*args)
    for terms, want in zip(BACKWARD.limits.bound(args, exact), exact, strict=True):
        if want.dim() > 1 and want.numel():
            assert ratio(want * (1 + 2.0**-6), want, terms, U32) > 1
            assert ratio(want.roll(1, 1), want, terms, U32) > 5
        elif want.numel():  # sums over samples and tokens, most of which cancels
            assert ratio(want.roll(1, 0), want, terms, U32) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 5, 4)}, r"x\.shape is \(2, 5, 4\); required: \(B, L, H, P\)"),
        ({"b": torch.ones(2, 5, 3, 8)}, r"b\.shape\[2\] is 3; required: a divisor of x's 4 heads"),
        ({"b": torch.ones(2, 6, 2, 8)}, r"b\.shape is \(2, 6, 2, 8\)"),
        ({"c": torch.ones(2, 5, 2, 7)}, r"c\.shape is \(2, 5, 2, 7\); required: \(2, 5, 2, 8\)"),
        ({"dt": torch.ones(2, 5, 3)}, r"dt\.shape is \(2, 5, 3\); required: \(2, 5, 4\)"),
        ({"a": torch.ones(3)}, r"a\.shape is \(3,\); required: \(4,\)"),
        ({"c": torch.ones(2, 5, 2, 8).half()}, r"c\.dtype is torch\.float16"),
        ({"dt_min": 2.0, "dt_max": 1.0}, r"dt_min is 2\.0; required: at most dt_max, 1\.0"),
        ({"initial_state": torch.ones(2, 4, 8, 6)}, r"initial_state\.shape is \(2, 4, 8, 6\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    shared = torch.ones(2, 5, 2, 8)
    given = {"x": torch.ones(2, 5, 4, 6), "dt": torch.ones(2, 5, 4), "a": -torch.ones(4), "b": shared, "c": shared}
    with pytest.raises(ArgumentError, match=message):
        ssd_scan(**{**given, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op, line = registry.primitive("ssd_scan"), registry.implementation("ssd_scan", "triton.chunked")
found = {}
for case in cases_of(op):
    if case.name in ("past_a_chunk", "exact_layout", "narrow"):
        cell = check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
        found[case.name] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_the_triton_kernel_is_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 3 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_result_in_float32_is_rounded_nowhere(dtype: torch.dtype) -> None:
    values, wide = taken("float32_result", dtype)
    exact, final = OP.body(*wide)
    terms, _ = OP.limits.bound(wide, (exact, final))
    with ferryman.trace() as trace:
        y, _ = ssd_scan(*values)
    assert list(trace.calls) == [("ssd_scan", "torch")]
    assert y.dtype == torch.float32 and ratio(y, exact, terms, U32) <= 1
    assert ratio(ssd_scan(*values[:9])[0], exact, terms, U32) > 5


@pytest.mark.parametrize("kept", [0, 2**20])
def test_a_walk_from_the_end_gives_each_state_whether_all_are_kept_or_some(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_ALL_KEPT", kept)
    for length in (0, 1, 2, 3, 8, 9, 24, 25, 26):
        steps: list[int] = []

        def advance(t: int, state: tuple[Tensor, Tensor], steps: list[int] = steps) -> tuple[Tensor, Tensor]:
            steps.append(t)
            return 2 * state[0] + t, state[1] + 1

        first = torch.ones(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        want = [first]
        for t in range(length):
            want.append((2 * want[-1][0] + t, want[-1][1] + 1))
        walk = list(bounds.reversed_walk(advance, first, length))
        assert [t for t, *_ in walk] == list(reversed(range(length)))
        for t, before, after in walk:
            assert all(map(torch.equal, (*before, *after), (*want[t], *want[t + 1])))
        assert len(steps) <= (length if kept else 2 * length), "a state is computed once where all are kept"
