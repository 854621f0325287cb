"""`gated_delta_rule` of few tokens, and its gradients: which calls have these lines, gates interpreted, a device."""

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

OP, BACKWARD = registry.primitive("gated_delta_rule"), registry.primitive("gated_delta_rule_backward")


@pytest.mark.parametrize("device", ["h100", "a100", "orin-agx", "mi300x", "rx7900xtx"])
@pytest.mark.parametrize(
    ("length", "width", "chosen"),
    [
        (1, 128, "triton.recurrent"),
        (16, 256, "triton.recurrent"),
        (1, 257, "triton.chunked"),
        (17, 9, "triton.chunked"),
    ],
)
def test_few_tokens_have_a_line_of_their_own(length: int, width: int, chosen: str, device: str) -> None:
    q = torch.empty(2, length, 16, width, dtype=torch.bfloat16, device="meta")
    v, g = q.new_empty(2, length, 32, 128), torch.empty(2, length, 32, device="meta")
    assert ferryman.explain(ops.gated_delta_rule, q, q, v, g, g, device=device).chosen == chosen
    args = (v, None, q, q, v, g, g, None, None, True)
    assert ferryman.explain("gated_delta_rule_backward", *args, device=device).chosen == chosen


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
outcomes = {}
for name in ("gated_delta_rule", "gated_delta_rule_backward"):
    op, line = registry.primitive(name), registry.implementation(name, "triton.recurrent")
    for case in cases_of(op):
        if case.args["q"].shape[1] <= 16:
            cell = check_cell(op, line, case, getattr(torch, dtype), simulate=profile(device))
            outcomes[f"{name} {case.name}"] = (cell.implementation, cell.verdict, cell.reason)
print(json.dumps(outcomes))
"""


@pytest.mark.alternate("device", "dtype")
@pytest.mark.parametrize(
    ("device", "dtype"), [("h100", "float32"), ("h100", "bfloat16"), ("mi300x", "float16"), ("rx7900xtx", "bfloat16")]
)
def test_each_passes_every_gate_interpreted(device: str, dtype: str, interpreter: Interpreter) -> None:
    """One token and several, a state and none, resets, whole numbers, what is not finite, nothing at all."""
    outcomes = interpreter.run(f"device, dtype = {device!r}, {dtype!r}\n{INTERPRETED}", timeout=400)
    assert len(outcomes) >= 24
    assert not {name: one for name, one in outcomes.items() if one[:2] != ["triton.recurrent", "SIMULATED"]}


HOSTILE = """
import json, torch
import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import double
from tests.bounded import U32, ratio
op, backward = registry.primitive("gated_delta_rule"), registry.primitive("gated_delta_rule_backward")
draw = torch.Generator().manual_seed(1)
def make(length, groups, heads, width, dim, alike=0.0, gate=-0.5, rate=None, norm=True, state=1.0):
    one, each = (torch.randn(2, n, groups, width, generator=draw) for n in (1, length))
    k = alike * one + (1 - alike) * each
    k = k if norm else k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(2, length, dim, heads, generator=draw).transpose(2, 3)
    beta = torch.rand(2, length, heads, generator=draw) if rate is None else torch.full((2, length, heads), rate)
    before = None if state is None else state * torch.randn(2, heads, dim, width, generator=draw).transpose(2, 3)
    g = None if gate is None else gate * torch.rand(2, length, heads, generator=draw)
    return torch.randn(k.shape, generator=draw), k, v, g, beta, before, None, norm
outcomes = {}
for name, values in {
    "one": make(1, 2, 6, 37, 45), "one alone": make(1, 1, 1, 128, 33, state=None),
    "blocks": make(3, 1, 3, 129, 41), "sixteen": make(16, 2, 4, 24, 13), "one column": make(5, 1, 2, 3, 1),
    "many heads": make(1, 1, 40, 256, 19), "alike": make(16, 1, 2, 24, 5, 0.99, None, 0.99, state=100.0),
    "the same": make(9, 1, 2, 24, 5, 1.0, -1e-6, 0.999, state=100.0),
    "reflections": make(7, 1, 2, 24, 5, 0.7, None, 2.0, False, state=100.0),
    "forgets": make(6, 1, 2, 24, 5, 0.5, -200.0, 0.5), "no rate": make(4, 1, 2, 24, 5, 0.5, -0.1, 0.0),
}.items():
    exact = op.body(*double(values))
    terms = op.limits.bound(double(values), exact)
    with ferryman.use(gated_delta_rule="triton.recurrent"), ferryman.trace() as trace:
        y, state = ops.gated_delta_rule(*values[:6], scale=None, qk_l2norm=values[7])
    assert list(trace.calls) == [("gated_delta_rule", "triton.recurrent")]
    ratios = [ratio(got, want, t, U32) for got, want, t in zip((y, state), exact, terms)]
    args = (torch.randn(y.shape, generator=draw), state, *values)
    exact = backward.body(*double(args))
    terms = backward.limits.bound(double(args), exact)
    with ferryman.use(gated_delta_rule_backward="triton.recurrent"), ferryman.trace() as trace:
        slopes = ops.gated_delta_rule_backward(*args)
    assert list(trace.calls) == [("gated_delta_rule_backward", "triton.recurrent")]
    outcomes[name] = ratios + [ratio(*one, U32) for one in zip(slopes, exact, terms) if one[0].numel()]
print(json.dumps(outcomes))
"""


def test_ragged_and_hostile_calls_stay_inside_the_bounds_interpreted(interpreter: Interpreter) -> None:
    """Blocks of columns, turned states, heads that share, keys nearly or quite the same, reflections (beta |k|^2 = 2),
    decays of nothing, no rate, a large first state."""
    ratios = interpreter.run(HOSTILE, timeout=400)
    assert len(ratios) == 11 and all(value <= 1 for values in ratios.values() for value in values), ratios


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("length", "width", "dim"), [(1, 128, 128), (1, 96, 192), (5, 256, 64), (16, 37, 20)])
def test_real_sizes_are_inside_the_bounds_on_a_device(length: int, width: int, dim: int, dtype: torch.dtype) -> None:
    draw = torch.Generator(device="cuda").manual_seed(1)
    q, k = (torch.randn(3, length, 2, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(3, length, 4, dim, generator=draw, device="cuda").to(dtype)
    g, beta = (torch.rand(3, length, 4, generator=draw, device="cuda") for _ in range(2))
    state = torch.randn(3, 4, width, dim, generator=draw, device="cuda")
    values = (q, k, v, -g, beta.to(dtype), state, None, True)
    with ferryman.trace() as trace:
        y, final = ops.gated_delta_rule(*values[:6], scale=None, qk_l2norm=True)
        slopes = ops.gated_delta_rule_backward(y, final, *values)
    assert {line for _, line in trace.calls} == {"triton.recurrent"}
    exact = OP.body(*double(values))
    every = list(zip((y, final), exact, OP.limits.bound(double(values), exact), strict=True))
    args = double((y, final, *values))
    exact = BACKWARD.body(*args)
    every += zip(slopes, exact, BACKWARD.limits.bound(args, exact), strict=True)
    for got, want, terms in every:
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1
