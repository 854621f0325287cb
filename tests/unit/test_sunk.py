"""Sides of an ``if`` that asks for an argument, and dropout in a part."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import ferryman
from ferryman.porting.model.sunk import sunk
from tests.unit import disguises_blind
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right


def _tree(text: str) -> ast.FunctionDef:
    tree = ast.parse(text).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def test_both_sides_have_what_stands_around() -> None:
    text = "def f(self, x, mask=None):\n y = x + 1\n if mask is not None:\n  y = y + mask\n return y * 2\n"
    apart = sunk(_tree(text))
    assert apart is not None and isinstance(apart.body[0], ast.If)
    known: dict[str, object] = {}
    exec(compile(ast.Module([apart], []), "<sunk>", "exec"), known)  # noqa: S102 - our own text
    assert known["f"](None, 1) == 4 and known["f"](None, 1, 5) == 14  # type: ignore[operator]
    other = {n.id for s in apart.body[0].orelse for n in ast.walk(s) if isinstance(n, ast.Name)}
    assert "y" not in other  # names of its own


def test_what_asks_for_a_local_stays() -> None:
    assert sunk(_tree("def f(self, x):\n y = g(x)\n if y is None:\n  y = x\n return y\n")) is None
    assert sunk(_tree("def f(self, x):\n m = g(x)\n m = g(m)\n if m is None:\n  x = x + 1\n return x\n")) is None


def test_an_argument_that_is_put_anew_is_asked_after_that() -> None:
    apart = sunk(_tree("def f(self, x, m):\n m = g(m)\n if m is None:\n  x = x + 1\n return x\n"))
    assert apart is not None and isinstance(apart.body[0], ast.Assign) and isinstance(apart.body[1], ast.If)


_CODE = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.drop = nn.Linear(64, 192), nn.Dropout(0.5)

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return (self.drop((q @ k.mT * 0.25).softmax(-1)) @ v).transpose(1, 2).reshape(b, s, n)
"""


def test_dropout_is_dropped_in_evaluation_alone(tmp_path: Path) -> None:
    kind = load(disguises_blind.HEAD + _CODE, f"ferryman_sunk_{abs(hash(str(tmp_path)))}", tmp_path).Attention
    torch.manual_seed(0)
    twin, x = kind().eval(), torch.randn(2, 5, 64)
    model = torch.nn.Sequential(kind()).eval()
    model[0].load_state_dict(twin.state_dict())
    ferryman.port(model)

    def seeded(given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        result: torch.Tensor = twin(given)
        return result

    for training in (False, True, False):
        model.train(training)
        twin.train(training)
        with ferryman.trace() as trace, torch.no_grad():
            torch.manual_seed(3)
            actual = model(x)
        with torch.no_grad():
            assert_as_right(actual, seeded, x)
        assert ("attention" in {op for op, _ in trace.calls}) is not training
