"""What parts look like: the values next to their products, and the numbers in them that other tensors' sizes say."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ferryman.porting.model.nodes import Node

MOST_LEAVES = 4
TURNS = {"cat", "stack", "view_as_complex", "roll", "call", "concat", "concatenate", "hstack", "fill"}
PRODUCTS = {"MatMult", *(f.__name__ for f in (torch.matmul, torch.bmm, torch.einsum, torch.baddbmm))}


def stacks(nodes: Iterable[Node]) -> int:
    """How many tensors of the module's of three dimensions there are, as layers of experts have them."""
    return sum(isinstance(n.value, Tensor) and n.value.dim() == 3 for n in nodes)


def is_row(node: Node) -> bool:
    """Whether it is rows of a matrix of the module's that a value has the numbers of."""
    table = node.children[0] if isinstance(node.tree, ast.Subscript) and len(node.children) == 2 else None
    at = node.children[1] if table is not None else node
    at = at.children[0] if isinstance(at.tree, ast.Tuple) and len(at.children) == 1 else at
    matrix = table is not None and isinstance(table.value, Tensor) and table.value.dim() == 2
    return matrix and not at.fact() and at.kind in ("leaf", "op") and not isinstance(at.tree, ast.Slice | ast.Tuple)


def products(nodes: Iterable[Node]) -> int:
    """How many products of two values that flow there are."""
    return sum(n.kind == "op" and n.label in PRODUCTS for n in nodes)


def own_logits(nodes: Iterable[Node]) -> bool:
    """Whether the one tensor of the module's there is a vector, as attention has logits that no key gives."""
    tensors = [n.value for n in nodes if n.kind == "self" and isinstance(n.value, Tensor)]
    one = tensors[0] if len(tensors) == 1 else None
    return one is not None and one.is_floating_point() and one.numel() == max(one.shape, default=0) > 1


def of_several(root: Node, leaves: tuple[Node, ...]) -> bool:
    """Whether a part of more than two values may be one at all."""
    inside = root.inside(frozenset(leaves))
    if stacks(inside) == 2 or {n.label for n in inside} & TURNS:
        return True
    tensors = any(isinstance(n.value, Tensor) for n in inside if n.kind == "self")
    return (
        products(inside) == 2
        and (not tensors or own_logits(inside))
        and (sum(not n.fact() for n in leaves) == 3 or of_products(root, leaves) is not None)
    )


def number_of(root: Node, leaves: tuple[Node, ...]) -> Node | None:
    """The largest number that is computed of those among leaves, or the only one of these; else None."""
    inside = root.inside(frozenset(leaves))
    mine = {n for n in leaves if n.counts()}
    values = frozenset(leaves) - mine
    known = {n for n in inside if n.counts() and mine & set(n.inside(values))} | mine
    outer = known - {child for n in known for child in n.children}
    within = {child for n in inside if n not in known for child in n.children if child in known}
    if len(outer) == 1 and within == outer:
        return next(iter(outer))
    return next(iter(mine)) if len(mine) == 1 else None


def of_products(root: Node, leaves: tuple[Node, ...]) -> tuple[int, ...] | None:
    """The places of those that the first of two products is of, of the second's other one, and of the rest; None where
    it is not one each."""
    inside = root.inside(frozenset(leaves))
    first, second = (n for n in inside if n.kind == "op" and n.label in PRODUCTS)
    ends = frozenset(leaves)
    leaves = tuple(n for n in leaves if not n.fact())
    if first not in second.inside(ends):
        return None

    def of(node: Node) -> set[Node]:
        return {leaf for leaf in leaves if leaf is node or any(leaf in n.children for n in node.inside(ends))}

    def operands(node: Node) -> list[set[Node]]:
        given = [of(child) for child in node.children if child is not first and first not in child.inside(ends)]
        given = [known for known in given if known]
        return given[1:] if node.label == "baddbmm" and len(given) == 3 else given

    terms = [*operands(first), *operands(second)]
    places = [leaves.index(next(iter(known))) for known in terms if len(known) == 1]
    if len(terms) != 3 or len(set(places)) != 3:
        return None
    return (*places, *(i for i in range(len(leaves)) if i not in places))


def closest(root: Node, known: Callable[[Node], bool], ours: bool = False) -> frozenset[Node] | None:
    """The values next to two products that a node is computed of, and the numbers that are sizes of others; None where
    it has no two, or too many values. ours: also those of the module's tensors alone, such as a bias of positions."""
    near = _closest(root, known, ours)
    return _closest(root, known, ours) if near is None and _kinds_alone(root) else near


def _kinds_alone(root: Node) -> bool:
    """Make arguments of which only the dtype and the device are read, by `type_as`, what is like them, and no value;
    whether there are any."""
    inside = root.inside(frozenset())
    changed = False
    for node in inside:
        other = node.children[1] if node.label == "type_as" and len(node.children) == 2 else None
        if other is None or other.kind != "leaf" or other.beside or not isinstance(node.slots[1], ast.Name):
            continue
        if all(n.counts() or (n is node and n.children[0] is not other) for n in inside if other in n.children):
            node.children = (node.children[0], replace(other, beside=True))
            changed = True
    return changed


def _closest(root: Node, known: Callable[[Node], bool], ours: bool) -> frozenset[Node] | None:
    inside = root.inside(frozenset())
    first = next((n for n in inside if n.kind == "op" and products([n])), None)
    if first is None:
        return None
    cut: set[Node] = set()
    counts: list[Node] = []

    def add(node: Node, whole: bool) -> bool:
        counts.extend([node] if node.counts() or node.beside else [])
        if node.beside:
            return True
        below = node.inside(frozenset())
        own = ours and node.kind == "op" and whole and known(node) and any(isinstance(n.value, Tensor) for n in below)
        if node.counts() or not (own or any(n.kind == "leaf" for n in below)):
            return True
        plain = node.kind == "op" and not isinstance(node.tree, ast.Attribute | ast.Slice | ast.Tuple | ast.List)
        if whole and (known(node) if plain else isinstance(node.tree, ast.Name)):
            cut.add(node)
            return True
        on_path = {id(n) for n in node.children if first in n.inside(frozenset())}
        return bool(node.children) and all(add(n, id(n) not in on_path) for n in node.children)

    if not add(root, False) or not 2 < len(cut) <= MOST_LEAVES:
        return None
    values = frozenset(cut)
    for node in counts:
        below = node.inside(values)
        if any(n.kind == "leaf" for n in below):
            cut |= {n for n in below if n.beside}
            cut |= {n for n in below if n.counts() and known(n) and any(m.kind == "leaf" for m in n.inside(values))}
    inside = root.inside(frozenset(cut))
    whole = products(inside) == 2 and all(n.kind != "leaf" for n in inside)
    return frozenset(cut) if whole else None


def with_numbers(root: Node, cut: frozenset[Node], known: Callable[[Node], bool]) -> frozenset[Node] | None:
    """A cut with numbers in the place of values of which the part reads sizes alone; None where there are none."""
    inside = root.inside(cut)
    of_sizes = {
        v for v in cut if v.kind != "constant" and all(n.counts() for n in inside if v in n.children) and v is not root
    }
    of_sizes = {v for v in of_sizes if not v.counts()}
    rest = cut - of_sizes
    numbers = {n for n in inside if n.counts() and known(n) and of_sizes & set(_below(n, cut))}
    outer = numbers - {m for n in numbers for m in n.inside(cut) if m is not n}
    for chosen in (outer, numbers) if of_sizes and rest else ():
        if not of_sizes & set(root.inside(rest | chosen)):
            return rest | chosen
    return None


def turning(root: Node, known: Callable[[Node], bool]) -> list[frozenset[Node]]:
    """Cuts into one value that is turned and the few that it is turned by: what does not follow from it but by its
    sizes stays outside as a whole. Those of fewest values first, the nearest of these first."""
    inside = root.inside(frozenset())
    if not any(n.label in TURNS for n in inside):
        return []
    shown: list[frozenset[Node]] = []
    for node in reversed(inside):
        flows = node.kind in ("op", "leaf") and not _sized(node) and not isinstance(node.tree, _SPELLED)
        cut = _turned_by(root, node, known) if flows and node is not root and known(node) else None
        if cut is not None and cut not in shown:
            shown.append(cut)
    return sorted(shown, key=len)[:_MOST_TURNINGS]


_MOST_TURNINGS = 4
_SPELLED = ast.Slice | ast.Tuple | ast.List | ast.Starred
_FACTS = {"shape", "ndim", "dtype", "device"}


def _sized(node: Node) -> bool:
    """Whether it says what a tensor is like, and nothing of its numbers."""
    return node.counts() or (node.kind == "op" and isinstance(node.tree, ast.Attribute) and node.tree.attr in _FACTS)


def _turned_by(root: Node, turned: Node, known: Callable[[Node], bool]) -> frozenset[Node] | None:
    follows = {turned}
    order = root.inside(frozenset({turned}))
    for node in order:
        if not _sized(node) and any(child in follows for child in node.children):
            follows.add(node)
    if root not in follows:
        return None
    cut = {turned}

    def add(node: Node) -> bool:
        if node in follows or node in cut or not any(n.kind == "leaf" or _holds(n) for n in node.inside(frozenset())):
            return True
        if _sized(node):
            if not any(n.kind == "leaf" and n is not turned for n in node.inside(frozenset(follows))):
                return True
            cut.update({node} if node.fact() and known(node) else ())
            return node in cut or (bool(node.children) and all(map(add, node.children)))
        if isinstance(node.tree, _SPELLED):
            return all(map(add, node.children))
        if not (_holds(node) or (node.kind != "self" and known(node))):
            return False
        cut.add(node)
        return True

    for node in order:
        if node in follows and node is not turned and not all(map(add, node.children)):
            return None
    values = [n for n in cut if not n.fact()]
    if not 1 < len(values) <= MOST_LEAVES or len(cut) > MOST_LEAVES:
        return None
    ends = frozenset(values)  # of whose sizes nothing is asked
    cut = {n for n in cut if not n.fact() or any(m.kind == "leaf" for m in n.inside(ends))}
    mine = _sources(turned)
    if any(mine & _sources(n) for n in values if n is not turned):
        return None  # it is turned by what follows from what it does
    inside = root.inside(frozenset(cut))
    turns = any(n.label in TURNS for n in inside) and not any(n.kind == "leaf" or _holds(n) for n in inside)
    return frozenset(cut) if turns else None


def _sources(node: Node) -> set[Node]:
    """The leaves whose numbers a value follows from."""
    if node.kind == "leaf":
        return {node}
    return set().union(*(_sources(child) for child in node.children if not _sized(child)))


def _holds(node: Node) -> bool:
    return node.kind == "self" and isinstance(node.value, Tensor)


def _below(node: Node, cut: frozenset[Node]) -> set[Node]:
    """Values of a cut that a node is computed of."""
    return {child for n in node.inside(cut) for child in n.children if child in cut}
