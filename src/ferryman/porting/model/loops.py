"""Loops that write into one tensor, which the block made before, and do nothing else: each gives another value of its
name, as a write does (`filling`)."""

from __future__ import annotations

import ast
import types
from typing import Any

from ferryman.porting.model import source
from ferryman.porting.model.filling import name_made
from ferryman.porting.model.nodes import Node, Statement

_SCOPES = ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.comprehension
_LEAVES = ast.Return | ast.Break | ast.While | ast.With | ast.Try | ast.Raise | ast.Delete | ast.NamedExpr
_SUSPENDS = ast.Await | ast.Yield | ast.YieldFrom | ast.AsyncFor


def loops(body: list[ast.stmt], tree: ast.AST, function: types.FunctionType) -> dict[int, str]:
    """The loops of a block that do, and the name that each writes into."""
    known: dict[int, str] = {}
    fresh: dict[str, int] = {}
    for i, statement in enumerate(body):
        name = name_made(statement, function)
        if name is not None:
            fresh[name] = i
        elif isinstance(statement, ast.For):
            written = _written(statement)
            after = {n for s in body[i + 1 :] for n in _read(s)} | _read_outside(tree, body)
            if written in fresh and not (_stored(statement) & (after | _stored_before(body[:i]))):
                between = body[fresh[written] + 1 : i]
                if not any(written in _read(s) | _stored(s) for s in between):
                    known[i] = written
        else:
            for name in _stored(statement):
                fresh.pop(name, None)
    return known


def _written(loop: ast.For) -> str | None:
    """The one name that a loop writes into; None where it does something else beside."""
    inside = [n for s in (loop.iter, loop.target, *loop.body) for n in ast.walk(s)]
    ranges = isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range"
    if not ranges or loop.orelse or any(isinstance(n, _SCOPES | _LEAVES | _SUSPENDS) for n in inside):
        return None
    places: list[ast.expr] = []
    values: set[int] = set()
    for node in inside:
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            places.append(node)
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr.endswith("_") and not func.attr.startswith("_"):
            places.append(func)
        elif isinstance(func, ast.Name) and func.id.endswith("_"):
            return None
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            return None
        if isinstance(node, ast.keyword) and node.arg in ("out", "inplace"):
            return None
    names: set[str] = set()
    for place in places:
        inner = place.value if isinstance(place, ast.Subscript | ast.Attribute) else place
        if isinstance(inner, ast.Subscript):  # out[rows].add_(v) writes a copy, or a view
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return None
        names.add(inner.id)
        values.add(id(inner))
    if len(names) != 1:
        return None
    (name,) = names
    reads = [n for n in inside if isinstance(n, ast.Name) and n.id == name]
    calls = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    alone = {id(c.value.func) for c in calls}  # type: ignore[attr-defined]
    own = all(id(n) in values or n.id != name for n in reads)
    methods = all(id(p) in alone for p in places if isinstance(p, ast.Attribute) and isinstance(p.ctx, ast.Load))
    return name if own and methods else None


def read(scan: Any, index: int, loop: ast.stmt, name: str) -> Statement | None:
    """Such a loop, in what a `flow.Scan` reads: another value of its name; None where it calls what may do more."""
    names, scan.occurring = {node: name for name, node in scan.env.items()}, []
    node = _node(scan, loop, name)
    if node is None:
        return None
    scan.occurring, scan.env[name] = [], node
    return Statement(index, [], names, {node: name}, node)


def _node(scan: Any, loop: ast.stmt, name: str) -> Node | None:
    """Such a loop as a value of what it reads, the tensor that it writes into first."""
    stored = _stored(loop)
    parts: list[tuple[ast.expr, Node]] = []
    pending: list[ast.AST] = [loop]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call) and not _computes(scan, node):
            return None
        own = scan.path(node) if isinstance(node, ast.Attribute | ast.Subscript) else source.MISSING
        if own is not source.MISSING:
            assert isinstance(node, ast.expr)
            parts.append((node, scan.own(node, own)))
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id in scan.locals and node.id not in stored:
                parts.append((node, scan.node(node)))
        else:
            pending += [*ast.iter_child_nodes(node)][::-1]
    mine = [p for p in parts if isinstance(p[0], ast.Name) and p[0].id == name]
    if not mine:
        return None
    parts = [*mine, *(p for p in parts if p not in mine)]
    slots = tuple(e for e, _ in parts)
    tree = ast.copy_location(ast.Call(ast.Name("fill", ast.Load()), [*slots], []), loop)
    return Node("op", tree, tuple(n for _, n in parts), slots, "fill", None, None, loop, True)


def _computes(scan: Any, call: ast.Call) -> bool:
    """Whether a call only computes, or writes into the tensor of the loop."""
    if isinstance(call.func, ast.Attribute) and (call.func.attr.endswith("_") or call.func.attr in ("item", "tolist")):
        return True
    return scan.function_of(call.func) is not None


def fixed(items: ast.expr, function: types.FunctionType) -> bool:
    """Whether it is a range of numbers that the file has: in every call the same."""
    if not isinstance(items, ast.Call) or source.resolve(items.func, function) is not range or items.keywords:
        return False
    code = function.__code__
    names = [a for a in items.args if not isinstance(a, ast.Constant)]
    plain = all(isinstance(a, ast.Name) and a.id not in (*code.co_varnames, *code.co_freevars) for a in names)
    return bool(names) and plain and all(type(source.resolve(a, function)) is int for a in names)


def _read(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _stored(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _stored_before(body: list[ast.stmt]) -> set[str]:
    """Names that have a value when a loop begins, and that its first round may read."""
    return {n for s in body for n in _stored(s)}


def _read_outside(tree: ast.AST, body: list[ast.stmt]) -> set[str]:
    inner = {id(n) for s in body for n in ast.walk(s)}
    return {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in inner
    }
