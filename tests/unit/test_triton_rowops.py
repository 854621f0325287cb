"""Triton kernels of the norms, activations, softmax, cross entropy, rope and linear, run by Triton's interpreter.

A process either interprets Triton or compiles it, so every family runs in a worker process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.triton_rowops_worker import FAMILIES, PAIRS

pytestmark = pytest.mark.timeout(500)  # the first test of a family waits for its worker
WORKER = Path(__file__).with_name("triton_rowops_worker.py")


@functools.cache
def run_worker(family: str) -> dict[str, Any]:
    """One worker a family, for all dtypes: importing torch and triton costs more than most cases."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(WORKER), family]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_is_within_its_definitions_bound_and_repeats_its_bits(family: str) -> None:
    """All that a worker found in one test: processes that share the tests would each run it."""
    for dtype in (dtype for of, dtype in PAIRS if of == family):
        found = run_worker(family)[dtype]
        errors = found["errors"]
        assert {name.split(" ")[0] for name in errors} == set(FAMILIES[family]), dtype
        assert {n: e for n, e in errors.items() if e != "n/a" and not e <= 1.0} == {}, dtype
        # Ratios of a thousandth everywhere would mean a bound that binds nothing.
        for op in FAMILIES[family]:
            assert max(e for n, e in errors.items() if n.split(" ")[0] == op and e != "n/a") > 0.05, (op, dtype)
        assert found["repeated"] >= 2, dtype
        assert {n: found[n] for n in ("unequal_runs", "changed_inputs", "aliases") if found[n]} == {}, dtype


def test_interpreted_bfloat16_linear_refuses() -> None:
    result = run_worker("matmul")["bfloat16"]
    assert "multiplies bfloat16 as raw integers" in result["refused"]


def test_portable_functions_keep_relative_accuracy() -> None:
    ulp = run_worker("lang")
    assert set(ulp) == {"exp", "sigmoid", "one_minus_sigmoid", "tanh", "cumulative", "density"}
    # exp is numpy's here (2.3 ulp); the interpreter's fma rounds twice, which the tails of the normal feel: x^2/2 <= 50
    limits = {"exp": 2.5, "sigmoid": 4.0, "one_minus_sigmoid": 4.0, "tanh": 3.0, "cumulative": 60.0, "density": 60.0}
    assert {name: worst for name, worst in ulp.items() if worst > limits[name]} == {}
