"""`triton.spans` of gated_delta_rule_backward: where it stands, its gates interpreted, its tables, and on a device."""

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

OP = registry.primitive("gated_delta_rule_backward")


@pytest.mark.parametrize(("length", "chosen"), [(2048, "triton.gradients"), (16_384, "triton.spans")])
def test_it_leads_where_sequences_are_long(length: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 15,376 was timed, and none that is short."""
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    q, v = (torch.empty(1, length, n, 128, dtype=torch.bfloat16, device="meta") for n in (16, 32))
    rate = torch.empty(1, length, 32, device="meta")
    choice = ferryman.explain(OP.name, v, None, q, q, v, rate, rate, None, None, True, device="h100")
    assert choice.chosen == chosen


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
name, own = "gated_delta_rule_backward", "triton.spans"
op, line = registry.primitive(name), registry.implementation(name, own)
found = {}
for case in (*cases_of(op), *cases_of(op, "standard")):
    if case.name.startswith(("chunks", "exact_chunks")):
        cell = check_cell(op, line, case, torch.bfloat16, simulate=profile("h100"))
        found[case.name] = (cell.implementation, cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_it_passes_every_gate_interpreted(interpreter: Interpreter) -> None:
    """Ragged lengths, a state and none, deep decays, whole numbers."""
    outcomes = interpreter.run(INTERPRETED, timeout=400)
    assert len(outcomes) == 3
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome[:2] != ["triton.spans", "SIMULATED"]}
    assert not wrong


HOSTILE = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.ops.gated_delta_rule.spans_kernels import gated_delta_rule_backward
from ferryman.porting.inputs.cases import double
from tests.bounded import U32, ratio
op = registry.primitive("gated_delta_rule_backward")
draw = torch.Generator().manual_seed(1)
def make(alike, gate, rate, norm, length=130, heads=2, width=24, dim=5):
    one, all = (torch.randn(1, n, 1, width, generator=draw) for n in (1, length))
    k = alike * one + (1 - alike) * all
    k = k if norm else k / k.norm(dim=-1, keepdim=True)
    q, (v, grad) = torch.randn(k.shape, generator=draw), torch.randn(2, 1, length, heads, dim, generator=draw)
    state, late = 100 * torch.randn(2, 1, heads, width, dim, generator=draw)
    g = None if gate is None else gate * torch.rand(1, length, heads, generator=draw)
    return grad, late, q, k, v, g, torch.full((1, length, heads), rate), state, None, norm
found = {}
for name, args in {
    "alike": make(0.99, None, 0.99, True), "the same": make(1.0, -1e-6, 0.999, True),
    "reflections": make(0.7, None, 2.0, False), "forgets": make(0.5, -200.0, 0.5, True),
    "slow": make(1.0, None, 0.01, True), "no rate": make(0.5, -0.1, 0.0, True),
    "two blocks": make(0.5, -0.5, 0.9, True, 129, 3, 70, 70),
}.items():
    exact = op.body(*double(args))
    slopes = gated_delta_rule_backward(*args, target_of(profile("h100")))
    terms = op.limits.bound(double(args), exact)
    found[name] = [ratio(*one, U32) for one in zip(slopes, exact, terms) if one[0].numel()]
print(json.dumps(found))
"""


def test_hostile_systems_stay_inside_the_bounds_interpreted(interpreter: Interpreter) -> None:
    """In float32, whose bounds show more than the line's own bfloat16: keys nearly or quite the same, reflections
    (beta |k|^2 = 2), decays of nothing, no rate, large states; three heads to a key, and two blocks of columns."""
    ratios = interpreter.run(HOSTILE, timeout=400)
    assert len(ratios) == 7 and all(value <= 1 for values in ratios.values() for value in values), ratios


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "width", "dim"), [(128, 128, 128), (515, 96, 192), (1000, 37, 20)])
def test_real_sizes_are_inside_the_bounds_on_a_device(length: int, width: int, dim: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the line is for Hopper")
    dtype = torch.bfloat16
    draw = torch.Generator(device="cuda").manual_seed(1)
    q, k = (torch.randn(2, length, 2, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    v, grad = (torch.randn(2, length, 4, dim, generator=draw, device="cuda").to(dtype) for _ in range(2))
    g, beta = (torch.rand(2, length, 4, generator=draw, device="cuda") for _ in range(2))
    state, late = (torch.randn(2, 4, width, dim, generator=draw, device="cuda") for _ in range(2))
    args = (grad, late, q, k, v, -g, beta.to(dtype), state, None, True)
    with ferryman.use(gated_delta_rule_backward="triton.spans"), ferryman.trace() as trace:
        slopes = ops.gated_delta_rule_backward(*args)
    assert list(trace.calls) == [(OP.name, "triton.spans")]
    exact = OP.body(*double(args))
    for got, want, terms in zip(slopes, exact, OP.limits.bound(double(args), exact), strict=True):
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1
