"""`explain` says what a Triton line would launch, for every op and line, and takes every argument of a schema."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import ferryman
from ferryman.backends import triton
from ferryman.dispatch import registry
from ferryman.errors import CompileError
from ferryman.porting.bench import grid
from ferryman.porting.inputs.cases import cases_of
from tests.cli.run import ferryman as run


@pytest.mark.parametrize("name", registry.primitives())
def test_every_triton_line_says_what_it_launches(name: str) -> None:
    op = registry.primitive(name)
    lines = [line for line in registry.implementations(name) if line.backend == "triton"]
    chosen: Counter[str] = Counter()
    for case in list(cases_of(op))[:2]:
        args = dict(zip(op.names, grid.on_meta(op, case, torch.bfloat16), strict=True))
        for line in lines:
            with ferryman.use(**{name: line.name}):
                answer = ferryman.explain(name, device="h200", **args)
            if answer.chosen is None:
                continue
            chosen[line.name] += 1
            assert "warps" in "".join(answer.launches) or not any(
                t.numel() for t in args.values() if isinstance(t, torch.Tensor)
            ), (line.name, case.name)
            assert all(one in str(answer) for one in answer.launches) and answer.to_dict()["launches"] == [
                *answer.launches
            ]
    assert chosen or not lines


def test_lines_that_launch_no_triton_kernel_say_nothing() -> None:
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    for line in ("cuda", "torch"):
        with ferryman.use(rms_norm=line):
            assert ferryman.explain("rms_norm", x, weight, device="h200").launches == ()


def test_what_is_interpreted_or_cannot_be_said_leaves_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, device="meta")
    whole = ferryman.explain("attention", q, q, q, device="h200")
    assert whole.launches
    monkeypatch.setattr(triton, "interpreting", lambda: True)
    assert ferryman.explain("attention", q, q, q, device="h200").rows == whole.rows
    monkeypatch.setattr(triton, "interpreting", lambda: False)

    def absent(line: object) -> object:
        raise CompileError("triton", "attention", "sm_90", "no Triton here")

    monkeypatch.setattr(registry, "launcher", absent)
    assert ferryman.explain("attention", q, q, q, device="h200").launches == ()
    monkeypatch.setattr(registry, "launcher", lambda line: lambda *args: args[99])
    (answer,) = ferryman.explain("attention", q, q, q, device="h200").launches
    assert "IndexError" in answer


def test_the_command_takes_an_op_whose_schema_has_more_arguments() -> None:
    shapes = ["--arg", "k_cache=4,16,8,128", "--arg", "v_cache=4,16,8,128", "--arg", "slots=4"]
    done = run("explain", "kv_append", "--shape", "4,8,128", "--device", "h100", *shapes)
    assert done.code == 0 and "-> triton" in done.out and "launches" in done.out
