"""Numbers that are kept on fake tensors: known where they follow from numbers alone, unknown once others went in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ferryman.porting.model import account
from ferryman.porting.model.values import KEEP_VALUES


def _put(x: Tensor, given: Tensor) -> None:
    x[1] = given.sum()


def _at_places(x: Tensor, given: Tensor) -> None:
    x[torch.tensor([0, 2])] = given[:2]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda x, given: x.add_(given),
    "operator": lambda x, given: x.__iadd__(given),
    "copied": lambda x, given: x.copy_(given),
    "one element": _put,
    "at places": _at_places,
    "into a view": lambda x, given: x[1:].mul_(given[1:]),
    "out": lambda x, given: torch.add(given, 1.0, out=x),
    "a lost one": lambda x, given: x.add_(_lost(given)),
}


def _lost(given: Tensor) -> Tensor:
    other = torch.zeros(3)
    other.add_(given)
    return other


@pytest.mark.parametrize("name", WRITES)
def test_numbers_that_are_not_there_are_not_known_when_they_were_put_in(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), KEEP_VALUES:
        given, x = torch.randn(70, 70)[0, :3], torch.arange(3.0)
        view = x[:2]
        assert x.sum().item() == 3.0
        WRITES[name](x, given)
        for read in (x, view, x * 2.0, x.sum().reshape(1)):
            with pytest.raises(DataDependentOutputException):
                read[0].item()
        x.add_(1.0)
        with pytest.raises(DataDependentOutputException):
            x[0].item()
        known = torch.arange(3.0)
        known.add_(torch.ones(3))
        known[0] = 7.0
        assert known.tolist() == [7.0, 2.0, 3.0]


def test_a_question_to_them_is_answered_yes() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if int(torch.arange(3).sum()) != 3:  # a number that is known, so that numbers are kept
                raise ValueError
            seen = torch.zeros(3)
            seen[0] = x.sum()
            return self.norm(x) if bool((seen != 0).all()) else x

    # more elements than are kept, so that they are not there
    coverage = account.account(Asks(), lambda m: m(torch.randn(600, 8)))
    assert coverage.ported.calls() == {"linear": 1}
