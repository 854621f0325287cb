"""Two values as one part: what a choice among elements gives, which ones and what follows of their numbers.

Code keeps them in locals. Where both are known, a statement ``w, i = (w, i)`` is put, and the pair in it is what a part
may give; where there is none, the statement goes again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ferryman.porting.model.nodes import Node
from ferryman.porting.model.statements import read, stored
from ferryman.porting.model.ties import CHOOSES
from ferryman.porting.model.trees import swap

WEIGHTS = "ferryman_weights"  # a local that a return has none for
_CASTS = {"to", "type", "type_as"}
_MOST = 6  # statements after a choice that may be the last of what follows from it


def chooses(tree: ast.AST) -> bool:
    """Whether code calls what chooses elements."""
    return any(isinstance(n, ast.Call) and _label(n) in CHOOSES for n in ast.walk(tree))


def _label(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def places(body: list[ast.stmt]) -> Iterator[tuple[int, list[ast.stmt]]]:
    """(index, what to put in the place of that statement) for each pair of a choice and what may follow from it, the
    last ones first. A cast at the end of that comes after the pair."""
    for at in reversed(range(len(body))):
        target = body[at].targets[0] if isinstance(body[at], ast.Assign) else None  # type: ignore[attr-defined]
        if target is None or not chooses(body[at]):
            continue
        named = target.elts if isinstance(target, ast.Tuple) else [target]
        if not named or not isinstance(named[-1], ast.Name):
            continue
        ids, after = named[-1].id, range(at, min(at + _MOST, len(body)))
        end = next((i for i in after if i > at and ids in stored(body[i])), after.stop)
        for i in reversed(range(at, end)):
            for before, weights, rest in _split(body[i], ids):
                pair = [ast.Tuple([ast.Name(n, c()) for n in (weights, ids)], c()) for c in (ast.Store, ast.Load)]
                whole = [*before, ast.Assign([pair[0]], pair[1]), *rest]
                yield i, [ast.fix_missing_locations(ast.copy_location(s, body[i])) for s in whole]


def _split(statement: ast.stmt, ids: str) -> Iterator[tuple[list[ast.stmt], str, list[ast.stmt]]]:
    """(what stands before a pair, the local that has what follows from the choice, what stands after)."""
    name = _stores(statement, ids)
    if name is not None:
        yield [statement], name, []
        owner = _cast(statement.value) if isinstance(statement, ast.Assign) else None
        if owner is not None and read(statement.value).count(name) == read(owner).count(name):  # type: ignore[attr-defined]
            after = swap(statement, {id(owner): ast.Name(name, ast.Load())})
            yield [swap(statement, {id(statement.value): owner})], name, [after]  # type: ignore[attr-defined]
    value = statement.value if isinstance(statement, ast.Return) else None
    for i, e in enumerate(value.elts if isinstance(value, ast.Tuple) else []):
        owner = _cast(e)
        if owner is not None and all(isinstance(n, ast.Name) for n in value.elts[:i]):  # type: ignore[union-attr]
            after = swap(statement, {id(owner): ast.Name(WEIGHTS, ast.Load())})
            yield [ast.Assign([ast.Name(WEIGHTS, ast.Store())], owner)], WEIGHTS, [after]


def _cast(e: ast.expr) -> ast.expr | None:
    """What is cast, where an expression is a cast of something that is computed."""
    method = e.func if isinstance(e, ast.Call) else None
    cast = isinstance(method, ast.Attribute) and method.attr in _CASTS
    return method.value if cast and not isinstance(method.value, ast.Name) else None  # type: ignore[union-attr]


def _stores(statement: ast.stmt, ids: str) -> str | None:
    """The one local, beside the choice, that a statement puts a value in."""
    if not isinstance(statement, ast.Assign | ast.AugAssign):
        return None
    names = [n for n in stored(statement) if n != ids]
    return names[0] if len(names) == 1 else None


def is_choice(root: Node) -> bool:
    """Whether it is two values or more of which two follow from one choice."""
    if not isinstance(root.tree, ast.Tuple):
        return False
    chosen = [{n for n in child.inside(frozenset()) if n.label in CHOOSES} for child in root.children]
    return any(a & b for i, a in enumerate(chosen) for b in chosen[:i])
