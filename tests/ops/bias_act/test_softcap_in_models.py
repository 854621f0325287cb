"""Logits that code caps by a tanh are one call; what differs a little from that keeps its tanh."""

from __future__ import annotations

import copy
import dataclasses
import logging
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ferryman
from tests.unit.test_disguises import assert_as_right


class Activations(TorchDispatchMode):
    """Which activations run, with their alphas."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float | None]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ferryman.bias_act.default:
            self.calls.append((args[2], args[3]))
        return func(*args, **(kwargs or {}))


logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Config:
    cap: float


class Renamed:
    """A library's config: another name for an attribute, and a word in a log."""

    names = {"cap": "limit"}  # noqa: RUF012 - as libraries write it
    warns = False

    def __init__(self) -> None:
        self.limit = 20.0

    def __getattribute__(self, key: str) -> Any:
        if super().__getattribute__("warns"):
            logger.warning("reads %s", key)
        if key != "names" and key in super().__getattribute__("names"):
            key = super().__getattribute__("names")[key]
        return super().__getattribute__(key)


class Counted(Renamed):
    """How often it is read shows."""

    def __getattribute__(self, key: str) -> Any:
        super().__getattribute__("__dict__").setdefault("reads", []).append(key)
        return super().__getattribute__(key)


class Behind(Renamed):
    """Behind the other name stands code that counts."""

    limit = 20.0

    def __init__(self) -> None:
        self.reads = 0.0


def _counted(self: Any) -> float:
    self.reads += 1
    return 20.0 + self.reads


Behind.limit = property(_counted)  # type: ignore[assignment]


class Popped(Renamed):
    """What is written to the log changes what is read next."""

    def __getattribute__(self, key: str) -> Any:
        logger.debug("%s", said.pop())
        return super().__getattribute__(key)


said = [20.0] * 100_000


class Raises(Renamed):
    """As transformers' configs of layers that differ: an error of another kind than AttributeError."""

    def __getattribute__(self, key: str) -> Any:
        if key == "eps":
            raise RuntimeError("each layer has its own")
        return super().__getattribute__(key)


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 64)
        self.cap, self.whole, self.other = 20.0, 15, 21.0
        self.config = Config(cap=20.0)


class OneExpression(Capped):
    def forward(self, x: Tensor) -> Any:
        return self.cap * torch.tanh(self.head(x) / self.cap)


class Statements(Capped):
    def forward(self, x: Tensor) -> Any:
        y = self.head(x)
        y = y / self.cap
        y = torch.tanh(y)
        return y * self.cap


class InsideOfIf(Capped):
    """As transformers writes it: the block's last statement puts another value in the local that is read after it."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.head(x)
        if self.config.cap is not None:
            y = y / self.config.cap
            y = torch.tanh(y)
            y = y * self.config.cap
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(y, labels)
        return (y,) if loss is None else (y, loss)


class OfLibrary(InsideOfIf):
    def __init__(self) -> None:
        super().__init__()
        self.config = Renamed()


class OfTransformers(Capped):
    def __init__(self) -> None:
        super().__init__()
        self.config = pytest.importorskip("transformers").Gemma2Config(final_logit_softcapping=20.0)

    def forward(self, x: Tensor) -> Any:
        y = self.head(x)
        if self.config.final_logit_softcapping is not None:
            y = y / self.config.final_logit_softcapping
            y = torch.tanh(y)
            y = y * self.config.final_logit_softcapping
        return y


class OfNamespace(InsideOfIf):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(cap=20.0)


class ReadsCounted(InsideOfIf):
    def __init__(self) -> None:
        super().__init__()
        self.config = Counted()


class ReadsBehind(InsideOfIf):
    def __init__(self) -> None:
        super().__init__()
        self.config = Behind()


class ReadsPopped(InsideOfIf):
    def __init__(self) -> None:
        super().__init__()
        self.config = Popped()


class Asks(Capped):
    """Reads what raises where a call asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Raises()

    def forward(self, x: Tensor, more: bool = False) -> Any:
        y = self.head(x)
        if more:
            y = y * self.config.eps
        return torch.tanh(y)


class TwoSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = 20.0
        self.same = self.inverse = 0.05

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.a) * self.b


class ByInverse(TwoSettings):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.inverse) * self.a


class OfLiteral(TwoSettings):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 20.0) * self.a


class ReadsOne(TwoSettings):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.b) * self.b


class Literal(Capped):
    def forward(self, x: Tensor) -> Any:
        softcap = 15
        y = self.head(x)
        return softcap * torch.tanh(y / softcap)


class WholeAttribute(Capped):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.head(x) / self.whole) * self.whole


class TwoCaps(Capped):
    def forward(self, x: Tensor) -> Any:
        return self.other * torch.tanh(self.head(x) / self.cap)


class LeavesBetween(Capped):
    """A call may leave with the value that is not capped yet."""

    def forward(self, x: Tensor, early: bool = False) -> Any:
        y = self.head(x)
        if self.cap is not None:
            y = y / self.cap
            if early:
                return y
            y = torch.tanh(y)
            y = y * self.cap
        return y


class GoesOnAfterAnError(Capped):
    """What is read after the block may be the value from before its last statement."""

    def forward(self, x: Tensor, bad: bool = False) -> Any:
        y = self.head(x)
        try:
            y = y / self.cap
            y = torch.tanh(y)
            y = y * (self.missing if bad else self.cap)
        except AttributeError:
            pass
        return y


def ported(kind: type[Capped]) -> tuple[nn.Module, nn.Module]:
    """(as it was, with ops)"""
    torch.manual_seed(0)
    model = nn.Sequential(kind()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    return before, model


@pytest.mark.parametrize(
    ("kind", "cap"),
    [
        (OneExpression, 20.0),
        (Statements, 20.0),
        (InsideOfIf, 20.0),
        (OfLibrary, 20.0),
        (OfNamespace, 20.0),
        (OfTransformers, 20.0),
        (Literal, 15.0),
        (WholeAttribute, 15.0),
    ],
)
def test_logits_that_a_tanh_caps_are_one_call(kind: type[Capped], cap: float) -> None:
    before, model = ported(kind)
    x = 30 * torch.randn(3, 32)
    with Activations() as ran, torch.no_grad():
        actual = model(x)
    assert ran.calls == [("softcap", cap)]
    assert_as_right(actual, before, x)
    for m in (before, model):
        m.zero_grad()
    result, wanted = (m(x)[0] if issubclass(kind, InsideOfIf) else m(x) for m in (model, before))
    result.square().sum().backward()
    wanted.square().sum().backward()
    mine, theirs = model[0].head.weight.grad, before[0].head.weight.grad
    exact = copy.deepcopy(before).double()
    exact.zero_grad()
    out = exact(x.double())
    (out[0] if issubclass(kind, InsideOfIf) else out).square().sum().backward()
    truth = exact[0].head.weight.grad
    off = float((theirs.double() - truth).norm())
    assert 0 < float((mine.double() - truth).norm()) <= 2 * off


@pytest.mark.parametrize("kind", [TwoCaps, LeavesBetween, GoesOnAfterAnError, ReadsCounted, ReadsPopped])
def test_what_is_no_cap_keeps_its_tanh(kind: type[Capped]) -> None:
    before, model = ported(kind)
    x = 30 * torch.randn(3, 32)
    with Activations() as ran, torch.no_grad():
        actual = model(x)
    assert "softcap" not in {name for name, _ in ran.calls}
    assert_as_right(actual, before, x)


def test_a_call_that_leaves_or_fails_between_gives_what_it_did() -> None:
    x = torch.randn(3, 32)
    for kind, option in ((LeavesBetween, {"early": True}), (GoesOnAfterAnError, {"bad": True})):
        before, model = ported(kind)
        with torch.no_grad():
            assert_as_right(model[0](x, **option), lambda given, b=before, o=option: b[0](given, **o), x)


def test_another_cap_after_the_port_is_the_cap() -> None:
    before, model = ported(OneExpression)
    before[0].cap = model[0].cap = 5.0
    x = 30 * torch.randn(3, 32)
    with torch.no_grad():
        assert_as_right(model(x), before, x)


def test_code_behind_a_name_runs_as_often_as_before() -> None:
    before, model = ported(ReadsBehind)
    x = 30 * torch.randn(3, 32)
    before[0].config.reads = model[0].config.reads = 0.0
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x)[0], before(x)[0])
    assert model[0].config.reads == before[0].config.reads == 9


def test_a_config_that_raises_where_it_is_read_is_met_by_the_call_that_reads_it() -> None:
    _, model = ported(Asks)
    assert model(torch.randn(3, 32)).shape == (3, 64)
    with pytest.raises(RuntimeError, match="each layer has its own"):
        model[0](torch.randn(3, 32), more=True)


@pytest.mark.parametrize("kind", [TwoSettings, ByInverse, OfLiteral, ReadsOne])
def test_settings_of_one_value_today_are_each_its_own_tomorrow(kind: type[TwoSettings]) -> None:
    x = 30 * torch.randn(3, 32)
    for name in ("a", "b", "inverse"):
        model = nn.Sequential(kind()).eval()
        before = copy.deepcopy(model)
        ferryman.port(model)
        with Activations() as ran, torch.no_grad():
            assert_as_right(model(x), before, x)
        assert ran.calls == [("softcap", 20.0)]
        for m in (model, before):
            setattr(m[0], name, 7.0)
        with torch.no_grad():
            assert_as_right(model(x), before, x)
