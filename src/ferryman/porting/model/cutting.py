"""Cutting parts out of a function: which values a part may be of, and the statements that are left."""

from __future__ import annotations

import ast
import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ferryman.porting.model import cut_rules, ordering, pairs, part_losses, part_steps, recurrent, source
from ferryman.porting.model.cut_rules import more_than_one_of, place_of, places_of_own, recognised, results_of, within
from ferryman.porting.model.flow import Scan
from ferryman.porting.model.leaf import inputs_of
from ferryman.porting.model.nodes import Node, Statement
from ferryman.porting.model.part import PREFIX, Part
from ferryman.porting.model.part_proof import OF_SEVERAL, Proving
from ferryman.porting.model.part_shape import MOST_LEAVES, closest, is_row, products, stacks, turning, with_numbers
from ferryman.porting.model.statements import read, reads_next, reads_sizes, stored
from ferryman.porting.model.trees import blocks, copied, swap

_MOST_CUTS, _MOST_PARTS, _MOST_OPS = 24, 12, 48
_PASSES = (True, False), (False, True), (False, False)
_MORE_CUTS = 8  # of which no part is one
# What only moves, casts, scales or adds is no op: a part of nothing else is not worth a proof
_PLAIN = {
    *("Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "USub", "UAdd", "Not", "And", "Or", "Eq", "NotEq", "Lt", "Gt"),
    *("add", "sub", "mul", "div", "neg", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "clone", "detach", "squeeze", "unsqueeze"),
    *("expand", "expand_as", "repeat", "size", "chunk", "split", "unbind", "narrow", "select", "item", "dim", "t"),
    *("Subscript", "Tuple", "List", "len", "int", "bool", "range", "getattr", "numel", "swapaxes", "view_as"),
    *("T", "mT"),
}


@dataclass
class Search(Proving):
    """Looks for parts in one function's tree, and puts them there."""

    tree: ast.FunctionDef = field(kw_only=True)
    skipped: set[Any] = field(kw_only=True)
    fresh: frozenset[str] = field(kw_only=True, default=frozenset())  # children with a role
    free: frozenset[str] = field(kw_only=True, default=frozenset())  # children whose call has no effect but its result
    relied: set[str] = field(default_factory=set)  # those past whose calls a part has gone
    parts: list[Part] = field(default_factory=list)
    turned: bool = False  # what a part computes, or takes, may come at another time than in the code
    whole: bool = False  # a part has two products of values, or is a loop that carries a state
    large: bool = False  # only what has two products of values: what stands between is no part of its own then
    joined: bool = False  # only what is a product with a matrix of ours and takes all that this gives
    moving: bool = False  # what stands inside an earlier statement, which goes, may be read where the part stands
    turning: bool = False  # only what is a loop that carries a state
    choosing: bool = False  # only what a choice gives, and what follows from it

    def run(self) -> bool:
        self.scan = self._scan()
        if any(isinstance(n, ast.Nonlocal | ast.Global | ast.Yield | ast.Await) for n in ast.walk(self.tree)):
            return False
        self.turning = any(isinstance(n, ast.For) for n in ast.walk(self.tree))
        for self.moving in (False, True):
            for body in list(blocks(self.tree)) if self.turning else ():
                while len(self.parts) < _MOST_PARTS and self._one(body):
                    pass
        self.turning = False
        self._choices()
        ends = {*part_losses.WHOLE, part_losses.SUMS}
        losses = any(getattr(n, "attr", getattr(n, "id", "")) in ends for n in ast.walk(self.tree))
        for (self.joined, self.large), self.moving in itertools.product(_PASSES, (False, True)):
            self.scan.joins = self.joined
            if self.joined and not losses:
                continue
            for body in list(blocks(self.tree)):
                while len(self.parts) < _MOST_PARTS and self._one(body):
                    pass
        if self.parts:
            ast.fix_missing_locations(self.tree)
        return bool(self.parts)

    def _scan(self, facts: dict[str, Any] | None = None) -> Scan:
        kind = None if self.module is None else type(self.module)
        return Scan(self.function, self.tree, self.self_name, self.module, kind, self.free, facts={**(facts or {})})

    def _choices(self) -> None:
        """Put parts that give two values in their places."""
        bodies = list(blocks(self.tree)) if pairs.chooses(self.tree) else []
        self.choosing = bool(bodies)
        for self.moving, body in itertools.product((False, True), bodies):
            while len(self.parts) < _MOST_PARTS and self._one(body):
                pass
            for index, fresh in list(pairs.places(body)):
                whole = [*body]
                body[index : index + 1] = fresh
                if len(self.parts) < _MOST_PARTS and self._one(body):
                    self.scan = self._scan(self.scan.facts)
                    break
                body[:] = whole
        self.choosing = False

    def _one(self, body: list[ast.stmt]) -> bool:
        """Put one part in a block's place; whether there is one."""
        self.statements, self.scan.asked = list(self.scan.block(body)), {}
        loops = (n for n in ast.walk(self.tree) if isinstance(n, ast.For | ast.AsyncFor | ast.While))
        self.repeated = any(body is inner for loop in loops for inner in blocks(loop))
        self.stored = functools.cache(lambda index: frozenset(stored(body[index])))
        self.reads = functools.cache(functools.partial(self._reads, body))
        kind = type(self.module)
        # of one input it may be nearly a norm: what a part is of several, no leaf is
        alone = self.module is not None and not self.module._modules and len(inputs_of(kind)) < 2
        results = results_of(body[-1], self.statements) if alone else set()
        first = source.innermost(getattr(kind, "forward", None))
        method = alone and self.function is not first  # whose result may be a part of the module's
        for statement in reversed(self.statements):
            for root, e in statement.ops:
                if self.choosing and (alone or not isinstance(e, ast.Tuple) or not pairs.is_choice(root)):
                    continue
                if alone and root not in results and not self._no_norm(root):
                    continue
                if root.kind != "op" or (isinstance(e, ast.Slice | ast.Tuple | ast.List) and not self.choosing):
                    continue
                if self.turning and recurrent.loop_of(root) is None:
                    continue
                if not part_losses.may_end(root) if self.joined else self._served(e) and not self.turning:
                    continue
                if self.large and products(root.inside(frozenset())) < 2:
                    continue
                if root.whole is not None and self._has_role(root.whole):
                    continue
                for leaves in (cut for cut in self._cuts(root, statement) if not cut_rules.splits(root, cut)):
                    if alone and not self.large and any(n.fact() and not n.counts() for n in leaves):
                        continue  # what it is given is not all that it computes of
                    if method and not self.turning and not self._of_several(root, leaves):
                        continue
                    if self._taken(body, statement, root, e, leaves):
                        self.whole |= self.large or self.turning
                        return True
        return False

    def _no_norm(self, root: Node) -> bool:
        """Whether it is something of a module whose result is another that nobody takes for a norm in it."""
        several = self.module is not None and len(self.module._parameters) + len(self.module._buffers) > 1
        experts = stacks(root.inside(frozenset())) == 2
        return self.large or self.joined or self.turning or experts or (several and is_row(root))

    def _served(self, e: ast.expr) -> bool:
        """Whether it, or what it stands in, is served by its spelling."""
        return any(within(place_of(e), place) for place in self.skipped) or recognised(e, self.function)

    def _has_role(self, call: ast.expr) -> bool:
        """Whether it calls a child that is served by itself."""
        assert isinstance(call, ast.Call)
        return ast.unparse(call.func).partition(".")[2] in self.fresh

    def _of_several(self, root: Node, leaves: tuple[Node, ...]) -> bool:
        """Whether it is of two values that flow or more, and has what parts of several have."""
        inside = root.inside(frozenset(leaves))
        return sum(not n.fact() for n in leaves) > 1 and bool({n.label for n in inside} & OF_SEVERAL)

    # Cuts

    def _cuts(self, root: Node, statement: Statement) -> list[tuple[Node, ...]]:
        """Sets of values that a node is computed of and that can be read where it stands, the farthest first."""
        loop = recurrent.loop_of(root)
        here = {node for node, e in statement.ops if not isinstance(e, ast.Slice | ast.Tuple | ast.List)}
        here |= {n for s in self.statements if s.index < statement.index for n in s.binds}
        before = self._before(statement) if self.moving else []
        moved = {n for s in before for n, e in s.ops if s.binds and not isinstance(e, ast.Slice | ast.Tuple)} - here
        here |= moved
        if loop is not None:
            return recurrent.cuts(root, loop, lambda n: n in here or n in statement.names) if self.turning else []
        # what its name has no more can be read where what put another value there goes with the part
        past = {n for n in here if n.kind == "op" and n not in statement.names} - {n for n, _ in statement.ops}
        known: dict[Node, list[frozenset[Node]]] = {}

        def cuts(node: Node) -> list[frozenset[Node]]:
            if node.kind in ("self", "constant"):
                return [frozenset()]
            if node not in known:
                known_here = (
                    node in statement.names or node in here or (node.kind == "leaf" and isinstance(node.tree, ast.Name))
                )
                whole_slice = isinstance(node.tree, ast.Slice) and not node.children
                merged = [frozenset[Node]()] if node.children or whole_slice else []
                for child in node.children:
                    # in order: which of the many are kept must not depend on where objects lie
                    both = dict.fromkeys(a | b for a, b in itertools.product(merged, cuts(child)))
                    merged = [cut for cut in both if len(cut) <= MOST_LEAVES]
                    merged.sort(key=lambda cut: (len(cut), len(cut & past)))
                    whole = frozenset(merged)
                    more = [cut for cut in merged[_MOST_CUTS:] if not more_than_one_of(whole, cut)]
                    merged = merged[:_MOST_CUTS] + more[:_MORE_CUTS]
                # a number of the module's own settings is no value that flows
                flows = not node.counts() and not (node.written and node in past)
                flows = flows and (
                    frozenset() not in merged or any(isinstance(n.value, Tensor) for n in node.inside(frozenset()))
                )
                if known_here and places_of_own(node):
                    merged = []
                known[node] = merged if node.kind == "op" else []
                known[node] += [frozenset({node})] if known_here and (flows or not node.children) else []
            return known[node]

        order: dict[Node, int] = {}
        for i, (node, _) in enumerate(statement.ops):
            order.setdefault(node, i)
        sized = {c: root.inside(c) for c in cuts(root) if c and root not in c}
        chosen = [c for c, inside in sized.items() if self._worth(inside)]
        turns = [] if self.large else turning(root, lambda n: n in here or n in statement.names)
        turns = [c for c in turns if self._worth(root.inside(c))]
        chosen, sized = [*turns, *(c for c in chosen if c not in turns)], sized | {c: root.inside(c) for c in turns}
        if self.large:
            chosen = [c for c in chosen if len(c) > 2 and products(sized[c]) == 2]
            for ours in (False, True):
                nearest = closest(root, lambda n: n in here or n in statement.names, ours)
                if nearest is not None and nearest not in chosen and self._worth(root.inside(nearest)):
                    chosen, sized[nearest] = [*chosen, nearest], root.inside(nearest)
            stepped = part_steps.cut_of(root, lambda n: n in here or n in statement.names)
            if stepped is not None and stepped not in chosen and self._worth(root.inside(stepped)):
                chosen, sized[stepped] = [*chosen, stepped], root.inside(stepped)
            self.stepped |= {stepped} if stepped is not None else set()
        if self.joined:
            chosen = [c for c in chosen if part_losses.joins(sized[c]) and not any(n.of_ours() for n in c)]
            chosen = [c for c in chosen if c & moved] if self.moving else chosen
        elif self.moving:
            chosen = [c for c in chosen if c & moved and (len(c) == 1 or {n.label for n in sized[c]} & OF_SEVERAL)]
        for cut in [c for c in chosen if len(c) > 2 and {n.label for n in sized[c]} & OF_SEVERAL]:
            numbered = with_numbers(root, cut, lambda n: n in here or n in statement.names)
            if numbered is not None and numbered not in chosen:
                chosen, sized[numbered] = [*chosen, numbered], root.inside(numbered)
        chosen.sort(
            key=lambda c: (
                len(c) > 2,
                c not in turns,
                len(c & moved) if self.large else 0,  # a local before what stands inside of others
                len(c & past) > 0,
                sum(n.counts() for n in c) > 1,
                -sum(n.kind == "op" for n in sized[c]),
            )
        )
        # numbers last: a proof has none of them
        return [tuple(sorted(c, key=lambda n: (n.fact(), order.get(n, -1), ast.unparse(n.tree)))) for c in chosen]

    def _worth(self, inside: list[Node]) -> bool:
        computed = [n for n in inside if n.kind == "op"]
        if len(computed) > _MOST_OPS or not {n.label for n in computed} - _PLAIN:
            return False
        if any(n.wide for n in inside):
            return False  # float64 is asked for, and no op has it
        return (
            self.choosing
            or stacks(inside) == 2
            or products(inside) == 2
            or not any(within(place, place_of(n.tree)) for n in computed for place in self.skipped)
        )

    # What is put there

    def _taken(
        self, body: list[ast.stmt], statement: Statement, root: Node, e: ast.expr, leaves: tuple[Node, ...]
    ) -> bool:
        name = f"{PREFIX}{len(self.parts)}"
        given = self._given(body, statement, root, e, leaves)
        relied = None if given is None else self._keeps(body, statement, root, e, leaves, given)
        if given is None or relied is None:
            return False
        own = ast.Name(self.self_name, ast.Load()) if self.self_name else ast.Constant(None)
        call = ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [own, *given], []), e)
        changed = swap(body[statement.index], {id(e): call})
        taken = zip(given, leaves, strict=True)
        past = {n.id for n, x in taken if isinstance(n, ast.Name) and x not in statement.names}
        fresh = self._without(body, statement, root, leaves, changed, past)
        part = None if fresh is None else self.shown(root, leaves)
        if part is None or fresh is None:
            return False
        self.parts.append(part)
        self.relied |= relied
        stands = ordering.stands(self.statements, statement, root, leaves, given)
        self.turned |= self.choosing or self.turning or not stands
        body[:] = [ast.fix_missing_locations(s) for s in fresh]
        return True

    def _keeps(
        self,
        body: list[ast.stmt],
        statement: Statement,
        root: Node,
        e: ast.expr,
        leaves: tuple[Node, ...],
        given: list[ast.expr],
    ) -> set[str] | None:
        """The children of which it must be known that their calls have no effects, for the part to stand there; None
        where it may not."""
        scan = self.scan
        try:
            for scan.strict in (True, False):
                scan.relied = set()
                if ordering.keeps(scan, self.statements, body, statement, root, e, leaves, given, self.moved):
                    return scan.relied
        finally:
            scan.strict = False
        return None

    def _given(
        self, body: list[ast.stmt], statement: Statement, root: Node, e: ast.expr, leaves: tuple[Node, ...]
    ) -> list[ast.expr] | None:
        """What reads each value where the part stands: a local, also one that what goes puts another value in; or the
        expression itself."""
        self.moved: dict[int, tuple[int, ast.expr]] = {}
        inside = set(root.inside(frozenset(leaves)))
        before = [s for s in self.statements if s.index < statement.index]
        within = {id(n) for n in ast.walk(e)}
        occurs = {node: tree for node, tree in reversed(statement.ops) if id(tree) in within}
        given: list[ast.expr] = []
        for leaf in leaves:
            if leaf in statement.names:
                given.append(ast.Name(statement.names[leaf], ast.Load()))
            elif leaf in occurs:
                given.append(occurs[leaf])
            elif (leaf.kind == "self" or (self.turning and leaf.fact())) and recurrent.still_read(leaf, self.tree):
                given.append(copied(leaf.tree))
            else:
                first, name = next(((s.index, s.binds[leaf]) for s in before if leaf in s.binds), (-1, ""))
                if first < 0 and isinstance(leaf.tree, ast.Name) and leaf.kind == "leaf":
                    name = leaf.tree.id
                stores = [i for i in range(first + 1, statement.index) if name in self.stored(i)]
                going = {s.index for s in before if set(s.binds) & inside}
                moved = self._moved(body, statement, leaf, going) if self.moving and not name else None
                if moved is None and (not name or set(stores) - going):
                    return None
                given.append(moved or ast.Name(name, ast.Load()))
        return given

    def _before(self, statement: Statement) -> list[Statement]:
        return [s for s in self.statements if s.index < statement.index]

    def _moved(self, body: list[ast.stmt], statement: Statement, leaf: Node, going: set[int]) -> ast.expr | None:
        """What stands inside a statement that goes, if it reads the same where the part stands."""
        inner = ((s.index, e) for s in self._before(statement) if s.index in going for n, e in s.ops if n is leaf)
        at, e = next(inner, (-1, None))
        if e is None:
            return None
        names = set(read(e)) & self.scan.locals
        if any(names & self.stored(i) for i in range(at, statement.index)):
            return None
        lost = {n for i in range(at) if i in going for n in self.stored(i)}
        if names & lost:
            return None
        copy = copied(e)
        self.moved[id(copy)] = at, e
        return copy

    def _reads(self, body: list[ast.stmt]) -> tuple[set[str], set[str]]:
        """(names that are read after a block, names that functions inside read, but for one that it stands in)."""
        outer = Counter(read(self.tree)) - Counter(n for s in body for n in read(s))
        outer = Counter[str]() if cut_rules.ends(body, self.tree) else outer
        nested = [f for f in ast.walk(self.tree) if isinstance(f, ast.FunctionDef | ast.Lambda) and f is not self.tree]
        nested = [f for f in nested if isinstance(f, ast.Lambda) or not any(b is body for b in blocks(f))]
        return set(outer), {n for f in nested for n in read(f)}

    def _without(
        self,
        body: list[ast.stmt],
        statement: Statement,
        root: Node,
        leaves: tuple[Node, ...],
        changed: ast.stmt,
        past: set[str],
    ) -> list[ast.stmt] | None:
        """The block with a changed statement, less those that only the part read; None where another reads them. past:
        names that the part reads as they were before what goes."""
        inside = root.before(leaves)
        bound = {s.index: s.binds for s in self.statements}
        fresh: list[ast.stmt | None] = [*body]
        fresh[statement.index] = changed
        outer, closures = self.reads()
        # what only moves or casts stays where others read its sizes
        plain = {s.index for s in self.statements if not {n.label for n, _ in s.ops} - _PLAIN - {""}}
        sized: set[int] = set()
        for index in range(statement.index - 1, -1, -1):
            inner = inside & bound.get(index, {}).keys()
            if not inner or all(node.fact() for node in inner):  # sizes may be read by others, too
                continue
            for name in bound[index].values():
                outside = name in outer and not cut_rules.replaced(name, fresh[index + 1 :], self.tree)
                looped = self.repeated and any(name in read(s) for s in fresh[:index] if s is not None)
                mine = (changed, read(changed).count(name) == 1) if name in past else (None, False)
                if outside and all(node.kind == "self" or node.fact() for node in inner):
                    sized.add(index)
                    continue
                if outside or looped or name in closures:
                    return None
                if reads_next(name, fresh[index + 1 :], *mine):
                    rest = (s for s in fresh[index + 1 :] if s is not None)
                    if index not in plain or not all(reads_sizes(name, s) for s in rest):
                        return None
                    sized.add(index)
            fresh[index] = fresh[index] if index in sized else None
        return [s for s in fresh if s is not None]
