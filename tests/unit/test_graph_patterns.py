"""Regions of graphs that are an op, in many spellings, are found; what looks like one and is another function stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from ferryman.porting.graph import patterns
from ferryman.porting.graph.nodes import HALF
from ferryman.porting.graph.record import record
from tests import graph_spellings as written
from tests.graphs import at_output, far, normal, placed, rewritten

DTYPES = (torch.float32, torch.bfloat16)
X, W = (3, 5, 64), (64,)


def _right(op: str, function: Any, args: Any, times: int = 1) -> None:
    report, _, output = rewritten(function, args)
    assert placed(report).get(op) == times, [(e.op, e.verdict, e.reason) for e in report.entries]
    # what the graph gives now: in float32 the same sums in another order, in 16 bits fewer roundings (4 of 2^-8)
    limit = 2.0**-6 if args[0].dtype in HALF else 2.0**-18
    assert far(output, function(*args)) < limit


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.RMS)
def test_an_rms_norm_is_found(name: str, dtype: torch.dtype) -> None:
    _right("rms_norm", written.RMS[name], (normal(*X, dtype=dtype), normal(*W, dtype=dtype, seed=1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.LAYER)
def test_a_layer_norm_is_found(name: str, dtype: torch.dtype) -> None:
    args = (normal(*X, dtype=dtype), normal(*W, dtype=dtype, seed=1), normal(*W, dtype=dtype, seed=2))
    _right("layer_norm", written.LAYER[name], args)


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.GATED)
def test_a_gated_activation_is_found(name: str, dtype: torch.dtype) -> None:
    op, function = written.GATED[name]
    _right(op, function, (normal(*X, dtype=dtype), normal(*X, dtype=dtype, seed=1)))


def _rope_args(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k = normal(2, 7, 4, 32, dtype=dtype).transpose(1, 2), normal(2, 7, 2, 32, dtype=dtype, seed=1).transpose(1, 2)
    angle = normal(1, 7, 32, seed=2)
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.ROPE)
def test_a_rotary_embedding_is_found(name: str, dtype: torch.dtype) -> None:
    _right("rope", written.ROPE[name], _rope_args(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.ADDED)
def test_a_norm_after_an_addition_is_one_op(name: str, dtype: torch.dtype) -> None:
    args = (normal(*X, dtype=dtype), normal(*X, dtype=dtype, seed=3), normal(*W, dtype=dtype, seed=1))
    _right("add_rms_norm", written.ADDED[name], args)


def _wrong(op: str, function: Any, args: Any) -> None:
    """The op does not make the result, and what was placed within is right."""
    report, gm, output = rewritten(function, args)
    assert op not in at_output(report, gm), [(e.op, e.where, e.verdict) for e in report.entries]
    if args[0].dtype == torch.float32 and placed(report):
        assert far(output, function(*args)) < 2.0**-16


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.LOOKALIKE_RMS)
def test_what_is_no_rms_norm_stays(name: str, dtype: torch.dtype) -> None:
    _wrong("rms_norm", written.LOOKALIKE_RMS[name], (normal(*X, dtype=dtype), normal(*W, dtype=dtype, seed=1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.LOOKALIKE_LAYER)
def test_what_is_no_layer_norm_stays(name: str, dtype: torch.dtype) -> None:
    args = (normal(*X, dtype=dtype), normal(*W, dtype=dtype, seed=1), normal(*W, dtype=dtype, seed=2))
    _wrong("layer_norm", written.LOOKALIKE_LAYER[name], args)


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.LOOKALIKE_GATED)
def test_what_is_no_gated_activation_stays(name: str, dtype: torch.dtype) -> None:
    args = (normal(*X, dtype=dtype), normal(*X, dtype=dtype, seed=1))
    report, gm, _ = rewritten(written.LOOKALIKE_GATED[name], args)
    assert not {"silu_mul", "gelu_mul"} & set(at_output(report, gm)), placed(report)


@pytest.mark.daily(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", written.LOOKALIKE_ROPE)
def test_what_is_no_rotary_embedding_stays(name: str, dtype: torch.dtype) -> None:
    report, _, _ = rewritten(written.LOOKALIKE_ROPE[name], _rope_args(dtype))
    assert "rope" not in placed(report)


@pytest.mark.parametrize("name", written.LOOKALIKE_SOFTMAX)
def test_what_is_no_softmax_stays(name: str) -> None:
    report, _, _ = rewritten(written.LOOKALIKE_SOFTMAX[name], (normal(4, 6, 33).abs(),))
    assert "softmax" not in placed(report)


@pytest.mark.parametrize("name", written.LOOKALIKE_LOSS)
def test_what_is_no_mean_cross_entropy_stays(name: str) -> None:
    report, _, _ = rewritten(written.LOOKALIKE_LOSS[name], (normal(9, 33), torch.arange(9)))
    assert "cross_entropy" not in placed(report)


@pytest.mark.parametrize("name", written.LOOKALIKE_ATTENTION)
def test_attention_that_the_op_does_not_mean_stays(name: str) -> None:
    args = (normal(2, 3, 9, 16), normal(2, 3, 9, 16, seed=1))
    report, _, _ = rewritten(written.LOOKALIKE_ATTENTION[name], args)
    assert "attention" not in placed(report)


def test_values_narrower_than_keys_are_the_op() -> None:
    args = (normal(2, 3, 9, 16), normal(2, 3, 9, 16, seed=1))
    report, _, _ = rewritten(lambda q, k: functional.scaled_dot_product_attention(q, k, k[..., :8]), args)
    assert "attention" in placed(report)


def test_enough_of_both_kinds_are_tried() -> None:
    right = [*written.RMS, *written.LAYER, *written.GATED, *written.ROPE, *written.ADDED]
    pairs = (written.LOOKALIKE_RMS, written.LOOKALIKE_LAYER, written.LOOKALIKE_GATED, written.LOOKALIKE_ROPE)
    once = (written.LOOKALIKE_SOFTMAX, written.LOOKALIKE_LOSS, written.LOOKALIKE_ATTENTION)
    assert len(right) >= 50
    assert 2 * sum(map(len, pairs)) + sum(map(len, once)) >= 160


def test_patterns_come_from_the_definitions() -> None:
    named = {p.op.name for p in patterns.all_patterns()}
    assert named >= {"rms_norm", "add_rms_norm", "layer_norm", "silu_mul", "gelu_mul", "rope", "softmax"}
    assert not any(name.endswith("_backward") for name in named)
    casts = {p.fixed["cast_before_weight"] for p in patterns.all_patterns() if p.op.name == "rms_norm" and p.half}
    assert casts == {False, True}


def _set(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    y[0] = 0.0
    return y


def _added(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x)
    y += 1.0
    return y


@pytest.mark.parametrize("function", [_set, _added, lambda x: x.exp().mul_(2.0), lambda x: torch.add(x, 1.0, out=x)])
def test_a_definition_that_writes_over_a_tensor_is_no_pattern(function: Any) -> None:
    """What it had written to would stand in the record for what it was before."""
    x = torch.empty(3, 8, device="meta")
    with pytest.raises(RuntimeError, match="writes over a tensor"):
        record(function, ("x",), {"x": x})
    graph, _, _ = record(lambda x: x.exp() + 1.0, ("x",), {"x": x})
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "call_function", "output"]


def test_an_eps_that_is_an_argument_of_the_compiled_function_is_a_number_of_the_call() -> None:
    """With dynamic sizes Dynamo hands a module's float over as an argument."""
    x, y = normal(2, 5, 32), normal(2, 5, 32, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = a + b
        return torch.nn.functional.layer_norm(total, (32,), None, None, eps), total

    report, _, results = rewritten(function, (x, y, 1e-3), dynamic=True)
    assert placed(report) == {"add_layer_norm": 1}
    assert far(results, function(x, y, 1e-3)) < 1e-5
