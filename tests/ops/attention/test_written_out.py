"""Attention that a module writes out: a head size that another tensor says, keys without an axis of heads, values of
another size than keys, and a bias that learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ferryman
from tests.unit.test_disguises import assert_as_right, assert_gradients_as_right


class Scaled(nn.Module):
    """Its scale is computed of its input's width; ``of`` heads may be others than those of the queries."""

    def __init__(self, of: int = 4) -> None:
        super().__init__()
        self.qkv, self.heads, self.of = nn.Linear(32, 96), 4, of

    def forward(self, x: Tensor) -> Tensor:
        b, s, n = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT * (n // self.of) ** -0.5, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class OneHead(nn.Module):
    """Keys and values of one head for all queries, or (``each``) of each head for all sequences."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        self.q, self.kv, self.each = nn.Linear(32, 32), nn.Linear(32, 16), each

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).chunk(2, dim=-1)
        if self.each:
            weights = torch.softmax(torch.einsum("bhid,hjd->bhij", q, k) / 8**0.5, dim=-1)
            return torch.einsum("bhij,hjd->bhid", weights, v)
        weights = torch.softmax(torch.einsum("bhid,bjd->bhij", q, k) / 8**0.5, dim=-1)
        return torch.einsum("bhij,bjd->bhid", weights, v)


class Apart(nn.Module):
    """A head's values have ``of`` numbers, its keys eight."""

    def __init__(self, of: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4 * of)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)) for f in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5, dim=-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class Named(Apart):
    """Scaled by the size of its values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)) for f in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * v.shape[-1] ** -0.5, dim=-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class Learned(nn.Module):
    """A bias of each head and pair is added; it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.places = nn.Linear(32, 96), nn.Embedding(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.places(places[None] - places[:, None] + 5).permute(2, 0, 1).unsqueeze(0)
        return self._attend(q, k, v, bias).transpose(1, 2).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5
        scores = scores + bias
        return torch.matmul(torch.softmax(scores, dim=-1), v)


def _x(batch: int = 3) -> Tensor:
    return torch.randn(batch, 6, 32, generator=torch.Generator().manual_seed(1))


def _attends(model: nn.Module, x: Tensor) -> bool:
    with ferryman.trace() as trace, torch.no_grad():
        model(x)
    return "attention" in {op for op, _ in trace.calls}


@pytest.mark.parametrize("of", [4, 2])
def test_a_size_of_another_tensor_is_asked_at_each_call(of: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(of)).eval()
    before, x = copy.deepcopy(model), _x()
    ferryman.port(model)
    assert _attends(model, x) == (of == 4)
    assert_as_right(model(x), before, x)
    assert_gradients_as_right(model, before, x)
    for one in (model, before):
        one[0].of = 1
    assert not _attends(model, x)
    assert_as_right(model(x), before, x)


@pytest.mark.parametrize("each", [False, True])
def test_keys_without_an_axis_of_heads(each: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OneHead(each)).eval()
    before, x = copy.deepcopy(model), _x(4)  # as many sequences as heads
    ferryman.port(model)
    assert _attends(model, x) != each
    assert_as_right(model(x), before, x)
    assert_gradients_as_right(model, before, x)


@pytest.mark.parametrize("of", [5, 8, 12])
def test_values_of_another_size_than_keys(of: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Apart(of)).eval()
    before, x = copy.deepcopy(model), _x()
    ferryman.port(model)
    assert _attends(model, x)
    assert_as_right(model(x), before, x)
    assert_gradients_as_right(model, before, x)


def test_a_scale_of_the_values_size_is_right_where_keys_have_that_size_alone() -> None:
    for of in (8, 12):
        torch.manual_seed(0)
        model = nn.Sequential(Named(of)).eval()
        before, x = copy.deepcopy(model), _x()
        ferryman.port(model)
        assert _attends(model, x) is (of == 8)
        assert_as_right(model(x), before, x)
        assert_gradients_as_right(model, before, x)


def test_a_bias_that_learns_has_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Learned()).eval()
    before, x = copy.deepcopy(model), _x()
    ferryman.port(model)
    with ferryman.trace() as trace:
        model(x).square().sum().backward()
    assert {"attention", "attention_backward"} <= {op for op, _ in trace.calls}
    assert model[0].places.weight.grad is not None
    model.zero_grad()
    assert_as_right(model(x), before, x)
    assert_gradients_as_right(model, before, x)
