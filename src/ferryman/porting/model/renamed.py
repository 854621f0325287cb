"""Locals of a loop under names of their own, where the function puts something else into them after it: ``y`` of
``for t in range(n): y = f(t); ys.append(y)`` and of ``y = torch.stack(ys)`` are two values."""

from __future__ import annotations

import ast

from ferryman.porting.model.statements import FRAMES

_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.comprehension
_ODD = ast.Global | ast.Nonlocal | ast.Delete | ast.NamedExpr | ast.Import | ast.ImportFrom | ast.Match | ast.Try
_TRY: tuple[type, ...] = (getattr(ast, "TryStar", ast.Try),)  # which Python has from 3.11 on
_LEAVES = ast.Return | ast.Yield | ast.YieldFrom | ast.Await


def renamed(tree: ast.FunctionDef, shared: set[str]) -> None:
    """Rename such locals of the loops that stand in a function's own block. shared: locals that functions in it see."""
    inner = [n for n in ast.walk(tree) if isinstance(n, _SCOPES) and n is not tree]
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Name) and node.id in FRAMES
        if asks or isinstance(node, (_ODD, *_TRY)):
            return
    given = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    closed = shared | given | {n.id for s in inner for n in ast.walk(s) if isinstance(n, ast.Name)}
    for i, loop in enumerate(tree.body):
        plain = isinstance(loop, ast.For) and not loop.orelse
        if not plain or any(isinstance(n, _LEAVES) for n in ast.walk(loop)):
            continue
        assert isinstance(loop, ast.For)
        outside = {n for s in (*tree.body[:i], loop.iter, loop.target) for n in _named(s)}
        for name in sorted(_first_stored(loop.body) - outside - closed):
            after = next((s for s in tree.body[i + 1 :] if name in _named(s)), None)
            if after is not None and name in _first_stored([after]):
                for node in (n for s in loop.body for n in ast.walk(s)):
                    if isinstance(node, ast.Name) and node.id == name:
                        node.id = f"{name}_ferryman_at{i}"


def _first_stored(body: list[ast.stmt]) -> set[str]:
    """Names that a block puts something into, each time that it runs, before it reads them."""
    names, before = set[str](), set[str]()
    for statement in body:
        if isinstance(statement, ast.Assign):
            read = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            targets = [e for t in statement.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            names |= {t.id for t in targets if isinstance(t, ast.Name)} - before - read
        before |= _named(statement)
    return names


def _named(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
