"""Which branches of a module's or a function's code a proof took.

The code is run as an instrumented copy: each test of an ``if``, each operand of ``and``/``or``, reports its outcome. A
test that came out one way only is not covered: it becomes a guard, or the proof is none. A ``for`` is such a test: it
must have had items, and none. What cannot be followed (a ``while``, a state change, code without a source) is refused
before it runs.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import source
from ferryman.porting.model.source import MISSING

_TRUSTED = ("torch", "math", "builtins", "operator", "typing", "_operator")
_BUILTINS = {
    "len",
    "int",
    "float",
    "bool",
    "tuple",
    "list",
    "isinstance",
    "min",
    "max",
    "abs",
    "slice",
    "type",
    "sum",
    "round",
    "getattr",
    "hasattr",
    "callable",
    "super",
    "range",
    "print",
    "str",
    "repr",
}
_DEPTH = 4
# Functions of a library without arguments that say in which mode PyTorch runs, such as export: a proof holds for the
# answer that it got, and a call asks again.
modes: set[Any] = set()


class Unproven(Exception):
    """Code that a proof cannot follow; the text says what and where."""


@dataclass
class Test:
    """A condition and how it came out. ``guard``: its source, where it may stand before the whole call instead.

    Of an equality with an attribute of the module, ``against``: which one; ``sides``: by run, the two numbers each time
    it was asked.
    """

    text: str
    line: int
    guard: str | None
    seen: set[bool] = field(default_factory=set)
    loop: bool = False
    against: str = ""
    sides: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Trace:
    """All conditions of the code that was followed. ``run``: whoever runs it counts the runs that he tells apart."""

    tests: list[Test] = field(default_factory=list)
    run: int = 0

    def seen(self, index: int, value: Any) -> Any:
        self.tests[index].seen.add(bool(value))
        return value

    def same(self, index: int, left: Any, right: Any) -> Any:
        self.tests[index].sides.setdefault(self.run, []).append((_number(left), _number(right)))
        return self.seen(index, left == right)

    def each(self, index: int, items: Any) -> Iterator[Any]:
        taken = False
        for item in items:
            taken = self.seen(index, True)
            yield item
        if not taken:
            self.seen(index, False)

    def guards(
        self, entered: bool = False, never: Callable[[Test], bool] = lambda test: False
    ) -> list[tuple[str, bool]]:
        """(condition, the outcome that was proven) of what came out one way only. Raises Unproven without a guard.

        entered: whoever asks has a guard of its own, by which every loop that always had items has some. never: whether
        a test that was never true cannot be.
        """
        found = []
        for test in self.tests:
            if len(test.seen) == 1:
                if entered and test.loop and True in test.seen:
                    continue
                if True not in test.seen and never(test):
                    continue
                if test.guard is None:
                    raise Unproven(f"no input took both sides of `{test.text}` (line {test.line})")
                found.append((test.guard, next(iter(test.seen))))
        return list(dict.fromkeys(found))


def _number(value: Any) -> float:
    found = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return found if isinstance(found, int | float) else math.nan


def trusted(value: Any) -> bool:
    """A function or class of PyTorch or of Python, whose meaning is known."""
    home = getattr(value, "__module__", None) or ""
    return home.split(".")[0] in _TRUSTED


def follow_module(
    module: nn.Module, trace: Trace, known: Collection[str] = (), undecorated: bool = False
) -> type[nn.Module]:
    """A subclass whose forward, and the methods and functions that it calls, report their tests.

    known: children whose code was proven elsewhere. undecorated: follow what the forward's decorators wrap; whoever
    asks answers for these.
    """
    kind = type(module)
    own = source.methods(kind)
    forward = own.get("forward")
    if forward is None:
        raise Unproven("its class has no forward of its own")
    made: dict[str, Any] = {}
    follower = _Follower(trace, kind, own, module, made, known=known)
    made["forward"] = follower.function(source.innermost(forward) if undecorated else forward, "forward", 0)
    try:
        return type(kind.__name__, (kind,), dict(made))
    except Exception as error:  # a class may refuse heirs with whatever it likes
        raise Unproven(f"no class can be derived from its own: {type(error).__name__}: {error}") from error


def follow_function(function: Any, trace: Trace) -> Any:
    return _Follower(trace, None, {}, None, {}).function(function, "forward", 0)


@dataclass
class _Follower:
    trace: Trace
    kind: type | None
    methods: dict[str, Any]
    module: nn.Module | None
    made: dict[str, Any]
    functions: dict[int, Any] = field(default_factory=dict)
    known: Collection[str] = ()
    kinds: dict[type, Any] = field(default_factory=dict)

    def function(self, function: Any, role: str, depth: int) -> Any:
        """``role``: "forward" (its tests may become guards over its parameters), "method" or "helper"."""
        inner = source.innermost(function)
        name = getattr(inner, "__qualname__", repr(inner))
        if depth > _DEPTH:
            raise Unproven(f"{name}: calls go deeper than {_DEPTH}")
        tree = source.parsed(inner)
        if tree is None:
            raise Unproven(f"{name}: its source is not available, or is not what runs")
        if inner is not function and not all(trusted(w) for w in _decorators(function)):
            raise Unproven(f"{name}: a decorator stands around it")
        change = _Instrument(self, inner, tree, role, depth)
        made = source.rebuilt(inner, change.visit(copy.deepcopy(tree)), change.new)
        wrapped = source.rewrapped(function, made)
        if wrapped is None:
            raise Unproven(f"{name}: its decorator cannot be copied")
        return wrapped

    def method(self, name: str, depth: int) -> None:
        if name not in self.made:
            self.made[name] = None  # recursion ends here
            self.made[name] = self.function(self.methods[name], "method", depth)

    def taken(self, value: Any) -> Any:
        """What code takes out of a table of functions and calls, such as an activation: followed, or of PyTorch."""
        function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        if trusted(value) if function else trusted(type(value)) and isinstance(value, nn.Module):
            return value
        plain = isinstance(value, nn.Module) and not [*value.children(), *value.parameters(), *value.buffers()]
        if not plain or "forward" in value.__dict__ or value._forward_hooks or value._forward_pre_hooks:
            raise Unproven(f"a table holds {type(value).__name__}, which no proof follows")
        if type(value) not in self.kinds:
            self.kinds[type(value)] = follow_module(value, self.trace)
        kind = self.kinds[type(value)]
        twin = kind.__new__(kind)
        twin.__dict__.update(value.__dict__)
        return twin.forward

    def helper(self, function: Any, depth: int) -> Any:
        if id(function) not in self.functions:
            self.functions[id(function)] = function
            self.functions[id(function)] = self.function(function, "helper", depth)
        return self.functions[id(function)]


def _decorators(function: Any) -> list[Any]:
    """The wrappers' own homes: what functools.wraps copied over them says nothing."""
    found = []
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        home = function.__globals__.get("__name__", "") if code is not None else ""
        found.append(types.SimpleNamespace(__module__=home))
        function = function.__wrapped__
    return found


class _Instrument(ast.NodeTransformer):
    def __init__(
        self, follower: _Follower, function: types.FunctionType, tree: ast.FunctionDef, role: str, depth: int
    ) -> None:
        self.follower, self.own, self.role, self.depth = follower, function, role, depth
        self.entered = False
        trace = follower.trace
        self.new: dict[str, Any] = {
            "ferryman_seen": trace.seen,
            "ferryman_same": trace.same,
            "ferryman_each": trace.each,
        }
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self.self_name = arguments[0] if arguments and follower.kind is not None and role != "helper" else None
        self.parameters = set(arguments)
        stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.first_store: dict[str, int] = {}
        for node in stores:
            self.first_store[node.id] = min(node.lineno, self.first_store.get(node.id, node.lineno))

    # Tests

    def _test(self, node: ast.expr) -> ast.expr:
        index = len(self.follower.trace.tests)
        text = ast.unparse(node)
        self.follower.trace.tests.append(Test(text[:80], node.lineno, text if self._guardable(node) else None))
        against = self._against(node)
        self.follower.trace.tests[index].against = against
        inner = self.visit(node)
        called, given = ("ferryman_same", [inner.left, *inner.comparators]) if against else ("ferryman_seen", [inner])
        return ast.copy_location(ast.Call(ast.Name(called, ast.Load()), [ast.Constant(index), *given], []), node)

    def _against(self, node: ast.expr) -> str:
        """The attribute of the module that ``.. == self.attribute`` compares with."""
        if not isinstance(node, ast.Compare) or [type(o) for o in node.ops] != [ast.Eq]:
            return ""
        right = node.comparators[0]
        held = right.value if isinstance(right, ast.Attribute) else None
        mine = isinstance(held, ast.Name) and held.id == self.self_name
        return right.attr if isinstance(right, ast.Attribute) and mine else ""

    def _guardable(self, node: ast.expr) -> bool:
        """It reads only the module's state, and the forward's parameters as they came in."""
        asked = {id(p.func) for p in ast.walk(node) if isinstance(p, ast.Call) and self._mode(p)}
        for part in ast.walk(node):
            if id(part) in asked or (isinstance(part, ast.Call) and id(part.func) in asked):
                continue
            if isinstance(part, ast.Call) and not (
                (isinstance(part.func, ast.Name) and part.func.id in ("len", "isinstance"))
                or (isinstance(part.func, ast.Attribute) and part.func.attr in ("dim", "size", "is_floating_point"))
            ):
                return False
            if isinstance(part, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.NamedExpr | ast.Await):
                return False
            if isinstance(part, ast.Name) and part.id not in ("len", "isinstance"):
                mine = part.id == self.self_name
                came = self.role == "forward" and part.id in self.parameters
                if not mine and not came and not isinstance(source.resolve(part, self.own), types.ModuleType):
                    return False
                if part.id in self.first_store and self.first_store[part.id] <= node.lineno:
                    return False
        return self.self_name is not None or self.role == "forward"

    def _mode(self, node: ast.Call) -> bool:
        value = source.resolve(node.func, self.own) if isinstance(node.func, ast.Name) else None
        return isinstance(value, types.FunctionType) and value in modes and not node.args and not node.keywords

    def visit_If(self, node: ast.If) -> ast.AST:
        if not node.orelse and all(isinstance(s, ast.Raise) for s in node.body):
            return node  # what is refused is no result
        node.test = self._test(node.test)
        node.body = [self.visit(s) for s in node.body]
        node.orelse = [self.visit(s) for s in node.orelse]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._test(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.values = [self._test(v) for v in node.values]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    # What is not followed

    def _refuse(self, node: ast.AST) -> ast.AST:
        what = type(node).__name__.lower()
        raise Unproven(
            f"{self.own.__qualname__}: a proof does not follow a {what} (line {getattr(node, 'lineno', '?')})"
        )

    def visit_For(self, node: ast.For) -> ast.AST:
        index = len(self.follower.trace.tests)
        self.follower.trace.tests.append(Test(f"for .. in {ast.unparse(node.iter)[:70]}", node.lineno, None, loop=True))
        node.target = self.visit(node.target)
        items = self.visit(node.iter)
        node.iter = ast.copy_location(
            ast.Call(ast.Name("ferryman_each", ast.Load()), [ast.Constant(index), items], []), node
        )
        node.body, node.orelse = [self.visit(s) for s in node.body], [self.visit(s) for s in node.orelse]
        return node

    visit_While = visit_Try = visit_Match = visit_Global = visit_Nonlocal = _refuse  # noqa: N815

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        """Over values that are written down, each by a name that nothing else has: no test, and no other number."""
        first = node.generators[0]
        fixed = isinstance(first.iter, ast.Tuple | ast.List) and not any(
            isinstance(e, ast.Starred) for e in first.iter.elts
        )
        inside = [n for n in ast.walk(node.elt) if isinstance(n, ast.IfExp | ast.BoolOp | ast.Call)]
        name = first.target.id if isinstance(first.target, ast.Name) else None
        if len(node.generators) > 1 or first.ifs or not fixed or name is None or name in self.own.__code__.co_names:
            return self._refuse(node)
        if any(not isinstance(n, ast.Call) or (isinstance(n.func, ast.Name) and n.func.id == name) for n in inside):
            return self._refuse(node)
        self.generic_visit(node)
        return node

    visit_Lambda = visit_ClassDef = visit_Yield = visit_YieldFrom = visit_Await = _refuse  # noqa: N815
    visit_SetComp = visit_DictComp = visit_NamedExpr = _refuse  # noqa: N815
    visit_GeneratorExp = visit_ListComp  # noqa: N815
    visit_TryStar = visit_AsyncFor = visit_AsyncWith = visit_Import = visit_ImportFrom = visit_Delete = _refuse  # noqa: N815

    def visit_With(self, node: ast.With) -> ast.AST:
        for item in node.items:
            call = item.context_expr
            found = source.resolve(call.func, self.own) if isinstance(call, ast.Call) else MISSING
            if found is MISSING or not trusted(found):
                return self._refuse(node)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.entered:
            return self._refuse(node)
        self.entered = True
        node.body = [self.visit(s) for s in node.body]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Store) or (node.attr.startswith("__") and node.attr != "__class__"):
            raise Unproven(f"{self.own.__qualname__}: it changes its state, or reads {node.attr} (line {node.lineno})")
        self.generic_visit(node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.ctx, ast.Store) and self._reads_self(node.value):
            raise Unproven(f"{self.own.__qualname__}: it changes its state (line {node.lineno})")
        self.generic_visit(node)
        return node

    def _reads_self(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id == self.self_name for n in ast.walk(node))

    # Calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        target = node.func
        if (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == self.self_name
        ):
            self._own(target.attr)
        elif isinstance(target, ast.Attribute) and _is_super(target.value):
            self._parent(target.attr)
        elif isinstance(target, ast.Name) or source.resolve(target, self.own) is not MISSING:
            replaced = self._known(source.resolve(target, self.own), ast.unparse(target))
            if replaced is not None:
                node.func = ast.copy_location(ast.Name(replaced, ast.Load()), target)
        elif isinstance(target, ast.Attribute):
            base = source.resolve(target.value, self.own)
            if base is not MISSING and not trusted(base):
                raise Unproven(f"{self.own.__qualname__}: calls {ast.unparse(target)}, which no proof follows")
            node.func = self.visit(target)
        elif isinstance(target, ast.Subscript) and isinstance(source.resolve(target.value, self.own), Mapping):
            self.new["ferryman_taken"] = self.follower.taken
            held = ast.Call(ast.Name("ferryman_taken", ast.Load()), [self.visit(target)], [])
            node.func = ast.copy_location(held, target)
        else:
            raise Unproven(f"{self.own.__qualname__}: calls {ast.unparse(target)[:60]}, which no proof follows")
        node.args = [self.visit(a) for a in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node

    def _known(self, value: Any, text: str) -> str | None:
        """A name for the instrumented copy of what is called; None where the call may stay."""
        if value is MISSING:
            raise Unproven(f"{self.own.__qualname__}: calls {text}, a local, which no proof follows")
        if getattr(value, "__module__", None) == "builtins" and not isinstance(value, types.FunctionType):
            if getattr(value, "__name__", "") in _BUILTINS:
                return None
            raise Unproven(f"{self.own.__qualname__}: calls {text}")
        if trusted(value) or (isinstance(value, functools.partial) and trusted(value.func)):
            return None
        if isinstance(value, types.FunctionType) and value in modes:
            return None
        if not isinstance(value, types.FunctionType):
            raise Unproven(f"{self.own.__qualname__}: calls {text}, which no proof follows")
        name = f"ferryman_followed_{len(self.new)}"
        self.new[name] = self.follower.helper(value, self.depth + 1)
        return name

    def _own(self, name: str) -> None:
        """``self.name(...)``: a method, or a function that the module holds."""
        follower = self.follower
        if name in follower.methods:
            follower.method(name, self.depth + 1)
            return
        held = getattr(follower.module, name, MISSING)
        if name in follower.known and isinstance(held, nn.Module):
            return
        if isinstance(held, Tensor) or held is MISSING:
            raise Unproven(f"{self.own.__qualname__}: calls self.{name}, which no proof follows")
        known = trusted(held) and not isinstance(held, nn.Module)
        if not known and not (isinstance(held, functools.partial) and trusted(held.func)):
            raise Unproven(f"{self.own.__qualname__}: calls self.{name}, which it holds, and no proof follows")

    def _parent(self, name: str) -> None:
        """``super().name(...)`` runs code that is not instrumented: PyTorch's own may."""
        cells = dict(zip(self.own.__code__.co_freevars, self.own.__closure__ or (), strict=True))
        here = cells["__class__"].cell_contents if "__class__" in cells else None
        order = self.follower.kind.__mro__ if self.follower.kind is not None else ()
        for base in order[order.index(here) + 1 :] if here in order else ():
            if name in vars(base):
                if trusted(base):
                    return
                break
        raise Unproven(f"{self.own.__qualname__}: calls super().{name}, which no proof follows")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args
