"""selective_scan against a sum over pairs of tokens, one token after another, and with planted errors."""

from __future__ import annotations

import importlib
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
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32, ratio
from tests.ops.selective_scan import independent

OP = registry.primitive("selective_scan")
CASES = {case.name: case for case in cases_of(OP)}


def taken(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = materialise(CASES[name], OP, dtype)
    return values, double(values)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("split", [(1,) * 23, (20, 1, 2)], ids=["tokens", "rest"])
def test_tokens_after_each_other_give_what_all_give_at_once(dtype: torch.dtype, split: tuple[int, ...]) -> None:
    values, wide = taken("state", dtype)
    x, dt, a, b, c, d, z, bias, kept, softplus = values
    exact, last = OP.body(*wide)
    terms, state_terms = OP.limits.bound(wide, (exact, last))
    pieces = []
    for parts in zip(*(m.split(split, 1) for m in (x, dt, b, c, z)), strict=True):
        with ferryman.trace() as trace:
            y, kept = ops.selective_scan(parts[0], parts[1], a, parts[2], parts[3], d, parts[4], bias, kept, softplus)
        assert list(trace.calls) == [("selective_scan", "torch")]
        pieces.append(y)
    assert ratio(torch.cat(pieces, 1), exact, terms, UNIT[dtype]) <= 1
    assert kept.dtype == torch.float32 and ratio(kept, last, state_terms, U32) <= 1


def test_a_long_sequence_is_taken_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's line makes the decays of a few tokens at once where all would take too much memory."""
    values, wide = taken("state")
    exact, last = OP.body(*wide)
    terms, state_terms = OP.limits.bound(wide, (exact, last))
    module = importlib.import_module("ferryman.ops.selective_scan.torch_kernels")
    monkeypatch.setattr(module, "SPAN_BYTES", 4 * 2 * 12 * 16 * 5)
    with ferryman.use(selective_scan="torch"):
        y, final = ops.selective_scan(*values)
    assert ratio(y, exact, terms, U32) <= 1 and ratio(final, last, state_terms, U32) <= 1


def test_channels_before_the_length_are_read_where_they_lie() -> None:
    """As mamba_ssm has them: (B, D, L), turned without a copy."""
    values, wide = taken("small")
    turned = tuple(
        v.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(v, Tensor) and v.dim() == 3 else v for v in values
    )
    assert turned[0].stride(-1) != 1
    exact, last = OP.body(*wide)
    with ferryman.trace() as trace:
        y, _ = ops.selective_scan(*turned)
    assert list(trace.calls) == [("selective_scan", "torch")] and y.is_contiguous()
    assert ratio(y, exact, OP.limits.bound(wide, (exact, last))[0], U32) <= 1


def pairs(*args: Any) -> Tensor:
    return independent.selective_scan(*args)[0]


def shifted(at: int, by: int) -> Callable[..., Tensor]:
    def changed(*args: Any) -> Tensor:
        given = list(args)
        given[at] = given[at].roll(by, 1 if given[at].dim() > 1 else 0)
        return pairs(*given)

    return changed


def without(at: int) -> Callable[..., Tensor]:
    def changed(*args: Any) -> Tensor:
        return pairs(*(None if i == at else v for i, v in enumerate(args[:9])), args[9] and at != 9)

    return changed


PLANTED: dict[str, Callable[..., Tensor]] = {
    "x a token late": shifted(0, 1),
    "steps a token late": shifted(1, 1),
    "another state's rate": shifted(2, 1),
    "b a token late": shifted(3, 1),
    "c a token early": shifted(4, -1),
    "the gate a token late": shifted(6, 1),
    "no skip": without(5),
    "no gate": without(6),
    "no bias of the step": without(7),
    "no state": without(8),
    "no softplus": without(9),
    "the skip after the gate": lambda *v: pairs(*v[:5], None, *v[6:]) + v[5] * v[0],
    "the gate's argument alone": lambda *v: pairs(*v[:6], None, *v[7:]) * v[6],
    "a factor": lambda *v: pairs(*v) * (1 + 2.0**-8),
    "rates in bfloat16": lambda *v: pairs(*v[:2], v[2].bfloat16().double(), *v[3:]),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_beyond_the_bound(error: str) -> None:
    _, wide = taken("state")
    exact, final = OP.body(*wide)
    terms, _ = OP.limits.bound(wide, (exact, final))
    assert ratio(PLANTED[error](*wide), exact, terms, U32) > 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x of four dimensions": ({"x": torch.zeros(1, 2, 3, 4)}, "x.shape"),
    "another length of b": ({"b": torch.zeros(2, 5, 4)}, "b.shape"),
    "another state of c": ({"c": torch.zeros(2, 3, 5)}, "c.shape"),
    "rates of one head": ({"a": torch.zeros(8)}, "a.shape"),
    "a gate of another width": ({"z": torch.zeros(2, 3, 7)}, "z.shape"),
    "a state without a batch": ({"initial_state": torch.zeros(8, 4)}, "initial_state.shape"),
    "integers": ({"x": torch.zeros(2, 3, 8, dtype=torch.int32)}, "x.dtype"),
    "a gate of another dtype": ({"z": torch.zeros(2, 3, 8, dtype=torch.float16)}, "z.dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(2, 3, 8),
        "dt": torch.zeros(2, 3, 8),
        "a": torch.zeros(8, 4),
        "b": torch.zeros(2, 3, 4),
        "c": torch.zeros(2, 3, 4),
    }
    changed, named = BAD[name]
    with pytest.raises(ArgumentError, match=named.replace(".", r"\.")):
        ops.selective_scan(**given | changed)


BACKWARD = registry.primitive("selective_scan_backward")
LEARNED = ("small", "plain", "state", "ungated", "token", "prime", "layout_rows", "own_float16", "no_decay")


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
        outputs = ops.selective_scan(*values)
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
    assert set(calls) == {("selective_scan", "torch"), ("selective_scan_backward", "torch")}
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
