"""Expressions in normal form: what a graph computes, whichever way it is written.

A term is interned: equal expressions are one object. Products are a coefficient and powers of factors, so that ``x *
x``, ``x.square()`` and ``x.pow(2)`` are one term, and so are ``x / sqrt(v)``, ``x * rsqrt(v)`` and ``x *
v.pow(-0.5)``. Sums have two operands or more and a constant, in no order. Widening a float changes no value and
leaves no trace; narrowing is a "round" term: hard where the program casts, soft where an operation on 16-bit tensors
rounds its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_serials = itertools.count()


@dataclass(eq=False, frozen=True)
class Term:
    """kind "leaf" (args: a node), "const", "mul" (coefficient, ((term, power), ..)), "add" (constant, ((term,
    coefficient), ..)), "round" (dtype, hard, term), or the name of a call (parameters, terms)."""

    kind: str
    args: tuple[Any, ...]
    serial: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.args!r}"


class Pool:
    """The terms of one graph, or of one pattern."""

    def __init__(self) -> None:
        self._known: dict[Any, Term] = {}

    def make(self, kind: str, *args: Any) -> Term:
        key = (kind, args)
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = Term(kind, args, next(_serials))
        return term

    def known(self, kind: str, *args: Any) -> Term | None:
        return self._known.get((kind, args))

    def leaf(self, node: Any) -> Term:
        return self.make("leaf", node)

    def const(self, value: float) -> Term:
        return self.make("const", float(value))

    def call(self, name: str, parameters: tuple[Any, ...], *terms: Term) -> Term:
        return self.make(name, parameters, terms)

    def round(self, dtype: Any, hard: bool, term: Term) -> Term:
        if term.kind == "round" and term.args[0] == dtype:
            return term if term.args[1] or not hard else self.make("round", dtype, True, term.args[2])
        return self.make("round", dtype, hard, term)

    def product(self, coefficient: float, factors: Iterable[tuple[Term, Fraction, bool]]) -> Term:
        """Of (factor, power, open). A factor that is a product itself is opened where that is asked, or where it is a
        power of one thing; else it stays whole."""
        powers: dict[Term, Fraction] = {}
        for term, power, open_ in factors:
            if term.kind == "const":
                coefficient *= term.args[0] ** float(power)
                continue
            if term.kind == "mul" and (open_ or (term.args[0] == 1.0 and len(term.args[1]) == 1)):
                opened = _raised(term, power)
                if opened is not None:
                    coefficient *= opened[0]
                    for inner, raised in opened[1]:
                        powers[inner] = powers.get(inner, Fraction(0)) + raised
                    continue
            powers[term] = powers.get(term, Fraction(0)) + power
        return self.product_of(coefficient, powers.items())

    def power(self, term: Term, power: Fraction) -> Term:
        return self.product(1.0, [(term, power, False)])

    def product_of(self, coefficient: float, powers: Iterable[tuple[Term, Fraction]]) -> Term:
        left = tuple(sorted(((t, p) for t, p in powers if p), key=lambda pair: pair[0].serial))
        if not left or coefficient == 0.0:
            return self.const(coefficient)
        if coefficient == 1.0 and len(left) == 1 and left[0][1] == 1:
            return left[0][0]
        return self.make("mul", coefficient, left)

    def scaled(self, coefficient: float, term: Term) -> Term:
        """A number times a term: a product keeps its factors."""
        if term.kind == "mul":
            return self.product_of(coefficient * term.args[0], term.args[1])
        return self.product_of(coefficient, [(term, Fraction(1))])

    def total(self, constant: float, operands: Iterable[tuple[Term, float]]) -> Term:
        """A sum. Operands that are sums stay whole: a residual stream would become one sum of all layers."""
        coefficients: dict[Term, float] = {}
        for term, coefficient in operands:
            if term.kind == "const":
                constant += coefficient * term.args[0]
                continue
            if term.kind == "mul" and term.args[0] != 1.0:
                coefficient, term = coefficient * term.args[0], self.product_of(1.0, term.args[1])
            coefficients[term] = coefficients.get(term, 0.0) + coefficient
        left = tuple(sorted(((t, c) for t, c in coefficients.items() if c), key=lambda pair: pair[0].serial))
        if not left:
            return self.const(constant)
        if constant == 0.0 and len(left) == 1:
            return self.scaled(left[0][1], left[0][0])
        return self.make("add", constant, left)


def _raised(term: Term, power: Fraction) -> tuple[float, list[tuple[Term, Fraction]]] | None:
    """A product to a power, factor by factor; None where that is another function: sqrt(x**2) is not x."""
    coefficient, factors = term.args
    if power.denominator != 1:
        if coefficient < 0 or len(factors) > 1:
            return None
        if any(p.denominator == 1 and p.numerator % 2 == 0 for _, p in factors):
            return None
    return coefficient ** float(power), [(inner, p * power) for inner, p in factors]


def soft(term: Term) -> bool:
    return term.kind == "round" and not term.args[1]


def bare(term: Term) -> Term:
    """Without the roundings around it."""
    while term.kind == "round":
        term = term.args[2]
    return term
