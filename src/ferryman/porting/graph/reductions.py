"""Rules of reductions along one dimension: means, sums, norms, variances, normalisations, softmax."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import fx

from ferryman.porting.graph.nodes import name_of, value
from ferryman.porting.graph.rules import NoRuleError, axis_of, rule
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


def _mean_of(n: Normal, term: Term, axis: int) -> Term:
    return mean_of(n.pool, term, axis)


@rule("mean")
def _mean(n: Normal, node: fx.Node, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Term | None:
    return _mean_of(n, n.of(x), axis_of(value(x), dim)) if keepdim else None


@rule("sum")
def _sum(n: Normal, node: fx.Node, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Term | None:
    axis = axis_of(value(x), dim)
    size = value(x).shape[axis]
    if not keepdim or not isinstance(size, int):
        return None
    return n.pool.scaled(float(size), _mean_of(n, n.of(x), axis))


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
    return n.pool.scaled(float(size) ** 0.5, n.pool.power(_mean_of(n, squared, axis), Fraction(1, 2)))


def _variance(n: Normal, x: Term, axis: int) -> Term:
    centred = n.pool.total(0.0, [(x, 1.0), (_mean_of(n, x, axis), -1.0)])
    return _mean_of(n, n.pool.power(centred, Fraction(2)), axis)


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
    variance = n.pool.scaled(size / (size - taken), _variance(n, n.of(x), axis))
    return variance if name_of(node) == "var" else n.pool.product(1.0, [(variance, Fraction(1, 2), True)])


@rule("layer_norm")
def _layer_norm(
    n: Normal,
    node: fx.Node,
    x: Any,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Term | None:
    if len(shape) != 1:
        return None
    h, pool = n.of(x), n.pool
    centred = pool.total(0.0, [(h, 1.0), (_mean_of(n, h, -1), -1.0)])
    spread = pool.total(eps, [(_variance(n, h, -1), 1.0)])
    factors = [(centred, Fraction(1)), (spread, Fraction(-1, 2))]
    if weight is not None:
        factors.append((n.of(weight), Fraction(1)))
    normed = pool.product_of(1.0, factors)
    return normed if bias is None else pool.total(0.0, [(normed, 1.0), (n.of(bias), 1.0)])


@rule("rms_norm")
def _rms_norm(n: Normal, node: fx.Node, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Term:
    if len(shape) != 1 or eps is None:
        raise NoRuleError
    h, pool = n.of(x), n.pool
    squared = _mean_of(n, pool.power(h, Fraction(2)), -1)
    factors = [(h, Fraction(1)), (pool.total(eps, [(squared, 1.0)]), Fraction(-1, 2))]
    if weight is not None:
        factors.append((n.of(weight), Fraction(1)))
    return pool.product_of(1.0, factors)


@rule("softmax")
def _softmax(n: Normal, node: fx.Node, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Term | None:
    axis = axis_of(value(x), dim)
    return n.pool.call("softmax", (axis,), n.of(x)) if axis == -1 else None
