"""Whether a part may stand where its last value is computed: what it is computed of comes later then than in the code.

What writes over a tensor, or may do anything, keeps its turn among all that is computed, and what draws random numbers
keeps its turn among what draws (`effects`).
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ferryman.porting.model import effects, filling, recurrent
from ferryman.porting.model.effects import CHANGES, DRAWS, NONE, Effects
from ferryman.porting.model.nodes import Node, Statement
from ferryman.porting.model.trees import around

_MAYBE = ast.IfExp | ast.BoolOp | ast.Compare | ast.Lambda | ast.comprehension


@dataclass
class Event:
    """Something that is computed: where it stood, and what it may do."""

    at: tuple[int, int]
    may: Effects


def keeps(
    scan: Any,
    statements: list[Statement],
    body: list[ast.stmt],
    statement: Statement,
    root: Node,
    e: ast.expr,
    leaves: tuple[Node, ...],
    given: list[ast.expr],
    moved: dict[int, tuple[int, ast.expr]],
) -> bool:
    """Whether all that has effects keeps its turn. given: what reads each value where the part stands; moved: of these,
    by id, the statement and the expression that it was."""
    inside = root.before(leaves)
    going = {s.index: s for s in statements if s.index < statement.index and set(s.binds) & inside}
    between = [i for i in range(min(going, default=statement.index), statement.index) if i not in going]
    crossed = NONE.union(*(_asked(scan, effects.of, body[i]) for i in between))
    earlier = bool(going) or any(leaf in statement.names for leaf in leaves)
    here = _asked(scan, effects.of, body[statement.index], e) if earlier else NONE
    crossed |= here
    if crossed & CHANGES:
        return False
    moving = NONE.union(*(_of_going(scan, body, s) for s in going.values()))
    if DRAWS in moving & crossed or (moving & CHANGES and (here or between)):
        return False
    if moving and _maybe(body[statement.index], e):
        return False
    if not moving and not _asked(scan, effects.of, e):
        return True
    order = _Order(scan, body)
    after = [*order.of_given(statement, given, moved), *order.of_inside(statements, statement, root, leaves)]
    return _same_turns(after)


def stands(
    statements: list[Statement], statement: Statement, root: Node, leaves: tuple[Node, ...], given: list[ast.expr]
) -> bool:
    """Whether a part computes just where the code does, and as often: it takes locals alone, no earlier statement has a
    value of its own, and no value that it follows from is that of two equal expressions."""
    times = Counter(node for s in statements if s.index <= statement.index for node, _ in s.ops)
    once = all(times[node] < 2 for node in root.inside(frozenset()) if node.kind == "op")
    own = root.before(leaves)
    here = not any(s.binds.keys() & own for s in statements if s.index < statement.index)
    return once and here and all(isinstance(value, ast.Name) for value in given)


def _asked(scan: Any, of: Callable[..., Effects], *parts: ast.AST) -> Effects:
    """``of(scan, *parts)``, asked once while the block is as it is: for each set of values that a part may be of, all
    that stands before it is gone through. The parts are kept, so that no other has their ids."""
    key = of, *(id(part) for part in parts), scan.strict
    if key not in scan.asked:
        before, scan.relied = scan.relied, set()
        scan.asked[key] = parts, of(scan, *parts), scan.relied
        scan.relied = before
    _, may, relied = scan.asked[key]
    scan.relied |= relied
    return may


def _maybe(tree: ast.AST, e: ast.expr) -> bool:
    """Whether it is computed in some calls alone, or more than once."""
    outer = around(tree, e) - {id(e)}
    return any(isinstance(n, _MAYBE) and id(n) in outer for n in ast.walk(tree))


def _of_going(scan: Any, body: list[ast.stmt], statement: Statement) -> Effects:
    """Of a statement that goes with the part, but for what it writes into what nothing else has."""
    tree, value = body[statement.index], statement.value
    if value is None or value.write is None:
        return _asked(scan, effects.of, tree)
    if isinstance(tree, ast.AugAssign) and isinstance(tree.target, ast.Name):
        return _asked(scan, effects.of, tree.value)
    if value.carried:
        return NONE.union(*(_asked(scan, effects.of, part) for part in recurrent.computing(tree)))
    if isinstance(tree, ast.For):
        return effects.of(scan, tree, None, next(iter(statement.binds.values()), ""))
    return NONE.union(*(_asked(scan, effects.of, part) for part in filling.parts_of(tree)[1]))


@dataclass
class _Order:
    """When things are computed in a block as it is."""

    scan: Any
    body: list[ast.stmt]

    def __post_init__(self) -> None:
        self.places = functools.cache(lambda index: _places(self.body[index]))

    def at(self, index: int, tree: ast.AST) -> tuple[int, int]:
        return index, self.places(index).get(id(tree), -1)

    def of_given(
        self, statement: Statement, given: list[ast.expr], moved: dict[int, tuple[int, ast.expr]]
    ) -> Iterator[list[Event]]:
        for value in given:
            index, tree = moved.get(id(value), (statement.index, value))
            if not isinstance(tree, ast.Name | ast.Constant):
                yield [Event(self.at(index, tree), _asked(self.scan, effects.of, tree))]

    def of_inside(
        self, statements: list[Statement], statement: Statement, root: Node, leaves: tuple[Node, ...]
    ) -> Iterator[list[Event]]:
        """What the part computes, each with all places where it stood."""
        places: dict[Node, list[Event]] = {}
        for s in statements:
            if s.index <= statement.index:
                for node, tree in s.ops:
                    places.setdefault(node, []).append(Event(self.at(s.index, tree), _alone(self.scan, tree)))
                for node in s.binds:
                    if node.write is not None:
                        places.setdefault(node, []).append(Event(self.at(s.index, self.body[s.index]), NONE))
        yield from (places.get(node, []) for node in root.inside(frozenset(leaves)) if node.kind == "op")


def _alone(scan: Any, tree: ast.expr) -> Effects:
    """What a call may do itself, without what it is given."""
    return _asked(scan, effects.of_call, tree) if isinstance(tree, ast.Call) else NONE


def _same_turns(after: list[list[Event]]) -> bool:
    for i, first in enumerate(after):
        for second in after[i + 1 :]:
            for a in first:
                for b in second:
                    tied = (a.may | b.may) & CHANGES or DRAWS in a.may & b.may
                    if tied and a.at > b.at:
                        return False
    return True


def _places(tree: ast.AST) -> dict[int, int]:
    """When each part of a tree is computed."""
    order: dict[int, int] = {}

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            walk(child)
        order[id(node)] = len(order)

    walk(tree)
    return order
