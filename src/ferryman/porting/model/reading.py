"""Objects whose attributes are read through code of their class, such as a library's config: what that code may do, so
that an attribute which is read once, or one time more, is the same."""

from __future__ import annotations

import ast
import functools
import logging
import types
from typing import Any

from ferryman.porting.model import source

_HOOK = "__getattribute__"
_PAST = tuple(f"{owner}.{_HOOK}" for owner in ("super()", "object"))
_TABLE = f"super().{_HOOK}('__dict__').get"


@functools.cache
def only_reads(kind: Any) -> bool:
    """Whether a class's own code for reading an attribute does no more than read others, raise and write to a log."""
    plain = (object, types.SimpleNamespace)  # whose own code, in C, reads the attribute
    own = [vars(base)[_HOOK] for base in kind.__mro__ if _HOOK in vars(base) and base not in plain]
    return not hasattr(kind, "__getattr__") and all(isinstance(f, types.FunctionType) and _reads(f) for f in own)


def _reads(function: types.FunctionType) -> bool:
    tree = source.parsed(function)
    return tree is not None and not tree.decorator_list and all(_is_plain(s, function) for s in tree.body)


def _is_plain(statement: ast.stmt, function: types.FunctionType) -> bool:
    if isinstance(statement, ast.Raise):
        return True  # the module's own code meets the same
    if isinstance(statement, ast.If):
        inner = (*statement.body, *statement.orelse)
        return _gives(statement.test) and all(_is_plain(s, function) for s in inner)
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Name) for t in statement.targets) and _gives(statement.value)
    if isinstance(statement, ast.Return):
        return statement.value is not None and _gives(statement.value)
    if not isinstance(statement, ast.Expr):
        return False
    return isinstance(statement.value, ast.Constant) or _logs(statement.value, function)


def _gives(e: ast.expr) -> bool:
    """Whether an expression calls only what reads an attribute past the class's code, or a table."""
    return all(_reads_past(n) for n in ast.walk(e) if isinstance(n, ast.Call)) and not any(
        isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda) for n in ast.walk(e)
    )


def _reads_past(call: ast.Call) -> bool:
    return not call.keywords and ast.unparse(call.func) in ("super", *_PAST, _TABLE)


def _logs(e: ast.expr, function: types.FunctionType) -> bool:
    name = e.func.value if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) else None
    to: Any = function.__globals__.get(name.id) if isinstance(name, ast.Name) else None
    return isinstance(to, logging.Logger)
