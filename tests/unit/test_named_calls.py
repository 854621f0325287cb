"""`benchmarks/calls.py` and what ops' evidence names for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ferryman.dispatch import registry

FILE = Path(__file__).parents[2] / "benchmarks" / "calls.py"
NAMED = [(op.name, name) for op in registry.primitives().values() for name in registry.evidence(op).contents]


@pytest.fixture(scope="module")
def calls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_calls", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_op_s_first_call_comes_before_any_op_s_second(calls: ModuleType) -> None:
    ops = [call.op.name for call in calls.calls(None)]
    firsts = list(dict.fromkeys(ops))
    assert ops[: len(firsts)] == firsts and set(firsts) == set(registry.primitives())
    assert {call.op.name for call in calls.calls(["softmax"])} == {"softmax"}


@pytest.mark.parametrize(("op", "name"), NAMED)
def test_what_evidence_names_is_a_case_of_that_name(op: str, name: str) -> None:
    case = registry.evidence(registry.primitive(op)).named
    assert case is not None and case(name).name == name
