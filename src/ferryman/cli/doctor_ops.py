"""What is wrong in another package's op: each of its functions runs once, on the op's first small case, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import resolve
from ferryman.dispatch import foreign, registry, select
from ferryman.errors import STOPS, EvidenceError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Cost, Primitive
from ferryman.porting.inputs.cases import (
    as_tuple,
    cases_of,
    double,
    dtype_of,
    materialise,
    must_be_arguments,
    specs_of,
)
from ferryman.porting.judging.metrics import terms_of


def faults(op: Primitive) -> dict[str, str]:
    """What fails -> why: "evidence OP", "check OP", "meta OP", "cost OP", "bound OP", "clauses OP LINE",
    "line OP LINE"."""
    wrong: dict[str, str] = {}

    def attempt(what: str, function: Callable[[], Any]) -> Any:
        """What a function gives; None where it raised, which is written down."""
        try:
            with registry.blamed(op):
                return function()
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - another package's code may raise anything
            wrong[what] = foreign.reason_of(error)
            return None

    for line in registry.implementations(op.name):
        if line.backend not in registry.backends():
            error = UnknownName("backend", line.backend, registry.backends())
            wrong[f"line {op.name} {line.name}"] = foreign.reason_of(error)
    attempt(f"evidence {op.name}", lambda: _require_cases(op))
    case = None if f"evidence {op.name}" in wrong else next(iter(cases_of(op)), None)
    if case is None:
        return wrong
    with torch.no_grad():
        args = attempt(f"evidence {op.name}", lambda: materialise(case, op, registry.evidence(op).dtypes[0]))
        if args is None:
            return wrong
        attempt(f"check {op.name}", lambda: op.check(*args))
        attempt(f"meta {op.name}", lambda: _require_outputs(op, op.meta(*args)))
        attempt(f"cost {op.name}", lambda: _require_cost(op, op.cost(*args)))
        attempt(f"bound {op.name}", lambda: _require_terms(op, double(args)))
        for line in registry.implementations(op.name):
            attempt(f"clauses {op.name} {line.name}", partial(_ask, op, line, args))
    return wrong


def _require_cases(op: Primitive) -> None:
    """Raises EvidenceError for cases of an unknown dtype or argument."""
    for case in cases_of(op):
        must_be_arguments(case, op)
        for spec in specs_of(case):
            dtype_of(spec, torch.float32)


def _require_outputs(op: Primitive, given: Any) -> None:
    """Raises EvidenceError where meta gives other than a tensor for each output."""
    kinds = [type(one).__name__ for one in (given if isinstance(given, tuple | list) else (given,))]
    several = isinstance(given, tuple | list)
    single = isinstance(given, Tensor) and len(op.outputs) == 1
    if single or (several and len(given) == len(op.outputs) and all(isinstance(one, Tensor) for one in given)):
        return
    raise EvidenceError(f"its meta gives {', '.join(kinds)}; required: a Tensor for each of {', '.join(op.outputs)}")


def _require_cost(op: Primitive, given: Any) -> None:
    """Raises EvidenceError where cost gives other than a Cost of two numbers, finite and not negative."""
    if not isinstance(given, Cost):
        raise EvidenceError(f"its cost gives {type(given).__name__}; required: Cost")
    for name, value in (("flops", given.flops), ("bytes", given.bytes)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise EvidenceError(f"its cost's {name} is {value!r}; required: a finite number, 0 or more")


def _require_terms(op: Primitive, args: tuple[Any, ...]) -> None:
    """Raises EvidenceError where the bound gives terms that do not fit the definition's results, or that bound nothing:
    a NaN or a negative one where the result is finite."""
    results = as_tuple(op.body(*args))
    for output, result, terms in zip(op.outputs, results, terms_of(op, args, results), strict=True):
        for name, term in terms.items():
            if not isinstance(term, Tensor):
                continue
            if term.is_floating_point() and not bool(((term >= 0) | ~result.isfinite()).all()):
                raise EvidenceError(f"its bound's {name!r} of {output} has NaN or numbers below 0; required: 0 or more")


def _ask(op: Primitive, line: Implementation, args: tuple[Any, ...]) -> None:
    """Ask every clause of a line about the call, as dispatch does."""
    view = select.View.of(op, args, resolve("cpu"))
    for clause in (*line.when, *line.leads, *line.differentiable_when):
        if not clause.holds(view):
            clause.reason(view)
