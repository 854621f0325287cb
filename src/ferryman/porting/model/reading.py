"""Attributes of objects whose class has code of its own for reading one, such as a library's config: what that code may
do, so that an attribute which is read once less, or once more, is the same."""

from __future__ import annotations

import ast
import functools
import logging
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.porting.model import source

_HOOK = "__getattribute__"
_PAST = tuple(f"{owner}.{_HOOK}" for owner in ("super()", "object"))
_TABLE = f"super().{_HOOK}('__dict__').get"
_LOGS = {"debug", "info", "warning", "warning_once", "error"}
_BUILTIN = (types.NoneType, bool, int, float, str, dict, list, tuple, set, frozenset)
_COMPARED = ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In | ast.NotIn
_PARTS = (
    ast.Name | ast.Constant | ast.BoolOp | ast.And | ast.Or | ast.Not | ast.Compare | ast.Subscript | ast.expr_context
)


@dataclass(frozen=True)
class _Hooks:
    """What the code of a class reads by a name that stands in it: past its own code, with what of the object's table
    must not be None for it ("" where nothing must), and in that table."""

    past: frozenset[tuple[str, str]]
    table: frozenset[str]


def attribute(owner: Any, name: str) -> Any:
    """A plain value that an object has under this name, or under the one that its class's code makes of it;
    source.MISSING for any other, and where that code may do more than read, write to a log, or raise."""
    kind: Any = type(owner)
    hooks = _hooks(kind)
    own = _own(owner)
    if hooks is None or own is None:
        return source.MISSING
    past = {n for n, beside in hooks.past if not beside or own.get(beside) is not None}
    read = {n: _at(kind, own, n) for n in past} | {n: own.get(n) for n in hooks.table}
    names = {name}
    for _ in kind.__mro__:
        names |= {t[n] for t in read.values() if type(t) is dict for n in names if type(t.get(n)) is str}
    there = [_at(kind, own, n) for n in names]
    if any(type(v) not in _BUILTIN for v in read.values()) or any(_runs(kind, n) for n in {*names, *read}):
        return source.MISSING
    try:
        value = getattr(owner, name)
    except Exception:  # noqa: BLE001 - foreign code ran: a call of the module meets what it raises, if it comes there
        return source.MISSING
    return value if any(value is v for v in there) else source.MISSING


def _own(owner: Any) -> Mapping[str, Any] | None:
    """An object's table, past its class's code."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _of_class(kind: Any, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), source.MISSING)


def _at(kind: Any, own: Mapping[str, Any], name: str) -> Any:
    return own[name] if name in own else _of_class(kind, name)


def _runs(kind: Any, name: str) -> bool:
    """Whether reading it past the class's code runs a descriptor's: a property's, a method's."""
    return hasattr(type(_of_class(kind, name)), "__get__")


@functools.cache
def _hooks(kind: Any) -> _Hooks | None:
    """None where a class's own code for reading an attribute may do more than read others, raise and write to a log."""
    plain = (object, types.SimpleNamespace)  # whose own code, in C, reads the attribute
    own = [vars(base)[_HOOK] for base in kind.__mro__ if _HOOK in vars(base) and base not in plain]
    if hasattr(kind, "__getattr__") or not all(isinstance(f, types.FunctionType) for f in own):
        return None
    past, table = set[tuple[str, str]](), set[str]()
    for function in own:
        tree = source.parsed(function)
        if tree is None or tree.decorator_list or _shadows(function):
            return None
        if not all(_is_plain(s, function) for s in tree.body):
            return None
        stored = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        tables = {t.id: name for s in tree.body for t, name in _from_table(s) if stored[t.id] == 1}
        table |= {name for _, name in _read_by(tree, (_TABLE,))}
        beside = {
            n: _asked(s.test, tables) for s in tree.body if isinstance(s, ast.If) for b in s.body for n in ast.walk(b)
        }
        past |= {(name, beside.get(call, "")) for call, name in _read_by(tree, _PAST) if name != "__dict__"}
    return _Hooks(frozenset(past), frozenset(table))


def _read_by(tree: ast.AST, functions: Sequence[str]) -> Iterator[tuple[ast.AST, str]]:
    """(the call, the name) of what is read by a name that stands there."""
    for n in ast.walk(tree):
        last = n.args[-1] if isinstance(n, ast.Call) and n.args else None
        if isinstance(n, ast.Call) and isinstance(last, ast.Constant) and ast.unparse(n.func) in functions:
            yield n, str(last.value)


def _from_table(statement: ast.stmt) -> Iterator[tuple[ast.Name, str]]:
    """(a local, the name in the object's table) of an assignment of nothing else."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and len(statement.targets) == 1:
        for call, name in _read_by(statement.value, (_TABLE,)):
            if call is statement.value:
                yield statement.targets[0], name


def _asked(test: ast.expr, tables: Mapping[str, str]) -> str:
    """What of the table must not be None for a test ``LOCAL is not None``."""
    name = ast.unparse(test).removesuffix(" is not None")
    return tables.get(name, "") if ast.unparse(test) == f"{name} is not None" else ""


def _shadows(function: types.FunctionType) -> bool:
    """Whether ``super``, ``object`` or a log is another thing in it."""
    code = function.__code__
    inner = {*code.co_varnames, *code.co_cellvars}
    logs = {n for n, v in function.__globals__.items() if isinstance(v, logging.Logger)}
    return bool({"super", "object"} & (inner | set(function.__globals__)) or logs & inner)


def _is_plain(statement: ast.stmt, function: types.FunctionType) -> bool:
    if isinstance(statement, ast.Raise):
        return True  # where a call comes there, the module's own code does
    if isinstance(statement, ast.If):
        inner = (*statement.body, *statement.orelse)
        return _gives(statement.test, function) and all(_is_plain(s, function) for s in inner)
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Name) for t in statement.targets) and _gives(statement.value, function)
    if isinstance(statement, ast.Return):
        return statement.value is not None and _gives(statement.value, function)
    if not isinstance(statement, ast.Expr):
        return False
    return isinstance(statement.value, ast.Constant) or _logs(statement.value, function)


def _gives(e: ast.AST, function: types.FunctionType) -> bool:
    """Whether an expression only compares, and reads by the calls that are known; and by a local's name, of which
    `attribute` asks that it is None or a table today."""
    if isinstance(e, ast.Call):
        known = not e.keywords and ast.unparse(e.func) in (*_PAST, _TABLE)
        return known and all(_gives(a, function) for a in e.args)
    if isinstance(e, ast.Attribute):
        local = function.__code__.co_varnames[function.__code__.co_argcount :]
        return isinstance(e.value, ast.Name) and e.value.id in local
    if isinstance(e, ast.UnaryOp):
        return isinstance(e.op, ast.Not) and _gives(e.operand, function)
    return isinstance(e, _PARTS | _COMPARED) and all(_gives(c, function) for c in ast.iter_child_nodes(e))


def _logs(e: ast.expr, function: types.FunctionType) -> bool:
    if not isinstance(e, ast.Call) or not isinstance(e.func, ast.Attribute) or e.func.attr not in _LOGS or e.keywords:
        return False
    to: Any = function.__globals__.get(e.func.value.id) if isinstance(e.func.value, ast.Name) else None
    said = (n for a in e.args for n in ast.walk(a))
    text = ast.Constant | ast.Name | ast.JoinedStr | ast.FormattedValue | ast.expr_context
    return isinstance(to, logging.Logger) and all(isinstance(n, text) for n in said)
