"""Code whose order changed, where an argument is an object with a tensor's methods; modules that a forward makes, which
mean something else later."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right

CODE = '''
import torch, torch.nn.functional as F
from torch import nn


class Box:
    def __init__(self): self.calls = 0

    def square(self):
        self.calls += 1
        return torch.full((2, 5, 48), float(self.calls))

    def sum(self, x, dim):
        with torch.no_grad():
            x.mul_(2)
        return x.clone()

    def double(self):
        with torch.no_grad():
            self.kept.mul_(2)
        return self.kept.clone()


class Norm(nn.Module):
    """Each call of the object gives another value."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(48))

    def forward(self, x, box):
        a = box.square()
        b = box.square()
        return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w


class Gate(nn.Module):
    """The object writes over what is computed with before, and after."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(48, 96)

    def forward(self, x, box):
        g, u = self.l(x).chunk(2, -1)
        h = g * torch.sigmoid(g)
        t = box.sum(g, 0)
        return h * u, t


class Alias(Norm):
    """By another name, in a list, by keyword."""

    def forward(self, x, *, box):
        other = [box][0]
        a, b = other.square(), other.square()
        return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w


class Inside(Norm):
    """A method calls it."""

    def forward(self, x, box):
        a = self.one(box)
        b = self.one(box)
        return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w

    def one(self, made):
        return made.square()


def normal(made, w):
    a = made.square()
    b = made.square()
    return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def gated(x, box):
    g, u = x.chunk(2, -1)
    h = g * torch.sigmoid(g)
    t = box.sum(g, 0)
    return h * u, t


class OfFunction(Norm):
    """A plain function of the file calls it."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(48, 48)

    def forward(self, x, box):
        return self.l(normal(box, self.w))


class GateOfFunction(Gate):
    def forward(self, x, box):
        return gated(self.l(x), box=box)


class GateAbove(Gate):
    """The object writes over what an activation is of, in code of the class above."""

    def forward(self, x, box):
        g, u = self.l(x).chunk(2, -1)
        box.kept = g
        h = F.silu(g)
        t = box.double()
        return h * u, t


class Above(GateAbove):
    def forward(self, x, box):
        return super().forward(x, box)


class Beside(Gate):
    """The object's method keeps its turn: an activation stands next to its product, and another one alone."""

    def forward(self, x, box):
        t = box.square()
        g, u = self.l(x).chunk(2, -1)
        if box is not None:
            u = u + t.mean()
        w = u.sigmoid()
        y = w * F.silu(g)
        return y, box.square()


class Past(nn.Module):
    """A sum with what the object gives stands before a choice that asks the object."""

    def __init__(self):
        super().__init__()
        self.l, self.norm = nn.Linear(48, 48), nn.RMSNorm(48, 1e-6)

    def forward(self, x, box):
        y = self.l(x)
        h = box.square() + y
        if box.calls > 0:
            h = h + x
        else:
            h = h + y
        return self.norm(h)


class Twice(nn.Module):
    """An activation on either side of a product."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x, box):
        a = F.silu(self.a(x))
        b = F.silu(self.b(x))
        return a * b


class Once(Twice):
    def forward(self, x, box):
        b = F.gelu(self.b(x))
        return F.silu(self.a(x)) * b


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(48, 9)

    def forward(self, x):
        loss = nn.CrossEntropyLoss()
        z = self.l(x)
        return loss(z.view(-1, 9), z.argmin(-1).view(-1))


class Share(nn.Module):
    def forward(self, x):
        return nn.Softmax(dim=-1)(x)
'''


@pytest.fixture
def file(tmp_path: Path) -> Any:
    return load(CODE, f"ferryman_objects_{abs(hash(str(tmp_path)))}", tmp_path)


def _ported(kind: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Linear(4, 4)).eval()
    twin = copy.deepcopy(model)
    ferryman.port(model)
    return model[0], twin[0]


def _called(module: nn.Module, x: Tensor, box: Any, named: bool) -> tuple[Tensor, ...]:
    result = module(x.clone(), box=box) if named else module(x.clone(), box)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    "name", ["Norm", "Gate", "Alias", "Inside", "OfFunction", "GateOfFunction", "GateAbove", "Above", "Past"]
)
def test_an_object_with_a_tensors_methods_is_called_as_the_code_says(file: Any, name: str) -> None:
    module, twin = _ported(getattr(file, name))
    x, named = torch.randn(2, 5, 48), name == "Alias"
    with torch.no_grad():
        wanted = _called(twin, x, file.Box(), named)
        actual = _called(module, x, file.Box(), named)
    assert len(actual) == len(wanted)
    assert_as_right(actual, lambda given: _called(twin, given, file.Box(), named), x)


@pytest.mark.parametrize("name", ["Norm", "OfFunction"])
def test_tensors_are_served_there(file: Any, name: str) -> None:
    module, twin = _ported(getattr(file, name))
    x = torch.randn(2, 5, 48)
    with ferryman.trace() as trace, torch.no_grad():
        actual = module(x, x)
    assert "rms_norm" in {op for op, _ in trace.calls}
    assert_as_right(actual, lambda given: twin(given, given), x)


def test_where_nothing_changes_its_turn_calls_with_an_object_are_served(file: Any) -> None:
    module, twin = _ported(file.Beside)
    x = torch.randn(2, 5, 48)
    with ferryman.trace() as trace, torch.no_grad():
        actual = _called(module, x, file.Box(), False)
    assert {"silu_mul", "bias_act"} <= {op for op, _ in trace.calls}
    assert_as_right(actual, lambda given: _called(twin, given, file.Box(), False), x)


@pytest.mark.parametrize("name", ["Twice", "Once"])
def test_a_product_of_two_activations_has_both(file: Any, name: str) -> None:
    module, twin = _ported(getattr(file, name))
    x = torch.randn(2, 5, 48)
    with ferryman.trace() as trace, torch.no_grad():
        actual = module(x, None)
    assert "silu_mul" in {op for op, _ in trace.calls}
    assert_as_right(actual, lambda given: twin(given, None), x)


@pytest.fixture(params=["forward", "class", "hook"])
def changed(request: Any, monkeypatch: Any) -> Iterator[Any]:
    """(a class of PyTorch's) -> modules of it give three times as much from then on."""
    handles = []

    def change(kind: Any) -> None:
        original = kind.forward

        def forward(self: nn.Module, *given: Tensor) -> Tensor:
            return original(self, *given) * 3

        if request.param == "forward":
            monkeypatch.setattr(kind, "forward", forward)
        elif request.param == "class":
            monkeypatch.setattr(nn, kind.__name__, type(kind.__name__, (kind,), {"forward": forward}))
        else:

            def hook(module: nn.Module, given: Any, result: Tensor) -> Tensor | None:
                return result * 3 if isinstance(module, kind) else None

            handles.append(nn.modules.module.register_module_forward_hook(hook))

    yield change
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("name", "kind"), [("Loss", nn.CrossEntropyLoss), ("Share", nn.Softmax)])
def test_a_module_that_a_forward_makes_is_what_its_name_means_then(
    file: Any, changed: Any, name: str, kind: Any
) -> None:
    module, twin = _ported(getattr(file, name))
    x = torch.randn(4, 48)
    with ferryman.trace() as trace:
        before = module(x)
    assert trace.calls
    changed(kind)
    after = module(x)
    assert torch.equal(after, twin(x)) and bool((after > 2 * before).all())
