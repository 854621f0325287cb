"""What a cut may not be, and where in a tree things stand."""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.model import helpers, routines, source
from ferryman.porting.model.nodes import Node, Statement
from ferryman.porting.model.part_shape import PRODUCTS, TURNS
from ferryman.porting.model.uses import more, served, served_methods


def places_of_own(node: Node) -> bool:
    """Whether it is a part of the module's tensor that sizes of what flows say: with these it would be a value less,
    and a tensor of ours more."""
    sliced = isinstance(node.tree, ast.Subscript) and any(isinstance(n, ast.Slice) for n in ast.walk(node.tree.slice))
    owner = node.children[0] if node.children and sliced else None
    sized = any(n.kind == "leaf" for n in node.inside(frozenset()))
    return owner is not None and isinstance(owner.value, Tensor) and sized


_SPLITS = {torch.reshape.__name__, "view", torch.unflatten.__name__}


def splits(root: Node, leaves: tuple[Node, ...]) -> bool:
    """Whether a value of a part is cut into rows of a length of ours, of as many as there are. A proof would have
    values of one such row alone, and what a call gives has more: the part is to be of these rows."""
    inside = root.inside(frozenset(leaves))
    if {n.label for n in inside} & ((TURNS | PRODUCTS) - {"call"}):
        return False
    return any(n.label in _SPLITS and n.children and n.children[0] in leaves and _is_split(n) for n in inside)


def _is_split(node: Node) -> bool:
    sizes = [s for n in node.children[1:] for s in (n.children if isinstance(n.tree, ast.Tuple | ast.List) else (n,))]
    last = sizes[-1] if sizes else Node("leaf", node.tree)
    number = last.value if last.kind == "self" else getattr(last.tree, "value", 0)
    return type(number) is int and number > 1 and any(ast.unparse(n.tree) == "-1" for n in sizes[:-1])


_CATCHES = {"Try", "TryStar", "With", "AsyncWith"}  # behind which code may go on after what raised


def ends(body: list[ast.stmt], tree: ast.AST) -> bool:
    """Whether nothing of a function runs after a block."""
    return isinstance(body[-1], ast.Return) and _CATCHES.isdisjoint(type(n).__name__ for n in ast.walk(tree))


def replaced(name: str, rest: Sequence[ast.stmt | None], tree: ast.AST) -> bool:
    """Whether statements of a block put another value in a local, in any case, so that what stands after the block sees
    no earlier one."""
    if not _CATCHES.isdisjoint(type(n).__name__ for n in ast.walk(tree)):
        return False
    for statement in filter(None, rest):
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in statement.targets
        ):
            return True
        if not isinstance(statement, ast.Assign | ast.Expr):
            return False
    return False


def more_than_one_of(cuts: frozenset[frozenset[Node]], cut: frozenset[Node]) -> bool:
    """Whether a part of a cut is one, too, so that the rest of it is computed of that."""
    return any(frozenset(few) in cuts for n in range(1, len(cut)) for few in itertools.combinations(cut, n))


def recognised(e: ast.expr, function: types.FunctionType) -> bool:
    """Whether a call is served by the function that it names."""
    if not isinstance(e, ast.Call):
        return False
    value = source.resolve(e.func, function)
    if value is source.MISSING:
        return isinstance(e.func, ast.Attribute) and e.func.attr in served_methods()
    if isinstance(value, types.FunctionType) and (
        helpers.forms_of(value) or routines.served_routine(value) is not None
    ):
        return True
    try:
        return value in served() or value in more
    except TypeError:  # not hashable
        return False


def results_of(last: ast.stmt, statements: list[Statement]) -> set[Node]:
    """What a block returns: a value, or those of a tuple."""
    if not isinstance(last, ast.Return) or not statements or statements[-1].value is None:
        return set()
    value = statements[-1].value
    parts = value.children if isinstance(value.tree, ast.Tuple) else (value,)
    return {*parts}


def place_of(node: Any) -> tuple[Any, ...]:
    return tuple(getattr(node, n, None) for n in ("lineno", "col_offset", "end_lineno", "end_col_offset"))


def within(place: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    if None in place or None in outer:
        return False
    return outer[:2] <= place[:2] and place[2:] <= outer[2:]
