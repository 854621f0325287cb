"""Syntax trees: copies of them, what is swapped in one, the blocks of statements in it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

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


def swap(tree: Any, new: dict[int, ast.expr]) -> Any:
    """A copy of a tree with other nodes in the place of some, which ids name."""

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new[id(node)] if id(node) in new else self._copied(node)

        def _copied(self, node: ast.AST) -> ast.AST:
            fresh = copy.copy(node)
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    setattr(fresh, name, [self.visit(v) if isinstance(v, ast.AST) else v for v in value])
                elif isinstance(value, ast.AST):
                    setattr(fresh, name, self.visit(value))
            return fresh

    return Swap().visit(tree)


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function, or in a part of one."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt) and not isinstance(node, ast.ClassDef):
                yield body


def children(e: ast.expr) -> list[ast.expr]:
    return [c for c in ast.iter_child_nodes(e) if isinstance(c, ast.expr)]


def attribute_of(node: ast.expr, self_name: str | None) -> str | None:
    """ "act.inner" of ``self.act.inner``, or of ``self.act["inner"]``; "act.0" of ``self.act[0]``."""
    names: list[str] = []
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and (str(node.slice.value).isidentifier() or (isinstance(node.slice.value, int) and node.slice.value >= 0))
    ):
        names.append(str(node.slice.value))
        node = node.value
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    mine = isinstance(node, ast.Name) and node.id == self_name and names
    return ".".join(reversed(names)) if mine else None


def around(tree: ast.AST, part: ast.AST) -> set[int]:
    """A part of a tree and what it stands in, by id."""
    if tree is part:
        return {id(tree)}
    inside = set[int]().union(*(around(child, part) for child in ast.iter_child_nodes(tree)))
    return inside | {id(tree)} if inside else inside


KEPT = "ferryman_kept"


def mark_kept(tree: ast.AST) -> None:
    """Mark names that are stored where others may ask which function they are: what stands for one is another."""
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(t, ast.Attribute | ast.Subscript) for t in targets
        ):
            called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            asked += [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute) and id(n) not in called]
        for name in asked:
            setattr(name, KEPT, True)
