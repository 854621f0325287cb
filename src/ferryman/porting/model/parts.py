"""The parts of a module's functions, found once for modules that give the same to them."""

from __future__ import annotations

import ast
import copy
import hashlib
import types
from typing import Any

from torch import nn

from ferryman.porting.model import adding, flow, recognise, source, spelling
from ferryman.porting.model.cutting import Search
from ferryman.porting.model.flow import Scan
from ferryman.porting.model.leaf import names_reached
from ferryman.porting.model.part import INNER, NONE, Part, Parted
from ferryman.porting.model.recognise import Role
from ferryman.porting.model.uses import served

_of_class: dict[Any, list[tuple[dict[tuple[str, str], Any], Parted]]] = {}
_of_function: dict[Any, tuple[ast.FunctionDef, tuple[Part, ...]] | None] = {}


def of_module(module: nn.Module, skipped: frozenset[tuple[str, Any]], norms: frozenset[str]) -> Parted:
    """The parts in the functions that a module's forward comes to. skipped: (a function's name, place) of what is
    served without; norms: that take an addition. Of a module without children, results alone: what is nearly a norm is
    not ported for a norm in it."""
    kind = type(module)
    fresh = _fresh(module)
    key = kind, source.code_of(kind), skipped, norms, fresh
    for known, parted in _of_class.setdefault(key, []):
        same = all(vars(module).get(name) is value for name, value in parted.attributes)
        if same and all(_alike(_fact(module, *at), value) for at, value in known.items()):
            return parted
    methods, reached = source.methods(kind), names_reached(kind)
    facts: dict[tuple[str, str], Any] = {}
    functions = []
    for name in methods:
        if name != "forward" and (name not in reached or not module._modules):
            continue
        inner = source.innermost(methods[name])
        tree = source.parsed(inner)
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)] if tree is not None else []
        if tree is None or not arguments:
            continue
        before = spelling.operators(tree, inner)
        search = Search(
            inner,
            arguments[0],
            module,
            tree=copy.deepcopy(before),
            skipped={place for at, place in skipped if at == name},
            fresh=fresh,
        )
        shown = search.run() | adding.in_place(search.tree, arguments[0], norms, fresh)
        facts |= {(name, text): value for text, value in search.scan.facts.items()}
        if shown:
            functions.append((name, search.tree, tuple(search.parts), ast.dump(before)))
    attributes = tuple(
        (n, v) for n, v in vars(module).items() if n in reached and isinstance(v, flow.FUNCTIONS) and v in served()
    )
    texts = [(n, ast.dump(t), [(p.forms, p.own) for p in ps]) for n, t, ps, _ in functions]
    name = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} {texts} {attributes}".encode()).hexdigest()
    none = INNER if module._modules else NONE
    parted = Parted(name, none.inner, attributes, tuple(functions)) if functions or attributes else none
    _of_class[key].append((facts, parted))
    return parted


def _fresh(module: nn.Module) -> frozenset[str]:
    """Children whose result nothing else has: those with a role, which no hook hears of."""
    return frozenset(
        name
        for name, child in module._modules.items()
        if child is not None
        and source.untouched(child)
        and type(child).forward is not nn.Module.forward
        and isinstance(recognise.role_of(child), Role)
    )


def of_function(
    function: types.FunctionType, tree: ast.FunctionDef, skipped: set[Any]
) -> tuple[ast.FunctionDef, tuple[Part, ...]] | None:
    """A plain function's tree with its parts."""
    key = function, frozenset(skipped)
    if key not in _of_function:
        search = Search(function, None, None, tree=copy.deepcopy(tree), skipped=skipped)
        _of_function[key] = (search.tree, tuple(search.parts)) if search.run() else None
    known = _of_function[key]
    return None if known is None else (copy.deepcopy(known[0]), known[1])


def _fact(module: nn.Module, name: str, text: str) -> Any:
    """What a module gives at a path that one of its functions reads, without a tensor's elements."""
    inner = source.innermost(source.methods(type(module))[name])
    tree = source.parsed(inner)
    assert tree is not None
    scan = Scan(inner, tree, (*tree.args.posonlyargs, *tree.args.args)[0].arg, module, type(module))
    e = ast.parse(text, mode="eval").body
    if text.startswith("ferryman_conv1d(") and isinstance(e, ast.Call):
        scan._is_child(e.args[0])
    else:
        scan.path(e)
    return scan.facts.get(text, source.MISSING)


def _alike(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, flow.PLAIN | tuple) and now == before)
