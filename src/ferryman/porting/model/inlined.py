"""Functions of one expression, or of statements that are one, that a forward names and calls, written where they are
called: with ``turn = lambda t: f(t)``, ``turn(q)`` is ``f(q)``.

A name in such a function means at a call what it means in the forward there, so that nothing is asked of it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from ferryman.porting.model.trees import copied

_AT_ONCE = ast.Lambda | ast.comprehension | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def inlined(tree: ast.FunctionDef) -> ast.FunctionDef:
    """A function's tree with calls of such functions written out; one that all calls have goes."""
    arguments = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    named = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    named += Counter(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not tree)
    for body in list(_own_blocks(tree)):
        for statement in list(body):
            name, parameters, value = _meaning(statement)
            if value is None or named[name] != 1 or name in arguments:
                continue
            put = _Put(name, parameters, value)
            for other in tree.body:
                put.visit(other)
            read = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
            read = [n for n in read if isinstance(n.ctx, ast.Load)]
            if put.calls and not read and len(body) > 1:
                body.remove(statement)
    return ast.fix_missing_locations(tree)


def _own_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function, and in no other that stands in it."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        body = getattr(node, name, None)
        if isinstance(body, list):
            if name not in ("handlers", "cases"):
                yield body
            for statement in body:
                if not isinstance(statement, _SCOPES):
                    yield from _own_blocks(statement)


def _meaning(statement: ast.stmt) -> tuple[str, list[str], ast.expr | None]:
    """(name, parameters, expression) of ``name = lambda ..: ..``, or of a def that returns at once."""
    nothing: tuple[str, list[str], ast.expr | None] = "", [], None
    if isinstance(statement, ast.FunctionDef):
        if statement.decorator_list:
            return nothing
        name, given, value = statement.name, statement.args, _folded(statement)
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda) and len(statement.targets) == 1:
        target = statement.targets[0]
        name = target.id if isinstance(target, ast.Name) else ""
        given, value = statement.value.args, statement.value.body
    else:
        return nothing
    plain = not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults)
    inside = list(ast.walk(value)) if value is not None else []
    if not name or not plain or any(isinstance(n, _AT_ONCE) or _is_name(n, name) for n in inside):
        return nothing
    return name, [a.arg for a in given.args], value


def _folded(function: ast.FunctionDef) -> ast.expr | None:
    """What a def returns, with each local written where it is read: once, by the next statement, before that does
    anything else."""
    *before, last = function.body
    if isinstance(before[0] if before else None, ast.Expr) and isinstance(before[0].value, ast.Constant):  # type: ignore[attr-defined]
        before = before[1:]
    named = Counter(n.id for n in ast.walk(function) if isinstance(n, ast.Name))
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    put: dict[str, ast.expr] = {}
    for statement in [*before, last]:
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Return if statement is last else ast.Assign) or value is None:
            return None
        if put and _reads_first(value, next(iter(put))) is not True:
            return None
        value = _Swap(put).visit(copied(value))
        if statement is last:
            folded: ast.expr = value
            return folded
        assert isinstance(statement, ast.Assign)
        target = statement.targets[0] if len(statement.targets) == 1 else None
        if not isinstance(target, ast.Name) or named[target.id] != 2 or target.id in arguments:
            return None
        put = {target.id: value}
    return None


def _reads_first(e: ast.AST, name: str) -> bool | None:
    """Whether an expression reads a name before it does anything else; None where it does nothing but read others."""
    if isinstance(e, ast.Name):
        return True if e.id == name else None
    if isinstance(e, ast.Lambda | ast.IfExp | ast.BoolOp | _COMPREHENSIONS):
        return False
    for part in ast.iter_child_nodes(e):
        first = _reads_first(part, name)
        if first is not None:
            return first
    does = isinstance(e, ast.expr) and not isinstance(
        e, ast.Constant | ast.Tuple | ast.List | ast.Slice | ast.Attribute
    )
    return False if does else None


class _Put(ast.NodeTransformer):
    """Writes one function's expression in place of its calls, outside of what has a scope of its own."""

    def __init__(self, name: str, parameters: list[str], value: ast.expr) -> None:
        self.name, self.parameters, self.value, self.calls = name, parameters, value, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, _SCOPES | _COMPREHENSIONS) else super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Of another function beside it, whose own names are others."""
        own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        own |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)} | {node.name}
        free = {n.id for n in ast.walk(self.value) if isinstance(n, ast.Name)} - {*self.parameters}
        inner = any(isinstance(n, _SCOPES | _COMPREHENSIONS) for s in node.body for n in ast.walk(s))
        if not inner and not own & (free | {self.name}):
            node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _is_name(node.func, self.name) or node.keywords or len(node.args) != len(self.parameters):
            return node
        if not all(map(_only_reads, node.args)) and not self._first(node.args):
            return node
        self.calls += 1
        given = dict(zip(self.parameters, node.args, strict=True))
        return ast.copy_location(_Swap(given).visit(copied(self.value)), node)

    def _first(self, given: list[ast.expr]) -> bool:
        """Whether the function's one argument is read once, before anything else that it reads."""
        if len(given) != 1 or isinstance(given[0], ast.Starred):
            return False
        at = self.value
        while not isinstance(at, ast.Name):
            if isinstance(at, ast.Call):
                at = at.func
            elif isinstance(at, ast.Attribute | ast.Subscript):
                at = at.value
            elif isinstance(at, ast.BinOp | ast.Compare):
                at = at.left
            else:
                return False
        return sum(_is_name(n, self.parameters[0]) for n in ast.walk(self.value)) == 1 and at.id == self.parameters[0]


class _Swap(ast.NodeTransformer):
    def __init__(self, given: dict[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copied(self.given[node.id]) if node.id in self.given else node


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _only_reads(e: ast.expr) -> bool:
    """A local or a constant, or an attribute of one."""
    while isinstance(e, ast.Attribute):
        e = e.value
    return isinstance(e, ast.Name | ast.Constant)
