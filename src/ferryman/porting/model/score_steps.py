"""The steps by which scores are masked between two products: what is added, and what is hidden by a number."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part_shape import products

_LIKE = {f.__name__ for f in (torch.ones_like, torch.zeros_like, torch.full_like, torch.empty_like)}
_LIKE |= {"new_full", "new_zeros", "new_ones", "new_tensor", "new_empty"}
_AS = {"type_as", "to", "expand_as", "view_as"}  # of another tensor they take the shape, or the dtype
_VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}
MASK = "ferryman_mask"


@dataclass(frozen=True)
class Step:
    """``kind``: "add" or "take" an operand, "hide" where it is true, "keep" where it is, with ``value`` elsewhere; or
    "view". by: the function that it calls."""

    node: Node
    kind: str
    operand: Node | None = None
    value: Node | None = None
    by: str = ""


@dataclass(frozen=True)
class Steps:
    """before: the scores that the first step has; path: what follows from the first product, up to the last step."""

    before: Node
    steps: tuple[Step, ...]
    path: frozenset[Node]

    @property
    def last(self) -> Node:
        return self.steps[-1].node

    @property
    def viewed(self) -> bool:
        return any(step.kind == "view" for step in self.steps)


def steps_of(root: Node) -> Steps | None:
    """The steps between two products, if there are any."""
    inside = root.inside(frozenset())
    first = next((n for n in inside if n.kind == "op" and products([n])), None)
    if first is None:
        return None
    users: dict[Node, list[Node]] = {}
    for node in inside:
        for i, child in enumerate(node.children):
            if not _reads_facts(node, i) and node not in users.setdefault(child, []):
                users[child].append(node)
    walked, steps, start = [first], list[Step](), first
    while len(after := users.get(walked[-1], [])) == 1:
        node, current = after[0], walked[-1]
        step = _step(node, current)
        if step is None and steps and any(s.kind != "view" for s in steps):
            break
        if step is None:
            steps = []
        elif not steps:
            start = current
        steps += [] if step is None else [step]
        walked.append(node)
    kinds = [s.kind for s in steps]
    if "view" in kinds and kinds.count("view") == 1:  # what is seen otherwise stays so
        at = kinds.index("view")
        kept = range(at + 1, len(kinds)) if at == 0 else range(at)
        start, steps = (steps[0].node if at == 0 else start), [steps[i] for i in kept]
    while steps and steps[0].kind == "view" and steps[-1].kind != "view":
        start, steps = steps[0].node, steps[1:]
    if not any(s.kind != "view" for s in steps):
        return None
    path = walked[: walked.index(steps[-1].node) + 1]
    return Steps(start, tuple(steps), frozenset(path))


def _reads_facts(node: Node, place: int) -> bool:
    """Whether a node takes of a child no more than its shape, dtype or device."""
    if node.fact() or (node.label in _LIKE and place == 0):
        return True
    return node.label in _AS and place > 0


def _step(node: Node, current: Node) -> Step | None:
    tree, children = node.tree, node.children
    if node.kind != "op" or node.whole is not None or children.count(current) != 1:
        return None
    at = children.index(current)
    binary = isinstance(tree, ast.BinOp) and len(children) == 2
    if binary and (node.write is None or isinstance(node.write, ast.AugAssign)):
        other = children[1 - at]
        if node.label == "Add" and not _number(other):
            return Step(node, "add", other)
        if node.label == "Sub" and at == 0 and not _number(other):
            return Step(node, "take", other)
        return None
    filled = node.label == "masked_fill" and isinstance(node.write, ast.Expr | ast.Assign)
    if (node.write is not None and not filled) or not isinstance(tree, ast.Call) or tree.keywords:
        return None
    if any(isinstance(a, ast.Starred) for a in tree.args):
        return None
    if node.label in _VIEWS and at == 0:
        return Step(node, "view")
    if len(children) == 3 and node.label == "masked_fill" and at == 0:
        return Step(node, "hide", children[1], children[2], node.label)
    if len(children) == 3 and node.label == "where":
        own = isinstance(tree.func, ast.Attribute) and tree.func.value is node.slots[0]  # a tensor's method
        condition, one, other = (children[1], children[0], children[2]) if own else children
        if current is one:
            return Step(node, "keep", condition, other, node.label)
        if current is other and not own:
            return Step(node, "hide", condition, one, node.label)
    return None


def _number(node: Node) -> bool:
    return node.kind == "constant" or (node.kind == "self" and not isinstance(node.value, Tensor))


def replaced(root: Node, steps: Steps, mask: Node, kind: str) -> tuple[Node, Node]:
    """(the part with one step in the place of all, what that step is of): "add" it, or "keep" what it says."""
    place: dict[Node, Node] = {n: steps.before for n in steps.path if n is not steps.before}
    for node in steps.before.inside(frozenset()):
        place[node] = node
    before, given = ast.Name("ferryman_scores", ast.Load()), ast.Name(MASK, ast.Load())
    if kind == "add":
        one = Node("op", ast.BinOp(before, ast.Add(), given), (steps.before, mask), (before, given), "Add")
    else:
        written = [s for s in steps.steps if s.value is not None]
        by = "masked_fill" if any(s.by == "masked_fill" for s in written) else "where"
        value = _swapped(written[-1].value, place)  # type: ignore[arg-type]
        number = ast.Name("ferryman_value", ast.Load())
        condition = ast.Call(ast.Attribute(given, "logical_not", ast.Load()), [], []) if by == "masked_fill" else given
        call = ast.Call(ast.Attribute(before, by, ast.Load()), [condition, number], [])
        one = Node("op", call, (steps.before, mask, value), (before, given, number), by)
    return _swapped(root, {**place, steps.last: one}), one


def _swapped(node: Node, place: dict[Node, Node]) -> Node:
    if node not in place:
        children = tuple(_swapped(child, place) for child in node.children)
        same = all(a is b for a, b in zip(children, node.children, strict=True))
        place[node] = node if same else replace(node, children=children)
    return place[node]
