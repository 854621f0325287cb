"""The normal form of a graph: functions, methods and operators of PyTorch as `terms`.

A rule knows one function of PyTorch. What has no rule is a leaf: nothing is said of it. Dimensions are counted from the
last one, so that a pattern traced on a matrix fits tensors of any rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from ferryman.porting.graph.terms import Pool, Term, bare

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Functions that move or select values and compute none.
VIEWS = frozenset(
    (
        "getitem",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "chunk",
        "split",
        "narrow",
        "cat",
        "concat",
        "stack",
        "flatten",
        "expand",
        "repeat_interleave",
        "contiguous",
        "view",
        "reshape",
        "mT",
        "T",
        "t",
        "expand_as",
        "unflatten",
        "swapaxes",
    )
)
CASTS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as"])
SAME = frozenset(["contiguous", "identity"])
_RULES: dict[str, Callable[..., Term | None]] = {}
_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "negative": "neg",
    "logistic": "sigmoid",
    "expit": "sigmoid",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "vector_norm": "norm",
    "linalg_vector_norm": "norm",
}


def value(node: Any) -> Any:
    """A node's example; the thing itself where it is no node."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def name_of(node: fx.Node) -> str:
    """The function's plain name: "mul" for ``a * b``, ``torch.mul`` and ``a.mul(b)``."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        if node.target is getattr and len(node.args) > 1:
            return str(node.args[1])
        name = getattr(node.target, "__name__", "")
        if name == "__get__":  # a property of a tensor
            return str(getattr(getattr(node.target, "__self__", None), "__name__", ""))
    else:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    name = name.removeprefix("_") if name in ("_softmax",) else name
    return _ALIASES.get(name, name)


def hinted(item: Any) -> float | None:
    """A number: of one that is an argument of the compiled function, what it was when the graph was made."""
    if isinstance(item, torch.SymFloat):
        return float(item.node.hint) if item.node.hint is not None else None
    return float(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else None


def rule(*names: str) -> Callable[[Callable[..., Term | None]], Callable[..., Term | None]]:
    def enter(function: Callable[..., Term | None]) -> Callable[..., Term | None]:
        for name in names:
            _RULES[name] = function
        return function

    return enter


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
            term_rule = _RULES.get(name_of(node))
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
                raise _NoRuleError
            return self.pool.const(number)
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return self.pool.const(item)
        raise _NoRuleError

    def factor(self, item: Any, power: int | Fraction = 1) -> tuple[Term, Fraction, bool]:
        """An operand of a product. What is read elsewhere too stays whole, so that a pattern finds it as it was named;
        a soft rounding between two multiplications is left out."""
        return self.operand(item), Fraction(power), isinstance(item, fx.Node) and uses(item) == 1

    def operand(self, item: Any) -> Term:
        """An operand, without the soft rounding of a product that is read nowhere else."""
        term = self.of(item)
        product = term.kind == "round" and not term.args[1] and bare(term).kind == "mul"
        return bare(term) if product and uses(item) == 1 else term


class _NoRuleError(Exception):
    """A call beyond what its rule knows."""


def _attempt(term_rule: Callable[..., Term | None], normal: Normal, node: fx.Node) -> Term | None:
    try:
        return term_rule(normal, node, *node.args, **node.kwargs)
    except (_NoRuleError, TypeError):  # TypeError: arguments that the rule does not take
        return None


def widening(node: fx.Node) -> bool:
    """A cast, or nothing, that keeps every value of a float tensor."""
    if name_of(node) in SAME:
        return True
    if name_of(node) not in CASTS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = value(node.args[0]), value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype or widens(before.dtype, after.dtype)


def widens(before: torch.dtype, after: torch.dtype) -> bool:
    if before not in _MANTISSA or after not in _MANTISSA:
        return False
    return after in (torch.float32, torch.float64) and _MANTISSA[after] >= _MANTISSA[before]


def uses(node: fx.Node) -> int:
    """How often a value is read, casts that keep it counted as itself."""
    total = 0
    for user in node.users:
        if widening(user):
            total += uses(user)
        else:
            total += sum(1 for item in user.all_input_nodes if item is node)
            total += sum(1 for a in user.args if a is node) > 1  # x * x reads it twice
    return total


def axis_of(x: torch.Tensor, dim: Any) -> int:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise _NoRuleError
    return dim - x.dim() if dim >= 0 else dim


# Arithmetic ---------------------------------------------------------------------------------------------


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
    _RULES[_name] = _power(_exponent)


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
    _RULES[_name] = _function(_name)


@rule("silu")
def _silu(n: Normal, node: fx.Node, x: Any, inplace: bool = False) -> Term | None:
    if inplace:
        return None
    g = n.of(x)
    return n.pool.product_of(1.0, [(g, Fraction(1)), (n.pool.call("sigmoid", (), g), Fraction(1))])


@rule("gelu")
def _gelu(n: Normal, node: fx.Node, x: Any, approximate: str = "none") -> Term:
    g, pool = n.of(x), n.pool
    if approximate == "none":
        inner = pool.call("erf", (), pool.scaled(0.5**0.5, g))
    else:
        cubed = pool.product_of(1.0, [(g, Fraction(3))])
        polynomial = pool.total(0.0, [(g, 1.0), (cubed, 0.044715)])
        inner = pool.call("tanh", (), pool.scaled(math.sqrt(2 / math.pi), polynomial))
    return pool.product_of(0.5, [(g, Fraction(1)), (pool.total(1.0, [(inner, 1.0)]), Fraction(1))])


# Casts --------------------------------------------------------------------------------------------------


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
        raise _NoRuleError
    return n.of(x)


# Reductions ---------------------------------------------------------------------------------------------


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
        raise _NoRuleError
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


# Views --------------------------------------------------------------------------------------------------


@rule("getitem")
def _getitem(n: Normal, node: fx.Node, x: Any, index: Any) -> Term | None:
    if isinstance(index, int) and not isinstance(value(x), torch.Tensor):
        return n.part(x, index)
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(index, int) and not isinstance(index, bool):
        return n.pool.call("picked", (index,), n.of(x))
    if not all(i is None or i is Ellipsis or isinstance(i, slice) for i in items):
        return None
    tensor, term = value(x), n.of(x)
    named = sum(isinstance(i, slice) for i in items)
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    before = 0
    axes: list[int] = []
    for item in items:
        if item is Ellipsis:
            before += tensor.dim() - named
        elif item is None:
            axes.append(before + len(axes))
        else:
            bounds = (item.start, item.stop, item.step)
            if not all(b is None or (isinstance(b, int) and not isinstance(b, bool)) for b in bounds):
                return None
            axis = before - tensor.dim()
            term = n.cut(term, tensor.shape[axis], axis, item.start or 0, item.stop, item.step or 1)
            before += 1
    rank = tensor.dim()
    for axis in axes:
        rank += 1
        term = n.pool.call("unsqueeze", (axis - rank,), term)
    return term


@rule("narrow")
def _narrow(n: Normal, node: fx.Node, x: Any, dim: int, start: Any, length: Any) -> Term | None:
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    axis = axis_of(value(x), dim)
    return n.cut(n.of(x), value(x).shape[axis], axis, start, start + length, 1)


@rule("unsqueeze")
def _unsqueeze(n: Normal, node: fx.Node, x: Any, dim: int) -> Term:
    rank = value(x).dim() + 1
    return n.pool.call("unsqueeze", (dim - rank if dim >= 0 else dim,), n.of(x))


@rule("cat")
def _cat(n: Normal, node: fx.Node, tensors: Any, dim: Any = 0, axis: Any = None) -> Term:
    where = axis_of(value(tensors[0]), dim if axis is None else axis)
    return n.pool.call("cat", (where,), *(n.of(t) for t in tensors))


@rule("stack")
def _stack(n: Normal, node: fx.Node, tensors: Any, dim: int = 0) -> Term:
    rank = value(tensors[0]).dim() + 1
    return n.pool.call("stack", (dim - rank if dim >= 0 else dim,), *(n.of(t) for t in tensors))


@rule("flatten")
def _flatten(n: Normal, node: fx.Node, x: Any, start_dim: int = 0, end_dim: int = -1) -> Term:
    first, last = axis_of(value(x), start_dim), axis_of(value(x), end_dim)
    return n.pool.call("flatten", (first, last), n.of(x))


@rule("view", "reshape")
def _reshape(n: Normal, node: fx.Node, x: Any, *shape: Any) -> Term | None:
    before, after = value(x), value(node)
    if tuple(before.shape) == tuple(after.shape):
        return n.of(x)
    rank = after.dim()
    if before.dim() == rank + 1 and tuple(before.shape[:-2]) == tuple(after.shape[:-1]):
        return n.pool.call("flatten", (-2, -1), n.of(x))
    inner = n.of(x)
    if inner.kind == "expanded" and before.dim() == 5 and rank == 4:  # keys of a group, repeated
        times, source = inner.args
        if after.shape[1] == before.shape[1] * before.shape[2]:
            return n.pool.call("repeat", times, source[0])
    return None


@rule("expand")
def _expand(n: Normal, node: fx.Node, x: Any, *sizes: Any) -> Term | None:
    before, after, inner = value(x), value(node), n.of(x)
    if before.dim() != after.dim():
        return None
    moved = [i for i in range(after.dim()) if before.shape[i] != after.shape[i]]
    if not moved:
        return inner
    if inner.kind == "unsqueeze" and inner.args[0] == (-3,) and moved == [2] and isinstance(after.shape[2], int):
        return n.pool.call("expanded", (after.shape[2],), *inner.args[1])
    return None


@rule("repeat_interleave")
def _repeat(n: Normal, node: fx.Node, x: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Term | None:
    if not isinstance(repeats, int) or axis_of(value(x), dim) != -3:
        return None
    return n.pool.call("repeat", (repeats,), n.of(x))


_STATE = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "inference_mode"}
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem, operator.ipow)


def disturbs(node: fx.Node) -> bool:
    """Whether a node writes over a tensor, or changes a mode, so that no computation may be moved past it."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if node.target in _IN_PLACE or name in _STATE or node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return False  # and_, or_, not_
    schema = getattr(node.target, "_schema", None)
    return (name.endswith("_") and not name.endswith("__")) or bool(schema is not None and schema.is_mutable)
