"""The parts of a module's functions, found once for modules that give the same to them."""

from __future__ import annotations

import ast
import functools
import hashlib
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from ferryman.porting.model import (
    adding,
    flow,
    gating,
    quiet,
    recognise,
    relied,
    source,
    spelling,
    sunk,
    unrolled,
    written,
)
from ferryman.porting.model.child_calls import TESTS
from ferryman.porting.model.cutting import Search
from ferryman.porting.model.flow import Scan
from ferryman.porting.model.leaf import names_reached
from ferryman.porting.model.part import INNER, NONE, Part, Parted, Relied
from ferryman.porting.model.part_shape import PRODUCTS
from ferryman.porting.model.recognise import Role
from ferryman.porting.model.statements import asks_for_locals
from ferryman.porting.model.trace import meant
from ferryman.porting.model.trees import copied
from ferryman.porting.model.uses import served

_NUMBERS = bool | int | float | str
# facts: (what a module gave, whether a proof or a test had it)
_of_class: dict[Any, list[tuple[dict[tuple[str, str], tuple[Any, bool]], Parted]]] = {}
_of_function: dict[Any, tuple[ast.FunctionDef, tuple[Part, ...], bool] | None] = {}


def of_module(
    module: nn.Module,
    skipped: frozenset[tuple[str, Any]],
    norms: frozenset[str],
    sequences: frozenset[tuple[str, int]] = frozenset(),
) -> Parted:
    """The parts in the functions that a module's forward comes to. skipped: (a function's name, place) of what is
    served without; norms: that take an addition. Of a module without children, results alone: what is nearly a norm is
    not ported for a norm in it."""
    kind = type(module)
    fresh, free = _fresh(module), quiet.free_of(module)
    key = kind, source.code_of(kind), skipped, norms, fresh, free, quiet.plain_of(module), sequences
    given = _Given(module)
    for known, parted in _of_class.setdefault(key, []):
        same = all(vars(module).get(name) is value for name, value in parted.attributes)
        if same and all(given.like(at, *fact) for at, fact in known.items()):
            return parted
    methods, reached = source.methods(kind), names_reached(kind)
    facts: dict[tuple[str, str], tuple[Any, bool]] = {}
    functions, calm, code = [], dict[str, Relied](), dict[str, Sequence[written.Function]]()
    turned = set[str]()
    for name in methods:
        if name != "forward" and name not in reached:
            continue
        inner = source.innermost(methods[name])
        tree = source.parsed(inner)
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)] if tree is not None else []
        if tree is None or not arguments or asks_for_locals(tree):
            continue
        before, _ = unrolled.of_sequences(spelling.operators(tree, inner), arguments[0], inner, dict(sequences))
        places = {place for at, place in skipped if at == name}
        search, shown, out = _searched(inner, arguments[0], module, before, places, fresh, free)
        added = adding.in_place(search.tree, arguments[0], norms, fresh)
        shown |= added
        shown |= gating.in_place(search.tree, arguments[0], fresh)
        facts |= {(name, text): (value, search.asks(text)) for text, value in search.scan.facts.items()}
        if shown:
            functions.append((name, search.tree, tuple(search.parts), ast.dump(before)))
            calm[name] = relied.state_of_calls(module, search.relied)
            turned |= {name} if search.turned or added else set()
            code[name] = out
    attributes = tuple(
        (n, v) for n, v in vars(module).items() if n in reached and isinstance(v, flow.FUNCTIONS) and v in served()
    )
    texts = [
        (n, ast.dump(t), [(p.forms, p.own, [ast.dump(m) for _, m in p.masks]) for p in ps]) for n, t, ps, _ in functions
    ]
    calls = sorted((n, path, relied.text_of(state)) for n, some in calm.items() for path, state in some)
    name = hashlib.sha256(
        f"{kind.__module__}.{kind.__qualname__} {texts} {calls} {attributes} {code} {sorted(turned)}".encode()
    ).hexdigest()
    none = INNER if module._modules else NONE
    some = bool(functions or attributes)
    parted = Parted(name, none.inner, attributes, tuple(functions), calm, code, turned) if some else none
    _of_class[key].append((facts, parted))
    return parted


def _searched(
    inner: types.FunctionType,
    own: str,
    module: nn.Module,
    before: ast.FunctionDef,
    skipped: set[Any],
    fresh: frozenset[str],
    free: frozenset[str],
) -> tuple[Search, bool, Sequence[written.Function]]:
    """A search, whether it has parts, and the functions that are written out in it: of both sides of an ``if`` first,
    where that has a part of two products, or a loop that carries a state."""
    scan = Scan(inner, before, own, module, type(module))
    settings: dict[str, bool] = {}
    plain, own_methods = functools.partial(_is_setting, scan), source.methods(type(module))
    write = written.Writing(inner, own, own_methods, plain, settings=settings, is_none=lambda e: scan.path(e) is None)
    apart = sunk.sunk(before, write, settings)
    if apart is not None and (_multiplies_twice(apart) or _loops(before)):
        search = Search(inner, own, module, tree=apart, skipped=skipped, fresh=fresh, free=free)
        if search.run() and search.whole:
            search.turned = True
            return search, True, write.functions
    search = Search(inner, own, module, tree=copied(before), skipped=skipped, fresh=fresh, free=free)
    return search, search.run(), ()


def _is_setting(scan: Scan, e: ast.expr) -> bool:
    """Whether a path of the module's gives a plain value."""
    return isinstance(e, ast.Attribute) and isinstance(scan.path(e), flow.PLAIN)


def _multiplies_twice(tree: ast.AST) -> bool:
    words = (getattr(n, "attr", getattr(n, "id", type(n).__name__)) for n in ast.walk(tree))
    return sum(word in PRODUCTS for word in words) > 1


def _loops(tree: ast.AST) -> bool:
    """Whether there is a loop over a range, as one over tokens is."""
    loops = (n.iter for n in ast.walk(tree) if isinstance(n, ast.For))
    return any(isinstance(e, ast.Call) and getattr(e.func, "id", "") == "range" for e in loops)


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
) -> tuple[ast.FunctionDef, tuple[Part, ...], bool] | None:
    """A plain function's tree with its parts, and whether its order changed."""
    key = function, frozenset(skipped)
    if asks_for_locals(tree):
        return None
    if key not in _of_function:
        search = Search(function, None, None, tree=copied(tree), skipped=skipped)
        _of_function[key] = (search.tree, tuple(search.parts), search.turned) if search.run() else None
    known = _of_function[key]
    return None if known is None else (copied(known[0]), *known[1:])


class _Given:
    """What a module gives at paths that its functions read, without tensors' elements; each is asked once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.scans: dict[str, Scan] = {}
        self.facts: dict[tuple[str, str], Any] = {}

    def like(self, at: tuple[str, str], before: Any, asked: bool) -> bool:
        """Whether a fact is what it was; of a plain value that nothing asked for, whether it is one."""
        if at not in self.facts:
            self.facts[at] = self._fact(*at)
        now = self.facts[at]
        return _alike(now, before) or (not asked and type(now) is type(before) and isinstance(now, _NUMBERS))

    def _fact(self, name: str, text: str) -> Any:
        if name not in self.scans:
            inner = source.innermost(source.methods(type(self.module))[name])
            tree = source.parsed(inner)
            assert tree is not None
            tree = unrolled.whole(len(self.module._modules)) if inner is nn.Sequential.forward else tree
            first = (*tree.args.posonlyargs, *tree.args.args)[0].arg
            self.scans[name] = Scan(inner, tree, first, self.module, type(self.module))
        scan, e = self.scans[name], _expression(text)
        if text.partition("(")[0] in TESTS and isinstance(e, ast.Call):
            scan.joins = True
            scan._is_child(e.args[0])
        else:
            scan.path(e)
        return scan.facts.get(text, source.MISSING)


@functools.cache
def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _alike(now: Any, before: Any) -> bool:
    if now is before or (isinstance(now, types.MethodType | functools.partial) and meant(now) == meant(before)):
        return True
    return type(now) is type(before) and isinstance(now, flow.PLAIN | tuple) and now == before
