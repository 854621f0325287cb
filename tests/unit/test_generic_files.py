"""Benchmarks and generic tests treat every op alike: no branch of theirs asks for one op or family by name.

A test may have an op as its example, and may read that op's rows. What it does must not depend on which op of many is
at hand: what ops differ in stands in their evidence, or in a table of the test's parameters. What one op alone has
stands in ``tests/ops/<family>/``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_one_folder import names

ROOT = Path(__file__).resolve().parents[2]


def branches(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each op or family that the test of an ``if`` or ``while`` has as a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Constant) and part.value in names():
                    yield part.lineno, str(part.value)


def files() -> list[str]:
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT).parts[1] != "ops")
    return sorted(path.relative_to(ROOT).as_posix() for path in (*(ROOT / "benchmarks").rglob("*.py"), *tests))


@pytest.mark.parametrize("file", files())
def test_no_branch_asks_for_one_op(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    places = [f"{file}:{line} asks for {name}" for line, name in branches(source)]
    assert not places, f"{places}; required: the op's own evidence, or a test in tests/ops/<family>/"


@pytest.mark.parametrize(
    "source",
    [
        'if op == "softmax": pass',
        'x = 1 if op in ("rope", "rope_") else 2',
        'if op.startswith("attention"): pass',
        'while name != "linear": pass',
    ],
)
def test_a_branch_is_found(source: str) -> None:
    assert list(branches(source))


def test_an_example_is_none() -> None:
    assert not list(branches('rows = [r for r in rows if r.op == "softmax"]\ncheck("softmax")\nassert op == "softmax"'))
