"""Arguments that a call leaves out, where code asks for their truth: the code of such calls stands for itself, without
what it does of others alone. `folded` settles tests of names whose values are known."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ferryman.porting.model.statements import stored
from ferryman.porting.model.trees import blocks, copied

_ASKED = (None, True, False)
_MOST = 3
UNKNOWN = object()


def settled(tree: ast.FunctionDef) -> dict[str, Any]:
    """The arguments with a default of None, True or False whose truth code asks for, and these."""
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    given = dict(zip((a.arg for a in reversed(arguments)), reversed(tree.args.defaults), strict=False))
    given |= {a.arg: d for a, d in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True) if d is not None}
    known = {n: d.value for n, d in given.items() if isinstance(d, ast.Constant) and any(d.value is v for v in _ASKED)}
    kept = {*stored(ast.Module(tree.body, []))}
    asked: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            asked |= _names(node.test)
    known = {n: value for n, value in known.items() if n in asked and n not in kept}
    return known if len(known) <= _MOST else {}


def test_of(known: Mapping[str, Any]) -> ast.expr:
    """Whether arguments are what they are where a call leaves them out, of which nothing else is asked."""
    tests: list[ast.expr] = [
        ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Constant(value)]) for name, value in known.items()
    ]
    return tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)


def _names(test: ast.expr) -> set[str]:
    """The names whose truth a test asks for."""
    if isinstance(test, ast.Name):
        return {test.id}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _names(test.operand)
    if isinstance(test, ast.BoolOp):
        return set().union(*map(_names, test.values))
    return set()


def folded(tree: ast.FunctionDef, known: Mapping[str, Any]) -> ast.FunctionDef:
    """A copy with the tests settled that names of known values, and constants, settle."""
    fresh: ast.FunctionDef = _Folding(known).visit(copied(tree))
    for body in list(blocks(fresh)):
        for i, statement in enumerate(body):
            if isinstance(statement, ast.Return | ast.Raise):
                del body[i + 1 :]
                break
    return ast.fix_missing_locations(fresh)


class _Folding(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        truth = self.truth(node.test)
        if truth is UNKNOWN:
            return node
        return (node.body if truth else node.orelse) or ast.copy_location(ast.Pass(), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        truth = self.truth(node.test)
        return node if truth is UNKNOWN else node.body if truth else node.orelse

    def truth(self, test: ast.expr) -> Any:
        """Of a test of which no other value is read before it is settled."""
        value = self._value(test)
        if value is not UNKNOWN:
            return bool(value)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self.truth(test.operand)
            return truth if truth is UNKNOWN else not truth
        if isinstance(test, ast.BoolOp):
            ends = isinstance(test.op, ast.Or)
            for one in test.values:
                truth = self.truth(one)
                if truth is UNKNOWN or truth is ends:
                    return truth
            return not ends
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Is | ast.IsNot):
            one, other = self._value(test.left), self._value(test.comparators[0])
            if one is UNKNOWN or other is UNKNOWN or not any(v is w for v in (one, other) for w in _ASKED):
                return UNKNOWN
            return (one is other) is isinstance(test.ops[0], ast.Is)
        return UNKNOWN

    def _value(self, e: ast.expr) -> Any:
        if isinstance(e, ast.Constant):
            return e.value
        return self.known.get(e.id, UNKNOWN) if isinstance(e, ast.Name) else UNKNOWN
