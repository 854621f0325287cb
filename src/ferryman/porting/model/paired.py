"""What is computed of one of a choice's two results, written together with the other: after ``w, ids = x.topk(k)``,
``w = w / w.sum()`` is ``w, ids = w / w.sum(), ids``, which is one value of what was chosen from."""

from __future__ import annotations

import ast

from ferryman.porting.model.trees import blocks, copied

CHOICES = {"topk"}


def paired(tree: ast.FunctionDef) -> ast.FunctionDef | None:
    """A copy of a function's tree with such statements; None where it makes no choice."""
    if not any(_is_choice(node) for node in ast.walk(tree)):
        return None
    whole = copied(tree)
    for body in blocks(whole):
        for i, statement in enumerate(body):
            names = _two(statement)
            if names is not None:
                _pair(body, i + 1, *names)
    return ast.fix_missing_locations(whole)


def _is_choice(node: ast.AST) -> bool:
    func = node.func if isinstance(node, ast.Call) else None
    return (getattr(func, "attr", None) or getattr(func, "id", None)) in CHOICES


def _two(statement: ast.stmt) -> tuple[str, str] | None:
    """The two names that a statement gives to a choice's results."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _is_choice(statement.value):
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return None
    first, second = target.elts
    if not isinstance(first, ast.Name) or not isinstance(second, ast.Name) or first.id == second.id:
        return None
    return first.id, second.id


def _pair(body: list[ast.stmt], start: int, values: str, ids: str) -> None:
    """Statements that follow from either of two names, while the second is what it was."""
    follows, fresh = {values, ids}, {values}
    for i in range(start, len(body)):
        statement = body[i]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if name not in fresh or _names(statement.value) - {name} or any(map(_casts, ast.walk(statement.value))):
                return  # it may have another dtype than the same in place
            value: ast.expr = ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)
            body[i] = statement = ast.copy_location(
                ast.Assign([ast.Name(name, ast.Store())], ast.copy_location(value, statement)), statement
            )
        single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if isinstance(statement, ast.Assign) and single else None
        if not isinstance(target, ast.Name) or target.id == ids or any(map(_stores, ast.walk(statement.value))):  # type: ignore[attr-defined]
            if any(_stores(n) and getattr(n, "id", ids) == ids for n in ast.walk(statement)):
                return
            fresh -= _names(statement)
            continue
        assert isinstance(statement, ast.Assign)
        read = _names(statement.value)
        fresh -= read - {target.id}
        fresh.discard(target.id)
        taken = any(getattr(n, "attr", "") in ("gather", "take_along_dim") for n in ast.walk(statement.value))
        if not read & (follows if taken else follows - {ids}):
            follows.discard(target.id)
            continue
        follows.add(target.id)
        fresh |= {target.id} if isinstance(statement.value, ast.BinOp) else set()
        both: list[ast.expr] = [ast.Name(target.id, ast.Store()), ast.Name(ids, ast.Store())]
        value = ast.Tuple([statement.value, ast.Name(ids, ast.Load())], ast.Load())
        body[i] = ast.copy_location(
            ast.Assign([ast.Tuple(both, ast.Store())], ast.copy_location(value, statement)), statement
        )


def _names(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _casts(node: ast.AST) -> bool:
    casts = {"to", "type", "float", "double", "half", "bfloat16"}
    return (isinstance(node, ast.Attribute) and node.attr in casts) or (
        isinstance(node, ast.keyword) and node.arg == "dtype"
    )


def _stores(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)) or isinstance(node, ast.Delete)
