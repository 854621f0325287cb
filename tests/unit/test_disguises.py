# ruff: noqa: E501
"""Modules in spellings that people write by hand are ported; what differs in little from them is not."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.measure import relative
from ferryman.porting.model.results import AMPLITUDE
from tests.unit import disguises, disguises_more
from tests.unit.disguises import HEAD

RIGHT = disguises.RIGHT | disguises_more.RIGHT
WRONG = disguises.WRONG | disguises_more.WRONG

# how many of a kind's spellings are left today, and why
LEFT = {
    "nested functions, lambdas, try, *args": 1,  # no proof follows a handler
    "where a norm's numbers come from": 1,  # an eps that is a tensor: the op takes a number
    # a sum and a product in one call; a child that is a sequence; of infinite numbers erf's gelu gives others
    "an activation in other words": 3,
    "a causal convolution in other words": 1,  # a sequence of a pad and a convolution
    "rows of a table in other words": 2,  # 0 times what is not finite; numbers below zero
}


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def _home(code: str, name: str, folder: Path, request: pytest.FixtureRequest) -> ModuleType:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(HEAD + code)
    sys.path.insert(0, str(folder))
    request.addfinalizer(lambda: sys.modules.pop(name, None))
    request.addfinalizer(lambda: sys.path.remove(str(folder)))
    return importlib.import_module(name)


def _input(kind: str) -> Tensor:
    if kind == "ids":
        return torch.tensor([[1, 3, 19], [0, 0, 7]])
    return torch.randn((2, 64, 9) if kind == "bcs" else (2, 5, 64), generator=torch.Generator().manual_seed(1))


def _flat(result: Any) -> Tensor:
    """All numbers of a result."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    assert leaves
    return torch.cat([leaf.double().flatten() for leaf in leaves])


@torch.no_grad()
def assert_as_right(actual: Any, before: nn.Module, x: Tensor) -> None:
    """A ported module's result is as near the unported one's as a model's check asks (`AMPLITUDE`): twice what one unit
    in the last place of its input does. Whole numbers have none: equal."""
    plain, moved = _flat(before(x.clone())), x
    if x.is_floating_point():
        up = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5
        moved = x.nextafter(torch.where(up, torch.inf, -torch.inf))
    allowed = AMPLITUDE * relative(_flat(before(moved.clone())), plain)
    assert relative(_flat(actual), plain) <= allowed


def _ported(code: str, op: str, x: Tensor, name: str, folder: Path, request: pytest.FixtureRequest) -> bool:
    """Whether a pass of the ported module calls the op. Its result is right either way."""
    torch.manual_seed(0)
    model = Net(_home(code, name, folder, request).M()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    with ferryman.trace() as trace, torch.no_grad():
        actual = model(x.clone())
    assert_as_right(actual, before, x)
    return op in {called for called, _ in trace.calls}


@pytest.mark.parametrize("kind", RIGHT)
def test_right_modules_in_disguise_are_ported(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name = f"ferryman_disguise_{abs(hash(kind))}"
    left = [
        code
        for i, (code, op, x) in enumerate(RIGHT[kind])
        if not _ported(code, op, _input(x), f"{name}_{i}", tmp_path, request)
    ]
    assert len(left) == LEFT.get(kind, 0), "\n".join(left)


@pytest.mark.parametrize("what", WRONG)
def test_what_differs_in_little_is_not_ported(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, op, x = WRONG[what]
    try:
        assert not _ported(code, op, _input(x), f"ferryman_near_{abs(hash(what))}", tmp_path, request)
    except PortError as error:
        assert "inner" in str(error) or "nothing" in str(error)


LATER: dict[str, tuple[str, Callable[[Any], None]]] = {
    "eps of a config": ("self.config.eps", lambda m: setattr(m.config, "eps", 0.5)),
    "another config": ("self.config.eps", lambda m: setattr(m, "config", type(m.config)(eps=0.5))),
    "another weight's shape": (
        "self.config.eps",
        lambda m: setattr(m, "g", nn.Parameter(torch.linspace(1, 2, 5).reshape(5, 1))),
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_what_a_config_or_a_weight_becomes_counts(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    eps, change = LATER[what]
    code = "class M(nn.Module):\n    def __init__(self): super().__init__(); self.g, self.config = ones(1, 1, 64), Config(eps=1e-5, words='a')\n"
    code += f"    def forward(self, x): return self.g * root(x, {eps})\n"
    model = Net(_home(code, f"ferryman_later_{abs(hash(what))}", tmp_path, request).M()).eval()
    before, x = copy.deepcopy(model), _input("x")
    report = ferryman.port(model)
    assert [s.role for s in report.ported if s.path == "inner"] == ["rms_norm"]
    for one in (model, before):
        change(one.inner)
    with torch.no_grad():
        assert_as_right(model(x), before, x)
