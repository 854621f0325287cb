"""Forwards that are written otherwise than libraries write them are ported, and their own code runs once it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.porting.model.source import same


class Scaled(nn.Module):
    """An RMS norm times what a list holds, under a name for the module that is not self."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.fast, self.factors = 1e-6, True, [1.0]
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 64))

    def forward(module, x: Tensor) -> Tensor:  # noqa: N805 - that is the case
        if module.fast and x.dim() > 0:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + module.eps) * module.factors[0]
            return module.weight * y.to(x.dtype)
        return x


def unnamed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator without `functools.wraps`."""

    def inner(self: Any, x: Tensor) -> Tensor:
        return function(self, x)

    return inner


class Decorated(Scaled):
    @unnamed
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.factors[0]
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("kind", [Scaled, Decorated])
@pytest.mark.parametrize("factor", [3.0, 1, True, torch.full((64,), 2.0)], ids=["number", "int", "bool", "tensor"])
def test_it_is_ported_and_follows_its_list(kind: type[Scaled], factor: Any) -> None:
    plain, model = nn.Sequential(kind()), nn.Sequential(kind())
    report = ferryman.port(model)
    assert [site.ops for site in report.ported if site.path == "0"] == [("rms_norm",)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for each in (plain, model):
        each[0].factors[0] = factor
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "before", "equal"),
    [
        ([1.0, {"a": 2}], [1.0, {"a": 2}], True),
        ([1], [1.0], False),
        ([True], [1], False),
        ([-0.0], [0.0], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ([1.0], (1.0,), False),
        (torch.ones(2), 1.0, False),
        ({1, 2}, {2, 1}, True),
    ],
)
def test_values_that_differ_in_anything_are_others(value: Any, before: Any, equal: bool) -> None:
    assert same(value, before) is equal
