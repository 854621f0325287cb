"""Benchmarks and generic tests treat every op alike: no branch of theirs asks for one op or family by name.

A test may have an op as its example, and may read that op's rows. What it does must not depend on which op of many is
at hand: what ops differ in stands in their evidence, or in a file of ``tests/ops/<family>/`` that the test finds there
(`tests/families.py`), as does what one op alone has. So no generic test has a table of ops, which a new one would have
to join.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.unit.test_one_folder import names

ROOT = Path(__file__).resolve().parents[2]


def branches(source: str, kept: bool = False) -> Iterator[tuple[int, str]]:
    """(line, name) of each op or family that the test of an ``if`` or ``while`` has as a string; kept: or a test whose
    answer is kept. Tests of the project take one op's rows as examples so."""
    for node in ast.walk(ast.parse(source)):
        asked = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else None
        begins = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith")
        if asked is not None or (kept and (begins or isinstance(node, ast.Compare))):
            for part in ast.walk(node if asked is None else asked):
                if isinstance(part, ast.Constant) and part.value in names():
                    yield part.lineno, str(part.value)


def counted(value: ast.expr) -> bool:
    """How often a model calls an op: a small number, or a sum with one."""
    parts = [part for part in ast.walk(value) if not isinstance(part, ast.operator | ast.expr_context)]
    numbers = [part for part in parts if isinstance(part, ast.Constant) and part.value in range(1000)]
    return bool(numbers) and all(part in numbers or isinstance(part, ast.BinOp | ast.Name) for part in parts)


def ops_in(parts: Iterable[ast.expr | None]) -> set[str]:
    return {str(part.value) for part in parts if isinstance(part, ast.Constant) and part.value in names()}


def parts_of(row: ast.expr | None) -> list[ast.expr]:
    return row.elts if isinstance(row, ast.Tuple) else row.args if isinstance(row, ast.Call) else []


def tables(source: str) -> Iterator[tuple[int, str]]:
    """(line, ops) of what says something of each of three ops or more: a dictionary by op, but for how often a model
    calls each; or rows of more than a name."""
    for node in ast.walk(ast.parse(source)):
        known = set[str]()
        if isinstance(node, ast.Dict):
            if not all(counted(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None):
                known = ops_in([*node.keys, *(part for key in node.keys for part in parts_of(key))])
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            rows = [parts_of(one) for one in node.elts]
            known = ops_in(part for row in rows if len(row) > 1 for part in row)
        if len(known) >= 3:
            yield node.lineno, ", ".join(sorted(known))


def files() -> list[str]:
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT).parts[1] != "ops")
    return sorted(path.relative_to(ROOT).as_posix() for path in (*(ROOT / "benchmarks").rglob("*.py"), *tests))


@pytest.mark.parametrize("file", files())
def test_no_branch_asks_for_one_op(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    kept = file.startswith("benchmarks/")
    places = [f"{file}:{line} asks for {name}" for line, name in branches(source, kept)]
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


@pytest.mark.parametrize("source", ['here = line.op != "attention"', 'own = not op.startswith("attention") and x'])
def test_an_answer_that_is_kept_is_found(source: str) -> None:
    assert list(branches(source, kept=True)) and not list(branches(source))


# Tables that stay, and why.
STAY = {"tests/unit/lookalikes.py": "it writes modules as models have them, with one fault each: none is an op's"}


@pytest.mark.parametrize("file", [file for file in files() if file.startswith("tests/")])
def test_no_table_has_a_row_for_each_of_some_ops(file: str) -> None:
    places = [f"{file}:{line} has rows for {ops}" for line, ops in tables((ROOT / file).read_text(encoding="utf-8"))]
    required = "what the ops' own cases say, or a file of tests/ops/<family>/ that is found there (tests/families.py)"
    assert bool(places) == (file in STAY), f"{places}; required: {required}"


@pytest.mark.parametrize(
    "source",
    [
        'ROWS = {"softmax": (), "rms_norm": (None, 1e-6), "linear": (None,)}',
        'WHY = {("softmax", "cuda"): "a", ("rms_norm", "cuda"): "b", ("linear", "cuda"): "c"}',
        'WIDEST = {"softmax": 262_144, "rms_norm": 262_144, "linear": 131_072}',
        'KERNELS = {"softmax": right, "rms_norm": wrong, "linear": None}',
        'pytest.mark.parametrize(("op", "rest"), [("softmax", ()), ("rms_norm", (2,)), ("linear", (2, 2))])',
        'for op, n in (("softmax", 3), ("rms_norm", 4), ("linear", 5)): pass',
        'CALLS = [call("softmax", 3), call("rms_norm", 4), call("linear", 5)]',
    ],
)
def test_a_table_is_found(source: str) -> None:
    assert list(tables(source))


def test_counts_lists_and_examples_are_none() -> None:
    assert not list(tables('assert calls == {"softmax": 1, "rms_norm": 2 * n + 1, "linear": n - 1, **more}'))
    assert not list(tables('ops, dtypes = ["softmax", "rms_norm", "linear"], ["bf16"]'))
    assert not list(tables('for op, n in (("softmax", 3), ("softmax", 4), ("linear", 5)): pass'))


def test_an_example_is_none() -> None:
    assert not list(branches('rows = [r for r in rows if r.op == "softmax"]\ncheck("softmax")\nassert op == "softmax"'))
