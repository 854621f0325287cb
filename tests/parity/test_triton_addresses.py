"""No Triton kernel reads or writes outside of the tensors that its launch was given, on the ops' own cases."""

from __future__ import annotations

import pytest

from ferryman.dispatch import registry
from tests.interpreter import Interpreter

OPS = [op for op in registry.primitives() if any(x.backend == "triton" for x in registry.implementations(op))]
SECONDS = 6  # of an op: its lines share them, each goes through cases until its part is over
PROGRAM = """
import json, time
import torch
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
from tests.addresses import watched

op = registry.primitive(NAME)
lines = [line for line in registry.implementations(NAME) if line.backend == "triton"]
answers = {}
for line in lines:
    begin, ran, verdicts = time.monotonic(), 0, set()
    with watched() as looking:
        for case in cases_of(op):
            if time.monotonic() - begin > SECONDS / len(lines) and ran:
                break
            before = looking.accesses
            verdict = check_cell(op, line, case, torch.float32, times=1).verdict
            if looking.accesses > before:
                ran += 1
                verdicts.add(verdict)
    answers[line.name] = (ran, looking.accesses, looking.outside[:5], sorted(verdicts))
print(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_kernels_stay_within_their_tensors(name: str, interpreter: Interpreter) -> None:
    answers = interpreter.run(f"NAME, SECONDS = {name!r}, {SECONDS}\n{PROGRAM}")
    assert any(ran for ran, *_ in answers.values()), answers
    assert {line: outside for line, (_, _, outside, _) in answers.items()} == {line: [] for line in answers}
    assert {verdict for *_, verdicts in answers.values() for verdict in verdicts} <= {"SIMULATED"}


PLANTED = """
import json
import torch, triton
import triton.language as tl
from tests.addresses import watched

@triton.jit
def copied(x_ptr, y_ptr, n, READ: tl.constexpr, WRITTEN: tl.constexpr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at, mask=at < READ, other=0.0)
    tl.store(y_ptr + at, tl.where(at < n, x, 0.0), mask=at < WRITTEN)

answers = []
for read, written in ((10, 10), (11, 10), (10, 11)):
    memory = torch.ones(2, 32)
    x, y = memory[0, :10], memory[1, :10]
    with watched() as looking:
        copied[(1,)](x, y, 10, read, written)
    answers.append((looking.accesses, looking.outside, bool((y == 1).all())))
print(json.dumps(answers))
"""


def test_what_no_result_shows_is_seen(interpreter: Interpreter) -> None:
    (right, read, written) = interpreter.run(PLANTED)
    assert right == [2, [], True]
    assert len(read[1]) == 1 and read[1][0].startswith("reads 1 of 11 elsewhere, line 10") and read[2]
    assert len(written[1]) == 1 and written[1][0].startswith("writes 1 of 11 elsewhere")
