"""The source of a lambda, as a function of that name: among the statements of its own lines, or in its file."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence


def of_lines(
    body: Sequence[ast.AST], above: int, comes_from: Callable[[ast.FunctionDef], bool]
) -> ast.FunctionDef | None:
    """That of some statements of which ``comes_from`` says that the code does. above: lines before them."""
    for node in [n for s in body for n in ast.walk(s) if isinstance(n, ast.Lambda)]:
        tree = ast.FunctionDef(
            name="<lambda>",
            args=copy.deepcopy(node.args),
            body=[ast.Return(copy.deepcopy(node.body))],
            decorator_list=[],
            returns=None,
            type_comment=None,
        )
        tree.__dict__.setdefault("type_params", [])
        ast.fix_missing_locations(ast.copy_location(tree, node))
        ast.increment_lineno(tree, above)
        if comes_from(tree):
            return tree
    return None


def of_file(code: types.CodeType, comes_from: Callable[[ast.FunctionDef], bool]) -> ast.FunctionDef | None:
    """One whose lines are no statement of their own, such as in a table or among a call's arguments."""
    if code.co_name != "<lambda>":
        return None
    try:
        tree = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    return of_lines(lambdas, 0, comes_from)


@functools.lru_cache(8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
