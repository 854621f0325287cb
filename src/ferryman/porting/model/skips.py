"""Turns of a loop that are left out where there is nothing to add: whether such a test is true decides nothing.

``if rows.numel() == 0: continue`` before code that does no more than add to ``rows`` of a result: of no rows that adds
nothing, so the code with the test and without it have one result, whichever side inputs take.
"""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferryman.porting.model import source
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import trusted

if TYPE_CHECKING:
    from ferryman.porting.model.branches import Follower

_FACTS = ("dtype", "device", "shape")
_PARTS = (ast.Constant, ast.Slice, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.expr_context, ast.operator, ast.unaryop)


@dataclass
class Code:
    """The function that a loop stands in, and what of its names is known: the module's own, its tensors, and whether
    what an expression calls is PyTorch's or a child that only computes."""

    function: ast.FunctionDef
    itself: str | None
    tensors: frozenset[str]
    computes: Callable[[ast.expr], bool]


def code_of(follower: Follower, own: types.FunctionType, tree: ast.FunctionDef, itself: str | None) -> Code:
    module = follower.module
    tensors = frozenset[str]() if module is None else frozenset((*module._parameters, *module._buffers))

    def computes(called: ast.expr) -> bool:
        """A name with an underscore at its end writes over what it is given."""
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == itself:
            return called.attr in follower.known
        function = source.resolve(called, own)
        return function is not MISSING and trusted(function) and not ast.unparse(called).endswith("_")

    return Code(tree, itself, tensors, computes)


def of_nothing(loop: ast.For, code: Code) -> Iterator[ast.If]:
    """The loop's own tests of that kind."""
    if any(isinstance(n, ast.Global | ast.Nonlocal) for n in ast.walk(code.function)):
        return
    for place, statement in enumerate(loop.body):
        rows = _emptied(statement)
        if rows and isinstance(statement, ast.If):
            turn = _Turn(code, _bound(loop, place, code), rows)
            if turn.adds_alone(loop.body[place + 1 :]):
                yield statement


def _emptied(statement: ast.stmt) -> str:
    """The name that a statement asks to have no elements, and goes on with the next turn if so; else ""."""
    if not (isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Continue)):
        return ""
    match statement.test:
        case ast.Compare(
            ast.Call(ast.Attribute(ast.Name(name), "numel"), [], [])
            | ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(0))
            | ast.Call(ast.Attribute(ast.Name(name), "size"), [ast.Constant(0)], []),
            [ast.Eq()],
            [ast.Constant(0)],
        ):
            return name
    return ""


def _names(target: ast.expr) -> list[str]:
    return [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]


def _bound(loop: ast.For, place: int, code: Code) -> set[str]:
    """Names of tensors and numbers when the test is asked: parameters, the loop's own, results of PyTorch's."""
    given = code.function.args
    known = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {code.itself}
    known |= set(_names(loop.target))
    for statement in loop.body[:place]:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            value = statement.value
            number = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "item"
            if number or (isinstance(value, ast.Call) and code.computes(value.func)):
                known |= set(_names(statement.targets[0]))
    return known


@dataclass
class _Turn:
    """What is left of a turn after the test. known: names of tensors and numbers; rows: the name that was asked."""

    code: Code
    known: set[str]
    rows: str

    def adds_alone(self, statements: list[ast.stmt]) -> bool:
        """Whether they compute values of their own turn, which nothing else reads, and the last one adds these to
        ``rows`` of a tensor."""
        if not statements or self.rows not in self.known:
            return False
        *before, last = statements
        own = [s.targets[0].id for s in before if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)]
        everywhere, here = _loads(self.code.function), _loads(*statements)
        if self.rows in own or any(everywhere[name] != here[name] for name in own):
            return False
        self.known -= set(own)  # as long as the turn has not stored them
        for s in before:
            if not (isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name)):
                return False
            if not self.computed(s.value):
                return False
            self.known.add(s.targets[0].id)
        match last:
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Name(), "index_add_"), [ast.Constant(0), ast.Name(place), value], [])
            ) | ast.AugAssign(ast.Subscript(ast.Name(), ast.Name(place)), ast.Add(), value):
                return place == self.rows and self.computed(value)
        return False

    def computed(self, e: ast.AST) -> bool:
        """Whether it only computes, of what is known."""
        match e:
            case ast.Name(name):
                return name in self.known
            case ast.Attribute(ast.Name(name), attribute) if name == self.code.itself:
                return attribute in self.code.tensors
            case ast.Attribute(value, attribute):
                return attribute in _FACTS or (attribute in ("T", "mT") and self.computed(value))
            case ast.Call(called, given, named):
                method = isinstance(called, ast.Attribute) and self.computed(called.value)
                plain = not (method and called.attr.endswith("_"))  # type: ignore[attr-defined]
                flags = any(isinstance(x, ast.Constant) and x.value is True for x in given)
                words = any(k.arg in ("out", "inplace", None) for k in named)
                if not plain or flags or words or not (method or self.code.computes(called)):
                    return False
                return all(self.computed(x) for x in (*given, *(k.value for k in named)))
            case ast.Subscript(value, index):
                return self.computed(value) and self.computed(index)
        return isinstance(e, _PARTS) and all(self.computed(part) for part in ast.iter_child_nodes(e))


def _loads(*trees: ast.AST) -> Counter[str]:
    names = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return Counter(n.id for n in names if isinstance(n.ctx, ast.Load))
