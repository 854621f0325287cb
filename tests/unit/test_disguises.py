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
from tests.unit import disguises, disguises_fresh, disguises_more
from tests.unit.disguises import HEAD

RIGHT = disguises.RIGHT | disguises_more.RIGHT
WRONG = disguises.WRONG | disguises_more.WRONG | disguises_fresh.WRONG

# how many of a kind's spellings are left today, and why
LEFT = {
    "nested functions, lambdas, try, *args": 1,  # no proof follows a handler
    "an activation in other words": 1,  # a sum and a product in one call, of one column of zeros
    "rows of a table in other words": 1,  # 0 times what is not finite
    "a layer norm, by a stranger": 1,  # an eps of 1e-12: float64 rounds more than a proof allows
    "rope, by a stranger": 1,  # signs that are a tensor, which two parts read
    "experts, by a stranger": 1,  # 0 times what is not finite
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


def _moved(x: Tensor) -> Tensor:
    """By one unit in the last place of its dtype, up or down."""
    up = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return x.nextafter(torch.where(up, torch.inf, -torch.inf).to(x.dtype))


@torch.no_grad()
def assert_as_right(actual: Any, before: Callable[[Tensor], Any], x: Tensor) -> None:
    """A ported module's result is as near the unported one's as a model's check asks (`AMPLITUDE`): twice what one unit
    in the last place of its input does. Whole numbers have none: equal. One number, such as a loss, may stay as it is
    then: it has a unit of its own."""
    result, moved = before(x.clone()), x
    plain, single = _flat(result), isinstance(result, Tensor) and result.dim() == 0 and result.is_floating_point()
    if x.is_floating_point():
        moved = _moved(x)
    floor = max(relative(_flat(before(moved.clone())), plain), torch.finfo(result.dtype).eps if single else 0.0)
    allowed = AMPLITUDE * floor
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


@pytest.mark.daily(7)
@pytest.mark.parametrize("kind", RIGHT)
def test_right_modules_in_disguise_are_ported(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name = f"ferryman_disguise_{abs(hash(kind))}"
    left = [
        code
        for i, (code, op, x) in enumerate(RIGHT[kind])
        if not _ported(code, op, _input(x), f"{name}_{i}", tmp_path, request)
    ]
    assert len(left) == LEFT.get(kind, 0), "\n".join(left)


@pytest.mark.daily(7)
@pytest.mark.parametrize("what", WRONG)
def test_what_differs_in_little_is_not_ported(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, op, x = WRONG[what]
    try:
        assert not _ported(code, op, _input(x), f"ferryman_near_{abs(hash(what))}", tmp_path, request)
    except PortError as error:
        assert "inner" in str(error) or "nothing" in str(error)


def _gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of a sum with weights of all results, for the parameters and a floating input."""
    given = x.clone().requires_grad_(x.is_floating_point())
    result = _flat(module(given))
    (result * torch.cos(torch.arange(result.numel(), dtype=torch.float64))).sum().backward()
    slopes = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return slopes | ({} if given.grad is None else {"x": given.grad})


_UNIT = 2.0**-23  # in the last place of float32: what moving each weight of the sum by one does


def assert_gradients_as_right(model: nn.Module, before: nn.Module, x: Tensor) -> None:
    """As `assert_as_right` of results; or as near the exact gradient as the unported one's. What moving the input
    leaves as it is has the median gradient's floor."""
    plain = _gradients(before, x)
    moved = _moved(x) if x.is_floating_point() else x
    again, actual = _gradients(before, moved), _gradients(model, x)
    try:
        exact = _gradients(copy.deepcopy(before).double(), x.double() if x.is_floating_point() else x)
    except RuntimeError:  # its code names float32
        exact = {}
    floors = {name: relative(again[name], plain[name]) for name in plain}
    common = sorted(floors.values())[len(floors) // 2]
    assert actual.keys() == plain.keys()
    for name, floor in floors.items():
        if relative(actual[name], plain[name]) > AMPLITUDE * max(floor, common):
            own = max(relative(plain[name], exact[name]), _UNIT)
            assert relative(actual[name], exact[name]) <= AMPLITUDE * own, name


@pytest.mark.parametrize("kind", disguises_fresh.RIGHT)
def test_what_strangers_write_is_ported_with_its_gradients(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name, left = f"ferryman_stranger_{abs(hash(kind))}", []
    for i, (code, op, x) in enumerate(disguises_fresh.RIGHT[kind]):
        torch.manual_seed(0)
        model, given = Net(_home(code, f"{name}_{i}", tmp_path, request).M()).eval(), _input(x)
        before = copy.deepcopy(model)
        try:
            ferryman.port(model)
        except PortError:
            left.append(code)
            continue
        with ferryman.trace() as trace, torch.no_grad():
            actual = model(given.clone())
        assert_as_right(actual, before, given)
        assert_gradients_as_right(model, before, given)
        left += [] if op in {called for called, _ in trace.calls} else [code]
    assert len(left) == LEFT.get(kind, 0), "\n".join(left)


def test_no_spelling_hides_another() -> None:
    sets = (disguises, disguises_more, disguises_fresh)
    assert len(WRONG) == sum(len(each.WRONG) for each in sets)
    assert len(RIGHT | disguises_fresh.RIGHT) == sum(len(each.RIGHT) for each in sets)


def _twice(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return result * 2


_ACT, _GATE = (disguises_fresh.RIGHT["a gated layer, by a stranger"][i][0] for i in (11, 12))
_PAD, _NET = (disguises_fresh.RIGHT["a causal convolution, by a stranger"][i][0] for i in (3, 6))
_PLACE = disguises_fresh.RIGHT["a linear layer, by a stranger"][5][0]
_EPS, _OWN_EPS = (disguises_fresh.RIGHT["a root mean square, by a stranger"][i][0] for i in (3, 4))
# what a module's children and tensors become: (its code, its input, the change)
BECOMES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a longer sequence": (_ACT, "x", lambda m: m.act.append(nn.Tanh())),
    "another in a sequence": (_ACT, "x", lambda m: m.act.__setitem__(0, nn.Tanh())),
    "a sequence with a hook": (_ACT, "x", lambda m: m.act.register_forward_hook(_twice)),
    "a hook in a sequence": (_ACT, "x", lambda m: m.act[0].register_forward_hook(_twice)),
    "one between": (_GATE, "x", lambda m: m.gate.insert(1, nn.Tanh())),
    "another forward": (_GATE, "x", lambda m: setattr(m.gate, "forward", lambda x: torch.ones(2, 5, 96))),
    "another pad": (_NET, "bcs", lambda m: setattr(m.net[0], "padding", (0, 3))),
    "a pad of ones": (_NET, "bcs", lambda m: m.net.__setitem__(0, nn.ConstantPad1d((3, 0), 1.0))),
    "a longer sequence of a convolution": (_NET, "bcs", lambda m: m.net.append(nn.Tanh())),
    "a pad with a hook": (_NET, "bcs", lambda m: m.net[0].register_forward_hook(_twice)),
    "another stride": (_NET, "bcs", lambda m: setattr(m.net[1], "stride", (2,))),
    "a shorter weight": (_NET, "bcs", lambda m: setattr(m.net[1], "weight", nn.Parameter(torch.ones(64, 1, 3)))),
    "a pad on the right": (_PAD, "bcs", lambda m: setattr(m, "pad", nn.ZeroPad1d((0, 3)))),
    "a convolution that pads": (_PLACE, "x", lambda m: setattr(m.c, "padding", (1,))),
    "an eps in place": (_EPS, "x", lambda m: m.eps.fill_(0.5)),
    "an eps under the tensor": (_EPS, "x", lambda m: m.eps.data.fill_(0.5)),
    "an eps of another dtype": (_EPS, "x", lambda m: setattr(m, "eps", torch.tensor(0.25, dtype=torch.float64))),
    "an eps of its own in place": (_OWN_EPS, "x", lambda m: m.eps.fill_(0.5)),
    "another eps of its own": (_OWN_EPS, "x", lambda m: setattr(m, "eps", torch.tensor([0.5]))),
}


@pytest.mark.parametrize("what", BECOMES)
def test_what_children_and_tensors_become_counts(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, kind, change = BECOMES[what]
    torch.manual_seed(0)
    model = Net(_home(code, f"ferryman_becomes_{abs(hash(what))}", tmp_path, request).M()).eval()
    before, x = copy.deepcopy(model), _input(kind)
    ferryman.port(model)
    for one in (model, before):
        change(one.inner)
    with torch.no_grad():
        assert_as_right(model(x.clone()), before, x)


def test_rows_from_the_end(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = "class M(Table):\n    def forward(self, i): return self.t[i]\n"
    model = Net(_home(code, "ferryman_rows_from_the_end", tmp_path, request).M()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    for ids in (torch.tensor([[-1, -20, 19, 0]]), torch.tensor([[-3, 3]], dtype=torch.int32)):
        with ferryman.trace() as trace:
            assert torch.equal(model(ids), before(ids))
        assert "embedding" in {called for called, _ in trace.calls}


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
