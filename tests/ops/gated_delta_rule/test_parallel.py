"""`gated_delta_rule` with all chunks at once: which calls it serves, its gates interpreted, and on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import double
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import ratio
from tests.interpreter import Interpreter

OP, BACKWARD = registry.primitive("gated_delta_rule"), registry.primitive("gated_delta_rule_backward")


def meta(length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    q = torch.empty(1, length, 16, width, dtype=dtype, device="meta")
    v, g = torch.empty(1, length, 32, 128, dtype=dtype, device="meta"), torch.empty(1, length, 32, device="meta")
    return q, q, v, g, g


@pytest.mark.parametrize("device", ["h100", "mi300x", "orin-agx"])
@pytest.mark.parametrize(
    ("length", "width", "forward", "backward"),
    [
        (2048, 128, "triton.parallel", "triton.gradients"),
        (128, 96, "triton.parallel", "triton.gradients"),
        (127, 128, "triton.chunked", "triton.chunked"),
        (2048, 256, "triton.chunked", "triton.chunked"),
        (1, 128, "triton.recurrent", "triton.recurrent"),
    ],
)
def test_two_chunks_or_more_go_to_the_line_that_takes_them_at_once(
    length: int, width: int, forward: str, backward: str, device: str
) -> None:
    q, k, v, g, beta = meta(length, width)
    assert ferryman.explain(ops.gated_delta_rule, q, k, v, g, beta, device=device).chosen == forward
    args = (v, None, q, k, v, g, beta, None, None, True)
    assert ferryman.explain("gated_delta_rule_backward", *args, device=device).chosen == backward


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
found = {}
for name, own in (
    ("gated_delta_rule", "triton.parallel"),
    ("gated_delta_rule_backward", "triton.gradients"),
):
    op, line = registry.primitive(name), registry.implementation(name, own)
    for case in (*cases_of(op), *cases_of(op, "standard")):
        if case.name.startswith(("chunks", "exact_chunks")):
            cell = check_cell(op, line, case, getattr(torch, dtype), simulate=profile(device))
            found[f"{name} {own} {case.name}"] = (cell.implementation, cell.verdict, cell.reason)
print(json.dumps(found))
"""


@pytest.mark.alternate("device", "dtype")
@pytest.mark.parametrize(
    ("device", "dtype"), [("h200", "float32"), ("h200", "bfloat16"), ("mi300x", "float16"), ("rx7900xtx", "bfloat16")]
)
def test_it_passes_every_gate_interpreted(device: str, dtype: str, interpreter: Interpreter) -> None:
    """Ragged lengths, a state and none, deep decays, whole numbers; RDNA has other chunks."""
    outcomes = interpreter.run(f"device, dtype = {device!r}, {dtype!r}\n{INTERPRETED}", timeout=400)
    assert len(outcomes) == 6  # two lines, three cases
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome[:2] != [name.split()[1], "SIMULATED"]}
    assert not wrong


HOSTILE = """
import json, torch
import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import double
from tests.bounded import U32, ratio
op, backward = registry.primitive("gated_delta_rule"), registry.primitive("gated_delta_rule_backward")
draw = torch.Generator().manual_seed(1)
def make(alike, gate, rate, norm, length=130, width=24, dim=5):
    one, all = (torch.randn(1, n, 1, width, generator=draw) for n in (1, length))
    k = alike * one + (1 - alike) * all
    k = k if norm else k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(1, length, 2, dim, generator=draw)
    state = 100 * torch.randn(1, 2, width, dim, generator=draw)
    g = None if gate is None else gate * torch.rand(1, length, 2, generator=draw)
    return torch.randn(k.shape, generator=draw), k, v, g, torch.full((1, length, 2), rate), state, None, norm
found = {}
for name, values in {
    "alike": make(0.99, None, 0.99, True), "the same": make(1.0, -1e-6, 0.999, True),
    "reflections": make(0.7, None, 2.0, False), "forgets": make(0.5, -200.0, 0.5, True),
    "slow": make(1.0, None, 0.01, True), "no rate": make(0.5, -0.1, 0.0, True),
}.items():
    exact = op.body(*double(values))
    terms = op.limits.bound(double(values), exact)
    with ferryman.use(gated_delta_rule="triton.parallel"), ferryman.trace() as trace:
        y, state = ops.gated_delta_rule(*values[:6], scale=None, qk_l2norm=values[7])[:2]
    assert list(trace.calls) == [("gated_delta_rule", "triton.parallel")]
    found[name] = [ratio(got, want, t, U32) for got, want, t in zip((y, state), exact, terms)]
    args = (torch.randn(y.shape, generator=draw), state, *values)
    exact = backward.body(*double(args))
    terms = backward.limits.bound(double(args), exact)
    with ferryman.use(gated_delta_rule_backward="triton.gradients"), ferryman.trace() as trace:
        slopes = ops.gated_delta_rule_backward(*args)
    assert list(trace.calls) == [("gated_delta_rule_backward", "triton.gradients")]
    found[name] += [ratio(*one, U32) for one in zip(slopes, exact, terms) if one[0].numel()]
print(json.dumps(found))
"""


def test_hostile_systems_stay_inside_the_bounds_interpreted(interpreter: Interpreter) -> None:
    """Keys nearly or quite the same, reflections (beta |k|^2 = 2), decays of nothing, no rate, a large first state."""
    ratios = interpreter.run(HOSTILE, timeout=400)
    assert len(ratios) == 6 and all(value <= 1 for values in ratios.values() for value in values), ratios


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("length", "width", "dim"), [(128, 128, 128), (515, 96, 192), (1000, 37, 20)])
def test_real_sizes_are_inside_the_bounds_on_a_device(length: int, width: int, dim: int, dtype: torch.dtype) -> None:
    draw = torch.Generator(device="cuda").manual_seed(1)
    q, k = (torch.randn(2, length, 2, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(2, length, 4, dim, generator=draw, device="cuda").to(dtype)
    g, beta = (torch.rand(2, length, 4, generator=draw, device="cuda") for _ in range(2))
    state = torch.randn(2, 4, width, dim, generator=draw, device="cuda")
    values = (q, k, v, -g, beta.to(dtype), state, None, True)
    with ferryman.trace() as trace:
        y, final = ops.gated_delta_rule(*values[:6], scale=None, qk_l2norm=True)
        slopes = ops.gated_delta_rule_backward(y, final, *values)
    assert set(trace.calls) == {
        ("gated_delta_rule", "triton.parallel"),
        ("gated_delta_rule_backward", "triton.gradients"),
    }
    exact = OP.body(*double(values))
    every = list(zip((y, final), exact, OP.limits.bound(double(values), exact), strict=True))
    args = double((y, final, *values))
    exact = BACKWARD.body(*args)
    every += zip(slopes, exact, BACKWARD.limits.bound(args, exact), strict=True)
    for got, want, terms in every:
        assert ratio(got, want, terms, UNIT[got.dtype]) <= 1


PRODUCTS = """
import json, torch, triton, triton.language as tl
from ferryman.backends import triton_bfloat16
triton_bfloat16.mend()
from ferryman.ops.gated_delta_rule import chunk_kernels
chunk_kernels.INTERPRETED = tl.constexpr(False)  # as on a device
product = chunk_kernels._product
@triton.jit
def multiply(a_ptr, b_ptr, out_ptr):
    n = tl.arange(0, 32)
    at = n[:, None] * 32 + n[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, product(a, b, tl.zeros([32, 32], tl.float32), True))
draw = torch.Generator().manual_seed(3)
found = {}
for name in ("both", "left", "right", "neither"):
    a, b = (torch.randn(32, 32, generator=draw) * 10.0 ** torch.randint(-9, 9, (32, 32), generator=draw) for _ in "ab")
    a = a.bfloat16() if name in ("both", "left") else a
    b = b.bfloat16() if name in ("both", "right") else b
    out = torch.empty(32, 32)
    multiply[(1,)](a, b, out)
    size = a.double().abs() @ b.double().abs()
    found[name] = float(((out - a.double() @ b.double()).abs() / size).max()) * 2.0**24
print(json.dumps(found))
"""


def test_products_of_pieces_have_the_digits_of_float32() -> None:
    """Of a product 2^-21 may be left out, 8 units; the rest is sums. Two pieces of three would be 2^-15 off.

    The program changes what its process has of Ferryman, so that the process is its own.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRODUCTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 4 and all(0 < error <= 12 for error in errors.values()), errors
