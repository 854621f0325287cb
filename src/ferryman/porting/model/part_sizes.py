"""Sizes of other tensors in a part, and dtypes of others: what of the part's own values says the same."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

import torch

from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part_shape import number_of

_MOST_READINGS = 4
_ALIKE = {
    *("contiguous", "detach", "float", "to", "type_as"),
    *(f.__name__ for f in (torch.clone, torch.neg, torch.cos, torch.sin, torch.softmax, torch.masked_fill)),
}
Reading = dict[Node, str]  # each fact, as an expression over ``ferryman_a0`` and on


def readings(root: Node, leaves: tuple[Node, ...], places: tuple[int, ...]) -> Iterator[Reading]:
    """Ways to say all facts among leaves by the others' sizes, the likeliest first. places: of values whose last size
    one number may be, of which nothing is known."""
    values = tuple(n for n in leaves if not n.fact())
    facts = [n for n in leaves if n.fact()]
    plain = [n for n in facts if not n.counts()]
    numbers = [n for n in facts if n.counts()]
    same = {n: n.said() for n in plain}
    known: list[Reading] = []
    for chosen in (numbers, _within(root, leaves)) if numbers else ([],):
        options = [list(dict.fromkeys(_said(n, values))) for n in chosen]
        for texts in itertools.islice(itertools.product(*options), _MOST_READINGS):
            known.append(same | dict(zip(chosen, texts, strict=True)))
    number = number_of(root, (*values, *numbers)) if numbers else None
    if number is not None:
        known += [same | {number: f"ferryman_a{place}.shape[-1]"} for place in places]
    shown: list[Reading] = []
    for reading in known:
        if reading not in shown:
            shown.append(reading)
            yield reading


def _within(root: Node, leaves: tuple[Node, ...]) -> list[Node]:
    """The numbers of leaves that something else than a number is computed of."""
    mine = {n for n in leaves if n.counts()}
    values = frozenset(leaves) - mine
    inside = root.inside(frozenset(leaves))
    known = {n for n in inside if n.counts() and mine & set(n.inside(values))} | mine
    return list(dict.fromkeys(c for n in inside if n not in known for c in n.children if c in known))


def _said(number: Node, values: tuple[Node, ...]) -> Iterator[str]:
    open_: list[str] = []
    for i, value in enumerate(values):
        name = f"ferryman_a{i}.shape"
        for base in _alike(value):
            axis = _axis_of(number, base)
            if axis is not None:
                yield f"{name}[{axis}]"
        for axis, side in enumerate(_sides(value) or ()):
            if side is None:
                open_.append(f"{name}[{axis}]")
            elif side is number:
                yield f"{name}[{axis}]"
            elif isinstance(side.tree, ast.BinOp) and isinstance(side.tree.op, ast.Mult) and number in side.children:
                other = next(c for c in side.children if c is not number or side.children == (number, number))
                factor = _whole(other)
                if factor:
                    yield f"{name}[{axis}] // {factor}"
    yield from open_


def _alike(value: Node) -> Iterator[Node]:
    """A value and those before it that have its shape."""
    yield value
    while value.kind == "op" and value.label in _ALIKE and value.children:
        value = value.children[0]
        yield value


def _axis_of(number: Node, value: Node) -> int | None:
    """The axis of a value whose size a number is."""
    tree = number.tree
    if isinstance(tree, ast.Subscript) and len(number.children) == 2:
        sizes, axis = number.children[0], _whole(number.children[1])
        plain = isinstance(sizes.tree, ast.Attribute) and sizes.tree.attr == "shape"
        plain = plain or (sizes.label == "size" and len(sizes.children) == 1)
        return axis if plain and sizes.children[0] is value else None
    if number.label == "size" and len(number.children) == 2 and number.children[0] is value:
        return _whole(number.children[1])
    return None


def _whole(node: Node) -> int | None:
    given = node.value if node.kind == "self" else None
    if node.kind == "constant":
        try:
            given = ast.literal_eval(node.tree)
        except ValueError:
            return None
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _sides(value: Node) -> tuple[Node | None, ...] | None:
    """What says each side of a value's shape, where its spelling does; None for a side of which nothing is known."""
    if value.kind != "op" or value.write is not None or not value.children:
        return None
    before, *rest = value.children
    if value.label in _ALIKE:
        return _sides(before)
    if value.label in ("view", "reshape"):
        given = rest[0].children if len(rest) == 1 and isinstance(rest[0].tree, ast.Tuple) else rest
        starred = isinstance(value.tree, ast.Call) and any(isinstance(a, ast.Starred) for a in value.tree.args)
        if starred or not all(n.counts() for n in given):
            return None
        return tuple(None if (_whole(n) or 0) < 0 else n for n in given)
    sides = _sides(before)
    given_axes = [_whole(n) for n in rest]
    if sides is None or not rest or any(a is None or not -len(sides) <= a < len(sides) for a in given_axes):
        return None
    axes = [a % len(sides) for a in given_axes if a is not None]
    if value.label == "transpose" and len(axes) == 2:
        order = list(range(len(sides)))
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
        return tuple(sides[a] for a in order)
    if value.label == "permute" and len(axes) == len(sides):
        return tuple(sides[a] for a in axes)
    return None
