"""Functions and methods with two products, written where a forward calls them: where one is given the module, whose
settings it reads, or where the forward reads only some of what it gives.

What is written there computes what the call does, in the order in which that does it; an argument has a local of its
own where it is more than a name. A call of the forward asks first whether the functions are what they were.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ferryman.porting.model import flags, source
from ferryman.porting.model.part_shape import PRODUCTS
from ferryman.porting.model.statements import FRAMES, asks_for_locals, read, stored
from ferryman.porting.model.trees import blocks, copied

_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_NEVER = (
    *(_SCOPES.__args__),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Delete, ast.Try, ast.With),
)
_FRAMES = FRAMES | {"super", "__class__"}
_DEFAULTS = bool | int | float | str | None
_PASSES, _MOST = 2, 4


@dataclass(frozen=True)
class Function:
    """A function that was written out: the name that a file has for it, or, of a method, the class's."""

    name: str
    function: types.FunctionType
    method: bool

    def still(self, home: types.FunctionType, kind: Any) -> Callable[[Any], bool]:
        """A test of a module that calls of the name run the code that was written."""
        function, name, method = self.function, self.name, self.method
        code, same = function.__code__, same_defaults(function)
        own = f"<ferryman {name}>"  # the file that a ported class's function of this name has

        def still(module: Any) -> bool:
            if function.__code__ is not code or not same():
                return False
            if not method:
                return home.__globals__.get(name) is function
            has = getattr(type(module), name, None)
            served = has is function or getattr(getattr(has, "__code__", None), "co_filename", None) == own
            return served and getattr(kind, name, None) is function and name not in module.__dict__

        return still


def same_defaults(function: types.FunctionType) -> Callable[[], bool]:
    """A test that a function's arguments have the defaults that they have now."""
    defaults, by_name = function.__defaults__, dict(function.__kwdefaults__ or {})

    def same() -> bool:
        now = function.__kwdefaults__ or {}
        return (
            function.__defaults__ is defaults
            and now.keys() == by_name.keys()
            and all(now[n] is value for n, value in by_name.items())
        )

    return same


@dataclass
class Writing:
    """Writes calls out in one method's tree. home: the method; own: the name that it has for its module;
    plain: whether an expression is a setting of the module's, which reading does not change. settings: locals that are
    such, and whether these are None."""

    home: types.FunctionType
    own: str
    methods: dict[str, Any]
    plain: Callable[[ast.expr], bool]
    functions: list[Function] = field(default_factory=list)
    settings: dict[str, bool] = field(default_factory=dict)
    is_none: Callable[[ast.expr], bool] = lambda e: False
    count: int = 0
    aware: bool = False  # the last call gives the module to something else, which may change its settings
    tree: ast.FunctionDef = field(init=False)

    def __call__(self, tree: ast.FunctionDef) -> list[Function]:
        """The functions that were written out."""
        self.tree = tree
        for _ in range(_PASSES):
            for body in list(blocks(self.tree)):
                for statement in list(body):
                    fresh = self._written(statement) if self.count < _MOST else None
                    if fresh is not None:
                        at = next(i for i, s in enumerate(body) if s is statement)
                        body[at : at + 1] = fresh
        ast.fix_missing_locations(self.tree)
        return self.functions

    def _written(self, statement: ast.stmt) -> list[ast.stmt] | None:
        call, chosen = _call_of(statement)
        known = None if call is None else self._function(call)
        if call is None or known is None:
            return None
        tree = source.parsed(known.function)
        assert tree is not None
        given = self._given(call, tree, known)
        if given is None:
            return None
        before, put, constants = given
        tree = flags.folded(tree, constants)
        *body, last = tree.body
        if not isinstance(last, ast.Return) or last.value is None:  # such a call raises
            return None
        ends = self._ends(statement, last.value, chosen)
        modules = any(isinstance(e, ast.Name) and e.id == self.own for e in put.values())
        if ends is None or not (ends[1] or (modules and not known.method)):
            return None
        local = {*stored(ast.Module(tree.body, []))} | {n for n, _ in before}
        names = {n: f"{n}_ferryman_w{self.count}" for n in local}
        # a parameter is what it is given until a statement puts something else in its local
        until = {n: _first_store(body, n) for n, e in before if _is_local(e, self._locals())}
        first = {n: statement for n, statement in until.items() if statement is not None}
        change = _Changing(names, put | {n: e for n, e in before if n in first})
        before = [(n, e) for n, e in before if n not in first]
        self.settings |= {names[n]: self.is_none(e) for n, e in before if not self.aware and self.plain(e)}
        fresh: list[ast.stmt] = [ast.Assign([ast.Name(names[n], ast.Store())], value) for n, value in before]
        docs = [s for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
        for one in [s for s in body if s not in docs and not isinstance(s, ast.Pass)]:
            stores = {n for n, statement in first.items() if statement is one}
            fresh.append(change.assigned(copied(one), stores) if stores else change.visit(copied(one)))
        result = change.visit(copied(ends[0]))
        if isinstance(statement, ast.Return):
            fresh.append(ast.Return(result))
        else:
            assert isinstance(statement, ast.Assign)
            fresh.append(ast.Assign([ends[2]], result))
        self.count += 1
        self.functions.append(known)
        return [ast.copy_location(s, statement) for s in fresh]

    # What is called

    def _function(self, call: ast.Call) -> Function | None:
        func = call.func
        if isinstance(func, ast.Name):
            value, method = source.resolve(func, self.home), False
            name = func.id
            if name in self._locals() or self.home.__globals__.get(name) is not value:
                return None
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == self.own:
            value, method, name = self.methods.get(func.attr), True, func.attr
        else:
            return None
        if not isinstance(value, types.FunctionType) or value is self.home or hasattr(value, "__wrapped__"):
            return None
        tree = source.parsed(value)
        alike = value.__globals__ is self.home.__globals__ and value.__closure__ is None
        if tree is None or not alike or not _may_be_written(tree, value):
            return None
        free = set(read(tree)) - {*stored(ast.Module(tree.body, []))} - {a.arg for a in _arguments(tree)}
        return None if free & self._locals() else Function(name, value, method)

    def _locals(self) -> set[str]:
        own = {*self.home.__code__.co_varnames, *self.home.__code__.co_cellvars, *self.home.__code__.co_freevars}
        return own | {*stored(self.tree)} | {a.arg for a in ast.walk(self.tree) if isinstance(a, ast.arg)}

    # What it is given

    def _given(
        self, call: ast.Call, tree: ast.FunctionDef, known: Function
    ) -> tuple[list[tuple[str, ast.expr]], dict[str, ast.expr], dict[str, Any]] | None:
        """(parameters with locals of their own, in the order of the call; those for which an expression stands; those
        that are constants)."""
        names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        args = [ast.Name(self.own, ast.Load()), *call.args] if known.method else [*call.args]
        inside = [n for a in (*args, *(k.value for k in call.keywords)) for n in ast.walk(a)]
        if len(args) > len(names) or any(isinstance(n, (ast.Starred, *_NEVER)) for n in inside):
            return None
        positional = {a.arg for a in tree.args.posonlyargs}
        by_name = {k.arg: k.value for k in call.keywords}
        able = {a.arg for a in (*tree.args.args, *tree.args.kwonlyargs)} - positional - {*names[: len(args)]}
        if not by_name.keys() <= able or len(by_name) != len(call.keywords):
            return None
        given: dict[str, ast.expr] = {**dict(zip(names, args, strict=False)), **by_name}  # type: ignore[dict-item]
        values = dict(zip(reversed(names), reversed(known.function.__defaults__ or ()), strict=False))
        values |= known.function.__kwdefaults__ or {}
        for name in [*names, *(a.arg for a in tree.args.kwonlyargs)]:
            if name not in given:
                if name not in values or not isinstance(values[name], _DEFAULTS):
                    return None
                given[name] = ast.Constant(values[name])
        kept, self.aware = {*stored(ast.Module(tree.body, []))}, self._passes_module_on(tree, given)
        put, before = dict[str, ast.expr](), list[tuple[str, ast.expr]]()
        for name, e in given.items():
            if (isinstance(e, ast.Constant) or _is_local(e, self._locals())) and name not in kept:
                put[name] = e
                continue
            before.append((name, e))
            if name not in kept and not self.aware and self.plain(e):
                put[name] = e
        constants = {n: e.value for n, e in put.items() if isinstance(e, ast.Constant)}
        return before, put, constants

    def _passes_module_on(self, tree: ast.FunctionDef, given: dict[str, ast.expr]) -> bool:
        """Whether code gives a parameter that is the module to anything else, which may change its settings."""
        names = {n for n, e in given.items() if isinstance(e, ast.Name) and e.id == self.own}
        asked = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        called = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
        asked -= {id(f.value) for f in called}
        return any(isinstance(n, ast.Name) and n.id in names and id(n) not in asked for n in ast.walk(tree))

    # What it gives

    def _ends(self, statement: ast.stmt, value: ast.expr, chosen: int | None) -> tuple[ast.expr, bool, ast.expr] | None:
        """(what is read of what it gives, whether something is not, where that is put)."""
        target: ast.expr = statement.targets[0] if isinstance(statement, ast.Assign) else ast.Name("", ast.Store())
        parts = value.elts if isinstance(value, ast.Tuple) else None
        if parts is not None and any(isinstance(e, ast.Starred) for e in parts):
            return None
        if chosen is not None:
            if parts is None or not -len(parts) <= chosen < len(parts):
                return None
            one = parts[chosen]
            return (one, len(parts) > 1, target) if all(_only_names(e) for e in parts if e is not one) else None
        if not isinstance(target, ast.Tuple):
            return value, False, target
        if parts is None or len(parts) != len(target.elts):
            return None
        loaded = set(read(self.tree)) | _kept(self.tree)
        pairs = list(zip(target.elts, parts, strict=True))
        if not all(isinstance(t, ast.Name) for t, _ in pairs):
            return None
        kept = [(t, e) for t, e in pairs if t.id in loaded or not _only_names(e)]  # type: ignore[attr-defined]
        if not kept:
            return None
        if len(kept) == 1:
            return kept[0][1], len(pairs) > 1, kept[0][0]
        both = ast.Tuple([e for _, e in kept], ast.Load()), ast.Tuple([t for t, _ in kept], ast.Store())
        return both[0], len(kept) < len(pairs), both[1]


def _call_of(statement: ast.stmt) -> tuple[ast.Call | None, int | None]:
    """(the call that a statement is, which of its results it takes)."""
    value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
    if isinstance(statement, ast.Assign) and (
        len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name | ast.Tuple)
    ):
        return None, None
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and type(value.slice.value) is int:
        return (value.value, value.slice.value) if isinstance(value.value, ast.Call) else (None, None)
    return (value, None) if isinstance(value, ast.Call) else (None, None)


def _arguments(tree: ast.FunctionDef) -> list[ast.arg]:
    rest = [a for a in (tree.args.vararg, tree.args.kwarg) if a is not None]
    return [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs, *rest]


def _may_be_written(tree: ast.FunctionDef, function: types.FunctionType) -> bool:
    """Whether code has two products, and gives its result at its end alone, with no more than plain statements."""
    words = [getattr(n, "attr", getattr(n, "id", type(n).__name__)) for n in ast.walk(tree)]
    inside = [n for s in tree.body for n in ast.walk(s)]
    returns = [n for n in inside if isinstance(n, ast.Return)]
    more = tree.args.kwarg.arg if tree.args.kwarg is not None else None
    return (
        sum(word in PRODUCTS for word in words) > 1
        and not tree.decorator_list
        and tree.args.vararg is None
        and not any(isinstance(n, _NEVER) for n in inside)
        and not any(isinstance(n, ast.Name) and (n.id in _FRAMES or n.id == more) for n in inside)
        and not any(isinstance(n, ast.Attribute) and n.attr.startswith("__") for n in inside)
        and not asks_for_locals(tree)
        and len(returns) == 1
        and tree.body[-1] is returns[0]
        and returns[0].value is not None
        and not function.__code__.co_freevars
    )


def _kept(tree: ast.AST) -> set[str]:
    """Names that have to be there for a statement that only stores: those that it deletes, or adds to."""
    targets: list[ast.expr] = [n.target for n in ast.walk(tree) if isinstance(n, ast.AugAssign)]
    targets += [t for n in ast.walk(tree) if isinstance(n, ast.Delete) for t in n.targets]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _only_names(e: ast.expr) -> bool:
    """Whether nothing is lost with a value: a name, also as what needs no gradient."""
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr == "detach":
        return isinstance(e.func.value, ast.Name) and not e.args and not e.keywords
    return isinstance(e, ast.Name | ast.Constant)


def _is_local(e: ast.expr, names: set[str]) -> bool:
    return isinstance(e, ast.Name) and e.id in names


def _first_store(body: list[ast.stmt], name: str) -> ast.Assign | None:
    """The first statement of a block that puts something in a local, if that is all that it does."""
    first = next((s for s in body if name in stored(s)), None)
    return first if isinstance(first, ast.Assign) and name not in stored(first.value) else None


class _Changing(ast.NodeTransformer):
    """Locals under names of their own, and parameters as what they are given."""

    def __init__(self, names: dict[str, str], put: dict[str, ast.expr]) -> None:
        self.names, self.put = names, put

    def assigned(self, statement: ast.stmt, names: set[str]) -> ast.Assign:
        """A statement that puts other values in parameters."""
        assert isinstance(statement, ast.Assign)
        value = self.visit(statement.value)
        self.put = {n: e for n, e in self.put.items() if n not in names}
        return ast.copy_location(ast.Assign([self.visit(t) for t in statement.targets], value), statement)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Whether a local is None is asked of it itself."""
        last = node.comparators[-1]
        name = node.left.id if isinstance(node.left, ast.Name) else ""
        of_none = isinstance(last, ast.Constant) and last.value is None
        if of_none and isinstance(self.put.get(name), ast.Attribute):
            node.left = ast.copy_location(ast.Name(self.names[name], ast.Load()), node.left)
            return node
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.put and isinstance(node.ctx, ast.Load):
            return ast.copy_location(copied(self.put[node.id]), node)
        node.id = self.names.get(node.id, node.id)
        return node
