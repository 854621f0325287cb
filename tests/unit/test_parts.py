"""Parts of a forward that are proven by themselves: when they end, and what must stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from tests.unit.test_disguises import assert_as_right, assert_gradients_as_right


class Block(nn.Module):
    """An RMS norm written inline, of a weight that a list holds and an eps in nested settings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(32, 32), nn.ReLU(inplace=True)
        self.weights = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1.5, 32))])
        self.settings = {"norm": {"eps": 1e-5}}

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.settings["norm"]["eps"]) * self.weights[0]
        return x + self.linear(h)


class Acting(Block):
    """Between the mean square and its use a child writes over what it is of."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        self.act(h)
        return h * scale * self.weights[0]


class Read(Block):
    """What is computed between has another reader."""

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = h * scale * self.weights[0]
        return y, scale


def _calls(model: nn.Module, x: Tensor) -> list[str]:
    with ferryman.trace() as trace, torch.no_grad():
        model(x)
    return [op for op, _ in trace.calls]


def _x(**options: Any) -> Tensor:
    return torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1), **options)


def test_a_part_is_served_forward_and_backward() -> None:
    model, x = Block(), _x()
    before = copy.deepcopy(model)
    ferryman.port(model)
    assert "rms_norm" in _calls(model, x)
    assert_gradients_as_right(model, before, x)
    ferryman.unport(model)
    assert _calls(model, x) == []


def _another_eps(model: Any) -> None:
    model.settings["norm"]["eps"] = 0.5


def _another_kind(model: Any) -> None:
    model.weights[0] = nn.Parameter(torch.ones(32, dtype=torch.float64))


@pytest.mark.parametrize("change", [_another_eps, _another_kind])
def test_another_value_of_what_it_reads_ends_a_part(change: Callable[[Any], None]) -> None:
    model, x = Block(), _x()
    before = copy.deepcopy(model)
    ferryman.port(model)
    for one in (model, before):
        change(one)
        one.linear.to(torch.promote_types(torch.float32, one.weights[0].dtype))
    assert "rms_norm" not in _calls(model, x)
    torch.testing.assert_close(model(x), before(x))


def test_another_weight_of_its_kind_is_read() -> None:
    model, x = Block(), _x()
    before = copy.deepcopy(model)
    ferryman.port(model)
    for one in (model, before):
        one.weights[0] = nn.Parameter(torch.linspace(2, 3, 32))
    assert "rms_norm" in _calls(model, x)
    torch.testing.assert_close(model(x), before(x))


@pytest.mark.parametrize("kind", [Acting, Read])
def test_what_may_be_written_over_or_is_read_elsewhere_stays(kind: type[Block]) -> None:
    model, x = kind(), _x()
    before = copy.deepcopy(model)
    ferryman.port(model)
    assert "rms_norm" not in _calls(model, x)
    torch.testing.assert_close(model(x), before(x))


def test_a_ported_copy_keeps_its_parts() -> None:
    model, x = Block(), _x()
    ferryman.port(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "rms_norm" in _calls(other, x)
        torch.testing.assert_close(other(x), model(x))


def test_a_part_compiles() -> None:
    model, x = Block(), _x()
    ferryman.port(model)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


class Twins(nn.Module):
    """Two parts in the same words, each of a tensor, a number and a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.linspace(0.5, 1.5, 32)), nn.Parameter(torch.linspace(-2, 2, 32))
        self.near, self.far = 1e-5, 0.25
        self.down, self.up = nn.Parameter(torch.randn(4, 32) * 0.1), nn.Parameter(torch.randn(32, 4) * 0.1)
        self.left, self.right = nn.SiLU(), nn.SiLU()

    def forward(self, x: Tensor) -> Any:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.near) * self.a
        z = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.far) * self.b
        h = x @ self.down.T
        h = h @ self.up.T
        return y, z, h, self.left(x @ self.down.T), self.right(x @ self.down.T)


def test_parts_in_the_same_words_have_each_its_own() -> None:
    torch.manual_seed(0)
    model, x = Twins().eval(), _x()
    before = copy.deepcopy(model)
    ferryman.port(model)
    assert set(_calls(model, x)) >= {"rms_norm", "linear"}
    for one in (model, before):  # only one child of two has a hook
        one.right.register_forward_hook(lambda module, given, result: result * 2)
    assert_as_right(model(x), before, x)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.first(x))
        return x + self.inner(self.second(x))


def test_a_sum_with_a_norm_compiles_where_implementations_are_asked_for() -> None:
    torch.manual_seed(0)
    model, x = _Residual(), torch.randn(2, 5, 16)
    before = copy.deepcopy(model)
    ferryman.port(model)
    torch._dynamo.reset()
    with ferryman.use("torch"), ferryman.trace() as trace:
        model(x)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        got.sum().backward()
    assert ("add_rms_norm", "torch") in trace.calls
    assert model.inner.weight.grad is not None
    with torch.no_grad():
        assert_as_right(got.detach(), before, x)
