"""Comparisons with functions that are served: what stands for a function is the same as it."""

from __future__ import annotations

import ast
import copy
import types
from typing import TYPE_CHECKING, Any

from ferryman.porting.model import source
from ferryman.porting.model.trees import attribute_of
from ferryman.porting.model.uses import more, served

if TYPE_CHECKING:
    from ferryman.porting.model.serve import Serve


def put(serve: Serve, node: ast.Compare) -> ast.AST:
    """``x is F.f`` as ``x is F.f or x is what stands for it``, where x may hold either; the names stay themselves."""
    sides = [node.left, *node.comparators]
    stands = [_stand_in(serve, side) for side in sides]
    if not any(stands):
        serve.generic_visit(node)
        return node
    node.left, *node.comparators = (s if t else serve.visit(s) for s, t in zip(sides, stands, strict=True))
    other = [node.left, *node.comparators][stands.index(None)] if None in stands else None
    once = any(isinstance(n, ast.Call | ast.Await | ast.NamedExpr) for n in ast.walk(node))
    if len(sides) != 2 or other is None or once or not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
        return node
    stand = serve._put(next(t for t in stands if t is not None), node)
    again = ast.Compare(copy.deepcopy(other), [copy.deepcopy(node.ops[0])], [stand])
    both = ast.Or() if isinstance(node.ops[0], ast.Is | ast.Eq) else ast.And()
    return ast.fix_missing_locations(ast.copy_location(ast.BoolOp(both, [node, again]), node))


def _stand_in(serve: Serve, node: ast.expr) -> Any:
    """What stands for the function that an expression names; None where it names none that is served."""
    if attribute_of(node, serve.self_name) is not None:
        bound = dict(serve.owner.parted.attributes).get(getattr(node, "attr", ""))
        return None if bound is None else served()[bound].replacement
    value = source.resolve(node, serve.own) if isinstance(node, ast.Name | ast.Attribute) else None
    function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
    entry = (served().get(value) or more.get(value)) if function else None
    return None if entry is None else entry.replacement
