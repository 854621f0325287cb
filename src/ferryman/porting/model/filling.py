"""Tensors that a block makes empty and then writes into: ``out = torch.empty_like(x)``, ``out[..., :n] = a``.

Nothing else has such a tensor before its last write, so that each write gives a new value of its name, as an
assignment does.
"""

from __future__ import annotations

import ast
import types
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from ferryman.porting.model import source
from ferryman.porting.model.nodes import Node, Statement

_MAKERS = {
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.clone),
    *(torch.empty, torch.zeros, torch.ones, torch.full),
}
# labels of what gives memory of its own
ANEW = {
    *("MatMult", "Mult", "Div", "Add", "Sub"),
    *(f.__name__ for f in (torch.matmul, torch.bmm, torch.einsum, torch.baddbmm)),
    *(f.__name__ for f in (torch.mul, torch.div, torch.add, torch.sub)),
    *(f.__name__ for f in (torch.masked_fill, torch.softmax, torch.nn.functional.linear)),
}
_OPERATORS = ast.MatMult | ast.Mult | ast.Div | ast.Add | ast.Sub
_IN_PLACE = {"mul_": "Mult", "div_": "Div", "add_": "Add", "sub_": "Sub"}  # and what they give
_FILLS = {"scatter_": "scatter", "masked_fill_": "masked_fill"}  # of what is made in the same expression
# of what gives several tensors, each with memory of its own
_ITEMS = {f.__name__ for f in (torch.topk, torch.sort)}
CASTS = {"to", "type_as", "float"}  # what they give is what they are of, or made anew
_METHODS = {"new_empty", "new_zeros", "new_ones", "new_full", "clone"}


def fills(body: list[ast.stmt], tree: ast.AST, function: types.FunctionType) -> dict[int, str]:
    """The statements of a block that write into such a tensor, and its name."""
    written = {i: name for i, s in enumerate(body) if (name := _written(s)) is not None}
    if not written:
        return {}
    named = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    inner = [
        f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda | ast.comprehension) and f is not tree
    ]
    closed = {n.id for f in inner for n in ast.walk(f) if isinstance(n, ast.Name)}
    fresh = {name: i for i, s in enumerate(body) if (name := name_made(s, function)) is not None and named[name] == 1}
    known: dict[int, str] = {}
    for name in dict.fromkeys(written.values()):
        writes = [i for i, n in written.items() if n == name]
        first = fresh.get(name, len(body))
        reads = sum(_loads(s, name) for s in body[: writes[-1] + 1])
        # each write names it once, and nothing else does until the last one
        if name not in closed and first < writes[0] and reads == len(writes):
            known |= dict.fromkeys(writes, name)
    return known


def name_made(statement: ast.stmt, function: types.FunctionType) -> str | None:
    """The name that a statement gives to a tensor that it makes, and may cast."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    call = statement.value if isinstance(statement, ast.Assign) else None
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CASTS:
        call = call.func.value
    if not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
        return None
    if any(k.arg in ("out", "requires_grad") for k in call.keywords):
        return None
    value = source.resolve(call.func, function)
    if value is source.MISSING:
        own = isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS
    else:
        own = isinstance(value, types.BuiltinFunctionType) and value in _MAKERS
    return target.id if own else None


def _written(statement: ast.stmt) -> str | None:
    """The name of what ``t[i] = v``, ``t[i] *= v`` or ``t[i].copy_(v)`` writes into."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        place: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        place = statement.target
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        func = statement.value.func
        place = func.value if isinstance(func, ast.Attribute) and func.attr in _WRITES else statement.value
    else:
        return None
    return place.value.id if isinstance(place, ast.Subscript) and isinstance(place.value, ast.Name) else None


_WRITES = {"copy_", "fill_", "neg_", "mul_", "zero_"}


def parts_of(statement: ast.stmt) -> tuple[ast.Name, list[ast.expr]]:
    """(the name that a write is of, what it reads beside it)."""
    whole = getattr(statement, "value", None)
    if isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute) and isinstance(whole.func.value, ast.Name):
        return whole.func.value, [*whole.args]
    if isinstance(statement, ast.Expr):
        call = statement.value
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        place, rest = call.func.value, [*call.args, *(k.value for k in call.keywords)]
    elif isinstance(statement, ast.AugAssign):
        place, rest = statement.target, [statement.value]
    else:
        assert isinstance(statement, ast.Assign)
        place, rest = statement.targets[0], [statement.value]
    assert isinstance(place, ast.Subscript) and isinstance(place.value, ast.Name)
    return place.value, [place.slice, *rest]


def _loads(statement: ast.stmt, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(statement))


def own_item(scan: Any, node: Node) -> bool:
    """Whether a local has one of several tensors that a choice gave anew, and nothing else has that."""
    of = node.children[0] if node.children and isinstance(node.tree, ast.Subscript) else None
    if of is None or of.label not in _ITEMS or of in scan.env.values():
        return False
    readers = [n for n in scan.known.values() if of in n.children or node in n.children]
    plain = all(isinstance(n.tree, ast.Subscript) and isinstance(n.tree.slice, ast.Constant) for n in (node, *readers))
    once = sum(n is node for n in scan.env.values()) == 1 and not any(node in n.children for n in readers)
    if plain and once:  # an equal call gives others
        scan.known = {key: n for key, n in scan.known.items() if n is not of}
    return plain and once


_FILL = "masked_fill"  # by which a method, and what it comes to in place, are called


def over_result(scan: Any, statement: ast.stmt) -> ast.Name | None:
    """The local of ``h += x``, or of ``h.masked_fill_(m, v)``, that has what an operation gave it anew, and nothing
    else does."""
    target: ast.expr | None = statement.target if isinstance(statement, ast.AugAssign) else None
    call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == f"{_FILL}_":
        plain = len(call.args) == 2 and not call.keywords and not any(isinstance(a, ast.Starred) for a in call.args)
        target = call.func.value if plain else None
        names = [ast.unparse(t) for t in statement.targets] if isinstance(statement, ast.Assign) else []
        if names and (not isinstance(target, ast.Name) or names != [target.id]):
            return None
    node = scan.env.get(target.id) if isinstance(target, ast.Name) else None
    if node is None or node.kind != "op":
        return None
    assert isinstance(target, ast.Name)
    over = node.write is None or isinstance(node.write, ast.AugAssign) or node.label == _FILL
    if node.label not in ANEW or not over:
        return target if own_item(scan, node) else None
    if node.label == "einsum" and len(node.children) < 3:  # of one tensor it may be a view of that
        return None
    named = sum(other is node for other in scan.env.values())
    readers = (other for other in scan.known.values() if node in other.children and not other.fact())
    return target if named == 1 and next(readers, None) is None else None


def overwritten(scan: Any, index: int, statement: ast.stmt) -> Statement:
    """Such a statement: another value of its local."""
    scan.occurring = []
    names = {node: name for name, node in scan.env.items()}
    target: ast.expr
    if isinstance(statement, ast.AugAssign):
        target, given = statement.target, [statement.value]
        value: ast.expr = ast.BinOp(ast.Name(ast.unparse(target), ast.Load()), statement.op, statement.value)
        label = type(statement.op).__name__
    else:
        call = statement.value  # type: ignore[attr-defined]
        target, given, label = call.func.value, call.args, _FILL
        value = ast.Call(ast.Attribute(target, _FILL, ast.Load()), given, [])
    assert isinstance(target, ast.Name)
    before, parts = scan.env[target.id], [scan.node(e) for e in given]
    scan.known = {key: node for key, node in scan.known.items() if node is not before}
    tree = ast.copy_location(value, statement)
    node = Node("op", tree, (before, *parts), (target, *given), label, None, None, statement, True)
    names |= {n: name for name, n in scan.env.items()}
    scan.env[target.id] = node
    return Statement(index, scan.occurring, names, {node: target.id}, node)


def on_fresh(scan: Any, e: ast.AST) -> bool:
    """Whether a call writes over what an operation has just given it anew, such as ``(a * b).mul_(c)``: nothing else
    has that. A method of the module's whose every result is an operation's gives memory of its own, too."""
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr in _FILLS:
        return not e.keywords and not any(isinstance(a, ast.Starred) for a in e.args) and _is_made(scan, e.func.value)
    func = e.func if isinstance(e, ast.Call) and len(e.args) == 1 and not e.keywords else None
    if not isinstance(func, ast.Attribute) or func.attr not in _IN_PLACE:
        return False
    target = func.value
    if not isinstance(target, ast.Call) or not isinstance(target.func, ast.Attribute):
        return isinstance(target, ast.BinOp) and isinstance(target.op, _OPERATORS)
    mine = isinstance(target.func.value, ast.Name) and target.func.value.id == scan.self_name
    method = scan.methods.get(target.func.attr) if mine and target.func.attr not in scan.locals else None
    inner = None if method is None else source.innermost(method)
    tree = source.parsed(inner) if isinstance(inner, types.FunctionType) and inner is method else None
    nodes = [*ast.walk(tree)] if tree is not None and target.func.attr not in vars(scan.module or object()) else []
    results = [n.value for n in nodes if isinstance(n, ast.Return)]
    plain = not any(isinstance(n, ast.FunctionDef | ast.Lambda | ast.Yield) for n in nodes[1:])
    return bool(results) and plain and all(isinstance(r, ast.BinOp) and isinstance(r.op, _OPERATORS) for r in results)


def _is_made(scan: Any, e: ast.expr) -> bool:
    """Whether it is a call of a function that makes a tensor, and nothing else has that."""
    value = source.resolve(e.func, scan.function) if isinstance(e, ast.Call) else source.MISSING
    own = isinstance(value, types.BuiltinFunctionType) and value in _MAKERS
    return own and not any(k.arg in (None, "out", "requires_grad") for k in e.keywords)  # type: ignore[attr-defined]


def written(scan: Any, e: ast.Call) -> Node:
    """Such a call: another value, of one that no equal expression shares."""
    assert isinstance(e.func, ast.Attribute)
    inner, others = scan.node(e.func.value), [(a, scan.node(a)) for a in e.args]
    label = {**_IN_PLACE, **_FILLS}[e.func.attr]
    node: Node = scan._op(e, [(e.func.value, replace(inner)), *others], label, alone=True)
    return node
