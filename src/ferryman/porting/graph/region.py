"""A region of a graph, and the call of an op that may take its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ferryman.errors import ArgumentError
from ferryman.ops.primitive import Primitive
from ferryman.porting.graph.nodes import hinted, value


@dataclass(frozen=True)
class Argument:
    """A tensor that the op gets: a node, or a view of one. view: ("squeeze" | "unsqueeze", dim); ("rows", 0): all
    dimensions but the last as one; ("t", 0): a matrix transposed."""

    node: fx.Node
    view: tuple[str, int] | None = None

    def of(self, x: Any) -> Any:
        """The argument, from what the node computes."""
        if self.view is None:
            return x
        kind, dim = self.view
        if kind == "rows":
            return x.flatten(0, -2)
        return x.t() if kind == "t" else x.squeeze(dim) if kind == "squeeze" else x.unsqueeze(dim)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A region and the call in its place.

    args: in schema order: `Argument`, number, flag, text or None. outputs: node of the region by index of the op's
    output; an output that nobody reads is absent. casts: a result is
    cast to the dtype that the graph has. given: nodes that the region reads and the op does not, which follow from
    sizes alone. note: what was seen on the way. region: all nodes that the op computes, in order.
    """

    op: Primitive
    args: tuple[Any, ...]
    outputs: Mapping[int, fx.Node]
    region: tuple[fx.Node, ...]
    casts: bool = False
    given: tuple[fx.Node, ...] = ()
    note: str = ""

    @property
    def inputs(self) -> dict[str, Argument]:
        return {n: a for n, a in zip(self.op.names, self.args, strict=True) if isinstance(a, Argument)}

    @property
    def options(self) -> dict[str, Any]:
        return {n: a for n, a in zip(self.op.names, self.args, strict=True) if not isinstance(a, Argument)}

    @property
    def where(self) -> str:
        return self.outputs[min(self.outputs)].name


def checked(candidate: Candidate) -> str | None:
    """Why the op refuses the arguments, or gives results of another shape or dtype."""
    args = [meta_of(a) if isinstance(a, Argument) else a for a in candidate.args]
    try:
        candidate.op.check(*args)
    except ArgumentError as error:
        return str(error)
    returned = candidate.op.meta(*args)
    results = returned if isinstance(returned, tuple) else (returned,)
    for index, node in candidate.outputs.items():
        want, shape = value(node), tuple(hint(n) for n in value(node).shape)
        if tuple(results[index].shape) != shape:
            return f"{candidate.op.outputs[index]} would be {tuple(results[index].shape)}; the graph has {shape}"
        if results[index].dtype != want.dtype and not candidate.casts:
            return f"{candidate.op.outputs[index]} would be {results[index].dtype}; the graph has {want.dtype}"
    return None


def hint(size: Any) -> int:
    """A size as a number: of a dynamic one, what it was when the graph was made."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    known = getattr(node, "hint", None)
    return 8 if known is None else int(known)


def meta_of(argument: Argument) -> torch.Tensor:
    """An argument without data, of the sizes that the graph was made with."""
    x = value(argument.node)
    meta = torch.empty_strided([hint(n) for n in x.shape], [hint(n) for n in x.stride()], dtype=x.dtype, device="meta")
    return argument.of(meta)


def symbols_of(size: Any) -> set[Any]:
    """The symbols that a dynamic size is made of."""
    return set(getattr(getattr(getattr(size, "node", None), "expr", None), "free_symbols", ()))


@dataclass
class Draw:
    """Sizes and values of one run. sizes: by what the graph's symbol or literal is."""

    seed: int
    fill: str
    scale: float
    small: Mapping[int, int] = field(default_factory=dict)
    symbols: Mapping[Any, int] = field(default_factory=dict)

    def size(self, n: Any) -> int:
        if isinstance(n, int):
            return self.small.get(n, n)
        node = getattr(n, "node", None)
        expr = getattr(node, "expr", None)
        if expr is None:
            return hint(n)
        return int(expr.xreplace({s: self.symbols.get(s, 8) for s in expr.free_symbols}))


_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def computed(nodes: Iterable[fx.Node], draw: Draw) -> dict[fx.Node, Any]:
    """What nodes compute that follow from sizes alone."""
    known: dict[fx.Node, Any] = {}
    for node in nodes:
        known[node] = evaluated(node, known, draw, None)
    return known


def evaluated(node: fx.Node, known: Mapping[fx.Node, Any], draw: Draw, wide: torch.dtype | None) -> Any:
    """One node's result. wide: the dtype in the place of every floating one that the program names, if any."""

    def read(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return known[item] if item in known else _sized(value(item), draw)
        if isinstance(item, (tuple, list)):
            return type(item)(read(i) for i in item)
        if isinstance(item, dict):
            return {k: read(v) for k, v in item.items()}
        if isinstance(item, slice):
            return slice(read(item.start), read(item.stop), read(item.step))
        if isinstance(item, torch.dtype) and item in _FLOAT_DTYPES and wide is not None:
            return wide
        if isinstance(item, int) and not isinstance(item, bool):
            return draw.small.get(item, item)
        return item

    args, kwargs = read(tuple(node.args)), read(dict(node.kwargs))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _sized(item: Any, draw: Draw) -> Any:
    if isinstance(item, torch.SymFloat):
        return hinted(item)
    return item if isinstance(item, (float, bool, torch.Tensor)) or item is None else draw.size(item)
