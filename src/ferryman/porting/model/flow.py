"""What flows where in a block of statements: each expression as a node over others, through the locals between.

Of a call that may do more than compute (a child's, say) nothing is known: its result is a leaf, as an argument is.
Statements that write in place, or that branch, end what is known of locals.
"""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import child_calls, effects, filling, loops, recurrent, source, spelling
from ferryman.porting.model.child_calls import given_by, is_own, is_super, text_of
from ferryman.porting.model.nodes import Node, Statement
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.statements import default_of, stored
from ferryman.porting.model.trace import bound, trusted
from ferryman.porting.model.trees import children, swap

PLAIN = bool | int | float | str | None | torch.dtype
FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | torch.jit.ScriptFunction
_OPERATORS = ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.Attribute | ast.Tuple | ast.List | ast.Slice
_PARTS = ast.expr | ast.keyword
_CHANGES = {"append", "extend", "insert", "pop", "update", "setdefault", "clear", "item", "tolist"}
_OF_PYTHON = {"len", "int", "float", "tuple", "list", "slice", "min", "max", "abs", "range", "sum"}
SELF = "self"


@dataclass
class Scan:
    """Reads the blocks of one function. ``module``: an instance of the class whose method it is, or None."""

    function: types.FunctionType
    tree: ast.FunctionDef
    self_name: str | None
    module: nn.Module | None
    kind: Any = None
    free: frozenset[str] = frozenset()  # paths of children whose call has no effect beside its result
    env: dict[str, Node] = field(default_factory=dict)
    known: dict[Any, Node] = field(default_factory=dict)
    occurring: list[tuple[Node, ast.expr]] = field(default_factory=list)
    judged: dict[Any, Any] = field(default_factory=dict)  # what functions may do (`effects`)
    strict: bool = False  # no child is known to be without effects
    relied: set[str] = field(default_factory=set)  # paths of children whose effects were asked for
    asked: dict[Any, Any] = field(default_factory=dict)  # effects of parts of the block as it is (`ordering`)
    entered: set[int] = field(default_factory=set)
    aliases: set[str] | None = None  # locals that may be modules (`holders`)
    later: set[str] | None = None
    settled: bool = False  # who calls it asks each time whether the module's settings are what they are now
    changes: int = 0  # how many calls before may have written over a tensor
    joins: bool = False  # a part may go on with what a matrix of a child gives, and have a number for an argument
    facts: dict[str, Any] = field(default_factory=dict)  # what paths gave, without tensors' elements

    def __post_init__(self) -> None:
        arguments = [a.arg for a in ast.walk(self.tree) if isinstance(a, ast.arg)]
        stores = [n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        nested = [n.name for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and n is not self.tree]
        self.locals = {*arguments, *stores, *nested} - {self.self_name}
        self.methods = source.methods(self.kind) if self.kind is not None else {}
        self.members = source.members(self.kind) if self.kind is not None else {}

    def block(self, body: list[ast.stmt]) -> Iterator[Statement]:
        """The statements of one block that compute; `blocks` gives those inside of others."""
        self.env, self.known = {}, {}
        where = body, self.tree, self.function
        fills, looped, turns = filling.fills(*where), loops.loops(*where), recurrent.carrying(*where)
        for index, statement in enumerate(body):
            here = recurrent.flowing(self, index, statement, turns[index]) if index in turns else None
            if index in fills:
                here = self._fill(index, statement, fills[index])
            if here or (index in looped and (here := loops.read(self, index, statement, looped[index]))):
                yield here
                continue
            if filling.over_result(self, statement) is not None:
                yield filling.overwritten(self, index, statement)
                continue
            value = getattr(statement, "value", None)
            simple = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) and value is not None
            inside = [n for n in ast.walk(statement) if isinstance(n, ast.AST)]
            if not simple or any(self._over(n) or isinstance(n, ast.NamedExpr | ast.Await) for n in inside):
                if not isinstance(statement, ast.FunctionDef | ast.Pass | ast.Assert):
                    self.env, self.known = self._numbers(statement), {}
                continue
            assert isinstance(value, ast.expr)
            self.occurring = []
            names = {node: name for name, node in self.env.items()}
            node = self.node(value)
            names |= {n: name for name, n in self.env.items()}  # those that it names first
            here = Statement(index, self.occurring, names, value=node)
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                self._bind(target, node, here)
            written = {*fills.values(), *looped.values()}
            if written and isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in written:
                self.env[ast.unparse(statement.targets[0])] = here.alone(node)
            yield here

    def _numbers(self, statement: ast.stmt) -> dict[str, Node]:
        """Locals that still have numbers of sizes after a choice, of which nothing else is known."""
        if not isinstance(statement, ast.If):
            return {}
        kept = self.env.keys() - {*stored(statement)}
        numbers = (name for name, n in self.env.items() if name in kept and n.one_number())
        return {name: Node("leaf", ast.Name(name, ast.Load()), number=True) for name in numbers}

    def _over(self, n: ast.AST) -> bool:
        return spelling.in_place(n) and not filling.on_fresh(self, n)

    def _fill(self, index: int, statement: ast.stmt, name: str) -> Statement:
        """A write into what nothing else has: another value of its name."""
        self.occurring = []
        names = {node: name for name, node in self.env.items()}
        target, rest = filling.parts_of(statement)
        before = self._named(target)
        parts = [(target, before), *((e, self.node(e)) for e in rest)]
        tree = ast.copy_location(ast.Call(ast.Name("fill", ast.Load()), [e for e, _ in parts], []), statement)
        node = Node(
            "op", tree, tuple(n for _, n in parts), tuple(e for e, _ in parts), "fill", None, None, statement, True
        )
        names |= {n: name for name, n in self.env.items()}
        self.env[name] = node
        return Statement(index, self.occurring, names, {node: name}, node)

    def _bind(self, target: Any, node: Node, statement: Statement) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = node
            statement.binds[node] = target.id
        elif isinstance(target, ast.Tuple) and all(isinstance(t, ast.Name) for t in target.elts):
            for i, name in enumerate(target.elts):
                assert isinstance(name, ast.Name)
                item = ast.Subscript(node.tree, ast.Constant(i), ast.Load())
                written = isinstance(node.tree, ast.Tuple) and len(node.children) == len(target.elts)
                one = node.children[i] if written else self._op(item, [(node.tree, node)], "")
                self._bind(name, one, statement)
        elif target is not None:
            for inner in ast.walk(target):
                if isinstance(inner, ast.Name):
                    self.env.pop(inner.id, None)

    # Expressions

    def own(self, e: ast.expr, value: Any) -> Node:
        return self._once(("self", ast.unparse(e)), lambda: Node("self", e, value=value))

    def node(self, e: ast.expr) -> Node:
        if isinstance(e, ast.Constant):
            return Node("constant", e)
        if isinstance(e, ast.Name):
            return self._named(e)
        own = self.path(e)
        if own is not MISSING:
            return self.own(e, own)
        if isinstance(e, ast.Call):
            node = self._call(e)
        elif isinstance(e, _OPERATORS) and not (isinstance(e, ast.Attribute) and self._outer(e)):
            label = type(e.op).__name__ if isinstance(e, ast.BinOp) else ""
            parts = [(c, self.node(c)) for c in children(e)]
            fixed = isinstance(e, ast.BinOp | ast.UnaryOp) and all(n.kind == "constant" for _, n in parts)
            node = Node("constant", e) if fixed else self._op(e, parts, label)
        elif isinstance(e, ast.Attribute) and self._outer(e):
            node = Node("constant", e)
        else:
            if isinstance(e, ast.IfExp | ast.BoolOp):
                _ = [self.node(c) for c in children(e)]  # what is computed on the way
            node = Node("leaf", e)
        if node.kind == "op":
            self.occurring.insert(0, (node, e))
        elif node.kind == "leaf":
            self.occurring.append((node, e))
        return node

    def _outer(self, e: ast.expr) -> bool:
        """A name of a module, such as torch.float32."""
        root: ast.expr = e
        while isinstance(root, ast.Attribute):
            root = root.value
        return (
            isinstance(root, ast.Name)
            and root.id not in self.locals
            and source.resolve(e, self.function) is not MISSING
        )

    def _named(self, e: ast.Name) -> Node:
        if e.id == self.self_name:
            return Node("leaf", e)
        if e.id in self.env:
            if self.env[e.id].write is not None:
                self.occurring.append((self.env[e.id], e))
            return self.env[e.id]
        if e.id in self.locals or e.id in self.function.__code__.co_freevars:
            default = default_of(self.function, self.tree, e.id, self.joins)
            self.env[e.id] = Node("leaf", e, value=default)
            return self.env[e.id]
        return Node("constant", e)

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self.known:
            node = make()
            at = key if node.kind != "op" or node.fact() else (self.changes, key)
            self.known.setdefault(at, node)
            return self.known[at]
        return self.known[key]

    def _op(self, e: ast.expr, parts: Sequence[tuple[ast.AST, Node]], label: str, alone: bool = False) -> Node:
        children, slots = tuple(n for _, n in parts), tuple(s for s, _ in parts)
        if alone:
            return Node("op", e, children, slots, label)
        swapped = ast.unparse(swap(e, dict.fromkeys(map(id, slots), ast.Name("_", ast.Load()))))
        tags = tuple(ast.unparse(n.tree) if n.kind in ("constant", "self") else id(n) for n in children)
        return self._once((swapped, tags), lambda: Node("op", e, children, slots, label))

    def _call(self, e: ast.Call) -> Node:
        if filling.on_fresh(self, e):
            return filling.written(self, e)
        given = [*e.args, *(k.value for k in e.keywords)]
        inner = [a.value if isinstance(a, ast.Starred) else a for a in given]
        owned = self.function_of(e.func)
        parts = [*(owned[1] if owned is not None else []), *((a, self.node(a)) for a in inner)]
        if owned is None and len(parts) == 1 and not e.keywords and self._is_child(e.func):
            self.changes += bool(getattr(self._at(e.func), "inplace", False))
            return self._function_of_child(e, parts[0])
        before, self.strict = self.strict, True
        may, self.strict = effects.of_call(self, e), before
        self.changes += bool(may & effects.CHANGES)  # equal expressions may have other values then
        # what draws, or writes, gives another value each time
        return Node("leaf", e) if owned is None else self._op(e, parts, owned[0], may != effects.NONE)

    def function_of(self, func: ast.expr) -> tuple[str, list[tuple[ast.AST, Node]]] | None:
        """(the label of a function that only computes, what it is of beside its arguments); None for any other."""
        own = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == self.self_name
        if isinstance(func, ast.Name | ast.Attribute) and self._callable(func):
            value = source.resolve(func, self.function)
            name = func.attr if isinstance(func, ast.Attribute) else func.id
            scripted = isinstance(value, torch.jit.ScriptFunction)
            return (name if value is MISSING or (trusted(value) and not scripted) else "call"), []
        if self.path(func) is not MISSING:
            return "call", [(func, self.own(func, self.path(func)))]
        if isinstance(func, ast.Attribute) and own:
            return ("call", []) if func.attr in self.members and not self._calls_children(func.attr) else None
        if isinstance(func, ast.Attribute) and is_super(func.value):
            return "call", []
        if isinstance(func, ast.Attribute) and func.attr not in _CHANGES and not func.attr.startswith("_"):
            owner = self.node(func.value)
            if owner.kind != "constant" or isinstance(func.value, ast.Constant):
                return func.attr, [(func.value, owner)]
        elif isinstance(func, ast.Attribute):
            self.node(func.value)
        return None

    def _is_child(self, func: ast.expr) -> bool:
        """Whether it is a child of PyTorch's own that is a call of a function, and nothing else."""
        child = self._at(func) if self.module is not None and self._of_self(func) else None
        if not isinstance(child, nn.Module):
            return False
        tests = child_calls.TESTS if self.joins else ("ferryman_child",)
        known = {f"{test}({ast.unparse(func)})": child_calls.TESTS[test](child) for test in tests}
        self.facts |= known
        return any(known.values())

    def _function_of_child(self, e: ast.Call, given: tuple[ast.AST, Node]) -> Node:
        """Such a child, as the function that it calls of what it has."""
        child = ast.unparse(e.func)
        function, arguments, test = child_calls.function_of(self._at(e.func))
        texts = [function, *(text_of(child, n) for n in arguments if is_own(n)), f"{test}({child})"]
        trees = [ast.parse(text, mode="eval").body for text in texts]
        mine = {"torch": torch, str(self.self_name): self.module}
        known = source.names_read(self.function, texts) | child_calls.TESTS | mine
        values = [False if text.endswith(".p > 0") else eval(text, known) for text in texts]  # noqa: S307 - our own texts
        for tree in trees[1:-1]:
            self.path(tree)  # another module of the class may have others
        makes = [functools.partial(Node, "self", tree, value=v) for tree, v in zip(trees, values, strict=True)]
        own = [self._once(("self", text), make) for text, make in zip(texts, makes, strict=True)]
        rest = iter(trees[1:-1])
        passed = [next(rest) if is_own(n) else ast.parse(n, mode="eval").body for n in arguments]
        call = ast.copy_location(ast.Call(trees[0], [e.args[0], *passed], []), e)
        return Node("op", call, (given[1], *own), (e.args[0], *trees), function.rpartition(".")[2], whole=e)

    def within(self, function: types.FunctionType, tree: ast.FunctionDef, own: str | None, module: Any) -> Scan:
        """What reads another function that this one comes to."""
        kind = type(module) if isinstance(module, nn.Module) else None
        other = Scan(function, tree, own, module, kind, self.free if module is self.module else frozenset())
        other.judged, other.strict = self.judged, self.strict
        return other

    def _calls_children(self, name: str) -> bool:
        """Whether a method comes to a child of the module."""
        children = self.module._modules if self.module is not None else {}
        return not child_calls.reached_from(name, self.members).isdisjoint(children)

    def _callable(self, func: ast.expr) -> bool:
        root: ast.expr = func
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self.locals:
            return False
        value = source.resolve(func, self.function)
        if value is MISSING and isinstance(func, ast.Attribute):  # a method, as a function of its class
            owner = source.resolve(func.value, self.function)
            return owner is Tensor and hasattr(Tensor, func.attr) and not func.attr.endswith("_")
        if isinstance(value, FUNCTIONS):
            name = getattr(value, "__name__", "")
            if getattr(value, "__module__", None) == "builtins":
                return name in _OF_PYTHON
            return not name.endswith("_") and value is not builtins.getattr
        return isinstance(value, type) and value in (int, float, tuple, list, slice, range, torch.finfo)

    # What a module gives

    def path(self, e: ast.expr) -> Any:
        """The plain value, tensor or function that an expression of the module alone has now; MISSING for others."""
        if self._trains(e):
            return False
        if self.module is None or not self._of_self(e) or isinstance(e, ast.Constant | ast.Name):
            return MISSING
        value = self._given(e)
        tensor = isinstance(value, Tensor)
        self.facts[ast.unparse(e)] = ("tensor", tuple(value.shape), value.is_floating_point()) if tensor else value
        return value

    def _trains(self, e: ast.expr) -> bool:
        """Whether it is the module's mode, of which parts are proven for evaluation alone."""
        own = isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id == self.self_name
        return self.module is not None and own and e.attr == "training"  # type: ignore[attr-defined]

    def _given(self, e: ast.expr) -> Any:
        direct = isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name)
        if direct and (getattr(e, "attr", "") == "training" or getattr(e, "attr", "") in self.members):
            return MISSING  # a mode, a method, a property
        value = self._at(e)
        if isinstance(value, Tensor):
            return value if type(value) in (Tensor, nn.Parameter) and value.is_leaf else MISSING
        parts = value if isinstance(value, tuple) else (value,)
        known = isinstance(value, FUNCTIONS) or bound(value) or all(isinstance(p, PLAIN) for p in parts)
        return value if known else MISSING

    def _at(self, e: ast.expr) -> Any:
        """What a path leads to; MISSING where another's code would run on the way."""
        if isinstance(e, ast.Name):
            return self.module if e.id == self.self_name else source.resolve(e, self.function)
        if isinstance(e, ast.Call):
            module, name = source.resolve(e.args[0], self.function), self._at(e.args[1])
            return getattr(module, name, MISSING) if isinstance(name, str) else MISSING
        if isinstance(e, ast.Attribute):
            owner = self._at(e.value)
            return MISSING if owner is MISSING else given_by(owner, e.attr)
        if not isinstance(e, ast.Subscript):
            return MISSING
        owner = self._at(e.value)
        key = e.slice.value if isinstance(e.slice, ast.Constant) else self._at(e.slice)
        own = nn.ParameterList | nn.ParameterDict | nn.ModuleList | nn.ModuleDict
        turns = isinstance(owner, nn.Sequential) and type(owner).__getitem__ is nn.Sequential.__getitem__
        known = isinstance(owner, own) and trusted(type(owner))
        if type(owner) not in (dict, list, tuple) and not known and not turns:
            return MISSING
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError):
            return MISSING

    def _of_self(self, e: ast.expr, top: bool = True) -> bool:
        """self.a.b, self.a["k"][0], getattr(F, self.kind), TABLE[self.kind]."""
        if isinstance(e, ast.Name):
            return e.id == self.self_name and not top
        if isinstance(e, ast.Attribute):
            return self._of_self(e.value, False)
        if isinstance(e, ast.Subscript):
            fixed = isinstance(e.slice, ast.Constant) and isinstance(e.slice.value, int | str)
            if fixed:
                return self._of_self(e.value, False) and not isinstance(self._at(e.value), Tensor)
            table = self._at(e.value) if self._of_self(e.value, False) else source.resolve(e.value, self.function)
            return type(table) is dict and self._of_self(e.slice, False)
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and len(e.args) == 2 and not e.keywords:
            asks = e.func.id not in self.locals and source.resolve(e.func, self.function) is getattr
            module = source.resolve(e.args[0], self.function)
            return asks and isinstance(module, types.ModuleType) and self._of_self(e.args[1], False)
        return False
