"""ssd_scan's lines for few tokens and for many: where each is chosen, that it is right, interpreted and on a device."""

from __future__ import annotations

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import double
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import ratio
from tests.interpreter import Interpreter

OP = registry.primitive("ssd_scan")


@pytest.mark.parametrize("device", ["h100", "a100", "orin-agx", "mi300x", "rx7900xtx"])
@pytest.mark.parametrize(
    ("length", "width", "chosen"),
    [
        (1, 128, "triton.recurrent"),
        (16, 256, "triton.recurrent"),
        (1, 300, "triton.chunked"),
        (17, 128, "triton.chunked"),
        (64, 128, "triton.chunked"),
        (65, 128, "triton.parallel"),
        (2048, 300, "triton.parallel"),
    ],
)
def test_few_tokens_and_many_have_lines_of_their_own(length: int, width: int, chosen: str, device: str) -> None:
    kind = {"dtype": torch.bfloat16, "device": "meta"}
    x, dt = torch.empty(2, length, 8, 64, **kind), torch.empty(2, length, 8, **kind)  # type: ignore[call-overload]
    b, own = torch.empty(2, length, 1, width, **kind), torch.empty(8, device="meta")  # type: ignore[call-overload]
    assert ferryman.explain(ops.ssd_scan, x, dt, own, b, b, own, own, device=device).chosen == chosen


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op, outcomes = registry.primitive("ssd_scan"), {}
for case in cases_of(op):
    length = case.args["x"].shape[1]
    if length <= 16 or length >= 65:
        own = "triton.recurrent" if length <= 16 else "triton.parallel"
        line = registry.implementation("ssd_scan", own)
        cell = check_cell(op, line, case, getattr(torch, dtype), simulate=profile(device))
        outcomes[f"{own} {case.name}"] = (cell.implementation, cell.verdict, cell.reason)
print(json.dumps(outcomes))
"""


@pytest.mark.alternate("device", "dtype")
@pytest.mark.parametrize(
    ("device", "dtype"), [("h100", "float32"), ("h100", "bfloat16"), ("mi300x", "float16"), ("rx7900xtx", "bfloat16")]
)
def test_each_passes_every_gate_interpreted(device: str, dtype: str, interpreter: Interpreter) -> None:
    """Ragged lengths, blocks of dimensions and columns, a state and none, resets, whole numbers, nothing at all."""
    outcomes = interpreter.run(f"device, dtype = {device!r}, {dtype!r}\n{INTERPRETED}", timeout=400)
    lines = [name.split()[0] for name in outcomes]
    assert lines.count("triton.recurrent") >= 7 and lines.count("triton.parallel") >= 6
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome[:2] != [name.split()[0], "SIMULATED"]}
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("length", "heads", "dim", "groups", "width"), [(1, 80, 64, 1, 128), (16, 6, 61, 2, 250), (515, 8, 64, 2, 256)]
)
def test_real_sizes_are_inside_the_bounds_on_a_device(
    length: int, heads: int, dim: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator(device="cuda").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda")

    x, dt = drawn(2, length, heads, dim).to(dtype), drawn(2, length, heads).to(dtype)
    b, c = (drawn(2, length, groups, width).to(dtype) for _ in "bc")
    values = (x, dt, -drawn(heads).abs(), b, c, drawn(heads), drawn(heads), drawn(2, heads, dim, width), True)
    with ferryman.trace() as trace:
        outputs = ops.ssd_scan(*values)
    assert list(trace.calls) == [("ssd_scan", "triton.recurrent" if length <= 16 else "triton.parallel")]
    args = double((*values, False, None, None))
    exact = OP.body(*args)
    for got, want, terms in zip(outputs, exact, OP.limits.bound(args, exact), strict=True):
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1
