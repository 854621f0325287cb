"""A region of a graph, and the call of an op that may take its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ferryman.errors import ArgumentError
from ferryman.ops.primitive import Primitive
from ferryman.porting.graph.normal import value


@dataclass(frozen=True)
class Argument:
    """A tensor that the op gets: a node, or a view of one. view: ("squeeze" | "unsqueeze", dim), or ("rows", 0): all
    dimensions but the last as one."""

    node: fx.Node
    view: tuple[str, int] | None = None

    def of(self, x: Any) -> Any:
        """The argument, from what the node computes."""
        if self.view is None:
            return x
        kind, dim = self.view
        return x.squeeze(dim) if kind == "squeeze" else x.unsqueeze(dim) if kind == "unsqueeze" else x.flatten(0, -2)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A region and the call in its place.

    args: in schema order: `Argument`, number, flag, text or None. outputs: node of the region by index of the op's
    output; an output that nobody reads is absent. casts: a result is
    cast to the dtype that the graph has. region: all nodes that the op computes, in order.
    """

    op: Primitive
    args: tuple[Any, ...]
    outputs: Mapping[int, fx.Node]
    region: tuple[fx.Node, ...]
    casts: bool = False
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
    made = candidate.op.meta(*args)
    results = made if isinstance(made, tuple) else (made,)
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
    made = torch.empty_strided(
        [hint(n) for n in x.shape], [hint(n) for n in x.stride()], dtype=x.dtype, device="meta"
    )
    return argument.of(made)
