"""Triton kernels of `tests/ops/FAMILY/rowops.py`, run by Triton's interpreter.

A process either interprets Triton or compiles it, so workers run them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.interpreter import Interpreter
from tests.unit.triton_rowops_worker import FAMILIES

pytestmark = pytest.mark.timeout(500)
REFUSED = {(name, dtype): why for name, one in FAMILIES.items() for dtype, why in getattr(one, "REFUSED", {}).items()}
PAIRS = [  # every layout is tried in float16, so that is the quick one
    pytest.param(family, dtype, marks=[] if dtype == "float16" else [pytest.mark.slow])
    for family in FAMILIES
    for dtype in ("float16", "float32", "bfloat16")
    if (family, dtype) not in REFUSED
]


def interpreted(interpreter: Interpreter, call: str) -> dict[str, Any]:
    program = f"import json; from tests.unit import triton_rowops_worker as worker; print(json.dumps(worker.{call}))"
    result: dict[str, Any] = interpreter.run(program, timeout=500)
    return result


def test_there_are_families() -> None:
    assert len(FAMILIES) >= 5 and sum(len(family.OPS) for family in FAMILIES.values()) >= 18


@pytest.mark.alternate("dtype")
@pytest.mark.parametrize(("family", "dtype"), PAIRS)
def test_every_op_is_within_its_definitions_bound_and_repeats_its_bits(
    family: str, dtype: str, interpreter: Interpreter
) -> None:
    report = interpreted(interpreter, f"work({family!r}, {dtype!r})")
    errors = report["errors"]
    assert {name.split(" ")[0] for name in errors} == {*FAMILIES[family].OPS}
    assert {n: e for n, e in errors.items() if e != "n/a" and not e <= 1.0} == {}
    # Ratios of a thousandth everywhere would mean a bound that binds nothing.
    for op in FAMILIES[family].OPS:
        assert max(e for n, e in errors.items() if n.split(" ")[0] == op and e != "n/a") > 0.05, op
    assert report["repeated"] >= 2
    assert {n: report[n] for n in ("unequal_runs", "changed_inputs", "aliases") if report[n]} == {}


@pytest.mark.parametrize(("family", "dtype"), REFUSED)
def test_what_the_interpreter_cannot_run_is_refused(family: str, dtype: str, interpreter: Interpreter) -> None:
    assert REFUSED[family, dtype] in interpreted(interpreter, f"refusal({family!r}, {dtype!r})")["refused"]


def test_portable_functions_keep_relative_accuracy(interpreter: Interpreter) -> None:
    ulp = interpreted(interpreter, "lang()")
    assert set(ulp) == {"exp", "sigmoid", "one_minus_sigmoid", "tanh", "cumulative", "density"}
    # exp is numpy's here (2.3 ulp); the interpreter's fma rounds twice, which the tails of the normal feel: x^2/2 <= 50
    limits = {"exp": 2.5, "sigmoid": 4.0, "one_minus_sigmoid": 4.0, "tanh": 3.0, "cumulative": 60.0, "density": 60.0}
    assert {name: worst for name, worst in ulp.items() if worst > limits[name]} == {}
