"""Which expressions of a module's functions are offsets, sizes or indexes: a pointer takes no floating-point number.

An expression is one where a load, a store or a range takes it as such, and where a name is one to which it is assigned.
A function's parameter and its result are followed into the functions of the same module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ferryman.porting.mutate.python import PLAIN, called

Place = tuple[int, int, int | None, int | None]
_POINTED = ("load", "store", "full")  # and atomic_*: the first argument is a pointer, offsets or a shape
_DESCRIBED = ("make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous")


def place(node: Any) -> Place | None:
    """Where a node stands; None for what has no place."""
    if not hasattr(node, "lineno"):
        return None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@dataclass
class _Function:
    node: ast.FunctionDef
    names: set[str] = field(default_factory=set)  # of offsets, and of pointers
    returns: bool = False  # whether its result is an offset


def places(tree: ast.Module) -> set[Place | None]:
    """The places of all such expressions, and of the statements that change such a name in place."""
    functions = [_Function(n) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    by_name: dict[str, list[_Function]] = {}
    for one in functions:
        by_name.setdefault(one.node.name, []).append(one)
    known: set[Place | None] = set()
    before = -1
    while before != (before := _count(functions)):
        for function in functions:
            for root in _roots(function, by_name):
                for node in ast.walk(root):
                    known.add(place(node))
                    if isinstance(node, ast.Name):
                        function.names.add(node.id)
                    for callee in by_name.get(called(node), ()):
                        callee.returns = True
    return known


def _count(functions: list[_Function]) -> int:
    return sum(len(one.names) + one.returns for one in functions)


def _roots(function: _Function, by_name: dict[str, list[_Function]]) -> Iterator[ast.AST]:
    for node in ast.walk(function.node):
        if isinstance(node, ast.Call):
            yield from _arguments(node, by_name)
        elif isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(n, ast.Name) and n.id in function.names for t in targets for n in ast.walk(t)):
                yield node if isinstance(node, ast.AugAssign) else node.value
        elif isinstance(node, ast.Return) and node.value is not None and function.returns:
            yield node.value


def _arguments(node: ast.Call, by_name: dict[str, list[_Function]]) -> Iterator[ast.AST]:
    name = called(node)
    words = {k.arg: k.value for k in node.keywords}
    if name in _POINTED or name.startswith("atomic_"):
        yield from node.args[:1]
        yield from (value for word, value in words.items() if word in ("pointer", "shape"))
    elif name in PLAIN or name in _DESCRIBED:
        yield from (*node.args, *words.values())
    for callee in by_name.get(name, ()):
        spec = callee.node.args
        parameters = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        bound = dict(zip(parameters, node.args, strict=False)) | {k: v for k, v in words.items() if k}
        yield from (value for parameter, value in bound.items() if parameter in callee.names)
