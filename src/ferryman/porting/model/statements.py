"""Which locals statements read, and where they put values."""

from __future__ import annotations

import ast
import inspect
import types

FRAMES = frozenset({"locals", "vars", "dir", "eval", "exec"})  # which may read any local by its name
_OF_ANOTHER = frozenset({"vars", "dir"})  # which read what they are given, if it is given
_OWN_FRAME = frozenset({"_getframe", "currentframe", "f_locals"})


def asks_for_locals(tree: ast.AST) -> bool:
    """Whether code may read locals that it does not name, of which a changed copy may have others: by a builtin that
    is called or given to something else, or by its frame."""
    of_another = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and _gives_one(n)}
    own = {*stored(tree), *(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg))} & _OF_ANOTHER
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id not in own]
    if any(n.id in FRAMES | _OWN_FRAME and not (n.id in _OF_ANOTHER and n in of_another) for n in names):
        return True
    paths = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    modules = {n for n in paths if isinstance(n.value, ast.Name) and n.value.id in ("builtins", "__builtins__")}
    return any(n.attr in _OWN_FRAME or (n in modules and n.attr in FRAMES) for n in paths)


def _gives_one(call: ast.Call) -> bool:
    return bool(call.args) and not isinstance(call.args[0], ast.Starred)


def read(tree: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]


def stored(tree: ast.AST) -> list[str]:
    """Names that statements put something into, or delete, once for each place: those of imports and of caught errors,
    what a pattern captures, and functions and classes, too."""
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    return [*names, *bound(tree)]


def bound(tree: ast.AST) -> list[str]:
    """Names that something else than an expression binds in a block."""
    names: list[str | None] = []
    for n in ast.walk(tree):
        if isinstance(n, ast.alias):
            names.append(n.asname or n.name.partition(".")[0])
        elif isinstance(n, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names.append(n.name)
        elif isinstance(n, ast.MatchMapping):
            names.append(n.rest)
        elif isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and n is not tree:
            names.append(n.name)
    return [n for n in names if n is not None]


def reads_next(name: str, body: list[ast.stmt | None], own: ast.stmt | None, once: bool) -> bool:
    """Whether a statement reads a local before another puts a value there, but for the part's reading in ``own``."""
    for statement in body:
        if statement is None or (statement is own and once and name not in stored(statement)):
            continue
        if statement is own and once:
            return not isinstance(statement, ast.Assign)
        if name in read(statement):
            return True
        stores = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
        if stores:
            return not isinstance(statement, ast.Assign)
    return False


def reads_sizes(name: str, statement: ast.stmt) -> bool:
    """Whether a statement reads a local for what it is like alone."""
    asked = {id(n.value) for n in ast.walk(statement) if isinstance(n, ast.Attribute) and n.attr in _LIKE}
    named = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
    return all(id(n) in asked and isinstance(n.ctx, ast.Load) for n in named)


_LIKE = {"shape", "ndim", "dtype", "device", "size", "dim", "numel"}


def default_of(function: types.FunctionType, tree: ast.AST, name: str, whole: bool = False) -> float | None:
    """The fraction, or with ``whole`` the number, that an argument is where it is left out, in which nothing puts
    another value; None for others."""
    parameter = inspect.signature(function).parameters.get(name)
    value = None if parameter is None else parameter.default
    return value if type(value) in ((float, int) if whole else (float,)) and name not in stored(tree) else None
