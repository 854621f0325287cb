"""Scores that are masked in several steps: what is served, rows in which all is hidden, and what stays as it was."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.errors import PortError

B, H, S, D = 2, 3, 9, 16
LOW = float("-inf")


class TwoFills(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e9)
        s = s.masked_fill(pad[:, None, None, :], -1e9)
        return s.softmax(-1) @ v


class TwoInfinities(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = torch.where(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(), s, float("-inf"))
        s = s.masked_fill(pad[:, None, None, :], float("-inf"))
        return s.softmax(-1) @ v


class TwoNumbers(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf"))
        s = s.masked_fill(pad[:, None, None, :], -1e9)
        return s.softmax(-1) @ v


class TwoAdded(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        low = torch.finfo(s.dtype).min
        s = s + torch.full((q.shape[2], q.shape[2]), low, dtype=s.dtype).triu(1)
        s = s + pad[:, None, None, :].to(s.dtype) * low
        return s.softmax(-1) @ v


class FilledAndAdded(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        low = torch.finfo(s.dtype).min
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), low)
        s = s + pad[:, None, None, :].to(s.dtype) * low
        return s.softmax(-1) @ v


class BiasedAndFilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        n = q.shape[2]
        far = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        s = q @ k.transpose(-2, -1) / math.sqrt(D) + self.slopes * far
        s = s.masked_fill(far > 0, torch.finfo(s.dtype).min)
        s = s.masked_fill(pad[:, None, None, :], torch.finfo(s.dtype).min)
        return s.softmax(-1) @ v


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, S, S, generator=torch.Generator().manual_seed(1)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s + self.table.unsqueeze(0)
        s = s.masked_fill(pad[:, None, None, :], float("-inf"))
        return s.softmax(-1) @ v


class OfScores(nn.Module):
    """What is hidden follows from scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(s < -50.0, float("-inf"))
        s = s.masked_fill(pad[:, None, None, :], float("-inf"))
        return s.softmax(-1) @ v


class Small(nn.Module):
    """A number that hides, which a score may be less than."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf"))
        s = s.masked_fill(pad[:, None, None, :], -1e4)
        return s.softmax(-1) @ v


class SmallBeside(nn.Module):
    """A number that hides, which what is added beside may bring back."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e9)
        s = s + pad[:, None, None, :].to(s.dtype) * -1e9
        return s.softmax(-1) @ v


class File(nn.Module):
    """A number of the file's, which may become another."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), float("-inf"))
        s = s.masked_fill(pad[:, None, None, :], LOW)
        return s.softmax(-1) @ v


class Attribute(nn.Module):
    """A number that hides, of the module's."""

    def __init__(self, fill: Any) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s.masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), self.fill)
        s = s.masked_fill(pad[:, None, None, :], self.fill)
        return s.softmax(-1) @ v


class Chosen(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = torch.where(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(), s, -1e9)
        s = torch.where(pad[:, None, None, :], -1e9, s)
        return s.softmax(-1) @ v


class Tiers(nn.Module):
    """Of two numbers that hide the smaller one hides more."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(D)
        s = s + torch.where(torch.arange(S) < 5, -0.9e29, -1.5e29)
        s = s + torch.zeros(S, S)
        return s.softmax(-1) @ v


SERVED = (TwoFills, TwoInfinities, TwoNumbers, TwoAdded, FilledAndAdded, BiasedAndFilled, Learned)
LEFT = (OfScores, Small, SmallBeside)
TRAINED = (TwoFills, TwoInfinities, TwoAdded)  # whose gradients are the op's, too


def _given(size: float = 1.0) -> tuple[Tensor, ...]:
    """The first sequence is whole, the second has padding before it: in its first rows all is hidden."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, S, D, generator=draw) for _ in range(3))
    pad = torch.zeros(B, S, dtype=torch.bool)
    pad[1, :4] = True
    return q * size, k, v, pad


def _pair(kind: Any) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(kind()).eval()
    before = copy.deepcopy(model)
    try:
        ferryman.port(model)
    except PortError:
        assert kind in LEFT
    return model[0], before[0]


def _cast(given: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in given)


def _as_near(actual: Tensor, own: Tensor, exact: Tensor) -> None:
    """As near the exact result as the code's own, or a few roundings of it."""
    assert torch.equal(actual.isnan(), exact.isnan())
    a, o, e = (x.double().nan_to_num(0.0) for x in (actual, own, exact))
    room = 4 * torch.finfo(actual.dtype).eps * float(e.abs().max())
    assert float((a - e).abs().max()) <= max(2 * float((o - e).abs().max()), room)


@pytest.mark.parametrize("kind", SERVED)
def test_steps_are_served_and_right_in_rows_that_see_nothing(kind: Any) -> None:
    model, before = _pair(kind)
    for dtype, size in ((torch.float32, 1.0), (torch.float32, 40.0), (torch.bfloat16, 1.0)):
        given = _cast(_given(size), dtype)
        model.to(dtype)
        with torch.no_grad(), ferryman.trace() as trace:
            actual = model(*given)
        assert [called for called, _ in trace.calls] == ["attention"]
        exact = copy.deepcopy(before).double()(*_cast(given, torch.float64))
        _as_near(actual, before.to(dtype)(*given), exact)


@pytest.mark.parametrize("kind", SERVED)
def test_gradients_are_the_codes(kind: Any) -> None:
    model, before = _pair(kind)
    given = _given()
    sides = []
    for module, dtype in ((model, torch.float32), (before, torch.float32), (copy.deepcopy(before), torch.float64)):
        values = [x.requires_grad_(x.is_floating_point()) for x in (t.clone() for t in _cast(given, dtype))]
        with ferryman.trace() as trace:
            result = module.to(dtype)(*values)
        if module is model:
            assert [called for called, _ in trace.calls] == (["attention"] if kind in TRAINED else [])
        rows = torch.ones_like(result)
        rows[1, :, :4] = 0.0 if result.isnan().any() else 1.0  # of NaN nothing is asked
        weights = torch.cos(torch.arange(result.numel(), dtype=dtype)).view(result.shape) * rows
        loss = torch.where(rows > 0, result, 0.0).mul(weights).sum()
        sides.append(torch.autograd.grad(loss, [*values[:3], *module.parameters()]))
    for actual, own, exact in zip(*sides, strict=True):
        _as_near(actual, own, exact)


@pytest.mark.parametrize("kind", LEFT)
def test_steps_that_may_mean_something_else_stay(kind: Any) -> None:
    model, before = _pair(kind)
    for size in (1.0, 300.0):
        given = _given(size)
        with torch.no_grad(), ferryman.trace() as trace:
            actual = model(*given)
        assert "attention" not in {called for called, _ in trace.calls}
        _as_near(actual, before(*given), before.double()(*_cast(given, torch.float64)))
        before.float()


def test_another_number_of_the_files_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = _pair(File)
    given = _given()
    for number in (LOW, -1.0):
        monkeypatch.setitem(globals(), "LOW", number)
        with torch.no_grad():
            _as_near(model(*given), before(*given), copy.deepcopy(before).double()(*_cast(given, torch.float64)))


def test_masks_that_broadcast_queries_and_code_of_other_dimensions_stay_right() -> None:
    for kind in SERVED:
        model, before = _pair(kind)
        q, k, v, pad = _given()
        for given in ((q[:1], k[:1], v[:1], pad), (q[1:], k[:1], v[:1], pad), (q[0], k[0], v[0], pad[:, :S])):
            with torch.no_grad():
                try:
                    own = before(*given)
                except (RuntimeError, IndexError):
                    continue
                exact = copy.deepcopy(before).double()(*_cast(given, torch.float64))
                _as_near(model(*given), own, exact)


@pytest.mark.parametrize("fill", [LOW, -1e9, np.float64(-1e9), float("nan")], ids=str)
def test_a_number_of_the_modules_is_itself(fill: Any) -> None:
    model, before = (nn.Sequential(Attribute(fill)).eval() for _ in range(2))
    with contextlib.suppress(PortError):
        ferryman.port(model)
    given = _given()
    with torch.no_grad(), ferryman.trace() as trace:
        actual = model[0](*given)
        assert ("attention" in {op for op, _ in trace.calls}) == (fill in (LOW, -1e9) and type(fill) is float)
        _as_near(actual, before[0](*given), before.double()[0](*_cast(given, torch.float64)))


@pytest.mark.parametrize("kind", [*SERVED, Chosen])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_under_autocast_and_in_float16_rows_that_see_nothing_are_the_codes(kind: Any, narrow: torch.dtype) -> None:
    model, before = _pair(kind)
    given = _given()
    with torch.autocast("cpu", narrow):
        assert _numbers(model, given) == _numbers(before, given)
    given = _cast(given, torch.float16)
    assert _numbers(model.half(), given) == _numbers(before.half(), given)


@torch.no_grad()
def _numbers(module: nn.Module, given: tuple[Tensor, ...]) -> Any:
    """Where a result has numbers, or that there is none: float16 has not all that hide."""
    try:
        return module(*given).isfinite().tolist()
    except RuntimeError:
        return None


def test_what_hides_more_hides_more() -> None:
    model, before = _pair(Tiers)
    given = _given()
    with torch.no_grad():
        _as_near(model(*given), before(*given), before.double()(*_cast(given, torch.float64)))


def test_a_mask_in_double_precision_stays_the_codes() -> None:
    model, before = _pair(TwoAdded)
    q, k, v, pad = _given()
    with torch.no_grad(), ferryman.trace() as trace:
        actual = model(q.double(), k.double(), v.double(), pad)
        assert torch.equal(actual, before(q.double(), k.double(), v.double(), pad))
    assert not trace.calls
