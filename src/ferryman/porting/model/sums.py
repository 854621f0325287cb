"""Sums of two values in a tree, and names of them."""

from __future__ import annotations

import ast


def is_sum(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and not isinstance(node.left, ast.Constant)
        and not isinstance(node.right, ast.Constant)
    )


def terms_of(node: ast.expr) -> list[ast.expr] | None:
    """a and b of ``a + b``; beside them, that a method adds, of ``a.add(b)``."""
    if isinstance(node, ast.BinOp) and is_sum(node):
        return [node.left, node.right]
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"
    if not method or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred | ast.Constant):  # type: ignore[attr-defined]
        return None
    return [node.func.value, node.args[0], ast.Constant(True)]  # type: ignore[attr-defined]


def sum_of(statement: ast.stmt) -> ast.BinOp | None:
    """The sum that a statement gives a name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        value = statement.value
        return value if isinstance(value, ast.BinOp) and is_sum(value) else None
    return None


def alias(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement only gives one of the names another, which joins them."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Name) and value.id in names:
            names.add(target.id)
            return True
    return False
