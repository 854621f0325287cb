"""What goes over values that are written down, written out: ``q, k = (f(t) for t in (q, k))`` is ``q = f(q)`` and
``k = f(k)``."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ferryman.porting.model import source
from ferryman.porting.model.inlined import inlined
from ferryman.porting.model.renamed import renamed
from ferryman.porting.model.trees import copied

_MOST = 8
_AT_ONCE = ast.Lambda | ast.comprehension | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom


def unrolled(tree: ast.FunctionDef, function: types.FunctionType) -> ast.FunctionDef:
    """A function's tree with such comprehensions, and calls of `map`, written out, and a statement for each local."""
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.ListComp | ast.GeneratorExp | ast.Call)]
    if any(not isinstance(n, ast.Call) or _is(n.func, "map") for n in inside):
        tree = ast.fix_missing_locations(_Unroll(function).visit(tree))
    tree = inlined(tree)
    shared = {*function.__code__.co_cellvars}
    _apart(tree, shared)
    renamed(tree, shared)
    return tree


# Sequences: each a child's name, or "" of the module itself, and how many modules it has


def is_sequence(child: Any, count: int) -> bool:
    """Whether a call of a module calls so many others in turn, and nothing else."""
    kind = getattr(type(child), "ferryman_original", type(child))
    return (kind is nn.Sequential and len(child._modules) == count) and source.untouched(child)


def whole(count: int) -> ast.FunctionDef:
    """The forward of a sequence of so many modules."""
    call = "input"
    for i in range(count):
        call = f"self[{i}]({call})"
    tree = ast.parse(f"def forward(self, input):\n    return {call}\n").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def of_sequences(
    tree: ast.FunctionDef, self_name: str | None, function: Any, sequences: Mapping[str, int]
) -> tuple[ast.FunctionDef, list[str]]:
    """(a tree with calls of sequences as calls of what they have, those that it calls)."""
    if "" in sequences and function is nn.Sequential.forward:
        return whole(sequences[""]), [""]
    called: list[str] = []

    class Sequences(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            prefix, _, name = ast.unparse(node.func).partition(".")
            plain = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
            if prefix != self_name or name not in sequences or not plain:
                return node
            called.append(name)
            result = node.args[0]
            for i in range(sequences[name]):
                one = ast.Subscript(copied(node.func), ast.Constant(i), ast.Load())
                result = ast.copy_location(ast.Call(one, [result], []), node)
            return ast.fix_missing_locations(result)

    return (Sequences().visit(copied(tree)) if sequences else tree), called


def test_of(called: list[str], sequences: Mapping[str, int]) -> Callable[[Any], bool]:
    """A test of a module that its sequences are what they were."""
    counts = {name: sequences[name] for name in called}

    def still(module: Any) -> bool:
        for name, count in counts.items():
            if not (is_sequence(module._modules.get(name), count) if name else len(module._modules) == count):
                return False
        return True

    return still


def _apart(node: ast.AST, shared: set[str]) -> None:
    """``a, b = c, d`` as two statements, where d does not read a, in the blocks of a function. shared: locals that
    functions in it see."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        body = getattr(node, name, None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _apart(statement, shared)
        if name in ("body", "orelse", "finalbody"):
            body[:] = [part for statement in body for part in _singles(statement, shared)]


def _singles(statement: ast.stmt, shared: set[str]) -> list[ast.stmt]:
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return [statement]
    targets, values = _with_one(target.elts, value.elts)
    if len(targets) != len(values) or any(isinstance(v, ast.Starred) for v in values):
        return [statement]
    parts = [t.elts if isinstance(t, ast.Tuple) else [t] for t in targets]
    names = [[p.id for p in some if isinstance(p, ast.Name)] for some in parts]
    flat = [n for some in names for n in some]
    if len({*flat} - shared) != sum(map(len, parts)):
        return [statement]
    if any(isinstance(t, ast.Tuple) for t in targets) and not all(map(_of_shape, values)):
        return [statement]
    for i, v in enumerate(values):
        if {n.id for n in ast.walk(v) if isinstance(n, ast.Name)} & {n for some in names[:i] for n in some}:
            return [statement]
    return [ast.copy_location(ast.Assign([t], v), statement) for t, v in zip(targets, values, strict=True)]


def _with_one(targets: list[ast.expr], values: list[ast.expr]) -> tuple[list[ast.expr], list[ast.expr]]:
    """``a, b, c = *x.shape, n``, of one such shape, as ``(a, b), c = x.shape, n``."""
    stars = [i for i, v in enumerate(values) if isinstance(v, ast.Starred)]
    if len(stars) != 1 or len(targets) <= len(values) or any(isinstance(t, ast.Starred) for t in targets):
        return targets, values
    (at,) = stars
    star, count = values[at], len(targets) - len(values) + 1
    assert isinstance(star, ast.Starred)
    several = ast.Tuple(targets[at : at + count], ast.Store())
    return [*targets[:at], several, *targets[at + count :]], [*values[:at], star.value, *values[at + 1 :]]


def _of_shape(e: ast.expr) -> bool:
    """``x.shape``, ``x.shape[-1]`` or a name: to read it, or to take it apart, does nothing else."""
    inner = e.value if isinstance(e, ast.Subscript) and isinstance(e.slice, ast.Constant | ast.UnaryOp) else e
    if isinstance(inner, ast.Attribute):
        return inner.attr == "shape" and isinstance(inner.value, ast.Name)
    return isinstance(e, ast.Name)


class _Unroll(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType) -> None:
        self.own, self.entered = function, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.entered:  # its locals are its own
            return node
        self.entered = True
        self.generic_visit(node)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    visit_ClassDef = visit_AsyncFunctionDef = visit_Lambda  # type: ignore[assignment]  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Unpacked into as many names as there are values."""
        self.generic_visit(node)
        target = node.targets[0] if len(node.targets) == 1 else None
        if isinstance(target, ast.Tuple) and not any(isinstance(t, ast.Starred) for t in target.elts):
            items = node.value.elts if isinstance(node.value, ast.List) else self._items(node.value)
            if items is not None and len(items) == len(target.elts):
                node.value = ast.copy_location(ast.Tuple(items, ast.Load()), node.value)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        items = self._items(node)
        return node if items is None else ast.copy_location(ast.List(items, ast.Load()), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``list(..)`` and ``tuple(..)`` of what is written out."""
        self.generic_visit(node)
        sequence = source.resolve(node.func, self.own) if isinstance(node.func, ast.Name) else None
        if sequence not in (list, tuple) or len(node.args) != 1 or node.keywords:
            return node
        items = self._items(node.args[0])
        kind = ast.List if sequence is list else ast.Tuple
        return node if items is None else ast.copy_location(kind(items, ast.Load()), node)

    def _items(self, e: ast.expr) -> list[ast.expr] | None:
        """Each value of a comprehension, or of `map`, over a tuple or list that is written down."""
        if isinstance(e, ast.GeneratorExp | ast.ListComp):
            loop = e.generators[0]
            whole = len(e.generators) == 1 and not loop.ifs and not loop.is_async
            if not whole or not isinstance(loop.target, ast.Name):
                return None
            name, body, values = loop.target.id, e.elt, loop.iter
        elif isinstance(e, ast.Call) and len(e.args) == 2 and not e.keywords and _is(e.func, "map"):
            if source.resolve(e.func, self.own) is not map:
                return None
            called, values = e.args
            if isinstance(called, ast.Lambda):
                given = called.args
                plain = len(given.args) == 1 and not (given.posonlyargs or given.kwonlyargs or given.vararg)
                if not plain or given.kwarg or given.defaults:
                    return None
                name, body = given.args[0].arg, called.body
            elif _read(called):
                name, body = "ferryman_item", ast.Call(called, [ast.Name("ferryman_item", ast.Load())], [])
            else:
                return None
        else:
            return None
        if not isinstance(values, ast.Tuple | ast.List) or len(values.elts) > _MOST or not all(map(_read, values.elts)):
            return None
        if any(isinstance(n, _AT_ONCE) for n in ast.walk(body)):
            return None
        return [ast.copy_location(_Put(name, value).visit(copied(body)), e) for value in values.elts]


class _Put(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copied(self.value) if node.id == self.name else node


def _is(e: ast.expr, name: str) -> bool:
    return isinstance(e, ast.Name) and e.id == name


def _read(e: ast.expr) -> bool:
    """It only reads: a name, or an attribute or a fixed item of one."""
    while isinstance(e, ast.Attribute) or (isinstance(e, ast.Subscript) and isinstance(e.slice, ast.Constant)):
        e = e.value
    return isinstance(e, ast.Name | ast.Constant)
