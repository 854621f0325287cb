"""Names say what a thing is: not found, made, told or held, which say how it came about. The formatter sees all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VAGUE = {"found", "made", "told", "held"}
FILES = sorted(
    path for folder in ("src", "benchmarks", "ci", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
)

WORD = re.compile(rb"\b_*(found|made|told|held)\b", re.I)


def vague(tree: ast.AST) -> Iterator[str]:
    """Of variables, parameters, fields, functions and classes, private ones and constants, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        else:
            continue
        if name.strip("_").lower() in VAGUE:
            yield f"{name}, line {node.lineno}"


def test_no_local_says_only_how_it_came_about() -> None:
    texts = {path.relative_to(ROOT): text for path in FILES if WORD.search(text := path.read_bytes())}
    names = [f"{path}: {name}" for path, text in texts.items() for name in vague(ast.parse(text))]
    known = [name for name in names if name.startswith(_FIELDS)]
    assert len(known) == len(_FIELDS), "a name is gone: take it from the list"
    assert names == known, "say what it is"


# fields of documents that others keep
_FIELDS = ("src/ferryman/porting/capsule/model.py: found", "src/ferryman/porting/model/results.py: found")


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "def f(told): pass",
        "for held in x: pass",
        "(made := 1)",
        "def told(): pass",
        "x._held = 1",
        "HELD = 2",
        "class Made: pass",
    ],
)
def test_they_are_seen(text: str) -> None:
    assert list(vague(ast.parse(text)))
    assert not list(
        vague(
            ast.parse(
                text.lower()
                .replace("found", "cells")
                .replace("told", "reason")
                .replace("held", "kept")
                .replace("made", "model")
            )
        )
    )


def test_the_formatter_lays_out_every_line() -> None:
    kept = re.compile(rb"# fmt: *" + rb"(skip|off)")
    folders = ("src", "benchmarks", "ci", "tests", "examples")
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert [p.relative_to(ROOT) for p in paths if kept.search(p.read_bytes())] == []
