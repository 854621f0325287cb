"""bias_act against the functionals of PyTorch and transformers, and what its cases are made of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import ferryman
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.bias_act.definition import ACTIVATIONS, bias_act
from ferryman.porting.inputs.cases import cases_of, double, materialise
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32, beyond
from tests.interpreter import Interpreter
from tests.ops.bias_act import independent

OP = registry.primitive("bias_act")
BACKWARD = registry.primitive("bias_act_backward")
CASES = {case.name: case for case in cases_of(OP)}
ALPHA = {"leaky_relu": 0.25, "elu": 0.25, "softcap": 30.0}


def drawn(activation: str, kind: str, seed: int = 0) -> tuple[Any, ...]:
    values = double(materialise(CASES[f"{activation}_{kind}"], OP, torch.float32, seed))
    return (*values[:3], ALPHA.get(activation))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        *((name, name) for name in ("relu2", "quick_gelu", "gelu", "silu", "sigmoid")),
        *(("gelu_tanh", name) for name in ("gelu_pytorch_tanh", "gelu_new")),
    ],
)
def test_the_definition_is_transformers_activation(mine: str, theirs: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    x = drawn(mine, "plain")[0]
    exact = activations.ACT2FN[theirs](x)
    (terms,) = OP.limits.bound((x, None, mine, None), (exact,))
    assert beyond(OP.body(x, None, mine, None), exact, terms) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_another_activation_is_beyond_the_bound(activation: str) -> None:
    x, bias, name, alpha = drawn(activation, "bias")
    exact = independent.bias_act(x, bias, name, alpha)
    (terms,) = OP.limits.bound((x, bias, name, alpha), (exact,))
    for other in set(ACTIVATIONS) - {activation}:
        assert beyond(OP.body(x, bias, other, ALPHA.get(other)), exact, terms) > 100, other
    assert beyond(OP.body(x, None, name, alpha), exact, terms) > 100
    assert beyond(OP.body(x, bias.roll(1), name, alpha), exact, terms) > 100


def test_alpha_is_what_pytorchs_functionals_take_without_one() -> None:
    z = torch.linspace(-3, 3, 64, dtype=torch.float64)
    assert torch.equal(OP.body(z, None, "leaky_relu", None), functional.leaky_relu(z))
    (terms,) = OP.limits.bound((z, None, "elu", None), (functional.elu(z),))
    assert beyond(OP.body(z, None, "elu", None), functional.elu(z), terms) <= 1


def test_cases_meet_the_kinks() -> None:
    x, bias, *_ = drawn("hardswish", "kinks")
    assert {-3.0, 0.0, 3.0} <= set((x + bias).unique().tolist())


def test_it_runs_through_dispatch_compiled_and_trains() -> None:
    x, bias, *_ = materialise(CASES["silu_bias"], OP, torch.bfloat16)
    with ferryman.trace() as trace:
        y = bias_act(x, bias, "silu")
    assert list(trace.calls) == [("bias_act", "torch")]
    assert torch.equal(torch.ops.ferryman.bias_act.default(x, bias, "silu", None), y)
    compiled = torch.compile(lambda *args: bias_act(*args, "silu"), backend="eager", fullgraph=True)
    with ferryman.trace() as trace:
        lowered = compiled(x, bias)
    assert not trace.calls and torch.equal(lowered, OP.body(x, bias, "silu", None))  # it became its definition
    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    with ferryman.trace() as trace:
        bias_act(*leaves, "silu").backward(torch.ones_like(y))
    assert list(trace.calls) == [("bias_act", "torch"), ("bias_act_backward", "torch")]
    wanted = BACKWARD.body(*double((torch.ones_like(y), x, bias)), "silu", None)
    terms = BACKWARD.limits.bound((*double((torch.ones_like(y), x, bias)), "silu", None), wanted)
    for leaf, exact, allowed in zip(leaves, wanted, terms, strict=True):
        assert leaf.grad is not None
        room = UNIT[leaf.dtype] * exact.abs() + U32 * allowed["accumulate"] + allowed["absolute"]
        assert bool(((leaf.grad.double() - exact).abs() <= room).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "mish"}, r"activation is 'mish'; required: gelu, gelu_tanh"),
        ({"alpha": 0.5}, r"alpha is 0\.5; required: None with gelu; leaky_relu, elu, softcap have one"),
        ({"activation": "softcap"}, r"alpha is None; required: the cap of softcap, from 1e-18 to 1e\+18"),
        ({"activation": "softcap", "alpha": -30.0}, r"alpha is -30\.0; required: the cap of softcap"),
        ({"activation": "softcap", "alpha": float("inf")}, r"alpha is inf; required: the cap of softcap"),
        ({"activation": "elu", "alpha": float("nan")}, r"alpha is nan; required: a finite number"),
        ({"bias": torch.ones(8)}, r"bias\.shape is \(8,\); required: \(9,\)"),
        ({"bias": torch.ones(1, 9)}, r"bias\.shape is \(1, 9\)"),
        ({"bias": torch.ones(9).double()}, r"bias\.dtype is torch\.float64"),
        ({"x": torch.ones(())}, r"x\.dim\(\) is 0; required: at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bias_act(**{"x": torch.ones(5, 9), "bias": torch.ones(9), "activation": "gelu", **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
names = {"bias_act": ("elu_tiny", "hardswish_kinks"), "bias_act_backward": ("exact_silu", "many_rows", "layout_rows")}
found = {}
for op in map(registry.primitive, names):
    line = registry.implementation(op.name, "triton" if op.name == "bias_act" else "triton.columns")
    for case in cases_of(op):
        if case.name in names[op.name]:
            cell = check_cell(op, line, case, torch.float16, simulate=profile("h200"))
            found[f"{op.name} {case.name}"] = (cell.verdict, cell.reason)
print(json.dumps(found))
"""


def test_the_triton_kernels_are_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 5 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_a_peer_that_computes_it(activation: str) -> None:
    """`benchmarks/goals.py` times ours beside PyTorch's of each."""
    functions = load(Path(__file__).parents[3] / "benchmarks" / "peers" / "_functions.py")
    x, bias, *_ = drawn(activation, "bias")
    alpha = ALPHA.get(activation)
    args = x, bias, activation, alpha
    exact = OP.body(*args)
    (terms,) = OP.limits.bound(args, (exact,))
    assert beyond(functions.bias_act(*args), exact, terms) <= 1


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
