"""Rules of reductions along one dimension: means, sums, norms, variances."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import fx

from ferryman.porting.graph.nodes import name_of, value
from ferryman.porting.graph.rules import axis_of, rule
from ferryman.porting.graph.terms import Pool, Term

if TYPE_CHECKING:
    from ferryman.porting.graph.normal import Normal


def mean_of(pool: Pool, term: Term, axis: int) -> Term:
    """A number comes out of a mean, and so out of a product in it that is a power of one thing."""
    if term.kind == "mul":
        coefficient, factors = term.args
        if len(factors) == 1 and factors[0][0].kind == "mul" and factors[0][1].denominator == 1:
            inner, power = factors[0]
            coefficient *= inner.args[0] ** int(power)
            factors = ((pool.product_of(1.0, inner.args[1]), power),)
            factors = pool.product(1.0, [(*factors[0], False)])
            factors = factors.args[1] if factors.kind == "mul" else ((factors, Fraction(1)),)
        if coefficient != 1.0:
            return pool.scaled(coefficient, pool.call("mean", (axis,), pool.product_of(1.0, factors)))
    return pool.call("mean", (axis,), term)


@rule("mean")
def _mean(n: Normal, node: fx.Node, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Term | None:
    return n.mean(n.of(x), axis_of(value(x), dim)) if keepdim else None


@rule("sum")
def _sum(n: Normal, node: fx.Node, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Term | None:
    axis = axis_of(value(x), dim)
    size = value(x).shape[axis]
    if not keepdim or not isinstance(size, int):
        return None
    return n.pool.scaled(float(size), n.mean(n.of(x), axis))


@rule("norm")
def _norm(
    n: Normal,
    node: fx.Node,
    x: Any,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    ord: Any = None,
) -> Term | None:
    axis = axis_of(value(x), dim)
    size = value(x).shape[axis]
    if not keepdim or (p if ord is None else ord) not in (2, 2.0, "fro") or not isinstance(size, int):
        return None
    squared = n.pool.power(n.of(x), Fraction(2))
    return n.pool.scaled(float(size) ** 0.5, n.pool.power(n.mean(squared, axis), Fraction(1, 2)))


@rule("var", "std")
def _var(
    n: Normal,
    node: fx.Node,
    x: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: Any = None,
) -> Term | None:
    axis = axis_of(value(x), dim)
    size, taken = value(x).shape[axis], int(unbiased) if correction is None else correction
    if not keepdim or not isinstance(size, int) or not isinstance(taken, int) or size <= taken:
        return None
    variance = n.pool.scaled(size / (size - taken), n.variance(n.of(x), axis))
    return variance if name_of(node) == "var" else n.pool.product(1.0, [(variance, Fraction(1, 2), True)])
