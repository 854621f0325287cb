"""Routing against transformers' routers, ties and near-ties, gradients; Triton's kernels, interpreted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.inputs.cases import cases_of, materialise
from ferryman.porting.judging.parity import check_cell
from ferryman.porting.judging.prepared import prepare
from tests.bounded import U32
from tests.interpreter import Interpreter

OP = registry.primitive("gate_topk")
CASES = {case.name: case for case in cases_of(OP)}


def router(home: str, kind: str, config: str, **more: Any) -> Any:
    import transformers

    module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    layer = getattr(module, kind)(getattr(transformers, config)(hidden_size=16, **more)).double()
    torch.manual_seed(0)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    return layer


@pytest.mark.parametrize(
    ("home", "kind", "config", "more", "args"),
    [
        ("mixtral", "MixtralTopKRouter", "MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}, (2,)),
        (
            "olmoe",
            "OlmoeTopKRouter",
            "OlmoeConfig",
            {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
            (4, "softmax", None, 1, 1, False),
        ),
        (
            "deepseek_v3",
            "DeepseekV3TopkRouter",
            "DeepseekV3Config",
            {
                "n_routed_experts": 32,
                "num_experts_per_tok": 5,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
            },
            (5, "sigmoid", "bias", 4, 2, True, 2.5),
        ),
    ],
)
def test_the_definition_is_a_models_router(home: str, kind: str, config: str, more: Any, args: Any) -> None:
    """Their weights are made in float32. A router that does not sort gives the same experts in another order."""
    module = router(home, kind, config, **more)
    bias = None
    if "bias" in args:
        module.e_score_correction_bias.copy_(torch.randn(32).float())
        bias = module.e_score_correction_bias.float()
    args = tuple(bias if isinstance(a, str) and a == "bias" else a for a in args)
    logits, weights, ids = module(torch.randn(50, 16).double())
    topk_weights, places = ops.gate_topk(logits.float(), *args)
    order, theirs = places.argsort(-1), ids.argsort(-1)
    assert torch.equal(places.gather(1, order), ids.gather(1, theirs))
    weights = weights.detach()
    error = (topk_weights.detach().gather(1, order) - weights.gather(1, theirs)).abs()
    assert float((error / weights.abs().max()).max()) <= 64 * U32


def test_the_lowest_index_wins_and_a_bias_is_for_the_choice_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, -0.0, 0.0]])
    weights, ids = ops.gate_topk(logits, 2)
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]] and ids.dtype == torch.int64
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0, 4.0])
    weights, ids = ops.gate_topk(logits, 2, "sigmoid", bias, renormalise=False, ids_dtype=torch.int32)
    assert ids.tolist() == [[4, 5]] and weights.tolist() == [[0.5, 0.5]] and ids.dtype == torch.int32
    # groups of two: sums of sigmoids are the largest in the second group, the largest logit is in the first
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, 1.0]])
    assert ops.gate_topk(logits, 2, "sigmoid", None, 3, 1)[1].tolist() == [[2, 3]]
    assert ops.gate_topk(logits, 2, "softmax", None, 3, 1)[1].tolist() == [[0, 1]]
    odd = torch.tensor([[1.0, float("nan"), float("inf"), float("-inf")]])
    weights, ids = ops.gate_topk(odd, 3)
    assert ids.tolist() == [[1, 2, 0]] and bool(weights.isnan().all())


def judged(case: Any, change: Any) -> str:
    """The verdict on the definition's own results after a change."""
    prepared = prepare(OP, case, torch.float32, torch.device("cpu"))

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        weights, ids = OP.body(*args[:-1])
        return change(weights.clone(), ids.clone(), *args)

    line = registry.implementation("gate_topk", "torch")
    return check_cell(OP, line, case, torch.float32, prepared=prepared, kernel=kernel).verdict


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "glm", "sigmoid_groups", "softmax_biased", "exact_groups"])
def test_a_wrong_choice_is_found(name: str) -> None:
    case = CASES[name]

    def swapped(weights: Tensor, ids: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        ids[2, :2] = ids[2, [1, 0]]
        return weights, ids

    def other(weights: Tensor, ids: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        free = next(e for e in range(args[0].shape[1]) if e not in ids[1])
        ids[1, -1] = free
        return weights, ids

    def biased(weights: Tensor, ids: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return weights * 1.0001, ids

    assert judged(case, lambda w, i, *_: (w, i)) == "PASS"
    assert {judged(case, change) for change in (swapped, other, biased)} == {"FAIL"}


def test_either_choice_is_right_only_where_scores_are_within_their_rounding() -> None:
    """Experts 1 and 2 differ by 1e-9 in the score with its bias; 3 by a thousandth. Their weights are far apart."""
    logits = torch.tensor([[0.0, 1.0, -1.0, -1.0, -8.0]])
    score = torch.sigmoid(logits.double())[0]
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2] = score[1] - score[2] - 1e-9
    bias[3] = score[1] - score[2] - 1e-3
    args = (logits.double(), 2, "sigmoid", bias, 1, 1, False, 1.0, torch.int64)
    exact = OP.body(*args)
    assert exact[1].tolist() == [[1, 2]]
    weights, ids = OP.limits.bound(args, exact)
    assert ids["absolute"].tolist() == [[1.0, 1.0]]
    apart = float(score[1] - score[2])
    assert float((weights["absolute"] - apart).abs().max()) < 1e-9
    args = (logits.double(), 3, *args[2:])
    exact = OP.body(*args)
    assert exact[1].tolist() == [[1, 2, 3]] and OP.limits.bound(args, exact)[1]["absolute"].tolist() == [
        [1.0, 1.0, 0.0]
    ]
    # without a bias the logits themselves are compared, however near
    near = torch.tensor([[1.0, 1.0 + 2.0**-23, 0.0]])
    plain = (near.double(), 2, "sigmoid", None, 1, 1, True, 1.0, torch.int64)
    assert OP.limits.bound(plain, OP.body(*plain))[1]["absolute"].tolist() == [[0.0, 0.0]]
    assert ops.gate_topk(near, 2, "sigmoid")[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_gradients_are_autograds(scoring: str, renormalise: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 12)
    cotangent = torch.randn(9, 3)
    leaf = logits.double().requires_grad_()
    score = torch.softmax(leaf, -1) if scoring == "softmax" else leaf.sigmoid()
    value = score.topk(3).values
    if renormalise:
        value = value / value.sum(-1, keepdim=True)
    (exact,) = torch.autograd.grad(1.5 * value, leaf, cotangent.double())
    own = logits.clone().requires_grad_()
    with ferryman.trace() as trace:
        weights, ids = ops.gate_topk(own, 3, scoring, renormalise=renormalise, scale=1.5)
        (got,) = torch.autograd.grad(weights, own, cotangent)
    assert not ids.requires_grad and list(trace.calls) == [("gate_topk", "torch"), ("gate_topk_backward", "torch")]
    args = (cotangent.double(), logits.double(), ids, scoring, renormalise, 1.5)
    (terms,) = registry.primitive("gate_topk_backward").limits.bound(args, (exact,))
    assert bool(((got - exact).abs() <= U32 * (terms["accumulate"] + exact.abs()) + 2.0**-44).all())


def test_the_oracle_of_a_gradient_holds_where_a_sigmoid_is_1() -> None:
    """s (1 - s), which autograd of `torch.sigmoid` computes, is 0 there; the slope is not."""
    x = torch.tensor([[-800.0, -40.0, -1.0, 0.0, 1.0, 30.0, 40.0, 600.0]], dtype=torch.float64, requires_grad=True)
    weights, ids = OP.body(x, 8, "sigmoid", None, 1, 1, False, 1.0, torch.int64)
    (got,) = torch.autograd.grad(weights.sum(), x)
    slope = torch.sigmoid(x) * torch.sigmoid(-x)
    assert bool(((got - slope).abs() <= 2.0**-50 * slope).all()) and float(got[0, 6]) > 0
    exact = torch.sigmoid(x).gather(1, ids)
    assert bool(((weights - exact).abs() <= 2.0**-50 * exact).all())
    ends = torch.tensor([[torch.inf, 0.0, -torch.inf, torch.nan]], requires_grad=True)
    weights, _ = OP.body(ends, 4, "sigmoid", None, 1, 1, False, 1.0, torch.int64)
    (got,) = torch.autograd.grad(weights.sum(), ends)
    assert weights[0, 1:].tolist() == [1.0, 0.5, 0.0] and got[0, :3].tolist() == [0.0, 0.25, 0.0]
    assert bool(weights[0, 0].isnan()) and bool(got[0, 3].isnan())


def test_hostile_ids_of_a_backward_count_nothing() -> None:
    logits, grad = torch.randn(2, 4), torch.ones(2, 3)
    ids = torch.tensor([[0, 7, -1], [2**31 - 1, -(2**31), 4]], dtype=torch.int32)
    grad_logits = ops.gate_topk_backward(grad, logits, ids, "sigmoid", False, 1.0)
    assert float(grad_logits[0, 0]) > 0 and not bool(grad_logits[0, 1:].any()) and not bool(grad_logits[1].any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 9}, "k is 9"),
        ({"scoring": "relu"}, "scoring is 'relu'"),
        ({"n_group": 3}, "n_group is 3"),
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ({"n_group": 2, "k": 5}, "k is 5"),
        ({"bias": torch.zeros(7)}, r"bias\.shape"),
        ({"ids_dtype": torch.int16}, "ids_dtype is torch.int16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ops.gate_topk(**{"logits": torch.randn(3, 8), "k": 2, **change})


INTERPRETED = """
import json, torch
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
cells = []
for name, wanted in {"gate_topk": "exact_groups", "gate_topk_backward": "exact_pairs"}.items():
    op, line = registry.primitive(name), registry.implementation(name, "triton")
    cells += [check_cell(op, line, case, torch.bfloat16, simulate=profile("h200"))
              for case in cases_of(op) if case.name == wanted]
print(json.dumps({f"{cell.op} {cell.case}": (cell.verdict, cell.reason) for cell in cells}))
"""


def test_the_triton_kernels_are_right_interpreted(interpreter: Interpreter) -> None:
    verdicts = interpreter.run(INTERPRETED)
    assert len(verdicts) == 2 and {verdict for verdict, _ in verdicts.values()} == {"SIMULATED"}, verdicts


def test_materialised_cases_fit() -> None:
    for name, case in CASES.items():
        values = materialise(case, OP, torch.float16)
        OP.check(*values)
        assert OP.meta(*values)[1].shape == (len(values[0]), values[1]), name
