"""Rules of arithmetic: sums, products, powers, functions of one value, casts, and what changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import fx

from ferryman.porting.graph.nodes import CASTS, FLOATS, hinted, value, widens
from ferryman.porting.graph.rules import RULES, NoRuleError, rule
from ferryman.porting.graph.terms import Term

if TYPE_CHECKING:
    from ferryman.porting.graph.normal import Normal


@rule("add", "radd")
def _add(n: Normal, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> Term:
    return n.pool.total(0.0, [(n.operand(a), 1.0), (n.operand(b), float(alpha))])


@rule("sub")
def _sub(n: Normal, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> Term:
    return n.pool.total(0.0, [(n.operand(a), 1.0), (n.operand(b), -float(alpha))])


@rule("rsub")
def _rsub(n: Normal, node: fx.Node, a: Any, b: Any) -> Term:
    return n.pool.total(0.0, [(n.operand(b), 1.0), (n.operand(a), -1.0)])


@rule("mul", "rmul")
def _mul(n: Normal, node: fx.Node, a: Any, b: Any) -> Term:
    return n.pool.product(1.0, [n.factor(a), n.factor(b)])


@rule("div")
def _div(n: Normal, node: fx.Node, a: Any, b: Any) -> Term:
    return n.pool.product(1.0, [n.factor(a), n.factor(b, -1)])


@rule("rtruediv", "rdiv")
def _rdiv(n: Normal, node: fx.Node, a: Any, b: Any) -> Term:
    return n.pool.product(1.0, [n.factor(b), n.factor(a, -1)])


def _power(power: Fraction) -> Callable[..., Term]:
    def build(n: Normal, node: fx.Node, x: Any) -> Term:
        return n.pool.product(1.0, [n.factor(x, power)])

    return build


for _name, _exponent in {
    "square": Fraction(2),
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "reciprocal": Fraction(-1),
}.items():
    RULES[_name] = _power(_exponent)


@rule("pow")
def _pow(n: Normal, node: fx.Node, x: Any, exponent: Any) -> Term | None:
    if isinstance(exponent, fx.Node) or hinted(exponent) is None:
        return None
    return n.pool.product(1.0, [n.factor(x, Fraction(exponent).limit_denominator(12))])


@rule("neg")
def _neg(n: Normal, node: fx.Node, x: Any) -> Term:
    return n.pool.scaled(-1.0, n.of(x))


def _function(name: str) -> Callable[..., Term]:
    def build(n: Normal, node: fx.Node, x: Any) -> Term:
        return n.pool.call(name, (), n.of(x))

    return build


for _name in ("exp", "tanh", "erf", "sigmoid", "log", "relu"):
    RULES[_name] = _function(_name)


@rule(*CASTS)
def _cast(n: Normal, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Term | None:
    before, after = value(x), value(node)
    if before.dtype not in FLOATS or before.device != after.device:
        return None
    if before.dtype == after.dtype or widens(before.dtype, after.dtype):
        return n.of(x)
    return n.pool.round(after.dtype, True, n.of(x))


@rule("contiguous")
def _same(n: Normal, node: fx.Node, x: Any, **kwargs: Any) -> Term | None:
    return n.of(x)


@rule("dropout")
def _dropout(n: Normal, node: fx.Node, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Term:
    if (training and p != 0.0) or inplace:
        raise NoRuleError
    return n.of(x)
