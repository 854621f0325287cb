"""Where a pattern fits a graph: a binding of its arguments to nodes, its scalars to numbers.

Products and sums fit in any order. A soft rounding of the program that the pattern lacks is left out, as Inductor
leaves it out in a fused kernel; a hard one must stand in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from ferryman.porting.graph.nodes import HALF, value
from ferryman.porting.graph.normal import Normal
from ferryman.porting.graph.patterns import Pattern, parts
from ferryman.porting.graph.reductions import mean_of
from ferryman.porting.graph.terms import Term, bare, soft

_MOST_STEPS = 20_000  # of one attempt: products of many factors have many orders


@dataclass(frozen=True)
class Bound:
    """What an argument is: a term of the graph, and the view that makes the argument of it."""

    term: Term
    view: tuple[str, int] | None = None


@dataclass(frozen=True)
class Binding:
    terms: Mapping[str, Bound]
    scalars: Mapping[str, float]
    sizes: tuple[tuple[int, int], ...] = ()  # (number of the pattern, of the graph), to be compared at the end
    roots: Mapping[int, Term] | None = None
    skipped: int = 0
    storage: torch.dtype | None = None


class Matcher:
    """One pattern on one graph."""

    def __init__(self, pattern: Pattern, normal: Normal) -> None:
        self.pattern, self.normal = pattern, normal
        self.variable = {term: name for name, term in pattern.variables.items()}
        self.steps = 0

    def at(self, node: fx.Node) -> Iterator[Binding]:
        """Bindings under which the first root is what a node computes."""
        example = value(node)
        if not isinstance(example, torch.Tensor) or (example.dtype in HALF) != self.pattern.half:
            return
        term = self.normal.term[node]
        if term.kind == "round":
            term = term.args[2]
        root = self.pattern.roots[0]
        if root.kind != term.kind and not (root.kind == "mul" and term.kind == "round"):
            return
        self.steps = 0
        start = Binding({}, {}, roots={}, storage=example.dtype)
        for binding in self._fit(root, term, start):
            if all(name in binding.terms for name in self._needed(0)) and self._sizes_hold(binding):
                yield binding

    def rest(self, binding: Binding, index: int, node: fx.Node) -> Iterator[Binding]:
        """Bindings, going on from one, under which another root is what a node computes."""
        example = value(node)
        if not isinstance(example, torch.Tensor) or example.dtype != binding.storage:
            return
        term = self.normal.term[node]
        self.steps = 0
        for extended in self._fit(self.pattern.roots[index], term.args[2] if term.kind == "round" else term, binding):
            if self._sizes_hold(extended):
                yield extended

    def _needed(self, index: int) -> set[str]:
        names, queue = set(), [self.pattern.roots[index]]
        while queue:
            term = queue.pop()
            if term in self.variable:
                names.add(self.variable[term])
            queue += parts(term)
        return names

    # One term in another -------------------------------------------------------------------------------

    def _fit(self, p: Term, t: Term, b: Binding) -> Iterator[Binding]:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            return
        if p in self.variable:
            yield from self._bind(self.variable[p], t, b)
            return
        for index, root in enumerate(self.pattern.roots):
            if index and index not in (b.roots or {}) and (p is root or (p.kind == "round" and p.args[2] is root)):
                b = replace(b, roots={**(b.roots or {}), index: t})
        if p.kind == "round":
            if t.kind == "round" and t.args[0] == b.storage:
                yield from self._fit(p.args[2], t.args[2], b)
            return
        if p.kind == "unsqueeze" and p.args[1][0] in self.variable:
            yield from self._view(p, t, b)
            return
        if t.kind == "round" and (soft(t) or b.skipped < self.pattern.skips):
            more = b if soft(t) else replace(b, skipped=b.skipped + 1)
            yield from self._fit(p, t.args[2], more)
            return
        if p.kind == "const":
            if t.kind == "const":
                yield from self._number(p.args[0], t.args[0], b)
        elif p.kind == "mul":
            yield from self._product(p, t, b)
        elif p.kind == "add":
            yield from self._sum(p, t, b)
        elif p.kind == t.kind and p.kind != "leaf" and len(p.args[1]) == len(t.args[1]):
            for extended in self._parameters(p.args[0], t.args[0], b):
                yield from self._each(p.args[1], t.args[1], extended)

    def _each(self, ps: tuple[Term, ...], ts: tuple[Term, ...], b: Binding) -> Iterator[Binding]:
        if not ps:
            yield b
            return
        for extended in self._fit(ps[0], ts[0], b):
            yield from self._each(ps[1:], ts[1:], extended)

    def _bind(self, name: str, t: Term, b: Binding, view: tuple[str, int] | None = None) -> Iterator[Binding]:
        known = b.terms.get(name)
        if known is not None:
            if known == Bound(t, view):
                yield b
            return
        if t.kind != "const" and t in self.normal.nodes:
            yield replace(b, terms={**b.terms, name: Bound(t, view)})

    def _view(self, p: Term, t: Term, b: Binding) -> Iterator[Binding]:
        """An argument with a dimension put in: the graph's tensor may lack the call, and have the dimension."""
        (axis,), (inner,) = p.args
        name = self.variable[inner]
        if t.kind == "unsqueeze" and t.args[0] == (axis,):
            yield from self._bind(name, t.args[1][0], b)
        nodes = self.normal.nodes.get(t)
        shape = value(nodes[0]).shape if nodes else ()
        rank = self.pattern.ranks[name]
        if len(shape) == rank + 1 and shape[axis] == 1:
            yield from self._bind(name, t, b, ("squeeze", axis))
        elif len(shape) == rank - 1:
            yield from self._bind(name, t, b, ("unsqueeze", 0))

    def _number(self, p: float, t: float, b: Binding) -> Iterator[Binding]:
        """Equal numbers; one that stands for a scalar binds it."""
        for name, stands in self.pattern.scalars.items():
            if math.isclose(p, stands, rel_tol=1e-12):
                known = b.scalars.get(name)
                if known is None:
                    yield replace(b, scalars={**b.scalars, name: t})
                elif known == t:
                    yield b
                return
        if math.isclose(p, t, rel_tol=1e-12):
            yield b

    def _parameters(self, ps: tuple[Any, ...], ts: tuple[Any, ...], b: Binding) -> Iterator[Binding]:
        if len(ps) != len(ts):
            return
        sizes = b.sizes
        for p, t in zip(ps, ts, strict=True):
            if p is None or t is None or not isinstance(t, int) or p not in self.pattern.sizes or p < 3:
                if p != t:
                    return
            else:
                sizes = (*sizes, (p, t))
        yield replace(b, sizes=sizes)

    def _sizes_hold(self, b: Binding) -> bool:
        """Each size of the pattern is, in the graph, that of an argument that it may come from."""
        for p, t in b.sizes:
            fits = False
            for name, axis, divisor in self.pattern.sizes[p]:
                known = b.terms.get(name)
                if known is None:
                    continue
                shape = value(self.normal.nodes[known.term][0]).shape
                size = shape[axis] if len(shape) >= -axis else None
                fits = fits or (isinstance(size, int) and size % divisor == 0 and size // divisor == t)
            if not fits:
                return False
        return True

    # In any order --------------------------------------------------------------------------------------

    def _product(self, p: Term, t: Term, b: Binding) -> Iterator[Binding]:
        if t.kind == "mul":
            coefficient, factors = t.args
        else:
            coefficient, factors = 1.0, ((t, Fraction(1)),)
        yield from self._factors(list(p.args[1]), list(factors), p.args[0], coefficient, b)

    def _factors(
        self, ps: list[tuple[Term, Fraction]], ts: list[tuple[Term, Fraction]], pc: float, tc: float, b: Binding
    ) -> Iterator[Binding]:
        if not ps:
            if not ts:
                yield from self._number(pc, tc, b)
            return
        if len(ps) == 1 and (len(ts) > 1 or not math.isclose(pc, tc)):  # the last takes what is left, if it has a name
            whole = self.normal.pool.product_of(tc / pc, ts) if pc else None
            if whole is not None and ps[0][1] == 1 and whole in self.normal.nodes:
                yield from self._fit(ps[0][0], whole, b)
        p, power = ps[0]
        for i, (t, raised) in enumerate(ts):
            if raised == power:
                for extended in self._fit(p, t, b):
                    yield from self._factors(ps[1:], ts[:i] + ts[i + 1 :], pc, tc, extended)

    def _sum(self, p: Term, t: Term, b: Binding) -> Iterator[Binding]:
        if t.kind != "add":
            return
        for extended in self._number(p.args[0], t.args[0], b):
            yield from self._operands(list(p.args[1]), list(t.args[1]), extended)

    def _operands(self, ps: list[tuple[Term, float]], ts: list[tuple[Term, float]], b: Binding) -> Iterator[Binding]:
        if len(ps) != len(ts):
            return
        if not ps:
            yield b
            return
        p, weight = ps[0]
        for i, (t, scale) in enumerate(ts):
            rest = ts[:i] + ts[i + 1 :]
            if math.isclose(weight, scale):
                for extended in self._fit(p, t, b):
                    yield from self._operands(ps[1:], rest, extended)
            elif p in self.variable and (scaled := self.normal.pool.scaled(scale / weight, t)) in self.normal.nodes:
                for extended in self._fit(p, scaled, b):
                    yield from self._operands(ps[1:], rest, extended)
            elif (built := self._substituted(p, b)) is not None and (
                self.normal.pool.scaled(weight, built) is self.normal.pool.scaled(scale, t)
            ):
                yield from self._operands(ps[1:], rest, b)

    def _substituted(self, p: Term, b: Binding) -> Term | None:
        """The pattern's term with the arguments put in, where all are bound: of an argument that is a number times
        something, the number has come out of the means."""
        pool = self.normal.pool
        if p in self.variable:
            known = b.terms.get(self.variable[p])
            return None if known is None or known.view is not None else known.term
        if p.kind == "mul":
            factors = [(self._substituted(t, b), power, False) for t, power in p.args[1]]
            if any(t is None for t, _, _ in factors):
                return None
            return pool.product(p.args[0], factors)  # type: ignore[arg-type]
        if p.kind == "add" and p.args[0] == 0.0:
            operands = [(self._substituted(t, b), c) for t, c in p.args[1]]
            return None if any(t is None for t, _ in operands) else pool.total(0.0, operands)  # type: ignore[arg-type]
        if p.kind == "mean":
            inner = self._substituted(p.args[1][0], b)
            return None if inner is None else mean_of(pool, inner, p.args[0][0])
        return None


__all__ = ["Binding", "Bound", "Matcher", "bare"]
