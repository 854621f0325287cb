"""The normal form of a graph: functions, methods and operators of PyTorch as `terms`.

A function that has a rule becomes what it computes. What has no rule is a leaf: nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ferryman.dispatch.proposals import proposals
from ferryman.porting.graph import arithmetic, reductions, views  # noqa: F401 - they enter their rules
from ferryman.porting.graph.nodes import CASTS, FLOATS, HALF, SAME, VIEWS, hinted, name_of, uses, value
from ferryman.porting.graph.rules import RULES, NoRuleError, axis_of
from ferryman.porting.graph.terms import Pool, Term, bare


class Normal:
    """Terms of every node of a graph, and the nodes of every term."""

    def __init__(self, graph: fx.Graph, pool: Pool | None = None) -> None:
        self.pool = pool or Pool()
        self.term: dict[fx.Node, Term] = {}
        self.nodes: dict[Term, list[fx.Node]] = {}
        self._parts: dict[fx.Node, list[Term]] = {}
        for node in graph.nodes:
            self._enter(node)

    def _enter(self, node: fx.Node) -> None:
        example = value(node)
        if not isinstance(example, torch.Tensor):
            if isinstance(example, (tuple, list)) and node.op in ("call_function", "call_method"):
                self._divide(node)
            return
        computed = None
        if node.op in ("call_function", "call_method") and example.dtype in FLOATS:
            term_rule = _rules().get(name_of(node))
            if term_rule is not None:
                computed = _attempt(term_rule, self, node)
        term = self.pool.leaf(node) if computed is None else computed
        if computed is not None and example.dtype in HALF and not self._exact(node):
            term = self.pool.round(example.dtype, False, computed)
        self.term[node] = term
        self.nodes.setdefault(term, []).append(node)

    @staticmethod
    def _exact(node: fx.Node) -> bool:
        name = name_of(node)
        return name in VIEWS or name in CASTS or name in SAME or name == "neg"

    def _divide(self, node: fx.Node) -> None:
        """chunk and split: the parts, which getitem names."""
        name, args, kwargs = name_of(node), node.args, node.kwargs
        if name not in ("chunk", "split", "tensor_split", "unbind") or not args or not isinstance(args[0], fx.Node):
            return
        x = value(args[0])
        dim = kwargs.get("dim", args[2] if len(args) > 2 else args[1] if name == "unbind" and len(args) > 1 else 0)
        if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or name == "unbind":
            return
        parts, start = [], 0
        axis = dim - x.dim() if dim >= 0 else dim
        for part in value(node):
            size = part.shape[axis]
            if not isinstance(size, int):
                return
            parts.append(self.cut(self.of(args[0]), x.shape[axis], axis, start, start + size, 1))
            start += size
        self._parts[node] = parts

    def part(self, node: fx.Node, index: int) -> Term | None:
        parts = self._parts.get(node)
        return None if parts is None else parts[index]

    def cut(self, term: Term, size: Any, axis: int, start: int, stop: int | None, step: int) -> Term:
        """``term[start:stop:step]`` along an axis; the whole is the term itself."""
        if isinstance(size, int):
            start, stop, step = slice(start, stop, step).indices(size)
            if (start, stop, step) == (0, size, 1):
                return term
            if stop >= size:
                stop = None
        elif (start or 0) == 0 and stop is None and step == 1:
            return term
        return self.pool.call("slice", (axis, start, stop, step), term)

    def of(self, item: Any) -> Term:
        if isinstance(item, fx.Node):
            if item in self.term:
                return self.term[item]
            number = hinted(value(item))
            if number is None:
                raise NoRuleError
            return self.pool.const(number)
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return self.pool.const(item)
        raise NoRuleError

    def axis(self, x: Any, dim: Any) -> int:
        """A dimension of a node's tensor, counted from the last."""
        return axis_of(value(x), dim)

    def mean(self, term: Term, axis: int) -> Term:
        return reductions.mean_of(self.pool, term, axis)

    def variance(self, term: Term, axis: int) -> Term:
        centred = self.pool.total(0.0, [(term, 1.0), (self.mean(term, axis), -1.0)])
        return self.mean(self.pool.power(centred, Fraction(2)), axis)

    def factor(self, item: Any, power: int | Fraction = 1) -> tuple[Term, Fraction, bool]:
        """An operand of a product. What is read elsewhere too stays whole, so that a pattern finds it as it was named;
        a soft rounding between two multiplications is left out."""
        return self.operand(item), Fraction(power), isinstance(item, fx.Node) and uses(item) == 1

    def operand(self, item: Any) -> Term:
        """An operand, without the soft rounding of a product that is read nowhere else."""
        term = self.of(item)
        product = term.kind == "round" and not term.args[1] and bare(term).kind == "mul"
        return bare(term) if product and uses(item) == 1 else term


@lru_cache(maxsize=1)
def _rules() -> Mapping[str, Callable[..., Any]]:
    """Those of arithmetic and of views, and what ops' folders say of the functions that they are."""
    return {**dict(proposals("rules")), **RULES}


def _attempt(term_rule: Callable[..., Term | None], normal: Normal, node: fx.Node) -> Term | None:
    try:
        return term_rule(normal, node, *node.args, **node.kwargs)
    except (NoRuleError, TypeError):  # TypeError: arguments that the rule does not take
        return None
