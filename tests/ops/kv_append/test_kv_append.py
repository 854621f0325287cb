"""kv_append against a plain loop over tokens, and what its cases are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.kv_append.definition import kv_append
from ferryman.porting.inputs.cases import cases_of, materialise
from tests.interpreter import Interpreter
from tests.ops.kv_append.independent import appended

OP = registry.primitive("kv_append")
CASES = {case.name: case for case in cases_of(OP)}


@pytest.mark.parametrize("name", CASES)
def test_the_definition_and_the_call_write_what_a_loop_writes(name: str) -> None:
    values = materialise(CASES[name], OP, torch.bfloat16)
    k, v, k_cache, v_cache, slots, *_ = values
    wanted = appended(k, k_cache, slots), appended(v, v_cache, slots)
    for got, want in zip(OP.body(*values), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    with ferryman.trace() as trace:
        caches = kv_append(k, v, k_cache, v_cache, slots)
    assert list(trace.calls) == [("kv_append", "torch")]
    assert caches[0].data_ptr() == k_cache.data_ptr() and caches[1].data_ptr() == v_cache.data_ptr()
    for got, want in zip((k_cache, v_cache), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_slots_are_different_or_skipped() -> None:
    k, _, k_cache, _, slots, *_ = materialise(CASES["more_tokens_than_slots"], OP, torch.float16)
    places = k_cache.shape[0] * k_cache.shape[1]
    used = slots[(slots >= 0) & (slots < places)].tolist()
    assert len(used) == len(set(used)) > 0
    assert {-1, places, 2**31 - 1, -(2**31)} <= set(slots.tolist()) and len(k) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(2)}, r"slots\.dtype is torch\.float32"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots\.shape is \(3,\); required: \(2,\)"),
        (
            {"k_cache": torch.zeros(4, 8, 1, 6)},
            r"k_cache\.shape is \(4, 8, 1, 6\); required: \(pages, page_size, 1, 4\)",
        ),
        ({"v_cache": torch.zeros(4, 9, 1, 4)}, r"v_cache\.shape"),
        ({"v": torch.zeros(2, 1, 4).half()}, r"v\.dtype"),
        ({"k_cache": torch.zeros(1, 8, 1, 4).expand(4, 8, 1, 4)}, r"k_cache\.stride\(\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    given = {
        "k": torch.zeros(2, 1, 4),
        "v": torch.zeros(2, 1, 4),
        "k_cache": torch.zeros(4, 8, 1, 4),
        "v_cache": torch.zeros(4, 8, 1, 4),
        "slots": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ArgumentError, match=message):
        kv_append(**{**given, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op, line = registry.primitive("kv_append"), registry.implementation("kv_append", "triton")
names = ("int32", "mla", "odd", "cache_last", "no_values", "more_tokens_than_slots")
cells = [check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
         for case in cases_of(op) if case.name in names]
print(json.dumps({cell.case: (cell.verdict, cell.reason) for cell in cells}))
"""


def test_the_triton_kernel_is_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 6 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts
