"""The order of a sum, recovered from its results, and put into words.

The idea is FPRev's (Xie et al., USENIX ATC 2025): with +M at i, -M at j and units elsewhere, every unit that is added
before the two meet is absorbed, so the result counts the units added later. n minus that count is the number of terms
under the lowest common ancestor of i and j. All pairs give the tree: a matrix unit that fuses k terms (and its
accumulator) is a node with k (+ 1) children.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""(P, K) float64 terms to (P,) float64 sums, as the route under test computes them."""


_ELEMENTS = 2**18  # terms held at once, 2 MiB of float64


class Irregular(Exception):
    """The results are those of no fixed tree; the message says why."""


class Exact(Exception):
    """Nothing was absorbed: the sum is exact over the whole range that was tried, so its order cannot show."""


@dataclass(frozen=True)
class Node:
    """One addition: what it adds at once. ``leaf`` is the term's index where there are no children."""

    children: tuple[Node, ...] = ()
    leaf: int = -1

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(sorted(i for c in self.children for i in c.leaves)) if self.children else (self.leaf,)

    @property
    def size(self) -> int:
        return len(self.leaves)

    @property
    def notation(self) -> str:
        """((0 1) 2 3): nested as added; leaves by index."""
        return "(" + " ".join(c.notation for c in self.children) + ")" if self.children else str(self.leaf)


def meeting_sizes(reduce: Reduce, length: int, positions: Sequence[int], big: float, unit: float) -> list[list[int]]:
    """L[i][j]: how many of the active ``positions`` lie under the lowest common ancestor of the i-th and j-th.

    All other terms are zero. Raises Irregular where a count is impossible.
    """
    n = len(positions)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    table = [[1 if i == j else 0 for j in range(n)] for i in range(n)]
    where = torch.tensor(positions)
    counts = _counts(reduce, length, where, pairs, big, unit)
    # A directed rounding moves M by a unit in its last place when it meets small terms of the wrong sign: cut toward
    # zero, +M must come first; rounded up, the small terms must be negative.
    for sign, small in ((-1, 1), (1, -1), (-1, -1)):
        doubtful = [p for p, c in zip(pairs, counts, strict=True) if not _possible(c, n)]
        if not doubtful:
            break
        recounts = _counts(reduce, length, where, doubtful, sign * big, small * unit)
        again = dict(zip(doubtful, recounts, strict=True))
        counts = [again.get(p, c) for p, c in zip(pairs, counts, strict=True)]
    for (i, j), count in zip(pairs, counts, strict=True):
        if not _possible(count, n):
            raise Irregular(f"+M at {positions[i]} and -M at {positions[j]} leave {count:g} of {n - 2} units")
        table[i][j] = table[j][i] = n - round(count)
    return table


def _counts(
    reduce: Reduce, length: int, where: Tensor, pairs: Sequence[tuple[int, int]], big: float, unit: float
) -> list[float]:
    counts: list[float] = []
    chunk = max(256, _ELEMENTS // length)
    for start in range(0, len(pairs), chunk):
        part = torch.tensor(pairs[start : start + chunk])
        terms = torch.zeros(len(part), length, dtype=torch.float64)
        terms[:, where] = unit
        rows = torch.arange(len(part))
        terms[rows, where[part[:, 0]]] = big
        terms[rows, where[part[:, 1]]] = -big
        counts += (reduce(terms) / unit).tolist()
    return counts


def _possible(count: float, n: int) -> bool:
    return 0 <= count <= n - 2 and count == int(count)  # NaN fails both comparisons


def build(table: Sequence[Sequence[int]]) -> Node:
    """The tree with these meeting sizes. Raises Irregular if there is none, Exact if nothing was absorbed."""
    n = len(table)
    if n > 2 and all(table[i][j] == 2 for i in range(n) for j in range(n) if i != j):
        raise Exact("every unit survived")
    try:
        return _build(table, list(range(n)))
    except Irregular:
        blocks = _exact_blocks(table)
        if blocks is None:
            raise
        return blocks


def _exact_blocks(table: Sequence[Sequence[int]]) -> Node | None:
    """The tree of a unit that adds blocks of k terms without loss and rounds only their sums; None if it is not one.

    In such a block M and -M cancel beside everything else, so its pairs absorb nothing: they meet at size 2. M in one
    block and -M in a later one absorb what was rounded together with M: where the accumulator is added in the same
    exact step, all earlier blocks (a multiple of k, and -M itself); where it is added afterwards, the later one too.
    """
    n = len(table)
    block = next((k for k in range(2, n) if table[0][k] != 2), n)
    groups = [list(range(start, start + block)) for start in range(0, n, block)]
    if block < 3 or n % block or any(table[i][j] != 2 for g in groups for i in g for j in g if i != j):
        return None
    sizes = [[{table[i][j] for i in a for j in b} for b in groups] for a in groups]
    if any(len(sizes[i][j]) != 1 for i in range(len(groups)) for j in range(len(groups)) if i != j):
        return None
    first = next(iter(sizes[0][1]))
    joined = first % block == 1
    number = [
        [1 if i == j else (next(iter(s)) - joined) // block + joined for j, s in enumerate(row)]
        for i, row in enumerate(sizes)
    ]
    if any((next(iter(s)) - joined) % block for i, row in enumerate(sizes) for j, s in enumerate(row) if i != j):
        return None
    return _expand(_build(number, list(range(len(groups)))), block, joined)


def _expand(node: Node, block: int, joined: bool) -> Node:
    """A tree of blocks as a tree of terms."""
    if not node.children:
        return Node(tuple(Node(leaf=i) for i in range(node.leaf * block, (node.leaf + 1) * block)))
    parts = [_expand(c, block, joined) for c in node.children]
    if not joined:
        return Node(tuple(parts))
    # the accumulator is one of the addends: the terms of the other blocks join its step
    return Node((parts[0], *(term for part in parts[1:] for term in part.children)))


def _build(table: Sequence[Sequence[int]], members: list[int]) -> Node:
    if len(members) == 1:
        return Node(leaf=members[0])
    size = len(members)
    classes: list[list[int]] = []
    for i in members:
        mine = [j for j in members if table[i][j] < size]
        if max(table[i][j] for j in members) > size:
            raise Irregular(f"term {i} meets another under more than the {size} terms of its sum")
        if mine and mine[0] == i:
            classes.append(mine)
        elif mine not in classes:
            raise Irregular(f"term {i} belongs to two partial sums at once")
    if len(classes) == 1:
        raise Irregular(f"{size} terms meet nowhere")
    if sum(map(len, classes)) != size:
        raise Irregular("partial sums overlap")
    return Node(tuple(_build(table, c) for c in classes))


def recover(reduce: Reduce, length: int, positions: Sequence[int], big: float, unit: float) -> Node:
    return build(meeting_sizes(reduce, length, positions, big, unit))


# -- in words


@dataclass(frozen=True)
class Spine:
    """A chain of additions seen from one leaf: ``steps[0]`` holds the leaf, each later one the one before and more."""

    leaf: int
    steps: tuple[Node, ...]


def longest_spine(root: Node) -> Spine:
    """The chain below the deepest leaf: the steps through which one partial sum passes."""
    best: tuple[Node, ...] = ()
    leaf = -1
    stack: list[tuple[Node, tuple[Node, ...]]] = [(root, ())]
    while stack:
        node, above = stack.pop()
        if not node.children:
            if len(above) > len(best) or leaf < 0:
                best, leaf = above, node.leaf
            continue
        stack += [(c, (*above, node)) for c in reversed(node.children)]
    return Spine(leaf, best[::-1])


def fused(root: Node) -> int:
    """How many terms one addition takes at once, besides the accumulator; 1 where every addition has two operands."""
    most, stack = 1, [root]
    while stack:
        node = stack.pop()
        if len(node.children) > 2:
            most = max(most, sum(1 for c in node.children if not c.children))
        stack += node.children
    return most


def describe(root: Node, spacing: int = 1) -> str:
    """The tree in a few words, for a table: "sequential", "16 at a time into the accumulator", "4 strided sums ..".

    ``spacing``: how many terms stand for each leaf, where only every so manieth term was placed.
    """
    chain, bottom = _chain(root)
    steps = {tuple(_shape(c) for c in addends) for addends in chain}
    if not bottom.children:
        return "one term"
    base = tuple(_shape(c) for c in bottom.children)
    if not steps:
        return _balanced(bottom, spacing)
    if len(steps) > 1:
        return _uneven(chain, bottom, spacing)
    (step,) = steps
    if set(step) == {"."} and set(base) == {"."}:
        if len(step) == 1 and len(base) <= 2:
            return "sequential" + _ordered(chain, bottom)
        if len(base) in (len(step), len(step) + 1):
            return f"{len(step) * spacing} at a time into the accumulator" + _ordered(chain, bottom)
    if len(set(step)) == 1 and set(base) == set(step):
        part = next(iter(chain[0]))
        count = len(chain) * len(step) + len(base)
        at_once = f", {len(step)} at a time" if len(step) > 1 else ""
        return f"{count} sums of {part.size * spacing} in a chain{at_once}{_each(part, spacing)}"
    return _uneven(chain, bottom, spacing)


def _uneven(chain: Sequence[tuple[Node, ...]], bottom: Node, spacing: int) -> str:
    """A chain whose parts are not alike, as when a length is cut into pieces that do not divide it."""
    first = list(bottom.children) if bottom.children[0].children else [bottom]
    parts = first + [c for addends in chain for c in addends]
    sizes = [c.size * spacing for c in parts]
    if any(len(addends) > 1 for addends in chain) or max(sizes) == spacing:
        return f"irregular chain of {len(chain) + 1} steps"
    largest = max(parts, key=lambda c: c.size)
    return f"{len(parts)} sums of {min(sizes)} to {max(sizes)} in a chain{_each(largest, spacing)}"


def _each(part: Node, spacing: int) -> str:
    return f" (each: {describe(part, spacing)})" if part.size > 2 else ""


def order_class(root: Node) -> str:
    """sequential, fused, blocked, pairwise, strided, tree or irregular."""
    words = describe(root).split(" (each")[0]
    if words.startswith("irregular"):
        return "irregular"
    if words.startswith(("sequential", "pairwise")):
        return words.split(",")[0]
    if "into the accumulator" in words or words.endswith("at once"):
        return "fused"
    if "in a chain" in words:
        return "blocked"
    return "strided" if "strided" in words else "tree"


def chain_places(root: Node) -> tuple[int, int, int] | None:
    """Terms of the first three partial sums of a chain of them: the first two are added, then the third. None where
    the sum is no chain of partial sums."""
    chain, bottom = _chain(root)
    parts = sorted(bottom.children, key=lambda c: c.leaves[0]) + [c for addends in reversed(chain) for c in addends]
    if len(parts) < 3 or not chain or not bottom.children[0].children:
        return None
    return parts[0].leaves[0], parts[1].leaves[0], parts[2].leaves[0]


def _chain(root: Node) -> tuple[list[tuple[Node, ...]], Node]:
    """What each step of the chain adds, from the last to the first, and the node in which the chain begins."""
    steps: list[tuple[Node, ...]] = []
    node = root
    while True:
        kids = sorted(node.children, key=lambda c: -c.size)
        if len(kids) < 2 or not kids[0].children or kids[0].size == kids[1].size:
            return steps, node
        steps.append(tuple(kids[1:]))
        node = kids[0]


def _shape(node: Node) -> str:
    return "(" + "".join(sorted(_shape(c) for c in node.children)) + ")" if node.children else "."


def _ordered(chain: Sequence[tuple[Node, ...]], bottom: Node) -> str:
    at = [bottom.leaves, *(tuple(i for c in addends for i in c.leaves) for addends in reversed(chain))]
    forward = [i for group in at for i in sorted(group)]
    if forward == sorted(forward):
        return ""
    backward = [i for group in at for i in sorted(group, reverse=True)]
    return ", last term first" if backward[::-1] == sorted(forward) else ", terms out of order"


def _balanced(node: Node, spacing: int) -> str:
    kids = node.children
    if all(not c.children for c in kids):
        return f"{len(kids)} at once" if len(kids) > 2 else "2 terms"
    if len({_shape(c) for c in kids}) > 1:
        return f"irregular: {len(kids)} unlike sums at once"
    if _pairwise(node):
        return "pairwise"
    halved = _halves(node)
    parts, pairs = (halved, ", added in pairs") if len(halved) > 2 else (kids, "")
    return f"{len(parts)} {_pattern(parts)} sums of {parts[0].size * spacing}{pairs}{_each(parts[0], spacing)}"


def _halves(node: Node) -> tuple[Node, ...]:
    """The partial sums that are added in pairs, and their sums in pairs again."""
    kids = node.children
    if len(kids) == 2 and all(c.children for c in kids) and _shape(kids[0]) == _shape(kids[1]):
        return (*_halves(kids[0]), *_halves(kids[1]))
    return (node,)


def _pairwise(node: Node) -> bool:
    if not node.children:
        return True
    left, right = node.children if len(node.children) == 2 else (node, None)
    return (
        right is not None
        and left.size == right.size
        and left.leaves[-1] < right.leaves[0]
        and (_pairwise(left) and _pairwise(right))
    )


def _pattern(kids: Sequence[Node]) -> str:
    ordered = sorted(kids, key=lambda c: c.leaves[0])
    if all(a.leaves[-1] < b.leaves[0] for a, b in itertools.pairwise(ordered)):
        return "contiguous"
    strides = {b - a for c in kids for a, b in itertools.pairwise(c.leaves)}
    return f"strided (by {strides.pop()})" if len(strides) == 1 else "interleaved"
