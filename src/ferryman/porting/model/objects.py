"""Arguments whose methods code calls by names that tensors have: what a tensor's do is known, and another object's may
do anything, such as give another value each time. Code whose order changed asks first that they are tensors."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import source

_DEEP = 3
_PLAIN = frozenset(
    (Tensor, nn.Parameter, type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device, slice)
)


_BUILT_IN = frozenset(vars(builtins))  # what they give may be a part of what they take


@dataclass(frozen=True)
class Argument:
    """Where a call has a parameter's value: at ``place``, by ``name``, else it is ``default``. several: the rest of the
    arguments, or of those by name (``place`` None)."""

    name: str
    place: int | None
    default: Any = None
    several: bool = False

    def values(self, given: tuple[Any, ...], options: Mapping[str, Any]) -> Iterable[Any]:
        if self.several:
            return options.values() if self.place is None else given[self.place :]
        if self.place is not None and self.place < len(given):
            return (given[self.place],)
        return (options.get(self.name, self.default),)


def asked(function: types.FunctionType, kind: Any, deep: int = _DEEP) -> dict[str, Argument]:
    """The parameters of a function, or of a method of a class, that are to be tensors, or what has tensors in it."""
    tree = source.parsed(function)
    if tree is None or deep < 1:
        return {}
    given = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
    named = [a.arg for a in tree.args.kwonlyargs]
    own = given[0] if kind is not None and given else None
    rest = [a.arg for a in (tree.args.vararg, tree.args.kwarg) if a is not None]
    roots = _roots(tree, {*given, *named, *rest} - {own})
    needed: set[str] = set()
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Attribute) and hasattr(Tensor, call.func.attr):
            needed |= _root(call.func.value, roots)
        inner, first = _called(call, function, kind, own)
        if inner is not None and any(_root(a, roots) for a in (*call.args, *(k.value for k in call.keywords))):
            for name, argument in asked(inner, kind if first else None, deep - 1).items():
                at = None if argument.place is None else argument.place - first
                here = [] if at is None or at < 0 else call.args[at : None if argument.several else at + 1]
                here = [*here, *(k.value for k in call.keywords if k.arg in (name, None) or argument.several)]
                for value in here:
                    needed |= _root(value, roots)
    defaults = dict(zip(given[::-1], (function.__defaults__ or ())[::-1], strict=False))
    defaults |= function.__kwdefaults__ or {}
    known = {name: Argument(name, i, defaults.get(name)) for i, name in enumerate(given)}
    known |= {name: Argument(name, None, defaults.get(name)) for name in named}
    known |= {a.arg: Argument(a.arg, len(given), None, True) for a in (tree.args.vararg,) if a is not None}
    known |= {a.arg: Argument(a.arg, None, None, True) for a in (tree.args.kwarg,) if a is not None}
    return {name: known[name] for name in sorted(needed)}


def _called(call: ast.Call, function: types.FunctionType, kind: Any, own: str | None) -> tuple[Any, int]:
    """(a function of another's that a call comes to, whether it is given the module first)."""
    func = call.func
    if (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == own
        and own is not None
    ):
        inner = source.innermost(source.methods(kind).get(func.attr))
        return (inner, 1) if isinstance(inner, types.FunctionType) else (None, 0)
    value = source.resolve(func, function) if isinstance(func, ast.Name | ast.Attribute) else None
    home = getattr(value, "__module__", None) or ""
    return (value, 0) if isinstance(value, types.FunctionType) and home.split(".")[0] != "torch" else (None, 0)


def _roots(tree: ast.FunctionDef, parameters: set[str]) -> dict[str, set[str]]:
    """The parameters that each local may be, or have been part of."""
    roots: dict[str, set[str]] = {name: {name} for name in parameters}
    for _ in range(_DEEP):
        for node in ast.walk(tree):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.For | ast.comprehension):
                pairs = [(node.target, node.iter)]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                pairs = [(node.target, node.value)]
            for target, value in pairs:
                owners = _root(value, roots)
                for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name) and owners):
                    roots[name] = roots.get(name, set()) | owners
    return roots


def _root(e: ast.expr, roots: Mapping[str, set[str]]) -> set[str]:
    """The parameters that an expression may be a part of: of calls, those of functions that Python has built in, and of
    methods that no tensor has."""
    if isinstance(e, ast.Call):
        if isinstance(e.func, ast.Attribute):
            return set() if hasattr(Tensor, e.func.attr) else _root(e.func.value, roots)
        taken = [*e.args, *(k.value for k in e.keywords)]
        if isinstance(e.func, ast.Name) and e.func.id in _BUILT_IN:
            return set().union(*(_root(value, roots) for value in taken))
        return set()
    if isinstance(e, ast.IfExp):
        return _root(e.body, roots) | _root(e.orelse, roots)
    if isinstance(e, ast.BoolOp | ast.Tuple | ast.List):
        return set().union(*(_root(v, roots) for v in (e.values if isinstance(e, ast.BoolOp) else e.elts)))
    if isinstance(e, ast.NamedExpr | ast.Attribute | ast.Subscript | ast.Starred):
        return _root(e.value, roots)
    return roots.get(e.id, set()) if isinstance(e, ast.Name) else set()


def test_of(names: Mapping[str, Argument]) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """A test of a call's arguments that these are plain."""
    arguments = tuple(names.values())

    def plain(given: tuple[Any, ...], options: dict[str, Any]) -> bool:
        for argument in arguments:
            for value in argument.values(given, options):
                if type(value) not in _PLAIN and not _is_plain(value):
                    return False
        return True

    return plain


def where_plain(served: Any, function: Any, names: Mapping[str, Argument]) -> Any:
    """A served copy of a function for calls whose arguments of these names are plain; the function for others."""
    if not names:
        return served
    plain = test_of(names)

    def call(*given: Any, **options: Any) -> Any:
        return (served if plain(given, options) else function)(*given, **options)

    return call


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(type(v) in _PLAIN or _is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(v) in _PLAIN or _is_plain(v) for v in value.values())
    return isinstance(value, Tensor) and type(value).__module__.split(".")[0] == "torch"  # whose methods are a tensor's
