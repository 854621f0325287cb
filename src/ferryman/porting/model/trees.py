"""Syntax trees: copies of them, what is swapped in one, the blocks of statements in it."""

from __future__ import annotations

import ast
import copy
from typing import TypeVar

Tree = TypeVar("Tree", bound=ast.AST)


def copied(tree: Tree) -> Tree:
    """A copy of a tree, with each node's places and marks."""
    fresh = copy.copy(tree)
    for name, value in vars(tree).items():
        if isinstance(value, ast.AST):
            setattr(fresh, name, copied(value))
        elif isinstance(value, list):
            setattr(fresh, name, [copied(v) if isinstance(v, ast.AST) else v for v in value])
    return fresh
