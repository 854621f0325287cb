"""Turns of a loop that are left out where there is nothing to add: whether such a test is true decides nothing.

``if rows.numel() == 0: continue`` before code that only adds to ``rows`` of a result: of no rows that adds nothing, so
the code with the test and without it have one result, whichever side inputs take.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

_PURE = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Call)
_AROUND = (ast.expr_context, ast.operator, ast.unaryop, ast.keyword)


def of_nothing(loop: ast.For, function: ast.FunctionDef) -> Iterator[ast.If]:
    """The loop's own tests of that kind. function: all code that reads names that the loop binds."""
    loads = _loads(function)
    for place, statement in enumerate(loop.body):
        rows = _emptied(statement)
        rest = loop.body[place + 1 :]
        if rows and rest and _adds_alone(rest, rows):
            names = {t.id for s in rest if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
            inside = _loads(*rest)
            if rows not in names and all(loads[name] == inside[name] for name in names):
                assert isinstance(statement, ast.If)
                yield statement


def _loads(*trees: ast.AST) -> Counter[str]:
    names = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return Counter(n.id for n in names if isinstance(n.ctx, ast.Load))


def _emptied(statement: ast.stmt) -> str:
    """The name that a statement asks to have no elements, and goes on with the next turn if so; else ""."""
    if not (isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Continue)):
        return ""
    match statement.test:
        case ast.Compare(
            ast.Call(ast.Attribute(ast.Name(name), "numel"), [], [])
            | ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(0))
            | ast.Call(ast.Attribute(ast.Name(name), "size"), [ast.Constant(0)], [])
            | ast.Call(ast.Name("len"), [ast.Name(name)], []),
            [ast.Eq()],
            [ast.Constant(0)],
        ):
            return name
    return ""


def _adds_alone(statements: list[ast.stmt], rows: str) -> bool:
    """Whether they compute values, and the last one adds these to ``rows`` of a tensor."""
    *before, last = statements
    if not all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and _pure(s.value) for s in before):
        return False
    match last:
        case ast.Expr(
            ast.Call(ast.Attribute(ast.Name(), "index_add_"), [ast.Constant(0), ast.Name(place), value], [])
        ) | ast.AugAssign(ast.Subscript(ast.Name(), ast.Name(place)), ast.Add(), value):
            return place == rows and _pure(value)
    return False


def _pure(tree: ast.expr) -> bool:
    """Whether it writes over nothing: no call of a method that ends with an underscore, and of nothing that is given a
    tensor to write into."""
    for node in ast.walk(tree):
        if not isinstance(node, (*_PURE, *_AROUND)):
            return False
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "_")
            if called.endswith("_") or any(k.arg in ("out", "inplace", None) for k in node.keywords):
                return False
    return True
