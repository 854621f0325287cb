"""Functions that modules hold, classes above, writes into fresh tensors: what changes later is followed."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.ops.attention.recognise import native_attention
from tests.unit.test_disguises import assert_as_right


def _bend(me: Any, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _soft(x: Tensor, scale: float = 1.702) -> Tensor:
    return x * torch.sigmoid(scale * x)


class WithFunction(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(8, 16), act

    def forward(self, x: Tensor) -> Any:
        return self.act(self.a(x))


class Child(WithFunction):
    def forward(self, x: Tensor) -> Any:
        return 2 * super().forward(x)


class Turn(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = x.shape[-1] // 2
        out = torch.empty_like(x)
        out[..., :n] = x[..., :n] * cos - x[..., n:] * sin
        out[..., n:] = x[..., n:] * cos + x[..., :n] * sin
        return out


def _ops(model: nn.Module, *given: Tensor) -> tuple[set[str], Any]:
    with ferryman.trace() as trace, torch.no_grad():
        result = model(*given)
    return {op for op, _ in trace.calls}, result


@pytest.mark.parametrize(
    "act", [types.MethodType(_bend, object()), functools.partial(_soft, scale=1.0), lambda x: functional.relu(x)]
)
def test_a_held_function_is_served_while_it_is_the_one(act: Any) -> None:
    model = WithFunction(act)
    ferryman.port(model)
    x = torch.randn(3, 8)
    ops, result = _ops(model, x)
    assert "bias_act" in ops
    assert_as_right(result, lambda x: act(functional.linear(x, model.a.weight, model.a.bias)), x)
    model.act = torch.sin
    ops, result = _ops(model, x)
    assert "bias_act" not in ops
    assert_as_right(result, lambda x: functional.linear(x, model.a.weight, model.a.bias).sin(), x)


def test_what_a_partial_keeps_may_change_in_place() -> None:
    model = WithFunction(functools.partial(_soft, scale=1.0))
    ferryman.port(model)
    x = torch.randn(3, 8)
    model.act.keywords["scale"] = 3.0
    ops, result = _ops(model, x)
    assert "bias_act" not in ops
    assert_as_right(result, lambda x: _soft(functional.linear(x, model.a.weight, model.a.bias), 3.0), x)


def test_a_class_above_may_get_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Child(functional.silu)
    ferryman.port(model)
    x = torch.randn(3, 8)
    assert "bias_act" in _ops(model, x)[0]
    monkeypatch.setattr(WithFunction, "forward", lambda self, x: x)
    assert torch.equal(_ops(model, x)[1], 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_writes_are_as_they_were_where_the_op_does_not_serve(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"turn": Turn(), "beside": nn.Linear(4, 4)})
    x, cos, sin = torch.randn(2, 4, 5, 8, dtype=dtype), *torch.randn(2, 5, 4, dtype=dtype).unbind()
    ferryman.port(model)
    ops, result = _ops(model["turn"], x, cos, sin)
    assert ("rope" in ops) is (dtype is torch.float32)
    assert_as_right(result, lambda x: Turn()(x, cos, sin), x)
    assert result.dtype is dtype


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_pytorchs_attention_of_many_heads_is_served(weights: bool, cross: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    y = torch.randn(2, 7, 32) if cross else x
    before = copy.deepcopy(layer)
    given = (32, 4, layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias, None, weights)
    with torch.no_grad():
        actual = native_attention(x, x, x, *given)
        assert_as_right(actual[0], lambda x: torch._native_multi_head_attention(x, x, x, *given)[0], x)
        assert (actual[1] is None) is not weights
        ferryman.port(layer)
        ported = layer(x, y, y, need_weights=weights)
        assert_as_right(
            ported[0], lambda x: before(x, y if cross else x, y if cross else x, need_weights=weights)[0], x
        )
