"""What an instrumented copy reports beside its tests: numbers that it computes, and what it takes out of tables.

A proof knows thresholds so that no code names: a number that is the same in every run is the code's own
(``self.a * self.b``); any other follows from sizes of inputs.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferryman.porting.model import source
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import Trace, lasts

if TYPE_CHECKING:
    from ferryman.porting.model.branches import Follower

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
# A sum or product of sizes is a size of what is viewed; a quotient or a root hides a threshold.
_PLAIN = (ast.Add, ast.Sub, ast.Mult)
_SIZES = {builtins.len}


class Reports(ast.NodeTransformer):
    """``a * b``, ``a *= b`` and calls of Python's functions of numbers report their results, if these are numbers."""

    def __init__(self, follower: Follower, own: types.FunctionType, new: dict[str, Any]) -> None:
        self.follower, self.own, self.new = follower, own, new
        self.self_name: str | None = None

    @property
    def trace(self) -> Trace:
        return self.follower.trace

    def reporting(self, node: ast.expr, plain: bool) -> ast.Call:
        self.new["ferryman_number"] = self.trace.number
        name = ast.Name("ferryman_number", ast.Load())
        return ast.copy_location(ast.Call(name, [ast.Constant(self.trace.site(plain)), node], []), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self.reporting(node, isinstance(node.op, _PLAIN))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and type(node.op) in _OPERATORS:
            self.new["ferryman_changed"] = self.trace.changed
            name = f"ferryman_operator_{type(node.op).__name__}"
            self.new[name] = _OPERATORS[type(node.op)]
            site = ast.Constant(self.trace.site(isinstance(node.op, _PLAIN)))
            given = [site, ast.Name(name, ast.Load()), ast.Name(node.target.id, ast.Load()), node.value]
            call = ast.Call(ast.Name("ferryman_changed", ast.Load()), given, [])
            node.value = ast.copy_location(call, node.value)
        return node

    def holds(self, table: Any) -> bool:
        """Whether it is a table of more than numbers and words, of which each entry is asked for alone."""
        return isinstance(table, Mapping) and not lasts(table)

    def entry(self, node: ast.Subscript) -> ast.AST:
        self.new["ferryman_entry"] = self.follower.entry
        self._global(node.value, table=True)
        given = [node.value, self.visit(node.slice)]
        return ast.copy_location(ast.Call(ast.Name("ferryman_entry", ast.Load()), given, []), node)

    def switch(self, module: types.ModuleType, name: str) -> None:
        """A plain attribute of a module of PyTorch, such as a backend's, is a switch."""
        value = getattr(module, name, None)
        if isinstance(value, bool | int | str):
            self.trace.note(module, name, value)

    def _global(self, node: ast.expr, table: bool = False) -> None:
        """Note a name of a file that is read."""
        raise NotImplementedError

    def may_ask(self, node: ast.Call) -> bool:
        """Whether ``getattr`` and its like ask a module: of a tensor nobody knows what others put on it."""
        return bool(node.args) and (
            self._of_self(node.args[0]) or source.resolve(node.args[0], self.own) is not MISSING
        )

    def _of_self(self, node: ast.expr) -> bool:
        """Whether an expression is the module's own, such as ``self.config.type``."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id == self.self_name

    def _against(self, node: ast.expr) -> str:
        """The attribute of the module that ``.. == self.attribute`` compares with."""
        if not isinstance(node, ast.Compare) or [type(o) for o in node.ops] != [ast.Eq]:
            return ""
        right = node.comparators[0]
        owner = right.value if isinstance(right, ast.Attribute) else None
        mine = isinstance(owner, ast.Name) and owner.id == self.self_name
        return right.attr if isinstance(right, ast.Attribute) and mine else ""

    def of_numbers(self, target: ast.expr) -> bool:
        """Whether a call is of a function of Python that may make a number of numbers."""
        value = source.resolve(target, self.own)
        homes = (builtins.__name__, math.__name__, operator.__name__, operator.truediv.__module__)
        function = isinstance(value, types.BuiltinFunctionType) or value in (int, float)
        return function and value not in _SIZES and getattr(value, "__module__", "") in homes
