"""Attention that a module writes out: a head size that another tensor says, and keys without an axis of heads."""

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
