"""A module class's forward, copied with calls that our ops serve.

Only calls change, and only those whose target is known: a function of PyTorch that an op's folder serves, a helper that
is proven, ``activation(gate) * up`` of a proven activation, ``norm(a + b)`` of a proven norm. What changes is reached
from forward: its methods, plain functions of the same file, one level deep or two, and callable objects that are no
modules, such as a library's attention processors, where the module calls its attribute.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ferryman.porting.model import (
    adding,
    cuts,
    helpers,
    objects,
    parts,
    relied,
    routines,
    source,
    spelling,
    unrolled,
    written,
)
from ferryman.porting.model.part import NONE, Parted, Relied
from ferryman.porting.model.serve import Serve
from ferryman.porting.model.statements import asks_for_locals
from ferryman.porting.model.trees import copied
from ferryman.porting.model.uses import Conditions, Use, registries, served_calls

_DEPTH = 2
_ENTRIES = ("forward", "encode", "decode")  # autoencoders are used through the latter two


@dataclass(frozen=True)
class Rewritten:
    """``functions``: what the ported class defines. ``uses``: the served calls in them; ``interfaces``: registries of
    other libraries that they read. ``opaque``: methods that could not be read. ``products``: attributes whose result
    is multiplied, and that are no known activations. ``passed``: keywords of all calls in functions that read a
    registry. ``cut``: attributes whose cut result is served. ``alone``: norms that are also called
    without an addition. ``repeats``: what a registry gives may be called twice. ``learnt``: keywords of calls in
    functions that read a registry, and places in calls of what it gave, whose value may need a gradient. ``gated``:
    products that are served, as (function, place)."""

    functions: dict[str, Any]
    uses: tuple[Use, ...]
    interfaces: frozenset[int]
    opaque: tuple[str, ...]
    products: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    cut: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()
    repeats: bool = False
    learnt: frozenset[str | int] = frozenset()
    gated: frozenset[tuple[str, Any]] = frozenset()


Cuts = frozenset[tuple[str, cuts.Shown]]
Callables = frozenset[tuple[str, type]]
Sequences = frozenset[tuple[str, int]]
_cache: dict[tuple[Any, ...], Rewritten] = {}  # by what a class's code is as well


def rewritten(
    kind: type,
    gates: frozenset[str],
    cut: Cuts = frozenset(),
    norms: frozenset[str] = frozenset(),
    callables: Callables = frozenset(),
    parted: Parted = NONE,
    sequences: Sequences = frozenset(),
) -> Rewritten:
    """A class's served functions. Attributes of its instances, dotted: ``gates`` are known activations, ``cut`` those
    whose cut result is known, ``norms`` known norms that take an addition, ``callables`` objects that are no modules,
    with their classes. ``parted``: parts of its functions that are proven. ``sequences``:
    children that call others in turn, as `unrolled` has them."""
    key = (kind, gates, cut, norms, callables, parted, sequences, source.code_of(kind))
    if key not in _cache:
        served = ServedClass(kind, gates, dict(cut), norms, dict(callables), parted=parted, sequences=dict(sequences))
        _cache[key] = served.result()
    return _cache[key]


def _uses_of_callable(kind: type) -> tuple[Use, ...]:
    """What a served copy of a callable's code uses; empty where nothing is served."""
    key = (kind, source.code_of(kind))
    served = _cache.get(key)
    if served is None:
        served = ServedClass(kind, frozenset(), {}, frozenset(), {}, ("__call__",)).result()
        _cache[key] = served
        if "__call__" in served.functions:
            served_calls[kind] = served.functions["__call__"]
    return served.uses if "__call__" in served.functions else ()


@dataclass
class ServedClass:
    kind: type
    gates: frozenset[str]
    cuts: dict[str, cuts.Shown]
    norms: frozenset[str]
    callables: dict[str, type]
    entries: tuple[str, ...] = _ENTRIES  # a callable's is its __call__, whose methods stay
    uses: list[Use] = field(default_factory=list)
    interfaces: set[int] = field(default_factory=set)
    opaque: list[str] = field(default_factory=list)
    helpers: dict[Any, tuple[Any, str, bool | None]] = field(default_factory=dict)
    standing: dict[Any, Any] = field(default_factory=dict)  # a module that hands on -> what stands for it
    products: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)
    repeats: bool = False
    learnt: set[str | int] = field(default_factory=set)
    parted: Parted = NONE
    gated: set[tuple[str, Any]] = field(default_factory=set)
    sequences: dict[str, int] = field(default_factory=dict)

    def result(self) -> Rewritten:
        own = source.methods(self.kind)
        functions: dict[str, Any] = {}
        seen = set(self.entries)
        first = self.entries[0]
        wanted: list[tuple[str, Conditions]] = [(e, () if e == first else None) for e in self.entries if e in own]
        while wanted:
            name, conditions = wanted.pop()
            function = own[name]
            inner = source.innermost(function)
            tree = source.parsed(inner)
            if tree is None or asks_for_locals(tree):
                self.opaque.append(name)
                continue
            arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
            unchanged = spelling.test_of_made(tree, inner)
            tree, called = unrolled.of_sequences(
                spelling.operators(tree, inner), arguments[0] if arguments else None, inner, self.sequences
            )
            cut_out = self.parted.of(name, tree)
            tree, own_parts = (tree, ()) if cut_out is None else cut_out
            tree, sunk = adding.fused(tree, arguments[0] if arguments else None, self.norms)
            self.alone |= adding.alone(tree, arguments[0] if arguments else None, self.norms)
            serve = Serve(self, inner, tree, True, 0, conditions, own_parts)
            before = len(self.interfaces)
            changed = serve.visit(copied(tree))
            if len(self.interfaces) > before:
                self.passed |= {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg}
                self.repeats = self.repeats or _repeats(tree, inner)
                self.learnt |= set(_learnt_in_calls(tree, inner, serve))
            for method in sorted(serve.methods.keys() & own.keys() - seen) if first == "forward" else ():
                seen.add(method)
                wanted.append((method, serve.methods[method]))
            if serve.new:
                wrapped = source.rewrapped(function, source.rebuilt(inner, changed, serve.new))
                if wrapped is None:
                    self.opaque.append(name)
                else:
                    calm = self.parted.relied.get(name, ())
                    turned = sunk or serve.turned or (cut_out is not None and name in self.parted.turned)
                    plainly = objects.asked(inner, self.kind) if turned else {}
                    tests = (unchanged, objects.test_of(plainly) if plainly else None)
                    out = [f.still(inner, self.kind) for f in self.parted.written.get(name, ())] if cut_out else []
                    served = _while_current(
                        self.kind, name, function, wrapped, called, self.sequences, calm, out, *tests
                    )
                    functions[name] = served
        return Rewritten(
            functions,
            tuple(self.uses),
            frozenset(self.interfaces),
            tuple(self.opaque),
            frozenset(self.products),
            frozenset(self.passed),
            frozenset(self.cut),
            frozenset(self.alone),
            self.repeats,
            frozenset(self.learnt),
            frozenset(self.gated),
        )

    def uses_of_callable(self, kind: type) -> tuple[Use, ...]:
        return _uses_of_callable(kind)

    def helper(
        self, function: types.FunctionType, home: types.FunctionType, depth: int, conditions: Conditions
    ) -> tuple[Any, str, bool | None]:
        """(what stands for a plain function, its op): served; or a copy with served calls and ""; or None and "".

        The third says whether it also serves what needs a gradient; None where every call of the function is served.
        """
        if function in self.helpers:
            return self.helpers[function]
        self.helpers[function] = None, "", None
        forms = helpers.forms_of(function)
        routine = None if forms else routines.served_routine(function)
        if forms:
            self.helpers[function] = _one_served(function, forms), forms[0].helper.op, None
        elif routine is not None:
            self.helpers[function] = routine.replacement, routine.op, routine.gradient
        elif depth < _DEPTH and not hasattr(function, "__wrapped__"):
            tree = source.parsed(function)
            if tree is not None and not asks_for_locals(tree):
                before = len(self.uses)
                serve = Serve(self, function, tree, False, depth + 1, conditions)
                changed = serve.visit(copied(tree))
                cut_out = parts.of_function(function, tree, serve.gated) if self.parted.inner else None
                if cut_out is not None:
                    del self.uses[before:]
                    serve = Serve(self, function, cut_out[0], False, depth + 1, conditions, cut_out[1])
                    changed = serve.visit(copied(cut_out[0]))
                if serve.new:
                    turned = serve.turned or (cut_out is not None and cut_out[2])
                    plainly = objects.asked(function, None) if turned else {}
                    helper = objects.where_plain(source.rebuilt(function, changed, serve.new), function, plainly)
                    self.helpers[function] = helper, "", None
        return self.helpers[function]


def _while_current(
    kind: Any,
    name: str,
    function: Any,
    served: Any,
    called: list[str],
    sequences: dict[str, int],
    calm: Relied,
    out: list[Callable[[Any], bool]],
    unchanged: Callable[[], bool] | None,
    plainly: Callable[[Any, Any], bool] | None,
) -> Any:
    """The served copy of a class's function, while that is what the class has, and the sequences that it calls, the
    modules that it makes, and children without effects on which it relies, are what they were; after that, what it has
    then. out: tests of a module that what is written out in it is that; plainly: a test of what a call is given."""
    (test,), meaning = source.still(kind, (name,))
    if called:
        test += " and ferryman_still(given[0])"
        meaning["ferryman_still"] = unrolled.test_of(called, sequences)
    if plainly is not None:
        test += " and ferryman_plainly(given, options)"
        meaning["ferryman_plainly"] = plainly
    if isinstance(function, types.FunctionType):  # a copy has the defaults of its own
        test += f" and ferryman_code_{name}.__defaults__ is ferryman_defaults"
        meaning["ferryman_defaults"] = function.__defaults__
        if function.__kwdefaults__:
            test += " and ferryman_same()"
            meaning["ferryman_same"] = written.same_defaults(function)
    for i, one in enumerate(out):
        test += f" and ferryman_out_{i}(given[0])"
        meaning[f"ferryman_out_{i}"] = one
    if unchanged is not None:
        test += " and ferryman_made()"
        meaning["ferryman_made"] = unchanged
    if calm:
        test += " and ferryman_calm(given[0])"
        meaning["ferryman_calm"] = relied.test_of(calm)
    text = f"def call(*given, **options):\n    if {test}:\n        return ferryman_served(*given, **options)\n"
    text += f"    return ferryman_kind.{name}(*given, **options)\n"
    namespace = {**meaning, f"ferryman_code_{name}": function, "ferryman_served": served}
    exec(compile(text, f"<ferryman {name}>", "exec"), namespace)  # noqa: S102 - our own text, their identifiers
    return functools.wraps(served)(namespace["call"])


def _repeats(tree: ast.AST, function: types.FunctionType) -> bool:
    """Whether a local that holds what a registry gave may be called twice: in a loop, or in two places of one path."""
    names = _given(tree, function)

    def most(node: ast.AST) -> int:
        if isinstance(node, ast.IfExp):
            return most(node.test) + max(most(node.body), most(node.orelse))
        lists = [value for _, value in ast.iter_fields(node) if isinstance(value, list)]
        alone = [child for child in ast.iter_child_nodes(node) if not any(child in value for value in lists)]
        calls = sum(map(most, alone)) + sum(map(path, lists))
        here = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        return (calls + here) * (2 if isinstance(node, _LOOPS) else 1)

    def path(nodes: list[ast.AST]) -> int:
        """Of statements in turn, or the parts of an expression."""
        for i, node in enumerate(nodes):
            if isinstance(node, ast.If):
                ends = isinstance(node.body[-1], ast.Return | ast.Raise)
                rest = path(nodes[i + 1 :])
                body, other = path([*node.body]), path([*node.orelse])
                sides = max(body, other + rest) if ends else max(body, other) + rest
                return sum(map(most, nodes[:i])) + most(node.test) + sides
        return sum(most(n) for n in nodes if isinstance(n, ast.AST))

    return most(tree) > 1


def _learnt_in_calls(tree: ast.AST, function: types.FunctionType, serve: Serve) -> Iterator[str | int]:
    names = _given(tree, function)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            yield from (k.arg for k in call.keywords if k.arg and serve.learns(k.value))
            if isinstance(call.func, ast.Name) and call.func.id in names:
                yield from (i for i, value in enumerate(call.args) if serve.learns(value))


def _given(tree: ast.AST, function: types.FunctionType) -> set[str]:
    """Locals that hold what a registry gave."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            read = (n for n in ast.walk(node.value) if isinstance(n, ast.Name))
            if any(id(source.resolve(n, function)) in registries for n in read):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


_LOOPS = ast.For | ast.While | ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
_served_helpers: dict[Any, Any] = {}


def _one_served(function: types.FunctionType, forms: Any) -> Any:
    if function not in _served_helpers:
        _served_helpers[function] = helpers.served_helper(function, forms)
    return _served_helpers[function]
