"""Experts without a gate, in models: rows sorted by expert, two grouped products, and a weighted sum.

What asks whether an expert has rows, before it adds to these, decides nothing; what looks like that may.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as models write it

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model import blocks, skips
from ferryman.porting.model.recognise import Refusal
from tests.unit.test_disguises import assert_as_right, assert_gradients_as_right

EXPERTS, CHOSEN, WIDTH, INNER, TOKENS = 4, 2, 24, 16, 10
BESIDE = {"moe_permute", "grouped_linear", "bias_act", "moe_combine"}


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Pool(nn.Module):
    """Weights (experts, out, in); a subclass says what a pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.act = Squared()


class Asks(Pool):
    """Goes over the experts that were chosen, and asks again whether one has tokens."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=shares.dtype)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=len(self.up)).permute(2, 1, 0)
            some = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1)
        for e in some:
            e = e.item()
            place, token = torch.where(mask[e])
            if token.numel() == 0:
                continue
            y = F.linear(x[token], self.up[e])
            y = F.linear(self.act(y), self.down[e])
            y = y * shares[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out.to(x.dtype)


class Gelu(Pool):
    """Every expert in turn, by a mask of tokens; the activation is a function."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            token, place = torch.where(ids == e)
            y = F.gelu(x[token] @ self.up[e].T) @ self.down[e].T
            out.index_add_(0, token, y * shares[token, place, None])
        return out


class Turned(nn.Module):
    """Weights (experts, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 5)
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.first)):
            token, place = torch.where(ids == e)
            if len(token) == 0:
                continue
            y = F.silu(x[token] @ self.first[e]) @ self.second[e]
            out.index_add_(0, token, y * shares[token, place, None])
        return out


class SharesFirst(Pool):
    """Tokens are scaled before the activation."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            token, place = torch.where(ids == e)
            y = self.act((x[token] * shares[token, place, None]) @ self.up[e].T) @ self.down[e].T
            out.index_add_(0, token, y)
        return out


class NotAlone(Pool):
    """An expert with one token adds nothing."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            token, place = torch.where(ids == e)
            if token.numel() < 2:
                continue
            y = self.act(x[token] @ self.up[e].T) @ self.down[e].T
            out.index_add_(0, token, y * shares[token, place, None])
        return out


class OfOther(Pool):
    """Asks as the right ones do, but of rows that it does not add to: an expert none of whose shares is large."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in ids.unique():
            token, place = torch.where(ids == e)
            large = torch.nonzero(shares[token, place].abs() > 1e-30)
            if large.numel() == 0:
                continue
            y = self.act(F.linear(x[token], self.up[e])) @ self.down[e].mT
            out.index_add_(0, token, y * shares[token, place, None])
        return out


class Counts(Pool):
    """Asks of rows that it adds to, in code whose turns hang together: each takes a share of those before."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out, n = torch.zeros_like(x), 0
        for e in ids.unique():
            token, place = torch.where((ids == e) & (shares.abs() > 1e-30))
            if token.numel() == 0:
                continue
            n = n + 1
            y = self.act(F.linear(x[token], self.up[e])) @ self.down[e].mT
            out.index_add_(0, token, y * n * shares[token, place, None] / n)
        return out


class Marks(Pool):
    """As `Counts`, but that a function writes down which experts it was called for."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out, seen = torch.zeros_like(x), torch.zeros(1, dtype=x.dtype)
        for e in ids.unique():
            token, place = torch.where((ids == e) & (shares.abs() > 1e-30))
            if token.numel() == 0:
                continue
            y = marked(seen, self.act(F.linear(x[token], self.up[e]))) @ self.down[e].mT
            out.index_add_(0, token, y * shares[token, place, None])
        return out * (seen / len(ids.unique()))


def marked(seen: Tensor, y: Tensor) -> Tensor:
    seen.add_(1)
    return y


class Cubed(Pool):
    """An activation that no op has."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            token, place = torch.where(ids == e)
            y = F.relu(x[token] @ self.up[e].T).pow(3) @ self.down[e].T
            out.index_add_(0, token, y * shares[token, place, None])
        return out


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.experts, self.router = kind(), nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(CHOSEN)
        return self.experts(x, ids, shares)


def _ported(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Net(kind).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    return model, before, torch.randn(TOKENS, WIDTH)


@pytest.mark.parametrize("kind", [Asks, Gelu, Turned])
def test_they_are_served_with_their_gradients(kind: Callable[[], nn.Module]) -> None:
    model, before, x = _ported(kind)
    with ferryman.trace() as trace, torch.no_grad():
        actual = model(x.clone())
    assert {op for op, _ in trace.calls} >= BESIDE
    assert_as_right(actual, before, x)
    assert_gradients_as_right(model, before, x)


def test_an_activation_inside_is_not_ported_by_itself() -> None:
    torch.manual_seed(0)
    report = ferryman.port(Net(Asks).eval())
    assert [site.path for site in report.ported if site.path.startswith("experts")] == ["experts"]
    assert report.calls()["grouped_linear"] == 2
    assert report.calls()["bias_act"] == 1


@pytest.mark.parametrize("kind", [SharesFirst, NotAlone, OfOther, Counts, Marks, Cubed])
def test_what_looks_like_them_keeps_its_results(kind: Callable[[], nn.Module]) -> None:
    """Small shares are drawn, which none of the proof's are."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(TOKENS, WIDTH)
    before = copy.deepcopy(model)
    net = nn.ModuleDict({"experts": model})
    try:
        ferryman.port(net)
    except PortError:
        return  # nothing of it is served
    ids = torch.randint(EXPERTS, (TOKENS, CHOSEN))
    ids[0] = EXPERTS - 1
    ids[1:][ids[1:] == EXPERTS - 1] = 0
    for size in (1.0, 1e-35):
        shares = size * torch.rand(TOKENS, CHOSEN)
        with ferryman.trace() as trace:
            actual = model(x, ids, shares)
        assert "grouped_linear" not in {op for op, _ in trace.calls}
        assert torch.equal(actual, before(x, ids, shares))


class Wide(Pool):
    """Its result is of the shares' dtype."""

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=shares.dtype)
        for e in range(len(self.up)):
            token, place = torch.where(ids == e)
            y = self.act(F.linear(x[token], self.up[e])) @ self.down[e].mT
            out.index_add_(0, token, (y * shares[token, place, None]).to(out.dtype))
        return out


def test_a_result_of_another_inputs_dtype_stays_that() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Wide().bfloat16().eval()})
    before = copy.deepcopy(model)
    ferryman.port(model)
    x, ids = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randint(EXPERTS, (TOKENS, CHOSEN))
    for dtype in (torch.float32, torch.bfloat16):
        shares = torch.rand(TOKENS, CHOSEN, dtype=dtype)
        with ferryman.trace() as trace:
            actual = model["experts"](x, ids, shares)
        assert actual.dtype is before["experts"](x, ids, shares).dtype is dtype
        assert ("grouped_linear" in {op for op, _ in trace.calls}) is (dtype is torch.bfloat16)


def test_another_activation_of_the_same_class_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before, x = _ported(Asks)
    monkeypatch.setattr(Squared, "forward", lambda self, x: x.sin())
    assert_as_right(model(x), before, x)


SKIP = """
def f(self, out, x, where, seen):
    n = 0
    for e in range(3):
        rows, place = torch.where(where[e])
        at = seen.count(e)
        {test}
            continue
        y = x[rows] * 2
        {more}
        {add}
    return {result}
"""
RIGHT = {
    "test": "if rows.numel() == 0:",
    "more": "z = F.silu(y) @ self.up[e].T + self.act(y)",
    "add": "out.index_add_(0, rows, z)",
    "result": "out",
}


def _skips(**other: str) -> int:
    (function,) = ast.parse(textwrap.dedent(SKIP.format(**RIGHT | other))).body
    assert isinstance(function, ast.FunctionDef)
    (loop,) = (s for s in function.body if isinstance(s, ast.For))
    pure = ("torch.where", "F.silu", "F.threshold", "torch.add", "self.act")
    code = skips.Code(function, "self", frozenset({"up"}), lambda called: ast.unparse(called) in pure)
    return len(list(skips.of_nothing(loop, code)))


@pytest.mark.parametrize("test", ["rows.numel() == 0", "rows.shape[0] == 0", "rows.size(0) == 0"])
@pytest.mark.parametrize("add", ["out.index_add_(0, rows, z.to(out.dtype))", "out[rows] += z"])
def test_such_a_test_decides_nothing(test: str, add: str) -> None:
    assert _skips(test=f"if {test}:", add=add) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"test": "if rows.numel() == 1:"},
        {"test": "if rows.numel() <= 0:"},
        {"test": "if at.numel() == 0:", "add": "out.index_add_(0, at, z)"},
        {"test": "if rows.shape[1] == 0:"},
        {"add": "out.index_add_(0, y, z)"},
        {"add": "out.index_add_(1, rows, z)"},
        {"add": "out.index_copy_(0, rows, z)"},
        {"add": "out[rows] -= z"},
        {"add": "out += z"},
        {"more": "z = y.add_(1)"},
        {"more": "z = torch.add(y, 1, out=x)"},
        {"more": "z = F.threshold(y, 0.5, 1.0, True)"},
        {"more": "z = note(y)"},
        {"more": "z = self.note(y)"},
        {"more": "z = operator.iadd(y, 1)"},
        {"more": "z = y * self.scale"},
        {"more": "z = y * at"},
        {"more": "n = n + 1\n        z = y * n"},
        {"more": "x = x + 1\n        z = y * x"},
        {"more": "one = seen[e] = 1.0\n        z = y"},
        {"more": "self.kept = z = y"},
        {"more": "count += 1"},
        {"more": "rows = z = y"},
        {"more": "z = [y]"},
        {"more": "z = (lambda: y)()"},
        {"result": "out, z"},
        {"result": "y"},
    ],
)
def test_such_a_test_may_decide_something(other: dict[str, str]) -> None:
    assert _skips(**other) == 0


def test_without_that_the_right_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No input of its proof is on both sides of its test."""
    monkeypatch.setattr(skips, "of_nothing", lambda loop, code: ())
    monkeypatch.setattr(blocks, "_roles", {})
    role = blocks.role_of(Asks())
    assert isinstance(role, Refusal) and "token.numel() == 0" in role.reason
