"""A module class's forward, copied with calls that our ops serve.

Only calls change, and only those whose target is known: a function of PyTorch that an op's folder serves, a helper that
is proven, ``activation(gate) * up`` of a proven activation, ``norm(a + b)`` of a proven norm. What changes is reached
from forward: its methods, plain functions of the same file, one level deep or two, and callable objects that are no
modules, such as a library's attention processors, where the module calls its attribute.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ferryman.ops.recognition import Served, families
from ferryman.porting.model import adding, cuts, gating, helpers, learning, recognise, routines, source
from ferryman.porting.model.source import MISSING

_DEPTH = 2
_ENTRIES = ("forward", "encode", "decode")  # autoencoders are used through the latter two


@dataclass(frozen=True)
class Use:
    """One served call. ``op``: its name, or "" where an attribute decides: the activation at ``gate``, or the norm at
    ``norm``, with an addition before it.

    ``conditions``: the tests that it stands under, as (source, outcome, name of the module in it); None where a pass
    may make it more or less than once, by more than the module's own state. ``gradient``: False where it serves only
    what needs no gradient. ``through``: the module that stands for the function, while its forward is its own.
    """

    op: str
    gate: str
    conditions: tuple[tuple[str, bool, str], ...] | None
    gradient: bool = True
    norm: str = ""
    through: Any = None

    def certain(self, module: Any) -> bool | None:
        """Whether one pass through the module makes the call, once; None where that cannot be told from outside."""
        if self.through is not None and not source.untouched(self.through):
            return False
        if self.conditions is None:
            return None
        for text, outcome, name in self.conditions:
            try:
                held = bool(eval(text, {"__builtins__": {}}, {name: module}))  # noqa: S307 - the module's own test
            except (NameError, AttributeError, TypeError, RuntimeError):
                return None  # it reads more than the module's state
            if held is not outcome:
                return False
        return True


@dataclass(frozen=True)
class Rewritten:
    """``functions``: what the ported class defines. ``uses``: the served calls in them; ``interfaces``: registries of
    other libraries that they read. ``opaque``: methods that could not be read. ``products``: attributes whose result
    is multiplied, and that are no known activations. ``passed``: keywords of all calls in functions that read a
    registry. ``cut``: attributes whose cut result is served. ``alone``: norms that are also called
    without an addition. ``repeats``: what a registry gives is called in a loop. ``learnt``: keywords of calls in
    functions that read a registry, and places in calls of what it gave, whose value may need a gradient."""

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


@functools.cache
def served() -> dict[Any, Served]:
    """Functions of PyTorch -> what serves them."""
    return {f: s for family in families() if hasattr(family, "functions") for f, s in family.functions().items()}


more: dict[Any, Served] = {}  # functions of other libraries -> what serves them (integrations add)
registries: dict[int, Any] = {}  # id -> an object of another library whose readers are of interest (integrations add)
Conditions = tuple[tuple[str, bool, str], ...] | None
Cuts = frozenset[tuple[str, cuts.Shown]]
Callables = frozenset[tuple[str, type]]
_cache: dict[tuple[type, frozenset[str], Cuts, frozenset[str], Callables], Rewritten] = {}


def rewritten(
    kind: type,
    gates: frozenset[str],
    cut: Cuts = frozenset(),
    norms: frozenset[str] = frozenset(),
    callables: Callables = frozenset(),
) -> Rewritten:
    """A class's served functions. Attributes of its instances, dotted: ``gates`` are known activations, ``cut`` those
    whose cut result is known, ``norms`` known norms that take an addition, ``callables`` objects that are no modules,
    with their classes."""
    key = (kind, gates, cut, norms, callables)
    if key not in _cache:
        _cache[key] = _Class(kind, gates, dict(cut), norms, dict(callables)).result()
    return _cache[key]


_called: dict[type, Any] = {}  # a callable's class -> its served __call__


def called(held: Any, *args: Any, **options: Any) -> Any:
    """``held(*args, **options)``, by the served copy of its class's code where that is what it runs."""
    served_call = _called.get(type(held))
    return held(*args, **options) if served_call is None else served_call(held, *args, **options)


def _callable(kind: type) -> tuple[Use, ...]:
    """What a served copy of a callable's code uses; empty where nothing is served."""
    made = _cache.get((kind, frozenset(), frozenset(), frozenset(), frozenset()))
    if made is None:
        made = _Class(kind, frozenset(), {}, frozenset(), {}, ("__call__",)).result()
        _cache[kind, frozenset(), frozenset(), frozenset(), frozenset()] = made
        if "__call__" in made.functions:
            _called[kind] = made.functions["__call__"]
    return made.uses if "__call__" in made.functions else ()


@dataclass
class _Class:
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

    def result(self) -> Rewritten:
        own = source.methods(self.kind)
        made: dict[str, Any] = {}
        seen = set(self.entries)
        first = self.entries[0]
        wanted: list[tuple[str, Conditions]] = [(e, () if e == first else None) for e in self.entries if e in own]
        while wanted:
            name, conditions = wanted.pop()
            function = own[name]
            inner = source.innermost(function)
            tree = source.parsed(inner)
            if tree is None:
                self.opaque.append(name)
                continue
            arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
            tree = adding.fused(tree, arguments[0] if arguments else None, self.norms)
            self.alone |= adding.alone(tree, arguments[0] if arguments else None, self.norms)
            serve = _Serve(self, inner, tree, True, 0, conditions)
            before = len(self.interfaces)
            changed = serve.visit(copy.deepcopy(tree))
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
                    made[name] = wrapped
        return Rewritten(
            made,
            tuple(self.uses),
            frozenset(self.interfaces),
            tuple(self.opaque),
            frozenset(self.products),
            frozenset(self.passed),
            frozenset(self.cut),
            frozenset(self.alone),
            self.repeats,
            frozenset(self.learnt),
        )

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
        elif function.__globals__ is home.__globals__ and depth < _DEPTH:
            tree = source.parsed(function)
            if tree is not None:
                serve = _Serve(self, function, tree, False, depth + 1, conditions)
                changed = serve.visit(copy.deepcopy(tree))
                if serve.new:
                    self.helpers[function] = source.rebuilt(function, changed, serve.new), "", None
        return self.helpers[function]


def _repeats(tree: ast.AST, function: types.FunctionType) -> bool:
    """Whether a local that holds what a registry gave is called in a loop."""
    held = _given(tree, function)
    loops = (n for n in ast.walk(tree) if isinstance(n, _LOOPS))
    calls = (c for loop in loops for c in ast.walk(loop) if isinstance(c, ast.Call))
    return any(isinstance(c.func, ast.Name) and c.func.id in held for c in calls)


def _learnt_in_calls(tree: ast.AST, function: types.FunctionType, serve: _Serve) -> Iterator[str | int]:
    held = _given(tree, function)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            yield from (k.arg for k in call.keywords if k.arg and serve.learns(k.value))
            if isinstance(call.func, ast.Name) and call.func.id in held:
                yield from (i for i, value in enumerate(call.args) if serve.learns(value))


def _given(tree: ast.AST, function: types.FunctionType) -> set[str]:
    """Locals that hold what a registry gave."""
    held = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            read = (n for n in ast.walk(node.value) if isinstance(n, ast.Name))
            if any(id(source.resolve(n, function)) in registries for n in read):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                held |= {t.id for t in targets if isinstance(t, ast.Name)}
    return held


_LOOPS = ast.For | ast.While | ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
_served_helpers: dict[Any, Any] = {}


def _one_served(function: types.FunctionType, forms: Any) -> Any:
    if function not in _served_helpers:
        _served_helpers[function] = helpers.served_helper(function, forms)
    return _served_helpers[function]


class _Serve(ast.NodeTransformer):
    def __init__(
        self,
        owner: _Class,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        method: bool,
        depth: int,
        conditions: Conditions,
    ) -> None:
        self.conditions = conditions
        self.owner, self.own, self.depth = owner, function, depth
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        self.self_name = arguments[0] if method and arguments else None
        self.new: dict[str, Any] = {}
        self.methods: dict[str, Conditions] = {}  # methods that it reads, and what the first reading stands under
        loads = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        products = {
            side.id
            for n in ast.walk(tree)
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
            for side in (n.left, n.right)
            if isinstance(side, ast.Name)
        }
        # locals that hold an activation's result for one product alone, and that product stands in the same block
        self.single = {name for name in products if loads[name] == 1 and stores[name] == 1 and name not in arguments}
        self.pending: dict[str, ast.Call] = {}
        self.called: dict[int, ast.Call] = {}  # by the node that stands where a call's function does
        self.own_methods = source.methods(owner.kind).keys()
        self.learnt = learning.learnt(tree, self.self_name, self.own_methods, owner.entries[0] != "forward")

    def learns(self, value: ast.expr) -> bool:
        """Whether an argument's value may need a gradient."""
        return learning.learns(value, self.learnt, self.self_name, self.own_methods)

    def _put(self, value: Any, node: ast.AST) -> ast.expr:
        name = next((n for n, known in self.new.items() if known is value), "")
        if not name:
            name = f"ferryman_{len(self.new)}"
            self.new[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    # Names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._name(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            self.methods.setdefault(node.attr, self.conditions)
            return node
        if isinstance(node.ctx, ast.Load) and source.resolve(node, self.own) is not MISSING:
            return self._name(node)
        self.generic_visit(node)
        return node

    def _name(self, node: ast.expr) -> ast.expr:
        value = source.resolve(node, self.own)
        if value is MISSING:
            return node
        if id(value) in registries:
            self.owner.interfaces.add(id(value))
            return node
        try:
            found = served().get(value) or more.get(value)
        except TypeError:  # not hashable, so no function
            return node
        if found is not None:
            self._use(found.op, node, found.fixed)
            return self._put(found.replacement, node)
        handed = source.handed_on(value)
        function = value if handed is None else handed
        if isinstance(function, types.FunctionType) and not source_is_torch(function):
            under = self.conditions if id(node) in self.called else None
            before = len(self.owner.uses)
            helper, op, graded = self.owner.helper(function, self.own, self.depth, under)
            if op and graded is not None:
                self.owner.uses.append(Use(op, "", None, graded))  # its arguments decide
            elif op:
                self._use(op, node)
            if handed is not None:
                self.owner.uses[before:] = [replace(use, through=value) for use in self.owner.uses[before:]]
            if helper is not None:
                if handed is not None:
                    helper = self.owner.standing.setdefault(value, _standing(value, helper))
                return self._put(helper, node)
        return node

    def _use(self, op: str, node: ast.AST, fixed: tuple[str, int] | None = None) -> None:
        """A function that is passed on, not called, may be called or not; what learns at ``fixed`` is another's."""
        call = self.called.get(id(node))
        if call is not None and fixed is not None:
            at = {k.arg: k.value for k in call.keywords}.get(fixed[0])
            at = call.args[fixed[1]] if at is None and len(call.args) > fixed[1] else at
            call = None if at is not None and self.learns(at) else call
        self.owner.uses.append(Use(op, "", None if call is None else self.conditions))

    def _narrowed(self, node: ast.Call) -> ast.AST | None:
        """``f(..).to(x.dtype)`` of a served function that knows what that is."""
        target, inner = node.args[0] if node.args else None, getattr(node.func, "value", None)
        cast = isinstance(node.func, ast.Attribute) and node.func.attr == "to" and len(node.args) == 1
        if not cast or node.keywords or not isinstance(inner, ast.Call):
            return None
        if not (isinstance(target, ast.Attribute) and target.attr == "dtype"):
            return None
        value = source.resolve(inner.func, self.own)
        found = served().get(value) if isinstance(value, types.FunctionType | types.BuiltinFunctionType) else None
        if found is None or found.narrowed is None:
            return None
        self.called[id(inner.func)] = inner
        self._use(found.op, inner.func)
        arguments = [self.visit(target), *(self.visit(a) for a in inner.args)]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in inner.keywords]
        return ast.copy_location(ast.Call(self._put(found.narrowed, node), arguments, keywords), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        narrowed = self._narrowed(node)
        if narrowed is not None:
            return narrowed
        self.called[id(node.func)] = node
        self.generic_visit(node)
        kind = self.owner.callables.get(self._dotted(node.func) or "")
        uses = () if kind is None else _callable(kind)
        if uses:  # what its own tests read is not the module's
            self.owner.uses += [
                Use(u.op, "", self.conditions if u.conditions == () else None, u.gradient) for u in uses
            ]
            held, node.func = node.func, self._put(called, node.func)
            node.args.insert(0, held)
        if isinstance(node.func, ast.Name) and node.func.id in (adding.CALL, adding.HELD):
            node.func = self._put(adding.added if node.func.id == adding.CALL else adding.held, node.func)
            depth, conditions = adding.outer(node), self.conditions
            if depth is not None:
                under = conditions[: len(conditions) - depth] if conditions is not None else None
                self.owner.uses.append(Use("", "", under, norm=adding.norm_of(node)))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``self.child(x)[..., :n]`` of a child whose cut result is known."""
        call, upper = node.value, _upper(node.slice)
        if isinstance(call, ast.Call) and upper is not None and isinstance(node.ctx, ast.Load):
            name = self._dotted(call.func) or ""
            shown = self.owner.cuts.get(name)
            if shown is not None and len(call.args) == 1 and not call.keywords:
                self.owner.cut.add(name)
                self.owner.uses.append(Use(shown.op, "", None))  # lengths decide
                x, n = self.visit(call.args[0]), self.visit(upper)
                target = self._put(cuts.replacement(shown), node)
                return ast.copy_location(ast.Call(target, [call.func, x, n], []), node)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._block(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        text, before = ast.unparse(node.test), self.conditions
        node.test = self.visit(node.test)
        sides = []
        for outcome, body in ((True, node.body), (False, node.orelse)):
            if before is not None:
                known = self.self_name is not None
                self.conditions = (*before, (text, outcome, self.self_name or "")) if known else None
            sides.append(self._block(body))
            self.conditions = before
        node.body, node.orelse = sides
        return node

    def _uncertain(self, node: ast.AST) -> ast.AST:
        before, self.conditions = self.conditions, None
        self.generic_visit(node)
        self.conditions = before
        return node

    visit_For = visit_While = visit_Try = visit_IfExp = visit_BoolOp = _uncertain  # noqa: N815
    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_Lambda = _uncertain  # noqa: N815

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A statement list: an activation's result that one product of the same list alone reads waits for it."""
        read = {
            n.id: i
            for i, s in enumerate(body)
            if not isinstance(s, ast.If | ast.For | ast.While | ast.Try | ast.With)
            for n in ast.walk(s)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        made: list[ast.stmt] = []
        for i, statement in enumerate(body):
            target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
            if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and target.id in self.single:
                activation = self._activation(statement.value)
                if activation is not None and read.get(target.id, -1) > i:
                    assert isinstance(statement.value, ast.Call)
                    self.pending[target.id] = statement.value
                    statement.value = self.visit(statement.value.args[0])
                    made.append(statement)
                    continue
            made.append(self.visit(statement))
        return made

    # Gates

    def _activation(self, node: ast.expr) -> ast.expr | None:
        """The function of a call with one argument, if it is a known activation."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)):
            return None
        dotted = self._dotted(node.func)
        if dotted is not None:
            if dotted not in self.owner.gates:
                self.owner.products.add(dotted)
                return None
            return node.func if not node.keywords else None
        return node.func if self._function_gate(node) is not None else None

    def _dotted(self, node: ast.expr) -> str | None:
        """ "act.inner" of ``self.act.inner``."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        mine = isinstance(node, ast.Name) and node.id == self.self_name and names
        return ".".join(reversed(names)) if mine else None

    def _function_gate(self, node: ast.Call) -> tuple[Any, Any] | None:
        value = source.resolve(node.func, self.own)
        constants = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
        if value is MISSING or not callable(value) or isinstance(value, type) or len(constants) != len(node.keywords):
            return None
        if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return None
        call = _partial(value, tuple(sorted(constants.items())))
        gate = recognise.gate_of(call)
        return None if gate is None else (gate, call)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            for first, side, other in ((True, node.left, node.right), (False, node.right, node.left)):
                waiting = isinstance(side, ast.Name) and side.id in self.pending
                if waiting:
                    assert isinstance(side, ast.Name)
                    held = self.pending.pop(side.id)
                    call = ast.copy_location(ast.Call(held.func, [side], held.keywords), side)
                elif isinstance(side, ast.Call) and self._activation(side) is not None:
                    call = side
                else:
                    continue
                return self._gate(node, call, other, first)
        self.generic_visit(node)
        return node

    def _gate(self, node: ast.BinOp, call: ast.Call, other: ast.expr, first: bool) -> ast.AST:
        dotted = self._dotted(call.func)
        inner, rest = self.visit(call.args[0]), self.visit(other)
        if dotted is not None:
            self.owner.uses.append(Use("", dotted, self.conditions))
            target: Callable[..., Any] = gating.gated if first else gating.gated_last
            arguments = [call.func, inner, rest] if first else [rest, call.func, inner]
        else:
            found = self._function_gate(call)
            if found is None:
                raise AssertionError(f"{ast.unparse(call)} was a known activation a moment ago")
            self.owner.uses.append(Use(found[0].op, "", self.conditions))
            target = _of_function(found[0], found[1])[0 if first else 1]
            arguments = [inner, rest] if first else [rest, inner]
        return ast.copy_location(ast.Call(self._put(target, node), arguments, []), node)


def _standing(held: Any, helper: Any) -> Any:
    """The served function in place of a module that hands on to it, while that runs its own forward."""

    def call(*given: Any, **options: Any) -> Any:
        return helper(*given, **options) if source.untouched(held) else held(*given, **options)

    return call


def _upper(index: ast.expr) -> ast.expr | None:
    """n of ``[..., :n]`` or ``[:, :, :n]``, where n can be evaluated before what it cuts."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    last = parts[-1] if parts else None
    whole = all(isinstance(p, ast.Slice) and p.lower is p.upper is p.step is None for p in parts[:-1])
    dots = len(parts) == 2 and isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis
    if not isinstance(last, ast.Slice) or last.lower is not None or last.step is not None or last.upper is None:
        return None
    plain = ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.UnaryOp | ast.USub | ast.Load
    if not (dots or (whole and len(parts) == 3)) or not all(isinstance(n, plain) for n in ast.walk(last.upper)):
        return None
    return last.upper


@functools.cache
def _partial(function: Any, constants: tuple[tuple[str, Any], ...]) -> Any:
    return functools.partial(function, **dict(constants)) if constants else function


@functools.cache
def _of_function(gate: Any, call: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return gating.of_function(gate, call)


def source_is_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"
