"""Which expressions give a module, another object, or what computes later: their methods may do anything."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import source
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import trusted

_GO_OVER = {"items", "values", "children", "modules", "named_children", "named_modules", "get_submodule"}
_PARAMETERS = nn.ParameterList | nn.ParameterDict
_AMONG = ast.Starred | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.IfExp | ast.BoolOp | ast.NamedExpr | ast.keyword
_LOOPS = ast.For | ast.AsyncFor | ast.comprehension


def owner(scan: Any, e: ast.expr) -> Any:
    """What a method or an attribute is of, where that is no local, or what it is of in turn; MISSING if unknown."""
    if isinstance(e, ast.Name):
        if e.id == scan.self_name:
            return scan.module if scan.module is not None else MISSING
        return MISSING if e.id in scan.locals else source.resolve(e, scan.function)
    if scan.module is not None and scan._of_self(e):
        return scan._at(e)
    if isinstance(e, ast.Subscript):
        whole = owner(scan, e.value)
        return whole if _has_module(whole) else MISSING
    whole = owner(scan, e.value) if isinstance(e, ast.Attribute) else MISSING
    return getattr(whole, e.attr, MISSING) if isinstance(whole, types.ModuleType) else whole  # type: ignore[attr-defined]


def _has_module(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_module, value.values() if isinstance(value, dict) else value))
    if isinstance(value, nn.Module):
        return not isinstance(value, _PARAMETERS)
    return isinstance(value, set) or _has_methods(_kind(value))


def _kind(value: Any) -> Any:
    return type(value)


@functools.cache
def _has_methods(kind: Any) -> bool:
    """Whether a class has methods of its own that are called as a tensor's are."""
    bases = [base for base in kind.__mro__ if not trusted(base)]
    return any(hasattr(Tensor, name) and callable(v) for b in bases for name, v in vars(b).items() if name[0] != "_")


@functools.cache
def _has_operators(kind: Any) -> bool:
    bases = [base for base in kind.__mro__ if not trusted(base)]
    return any(name in _OPERATORS for base in bases for name in vars(base))


_BINARY = [name[3:-2] for name in dir(operator) if name.startswith("__i") and hasattr(operator, f"__{name[3:-2]}__")]
_OTHERS = (
    "neg",
    "pos",
    "abs",
    "invert",
    "bool",
    "len",
    "iter",
    "next",
    "getitem",
    "missing",
    "contains",
    "float",
    "int",
)
_COMPARED = ("lt", "le", "gt", "ge", "index", "torch_function", "torch_dispatch", "array")
_OPERATORS = {f"__{before}{name}__" for name in _BINARY for before in ("", "r", "i")}
_OPERATORS |= {f"__{name}__" for name in (*_OTHERS, *_COMPARED)}
_PASSES = ast.Assign | ast.AnnAssign | ast.Return | ast.Expr | ast.Tuple | ast.Attribute


def operates(scan: Any, node: ast.AST) -> bool:
    """Whether it computes with an object, of the module or of the file, whose class says what that does."""
    if isinstance(node, _PASSES):
        return False
    parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)]
    func = node.func if isinstance(node, ast.Call) else None
    return any(_has_operators(_kind(owner(scan, part))) for part in parts if part is not func)


def aliases(scan: Any, e: ast.expr) -> bool:
    """Whether it is, or is of, a local that may be a module."""
    while isinstance(e, ast.Attribute | ast.Subscript):
        e = e.value
    if scan.aliases is None:
        scan.aliases = set()
        while scan.aliases != (more := _stored(scan, gives_module)):
            scan.aliases = more
    return isinstance(e, ast.Name) and e.id in scan.aliases


def gives_module(scan: Any, e: ast.AST) -> bool:
    """Whether an expression gives a module, alone or among others."""
    if isinstance(e, _AMONG):
        return any(gives_module(scan, child) for child in ast.iter_child_nodes(e))
    if isinstance(e, ast.Name | ast.Attribute | ast.Subscript):
        return _has_module(owner(scan, e)) or aliases(scan, e)
    if not isinstance(e, ast.Call):
        return False
    if isinstance(e.func, ast.Attribute):
        return e.func.attr in _GO_OVER and gives_module(scan, e.func.value)
    if isinstance(owner(scan, e.func), type) and _has_methods(owner(scan, e.func)):
        return True
    of_python = getattr(owner(scan, e.func), "__module__", "") == "builtins" and not _counts(e)
    return of_python and any(gives_module(scan, a) for a in e.args)


def _counts(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("len", "isinstance", "hasattr", "id")


def later(scan: Any) -> set[str]:
    """Locals that compute when they are gone over."""
    if scan.later is None:
        scan.later = set()
        while scan.later != (more := _stored(scan, _is_later)):
            scan.later = more
    known: set[str] = scan.later
    return known


def _is_later(scan: Any, e: ast.AST) -> bool:
    if isinstance(e, ast.GeneratorExp) or (isinstance(e, ast.Name) and e.id in scan.later):
        return True
    if isinstance(e, _AMONG):
        return any(_is_later(scan, child) for child in ast.iter_child_nodes(e))
    if not isinstance(e, ast.Call):
        return False
    function = owner(scan, e.func)
    if isinstance(e.func, ast.Attribute) and function is MISSING:
        function = scan.members.get(e.func.attr)
    if function in (map, filter, zip, enumerate, reversed, iter):
        return function in (map, filter) or any(_is_later(scan, a) for a in e.args)
    inner = source.inner_functions(scan.tree, ()).get(e.func.id) if isinstance(e.func, ast.Name) else None
    suspends = inner is not None and any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(inner))
    return suspends or inspect.isgeneratorfunction(getattr(function, "__func__", function))


def _stored(scan: Any, test: Callable[[Any, ast.AST], bool]) -> set[str]:
    """Locals of which the test holds for what is put there, alone or among others."""
    return {
        n.id for target, value in _put(scan) if test(scan, value) for n in ast.walk(target) if isinstance(n, ast.Name)
    }


def _unpacked(target: ast.expr, value: ast.expr) -> ast.expr:
    """What comes to a target's names: a generator that is unpacked has run, and they are what it gave."""
    return value.elt if isinstance(target, ast.Tuple) and isinstance(value, ast.GeneratorExp) else value


def _put(scan: Any) -> Iterator[tuple[ast.AST, ast.expr]]:
    for node in ast.walk(scan.tree):
        if isinstance(node, ast.Assign):
            yield from ((target, _unpacked(target, node.value)) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, _LOOPS):
            yield node.target, node.iter
