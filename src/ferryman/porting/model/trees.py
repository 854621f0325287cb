"""Syntax trees: copies of them, what is swapped in one, the blocks of statements in it."""

from __future__ import annotations

import ast
from typing import TypeVar

Tree = TypeVar("Tree", bound=ast.AST)


def copied(tree: Tree) -> Tree:
    """A copy of a tree, with each node's places and marks."""
    fresh = type(tree).__new__(type(tree))
    own = fresh.__dict__
    for name, value in tree.__dict__.items():
        if isinstance(value, ast.AST):
            own[name] = copied(value)
        elif isinstance(value, list):
            own[name] = [copied(v) if isinstance(v, ast.AST) else v for v in value]
        else:
            own[name] = value
    return fresh
