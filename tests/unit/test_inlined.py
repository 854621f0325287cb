"""Functions that a forward names are written where it calls them, and values of statements that go are read later: only
where both give what they gave."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.porting.model.inlined import inlined
from tests.unit.test_disguises import assert_as_right

# a function's lines -> what becomes of them; "" where they stay
WRITTEN = {
    "f = lambda t: t + 1\nreturn f(x)": "return x + 1",
    "f = lambda t: t.view(-1) * 2\nreturn f(g(x))": "return g(x).view(-1) * 2",
    "def f(a, b):\n    return a * b\nreturn f(x, x.T)": "return x * x.T",
    "f = lambda t: t * s\ns = 2\ny = f(x)\ns = 3\nreturn y + f(x)": "s = 2\ny = x * s\ns = 3\nreturn y + x * s",
    "f = lambda t: t + 1\nreturn f(x) + g(f)": "f = lambda t: t + 1\nreturn x + 1 + g(f)",
    "f = lambda t: t * t\nreturn f(g(x))": "",
    "f = lambda t: h() + t\nreturn f(g(x))": "",
    "f = lambda a, b: a - b\nreturn f(b=x, a=1)": "",
    "f = lambda t, n=2: t * n\nreturn f(x)": "",
    "f = lambda t: t + 1\nf = g(f)\nreturn f(x)": "",
    "f = lambda t: f(t - 1)\nreturn f(x)": "",
    "f = lambda t: [t for t in t]\nreturn f(x)": "",
    "f = lambda t: t + 1\nreturn [f(x) for x in x]": "",
    "def g():\n    f = lambda t: t + 1\n    return f\nreturn f(x)": "",
    "@h\ndef f(t):\n    return t\nreturn f(x)": "",
    "def f(t):\n    yield t\nreturn f(x)": "",
}


def _function(lines: str) -> ast.FunctionDef:
    tree = ast.parse("def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines.splitlines())).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


@pytest.mark.parametrize("lines", WRITTEN)
def test_what_is_written_out(lines: str) -> None:
    assert ast.unparse(inlined(_function(lines))) == ast.unparse(_function(WRITTEN[lines] or lines))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(32, 50), nn.Linear(32, 32)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.d = nn.Linear(32, 32), 8
        angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.5, 0.2, 0.1]))
        self.register_buffer("c", torch.cat([angles, angles], -1).cos())
        self.register_buffer("s", torch.cat([angles, angles], -1).sin())
        self.register_buffer("z", torch.polar(torch.ones(9, 4), angles))


class Halves(Turning):
    def forward(self, x: Tensor) -> Tensor:
        turn = lambda t: torch.cat([-t[..., self.d // 2 :], t[..., : self.d // 2]], -1)  # noqa: E731
        q = self.q(x).unflatten(-1, (4, 8))
        c, s = self.c[: x.shape[1], None], self.s[: x.shape[1], None]
        return q * c + turn(q) * s


class Complex(Turning):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8))
        z = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2)) * self.z[None, : x.shape[1], None]
        return torch.view_as_real(z).flatten(3).type_as(q)


class Shifted(Turning):
    """Of a name that two have: the inner one is another's."""

    def forward(self, x: Tensor) -> Tensor:
        def part() -> Tensor:
            turn = lambda t: -t  # noqa: E731
            return turn(x)

        turn = torch.neg
        q = self.q(part()).unflatten(-1, (4, 8))
        return q * self.c[: x.shape[1], None] + turn(q) * self.s[: x.shape[1], None]


@pytest.mark.parametrize(("kind", "served"), [(Halves, True), (Complex, True), (Shifted, False)])
def test_what_turns_is_served_as_it_was(kind: Callable[[], nn.Module], served: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 7, 32)
    before = copy.deepcopy(model)
    ferryman.port(model)
    for given in (x, torch.randn(7, 7, 32), torch.randn(1, 1, 32)):
        with ferryman.trace() as trace, torch.no_grad():
            assert_as_right(model(given), before, given)
        assert ("rope" in {op for op, _ in trace.calls}) is served


class Plain(Head):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = functional.log_softmax(self.head(x), dim=-1)
        return -z.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


class Renamed(Head):
    """What the head takes has another value where the loss stands."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = functional.log_softmax(self.head(x), dim=-1)
        x = x * 2
        return -z.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean() + x.sum()


class Between(Head):
    """Another child runs between."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = functional.log_softmax(self.head(x), dim=-1)
        w = self.other(x)
        return -z.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean() + w.sum()


class Twice(Head):
    """The statement has another reader."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = functional.log_softmax(self.head(x), dim=-1)
        return -z.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean(), z


@pytest.mark.parametrize(("kind", "served"), [(Plain, True), (Renamed, False), (Between, False), (Twice, False)])
def test_what_a_statement_computed_is_read_later(kind: Callable[[], nn.Module], served: bool) -> None:
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(2, 7, 32), torch.randint(50, (2, 7))
    before, order = copy.deepcopy(model), []
    ferryman.port(model)
    for child in (model.head, model.other):
        child.register_forward_hook(lambda *given: order.append(given[0].out_features))
    with ferryman.trace() as trace:
        actual = model(x, y)
    with torch.no_grad():
        assert_as_right(actual, lambda one: before(one, y), x)
    assert ("cross_entropy" in {op for op, _ in trace.calls}) is served
    assert order == ([50, 32] if kind is Between else [50])
